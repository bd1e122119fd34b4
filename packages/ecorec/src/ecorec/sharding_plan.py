"""Which rank computes which table, and in which groups their rows travel.

A plan is judged by its predicted step, from the costs of tables and of the link:

    forward   a rank computes its tables group by group; a group's exchange starts when every rank
              has computed it and the exchange before is over
    MLP       after the last exchange and the replicas, forward and backward
    backward  all gradients leave, last group first, then the indices of the next batch; a group's
              tables follow their exchange
    updates   gradients of replicas and of the MLP are summed over ranks

Source: EcoRec, SC 2024 (greedy longest first, order by cost, slope); kinds per table and the search
are ours.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .collection import TableConfig
from .shape_search import suggest
from .shapes import TTSpec, check_positive, product_ns, row_ns

Floats = NDArray[np.float64]
KINDS = ("tw", "dp")
ORDERS = ("cost", "given")
GROUPS = ("auto", "slope")
MOST_GROUPS = 8
SLOPE_GROUPS, SLOPE = 4, 1.5  # of the paper: groups, and the first over the mean
ITEM, INDEX_ITEM = 4, 4  # bytes of a number, of an index


@dataclass(frozen=True)
class TableStatistics:
    """How a table is looked up; enough for a batch of any size.

    lookups_per_sample: of all its features together. Different rows of V lookups are
    min(V, N, factor * V^exponent) (Heaps' law).
    """

    lookups_per_sample: float
    factor: float = 1.0
    exponent: float = 1.0

    def uniques(self, lookups: float, rows: int) -> float:
        """Expected different rows of so many lookups of a table of so many rows."""
        return min(lookups, float(rows), self.factor * math.pow(lookups, self.exponent))

    @staticmethod
    def measure(indices: Tensor, samples: int) -> "TableStatistics":
        """The statistics of a batch: indices [V] of so many samples. Cost: two sorts of V."""
        lookups = len(indices)
        if lookups < 2:
            return TableStatistics(lookups / max(samples, 1))
        whole, half = (len(torch.unique(part)) for part in (indices, indices[: lookups // 2]))
        return _heaps(lookups / max(samples, 1), lookups // 2, half, lookups, whole)


def _heaps(
    per_sample: float, few: float, of_few: float, many: float, of_many: float
) -> TableStatistics:
    exponent = math.log(max(of_many, 1) / max(of_few, 1)) / math.log(many / few)
    exponent = min(max(exponent, 0.0), 1.0)
    return TableStatistics(per_sample, max(of_many, 1) / math.pow(many, exponent), exponent)


@dataclass(frozen=True)
class StepProfile:
    """What things take on a rank.

    compute: times of the C++ kernels' cost model (`TTSpec.explain`); table_s: beside, of each call.
    lookup_ns: of each lookup, tt or dense. backward: over the forward. mlp_s: of a sample, forward
    and backward. mlp_bytes: of its parameters. link_bytes_per_s, link_latency_s: of a rank.
    memory_bytes: for the tables of a rank; None for no limit.
    """

    compute: float = 1.0
    table_s: float = 1e-4
    lookup_ns: float = 15.0
    backward: float = 2.0
    mlp_s: float = 2e-6
    mlp_bytes: int = 1 << 20
    link_bytes_per_s: float = 1.25e9
    link_latency_s: float = 2e-5
    memory_bytes: int | None = None

    def forward_s(self, table: TableConfig, known: TableStatistics, samples: float) -> float:
        """Seconds of a forward of a table, with so many samples."""
        lookups = known.lookups_per_sample * samples
        seconds = self.table_s + 1e-9 * self.lookup_ns * lookups
        spec = spec_of(table)
        if spec is not None and lookups:
            uniques = known.uniques(lookups, table.num_embeddings)
            *before, last = spec.q
            nanoseconds = uniques * row_ns(math.prod(before), spec.ranks[-1], last)
            for k in range(1, len(spec.p) - 1):
                prefixes = min(uniques, math.prod(spec.p[: k + 1]))
                columns = math.prod(spec.q[: k + 1])
                nanoseconds += prefixes * product_ns(columns, *spec.ranks[k - 1 : k + 1])
            seconds += 1e-9 * self.compute * nanoseconds
        return seconds


def spec_of(table: TableConfig) -> TTSpec | None:
    """The shape of a tt table; None for a dense one."""
    if table.kind == "dense":
        return None
    if table.spec is not None:
        return table.spec
    rank = 32 if table.rank is None else table.rank
    cores = len(rank) + 1 if isinstance(rank, Sequence) else 3
    return suggest(table.num_embeddings, table.embedding_dim, rank=rank, ndim=cores)


def table_bytes(table: TableConfig) -> int:
    """Bytes of a table's parameters."""
    spec = spec_of(table)
    return table.num_embeddings * table.embedding_dim * ITEM if spec is None else spec.bytes


@dataclass(frozen=True)
class Plan:
    """Who computes what, and when it travels.

    kind: "tw" (an owner) or "dp" (replicas) of each table. owner: of each tw table.
    groups: the tw tables of all ranks, cut into exchanges, in the order of the forward.
    predicted_step_s: NaN where nothing was predicted.
    """

    kind: dict[str, str]
    owner: dict[str, int]
    groups: tuple[tuple[str, ...], ...]
    order: str
    world_size: int
    local_batch: int
    predicted_step_s: float = math.nan

    def check(self, tables: Sequence[TableConfig], world_size: int) -> None:
        """Raises ValueError when this is no plan for these tables and ranks."""
        names = {table.name for table in tables}
        owned = [name for name, kind in self.kind.items() if kind == "tw"]
        grouped = [name for group in self.groups for name in group]
        if set(self.kind) != names:
            differ = ", ".join(sorted(set(self.kind) ^ names))
            raise ValueError(f"plan must be for the tables given; it differs in {differ}")
        if self.world_size != world_size:
            raise ValueError(f"plan must be for {world_size} ranks; it is for {self.world_size}")
        if sorted(grouped) != sorted(owned) or set(self.owner) != set(owned):
            raise ValueError("plan must have each tw table in one group and with one owner")
        if not all(0 <= rank < world_size for rank in self.owner.values()):
            raise ValueError(f"owners must be in [0, {world_size}); got {self.owner}")

    def explain(self) -> str:
        """Lines for people: kinds, what each rank owns, groups, the predicted step."""
        owned = [sum(r == rank for r in self.owner.values()) for rank in range(self.world_size)]
        lines = [
            f"{len(self.kind)} tables on {self.world_size} ranks: {len(self.owner)} with an owner, "
            f"{len(self.kind) - len(self.owner)} on every rank",
            f"tables of each rank: {', '.join(map(str, owned))}",
            f"groups of {', '.join(str(len(group)) for group in self.groups) or 'none'}, order "
            f"{self.order}",
        ]
        if not math.isnan(self.predicted_step_s):
            lines.append(
                f"predicted step with {self.local_batch} samples a rank: "
                f"{self.predicted_step_s * 1e3:.3f} ms"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as text; `from_json` reads it."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that `to_json` wrote."""
        found = json.loads(text)
        return Plan(**{**found, "groups": tuple(map(tuple, found["groups"]))})


class _Costs(NamedTuple):
    """Seconds and bytes of each table: of the global batch (tw), of a local one (dp)."""

    tw: Floats
    dp: Floats
    row_bytes: Floats  # of one sample's pooled rows
    table_bytes: Floats
    index_bytes: float  # of a rank's indices


def plan(
    tables: Sequence[TableConfig],
    statistics: Mapping[str, TableStatistics],
    *,
    world_size: int,
    local_batch: int,
    profile: StepProfile | None = None,
    kinds: Sequence[str] = KINDS,
    groups: str | int = "auto",
    order: str = "cost",
) -> Plan:
    """The plan with the least predicted step that is found.

    Args:
        tables: one or more, names all different.
        statistics: of each table, by name.
        world_size: W. local_batch: samples of a rank.
        profile: what things take; None for one rank of this kind of CPU on 10 Gbit/s.
        kinds: of tables that are allowed.
        groups: "auto" (the best of what is tried), "slope" (four, falling linearly), or how many.
        order: "cost" (cheap tables first in the forward) or "given".

    All tables with owners, all on every rank, and either with the paper's slope are among what is
    tried; from the best, single tables change kind or owner as long as that is predicted to gain.

    Raises:
        ValueError: an unknown word, a number below 1, a table without statistics, a repeated name,
            or no plan within memory_bytes.

    Cost: 3 * tables predictions of W * groups steps; 788 tables on 32 ranks take seconds.
    """
    profile = profile or StepProfile()
    check_positive("world_size", world_size)
    check_positive("local_batch", local_batch)
    names = [table.name for table in tables]
    _check_words(names, kinds, groups, order)
    absent = [name for name in names if name not in statistics]
    if absent:
        raise ValueError(f"statistics must have every table; they lack {', '.join(absent)}")
    costs = _costs(tables, statistics, world_size, local_batch, profile)
    event = _Event(costs, world_size, local_batch, profile)
    starts: list[NDArray[np.int64]] = []
    if "tw" in kinds:
        starts.append(_longest_first(costs.tw, world_size))
    if "dp" in kinds:
        starts.append(np.full(len(tables), -1))
    cuts: list[str | int] = [groups]
    if groups == "auto":
        cuts = ["slope", *range(1, MOST_GROUPS + 1)]
    best: tuple[float, NDArray[np.int64], str | int] | None = None
    for owners in starts:
        for cut in cuts:
            found = event.step_s(owners, _group_of(costs.tw, owners, world_size, cut, order), True)
            if best is None or found < best[0]:
                best = (found, owners, cut)
    assert best is not None
    if len(kinds) > 1 and groups == "auto":
        best = _searched(best, event, costs, world_size, order)
    step_s, owners, cut = best
    if math.isinf(step_s):
        raise ValueError(
            f"memory_bytes must hold a rank's tables; with {profile.memory_bytes} no plan of "
            f"{', '.join(kinds)} does: all tables take {int(costs.table_bytes.sum())}"
        )
    number = _group_of(costs.tw, owners, world_size, cut, order)
    return _as_plan(names, owners, number, costs, world_size, local_batch, order, step_s)


def predict(
    plan: Plan,
    tables: Sequence[TableConfig],
    forward_s: Mapping[str, float],
    profile: StepProfile,
    *,
    index_bytes: float = 0.0,
    overlap: bool = True,
) -> float:
    """Seconds of a step of a plan whose tables take what was measured.

    Args:
        plan, tables: as they run.
        forward_s: seconds of each table's forward, on its owner with the samples of all ranks, or
            on every rank with its own.
        profile: the link, the MLP, and backward over forward.
        index_bytes: of a rank's lookups in tables with an owner.
        overlap: whether a group travels while the next is computed, and indices behind the
            backward of the batch before.
    """
    number = {name: g for g, names in enumerate(plan.groups) for name in names}
    seconds = np.array([forward_s[table.name] for table in tables])
    rows = [table.embedding_dim * len(table.feature_names) * ITEM for table in tables]
    nbytes = [table_bytes(table) if plan.kind[table.name] == "dp" else 0 for table in tables]
    costs = _Costs(seconds, seconds, np.array(rows, float), np.array(nbytes, float), index_bytes)
    event = _Event(costs, plan.world_size, plan.local_batch, profile)
    owners = np.array([plan.owner.get(table.name, -1) for table in tables])
    group = np.array([number.get(table.name, 0) for table in tables])
    return event.step_s(owners, group, overlap)


def simple_plan(
    tables: Sequence[TableConfig],
    word: str,
    world_size: int,
    *,
    groups: int | str = "auto",
    order: str = "cost",
    local_batch: int = 1024,
) -> Plan:
    """The plan "tw", "dp" or "auto" when nothing is known of the batches: one lookup a feature."""
    if word not in ("auto", *KINDS):
        raise ValueError(f"plan must be auto, tw, dp or a Plan; got {word!r}")
    known = {table.name: TableStatistics(float(len(table.feature_names))) for table in tables}
    kinds = KINDS if word == "auto" else (word,)
    return plan(
        tables, known, world_size=world_size, local_batch=local_batch, kinds=kinds, groups=groups,
        order=order,
    )  # fmt: skip


def plan_rows(
    tables: str, *, ranks: int, local_batch: int, link_gbit: float = 100.0
) -> list[dict[str, Any]]:
    """Rows `predicted_step` of the plans auto, tw, dp and slope for a population of tables.

    Args:
        tables: "meta788" (`traces.meta788`), "meta480" or "meta240", its first tables.
        ranks: W. local_batch: samples of a rank. link_gbit: of a rank, Gbit/s.

    Raises:
        ValueError: unknown tables, or a number that is not positive.

    Cost: seconds.
    """
    from septet_shared.profiling import bench_row

    counts = {"meta788": 788, "meta480": 480, "meta240": 240}
    if tables not in counts:
        raise ValueError(f"tables must be one of {', '.join(counts)}; got {tables!r}")
    if not link_gbit > 0:
        raise ValueError(f"link_gbit must be above 0; got {link_gbit}")
    configs, known = plan_of_traces(counts[tables], ranks, local_batch)
    profile = StepProfile(link_bytes_per_s=link_gbit * 1e9 / 8)
    rows = []
    variants: dict[str, tuple[tuple[str, ...], str]] = {
        "auto": (KINDS, "auto"),
        "tw": (("tw",), "auto"),
        "dp": (("dp",), "auto"),
        "slope": (("tw",), "slope"),
    }
    for variant, (kinds, groups) in variants.items():
        found = plan(
            configs, known, world_size=ranks, local_batch=local_batch, profile=profile,
            kinds=kinds, groups=groups,
        )  # fmt: skip
        notes = f"{len(found.owner)} of {len(configs)} tables with an owner, "
        notes += f"{len(found.groups)} groups; {ranks} ranks"
        step_s = found.predicted_step_s
        rows.append(
            bench_row("predicted_step", variant, step_s, "s", kind="simulated", notes=notes)
        )
    return rows


def plan_of_traces(
    count: int, ranks: int, local_batch: int
) -> tuple[list[TableConfig], dict[str, TableStatistics]]:
    """The first tables of `traces.meta788`, 32 columns and rank 32, and their statistics.

    Statistics are right at `local_batch` samples and at those of all ranks.
    """
    from .traces import meta788

    traces = meta788()[:count]
    configs = [TableConfig(t.name, t.num_embeddings, 32, [t.name], rank=32) for t in traces]
    few, many = local_batch, local_batch * max(ranks, 2)
    known = {
        t.name: _heaps(
            t.pooling,
            few * t.pooling, t.expected_uniques(few * t.pooling),
            many * t.pooling, t.expected_uniques(many * t.pooling),
        )
        for t in traces
    }  # fmt: skip
    return configs, known


def _check_words(names: Sequence[str], kinds: Sequence[str], groups: str | int, order: str) -> None:
    if not names:
        raise ValueError("tables must be one or more; got none")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"names of tables must differ; got {', '.join(repeated)} more than once")
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(f"kinds must be some of {', '.join(KINDS)}; got {tuple(kinds)}")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
    if isinstance(groups, str) and groups not in GROUPS:
        raise ValueError(f"groups must be one of {', '.join(GROUPS)} or a number; got {groups!r}")
    if not isinstance(groups, str):
        check_positive("groups", groups)


def _costs(
    tables: Sequence[TableConfig],
    statistics: Mapping[str, TableStatistics],
    world_size: int,
    local_batch: int,
    profile: StepProfile,
) -> _Costs:
    def forward(samples: int) -> Floats:
        return np.array([profile.forward_s(t, statistics[t.name], samples) for t in tables])

    known = [statistics[table.name] for table in tables]
    lookups = sum(k.lookups_per_sample for k in known) * local_batch
    features = sum(len(table.feature_names) for table in tables) * local_batch
    rows = [table.embedding_dim * len(table.feature_names) * ITEM for table in tables]
    return _Costs(
        tw=forward(world_size * local_batch),
        dp=forward(local_batch),
        row_bytes=np.array(rows, dtype=np.float64),
        table_bytes=np.array([table_bytes(table) for table in tables], dtype=np.float64),
        index_bytes=INDEX_ITEM * (lookups + features),
    )


class _Event:
    """The predicted step of owners [T] (-1 for dp) and groups [T]; the model of the module."""

    def __init__(
        self, costs: _Costs, world_size: int, local_batch: int, profile: StepProfile
    ) -> None:
        self.costs, self.size, self.batch, self.profile = costs, world_size, local_batch, profile

    def parts(
        self, owners: NDArray[np.int64], group: NDArray[np.int64], overlap: bool
    ) -> tuple[Floats, Floats, float]:
        """(compute [W, G], exchange [G], compute of replicas), seconds of a forward."""
        tw = owners >= 0
        count = int(group.max(initial=-1)) + 1
        compute, rows = np.zeros((self.size, count)), np.zeros((self.size, count))
        np.add.at(compute, (owners[tw], group[tw]), self.costs.tw[tw])
        np.add.at(rows, (owners[tw], group[tw]), self.costs.row_bytes[tw])
        p = self.profile
        out = rows * self.batch * (self.size - 1)  # a rank sends its tables' rows to the others
        into = (rows.sum(0) - rows) * self.batch
        bytes_moved = np.maximum(out, into).max(0, initial=0.0)
        exchange = p.link_latency_s * (self.size - 1) + bytes_moved / p.link_bytes_per_s
        if self.size == 1:
            exchange[:] = 0
        return compute, exchange, float(self.costs.dp[~tw].sum())

    def step_s(self, owners: NDArray[np.int64], group: NDArray[np.int64], overlap: bool) -> float:
        """Seconds; infinite beyond the memory of a rank."""
        p, tw = self.profile, owners >= 0
        if p.memory_bytes is not None:
            held = np.bincount(owners[tw], self.costs.table_bytes[tw], minlength=self.size)
            if held.max() + self.costs.table_bytes[~tw].sum() > p.memory_bytes:
                return math.inf
        compute, exchange, replicas = self.parts(owners, group, overlap)
        count = len(exchange)
        ready, link = np.zeros(self.size), 0.0
        for g in range(count):
            ready = ready + compute[:, g]
            link = max(float(ready.max()), link) + exchange[g]
            if not overlap:
                ready[:] = link
        now = max(float(ready.max()) + replicas, link) + p.mlp_s * self.batch
        link, ready = now, np.full(self.size, now + p.backward * replicas)
        for g in reversed(range(count)):
            link = (link if overlap else max(link, float(ready.max()))) + exchange[g]
            ready = np.maximum(ready, link) + p.backward * compute[:, g]
        end = float(ready.max())
        if tw.any() and self.size > 1:  # indices of the next batch, behind the gradients
            share = (self.size - 1) / self.size
            index_s = self.costs.index_bytes * share / p.link_bytes_per_s
            index_s += p.link_latency_s * (self.size - 1)
            end = max(end, link + index_s) if overlap else end + index_s
        summed = [self.costs.table_bytes[~tw].sum(), p.mlp_bytes]
        if self.size > 1:
            share = 2 * (self.size - 1) / self.size / p.link_bytes_per_s
            end += sum(
                share * nbytes + 2 * (self.size - 1) * p.link_latency_s
                for nbytes in summed
                if nbytes
            )
        return end


def _longest_first(costs: Floats, world_size: int) -> NDArray[np.int64]:
    """Owners [T]: each table, dearest first, goes to the rank with least to do."""
    owners, load = np.zeros(len(costs), dtype=np.int64), np.zeros(world_size)
    for table in np.argsort(-costs, kind="stable"):
        rank = int(load.argmin())
        owners[table] = rank
        load[rank] += costs[table]
    return owners


def _group_of(
    costs: Floats, owners: NDArray[np.int64], world_size: int, cut: str | int, order: str
) -> NDArray[np.int64]:
    """[T] the group of each tw table; of dp tables 0."""
    group = np.zeros(len(costs), dtype=np.int64)
    for rank in range(world_size):
        mine = np.flatnonzero(owners == rank)
        if order == "cost":
            mine = mine[np.argsort(costs[mine], kind="stable")]
        count = SLOPE_GROUPS if cut == "slope" else int(cut)
        count = min(count, max(len(mine), 1))
        shares = np.ones(count)
        if cut == "slope" and count > 1:
            shares = np.linspace(SLOPE, 2 - SLOPE, count)
        ends = np.round(np.cumsum(shares) / shares.sum() * len(mine)).astype(int)
        group[mine] = np.searchsorted(ends, np.arange(len(mine)), side="right")
    return group


def _searched(
    best: tuple[float, NDArray[np.int64], str | int],
    event: _Event,
    costs: _Costs,
    world_size: int,
    order: str,
) -> tuple[float, NDArray[np.int64], str | int]:
    """From the best start: single tables change kind or owner while that is predicted to gain."""
    step_s, owners, cut = best
    owners = owners.copy()
    for table in np.argsort(-costs.tw, kind="stable"):
        before = owners[table]
        load = np.bincount(owners[owners >= 0], costs.tw[owners >= 0], minlength=world_size)
        for after in {-1, int(load.argmin())} - {int(before)}:
            owners[table] = after
            group = _group_of(costs.tw, owners, world_size, cut, order)
            found = event.step_s(owners, group, True)
            if found < step_s * (1 - 1e-9):
                step_s, before = found, after
            owners[table] = before
    for number in ("slope", *range(1, MOST_GROUPS + 1)):
        group = _group_of(costs.tw, owners, world_size, number, order)
        found = event.step_s(owners, group, True)
        if found < step_s:
            step_s, cut = found, number
    return step_s, owners, cut


def _as_plan(
    names: Sequence[str],
    owners: NDArray[np.int64],
    number: NDArray[np.int64],
    costs: _Costs,
    world_size: int,
    local_batch: int,
    order: str,
    step_s: float,
) -> Plan:
    places = range(len(names))
    if order == "cost":
        places = sorted(places, key=lambda k: costs.tw[k])  # type: ignore[assignment]
    tw = [k for k in places if owners[k] >= 0]
    count = 1 + max((int(number[k]) for k in tw), default=-1)
    return Plan(
        kind={name: "tw" if owners[k] >= 0 else "dp" for k, name in enumerate(names)},
        owner={names[k]: int(owners[k]) for k in range(len(names)) if owners[k] >= 0},
        groups=tuple(tuple(names[k] for k in tw if number[k] == g) for g in range(count)),
        order=order,
        world_size=world_size,
        local_batch=local_batch,
        predicted_step_s=float(step_s),
    )
