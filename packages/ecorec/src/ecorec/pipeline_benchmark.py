"""A pipelined step beside a blocking one, on real ranks with an emulated link: `bench pipeline`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from septet_shared import ranks as ranks_module
from septet_shared.link import LinkSpec, emulate
from septet_shared.profiling import Ratio, bench_row, compare
from septet_shared.ranks import Ranks

from .collection import KeyedJaggedTensor, TableConfig
from .pipelined_trainer import PipelinedTrainer
from .sharding_plan import Plan, StepProfile, TableStatistics, plan, predict
from .table_wise_pipeline import DistributedTTCollection

LATENCY_S = 100e-6
TABLES, ROWS, DIM, RANK, POOLING = 16, 1_000_000, 32, 16, 12
LOCAL_BATCH = 1024


@dataclass(frozen=True)
class Batch:
    """Lookups alone: what is timed is tables and exchanges."""

    sparse_features: KeyedJaggedTensor


class _SumOfSquares(nn.Module):
    def __init__(self, collection: DistributedTTCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, batch: Batch) -> Tensor:
        loss: Tensor = self.collection(batch.sparse_features).values().square().sum(1)
        return loss


def pipeline_rows(
    *, ranks: int = 2, link: str = "auto", rounds: int = 11, timeout_s: float = 300.0
) -> list[dict[str, Any]]:
    """Rows `step` (pipelined against blocking), `exposed` and `prediction_error`.

    Args:
        ranks: local processes, of one thread each.
        link: a rate like "1gbit" between them, or "auto": the exchanges of a blocking step take as
            long as its computation.
        rounds: interleaved.
        timeout_s: of the whole run.

    Raises:
        ValueError: fewer than two ranks, or a rate that is not understood.
        RankError: a rank failed.
    """
    if ranks < 2:
        raise ValueError(f"ranks must be at least 2; got {ranks}")
    if link != "auto":
        LinkSpec(link)
    return ranks_module.run(
        _measured, ranks, link, rounds, ranks_per_machine=1, timeout_s=timeout_s
    )[0]


def _measured(ranks: Ranks, link: str, rounds: int) -> list[dict[str, Any]]:
    tables, features, known = table_batch(ranks.rank, TABLES, LOCAL_BATCH)
    batch = Batch(features)
    made = plan(
        tables, known, world_size=ranks.size, local_batch=LOCAL_BATCH, kinds=("tw",), groups=6
    )
    free = _trainer(ranks, tables, made, overlap=True)
    forward_s, backward = _table_seconds(ranks, free, batch)
    alone_s = _median_s(lambda: free.step(batch, batch))
    pipelined = _trainer(ranks, tables, made, overlap=True)  # both start alike
    blocking = _trainer(ranks, tables, made, overlap=False)
    sent = sum(t.embedding_dim for t in tables if made.owner[t.name] == ranks.rank)
    index_bytes = 4.0 * (len(features.values()) + len(features.lengths()))
    nbytes = 2 * 4 * LOCAL_BATCH * (ranks.size - 1) * max(ranks.all_gather_object(sent))
    nbytes += index_bytes * (ranks.size - 1) / ranks.size
    spec = LinkSpec(nbytes / max(ranks.all_gather_object(alone_s)), LATENCY_S)
    if link != "auto":
        spec = LinkSpec(link, LATENCY_S)
    spec = ranks.all_gather_object(spec)[0]
    one = [1] * ranks.size
    with emulate(ranks, spec):
        # What an exchange takes that carries next to nothing: the link's latency, and the meeting.
        empty_s = _median_s(lambda: ranks.all_to_all_rows(torch.zeros(ranks.size), one, one), 21)
        found = compare(
            {
                "pipelined": lambda: pipelined.step(batch, batch),
                "blocking": lambda: blocking.step(batch),
            },
            rounds=rounds,
        )
    step_s = {name: timing.median_s for name, timing in found.timings.items()}
    profile = StepProfile(
        backward=backward, mlp_s=0.0, mlp_bytes=4, link_bytes_per_s=spec.bytes_per_s,
        link_latency_s=max(ranks.all_gather_object(empty_s)) / (ranks.size - 1),
    )  # fmt: skip
    every = ranks.all_gather_object(forward_s)
    of_owner = {name: every[made.owner[name]][name] for name in made.owner}
    rate = f"{spec.bytes_per_s * 8 / 1e9:.3g} Gbit/s emulated, {ranks.size} ranks"
    rows = [_step_row(found.ratio("blocking", "pipelined"), step_s, rate)]
    exposed = max(0.0, step_s["pipelined"] - alone_s) / step_s["pipelined"]
    notes = f"of a step, beyond one without a link; {rate}"
    rows.append(bench_row("exposed", "pipelined", exposed, "fraction", notes=notes))
    # What a step has beside its tables, where nothing travels: packing, checks, autograd.
    no_link = replace(profile, link_bytes_per_s=1e15, link_latency_s=0.0)
    beside_s = alone_s - predict(made, tables, of_owner, no_link)
    for name, overlap in (("pipelined", True), ("blocking", False)):
        predicted = beside_s + predict(
            made, tables, of_owner, profile, index_bytes=index_bytes, overlap=overlap
        )
        error = abs(predicted / step_s[name] - 1)
        notes = f"predicted {predicted * 1e3:.2f} ms, measured {step_s[name] * 1e3:.2f} ms"
        rows.append(
            bench_row("prediction_error", name, error, "fraction", must="<= 0.2", notes=notes)
        )
    return rows


def _step_row(ratio: Ratio, step_s: dict[str, float], rate: str) -> dict[str, Any]:
    return bench_row(
        "step", "pipelined", step_s["pipelined"], "s", peer="blocking", ratio=ratio,
        must=">= 1.3", notes=f"blocking {step_s['blocking'] * 1e3:.2f} ms; {rate}",
    )  # fmt: skip


def table_batch(
    rank: int, tables: int, samples: int
) -> tuple[list[TableConfig], KeyedJaggedTensor, dict[str, TableStatistics]]:
    """Tables of a million rows, a rank's lookups (few in some, many in others), and their law."""
    generator = torch.Generator().manual_seed(rank)
    counts = [round(POOLING * (0.5 + 1.5 * k / max(1, tables - 1))) for k in range(tables)]
    values, lengths = [], []
    for count in counts:
        skewed = torch.rand(samples * count, generator=generator) ** 3
        values.append((skewed * ROWS).long().clamp_(max=ROWS - 1))
        lengths.append(torch.full((samples,), count))
    configs = [TableConfig(f"t{k}", ROWS, DIM, [f"f{k}"], rank=RANK) for k in range(tables)]
    keys = [f"f{k}" for k in range(tables)]
    known = {t.name: TableStatistics(float(n)) for t, n in zip(configs, counts, strict=True)}
    return configs, KeyedJaggedTensor(keys, torch.cat(values), torch.cat(lengths)), known


def _trainer(
    ranks: Ranks, tables: Sequence[TableConfig], made: Plan, *, overlap: bool
) -> PipelinedTrainer:
    collection = DistributedTTCollection(
        tables, ranks, plan=made, overlap=overlap, optimizer="sgd", lr=1e-6,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return PipelinedTrainer(_SumOfSquares(collection), None, ranks)


def _table_seconds(
    ranks: Ranks, trainer: PipelinedTrainer, batch: Batch
) -> tuple[dict[str, float], float]:
    """(forward of each of this rank's tables with all ranks' lookups, backward over forward)."""
    collection = trainer.collections[0]
    exchange = collection._exchange(batch.sparse_features)
    exchange.depart(ranks)
    received, forward_s, backward_s = collection._received(exchange), {}, 0.0
    for name, (values, edges, weights) in received.items():
        bag = collection.embedding_bags[name]
        pooled = bag(values, edges, weights)
        gradient = torch.ones_like(pooled)
        forward_s[name] = _median_s(lambda: bag(values, edges, weights))  # noqa: B023
        both = _median_s(
            lambda: torch.autograd.backward(bag(values, edges, weights), gradient)  # noqa: B023
        )
        backward_s += both - forward_s[name]
    total = sum(ranks.all_gather_object(sum(forward_s.values())))
    return forward_s, sum(ranks.all_gather_object(backward_s)) / total


def _median_s(call: Any, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times[2:])[repeats // 2]
