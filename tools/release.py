"""A release of one distribution, checked from end to end, committed and tagged, never uploaded.

    python tools/release.py ecorec                  drops .devN from the version
    python tools/release.py ecorec --version 0.2.0
    python tools/release.py ecorec --dry-run        everything but the commit and the tag

Order: clean tree, the tests of the system alone, version and changelog written, wheel and source
archive built into dist/, metadata read, the wheels installed into a fresh environment with the
quickstart run from another folder, commit, tag `<system>-v<version>`. When a step fails, the
files are as they were before.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.M)
UNRELEASED = re.compile(r"^## Unreleased\n+((?:(?!## ).*\n?)+)", re.M)


class Refused(RuntimeError):
    """The release cannot be made; the message says why and what to do."""


def folder_of(system: str) -> Path:
    """The folder of a distribution: shared, or a system under packages."""
    folder = ROOT / "shared" if system == "shared" else ROOT / "packages" / system
    if not (folder / "pyproject.toml").is_file():
        known = [
            "shared",
            *sorted(p.parent.name for p in ROOT.glob("packages/[!.]*/pyproject.toml")),
        ]
        raise Refused(f"SYSTEM must be one of {', '.join(known)}; got {system!r}")
    return folder


def next_version(text: str, asked: str | None) -> str:
    """The version to release, given an __init__.py and what was asked for.

    Raises:
        Refused: no version stands there, or the asked one is not above it.
    """
    found = VERSION.search(text)
    if found is None:
        raise Refused('__init__.py must have a line __version__ = "..."')
    present = Version(found[1])
    try:
        wanted = Version(asked) if asked else Version(present.base_version)
    except InvalidVersion:
        raise Refused(f"--version must be like 0.2.0; got {asked!r}") from None
    if wanted <= present:
        raise Refused(f"the version must be above {present}; got {wanted}: pass --version")
    return str(wanted)


def dated(changelog: str, version: str, day: str) -> str:
    """The changelog with its unreleased part under the version and the day.

    Raises:
        Refused: there is no `## Unreleased`, or nothing stands under it.
    """
    found = UNRELEASED.search(changelog)
    if found is None or not found[1].strip():
        raise Refused("CHANGELOG.md must say under `## Unreleased` what changed")
    return changelog.replace("## Unreleased", f"## {version} - {day}", 1)


def metadata_problems(wheel: Path) -> list[str]:
    """Lines of a wheel's metadata that point at one place instead of naming a version range."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(path).decode().partition("\n\n")[0].splitlines()
    return [line for line in lines if line.startswith("Requires-Dist") and " @ " in line]


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> None:
    """Run a command in the open; Refused when it fails."""
    words = [str(word) for word in command]
    print("$", " ".join(words), flush=True)
    if code := subprocess.run(words, cwd=cwd, check=False).returncode:
        raise Refused(f"`{' '.join(words)}` ended with {code}")


def git(*words: str) -> str:
    """What a git command prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"`git {' '.join(words)}`: {done.stderr.strip()}")
    return done.stdout.strip()


def release(system: str, asked: str | None, dry_run: bool) -> str:
    """The tag of the release, made (or, with dry_run, ready to be made)."""
    folder = folder_of(system)
    if dirty := git("status", "--porcelain"):
        raise Refused(f"the tree must be clean: commit or stash first\n{dirty}")
    (init,) = folder.glob("src/*/__init__.py")
    changelog = folder / "CHANGELOG.md"
    before = {path: path.read_text() for path in (init, changelog)}
    version = next_version(before[init], asked)
    tag = f"{system}-v{version}"
    if git("tag", "--list", tag):
        raise Refused(f"the tag {tag} exists: pass a higher --version")
    after = {
        init: VERSION.sub(f'__version__ = "{version}"', before[init]),
        changelog: dated(before[changelog], version, datetime.date.today().isoformat()),
    }
    if system != "shared":
        run([sys.executable, "-m", "hatch", "run", f"+system={system}", "alone:test"])
    done = False
    try:
        for path, text in after.items():
            path.write_text(text)
        run([sys.executable, "-m", "hatch", "build", ROOT / "dist"], cwd=folder)
        wheels = sorted((ROOT / "dist").glob(f"*-{version}-py3-none-any.whl"))
        if not wheels:
            raise Refused(f"no wheel of version {version} appeared in dist/")
        for wheel in wheels:
            if problems := metadata_problems(wheel):
                raise Refused(f"{wheel.name} is tied to a place: {'; '.join(problems)}")
        run([sys.executable, "-m", "pytest", "-q", "ci/test_installs.py", "-k", system])
        if not dry_run:
            git("commit", "-m", f"Release {system} {version}", "--", *map(str, after))
            git("tag", tag)
        done = not dry_run
    finally:
        if not done:
            for path, text in before.items():
                path.write_text(text)
    return tag


def main() -> int:
    """Exit code: 0; 1 when the release was refused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("system", help="shared, or a folder under packages/")
    parser.add_argument("--version", help="like 0.2.0; default: the present one without .devN")
    parser.add_argument("--dry-run", action="store_true", help="no commit, no tag")
    options = parser.parse_args()
    try:
        tag = release(options.system, options.version, options.dry_run)
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{tag} {'could be' if options.dry_run else 'is'} tagged; dist/ holds what to upload")
    return 0


if __name__ == "__main__":
    sys.exit(main())
