"""The simulator against an exact, slow one, and each rule of its model on its own."""

import json
import random
from fractions import Fraction

import pytest

from septet_shared.hardware import HardwareProfile, Link
from septet_shared.streams import OpGraph, simulate

TABLE = {
    ("link", frozenset({"gemm"})): 0.5,
    ("gemm:float32", frozenset({"copy", "link:nic"})): 0.75,
    ("copy", frozenset({"link:nic"})): 0.25,
}


def profile(interference=None, **changes):
    fields = {
        "name": "test",
        "gemm_flops": {"float32": 4.0, "tf32": [(1, 2), (5, 8)]},
        "copy_bytes_s": 2.0,
        "memory_bytes_s": 16.0,
        "link": {"nic": Link(0.5, 1.0), "nvlink": 8.0},
        "interference": interference,
    }
    return HardwareProfile(**{**fields, **changes})


def exact_timeline(graphs, hardware):
    """Start and end of every op by (rank, name): rates worked out anew at every instant."""
    waits, state = {}, {}
    for rank, ops in enumerate(graphs):
        done_before = {}
        for place, op in enumerate(ops):
            needs = set(op.get("after", ()))
            if op["stream"] in done_before:
                needs.add(done_before[op["stream"]])
            for slot in op.get("slot", []) + op.get("reads", []):
                earlier = [o for o in ops[:place] if slot in o.get("slot", [])]
                needs.update(o["name"] for o in earlier[-1:])
                if slot in op.get("slot", []):
                    last = ops.index(earlier[-1]) if earlier else 0
                    needs.update(o["name"] for o in ops[last:place] if slot in o.get("reads", []))
            done_before[op["stream"]] = op["name"]
            waits[rank, op["name"]] = {(rank, n) for n in needs}
            kind = op.get("kind")
            latency = Fraction(hardware.latency_s(kind)) if kind else Fraction(0)
            full = Fraction(hardware.rate(kind, op.get("work", 0))) if kind else Fraction(1)
            state[rank, op["name"]] = {
                "op": op,
                "lead": Fraction(op.get("seconds", 0)) + latency,
                "work": Fraction(op.get("work", 0)),
                "full": full,
            }
    now, running, ended, times = Fraction(0), [], set(), {}
    while len(ended) < len(state):
        moved = True
        while moved:
            moved = False
            able = [k for k, w in waits.items() if k not in times and w <= ended]
            for key in able:
                team = [key]
                if state[key]["op"].get("collective"):
                    team = [k for k in state if k[1] == key[1]]
                if all(k in able for k in team):
                    for k in team:
                        times.setdefault(k, [now, None])
                        running += [k] if k not in running else []
            for key in list(running):
                if state[key]["lead"] == 0 and state[key]["work"] == 0:
                    running.remove(key)
                    ended.add(key)
                    times[key][1] = now
                    moved = True
        if len(ended) == len(state):
            break
        working = [k for k in running if state[k]["lead"] == 0]
        speed = {}
        for key in working:
            kinds = [state[k]["op"]["kind"] for k in working if k[0] == key[0]]
            mine = state[key]["op"]["kind"]
            share = Fraction(hardware.factor(mine, set(kinds) - {mine}))
            speed[key] = state[key]["full"] * share / kinds.count(mine)
        step = min([state[k]["lead"] for k in running if k not in speed] or [Fraction(10**9)])
        step = min([step] + [state[k]["work"] / speed[k] for k in working])
        for key in running:
            part = "work" if key in speed else "lead"
            state[key][part] -= step * speed.get(key, 1)
        now += step
    return times


def random_ops(rng, ranks):
    """The same shape on every rank (collectives must match), other amounts of work."""
    kinds = ["link:nic", "link:nvlink", "gemm:float32", "gemm:tf32", "copy", "memory", None]
    shape, streams = [], ["a", "b", "c"][: rng.randint(1, 3)]
    for i in range(rng.randint(0, 9)):
        shape.append(
            {
                "name": f"op{i}",
                "stream": rng.choice(streams),
                "kind": rng.choice(kinds),
                "collective": rng.random() < 0.3,
                "after": rng.sample(
                    [o["name"] for o in shape], k=min(len(shape), rng.choice([0, 0, 1, 2]))
                ),
                "slot": [s for s in ("x", "y") if rng.random() < 0.2],
                "reads": [s for s in ("x", "y") if rng.random() < 0.2],
            }
        )
    graphs = []
    for _ in range(ranks):
        graphs.append([dict(op) for op in shape])
        for op in graphs[-1]:
            op["work"] = rng.choice([0, 1, 2, 3, 5, 8]) if op["kind"] else 0
            op["seconds"] = rng.choice([0, 0, 0, 0.25, 2])
    return graphs


def graph_of(ops):
    graph = OpGraph()
    for op in ops:
        graph.op(**{**op, "after": list(op.get("after", ()))})
    return graph


@pytest.mark.parametrize("block", range(10))
def test_random_small_graphs_run_as_in_the_exact_simulation(block):
    compared = 0
    for seed in range(40):
        rng = random.Random(1000 * block + seed)
        drawn = random_ops(rng, ranks=rng.choice([1, 1, 2, 3]))
        hardware = profile(TABLE if seed % 2 else None)
        try:
            graphs = [graph_of(ops) for ops in drawn]
        except ValueError:  # the draw reads a slot that was taken again
            continue
        timeline = simulate(graphs, hardware)
        expected = exact_timeline(drawn, hardware)
        assert len(timeline.ops) == len(expected)
        for op in timeline.ops:
            begin, end = expected[op.rank, op.name]
            assert op.start_s == pytest.approx(float(begin), abs=1e-9)
            assert op.end_s == pytest.approx(float(end), abs=1e-9)
        compared += 1
        check_bounds(timeline, graphs, hardware)
        if compared == 20:
            return
    pytest.fail("too few legal graphs were drawn")


def check_bounds(timeline, graphs, hardware):
    assert all(timeline.makespan_s >= busy - 1e-9 for busy in timeline.busy.values())
    path = timeline.critical_path
    assert sum(op.end_s - op.start_s for op in path) == pytest.approx(timeline.makespan_s)
    for graph in graphs:  # longest chain of ops alone, ignoring other ranks and sharing
        longest = {}
        for op in graph.ops:
            alone = op.seconds + (hardware.seconds(op.kind, op.work) if op.kind else 0)
            before = [longest[o.index] for o in graph.waits_for(op)]
            longest[op.index] = alone + max(before, default=0.0)
        assert timeline.makespan_s >= max(longest.values(), default=0.0) - 1e-9
    assert timeline.low_s == timeline.high_s == timeline.makespan_s


def test_a_chain_takes_the_sum_of_its_ops():
    graph, previous = OpGraph(), ()
    for i, (kind, work) in enumerate([("link:nic", 3), ("gemm:float32", 6), ("copy", 1)] * 5):
        previous = graph.op(f"{i}", stream=f"s{i % 3}", kind=kind, work=work, after=previous)
    expected = 5 * ((0.5 + 3 / 1.0) + 6 / 4.0 + 1 / 2.0)
    assert simulate(graph, profile()).makespan_s == pytest.approx(expected)


def test_one_chunk_takes_the_sum_and_several_take_no_less_than_the_busiest_stream():
    def pipeline(n):
        graph = OpGraph()
        for i in range(n):
            graph.op(f"S{i}", stream="S", kind="link:nic", work=8 / n)
            graph.op(f"C{i}", stream="C", kind="gemm:float32", work=32 / n, after=f"S{i}")
            graph.op(f"R{i}", stream="R", kind="link:nvlink", work=64 / n, after=f"C{i}")
        return simulate(graph, profile())

    assert pipeline(1).makespan_s == pytest.approx(8.5 + 8 + 8)
    for n in (2, 3, 8):
        assert max(pipeline(n).busy.values()) <= pipeline(n).makespan_s < pipeline(1).makespan_s


def test_an_empty_graph_takes_no_time():
    timeline = simulate([OpGraph(), OpGraph()], profile())
    assert timeline.makespan_s == 0
    assert timeline.ops == timeline.critical_path == []
    assert timeline.busy == {}
    assert timeline.low_s == timeline.high_s == 0


def test_an_op_without_work_on_a_link_still_pays_the_latency():
    graph = OpGraph()
    graph.op("a", stream="s", kind="link:nic")
    assert simulate(graph, profile()).makespan_s == 0.5


def test_two_ops_of_one_kind_share_its_rate_and_two_kinds_do_not():
    for kind, expected in (("copy", 4.0), ("memory", 2.0)):
        graph = OpGraph()
        graph.op("a", stream="s", kind="copy", work=4)
        graph.op("b", stream="t", kind=kind, work=4)
        assert simulate(graph, profile()).op("a").end_s == expected


def test_latency_takes_no_share_of_the_link():
    graph = OpGraph()
    graph.op("long", stream="s", kind="link:nic", work=2)
    graph.op("late", stream="t", kind="link:nic", work=1, seconds=1.5)
    timeline = simulate(graph, profile())  # long is alone until 2.0, then both halve
    assert timeline.op("long").end_s == 3.0
    assert timeline.op("late").end_s == 3.5


def test_interference_slows_only_while_the_other_kind_works():
    graph = OpGraph()
    graph.op("send", stream="s", kind="link:nvlink", work=16)  # 2 s alone
    graph.op("mul", stream="c", kind="gemm:float32", work=4)  # 1 s
    assert simulate(graph, profile(TABLE)).op("send").end_s == pytest.approx(1 + 1.5)
    assert simulate(graph, profile(TABLE)).op("mul").end_s == 1.0


def test_the_rate_of_a_product_follows_its_size():
    graph = OpGraph()
    graph.op("small", stream="s", kind="gemm:tf32", work=1)
    graph.op("middle", stream="s", kind="gemm:tf32", work=3)
    graph.op("large", stream="s", kind="gemm:tf32", work=80)
    spans = [op.end_s - op.start_s for op in simulate(graph, profile()).ops]
    assert spans == pytest.approx([1 / 2, 3 / 5, 80 / 8])


def test_a_collective_starts_when_the_last_rank_arrives_and_ends_by_each_ranks_part():
    graphs = []
    for rank in range(3):
        graph = OpGraph()
        graph.op("prepare", stream="c", seconds=rank)
        graph.op(
            "exchange", stream="s", kind="link:nic", work=3 - rank, collective=True, after="prepare"
        )
        graphs.append(graph)
    timeline = simulate(graphs, profile())
    assert [timeline.op("exchange", r).start_s for r in range(3)] == [2, 2, 2]
    assert [timeline.op("exchange", r).end_s for r in range(3)] == [5.5, 4.5, 3.5]
    path = [(op.name, op.rank) for op in timeline.critical_path]
    assert path == [("prepare", 2), ("exchange", 0)]


def test_one_graph_may_stand_for_every_rank():
    graph = OpGraph()
    graph.op("a", stream="s", kind="link:nic", work=1, collective=True)
    graph.op("b", stream="c", kind="copy", work=1, after="a")
    timeline = simulate([graph] * 4, profile())
    assert [op.end_s for op in timeline.ops] == [1.5, 2.0] * 4


def test_a_slot_is_taken_only_after_all_its_readers():
    graph = OpGraph()
    graph.op("S0", stream="S", seconds=1, slot=("DI", 0))
    graph.op("C0", stream="C", seconds=5, reads=("DI", 0))
    graph.op("O0", stream="O", seconds=7, reads=("DI", 0))
    graph.op("S1", stream="S", seconds=1, slot=("DI", 1))
    graph.op("S2", stream="S", seconds=1, slot=[("DI", 0)])
    timeline = simulate(graph, profile())
    assert timeline.op("C0").start_s == timeline.op("O0").start_s == 1
    assert timeline.op("S1").start_s == 1
    assert timeline.op("S2").start_s == 8
    assert [op.name for op in graph.waits_for(graph.ops[4])] == ["S0", "C0", "O0", "S1"]


def test_ops_that_all_name_a_slot_use_it_one_after_another():
    graph = OpGraph()
    for i in range(4):
        graph.op(f"{i}", stream=f"s{i}", seconds=1, slot="buffer")
    assert simulate(graph, profile()).makespan_s == 4


def test_noise_is_the_same_for_a_seed_and_has_mean_one():
    graph = OpGraph()
    for i in range(2000):
        graph.op(f"{i}", stream="s", kind="copy", work=2)
    exact, one, same, other = (
        simulate(graph, profile(), noise=noise, seed=seed).makespan_s
        for noise, seed in ((0, 1), (0.5, 1), (0.5, 1), (0.5, 2))
    )
    assert one == same != other
    assert one == pytest.approx(exact, rel=5 * 0.53 / 2000**0.5)  # five standard errors
    assert one != exact


def test_two_runs_are_the_same_to_the_bit():
    rng = random.Random(3)
    graphs = [graph_of(ops) for ops in random_ops(rng, ranks=3)]
    first, second = (simulate(graphs, profile(TABLE)).ops for _ in range(2))
    assert first == second


def test_a_prediction_carries_the_band_of_its_links():
    graph = OpGraph()
    graph.op("a", stream="s", kind="link:nic", work=8)
    graph.op("b", stream="c", seconds=5)
    banded = profile(link={"nic": Link(0, 1.0, low=0.5, high=4.0)})
    timeline = simulate(graph, banded)
    assert (timeline.low_s, timeline.makespan_s, timeline.high_s) == (5, 8, 16)
    graph.op("c", stream="c", seconds=1)
    again = simulate(graph, banded)
    graph.op("d", stream="c", seconds=1)
    with pytest.raises(RuntimeError, match="ops were added since"):
        _ = again.high_s


def test_a_profile_may_be_named():
    graph = OpGraph()
    graph.op("a", stream="s", kind="link:nvlink", work=3e9)
    timeline = simulate(graph, "dgx-a100-8x8")
    link = HardwareProfile.load("dgx-a100-8x8").link["nvlink"]
    assert timeline.makespan_s == pytest.approx(link.latency_s + 3e9 / link.bytes_s)
    assert timeline.high_s == pytest.approx(link.latency_s + 3e9 / link.low)


def test_an_op_may_wait_for_one_that_is_added_later():
    graph = OpGraph()
    graph.op("early", stream="a", seconds=1, after=["late", "late"])
    graph.op("late", stream="b", seconds=2)
    assert simulate(graph, profile()).op("early").start_s == 2


def test_ops_that_wait_for_each_other_are_named():
    graph = OpGraph()
    graph.op("free", stream="z", seconds=1)
    graph.op("a", stream="s", seconds=1, after="b")
    graph.op("b", stream="t", seconds=1, after="c")
    graph.op("c", stream="s", seconds=1)  # behind a on its stream
    with pytest.raises(ValueError, match="'a' waits for 'b' waits for 'c' waits for 'a'"):
        simulate(graph, profile())


def test_collectives_in_crossed_order_on_two_streams_are_a_circle_over_ranks():
    graphs = []
    for first, second in (("x", "y"), ("y", "x")):
        graph = OpGraph()
        graph.op(first, stream=first, seconds=1, collective=True)
        graph.op(second, stream=second, seconds=1, collective=True, after=first)
        graphs.append(graph)
    with pytest.raises(ValueError, match=r"wait for each other: '[xy]' on rank [01] waits for"):
        simulate(graphs, profile())


def test_collectives_that_differ_between_ranks_name_ranks_and_ops():
    one, two = OpGraph(), OpGraph()
    one.op("S0", stream="s", collective=True)
    two.op("R0", stream="s", collective=True)
    with pytest.raises(
        ValueError, match=r"collective 0 of stream 's'.*rank 0 has 'S0', rank 1 has 'R0'"
    ):
        simulate([one, two], profile())
    with pytest.raises(ValueError, match="rank 0 has 'S0', rank 1 has None"):
        simulate([one, OpGraph()], profile())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"work": -1, "kind": "copy"}, "work of 'x' must be finite and >= 0; got -1"),
        ({"work": float("nan"), "kind": "copy"}, "work of 'x' must be finite"),
        ({"seconds": float("inf")}, "seconds of 'x' must be finite"),
        ({"work": 1}, "work of 'x' must be 0 without a kind"),
        ({"kind": "gem:tf32"}, "kind must be link:<class>, gemm:<dtype>, copy or memory"),
        ({"kind": "link:"}, "kind must be"),
        ({"kind": "copy:x"}, "kind must be"),
        ({"after": "x"}, "after of 'x' must name other ops of its graph; got itself"),
        ({"after": OpGraph().op("y", stream="s")}, "got 'y' of another graph"),
    ],
)
def test_a_bad_op_names_argument_rule_and_value(arguments, message):
    graph = OpGraph()
    with pytest.raises(ValueError, match=message):
        graph.op("x", stream="s", **arguments)
    assert graph.ops == []  # and nothing was added
    graph.op("x", stream="s")


def test_a_name_is_used_once():
    graph = OpGraph()
    graph.op("x", stream="s")
    with pytest.raises(ValueError, match="unique in the graph; got 'x' again"):
        graph.op("x", stream="t")


def test_a_reader_added_after_its_slot_was_taken_again_is_refused():
    graph = OpGraph()
    graph.op("S0", stream="S", slot=("DI", 0))
    graph.op("S2", stream="S", slot=("DI", 0))
    with pytest.raises(ValueError, match=r"'C0' comes after 'S0' in slot \('DI', 0\), which 'S2'"):
        graph.op("C0", stream="C", reads=("DI", 0), after="S0")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("link:infiniband", "'test' has no link 'infiniband' .it has: nic, nvlink"),
        ("gemm:float8", "'test' has no gemm rate for 'float8' .it has: float32, tf32"),
    ],
)
def test_a_kind_the_profile_does_not_know_is_named(kind, message):
    graph = OpGraph()
    graph.op("x", stream="s", kind=kind, work=1)
    with pytest.raises(ValueError, match=message):
        simulate(graph, profile())


def test_arguments_of_simulate_are_checked_before_anything_runs():
    graph = OpGraph()
    graph.op("x", stream="s", after="never")
    with pytest.raises(ValueError, match=r"after of 'x' on rank 0 must name an op.*got 'never'"):
        simulate(graph, profile())
    with pytest.raises(ValueError, match="graphs must be one or more OpGraph"):
        simulate([], profile())
    with pytest.raises(ValueError, match=r"noise must be in \[0, 10\]; got -1"):
        simulate(OpGraph(), profile(), noise=-1)
    with pytest.raises(ValueError, match="name must be an op of rank 0; got 'z'"):
        simulate(OpGraph(), profile()).op("z")


def test_the_chrome_trace_holds_every_op_in_microseconds(tmp_path):
    graph = OpGraph()
    graph.op("a", stream="s", kind="copy", work=4)
    graph.op("b", stream="t", seconds=1, after="a")
    simulate([graph, graph], profile()).chrome(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    found = {(e["pid"], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    expected = {(r, n): t for r in (0, 1) for n, t in (("a", (0, 2e6)), ("b", (2e6, 1e6)))}
    assert found == expected
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {named[e["pid"], e["tid"]] for e in events if e["ph"] == "X"} == {"s", "t"}
    assert list(tmp_path.iterdir()) == [tmp_path / "t.json"]


def test_the_plot_is_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    graph = OpGraph()
    graph.op("a", stream="s", kind="copy", work=4)
    graph.op("b", stream="t", seconds=1, after="a")
    simulate([graph, graph], profile()).plot(tmp_path / "t.png")
    simulate(OpGraph(), profile()).plot(tmp_path / "empty.png")
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
