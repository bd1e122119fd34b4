"""A new system under packages/, with the skeleton that all systems share.

    python tools/new_system.py graph_cache

The skeleton is `tools/template_system`, a small system that works: one operation, one kernel, one
experiment. Its tests, architecture test, install-alone check and kernels pass at once; replace its
parts one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import keyword
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "tools" / "template_system"
NAME = "template_system"
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "dist", "build")


def create(name: str, root: Path = ROOT) -> Path:
    """The folder of the new system `name` below root/packages; written whole or not at all.

    Raises:
        ValueError: the name is no lower-case identifier, or Python or a package has it already.
    """
    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        raise ValueError(f"NAME must be a lower-case identifier like graph_cache; got {name!r}")
    if name in sys.stdlib_module_names or name in (NAME, "septet_shared"):
        raise ValueError(f"NAME must not be a module that exists; got {name!r}")
    target = root / "packages" / name
    if target.exists():
        raise ValueError(f"NAME must be new; {target.relative_to(root)} exists")
    ruff = _ruff()
    # Built beside its place and renamed: an interrupted run leaves no half package.
    building = target.with_name(f".{name}.new")
    shutil.rmtree(building, ignore_errors=True)
    try:
        shutil.copytree(TEMPLATE, building, ignore=IGNORED)
        (building / "src" / NAME).rename(building / "src" / name)
        for path in building.rglob("*"):
            if path.is_file():
                text = path.read_text()
                text = text.replace(NAME, name).replace("template-system", name.replace("_", "-"))
                path.write_text(text)
        # Imports are sorted by name, and the name is new.
        for words in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
            command = [*ruff, *words, "--config", str(ROOT / "pyproject.toml"), str(building)]
            subprocess.run(command, check=True)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _ruff() -> list[str]:
    """The command of ruff: of this interpreter, or of the checkout's environment.

    Raises:
        ValueError: neither has it.
    """
    for python in (sys.executable, str(ROOT / ".venv" / "bin" / "python")):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([python, "-m", "ruff", "--version"], check=True, capture_output=True)
            return [python, "-m", "ruff"]
    raise ValueError(
        f"ruff sorts the new package's imports, and {sys.executable} has none. This builds an "
        "environment that does:\nmake new-system NAME=graph_cache"
    )


def main() -> int:
    """Exit code: 0, or 2 with a line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="folder and import name, like graph_cache")
    try:
        target = create(parser.parse_args().name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {target.relative_to(ROOT)}; add its line to the table in README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
