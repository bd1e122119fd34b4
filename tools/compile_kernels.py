"""Compile every kernel of every package ahead of time, without a GPU: `make kernels`.

Kernel modules say what to build (SIGNATURES or ahead(), see `septet_shared.testing`). Exit status 1
if a kernel does not compile, needs more shared memory than a block has, or spills registers.
Results are kept in triton's cache, so a second run is quick.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent

# Read when `@triton.jit` decorates: an interpreted kernel has nothing to compile.
os.environ.pop("TRITON_INTERPRET", None)


def main(
    kernel: Annotated[list[str] | None, typer.Option(help="keep this kernel; repeatable")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="keep this dtype; repeatable")] = None,
    arch: Annotated[list[int] | None, typer.Option(help="80 for sm_80; repeatable")] = None,
    allow_spills: Annotated[bool, typer.Option(help="spilled registers are no failure")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON list only")] = False,
    out: Annotated[Path | None, typer.Option(help="write the JSON list to this file too")] = None,
) -> None:
    """Compile every declared kernel for sm_80, sm_90 and sm_100 and report what each costs."""
    from septet_shared import testing

    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    stderr = Console(stderr=True, soft_wrap=True)
    for package in [ROOT / "shared", *sorted((ROOT / "packages").glob("*/"))]:
        try:
            with stderr.status(f"compiling the kernels of {package.name}"):
                found = testing.compile_package(
                    package, kernels=kernel or (), dtypes=dtype or (), archs=arch or testing.ARCHS
                )
        except RuntimeError as error:
            problems.append(str(error))
            continue
        rows += [{"package": package.name, **row} for row in found]
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        print_table(rows)

    for row in rows:
        name = f"{row['name']} ({row['variant']}) for sm_{row['arch']}"
        if row["registers"] is None:
            problems.append(f"{name} does not compile: {row['notes']}")
        elif row["spills"] and not allow_spills:
            problems.append(f"{name} spills {row['spills']} words per thread")
    if not rows and not problems:
        problems.append("no kernel matches")
    for problem in problems:
        stderr.print(problem, markup=False, highlight=False)
    if problems:
        raise typer.Exit(1)


def print_table(rows: list[dict[str, Any]]) -> None:
    """One block for each kernel and variant, in it one line for each architecture."""
    table = Table(title="Kernels, compiled ahead of time", show_lines=True)
    table.add_column("kernel and variant", overflow="fold")
    for heading in ("arch", "registers", "spills", "shared bytes", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for (package, name, variant), group in itertools.groupby(
        rows, key=lambda row: (row["package"], row["name"], row["variant"])
    ):
        lines = list(group)
        table.add_row(
            f"{package}: [bold]{name}[/]\n{escape(variant)}",
            "\n".join(f"sm_{line['arch']}" for line in lines),
            *("\n".join(number(line[key]) for line in lines) for key in ("registers", "spills")),
            "\n".join(number(line["value"]) for line in lines),
            "\n".join(f"{line['seconds']:.2f}" for line in lines),
            style="red"
            if any(line["registers"] is None or line["spills"] for line in lines)
            else "",
        )
    seconds = sum(row["seconds"] for row in rows)
    table.caption = f"{len(rows)} binaries in {seconds:.1f} s"
    Console().print(table)


def number(value: int | None) -> str:
    """The number, or what stands for one that could not be had."""
    return "failed" if value is None else f"{value:,}"


if __name__ == "__main__":
    typer.run(main)
