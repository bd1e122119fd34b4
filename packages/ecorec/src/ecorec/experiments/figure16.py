"""What each part of the table-wise pipeline gains (figure 16).

Paper: Meta-100, 4 GPUs, 16,384 samples: a batch-wise pipeline (BWP) takes 676.1 ms a step, the
table-wise one (TWP) 467.9, with reordering 448.5, with slope group sizes 442.4 (developer run in
the history of the authors' artifact).
Measured here: BWP, our port of it, against TWP on two real ranks with an emulated link. BWP cuts
the batch instead of the tables, so every table is called for each piece, with fewer repeats in it.
Simulated: TWP with the order of the tables, then by cost, then with the paper's slope, then the
plan that is searched, each as a timeline of `septet_shared.streams`; gains of a few percent are
below what a measurement here could show. The link is one on which the exchanges of 100 tables on
4 ranks take about as long as their computation.
Not reproduced: four GPUs.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ecorec.collection import KeyedJaggedTensor, TableConfig
from ecorec.pipeline_benchmark import table_batch
from ecorec.sharding_plan import (
    Plan,
    StepProfile,
    TableStatistics,
    plan,
    plan_of_traces,
    table_bytes,
)
from ecorec.table_wise_pipeline import DistributedTTCollection
from septet_shared import ranks as ranks_module
from septet_shared.experiment import Claim, Rows, Sweep
from septet_shared.link import LinkSpec, emulate
from septet_shared.profiling import bench_row, compare
from septet_shared.ranks import Ranks
from septet_shared.streams import Op, OpGraph, Timeline, simulate

NAME = "figure16"
TITLE = "Batch-wise and table-wise pipelines, order and group sizes"
SCALES = {
    "smoke": Sweep(tables=6, local_batch=256, rounds=3, simulated_tables=40, simulated_ranks=4),
    "cpu": Sweep(tables=16, local_batch=1024, rounds=9, simulated_tables=100, simulated_ranks=4),
    "paper": Sweep(tables=0, local_batch=0, rounds=0, simulated_tables=100, simulated_ranks=16),
}
_FROM = "figure 16, developer run in the artifact's history; 4 GPUs, Meta-100"
PAPER = [
    {"name": "step", "variant": variant, "value": milliseconds / 1e3, "from": _FROM}
    for variant, milliseconds in (
        ("BWP", 676.1),
        ("TWP", 467.9),
        ("TWP + reorder", 448.5),
        ("TWP + reorder + slope", 442.4),
    )
]
FIGURES = ("value",)
PIECES = 4  # of the batch, or groups of tables
LOCAL_BATCH = 4096  # simulated
LINK_GBIT = 2.0
TIMEOUT_S = 300.0


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measured rows on two ranks, where there is a size for them; simulated rows."""
    if sweep.tables:
        yield from ranks_module.run(
            _measured, 2, sweep.tables, sweep.local_batch, sweep.rounds, ranks_per_machine=1,
            timeout_s=TIMEOUT_S,
        )[0]  # fmt: skip
    yield from _simulated(sweep.simulated_tables, sweep.simulated_ranks)


def claims(rows: Rows) -> Iterator[Claim]:
    """BWP is slower on real ranks; each part gains where it is simulated."""
    measured = rows.where(kind="measured", name="step")
    if len(measured):
        ratio = measured.where(variant="TWP")[0]["ratio"]
        words = "a batch-wise pipeline takes longer than a table-wise one"
        yield Claim(words, ratio > 1, f"{ratio:.2f}x")
    steps = {row["variant"]: row["value"] for row in rows.where(kind="simulated")}
    names = ["TWP", "TWP + reorder", "TWP + reorder + slope", "ours"]
    # Ties are legal; their sums may differ in the last bit.
    falls = all(steps[a] >= steps[b] * (1 - 1e-9) for a, b in pairwise(names))
    yield Claim(
        "simulated: TWP >= with reordering >= with slope >= the plan that is searched",
        falls,
        ", ".join(f"{steps[name] * 1e3:.2f}" for name in names) + " ms",
    )


def plot(rows: Rows, ax: Any) -> None:
    """Milliseconds of a step, measured and simulated."""
    found = rows.where(name="step")
    names = [f"{row['variant']}\n{row['kind']}" for row in found]
    ax.bar(names, [1e3 * value for value in found.column("value")])
    ax.set(ylabel="ms of a step")
    ax.tick_params(axis="x", labelsize=7)


def _measured(ranks: Ranks, tables: int, local_batch: int, rounds: int) -> list[dict[str, Any]]:
    configs, features, known = table_batch(ranks.rank, tables, local_batch)
    made = plan(
        configs, known, world_size=ranks.size, local_batch=local_batch, kinds=("tw",),
        groups=PIECES, order="given",
    )  # fmt: skip

    def collection() -> DistributedTTCollection:
        return DistributedTTCollection(
            configs, ranks, plan=made, optimizer="sgd", lr=1e-6,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip

    table_wise, batch_wise = collection(), collection()
    pieces = _cut(features, PIECES)

    def step(pooled: Tensor) -> Tensor:
        loss = pooled.square().sum()
        torch.autograd.backward(loss)
        return loss.detach()

    calls = {
        "TWP": lambda: step(table_wise(features).values()),
        "BWP": lambda: step(_batch_wise(batch_wise, pieces)),
    }
    seconds = max(ranks.all_gather_object(compare(calls, rounds=2).timings["TWP"].median_s))
    sent = local_batch * sum(t.embedding_dim for t in configs) / ranks.size
    with emulate(ranks, LinkSpec(2 * 4 * sent * (ranks.size - 1) / seconds)):
        found = compare(calls, rounds=rounds)
    ratio = found.ratio("BWP", "TWP")
    notes = f"{tables} tables, {local_batch} samples a rank, {ranks.size} ranks, emulated link"
    step_s = {name: timing.median_s for name, timing in found.timings.items()}
    return [
        bench_row("step", "TWP", step_s["TWP"], "s", peer="BWP", ratio=ratio, notes=notes),
        bench_row("step", "BWP", step_s["BWP"], "s", notes=notes),
    ]


def _cut(features: KeyedJaggedTensor, count: int) -> list[KeyedJaggedTensor]:
    """The samples in so many pieces."""
    keys, stride = features.keys(), features.stride()
    found = []
    for piece in range(count):
        begin, end = stride * piece // count, stride * (piece + 1) // count
        values, lengths = [], []
        for k in range(len(keys)):
            edges = features.offsets()[[k * stride + begin, k * stride + end]].tolist()
            values.append(features.values()[slice(*edges)])
            lengths.append(features.lengths()[k * stride + begin : k * stride + end])
        found.append(KeyedJaggedTensor(keys, torch.cat(values), torch.cat(lengths)))
    return found


def _batch_wise(collection: DistributedTTCollection, pieces: Sequence[KeyedJaggedTensor]) -> Tensor:
    """The port of BWP: a piece's rows travel while the next piece is looked up in all tables."""
    exchanges = [collection._exchange(piece) for piece in pieces]
    for exchange in exchanges:
        exchange.depart(collection.ranks)
    departed = [collection._departed(exchange) for exchange in exchanges]
    return torch.cat([collection._arrived(*each).values() for each in departed])


def _simulated(tables: int, ranks: int) -> Iterator[dict[str, Any]]:
    configs, known = plan_of_traces(tables, ranks, LOCAL_BATCH)
    profile = StepProfile(link_bytes_per_s=LINK_GBIT * 1e9 / 8)
    variants: dict[str, dict[str, Any]] = {
        "TWP": {"kinds": ("tw",), "groups": PIECES, "order": "given"},
        "TWP + reorder": {"kinds": ("tw",), "groups": PIECES},
        "TWP + reorder + slope": {"kinds": ("tw",), "groups": "slope"},
        "ours": {},
    }
    for variant, options in variants.items():
        made = plan(
            configs, known, world_size=ranks, local_batch=LOCAL_BATCH, profile=profile, **options
        )
        step_s = timeline(made, configs, known, profile).makespan_s
        notes = f"{tables} tables, {LOCAL_BATCH} samples a rank, {ranks} ranks, {LINK_GBIT} Gbit/s"
        yield bench_row("step", variant, step_s, "s", kind="simulated", notes=notes)


def timeline(
    made: Plan,
    tables: Sequence[TableConfig],
    known: Mapping[str, TableStatistics],
    profile: StepProfile,
) -> Timeline:
    """A step of a plan, op by op: a stream for computation and one for the link on each rank."""
    graphs = [_graph(rank, made, tables, known, profile) for rank in range(made.world_size)]
    return simulate(graphs, "cpu-2core")  # every op brings its seconds, so no rate is asked for


def _graph(
    rank: int,
    made: Plan,
    tables: Sequence[TableConfig],
    known: Mapping[str, TableStatistics],
    profile: StepProfile,
) -> OpGraph:
    graph, batch, others = OpGraph(), made.local_batch, made.world_size - 1
    of_name = {table.name: table for table in tables}
    replicas = [name for name, kind in made.kind.items() if kind == "dp"]

    def compute(name: str, of: Sequence[str], samples: int, times: float, *after: Op) -> Op:
        seconds = sum(profile.forward_s(of_name[n], known[n], samples) for n in of)
        return graph.op(name, stream="compute", seconds=times * seconds, after=after)

    def carry(name: str, nbytes: float, *after: Op, rounds: int = 1) -> Op:
        seconds = rounds * profile.link_latency_s * others + nbytes / profile.link_bytes_per_s
        return graph.op(
            name, stream="link", seconds=seconds if others else 0.0, collective=True, after=after
        )

    def rows_bytes(group: Sequence[str]) -> float:
        """Of the rank that sends most, which is more than any receives."""
        width = [0] * made.world_size
        for name in group:
            table = of_name[name]
            width[made.owner[name]] += 4 * table.embedding_dim * len(table.feature_names)
        return batch * others * max(width)

    own = [[name for name in group if made.owner[name] == rank] for group in made.groups]
    arrived = []
    for g, group in enumerate(made.groups):
        pooled = compute(f"forward {g}", own[g], batch * made.world_size, 1.0)
        arrived.append(carry(f"rows {g}", rows_bytes(group), pooled))
    compute("forward of replicas", replicas, batch, 1.0)
    mlp = graph.op("MLP", stream="compute", seconds=profile.mlp_s * batch, after=arrived)
    last = compute("backward of replicas", replicas, batch, profile.backward)
    for g in reversed(range(len(made.groups))):
        back = carry(f"gradients {g}", rows_bytes(made.groups[g]), mlp)
        last = compute(f"backward {g}", own[g], batch * made.world_size, profile.backward, back)
    if made.groups:
        lookups = sum(k.lookups_per_sample for k in known.values()) * batch
        lengths = sum(len(table.feature_names) for table in tables) * batch
        carry("next indices", 4 * (lookups + lengths) * others / made.world_size)
    for name, nbytes in (
        ("replicas", sum(table_bytes(of_name[n]) for n in replicas)),
        ("MLP gradients", profile.mlp_bytes),
    ):
        if nbytes:
            carry(f"sum of {name}", 2 * nbytes * others / made.world_size, last, rounds=2)
    return graph
