"""A paper's figures and tables as modules, and the commands that run them.

A system's `experiments` package holds one module per figure or table with these plain names:

    NAME = "figure8"                                    # what `reproduce` is asked for
    TITLE = "Fused chains against unfused ones"
    SCALES = {"smoke": Sweep(lengths=[64]), "cpu": Sweep(lengths=[64, 256])}
    PAPER = [{"length": 512, "speedup": 3.1, "from": "Fig. 8b, read off the plot"}]
    def run(sweep): yield {"length": ..., "variant": ..., "speedup": ..., "kind": "measured"}
    def claims(rows): yield Claim("fused is never slower", rows.min("speedup") >= 1)
    def plot(rows, ax): ...                             # optional; a plain plot is drawn without it
    FIGURES = ("speedup",)                              # optional; see `Experiment`

`mount(app, package)` gives the system's command the verbs that run them.
"""

from .claims import Claim, Demo, Experiment, Headline, Rows, Sweep
from .commands import mount
from .corpora import stdlib_text
from .doctor import machine, versions
from .results import Result, experiments, run_experiment
from .terminal import progress, user_errors

__all__ = [
    "Claim",
    "Demo",
    "Experiment",
    "Headline",
    "Result",
    "Rows",
    "Sweep",
    "experiments",
    "machine",
    "mount",
    "progress",
    "run_experiment",
    "stdlib_text",
    "user_errors",
    "versions",
]
