"""The command `mcfuser`."""

from typing import Annotated, Any

import typer

from septet_shared import experiment

app = typer.Typer(no_args_is_help=True, help="Chains of products with small reductions, fused.")
experiment.mount(app, "mcfuser")

CHAIN = "bmk,bkn->bmn; bmn,bnh->bmh"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
Json = Annotated[bool, typer.Option("--json", help="Rows as one JSON list.")]
Sizes = Annotated[str, typer.Option(help="Of every letter, like m=1024,n=1024,k=512,h=512.")]
Text = Annotated[str, typer.Option(help="The chain; a batch letter without a size is 1.")]


@app.command()
def funnel(
    sizes: Sizes,
    chain: Text = CHAIN,
    device: Annotated[str, typer.Option(help="a100, rtx3080, h100, h200 or cpu.")] = "a100",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp16",
    json: Json = False,
) -> None:
    """How many candidates each pruning rule leaves."""
    from septet_shared.profiling import bench_row

    from .chain import chain as parse
    from .pruning import space

    with experiment.user_errors():
        parsed = parse(chain)
        given = dict.fromkeys(parsed.batch, 1) | _numbers("sizes", sizes)
        found = space(parsed, given, device=device, dtype=_dtype(dtype)).funnel()
    rows = [
        bench_row(
            step.rule, device, step.candidates, "candidates", kind="counted",
            notes=" ".join(step.expressions),
        )
        for step in found
    ]  # fmt: skip
    _show("candidates that each rule leaves", rows, json)


@app.command()
def place(
    sizes: Sizes,
    tiles: Annotated[str, typer.Option(help="Of every letter, like m=64,n=64,k=64,h=64.")],
    expr: Annotated[str, typer.Option(help="A tiling expression, like mhnk or mn(k,h).")],
    chain: Text = CHAIN,
    json: Json = False,
) -> None:
    """Where a tiling expression's loads, products and stores stand, and what they move."""
    from septet_shared.profiling import bench_row

    from .chain import chain as parse
    from .placement import place as placed_of

    with experiment.user_errors():
        parsed = parse(chain)
        given = dict.fromkeys(parsed.batch, 1) | _numbers("sizes", sizes)
        placed = placed_of(parsed, given, expr, _numbers("tiles", tiles))
    counts = {name: (count, "elements") for name, count in placed.traffic().items()}
    counts["flops"] = (placed.flops(), "FLOP")
    rows = [
        bench_row(name, expr, count, unit, kind="counted", notes=str(placed))
        for name, (count, unit) in counts.items()
    ]
    _show(str(placed), rows, json)


def _numbers(name: str, text: str) -> dict[str, int]:
    """Letters with numbers, from m=64,n=64."""
    found: dict[str, int] = {}
    for part in text.split(","):
        letter, _, number = part.strip().partition("=")
        if len(letter) != 1 or not number.isdigit():
            raise ValueError(f"{name} must be like m=1024,n=512; got {text!r}")
        found[letter] = int(number)
    return found


def _dtype(name: str) -> Any:
    import torch

    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    return getattr(torch, DTYPES[name])


def _show(title: str, rows: list[dict[str, Any]], json: bool) -> None:
    from septet_shared.experiment.commands import print_json, print_table
    from septet_shared.experiment.results import show

    if json:
        print_json(rows)
        return
    names = ["name", "value", "unit", "notes"]
    print_table(title, names, [[show(row[key]) for key in names] for row in rows])
