"""`python -m ecorec` is the command `ecorec`."""

from ecorec.cli import app

app(prog_name="ecorec")
