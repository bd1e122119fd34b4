"""Predicted timelines of op graphs: a fluid discrete-event simulator of compute, links and copies.

The model
    stream       runs its ops one after another, in the order in which they were added.
    op           starts when its stream's previous op, every op of `after` and its slots allow it;
                 takes its `seconds` and the link's latency first, then its work.
    kind         is a unit of one rank: "link:<class>" (bytes), "gemm:<dtype>" (FLOP), "copy" and
                 "memory" (bytes). k ops of one kind at work together on a rank get 1/k of their
                 rates each; kinds at work together slow each other by the profile's interference
                 table alone. Latency and `seconds` take nothing from anybody.
    collective   the j-th collective of a stream starts when every rank has come to its own; each
                 rank's part then takes its own work, on its own link. Give all ranks the largest
                 part where they end together.
    slot         a buffer of a ring. An op that names it in `slot` takes it over: it waits for all
                 ops added before that name the slot, back to the previous one that took it. Ops
                 that only read it name it in `reads`; they wait for the op that took it last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

from septet_shared._whole_files import write_whole
from septet_shared.hardware import HardwareProfile, check_kind


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One node of an `OpGraph`, as given to `OpGraph.op`; `index` is its place in `graph.ops`."""

    index: int
    name: str
    stream: str
    kind: str | None
    work: float
    seconds: float
    collective: bool
    slots: tuple[Hashable, ...]
    reads: tuple[Hashable, ...]


class OpGraph:
    """The ops of one rank and what each waits for; `ops` lists them in the order added."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._named: dict[str, int] = {}
        self._before: list[set[int]] = []  # for each op, what it waits for ...
        self._next: list[list[int]] = []  # ... and what waits for it
        self._last: dict[str, int] = {}  # stream -> its last op
        self._taker: dict[Hashable, int] = {}  # slot -> the op that took it last ...
        self._readers: dict[Hashable, list[int]] = {}  # ... and who has read it since
        self._takers: dict[Hashable, set[int]] = {}
        self._awaited: dict[str, list[int]] = {}  # names in `after` that no op has yet
        self._collectives: dict[str, list[int]] = {}  # stream -> its collectives

    def op(
        self,
        name: str,
        *,
        stream: str,
        work: float = 0.0,
        kind: str | None = None,
        seconds: float = 0.0,
        collective: bool = False,
        after: Op | str | Iterable[Op | str] = (),
        slot: Hashable | list[Hashable] = None,
        reads: Hashable | list[Hashable] = None,
    ) -> Op:
        """The op added, to be named in `after` of others.

        name: unique in the graph. work: FLOP or bytes of `kind`. seconds: a fixed time before the
        work, that nothing shares or slows (launch, host synchronisation, a measured op). after: ops
        or names of ops, which may be added later. slot, reads: any hashable (("DI", 0)), or a list
        of several. Order matters for slots: add the readers of a slot before it is taken again.

        Raises ValueError naming argument, rule and value: a name used twice, an unknown kind,
        negative or infinite work, work without a kind, an op of another graph, or an op that comes
        after the taker of a slot whose content a later op has already replaced.
        """
        index = len(self.ops)
        if name in self._named:
            raise ValueError(f"name must be unique in the graph; got {name!r} again")
        for argument, value in (("work", work), ("seconds", seconds)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{argument} of {name!r} must be finite and >= 0; got {value!r}")
        if kind is not None:
            check_kind(kind)
        elif work:
            raise ValueError(f"work of {name!r} must be 0 without a kind; got {work!r}")
        takes, looks = _several(slot), _several(reads)
        before, awaited = set(), []
        for other in (after,) if isinstance(after, (Op, str)) else after:
            found = self._named.get(other) if isinstance(other, str) else other.index
            if found is None and other != name:
                awaited.append(other)
            elif found is None or (isinstance(other, Op) and not self._owns(other)):
                what = "itself" if found is None else f"{other.name!r} of another graph"  # type: ignore[union-attr]
                raise ValueError(f"after of {name!r} must name other ops of its graph; got {what}")
            else:
                before.add(found)
        for each in (*takes, *looks):
            taker = self._taker.get(each)
            stale = (before & self._takers.get(each, set())) - {taker}
            if stale and taker not in before:
                old = self.ops[stale.pop()].name
                raise ValueError(
                    f"{name!r} comes after {old!r} in slot {each!r}, which "
                    f"{self.ops[taker or 0].name!r} has taken since: add {name!r} before that op"
                )
            if taker is not None:
                before.add(taker)
            if each in takes:
                before.update(self._readers.get(each, ()))
        if stream in self._last:
            before.add(self._last[stream])

        op = Op(index, name, stream, kind, float(work), float(seconds), collective, takes, looks)
        self.ops.append(op)
        self._named[name] = self._last[stream] = index
        self._before.append(before)
        self._next.append(self._awaited.pop(name, []))
        for waiter in self._next[index]:
            self._before[waiter].add(index)
        for other_index in before:
            self._next[other_index].append(index)
        for missing in awaited:
            if index not in self._awaited.setdefault(missing, []):  # type: ignore[arg-type]
                self._awaited[missing].append(index)  # type: ignore[index]
        for each in looks:
            self._readers.setdefault(each, []).append(index)
        for each in takes:
            self._taker[each], self._readers[each] = index, []
            self._takers.setdefault(each, set()).add(index)
        if collective:
            self._collectives.setdefault(stream, []).append(index)
        return op

    def _owns(self, op: Op) -> bool:
        return op.index < len(self.ops) and self.ops[op.index] is op

    def waits_for(self, op: Op) -> list[Op]:
        """The ops that must end before this one starts: stream, `after` and slots, in order."""
        if not self._owns(op):
            raise ValueError(f"op must be of this graph; got {op.name!r}")
        return [self.ops[i] for i in sorted(self._before[op.index])]


class TimedOp(NamedTuple):
    """When one op ran; seconds from the start of the timeline."""

    name: str
    rank: int
    stream: str
    kind: str | None
    start_s: float
    end_s: float


class Timeline:
    """What `simulate` predicts: `makespan_s` and, worked out when asked for, the rest.

    ops: every op with rank, start and end, by rank and then in the order added. busy: seconds
    that each stream has an op running, the largest of any rank. critical_path: ops that each
    start when the one before ends, from the start to the end of the timeline. low_s, high_s: the
    band of the makespan: least and largest of the runs with all links at their nominal, low and
    high rates; both equal makespan_s where the profile's links have no band.
    """

    def __init__(self, plan: _Plan, profile: HardwareProfile) -> None:
        self._plan, self._profile = plan, profile
        self._start, self._end, self._cause = _run(plan, profile)
        self.makespan_s = max((max(end, default=0.0) for end in self._end), default=0.0)

    @cached_property
    def _by_rank(self) -> list[list[TimedOp]]:
        return [
            [
                TimedOp(op.name, rank, op.stream, op.kind, *when)
                for op, *when in zip(graph.ops, self._start[rank], self._end[rank], strict=False)
            ]
            for rank, graph in enumerate(self._plan.graphs)
        ]

    @cached_property
    def ops(self) -> list[TimedOp]:  # noqa: D102  described by the class
        return [op for rank in self._by_rank for op in rank]

    @cached_property
    def busy(self) -> dict[str, float]:  # noqa: D102
        busy: dict[str, float] = {}
        for rank in self._by_rank:
            own: dict[str, float] = {}
            for op in rank:
                own[op.stream] = own.get(op.stream, 0.0) + op.end_s - op.start_s
            for stream, seconds in own.items():
                busy[stream] = max(busy.get(stream, 0.0), seconds)
        return busy

    @cached_property
    def critical_path(self) -> list[TimedOp]:  # noqa: D102
        if not self.ops:
            return []
        last = max(self.ops, key=lambda op: op.end_s)
        step: tuple[int, int] | None = (last.rank, self._by_rank[last.rank].index(last))
        path = []
        while step is not None:
            rank, index = step
            path.append(self._by_rank[rank][index])
            step = self._cause[rank][index]
        return path[::-1]

    @cached_property
    def _band(self) -> list[float]:
        found = [self.makespan_s]
        if any(link.low or link.high for link in self._profile.link.values()):
            if self._plan.sizes != [len(graph.ops) for graph in self._plan.graphs]:
                raise RuntimeError("ops were added since: simulate again for low_s and high_s")
            for profile in (self._profile.bound("low"), self._profile.bound("high")):
                found.append(Timeline(self._plan, profile).makespan_s)
        return sorted(found)

    @property
    def low_s(self) -> float:  # noqa: D102
        return self._band[0]

    @property
    def high_s(self) -> float:  # noqa: D102
        return self._band[-1]

    def op(self, name: str, rank: int = 0) -> TimedOp:
        """When the op of that name ran on that rank. Raises ValueError when there is none."""
        if not 0 <= rank < len(self._by_rank):
            raise ValueError(f"rank must be in [0, {len(self._by_rank)}); got {rank}")
        index = self._plan.graphs[rank]._named.get(name, len(self._by_rank[rank]))
        if index >= len(self._by_rank[rank]):
            raise ValueError(f"name must be an op of rank {rank}; got {name!r}")
        return self._by_rank[rank][index]

    def chrome(self, path: str | Path) -> None:
        """Writes a Chrome trace (chrome://tracing, Perfetto): a process a rank, a thread a stream.

        Raises OSError; the file appears whole or not at all.
        """
        write_chrome_trace(
            path, ((op.name, op.rank, op.stream, op.start_s, op.end_s, {}) for op in self.ops)
        )

    def plot(self, path: str | Path) -> None:
        """Draws the timeline, one row a stream and one colour a kind, as PNG, PDF or SVG.

        Raises ImportError naming the extra that brings matplotlib, OSError.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plot needs matplotlib: septet-shared[experiments]") from error
        rows = list(dict.fromkeys((op.rank, op.stream) for op in self.ops))
        spans: dict[str, dict[int, list[tuple[float, float]]]] = {}
        places = {lane: row for row, lane in enumerate(rows)}
        for op in self.ops:
            of_kind = spans.setdefault(op.kind or "fixed", {})
            span = (op.start_s * 1e3, (op.end_s - op.start_s) * 1e3)
            of_kind.setdefault(places[op.rank, op.stream], []).append(span)
        figure = Figure(figsize=(10, 1.2 + 0.35 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for number, (kind, by_row) in enumerate(spans.items()):
            label: str | None = kind
            for row, drawn in by_row.items():
                where, colour = (row - 0.4, 0.8), f"C{number % 10}"
                axes.broken_barh(drawn, where, label=label, facecolors=colour, edgecolor="white")
                label = None
        many = len(self._by_rank) > 1
        axes.set_yticks(range(len(rows)), [f"{r}: {s}" if many else s for r, s in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms (simulated)")
        if rows:
            figure.legend(loc="outside upper center", ncols=min(6, len(spans)))
        figure.savefig(path)


def simulate(
    graphs: OpGraph | Sequence[OpGraph],
    profile: HardwareProfile | str | Path,
    *,
    noise: float = 0.0,
    seed: int = 0,
) -> Timeline:
    """The predicted timeline of one rank's graph, or of one graph per rank (repeats allowed).

    profile: a HardwareProfile, or the name or path of one. noise: standard deviation of the
    logarithm of a factor (mean 1) on each op's duration, the same for the same seed.

    Raises ValueError: no graph, noise not in [0, 10], `after` that names no op, a kind the profile
    has no rate for, collectives that differ between ranks (names both), ops that wait for each
    other (names them).
    Cost: a few microseconds an op; each further band value (`low_s`, `high_s`) the same again.
    """
    given = [graphs] if isinstance(graphs, OpGraph) else list(graphs)
    if not given or not all(isinstance(graph, OpGraph) for graph in given):
        raise ValueError(f"graphs must be one or more OpGraph; got {graphs!r}")
    if not 0 <= noise <= 10:
        raise ValueError(f"noise must be in [0, 10]; got {noise!r}")
    if not isinstance(profile, HardwareProfile):
        profile = HardwareProfile.load(profile)
    for rank, graph in enumerate(given):
        for missing, waiters in graph._awaited.items():
            raise ValueError(
                f"after of {graph.ops[waiters[0]].name!r} on rank {rank} must name an op of its "
                f"graph; got {missing!r}"
            )
    return Timeline(_Plan(given, noise, seed), profile)


class _Plan:
    """What a run needs besides the profile: graphs, who starts with whom, noise."""

    def __init__(self, graphs: list[OpGraph], noise: float, seed: int) -> None:
        self.graphs = graphs
        self.sizes = [len(graph.ops) for graph in graphs]
        # op index -> number of its collective, by rank; members[number] = its op on each rank
        self.joint: list[dict[int, int]] = [{} for _ in graphs]
        self.members: list[list[int]] = []
        if len(graphs) > 1:
            self._match()
        self.factors: list[list[float]] | None = None
        if noise:
            import numpy as np

            rng = np.random.default_rng(seed)
            self.factors = [
                np.exp(noise * rng.standard_normal(n) - noise * noise / 2).tolist()
                for n in self.sizes
            ]

    def _match(self) -> None:
        for stream in dict.fromkeys(s for graph in self.graphs for s in graph._collectives):
            lists = [graph._collectives.get(stream, []) for graph in self.graphs]
            for place in range(max(map(len, lists))):
                names = [
                    graph.ops[indices[place]].name if place < len(indices) else None
                    for graph, indices in zip(self.graphs, lists, strict=True)
                ]
                for rank, name in enumerate(names):
                    if name != names[0]:
                        raise ValueError(
                            f"collective {place} of stream {stream!r} must be the same on every "
                            f"rank; rank 0 has {names[0]!r}, rank {rank} has {name!r}"
                        )
                for rank, indices in enumerate(lists):
                    self.joint[rank][indices[place]] = len(self.members)
                self.members.append([indices[place] for indices in lists])


class _Unit:
    """One kind's link or unit on one rank.

    `clock` advances by the seconds of work that each op at work has got done alone: `speed` =
    factor / ops at work. An op ends when the clock passes its entry plus its own seconds, so ops
    that come and go change the speed and nothing else.
    """

    __slots__ = ("clock", "factor", "kind", "queue", "rank", "speed", "stamp", "when")

    def __init__(self, rank: int, kind: str | None) -> None:
        self.rank, self.kind = rank, kind
        self.queue: list[tuple[float, int]] = []  # (clock at its end, op)
        self.clock = self.when = 0.0
        self.factor = self.speed = 1.0
        self.stamp = -1  # of the event that foresees its next end; older events are void


_Step = tuple[int, int] | None


def _run(
    plan: _Plan, profile: HardwareProfile
) -> tuple[list[list[float]], list[list[float]], list[list[_Step]]]:
    """Start, end and cause (the op whose end let it start) of every op, by rank."""
    graphs, factors = plan.graphs, plan.factors
    fixed: list[list[float]] = []  # seconds before the work
    alone: list[list[float]] = []  # seconds of work at the full rate
    units: list[list[_Unit]] = []
    by_rank: list[dict[str | None, _Unit]] = []
    costs: dict[tuple[str | None, float], tuple[float, float]] = {(None, 0.0): (0.0, 0.0)}
    known: dict[int, tuple[list[float], list[float]]] = {}
    for rank, graph in enumerate(graphs):
        own: dict[str | None, _Unit] = {}
        row = []
        for op in graph.ops:
            unit = own.get(op.kind)
            if unit is None:
                unit = own[op.kind] = _Unit(rank, op.kind)
            row.append(unit)
        units.append(row)
        by_rank.append(own)
        if id(graph) not in known:
            before, work = [], []
            for op in graph.ops:
                kind, amount = op.kind, op.work
                cost = costs.get((kind, amount))
                if cost is None:
                    assert kind is not None
                    cost = profile.latency_s(kind), amount / profile.rate(kind, amount)
                    costs[kind, amount] = cost
                before.append(op.seconds + cost[0])
                work.append(cost[1])
            known[id(graph)] = before, work
        before, work = known[id(graph)]
        if factors is not None:
            before = [a * b for a, b in zip(before, factors[rank], strict=True)]
            work = [a * b for a, b in zip(work, factors[rank], strict=True)]
        fixed.append(before)
        alone.append(work)

    start = [[0.0] * n for n in plan.sizes]
    end = [[-1.0] * n for n in plan.sizes]
    cause: list[list[_Step]] = [[None] * n for n in plan.sizes]
    waits = [[len(before) for before in graph._before] for graph in graphs]
    follows = [graph._next for graph in graphs]
    joint, members = plan.joint, plan.members
    missing = [len(graphs)] * len(members)
    shares: dict[tuple[str | None, frozenset[str | None]], float] = {}
    # (time, stamp, unit or None, rank, op): the end of a unit's next op, or of a fixed part
    events: list[tuple[float, int, _Unit | None, int, int]] = []
    stamp = 0
    changed: list[_Unit] = []  # units whose ops at work, or whose factor, changed at this instant
    mixed: set[int] = set()  # ranks whose kinds at work changed; used with an interference table

    def begin(rank: int, index: int, now: float) -> None:
        nonlocal stamp
        start[rank][index] = now
        lead = fixed[rank][index]
        if lead or not alone[rank][index]:
            stamp += 1
            heappush(events, (now + lead, stamp, None, rank, index))
        else:
            enter(rank, index, now)

    def enter(rank: int, index: int, now: float) -> None:
        unit = units[rank][index]
        if unit.queue:
            unit.clock += (now - unit.when) * unit.speed
        else:
            unit.clock = 0.0
            mixed.add(rank)
        unit.when = now
        heappush(unit.queue, (unit.clock + alone[rank][index], index))
        changed.append(unit)

    def ready(rank: int, index: int, now: float, why: _Step) -> None:
        cause[rank][index] = why
        number = joint[rank].get(index) if members else None
        if number is None:
            begin(rank, index, now)
            return
        missing[number] -= 1
        if not missing[number]:
            for each, member in enumerate(members[number]):
                cause[each][member] = why
                begin(each, member, now)

    def slow_down(rank: int, now: float) -> None:
        busy = [unit for unit in by_rank[rank].values() if unit.queue]
        kinds = frozenset(unit.kind for unit in busy)
        for unit in busy:
            key = unit.kind, kinds
            if key not in shares:
                others = [kind for kind in kinds - {unit.kind} if kind]
                shares[key] = profile.factor(unit.kind or "", others)
            if shares[key] != unit.factor:
                unit.clock += (now - unit.when) * unit.speed
                unit.when, unit.factor = now, shares[key]
                changed.append(unit)

    def settle(now: float) -> None:
        nonlocal stamp
        if profile.interference:
            for rank in sorted(mixed):
                slow_down(rank, now)
        mixed.clear()
        for unit in changed:
            queue = unit.queue
            if queue:
                unit.speed = unit.factor / len(queue)
                unit.stamp = stamp = stamp + 1
                left = max(0.0, queue[0][0] - unit.clock)
                heappush(events, (now + left / unit.speed, stamp, unit, unit.rank, queue[0][1]))
        changed.clear()

    for rank, counts in enumerate(waits):
        for index, count in enumerate(counts):
            if not count:
                ready(rank, index, 0.0, None)
    settle(0.0)
    done = 0
    while events:
        now, mark, unit, rank, index = heappop(events)
        if unit is not None:
            if mark != unit.stamp:
                continue
            unit.clock, index = heappop(unit.queue)
            unit.when = now
            if unit.queue:
                changed.append(unit)
            else:
                mixed.add(rank)
        elif alone[rank][index]:
            enter(rank, index, now)
            settle(now)
            continue
        done += 1
        end[rank][index] = now
        counts = waits[rank]
        for follower in follows[rank][index]:
            counts[follower] -= 1
            if not counts[follower]:
                ready(rank, follower, now, (rank, index))
        if changed or mixed:
            settle(now)
    if done < sum(plan.sizes):
        raise ValueError(f"ops wait for each other: {_circle(plan, end)}")
    return start, end, cause


def _circle(plan: _Plan, end: list[list[float]]) -> str:
    """The ops of one circle of waits among those that never ended."""

    def stuck(rank: int) -> list[int]:
        return [i for i in range(plan.sizes[rank]) if end[rank][i] < 0]

    rank = next(r for r in range(len(plan.graphs)) if stuck(r))
    step, path = (rank, stuck(rank)[0]), []
    while step not in path:
        path.append(step)
        rank, index = step
        parts = [step]
        if index in plan.joint[rank]:
            parts = list(enumerate(plan.members[plan.joint[rank][index]]))
        step = next(
            (r, i) for r, own in parts for i in sorted(plan.graphs[r]._before[own]) if end[r][i] < 0
        )
    path = [*path[path.index(step) :], step]
    many = len(plan.graphs) > 1
    names = [f"{plan.graphs[r].ops[i].name!r}{f' on rank {r}' if many else ''}" for r, i in path]
    return " waits for ".join(names)


def _several(value: Hashable | list[Hashable]) -> tuple[Hashable, ...]:
    if isinstance(value, list):
        return tuple(value)
    return () if value is None else (value,)


def write_chrome_trace(
    path: str | Path, rows: Iterable[tuple[str, int, str, float, float, dict[str, object]]]
) -> None:
    """Writes (name, process, thread, start_s, end_s, arguments) rows as a Chrome trace.

    Raises OSError; the file appears whole or not at all.
    """
    lanes: dict[tuple[int, str], int] = {}
    events: list[dict[str, object]] = []
    for name, process, thread, start_s, end_s, arguments in rows:
        lane = lanes.setdefault((process, thread), len(lanes))
        when = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
        common = {"name": name, "ph": "X", "cat": thread, "pid": process, "tid": lane}
        events.append({**common, **when, "args": arguments})
    for (process, thread), lane in lanes.items():
        named: dict[str, object] = {"ph": "M", "pid": process, "tid": lane}
        events.append({**named, "name": "thread_name", "args": {"name": thread}})
        events.append({**named, "name": "process_name", "args": {"name": f"rank {process}"}})
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
