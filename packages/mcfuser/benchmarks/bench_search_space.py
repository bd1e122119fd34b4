"""All candidates of a chain, pruned and scored together, against one placement at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from mcfuser import Candidate, place, space
from septet_shared.profiling import bench_row, compare

CHAIN = "bmk,bkn->bmn; bmn,bnh->bmh"
SIZES = {"b": 1, "m": 1024, "n": 1024, "k": 512, "h": 512}
ONE_BY_ONE = 200  # placements that the slow way makes; its time is scaled up


def run() -> Iterator[dict[str, Any]]:
    """Rows of the comparison; what candidates move is checked equal first."""
    few = list(space(CHAIN, SIZES).candidates())[::60][:ONE_BY_ONE]
    count = sum(len(seconds) for _, seconds in space(CHAIN, SIZES).scored().values())

    def together() -> dict[str, Any]:
        return space(CHAIN, SIZES, device="a100", dtype=torch.float16).scored()

    def one_by_one() -> list[int]:
        return [_moved(candidate) for candidate in few]

    found = compare({"together": together, "one by one": one_by_one})
    seconds = {name: timing.median_s for name, timing in found.timings.items()}
    slow_s = seconds["one by one"] * count / len(few)
    yield bench_row(
        "seconds", "pruned and scored", seconds["together"], "s", must="<= 0.05",
        notes=f"{count:,} candidates; one placement at a time they would take {slow_s:.2f} s "
        f"({math.floor(slow_s / seconds['together'])} times longer)",
    )  # fmt: skip


def _moved(candidate: Candidate) -> int:
    placed = place(CHAIN, SIZES, candidate.expression, candidate.tiles, torch.float16)
    return sum(placed.traffic().values()) + placed.flops()
