"""Where time goes, which variant is faster and how sure that is, and what the hardware can do.

span, trace          named ranges: NVTX, torch profiler, Chrome trace, overlap and stalls
measure, compare     medians; paired, interleaved comparisons with a 99 % interval
HardwareProfile ...  from `hardware`: rates of clusters and devices, shipped or measured
"""

from __future__ import annotations

import bisect
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from septet_shared.hardware import HardwareProfile, Link, calibrate
from septet_shared.streams import write_chrome_trace

__all__ = [
    "Comparison", "HardwareProfile", "Link", "OutputsDiffer", "Ratio", "Timing", "Trace",
    "assert_same", "bench_row", "calibrate", "compare", "measure", "span", "trace",
]  # fmt: skip

Clock = Literal["wall", "cpu", "cuda"]

# as Any: torch leaves these modules' functions untyped
_cuda: Any = torch.cuda
_profiler: Any = torch.autograd.profiler

_IDLE: AbstractContextManager[None] = nullcontext()
_lock = threading.Lock()
_traces: tuple[Trace, ...] = ()  # active ones; replaced, never changed in place


def span(
    name: str, *, bytes: int | None = None, stream: str | None = None
) -> AbstractContextManager[None]:
    """A range of that name around a `with` block, wherever ranges are being recorded.

    That is: an NVTX range once this process uses CUDA, a `record_function` while a torch profiler
    runs, an event in every active `trace`. bytes: kept with the event. stream: the lane of the
    trace, by default the thread's name.
    Cost: about 0.2 us when nothing records, a few microseconds otherwise.
    """
    if _traces or _profiler._is_profiler_enabled or _cuda.is_initialized():
        return _Span(name, bytes, stream)
    return _IDLE


_Moment = float | torch.cuda.Event  # seconds, or to be read once the device has passed it


class _Span(AbstractContextManager[None]):
    __slots__ = ("began", "bytes", "function", "name", "nvtx", "stream", "traces")

    def __init__(self, name: str, bytes: int | None, stream: str | None) -> None:
        self.name, self.bytes, self.stream = name, bytes, stream

    def __enter__(self) -> None:
        self.traces = _traces
        self.function = None
        if _profiler._is_profiler_enabled:
            self.function = _profiler.record_function(self.name)
            self.function.__enter__()
        self.nvtx = _cuda.is_initialized()
        if self.nvtx:
            _cuda.nvtx.range_push(self.name)
        self.began = self._now() if self.traces else 0.0

    def __exit__(self, *error: object) -> None:
        if self.traces:
            ended = self._now()
            lane = self.stream or threading.current_thread().name
            for each in self.traces:
                each._raw.append((self.name, lane, self.began, ended, self.bytes))
        if self.nvtx:
            _cuda.nvtx.range_pop()
        if self.function is not None:
            self.function.__exit__(None, None, None)

    def _now(self) -> _Moment:
        if self.stream is None or any(each._base is None for each in self.traces):
            return time.perf_counter()
        event: torch.cuda.Event = _cuda.Event(enable_timing=True)
        event.record()
        return event


class Trace:
    """Spans recorded by one process: `events` are (name, stream, start_s, end_s, bytes or None).

    Seconds count from the start of the trace. `rank` is torch.distributed's, else RANK's, else 0.
    """

    def __init__(self) -> None:
        dist = torch.distributed
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if grouped else int(os.environ.get("RANK", "0"))
        self.events: list[tuple[str, str, float, float, int | None]] = []
        self._raw: list[tuple[str, str, _Moment, _Moment, int | None]] = []
        self._base: torch.cuda.Event | None = None
        if _cuda.is_initialized():
            self._base = _cuda.Event(enable_timing=True)
            self._base.record()
            _cuda.synchronize()
        self._began = time.perf_counter()

    def _close(self) -> None:
        raw, self._raw = self._raw, []  # spans that end later are never read
        if self._base is not None:
            _cuda.synchronize()
        for name, lane, began, ended, size in raw:
            self.events.append((name, lane, self._seconds(began), self._seconds(ended), size))

    def _seconds(self, moment: _Moment) -> float:
        if isinstance(moment, float):
            return moment - self._began
        assert self._base is not None  # else the span would have read the host's clock
        return float(self._base.elapsed_time(moment)) / 1e3

    def _busy(self, stream: str) -> list[tuple[float, float]]:
        """The union of the stream's spans as disjoint intervals in order."""
        spans = sorted((start, end) for _, lane, start, end, _ in self.events if lane == stream)
        if not spans:
            known = ", ".join(sorted({lane for _, lane, *_ in self.events})) or "none"
            raise ValueError(f"stream must have spans in the trace ({known}); got {stream!r}")
        merged = [spans[0]]
        for start, end in spans[1:]:
            if start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged

    def overlap(self, comm: str, compute: str) -> float:
        """The fraction in [0, 1] of the time of stream `comm` that `compute` is busy too.

        0 when `comm` took no time. Raises ValueError when a stream has no spans.
        """
        theirs, hidden, total, first = self._busy(compute), 0.0, 0.0, 0
        for start, end in self._busy(comm):
            total += end - start
            while first < len(theirs) and theirs[first][1] <= start:
                first += 1
            last = bisect.bisect_left(theirs, (end,))
            hidden += sum(min(end, e) - max(start, s) for s, e in theirs[first:last])
        return min(1.0, hidden / total) if total else 0.0

    def stalls(self, stream: str) -> list[tuple[float, float]]:
        """(start_s, end_s) of the gaps between a stream's first and last span, in order.

        Raises ValueError when the stream has no spans.
        """
        busy = self._busy(stream)
        return [(a[1], b[0]) for a, b in zip(busy, busy[1:], strict=False)]  # noqa: RUF007

    def save(self, path: str | Path) -> None:
        """Writes a Chrome trace (chrome://tracing, Perfetto): pid is the rank, tid the stream.

        Times are those of the host's monotonic clock, so traces of ranks of one machine can be
        laid side by side. The file appears whole or not at all. Raises OSError.
        """
        write_chrome_trace(
            path,
            (
                (name, self.rank, lane, self._began + start, self._began + end, {"bytes": size})
                for name, lane, start, end, size in self.events
            ),
        )


@contextmanager
def trace() -> Iterator[Trace]:
    """A Trace of all spans that start and end inside the block, in every thread of this process.

    Traces may nest; a span that ends after the block is left out. In a process that uses CUDA when
    the block starts, spans with a `stream` are timed on the current CUDA stream by events, and the
    block's end synchronises (tested with a fake driver); all others are timed on the host.
    """
    global _traces
    found = Trace()
    with _lock:
        _traces = (*_traces, found)
    try:
        yield found
    finally:
        with _lock:
            _traces = tuple(each for each in _traces if each is not found)
        found._close()


def assert_same(actual: Any, expected: Any) -> None:
    """Passes when both have one structure and equal values within `torch.testing`'s tolerances.

    Tensors and NumPy arrays: same shape and dtype, NaN equals NaN; sequences and mappings by
    element; numbers as 0-d tensors; all else by ==. Raises AssertionError saying where and how.
    """
    for where, a, b in _pairs("output", actual, expected):
        if any(
            isinstance(a, t) and isinstance(b, t) for t in (torch.Tensor, (int, float, complex))
        ):
            try:
                torch.testing.assert_close(a, b, equal_nan=True)
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from None
        elif type(a) is not type(b) or a != b:
            raise AssertionError(f"{where}: {_short(a)} is not {_short(b)}")


def _pairs(where: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if hasattr(a, "__array__") and not isinstance(a, torch.Tensor):
        a = torch.as_tensor(a)
        b = torch.as_tensor(b) if hasattr(b, "__array__") else b
    if is_dataclass(a) and type(a) is type(b):
        a, b = vars(a), vars(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            raise AssertionError(f"{where}: keys {_short(list(a))} are not {_short(list(b))}")
        for key in a:
            yield from _pairs(f"{where}[{key!r}]", a[key], b[key])
    elif _is_sequence(a) and _is_sequence(b):
        if len(a) != len(b):
            raise AssertionError(f"{where}: {len(a)} elements are not {len(b)}")
        for i, pair in enumerate(zip(a, b, strict=True)):
            yield from _pairs(f"{where}[{i}]", *pair)
    else:
        yield where, a, b


def _is_sequence(x: object) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes))


def _short(x: object) -> str:
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range of a call, in seconds; rounds: seconds of each round."""

    median_s: float
    iqr_s: float
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """A median of per-round ratios with the ends of its 99 % interval."""

    value: float
    low: float
    high: float


def bench_row(
    name: str,
    variant: str,
    value: float | None,
    unit: str,
    *,
    must: str | None = None,
    notes: str = "",
    peer: str | None = None,
    ratio: Ratio | float | None = None,
    kind: Literal["measured", "simulated", "counted"] = "measured",
    threads: int | None = None,
) -> dict[str, Any]:
    """One row of `bench --json`, with every key that such a row has.

    must: a bound like "<= 10" on the ratio where there is one, else on the value. ratio: peer over
    variant; a number has no interval. threads: None is torch's present number.
    """
    ends = (ratio.low, ratio.high) if isinstance(ratio, Ratio) else (None, None)
    return {
        "name": name,
        "variant": variant,
        "peer": peer,
        "ratio": ratio.value if isinstance(ratio, Ratio) else ratio,
        "ratio_low": ends[0],
        "ratio_high": ends[1],
        "value": value,
        "unit": unit,
        "kind": kind,
        "threads": torch.get_num_threads() if threads is None else threads,
        "notes": notes,
        "must": must,
    }


class OutputsDiffer(AssertionError):
    """A ratio was asked of two variants whose outputs differ; names both and says how."""


def measure(
    fn: Callable[[], object], *, rounds: int = 7, warmup: int = 2, clock: Clock = "wall"
) -> Timing:
    """Seconds of one call of fn, over `rounds` calls after `warmup` unmeasured ones.

    clock: "wall" (includes the device's work once the process uses CUDA), "cpu" (all threads of the
    process), "cuda" (events on the current stream). Caches are left as they are, L2 is not flushed.
    A call shorter than about 100 us is better repeated inside fn. Raises ValueError.
    """
    _check(rounds, clock)
    for _ in range(warmup):
        fn()
    return _timing([_time(fn, clock) for _ in range(rounds)])


def compare(
    variants: Mapping[str, Callable[[], object]],
    *,
    check: Callable[[Any, Any], object] | None = assert_same,
    rounds: int = 7,
    clock: Clock = "wall",
) -> Comparison:
    """Times of variants that do the same thing, taken in turns: one call of each in every round.

    Each round starts with another variant, so that drift and what one leaves in the caches fall on
    all alike. Two unmeasured rounds come first; `check(output, first variant's output)` judges the
    outputs of the first of them (tensors, arrays and containers of them as they were before the
    next variant ran) and tells a difference by an AssertionError, as `assert_same` does; with None
    outputs may differ. L2 is not flushed.

    With collectives inside the variants every rank calls this alike: the number and the order of
    calls depend on the arguments only.
    Raises ValueError: fewer than two variants or rounds, an unknown clock.
    """
    if len(variants) < 2:
        raise ValueError(f"variants must hold two or more functions; got {list(variants)}")
    _check(rounds, clock)
    names = list(variants)
    outputs = {name: _copied(variants[name]()) for name in names}
    differences: dict[str, str] = {}
    unseen = check is not None and all(output is None for output in outputs.values())
    if check is not None:
        for name in names[1:]:
            try:
                check(outputs[name], outputs[names[0]])
            except AssertionError as error:
                differences[name] = str(error).strip() or "the check gave no message"
    outputs.clear()
    for name in names:
        variants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_time(variants[name], clock))
    note = "outputs not compared" if check is None or unseen else "outputs checked equal"
    return Comparison(
        {name: _timing(times) for name, times in seconds.items()}, differences, f"{clock}; {note}"
    )


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: `timings` by variant, `differences` from the first one's output."""

    timings: dict[str, Timing]
    differences: dict[str, str]
    notes: str

    def ratio(self, peer: str, ours: str) -> Ratio:
        """Time of `peer` over time of `ours`: above 1, ours is faster. Median of the rounds.

        The interval is the distribution-free one of the median from 8 rounds on. Fewer rounds
        cannot give 99 % that way: it is then the range of the ratios joined with Student's
        interval of their logarithms.
        Raises OutputsDiffer when the outputs of the two differ, ValueError for an unknown name.
        """
        for name in (peer, ours):
            if name not in self.timings:
                known = ", ".join(self.timings)
                raise ValueError(f"variant must be one of {known}; got {name!r}")
            if name in self.differences and peer != ours:
                first = next(iter(self.timings))
                raise OutputsDiffer(
                    f"no ratio of {peer!r} to {ours!r}: the output of {name!r} differs from that "
                    f"of {first!r}: {self.differences[name]}"
                )
        rounds = zip(self.timings[peer].rounds, self.timings[ours].rounds, strict=True)
        return _median_ratio([a / b for a, b in rounds])

    def rows(self, name: str = "compare") -> list[dict[str, Any]]:
        """Rows for `bench --json`: the first variant against each other one, then their own times.

        value is the variant's median in seconds. Where outputs differ, ratio is null and notes say
        how they do.
        """
        rows: list[dict[str, Any]] = []
        first, *others = self.timings
        pairs: list[tuple[str, str | None]] = [(first, peer) for peer in others]
        for variant, peer in [*pairs, *((other, None) for other in others)]:
            notes, ratio = self.notes, None
            if peer in self.differences:
                notes = f"outputs differ: {self.differences[peer]}"
            elif peer is not None:
                ratio = self.ratio(peer, variant)
            median_s = self.timings[variant].median_s
            rows.append(
                bench_row(name, variant, median_s, "s", peer=peer, ratio=ratio, notes=notes)
            )
        return rows


def _copied(x: Any) -> Any:
    """The output as it is now, for a variant may write into the same buffers again."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, (list, tuple)):
        copies = [_copied(each) for each in x]
        return type(x)(*copies) if hasattr(x, "_fields") else type(x)(copies)
    if isinstance(x, dict):
        return {key: _copied(value) for key, value in x.items()}
    return x.copy() if hasattr(x, "__array__") and hasattr(x, "copy") else x


def _check(rounds: int, clock: str) -> None:
    if rounds < 2:
        raise ValueError(f"rounds must be >= 2; got {rounds!r}")
    if clock not in ("wall", "cpu", "cuda"):
        raise ValueError(f"clock must be 'wall', 'cpu' or 'cuda'; got {clock!r}")
    if clock == "cuda" and not _cuda.is_available():
        raise ValueError("clock must be 'wall' or 'cpu' without a CUDA device; got 'cuda'")


def _time(fn: Callable[[], object], clock: Clock) -> float:
    if clock == "cuda":
        before, after = (_cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        fn()
        after.record()
        after.synchronize()
        return max(float(before.elapsed_time(after)) / 1e3, 1e-9)
    cuda = _cuda.is_initialized()
    read = time.perf_counter if clock == "wall" else time.process_time
    if cuda:
        _cuda.synchronize()
    began = read()
    fn()
    if cuda:
        _cuda.synchronize()
    return max(read() - began, 1e-9)


def _timing(seconds: list[float]) -> Timing:
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(statistics.median(seconds), high - low, tuple(seconds))


_STUDENT_995 = {1: 63.66, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707}


def _median_ratio(ratios: list[float]) -> Ratio:
    """The median of independent ratios with a 99 % interval."""
    ordered, n = sorted(ratios), len(ratios)
    # the median lies below the k-th smallest of n with probability P[Binomial(n, 1/2) < k]
    outside, k = 0.0, 0
    while 2 * (outside + math.comb(n, k) / 2**n) <= 0.01:
        outside += math.comb(n, k) / 2**n
        k += 1
    if k:
        return Ratio(statistics.median(ratios), ordered[k - 1], ordered[n - k])
    logs = [math.log(r) for r in ratios]
    reach = _STUDENT_995[n - 1] * statistics.stdev(logs) / math.sqrt(n)
    centre = statistics.fmean(logs)
    return Ratio(
        statistics.median(ratios),
        min(ordered[0], math.exp(max(centre - reach, -700))),  # within what a float holds
        max(ordered[-1], math.exp(min(centre + reach, 700))),
    )
