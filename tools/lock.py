"""Rewrites the resolved part of ci/constraints-cpu.txt: `make lock`, with Python 3.11.

pip resolves together, without installing: the chosen versions, every distribution of the checkout
with all its extras (the CUDA ones apart), and the maintainers' tools.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from environment import CONSTRAINTS, ROOT, members, requirement_lines

RESOLVED = "# Resolved: written by `make lock`.\n"


def asked_for(folder: Path) -> str:
    """A distribution's folder with all extras that a machine without a GPU may install."""
    with (folder / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"].get("optional-dependencies", {})
    return f"{folder}[{','.join(name for name in extras if name != 'cuda')}]"


def resolve(chosen: str, report: Path, python: str) -> dict[str, str]:
    """Name -> version of everything that the checkout and the chosen pins need together.

    Raises:
        subprocess.CalledProcessError: the resolver found no solution; pip has printed why.
    """
    constraints = report.with_suffix(".txt")
    constraints.write_text(chosen)
    lines = requirement_lines(constraints)
    pins = [line for line in lines if re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    with (ROOT / "pyproject.toml").open("rb") as file:
        tools = tomllib.load(file)["dependency-groups"]["dev"]
    command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--constraint", str(constraints), "--report", str(report)]
    subprocess.run([*command, *pins, *tools, *map(asked_for, members())], check=True, cwd=ROOT)
    found = {}
    for item in json.loads(report.read_text())["install"]:
        if "dir_info" not in item["download_info"]:
            name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
            found[name] = item["metadata"]["version"].split("+")[0]
    chosen_names = {pin.split("==")[0] for pin in pins}
    return {name: version for name, version in found.items() if name not in chosen_names}


def main() -> int:
    """The exit status: 0 when the file holds a new resolution, else pip's."""
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"the versions are resolved on Python 3.11; this is {sys.version.split()[0]}")
    chosen = CONSTRAINTS.read_text().split(RESOLVED)[0]
    with tempfile.TemporaryDirectory() as folder:
        # An environment of its own: what is installed elsewhere must not sway the result.
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        try:
            found = resolve(chosen, Path(folder, "report.json"), str(Path(folder, "bin", "python")))
        except subprocess.CalledProcessError as error:
            return error.returncode
    lines = [f"{name}=={version}\n" for name, version in sorted(found.items())]
    CONSTRAINTS.write_text(chosen + RESOLVED + "".join(lines))
    print(f"{CONSTRAINTS.relative_to(ROOT)}: {len(lines)} resolved versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
