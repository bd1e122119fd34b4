"""Candidates that each pruning rule leaves, of a chain of two products on an A100.

Paper: some 1e8 candidates of M = N = 1024, K = H = 512 become some 1e4 (a reading note's rounded
figures; the paper's text could not be had): deduplication leaves 5 of 26 expressions, rule 2 leaves
3, padding removes 99 %, the shared-memory rule 40 %.
Counted here, exactly. Rule 4 drops 57 %, not 40: what it counts is our reading. `live` is ours.
"""

from collections.abc import Iterator
from typing import Any

import torch

from mcfuser import place, space
from septet_shared.experiment import Claim, Rows, Sweep, progress

NAME = "tab_pruning_funnel"
TITLE = "Candidates that each pruning rule leaves"
SCALES = {
    "smoke": Sweep(shapes=[[1024, 1024, 512, 512]]),
    "cpu": Sweep(shapes=[[1024, 1024, 512, 512], [512, 256, 64, 64], [2048, 512, 128, 128]]),
}
_SOURCE = "a reading note of section 3"
PAPER = [
    {"rule": "raw", "shape": "1024,1024,512,512", "candidates": 1e8, "from": _SOURCE},
    {"rule": "dedup", "shape": "1024,1024,512,512", "candidates": 1e6, "from": _SOURCE},
    {"rule": "intermediates", "shape": "1024,1024,512,512", "candidates": 1e5, "from": _SOURCE},
    {"rule": "padding", "shape": "1024,1024,512,512", "candidates": 1e4, "from": _SOURCE},
    {"rule": "shared_memory", "shape": "1024,1024,512,512", "candidates": 1e4, "from": _SOURCE},
]
FIGURES = ("candidates", "expressions")
CHAIN = "bmk,bkn->bmn; bmn,bnh->bmh"


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """A row for each shape and rule; `largest_area` of the survivors against the limit."""
    for m, n, k, h in progress(sweep.shapes, NAME):
        sizes = {"b": 1, "m": m, "n": n, "k": k, "h": h}
        found = space(CHAIN, sizes, device="a100", dtype=torch.float16)
        for step in found.funnel():
            yield {
                "shape": f"{m},{n},{k},{h}",
                "rule": step.rule,
                "candidates": step.candidates,
                "expressions": len(step.expressions),
                "kind": "counted",
            }
        best = min(found.candidates(), key=lambda candidate: candidate.predicted_s)
        placed = place(CHAIN, sizes, best.expression, best.tiles, torch.float16)
        least = m * k + k * n + n * h + m * h
        yield {
            "shape": f"{m},{n},{k},{h}",
            "rule": "best",
            "moved_over_least": sum(placed.traffic().values()) / least,
            "kind": "counted",
            "notes": f"{placed} with tiles {best.tiles}",
        }


def claims(rows: Rows) -> Iterator[Claim]:
    """Each rule only takes away; the expressions are 26, 5 and 3."""
    for shape in dict.fromkeys(rows.column("shape")):
        steps = [row for row in rows.where(shape=shape) if row["rule"] != "best"]
        counts = [row["candidates"] for row in steps]
        yield Claim(
            f"{shape}: each rule only takes away",
            counts == sorted(counts, reverse=True) and counts[-1] > 0,
            f"{counts[0]:,} to {counts[-1]:,}",
        )
        expressions = [row["expressions"] for row in steps]
        yield Claim(
            f"{shape}: 26 expressions are 5 kernels, 3 of them without partial tiles",
            expressions[:3] == [26, 5, 3],
            str(expressions),
        )
