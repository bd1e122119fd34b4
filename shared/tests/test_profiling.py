"""Spans and traces, paired comparisons and their intervals."""

import json
import math
import random
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch

from septet_shared import profiling
from septet_shared.profiling import (
    OutputsDiffer,
    Ratio,
    assert_same,
    bench_row,
    compare,
    measure,
    span,
    trace,
)


def trace_of(*events):
    """A closed trace with these (stream, start_s, end_s) spans."""
    with trace() as found:
        pass
    found.events += [("x", stream, start, end, None) for stream, start, end in events]
    return found


def test_a_span_is_recorded_only_inside_a_trace():
    with span("before"):
        pass
    with trace() as outer:
        with span("first", bytes=3, stream="comm"):
            time.sleep(0.01)
        with trace() as inner, span("both"):
            pass
        open_at_the_end = span("late")
        open_at_the_end.__enter__()
    open_at_the_end.__exit__(None, None, None)
    with span("after"):
        pass
    assert [event[0] for event in outer.events] == ["first", "both"]
    assert [event[0] for event in inner.events] == ["both"]
    name, stream, start, end, size = outer.events[0]
    assert (name, stream, size) == ("first", "comm", 3)
    assert start >= 0
    assert end - start >= 0.01


def test_an_error_in_a_span_passes_through_and_ends_the_span():
    with trace() as found, pytest.raises(KeyError), span("x"):
        raise KeyError
    assert len(found.events) == 1


def test_spans_of_many_threads_are_all_kept_on_lanes_of_their_own():
    def work():
        for _ in range(200):
            with span("x"):
                pass

    with trace() as found:
        threads = [threading.Thread(target=work, name=f"t{i}") for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lanes = [stream for _, stream, *_ in found.events]
    assert {lane: lanes.count(lane) for lane in lanes} == {f"t{i}": 200 for i in range(4)}


@pytest.mark.parametrize(
    ("comm", "compute", "expected"),
    [
        ([(0, 4)], [(0, 4)], 1.0),
        ([(0, 4)], [(4, 8)], 0.0),
        ([(0, 4)], [(1, 2), (3, 9)], 0.5),
        ([(0, 2), (1, 4)], [(0, 1), (0, 1), (0.5, 1)], 0.25),  # unions, not sums
        ([(1, 1)], [(0, 2)], 0.0),
    ],
)
def test_overlap_is_the_hidden_share_of_communication(comm, compute, expected):
    found = trace_of(*[("comm", *s) for s in comm], *[("compute", *s) for s in compute])
    assert found.overlap("comm", "compute") == expected


def test_stalls_are_the_gaps_between_spans():
    found = trace_of(("c", 5, 6), ("c", 1, 3), ("c", 2, 2.5), ("c", 6, 7), ("d", 3, 4))
    assert found.stalls("c") == [(3, 5)]
    assert found.stalls("d") == []


def test_a_stream_without_spans_is_named_with_those_that_have_some():
    found = trace_of(("c", 0, 1))
    with pytest.raises(ValueError, match=r"spans in the trace \(c\); got 'comm'"):
        found.overlap("comm", "c")
    with pytest.raises(ValueError, match=r"spans in the trace \(none\); got 'c'"):
        trace_of().stalls("c")


def test_a_saved_trace_is_chrome_json_with_the_rank_as_process(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with trace() as found, span("dispatch", bytes=7, stream="comm"):
        pass
    found.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    (event,) = [e for e in events if e["ph"] == "X"]
    assert (event["name"], event["pid"], event["args"]) == ("dispatch", 3, {"bytes": 7})
    assert event["dur"] == pytest.approx(1e6 * (found.events[0][3] - found.events[0][2]), abs=1)
    (thread,) = [e for e in events if e["name"] == "thread_name"]
    assert (thread["tid"], thread["args"]["name"]) == (event["tid"], "comm")


def test_a_span_is_seen_by_a_running_torch_profiler():
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profiler, span("moe.dispatch"):
        torch.ones(2) + 1
    assert "moe.dispatch" in [event.key for event in profiler.key_averages()]


class FakeCuda:
    """A device whose clock runs twice as fast as it is read, in ms; records NVTX calls."""

    def __init__(self):
        self.now_ms, self.calls = 100.0, []
        self.nvtx = self

    def is_initialized(self):
        return True

    is_available = is_initialized

    def synchronize(self):
        self.calls.append("synchronize")

    def range_push(self, name):
        self.calls.append(name)

    def range_pop(self):
        self.calls.append("pop")

    def Event(self, enable_timing):
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self):
        self.at_ms = self.cuda.now_ms

    def synchronize(self):
        self.cuda.calls.append("event")

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


def test_with_cuda_a_span_with_a_stream_is_timed_by_events_and_marked_in_nvtx(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(profiling, "_cuda", cuda)
    with trace() as found:
        cuda.now_ms = 105
        with span("send", stream="comm"):
            cuda.now_ms = 125
        with span("host"):
            pass
    send, host = found.events
    assert send[2:4] == pytest.approx((0.005, 0.025))
    assert 0 <= host[2] <= host[3] < 60
    assert cuda.calls == ["synchronize", "send", "pop", "host", "pop", "synchronize"]


def test_the_cuda_clock_reads_events_and_the_wall_clock_synchronises(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(profiling, "_cuda", cuda)

    def kernel():
        cuda.now_ms += 3

    assert measure(kernel, clock="cuda").median_s == pytest.approx(0.003)
    cuda.calls.clear()
    measure(kernel, rounds=2, warmup=0)
    assert cuda.calls == ["synchronize"] * 4


class FakeTime:
    """Clocks that move only when work is done or slept through."""

    def __init__(self):
        self.wall = self.cpu = 5.0

    def perf_counter(self):
        return self.wall

    def process_time(self):
        return self.cpu

    def run(self, wall_s, cpu_s=0.0):
        self.wall += wall_s
        self.cpu += cpu_s


@pytest.fixture
def clocks(monkeypatch):
    clocks = FakeTime()
    monkeypatch.setattr(profiling, "time", clocks)
    return clocks


def test_measure_tells_the_median_and_the_spread_of_its_rounds(clocks):
    pauses = iter([9, 9, 3, 1, 2, 8, 4])
    timing = measure(lambda: clocks.run(next(pauses)), rounds=5)
    assert timing.rounds == (3, 1, 2, 8, 4)
    assert timing.median_s == 3
    assert timing.iqr_s == 4 - 2


def test_the_cpu_clock_does_not_count_waiting(clocks):
    timing = measure(lambda: clocks.run(3.0, cpu_s=0.5), rounds=2, clock="cpu")
    assert timing.rounds == (0.5, 0.5)


def test_variants_run_in_turns_and_each_round_starts_with_another():
    calls = []
    compare({n: lambda n=n: calls.append(n) for n in "abc"}, rounds=4)
    assert "".join(calls) == "abcabc" + "abc" + "bca" + "cab" + "abc"


def test_the_ratio_is_the_median_of_those_within_a_round(clocks):
    ours = iter([9, 9, 1, 10, 100])  # two unmeasured rounds, then a drift that both see
    peer = iter([9, 9, 2, 30, 400])
    variants = {"ours": lambda: clocks.run(next(ours)), "peer": lambda: clocks.run(next(peer))}
    found = compare(variants, rounds=3)
    ratio = found.ratio("peer", "ours")
    assert ratio.value == 3
    assert ratio.low <= 2
    assert ratio.high >= 4
    assert found.ratio("ours", "peer").value == pytest.approx(1 / 3)


def test_a_ratio_is_refused_when_outputs_differ_and_the_others_stand():
    found = compare({"ours": lambda: [1, 2], "same": lambda: [1, 2], "wrong": lambda: [1, 3]})
    assert found.ratio("same", "ours").value > 0
    message = r"no ratio of 'wrong' to 'ours': the output of 'wrong' differs.*'ours': output\[1\]:"
    with pytest.raises(OutputsDiffer, match=message):
        found.ratio("wrong", "ours")
    with pytest.raises(OutputsDiffer):
        found.ratio("same", "wrong")
    rows = found.rows("sum")
    assert [(row["variant"], row["peer"]) for row in rows] == [
        ("ours", "same"), ("ours", "wrong"), ("same", None), ("wrong", None),
    ]  # fmt: skip
    assert rows[0]["ratio_low"] <= rows[0]["ratio"] <= rows[0]["ratio_high"]
    assert rows[1]["ratio"] is rows[1]["ratio_low"] is None
    assert "outputs differ: output[1]" in rows[1]["notes"]
    assert all(row["value"] > 0 and row["unit"] == "s" for row in rows)
    json.dumps(rows)


def test_outputs_in_one_shared_buffer_are_compared_as_they_were():
    out = torch.zeros(2)
    found = compare({"ours": lambda: out.fill_(1), "peer": lambda: out.fill_(2)})
    with pytest.raises(OutputsDiffer):
        found.ratio("peer", "ours")


def test_without_a_check_outputs_may_differ_and_the_rows_say_so():
    found = compare({"ours": lambda: 1, "peer": lambda: 2}, check=None)
    assert found.ratio("peer", "ours").value > 0
    assert "outputs not compared" in found.rows()[0]["notes"]
    nothing = compare({"ours": lambda: None, "peer": lambda: None})
    assert "outputs not compared" in nothing.rows()[0]["notes"]
    assert "checked equal" in compare({"a": lambda: 1, "b": lambda: 1}).rows()[0]["notes"]


def test_an_error_of_a_variant_or_a_check_is_not_taken_for_a_difference():
    def check(a, b):
        raise KeyError("broken check")

    with pytest.raises(KeyError, match="broken check"):
        compare({"a": lambda: 1, "b": lambda: 1}, check=check)
    with pytest.raises(ZeroDivisionError):
        compare({"a": lambda: 1 / 0, "b": lambda: 1})


def covered(ratios_of, trials, rng, truth=1.0):
    found = [profiling._median_ratio(ratios_of(rng)) for _ in range(trials)]
    return sum(f.low <= truth <= f.high for f in found) / trials


@pytest.mark.parametrize("rounds", [2, 3, 7, 8, 11, 30])
@pytest.mark.parametrize("shape", ["normal", "heavy", "skewed"])
def test_the_interval_holds_the_true_median_about_99_times_in_100(rounds, shape):
    draw = {
        "normal": lambda rng: math.exp(rng.gauss(0, 0.1)),
        "heavy": lambda rng: math.exp(0.01 * math.tan(math.pi * (rng.random() - 0.5))),
        "skewed": lambda rng: 1 - 0.1 * math.log(2 * (1 - rng.random())),
    }[shape]
    trials = 3000
    share = covered(lambda rng: [draw(rng) for _ in range(rounds)], trials, random.Random(5))
    # below 8 rounds 99 % is promised for normal logarithms only, the range's share for all
    promised = 0.99 if rounds >= 8 or shape == "normal" else 1 - 0.5 ** (rounds - 1)
    assert share >= promised - 4 * math.sqrt(promised * (1 - promised) / trials)


def test_the_interval_shrinks_with_more_rounds():
    rng = random.Random(1)
    ratios = [math.exp(rng.gauss(0, 0.1)) for _ in range(200)]
    few, many = profiling._median_ratio(ratios[:8]), profiling._median_ratio(ratios)
    assert many.high - many.low < (few.high - few.low) / 2
    assert few.low == min(ratios[:8])
    assert few.high == max(ratios[:8])


class Pair(NamedTuple):
    rows: torch.Tensor
    count: int


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0 + 1e-7, float("nan")])),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
        (torch.arange(6.0).reshape(2, 3).T, torch.arange(6.0).reshape(2, 3).T.contiguous()),
        (np.float64(2), np.float64(2)),
        ({"a": [np.arange(3)], "b": None}, {"b": None, "a": [np.arange(3)]}),
        (Pair(torch.ones(2), 3), Pair(torch.ones(2), 3)),
        (profiling.Ratio(1.0, 1.0, 2.0), profiling.Ratio(1.0, 1.0, 2.0 + 1e-12)),
        ("text", "text"),
    ],
)
def test_what_is_the_same_passes(a, b):
    assert_same(a, b)
    assert_same(profiling._copied(a), b)


@pytest.mark.parametrize(
    ("a", "b", "where"),
    [
        (torch.zeros(3), torch.zeros(4), "output: "),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64), "output: .*dtype"),
        (torch.zeros(3), torch.tensor([0, 0, 1e-3]), "output: "),
        (torch.tensor(float("nan")), torch.tensor(0.0), "output: "),
        ({"a": 1}, {"b": 1}, "output: keys"),
        ([1, [2, 3]], [1, [2, 4]], r"output\[1\]\[1\]: "),
        ([1], [1, 1], "output: 1 elements are not 2"),
        (np.arange(3), np.arange(1, 4), "output: "),
        (Pair(torch.ones(2), 3), Pair(torch.ones(2), 4), r"output\[1\]"),
        (profiling.Ratio(1.0, 1.0, 2.0), profiling.Ratio(1.0, 1.0, 3.0), r"output\['high'\]"),
        (None, torch.zeros(1), "output: None is not"),
        ("a", "b", "output: 'a' is not 'b'"),
    ],
)
def test_what_differs_is_named_by_its_place(a, b, where):
    with pytest.raises(AssertionError, match=f"^{where}"):
        assert_same(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounds": 1}, "rounds must be >= 2; got 1"),
        ({"clock": "gpu"}, "clock must be 'wall', 'cpu' or 'cuda'; got 'gpu'"),
    ],
)
def test_bad_arguments_raise_before_anything_runs(arguments, message):
    def never():
        pytest.fail("a variant ran")

    with pytest.raises(ValueError, match=message):
        compare({"a": never, "b": never}, **arguments)
    with pytest.raises(ValueError, match=message):
        measure(never, **arguments)


def test_one_variant_is_no_comparison():
    with pytest.raises(ValueError, match=r"two or more functions; got \['a'\]"):
        compare({"a": lambda: 1})
    with pytest.raises(ValueError, match="variant must be one of a, b; got 'c'"):
        compare({"a": lambda: 1, "b": lambda: 1}).ratio("c", "a")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_cuda_clock_is_refused_without_a_device():
    with pytest.raises(ValueError, match="without a CUDA device; got 'cuda'"):
        measure(lambda: None, clock="cuda")


def test_a_row_has_every_key_and_only_a_compared_ratio_has_an_interval():
    alone = bench_row("sum", "ours", 2.0, "s", must="<= 3")
    beside = bench_row("sum", "ours", 2.0, "s", peer="theirs", ratio=Ratio(4.0, 3.0, 5.0))
    counted = bench_row("bytes", "ours", 8, "B", peer="theirs", ratio=50.0, kind="counted")
    assert list(alone) == list(beside) == list(compare({"a": int, "b": int}).rows()[0])
    ends = ("ratio", "ratio_low", "ratio_high")
    assert [alone[end] for end in ends] == [None, None, None]
    assert [beside[end] for end in ends] == [4.0, 3.0, 5.0]
    assert [counted[end] for end in ends] == [50.0, None, None]
    assert (alone["must"], alone["kind"], counted["kind"]) == ("<= 3", "measured", "counted")
