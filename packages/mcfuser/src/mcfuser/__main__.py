"""`python -m mcfuser` is the command `mcfuser`."""

from mcfuser.cli import app

app(prog_name="mcfuser")
