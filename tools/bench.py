"""Run the benchmarks of one package.

python tools/bench.py shared --json             # rows on standard output, nothing else there
python tools/bench.py shared --only heap        # benchmarks/bench_heap.py alone
python tools/bench.py shared --write            # and put the table into benchmarks/README.md

A module `benchmarks/bench_<idea>.py` has `run()`, which yields the rows. Besides the keys of every
benchmark row a row has `must`: "<= 10" is asked of `ratio`, or of `value` where `ratio` is None;
None asks nothing.
"""

import argparse
import json
import operator
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from environment import ROOT, members
from reproduce import end_group
from septet_shared._whole_files import write_whole
from septet_shared.experiment import machine, progress, versions
from septet_shared.experiment.commands import print_json, print_table
from septet_shared.experiment.results import show

KEYS = (
    *("name", "variant", "peer", "ratio", "ratio_low", "ratio_high"),
    *("value", "unit", "kind", "threads", "notes", "must"),
)
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}

# In a process of its own, importable by name: ranks that a benchmark starts import it again.
# Whatever the benchmark prints goes to standard error; the rows have standard output alone.
RUN = """
import importlib, json, os, sys
from septet_shared.experiment.results import plain
folder, name = sys.argv[1:]
sys.path.insert(0, folder)
rows = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for row in importlib.import_module(name).run():
    rows.write(json.dumps(plain(row)) + "\\n")
    rows.flush()
"""


def modules(folder: Path, only: str | None = None) -> list[Path]:
    """The benchmark modules of a package, or the one asked for by the name after `bench_`.

    Raises:
        ValueError: there is none, or not that one; the error names those that exist.
    """
    found = sorted(folder.glob("benchmarks/bench_*.py"))
    chosen = [path for path in found if only in (None, path.stem.removeprefix("bench_"))]
    if not chosen:
        names = ", ".join(path.stem.removeprefix("bench_") for path in found) or "none"
        where = folder / "benchmarks"
        raise ValueError(f"no benchmark {only or ''!r} in {where}; there are: {names}")
    return chosen


def package_folder(name: str, root: Path) -> Path:
    """The folder of a package by its name; ValueError names those that exist."""
    folders = {folder.name: folder for folder in members(root)}
    if name not in folders:
        raise ValueError(f"no package {name!r}; there are {', '.join(folders)}")
    return folders[name]


def run_module(path: Path, timeout_s: float) -> list[dict[str, Any]]:
    """The rows of one benchmark module, run in a process of its own.

    Raises:
        ValueError: the module failed or took too long, or a row lacks a key or has a wrong `must`.
    """
    command = [sys.executable, "-c", RUN, str(path.parent), path.stem]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{path.stem} took longer than {timeout_s:g} s") from None
        finally:
            end_group(process)
    if process.returncode:
        raise ValueError(f"{path.stem} failed with exit code {process.returncode}")
    rows = [json.loads(line) for line in output.splitlines()]
    for row in rows:
        lacking = [key for key in KEYS if key not in row]
        if lacking:
            raise ValueError(f"{path.stem} gave a row without {', '.join(lacking)}: {row}")
        verdict(row)
    return rows


def verdict(row: dict[str, Any]) -> str:
    """Whether a row reaches its must: "holds", "does not hold", "not measured", or "" without one.

    Raises:
        ValueError: a must that is no comparison with a number.
    """
    must = row["must"]
    if must is None:
        return ""
    wanted = re.fullmatch(r"(<=|>=|<|>)\s*([\d.]+(?:e[+-]?\d+)?)", str(must))
    if not wanted:
        raise ValueError(f"must is like '<= 10' or '>= 5'; got {must!r} in {row['name']}")
    figure = row["value"] if row["ratio"] is None else row["ratio"]
    if figure is None:
        return "not measured"
    return "holds" if COMPARE[wanted[1]](figure, float(wanted[2])) else "does not hold"


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the rows as text."""
    header = ["name", "variant", "peer", "ratio", "value", "must", "", "kind", "threads", "notes"]
    cells = []
    for row in rows:
        ratio = show(row["ratio"])
        if row["ratio"] is not None and row["ratio_low"] is not None:
            ratio += f"x [{row['ratio_low']:.3g}, {row['ratio_high']:.3g}]"
        value = (
            f"{show(row['value'])} {row['unit'] or ''}".strip() if row["value"] is not None else ""
        )
        texts = {key: show(row[key]) for key in KEYS}
        texts |= {"ratio": ratio, "value": value, "": verdict(row)}
        cells.append([texts[key] for key in header])
    return header, cells


def written_into(readme: str, rows: list[dict[str, Any]], command: str) -> str:
    """The text of a README with the table between its two markers.

    Raises:
        ValueError: the markers are not there once each, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"benchmarks/README.md must have the lines {BEGIN} and {END}, once each")
    header, cells = table(rows)
    lines = [header, ["---"] * len(header), *cells]
    facts = {**machine(), **versions()}
    facts["gpus"] = ", ".join(facts["gpus"]) or "none"
    block = [
        BEGIN,
        "",
        f"`{command}`, {time.strftime('%Y-%m-%d')}. "
        + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
        + ".",
        "",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines),
        "",
        END,
    ]
    return before + "\n".join(block) + after


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """The exit code: 0, 1 when a must fails or a module does, 2 when the user is mistaken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", help="shared, or a folder of packages/")
    parser.add_argument("--json", action="store_true", help="the rows as one JSON list")
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    parser.add_argument("--only", help="one module, by the name after bench_")
    parser.add_argument("--timeout-s", type=float, default=1800, help="for each module")
    asked = parser.parse_args(arguments)
    try:
        if asked.write and asked.only:
            raise ValueError("--write needs all modules: leave out --only")
        folder = package_folder(asked.package, root)
        readme = folder / "benchmarks" / "README.md"
        chosen = modules(folder, asked.only)
        if asked.write:  # before the minutes that follow
            written_into(readme.read_text(), [], "")
    except (ValueError, OSError) as mistake:
        print(mistake, file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    failed = []
    for path in progress(chosen, f"benchmarks of {asked.package}"):
        try:
            rows += run_module(path, asked.timeout_s)
        except ValueError as error:
            failed.append(str(error))
    if asked.json:
        print_json(rows)
    else:
        print_table(f"benchmarks of {asked.package}", *table(rows))
    missed = [row for row in rows if verdict(row) == "does not hold"]
    for line in failed + [
        f"does not hold: {r['name']} {r['variant']}: {r['must']}" for r in missed
    ]:
        print(line, file=sys.stderr)
    if asked.write and not failed:
        command = f"python tools/bench.py {asked.package} --write"
        write_whole(readme, written_into(readme.read_text(), rows, command))
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
