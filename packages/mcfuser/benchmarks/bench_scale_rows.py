"""Scaling rows against writing it as a matrix product with a diagonal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mcfuser import scale_rows
from septet_shared.profiling import compare


def run() -> Iterator[dict[str, Any]]:
    """Rows of the comparison; outputs are checked equal first."""
    x, weight = torch.randn(512, 256), torch.rand(512)
    diagonal = torch.diag(weight)
    found = compare(
        {"ours": lambda: scale_rows(x, weight), "diagonal": lambda: diagonal @ x},
        check=torch.testing.assert_close,
    )
    for row in found.rows():
        yield {**row, "name": "scale_rows", "must": ">= 1" if row["peer"] == "diagonal" else None}
