"""Memory of one training step on a large table (table 1).

Paper: a table of 100,000,000 x 32 with ranks (32, 32) under feature f4's lookups: FBTT-Embedding
peaks at 7.96 GB with 10,000 samples and at 15.88 GB with 20,000, above the 11.9 GB of the dense
table that it replaces (result files of the authors' artifact).
Measured here: what a fresh process grows by in one step of TTEmbeddingBag, after a step of 256
samples; and, at small scale, what the lookups of FBTT's algorithm in torch operations take.
Counted: the workspace that was taken, multiplications that chunks cause to be repeated, parameters,
and by formula FBTT's intermediates and the dense table (neither fits here at full size).
Not reproduced: FBTT-Embedding itself, which runs on CUDA only.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ecorec.embedding import TTEmbeddingBag
from ecorec.shape_search import near_cubic
from ecorec.step_benchmark import chain_of_lookups
from ecorec.traces import FEATURES, TableTrace
from septet_shared import ranks
from septet_shared.experiment import Claim, Rows, Sweep
from septet_shared.memory_pool import track_peak
from septet_shared.profiling import bench_row

NAME = "table1"
TITLE = "Memory of a training step on a table of 100,000,000 rows"
SCALES = {
    "smoke": Sweep(rows=100_000, batches=[500, 1000], port_lookups=2000),
    "cpu": Sweep(rows=100_000_000, batches=[10_000, 20_000], port_lookups=20_000),
}
_FROM = "table 1, result file of the artifact"
PAPER = [
    {"name": "peak", "variant": variant, "batch": batch, "value": gigabytes * 1e9, "from": _FROM}
    for variant, of_batch in (
        ("fbtt", {10_000: 7.961, 20_000: 15.875}),
        ("dense", {10_000: 11.986, 20_000: 12.050}),
    )
    for batch, gigabytes in of_batch.items()
]
FIGURES = ("value",)
DIM, RANK = 32, 32
WORKSPACE_BYTES = 64 << 20
SLACK_BYTES = 16 << 20  # of allocators
TIMEOUT_S = 600.0


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Rows of each batch; then bytes a lookup of FBTT's algorithm."""
    for batch in sweep.batches:
        (found,) = ranks.run(_step_of_ours, 1, sweep.rows, batch, timeout_s=TIMEOUT_S)
        yield from _rows(sweep.rows, batch, found)
    (taken,) = ranks.run(_step_of_port, 1, sweep.rows, sweep.port_lookups, timeout_s=TIMEOUT_S)
    yield bench_row(
        "bytes_per_lookup", "fbtt port", taken / sweep.port_lookups, "B",
        notes=f"{sweep.port_lookups:,} lookups in torch operations, resident",
    )  # fmt: skip


def claims(rows: Rows) -> Iterator[Claim]:
    """Workspace, peak, repeated work."""
    for name, bound, words in (
        ("workspace", WORKSPACE_BYTES, "the workspace stays within max_workspace_bytes"),
        ("extra_flops", 0.005, "micro-batching adds at most 0.5 % of FLOPs"),
    ):
        most = max(rows.where(name=name, variant="ours").column("value"))
        shown = f"{most / 2**20:.1f} MiB" if name == "workspace" else f"{most:.3%}"
        yield Claim(words, most <= bound, f"at most {shown}")
    peaks = rows.where(name="peak", variant="ours")
    over = max(row["value"] - row["allowed"] for row in peaks)
    yield Claim(
        "a step takes no more than 64 MiB beside its results and inputs, and 16 MiB of slack",
        over <= 0,
        "; ".join(
            f"{row['value'] / 2**20:.1f} of {row['allowed'] / 2**20:.1f} MiB at {row['batch']:,}"
            for row in peaks
        ),
    )


def plot(rows: Rows, ax: Any) -> None:
    """Peaks of each batch: ours, FBTT by formula, dense by formula."""
    peaks = rows.where(name="peak")
    for variant in dict.fromkeys(peaks.column("variant")):
        found = peaks.where(variant=variant)
        ax.plot(found.column("batch"), found.column("value"), "o-", label=variant)
    ax.set(xlabel="samples of a batch", ylabel="bytes", yscale="log")
    ax.legend()


def _trace(rows: int) -> TableTrace:
    """Feature f4's law over a table of so many rows."""
    f4 = FEATURES["f4"]
    used = round(f4.used_rows * rows / f4.num_embeddings)
    return TableTrace("f4", rows, f4.pooling, used, f4.exponent, f4.shift, f4.hot_share)


def _step_of_ours(_: ranks.Ranks, rows: int, batch: int) -> dict[str, float]:
    table = TTEmbeddingBag(
        rows, DIM, tt_ranks=RANK, mode="sum", include_last_offset=True,
        max_workspace_bytes=WORKSPACE_BYTES, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    trace = _trace(rows)
    warm = trace.batch(256, seed=1)
    table(warm.indices, warm.offsets).sum().backward()
    table.zero_grad()
    lookups = trace.batch(batch)
    planned = table.plan(lookups.indices, lookups.offsets)
    gradient = torch.ones(batch, DIM)
    with track_peak() as peak:
        output = table(lookups.indices, lookups.offsets)
        torch.autograd.backward(output, gradient)
    taken = table.statistics()
    inputs = lookups.indices.nbytes + lookups.offsets.nbytes
    return {
        "lookups": len(lookups.indices),
        "workspace": taken["workspace_bytes"],
        "extra_flops": taken["flops"] / planned.flops - 1,
        "chunks": taken["chunks"],
        "peak": peak.resident_bytes,
        "allowed": WORKSPACE_BYTES + 2 * output.nbytes + inputs + table.spec.bytes + SLACK_BYTES,
        "parameters": table.spec.bytes,
    }


def _step_of_port(_: ranks.Ranks, rows: int, lookups: int) -> int:
    spec = near_cubic(rows, DIM, rank=RANK)
    cores = [torch.randn(shape, requires_grad=True) for shape in spec.core_shapes]
    indices = _trace(rows).batch(lookups).indices[:lookups].view(-1, 1)
    torch.autograd.backward(chain_of_lookups(cores, indices[:64]).sum())
    with track_peak() as peak:
        torch.autograd.backward(chain_of_lookups(cores, indices).sum())
    return peak.resident_bytes


def _rows(rows: int, batch: int, found: dict[str, float]) -> Iterator[dict[str, Any]]:
    lookups = int(found["lookups"])
    common = {"batch": batch, "allowed": found["allowed"]}
    notes = f"{lookups:,} lookups of {rows:,} rows"
    yield common | bench_row(
        "workspace", "ours", found["workspace"], "B", kind="counted", must="<= 67108864",
        notes=f"{notes}; {int(found['chunks'])} chunks",
    )  # fmt: skip
    yield common | bench_row(
        "extra_flops", "ours", found["extra_flops"], "", kind="counted", must="<= 0.005",
        notes=f"over those of a batch that is not cut; {notes}",
    )  # fmt: skip
    yield common | bench_row("peak", "ours", found["peak"], "B", notes=f"resident growth; {notes}")
    yield common | bench_row(
        "parameters", "ours", found["parameters"], "B", kind="counted", notes=notes
    )
    # Of a lookup: gradients of its slices, above all of the middle core, its product and its row.
    spec = near_cubic(rows, DIM, rank=RANK)
    (q1, q2, q3), (r1, r2) = spec.q, spec.ranks
    numbers = q1 * r1 + r1 * q2 * r2 + r2 * q3 + q1 * q2 * r2 + DIM
    yield common | bench_row(
        "peak", "fbtt", 4.0 * numbers * lookups, "B", kind="counted",
        notes="by formula: gradients of a lookup's slices, its product and its row",
    )  # fmt: skip
    yield common | bench_row(
        "peak", "dense", 4.0 * rows * DIM, "B", kind="counted", notes="by formula: the table alone"
    )
