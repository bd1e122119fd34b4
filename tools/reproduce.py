"""Run any experiment of any system.

python tools/reproduce.py --system ecorec --experiment accuracy --scale smoke
python tools/reproduce.py --scale smoke         # everything that has this scale
"""

import argparse
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import ROOT, members
from septet_shared.experiment.commands import print_table


@dataclass(frozen=True)
class System:
    """A package of this checkout: its folder's name, and the name that it is imported by."""

    folder: str
    module: str


def systems(root: Path = ROOT, asked: str | None = None) -> list[System]:
    """The systems under `packages`, or the one asked for by folder or import name.

    Raises:
        ValueError: the system asked for does not exist; the error names those that do.
    """
    found = [
        System(folder.name, package.parent.name)
        for folder in members(root)[1:]  # the first is shared
        for package in sorted(folder.glob("src/*/__init__.py"))
    ]
    chosen = [s for s in found if asked in (None, s.folder, s.module)]
    if asked is not None and not chosen:
        raise ValueError(f"no system {asked!r}; there are {', '.join(s.folder for s in found)}")
    return chosen


def run_verb(system: System, *words: str, timeout_s: float, keep_output: bool) -> tuple[int, str]:
    """Exit code and last error line of `python -m <system> <words>`; nothing of it lives on.

    Standard error is passed on as it comes, from a terminal to a terminal, so that progress shows.
    Standard output is passed on when `keep_output`. Code 124 and a line that says so after
    `timeout_s`.
    """
    on_terminal = sys.stderr.isatty()
    reader, writer = os.openpty() if on_terminal else os.pipe()
    environment = dict(os.environ)
    if on_terminal:
        environment["COLUMNS"] = str(shutil.get_terminal_size().columns)
    process = subprocess.Popen(
        [sys.executable, "-m", system.module, *words],
        stdout=None if keep_output else subprocess.DEVNULL,
        stderr=writer,
        env=environment,
        start_new_session=True,
    )
    os.close(writer)
    said, end = b"", time.monotonic() + timeout_s
    try:
        while (left := end - time.monotonic()) > 0:
            if not select.select([reader], [], [], min(left, 1))[0]:
                if process.poll() is not None:
                    break  # a grandchild may hold the pipe
                continue
            try:
                chunk = os.read(reader, 65536)
            except OSError:  # a closed pseudo-terminal
                chunk = b""
            if not chunk:
                break
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()
            said = (said + chunk)[-8192:]
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return 124, f"took longer than {timeout_s:g} s"
    finally:
        os.close(reader)
        end_group(process)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode(errors="replace"))
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return code, lines[-1] if lines else ""


def end_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process that leads a session, and all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)  # its ranks too
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def experiments_of(system: System) -> dict[str, list[str]]:
    """The scales of each experiment of a system, by name."""
    command = [sys.executable, "-m", system.module, "reproduce", "list", "--json"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if listed.returncode:
        raise ValueError(f"{' '.join(command[1:])} failed: {listed.stderr.strip()[-300:]}")
    return {row["name"]: row["scales"] for row in json.loads(listed.stdout)}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """The exit code: 0, 1 when a claim does not hold, 2 when something could not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--system", help="folder or import name; default: all")
    parser.add_argument("--experiment", help="default: all that have the scale")
    parser.add_argument("--scale", default="smoke", help="smoke, cpu, gpu or paper")
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"))
    parser.add_argument("--timeout-s", type=float, default=7200, help="for each system")
    asked = parser.parse_args(arguments)
    lines: list[list[str]] = []
    code = 0
    known: dict[str, list[str]] = {}
    try:
        for system in systems(root, asked.system):
            scales = experiments_of(system)
            known |= scales
            chosen = [
                name
                for name, its in scales.items()
                if asked.experiment in (None, name) and asked.scale in its
            ]
            if not chosen:
                continue
            began = time.time()
            words = ["reproduce", asked.experiment or "all", "--scale", asked.scale]
            words += ["--out", str(asked.out)]
            failed, error = run_verb(system, *words, timeout_s=asked.timeout_s, keep_output=True)
            code = max(code, failed if failed in (0, 1) else 2)
            for name in chosen:
                path = asked.out / system.module / f"{name}.{asked.scale}.json"
                fresh = path.exists() and path.stat().st_mtime >= began - 1
                lines.append(_summary(system, name, path if fresh else None, error))
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    if not lines:
        wanted = asked.experiment or "experiment"
        have = "; ".join(f"{name} ({', '.join(its)})" for name, its in known.items())
        print(f"no {wanted} at scale {asked.scale!r}; there are: {have or 'none'}", file=sys.stderr)
        return 2
    print_table(f"scale {asked.scale}", ["system", "experiment", "claims", "seconds"], lines)
    return code


def _summary(system: System, name: str, path: Path | None, error: str) -> list[str]:
    if path is None:
        return [system.folder, name, f"did not run: {error}", ""]
    record = json.loads(path.read_text())
    failing = [claim["text"] for claim in record["claims"] if not claim["holds"]]
    count = len(record["claims"])
    verdict = f"{count - len(failing)} of {count} hold"
    if failing:
        verdict += f"; not: {'; '.join(failing)}"
    return [system.folder, name, verdict, f"{record['seconds']:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
