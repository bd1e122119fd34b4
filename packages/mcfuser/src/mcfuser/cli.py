"""The command `mcfuser`."""

import typer

from septet_shared import experiment

app = typer.Typer(no_args_is_help=True, help="Rows of a matrix, each scaled by its weight.")
experiment.mount(app, "mcfuser")
