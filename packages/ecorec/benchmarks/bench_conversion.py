"""Time and memory of the TT-SVD of a table of 1.28 GB."""

from collections.abc import Iterator
from typing import Any

from ecorec.experiments.conversion import bench_rows


def run() -> Iterator[dict[str, Any]]:
    """Rows of `ecorec bench convert`."""
    yield from bench_rows(10_000_000, 32, 16)
