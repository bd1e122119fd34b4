"""The command `ecorec`."""

from typing import Annotated

import typer

from septet_shared import experiment

app = typer.Typer(
    no_args_is_help=True, help="Tensor-train embedding tables, a drop-in for nn.EmbeddingBag."
)
experiment.mount(app, "ecorec")


@app.command()
def train(
    data: Annotated[str, typer.Option(help="movielens, or a path to ml-100k.inter.")] = "movielens",
    tables: Annotated[str, typer.Option(help="Kinds of table: tt, dense, zero.")] = "tt,dense,zero",
    epochs: Annotated[int, typer.Option(help="Passes over the training part.")] = 4,
    seeds: Annotated[int, typer.Option(help="Runs of each kind, seeds from 0.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Rows as one JSON list.")] = False,
) -> None:
    """Train a recommendation model on MovieLens-100k with each kind of table."""
    from septet_shared.experiment.commands import print_json, print_table
    from septet_shared.experiment.results import show

    from .movielens import load
    from .train import train_rows

    with experiment.user_errors():
        ratings = load(None if data == "movielens" else data)
        kinds = [kind.strip() for kind in tables.split(",")]
        rows = list(train_rows(ratings, kinds, epochs=epochs, seeds=seeds))
    if json:
        print_json(rows)
    else:
        shown = ["name", "variant", "value", "unit", "kind", "notes"]
        print_table("MovieLens-100k", shown, [[show(row[key]) for key in shown] for row in rows])
