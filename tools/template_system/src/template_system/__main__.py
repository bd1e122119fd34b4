"""`python -m template_system` is the command `template-system`."""

from template_system.cli import app

app(prog_name="template-system")
