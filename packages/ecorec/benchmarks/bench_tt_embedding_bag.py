"""A training step of a tensor-train table against dense ones and other tensor trains.

N = 10,000,000 rows of D = 32, 4,096 bags of 20 lookups, hashed Zipf 1.05: `ecorec bench step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ecorec.step_benchmark import PEERS, step_rows

MUST = {  # of `step`, by rank, threads and peer
    (32, 1, "torch-tt"): ">= 150",
    (32, 1, "torch-tt-unique"): ">= 60",
    (32, 1, "nn"): ">= 1.4",
    (32, 1, "fbgemm-rowwise"): ">= 1.15",
    (32, 1, "fbgemm-sgd"): ">= 0.65",
    (16, 1, "nn"): ">= 2.8",
    (16, 1, "fbgemm-rowwise"): ">= 2.2",
    (16, 1, "fbgemm-sgd"): ">= 1.2",
    (16, 2, "nn"): ">= 2.5",
}


def run() -> Iterator[dict[str, Any]]:
    """Rows of step, forward, preparation, parameters and flops at ranks 32 and 16."""
    for rank, threads in ((32, 1), (16, 1), (16, 2)):
        peers = PEERS if rank == 32 else PEERS[2:] if threads == 1 else ("nn",)
        for row in step_rows(rank=rank, threads=threads, peers=peers):
            must = None
            if row["name"] == "step":
                must = MUST.get((rank, threads, row["peer"]))
            elif rank == 32:
                must = {"preparation": "<= 0.15", "parameters": ">= 400"}.get(row["name"])
            yield {**row, "must": must}
