"""A pipelined step beside a blocking one, on real ranks with an emulated link: `bench pipeline`."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
NO_LINK = LinkSpec(1e15, 0.0)
TABLES, ROWS, DIM, RANK, POOLING = 16, 1_000_000, 32, 16, 12
LOCAL_BATCH = 4096


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
    names = ("pipelined", "blocking", "free")
    trainers = {n: _trainer(ranks, tables, made, overlap=n != "blocking") for n in names}
    first = _trainer(ranks, tables, made, overlap=True)
    first_s = max(ranks.all_gather_object(_median_s(lambda: first.step(batch, batch), 9)))
    sent = sum(t.embedding_dim for t in tables if made.owner[t.name] == ranks.rank)
    index_bytes = 4.0 * (len(features.values()) + len(features.lengths()))
    nbytes = 2 * 4 * LOCAL_BATCH * (ranks.size - 1) * max(ranks.all_gather_object(sent))
    nbytes += index_bytes * (ranks.size - 1) / ranks.size
    spec = LinkSpec(nbytes / first_s if link == "auto" else link, LATENCY_S)
    free, one = _TimedStep(trainers["free"]), [1] * ranks.size
    with emulate(ranks, spec) as emulated:
        # What an exchange takes that carries next to nothing: the link's latency, and the meeting.
        empty_s = _median_s(lambda: ranks.all_to_all_rows(torch.zeros(ranks.size), one, one), 21)

        def free_step() -> Tensor:
            ranks.barrier("before a step without a link")
            emulated.change(NO_LINK)
            loss = free.step(batch)
            ranks.barrier("after a step without a link")
            emulated.change(spec)
            return loss

        found = compare(
            {
                "pipelined": lambda: trainers["pipelined"].step(batch, batch),
                "blocking": lambda: trainers["blocking"].step(batch),
                "free": free_step,
            },
            rounds=rounds,
        )
    step_s = {name: timing.median_s for name, timing in found.timings.items()}
    parts = ranks.all_gather_object(free.parts())
    forward_s, middle_s, backward_s = (sum(part[k] for part in parts) for k in range(3))
    profile = StepProfile(
        backward=backward_s / forward_s, mlp_s=middle_s / ranks.size / LOCAL_BATCH, mlp_bytes=4,
        link_bytes_per_s=spec.bytes_per_s,
        link_latency_s=max(ranks.all_gather_object(empty_s)) / (ranks.size - 1),
    )  # fmt: skip
    of_owner = {name: seconds for *_, tables_s in parts for name, seconds in tables_s.items()}
    rate = f"{spec.bytes_per_s * 8 / 1e9:.3g} Gbit/s emulated, {ranks.size} ranks"
    rows = [_step_row(found.ratio("blocking", "pipelined"), step_s, rate)]
    exposed = max(0.0, step_s["pipelined"] - step_s["free"]) / step_s["pipelined"]
    notes = f"of a step, beyond one without a link; {rate}"
    rows.append(bench_row("exposed", "pipelined", exposed, "fraction", notes=notes))
    # What a step without a link has beside these parts: ranks that wait for each other.
    no_link = replace(profile, link_bytes_per_s=NO_LINK.bytes_per_s, link_latency_s=0.0)
    beside_s = step_s["free"] - predict(made, tables, of_owner, no_link)
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


class _TimedStep:
    """Steps of a trainer, and what their parts take: until the last table's forward, from there
    until the first table's backward, and the rest.
    """

    def __init__(self, trainer: PipelinedTrainer) -> None:
        self._trainer = trainer
        self._phases: list[tuple[float, float, float]] = []
        self._tables: dict[str, list[float]] = {}
        self._gradient_came = 0.0
        for name, bag in trainer.collections[0].embedding_bags.items():
            self._tables[name] = []
            bag.register_forward_pre_hook(self._before)
            bag.register_forward_hook(partial(self._after, self._tables[name]))

    def step(self, batch: Batch) -> Tensor:
        """As PipelinedTrainer.step, with the same batch next."""
        self._gradient_came = 0.0
        begin = time.perf_counter()
        loss = self._trainer.step(batch, batch)
        middle, end = self._forward_ended, time.perf_counter()
        phases = middle - begin, self._gradient_came - middle, end - self._gradient_came
        self._phases.append(phases)
        return loss

    def parts(self) -> tuple[float, float, float, dict[str, float]]:
        """Median seconds of the three parts, and of the first one's tables, which share all of it:
        rows are packed and carried beside them.
        """
        forward, middle, backward = map(statistics.median, zip(*self._phases, strict=True))
        seconds = {name: statistics.median(found) for name, found in self._tables.items()}
        share = forward / sum(seconds.values())
        return forward, middle, backward, {name: share * s for name, s in seconds.items()}

    def _before(self, *_: Any) -> None:
        self._forward_began = time.perf_counter()

    def _after(self, seconds: list[float], bag: nn.Module, given: Any, pooled: Tensor) -> None:
        self._forward_ended = time.perf_counter()
        seconds.append(self._forward_ended - self._forward_began)
        pooled.register_hook(self._gradient)  # type: ignore[no-untyped-call]

    def _gradient(self, gradient: Tensor) -> None:
        self._gradient_came = self._gradient_came or time.perf_counter()


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _median_s(call: Callable[[], object], repeats: int) -> float:
    return statistics.median(_seconds(call) for _ in range(repeats))
