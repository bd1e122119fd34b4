"""A pipelined step over two ranks against a blocking one, with an emulated link."""

from collections.abc import Iterator
from typing import Any

from ecorec.pipeline_benchmark import pipeline_rows


def run() -> Iterator[dict[str, Any]]:
    """Rows of `ecorec bench pipeline`."""
    yield from pipeline_rows()
