"""Figure 1: bytes moved by scaling rows, fused and in two steps.

Paper: <what it claims, and where>.
Counted here: bytes moved. Not reproduced: <what, and why>.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mcfuser import reference, scale_rows
from septet_shared.experiment import Claim, Rows, Sweep

NAME = "figure1"
TITLE = "Bytes moved, fused and in two steps"
SCALES = {
    "smoke": Sweep(rows=[16, 64], columns=32),
    "cpu": Sweep(rows=[1024, 4096], columns=256),
}
PAPER: list[dict[str, Any]] = []
FIGURES = ("bytes_moved", "largest_error")


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """One row per (rows, variant): bytes_moved, largest_error against float64."""
    for rows in sweep.rows:
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(rows, sweep.columns, generator=rng)
        weight = torch.rand(rows, generator=rng)
        truth = reference.scale_rows(x.double(), weight.double())
        error = float((scale_rows(x, weight) - truth).abs().max())
        for variant, passes in (("fused", 2), ("two steps", 4)):
            yield {
                "rows": rows,
                "variant": variant,
                "bytes_moved": passes * x.nbytes,
                "largest_error": error,
                "kind": "counted",
            }


def claims(rows: Rows) -> Iterator[Claim]:
    """The shape of the result, at every scale."""
    moved = rows.ratio("bytes_moved", over="two steps", under="fused", by="rows")
    yield Claim("fusing never moves more bytes", moved.min("ratio") >= 1)
    yield Claim("float32 is within its rounding of float64", rows.max("largest_error") < 1e-6)
