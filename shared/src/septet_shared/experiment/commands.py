"""The verbs that every system's command has: reproduce, doctor, demo, kernels, --version."""

import importlib.util
import json
import sys
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Annotated, Any

from septet_shared._whole_files import write_whole

from . import plot
from .claims import Claim, Demo
from .doctor import doctor, versions
from .results import Result, experiments, plain, run_experiment, show
from .terminal import USER_ERRORS, say, user_errors

if TYPE_CHECKING:
    import typer

_NO_PLOT = "no plots without matplotlib: pip install 'septet-shared[experiments]'"


def mount(app: "typer.Typer", package: str) -> None:
    """`app` with the verbs reproduce, doctor, demo and kernels, and the option --version.

    Args:
        app: a typer application without a callback of its own.
        package: import name of the system.

    With --json a verb's standard output holds JSON and nothing else. Exit codes: 0; 1 when a claim
    does not hold or a kernel does not compile; 2 when the user is mistaken, with one line that
    says how.

    Raises:
        ValueError: the app has a callback already.
    """
    import typer

    if app.registered_callback is not None:
        raise ValueError(f"the app of {package} must have no callback: --version needs it")
    as_json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(f"{package} {versions(package)[package]}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True)
        ] = False,
    ) -> None:
        pass

    @app.command("reproduce")
    def reproduce_verb(
        name: Annotated[str, typer.Argument(help="list, all, or an experiment.")] = "list",
        scale: Annotated[str, typer.Option(help="smoke, cpu, gpu, paper.")] = "smoke",
        out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out/reproduce"),
        json_: as_json = False,
    ) -> None:
        """Run the paper's experiments; show ours beside the paper's; check the claims."""
        with user_errors():
            sys.exit(_reproduce(package, name, scale, out, json_))

    @app.command("doctor")
    def doctor_verb(json_: as_json = False) -> None:
        """Show versions, compiler, devices, backends, and what to install for more."""
        with user_errors():
            found = doctor(package)
        print_json(found) if json_ else _print_doctor(found)

    @app.command("demo")
    def demo_verb(
        out: Annotated[Path | None, typer.Option(help="Folder for rows and plot.")] = None,
        json_: as_json = False,
    ) -> None:
        """Do the headline job on real input, in under a minute."""
        with user_errors():
            sys.exit(_demo(package, out, json_))

    @app.command("kernels")
    def kernels_verb(
        kernel: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
        dtype: Annotated[list[str] | None, typer.Option(help="Only these, fp16 say.")] = None,
        arch: Annotated[list[int] | None, typer.Option(help="80, 90, 100.")] = None,
        json_: as_json = False,
    ) -> None:
        """Compile the Triton kernels ahead of time; no GPU is needed."""
        with user_errors():
            sys.exit(_kernels(package, kernel or [], dtype or [], arch or [], json_))


def print_json(value: Any) -> None:
    """`value` as one JSON document on standard output."""
    sys.stdout.write(json.dumps(plain(value), indent=1) + "\n")


def print_table(title: str, header: list[str], lines: list[list[str]]) -> None:
    """A table on standard output; as wide as it needs to be where no terminal limits it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for name in header:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*[Text(cell) for cell in line])
    (Console() if sys.stdout.isatty() else Console(width=160)).print(table)


def _reproduce(package: str, name: str, scale: str, out: Path, as_json: bool) -> int:
    known = experiments(package)
    if name == "list":
        rows = [
            {"name": e.NAME, "title": e.TITLE, "scales": list(e.SCALES)} for e in known.values()
        ]
        if as_json:
            print_json(rows)
        else:
            lines = [[str(r["name"]), str(r["title"]), ", ".join(r["scales"])] for r in rows]
            print_table(f"{package} reproduce", ["experiment", "shows", "scales"], lines)
        return 0
    if name not in ("all", *known):
        raise ValueError(f"{package} has no experiment {name!r}; it has {', '.join(known)}")
    chosen = [n for n, e in known.items() if name in ("all", n) and scale in e.SCALES]
    if not chosen:
        scales = dict.fromkeys(s for e in known.values() for s in e.SCALES)
        raise ValueError(
            f"no experiment of {package} has scale {scale!r}; they have {', '.join(scales)}"
        )
    if not plot.is_available():
        say(_NO_PLOT)
    rows, code = [], 0
    for one in chosen:
        try:
            result = run_experiment(package, one, scale)
            files = result.write(out / package)
        except USER_ERRORS as error:  # the others still run
            where = extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            say(f"{one} ({place}): {error}", style="bold red")
            code = 2
            continue
        rows += [{"experiment": one, **row} for row in result.rows]
        if not as_json:
            _print_result(result)
            sys.stdout.write(f"written: {', '.join(map(str, files))}\n\n")
        code = max(code, _judge(result, as_json))
    if as_json:
        print_json(rows)
    return code


def _print_result(result: Result) -> None:
    header, cells, notes = result.table()
    title = f"{result.system} {result.experiment.NAME} ({result.scale}): {result.experiment.TITLE}"
    print_table(title, header, cells)
    for note in [*notes, *_alone(result)]:
        sys.stdout.write(note + "\n")


def _alone(result: Result) -> list[str]:
    points = result.paper_alone()
    if len(points) > 3:
        points = [f"{len(points)} points that no row of this scale stands beside"]
    return [f"the paper also has: {point}" for point in points]


def _judge(result: Result, as_json: bool) -> int:
    from rich.console import Console

    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    for claim in result.claims:
        verdict = "[green]holds[/]" if claim.holds else "[bold red]does not hold[/]"
        console.print(f"{verdict}:", end=" ")
        console.print(claim_text(claim), markup=False)
    return 0 if result.holds else 1


def claim_text(claim: Claim) -> str:
    """The claim with its detail, without its verdict."""
    return claim.text + (f" ({claim.detail})" if claim.detail else "")


def _demo(package: str, out: Path | None, as_json: bool) -> int:
    found = getattr(importlib.import_module(f"{package}.experiments"), "DEMO", None)
    if not isinstance(found, Demo):
        raise ValueError(f"{package}.experiments must have DEMO = Demo(...); got {found!r}")
    command = f"python -m {package} demo"
    result = run_experiment(package, found.experiment, "demo", found.sweep, command)
    headline = found.headline(result.rows)
    if out is not None:
        header, cells, notes = result.table()
        record = {
            **result.record(),
            "about": result.about,
            "headline": vars(headline),
            "table": {"header": header, "cells": cells, "notes": [*notes, *_alone(result)]},
        }
        write_whole(out / "rows.json", json.dumps(record.pop("rows"), indent=1))
        write_whole(out / "demo.json", json.dumps(record, indent=1))
        if plot.is_available():
            write_whole(out / f"{result.experiment.NAME}.svg", plot.svg(result))
        else:
            say(_NO_PLOT)
    if as_json:
        print_json(result.rows)
    else:
        _print_result(result)
        line = [headline.ran, headline.paper, headline.ours, headline.kind]
        print_table("", ["what ran", "the paper's figure", "ours", "kind"], [line])
    return _judge(result, as_json)


def _kernels(
    package: str, kernels: list[str], dtypes: list[str], archs: list[int], as_json: bool
) -> int:
    from septet_shared import testing

    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"{package} is no installed package")
    try:
        rows = testing.compile_package(
            found.submodule_search_locations[0],
            kernels=kernels,
            dtypes=dtypes,
            archs=archs or testing.ARCHS,
        )
    except RuntimeError as error:  # no triton, or a kernel's module cannot be imported
        raise ValueError(str(error)) from error
    if not rows:
        raise ValueError(" ".join([package, "has no kernel", *kernels, *dtypes]))
    if as_json:
        print_json(rows)
    else:
        shown = ["name", "variant", "arch", "registers", "spills", "value", "notes"]
        header = [*shown[:5], "shared bytes", shown[6]]
        print_table(f"{package} kernels", header, [[show(r[n]) for n in shown] for r in rows])
    return 1 if any(row["registers"] is None for row in rows) else 0


def _print_doctor(found: dict[str, Any]) -> None:
    lines = [["version", name, version] for name, version in found["versions"].items()]
    lines.append(["compiler", "", found["compiler"] or "none"])
    for device in found["devices"]:
        facts = [f"{k} {show(v)}" for k, v in device.items() if k != "name"]
        lines.append(["device", device["name"], ", ".join(facts)])
    lines += [["backend", name, state] for name, state in found["backends"].items()]
    print_table("", ["", "name", ""], lines)
    advice = found["advice"] or ["nothing is missing"]
    sys.stdout.write("To get more:\n" + "".join(f"  {line}\n" for line in advice))
