"""Groups and collectives: what they return, and that ranks which disagree all raise."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from septet_shared.ranks import (
    CollectiveMismatch,
    RankError,
    Ranks,
    RanksDiverged,
    RankTimeout,
    run,
)

pytestmark = pytest.mark.ranks


def caught(fn, *args, **kw):
    """What `fn` raised: its type, message and rank; None when it returned."""
    try:
        fn(*args, **kw)
    except (RankError, ValueError) as error:
        return type(error), str(error), getattr(error, "rank", None)
    return None


def some(shape, dtype, seed):
    rng = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=rng).to(dtype)


# ---- all_reduce, all_gather, broadcast ----

# 64 KiB over all ranks is where all_reduce changes its way: on both sides of it for 1 to 5 ranks.
SIZES = [0, 1, 3, 3276, 3277, 5461, 5462, 8192, 8193, 16384, 16385, 40001]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
]


def reduce_all_sizes(ranks):
    out = {}
    for n in SIZES:
        out["sum", n] = ranks.all_reduce(some((n,), torch.float32, 7 * ranks.rank + n))
        out["max", n] = ranks.all_reduce(some((n,), torch.float32, 7 * ranks.rank + n), "max")
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_sum_has_the_bits_of_adding_in_rank_order_on_every_rank(size):
    for got in run(reduce_all_sizes, size):
        for n in SIZES:
            parts = [some((n,), torch.float32, 7 * r + n) for r in range(size)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            assert torch.equal(got["sum", n], total), n
            assert torch.equal(got["max", n], torch.stack(parts).amax(0)), n


def reduce_all_dtypes(ranks):
    totals = [ranks.all_reduce(some((n,), d, ranks.rank)) for n in (5, 70_000) for d in DTYPES]
    return [(t.dtype, t.to(torch.complex128)) for t in totals]  # torch cannot pickle 8-bit floats


def test_every_dtype_is_summed_half_types_in_single_precision():
    for got in run(reduce_all_dtypes, 3):
        for (n, dtype), (kind, total) in zip(
            itertools.product((5, 70_000), DTYPES), got, strict=True
        ):
            small = dtype.is_floating_point and dtype.itemsize <= 2
            parts = [some((n,), dtype, r) for r in range(3)]
            wide = [p.float() if small else p for p in parts]
            expected = ((wide[0] + wide[1]) + wide[2]).to(dtype)
            assert kind == dtype
            assert torch.equal(total, expected.to(torch.complex128)), dtype


def reduce_odd_tensors(ranks):
    strided = some((6, 8), torch.float32, ranks.rank)
    view = strided.t()[1::3]
    same = ranks.all_reduce(view)
    scalar = ranks.all_reduce(torch.tensor(ranks.rank + 1))
    weight = torch.nn.Parameter(torch.full((2,), float(ranks.rank)))
    ranks.all_reduce(weight)
    conjugate = ranks.all_reduce(torch.tensor([1j * (ranks.rank + 1)]).conj())
    nan = ranks.all_reduce(torch.tensor([float("nan") if ranks.rank else 1.0, 1.0]), "max")
    return strided, same is view, scalar, weight.detach(), weight.requires_grad, conjugate, nan


def test_a_strided_view_a_scalar_a_parameter_and_nan_are_reduced_in_place():
    parts = [some((6, 8), torch.float32, r) for r in range(2)]
    expected = [p.clone() for p in parts]
    for e in expected:
        e[:, 1::3] = parts[0][:, 1::3] + parts[1][:, 1::3]
    for rank, got in enumerate(run(reduce_odd_tensors, 2)):
        strided, same, scalar, weight, needs_grad, conjugate, nan = got
        assert torch.equal(strided, expected[rank])
        assert same
        assert scalar.shape == ()
        assert scalar == 3
        assert weight.tolist() == [1, 1]
        assert needs_grad
        assert conjugate.tolist() == [-3j]
        assert nan[0].isnan()
        assert nan[1] == 1


def write_what_autograd_saved(ranks, way, count):
    saved = torch.ones(count)
    loss = (torch.ones(count, requires_grad=True) * saved).sum()
    each = [count // 2] * 2
    {
        "all_reduce": lambda: ranks.all_reduce(saved),
        "broadcast": lambda: ranks.broadcast(saved),
        "all_to_all_rows": lambda: ranks.all_to_all_rows(torch.ones(count), each, each, out=saved),
    }[way]()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return True


@pytest.mark.parametrize("way", ["all_reduce", "broadcast", "all_to_all_rows"])
@pytest.mark.parametrize("count", [4, 70_000])
def test_autograd_notices_that_a_saved_tensor_was_overwritten(way, count):
    assert run(write_what_autograd_saved, 2, way, count) == [True, True]


def gather_and_broadcast(ranks):
    out = []
    for shape, dtype in itertools.product([(), (0, 3), (3, 2)], [torch.float32, torch.int16]):
        mine = some(shape, dtype, ranks.rank)
        out.append((ranks.all_gather(mine), ranks.broadcast(mine.clone(), 1)))
    strided = some((4, 4), torch.float32, ranks.rank).t()[::2]
    out.append((ranks.all_gather(strided), ranks.broadcast(strided, 2)))
    return out


def test_all_gather_stacks_in_rank_order_and_broadcast_copies_the_source():
    cases = itertools.product([(), (0, 3), (3, 2)], [torch.float32, torch.int16])
    expected = []
    for shape, dtype in cases:
        parts = [some(shape, dtype, r) for r in range(3)]
        expected.append((torch.stack(parts), parts[1]))
    parts = [some((4, 4), torch.float32, r).t()[::2] for r in range(3)]
    expected.append((torch.stack(parts), parts[2]))
    for got in run(gather_and_broadcast, 3):
        for (g, b), (eg, eb) in zip(got, expected, strict=True):
            torch.testing.assert_close(g, eg, rtol=0, atol=0)
            torch.testing.assert_close(b, eb, rtol=0, atol=0)


# ---- all_to_all_rows ----

COUNTS = [  # [from][to] rows, of row shape
    ([[2, 0, 1], [0, 0, 3], [4, 1, 0]], (5,)),
    ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], (5,)),
    ([[0, 0, 7], [0, 0, 0], [0, 0, 0]], ()),
    ([[1, 1, 1], [1, 1, 1], [1, 1, 1]], (0,)),
    ([[3, 2, 1], [1, 2, 3], [0, 5, 0]], (70_001,)),
    ([[3, 2, 1], [1, 2, 3], [0, 5, 0]], (2, 3)),
]


def rows_of(case, rank, dtype=torch.float32):
    counts, shape = COUNTS[case]
    return some((sum(counts[rank]), *shape), dtype, 11 * case + rank)


WAYS = ("plain", "strided", "out")


def exchange_rows(ranks):
    out = []
    for how, (case, (counts, shape)) in itertools.product(WAYS, enumerate(COUNTS)):
        send, receive = counts[ranks.rank], [c[ranks.rank] for c in counts]
        rows = rows_of(case, ranks.rank)
        if how == "strided":
            wide = torch.full((2 * len(rows), *shape), -1.0)
            wide[::2] = rows
            rows = wide[::2]
        if how == "out":
            target = torch.full((sum(receive), *shape), float("nan"))
            got = ranks.all_to_all_rows(rows, send, torch.tensor(receive), out=target)
            assert got is target
        else:
            got = ranks.all_to_all_rows(rows, torch.tensor(send), receive)
        out.append(got)
    return out


def test_rows_arrive_in_rank_order():
    results = [iter(got) for got in run(exchange_rows, 3)]
    for rank, _, case in itertools.product(range(3), WAYS, range(len(COUNTS))):
        counts = COUNTS[case][0]
        pieces = []
        for sender in range(3):
            start = sum(counts[sender][:rank])
            pieces.append(rows_of(case, sender)[start : start + counts[sender][rank]])
        torch.testing.assert_close(next(results[rank]), torch.cat(pieces), rtol=0, atol=0)


def exchange_in_place(ranks):
    rows = torch.arange(4.0) + 10 * ranks.rank
    return ranks.all_to_all_rows(rows, [2, 2], [2, 2], out=rows)


def test_rows_may_arrive_where_they_left():
    assert [r.tolist() for r in run(exchange_in_place, 2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def many_in_flight(ranks):
    other = ranks.duplicate("other")
    works = []
    for i in range(20):
        rows = torch.full((2, 3), float(100 * i + ranks.rank))
        works.append(ranks.all_to_all_rows(rows, [1, 1], [1, 1], async_op=True))
        works.append(other.all_reduce(torch.full((i,), 1.0), async_op=True))
        if i % 5 == 0:
            works.append(ranks.all_reduce(torch.full((3,), float(i))))
    return [w if isinstance(w, torch.Tensor) else w.wait() for w in works[::-1]][::-1]


def test_asynchronous_operations_mix_with_synchronous_ones_in_the_order_of_the_calls():
    for got in run(many_in_flight, 2):
        results = iter(got)
        for i in range(20):
            assert next(results)[:, 0].tolist() == [100 * i, 100 * i + 1]
            assert next(results).tolist() == [2.0] * i
            if i % 5 == 0:
                assert next(results).tolist() == [2.0 * i] * 3


def groups_of_two_owners(ranks):
    first, second = Ranks.wrap(ranks.group), Ranks.wrap(ranks.group)
    both = [first.duplicate("S"), second.duplicate("S")]
    seen = [made.all_gather_object(n) for n, made in enumerate(both)]
    for round in range(3):  # also after the earlier ones have been collected
        time.sleep(0.05 * ranks.rank)
        again = Ranks.wrap(ranks.group).duplicate("S")
        seen.append(again.all_gather_object(round))
        del again
    return seen


def test_two_owners_of_one_process_group_make_groups_of_the_same_name():
    assert run(groups_of_two_owners, 2) == [[[0] * 2, [1] * 2, [0] * 2, [1] * 2, [2] * 2]] * 2


def exchange_once(ranks):
    rows = torch.arange(6.0).view(3, 2)
    empty = ranks.all_to_all_rows(rows[:0], [0], [0])
    grown = torch.ones(2, requires_grad=True)
    return (
        ranks.all_to_all_rows(rows, [3], [3]),
        empty.shape,
        ranks.all_gather(grown),
        ranks.all_reduce(rows.clone(), async_op=True).wait(),
        ranks.broadcast(rows),
        ranks.all_gather_object("x"),
    )


def test_a_single_rank_gets_its_own():
    rows, empty, gathered, reduced, sent, objects = exchange_once(Ranks.world())
    assert torch.equal(rows, torch.arange(6.0).view(3, 2))
    assert empty == (0, 2)
    assert gathered.shape == (1, 2)
    assert not gathered.requires_grad
    assert torch.equal(reduced, rows)
    assert torch.equal(sent, rows)
    assert objects == ["x"]
    assert torch.equal(run(exchange_once, 1)[0][0], rows)


def row_problems(ranks):
    rows, one = torch.zeros(2, 3), ranks.rank == 1
    two = [1, 1]
    return [
        caught(ranks.all_to_all_rows, rows, [2, 1], [2, 1]),  # the same mistake on all ranks
        caught(ranks.all_to_all_rows, rows, [2, 1] if one else two, two),
        caught(ranks.all_to_all_rows, rows, [1, 1, 0] if one else two, two),
        caught(ranks.all_to_all_rows, rows, two, [1, -1] if one else two),
        caught(ranks.all_to_all_rows, rows, two, [1, 2**70] if one else two),
        caught(ranks.all_to_all_rows, rows, [1.0, 1.0] if one else two, two),
        caught(ranks.all_to_all_rows, rows, two, two, out=torch.zeros(3, 2).t() if one else None),
        caught(ranks.all_to_all_rows, rows, two, [3, 1] if one else two),
        caught(ranks.all_to_all_rows, rows.double() if one else rows, two, two),
        caught(ranks.all_to_all_rows, torch.zeros(2, 4) if one else rows, two, two),
        caught(ranks.all_to_all_rows(rows, [2, 1], two, async_op=True).wait),
        caught(ranks.all_to_all_rows, rows, two, two),
    ]


def test_rows_and_counts_that_do_not_fit_raise_on_every_rank():
    first, second = run(row_problems, 2)
    assert first[0][0] is second[0][0] is ValueError
    assert "must sum to the rows of (2, 3); got [2, 1]" in first[0][1]
    rules = ["must sum", "must be 2 counts", "at least 0", "at least 0", "got [1.0, 1.0]", "out"]
    for i, rule in enumerate(rules, 1):
        assert second[i][0] is ValueError, i
        assert rule in second[i][1]
        assert first[i][0] is CollectiveMismatch, i
        assert rule in first[i][1]
    for i in (7, 8, 9):
        assert first[i] == second[i], i
        assert first[i][0] is CollectiveMismatch
    assert "rank 0 sends 1 rows to rank 1, which expects 3" in first[7][1]
    assert first[10][0] is second[10][0] is ValueError
    assert first[11] is second[11] is None  # the group is as good as before


# ---- ranks that do different things ----


def different_calls(ranks):
    zero, t = ranks.rank == 0, torch.zeros(3)
    sparse = torch.zeros(3).to_sparse()
    return [
        caught(ranks.all_reduce, t) if zero else caught(ranks.barrier, "b"),
        caught(ranks.barrier, "step 1" if zero else "step 2"),
        caught(ranks.all_reduce, torch.zeros(4) if zero else t),
        caught(ranks.all_reduce, t.int() if zero else t),
        caught(ranks.all_reduce, t, "sum" if zero else "max"),
        caught(ranks.broadcast, t, 0 if zero else 1),
        caught(ranks.broadcast, t, 2),
        caught(ranks.all_reduce, t if zero else t[:1].expand(3)),
        caught(ranks.all_gather, t if zero else sparse),
        caught(ranks.all_reduce, t, "mean"),
        caught(ranks.subgroup, [0] if zero else [0, 1]),
        caught(ranks.subgroup, [0] if zero else [1, 0]),
        caught(ranks.barrier, "x" * 600 + ("a" if zero else "b")),
        caught(ranks.all_reduce, t.to(torch.complex64), "max"),
        caught(ranks.subgroup, [0.0]),
        caught(ranks.all_gather_object, 1 if zero else threading.Lock()),
        caught(ranks.barrier, "together"),
    ]


def test_ranks_in_different_operations_all_raise_and_can_go_on():
    first, second = run(different_calls, 2)
    for i in (0, 1, 2, 3, 4, 5, 10, 12):
        assert first[i][0] is second[i][0] is CollectiveMismatch, i
        both = first[i][1].partition(": ")[2]
        assert second[i][1].endswith(both), i
        assert "rank 0 is in" in both
        assert "rank 1 is in" in both
    assert "step 1" in first[1][1]
    assert "step 2" in first[1][1]
    for i in (7, 8, 11, 15):
        assert first[i][0] is CollectiveMismatch, i
        assert second[i][0] is ValueError, i
    for i in (6, 9, 13, 14):
        assert first[i][0] is second[i][0] is ValueError, i
    assert "op must be 'sum' or 'max'; got 'mean'" in first[9][1]
    assert "got [0.0]" in first[14][1]
    assert "must pickle" in second[15][1]
    assert first[16] is second[16] is None


class Different:
    """Equal to nothing, like NaN."""

    def __eq__(self, other):
        return False

    __hash__ = None


def agreements(ranks):
    r, nan = ranks.rank, float("nan")
    odd = r == 2
    return [
        caught(ranks.agree, {"a": [1, 2.5, None]}, "plan"),
        caught(ranks.agree, nan, "nan"),
        caught(ranks.agree, [{"w": torch.tensor([nan, 1.0])}, np.array([nan])], "tensors inside"),
        caught(ranks.agree, torch.tensor([nan, 1.0]), "nan tensor"),
        caught(ranks.agree, torch.tensor([1, 2 if not odd else 3]), "tensor"),
        caught(ranks.agree, torch.ones(2) if not odd else torch.ones(2).double(), "dtype"),
        caught(ranks.agree, torch.ones(2) if not odd else torch.ones(3), "shape"),
        caught(ranks.agree, 4 if not odd else 5, "width"),
        caught(ranks.agree, torch.ones(1) if not odd else 1.0, "kind"),
        caught(ranks.agree, Different(), "incomparable"),
    ]


def test_agree_names_what_differs_and_who():
    for got in run(agreements, 3):
        assert got[:4] == [None] * 4
        for i in range(4, 9):
            assert got[i][0] is RanksDiverged, i
            assert got[i][2] == 2
            assert "apart from rank 0: [2]" in got[i][1]
        assert "width differs between ranks: rank 0 has 4, rank 2 has 5" in got[7][1]
        assert got[9] is None  # equal bytes


def gather_objects(ranks):
    big = bytes(ranks.rank for _ in range(1000 * ranks.rank))
    return ranks.all_gather_object((ranks.rank, big)), caught(ranks.all_gather_object, None)


def test_objects_of_unequal_size_are_gathered_in_rank_order():
    for got, _ in run(gather_objects, 3):
        assert got == [(r, bytes([r]) * 1000 * r) for r in range(3)]


# ---- groups ----


def make_groups(ranks):
    low, high = ranks.subgroup([0, 1, 2]), ranks.subgroup([1, 2, 3])
    out = []
    for i in range(5):  # two overlapping groups in turn
        for group in (low, high):
            if group is not None:
                out.append(group.all_reduce(torch.tensor([float(ranks.rank + i)])).item())
    pair = low.subgroup([0, 2]) if low else None
    nested = pair.all_gather_object(ranks.rank) if pair else None
    return out, (low is None, high is None), nested, (low or high).rank, (low or high).size


def test_overlapping_subgroups_are_used_in_turn_and_have_subgroups_of_their_own():
    results = run(make_groups, 4)
    low = [3 + 3 * i for i in range(5)]
    high = [6 + 3 * i for i in range(5)]
    both = [x for pair in zip(low, high, strict=True) for x in pair]
    assert [r[0] for r in results] == [low, both, both, high]
    assert [r[1] for r in results] == [(False, True), (False, False), (False, False), (True, False)]
    assert [r[2] for r in results] == [[0, 2], None, [0, 2], None]
    assert [r[3:] for r in results] == [(0, 3), (1, 3), (2, 3), (2, 3)]


def use_from_threads(ranks):
    groups = [ranks.duplicate(f"thread {i}") for i in range(3)]
    out = [None] * 3

    def work(i):
        total = 0.0
        for step in range(30):
            rows = torch.full((2, 2), float(1000 * i + step))
            total += groups[i].all_to_all_rows(rows, [1, 1], [1, 1]).sum().item()
            groups[i].barrier(f"{i} {step}")
        out[i] = total

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def test_duplicates_serve_threads_at_the_same_time():
    expected = [sum(4.0 * (1000 * i + s) for s in range(30)) for i in range(3)]
    assert run(use_from_threads, 2) == [expected] * 2


def machines(ranks):
    local, across = ranks.by_machine()
    again = ranks.by_machine()
    sub = ranks.subgroup([1, 2, 4])
    return {
        "machine": (ranks.machine, ranks.machine_size, ranks.machines),
        "local": local.all_gather_object(ranks.rank),
        "across": across.all_gather_object(ranks.rank),
        "kept": again[0] is local and again[1] is across,
        "sub": sub and (sub.machine, sub.machine_size, sub.machines),
        "host": ranks.on_one_host,
    }


def test_ranks_per_machine_makes_machines_of_consecutive_ranks():
    results = run(machines, 5, ranks_per_machine=2)
    layout = (0, 0, 1, 1, 2)
    assert [r["machine"] for r in results] == [(m, layout.count(m), layout) for m in layout]
    assert [r["local"] for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3], [4]]
    assert [r["across"] for r in results] == [[0, 2, 4], [1, 3], [0, 2, 4], [1, 3], [0, 2, 4]]
    assert [r["sub"] for r in results] == [
        None,
        (0, 1, (0, 1, 2)),
        (1, 1, (0, 1, 2)),
        None,
        (2, 1, (0, 1, 2)),
    ]
    assert all(r["kept"] and r["host"] for r in results)


def wrap_own_group(ranks):
    group = dist.new_group([1, 2, 3])
    if ranks.rank == 0:
        refused = caught(Ranks.wrap, group)
        return refused, Ranks.world().size
    mine = Ranks.wrap(group, ranks_per_machine=2)
    again = Ranks.wrap(group)
    threads = [
        threading.Thread(target=lambda x=x: [x.barrier("apart") for _ in range(300)])
        for x in (mine, again)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    world = Ranks.world()
    pair = mine.subgroup([0, 1])
    total = torch.ones(1)
    if pair is not None:  # torch.distributed knows the groups made here
        dist.all_reduce(total, group=pair.group)
    return mine.rank, mine.machines, again.all_gather_object(ranks.rank), world.size, total.item()


def test_a_callers_group_is_wrapped_twice_and_numbers_its_own_machines():
    (refused, size), *others = run(wrap_own_group, 4)
    assert refused[0] is ValueError
    assert size == 4
    expected = [(i, (0, 0, 1), [1, 2, 3], 4, 2.0 if i < 2 else 1.0) for i in range(3)]
    assert others == expected


def count_resources(ranks):
    def now():
        gc.collect()
        time.sleep(0.5)
        return [len(list(Path("/proc/self", x).iterdir())) for x in ("fd", "task")]

    def cycle(i):
        group = ranks.duplicate(str(i)) if i % 2 else ranks.subgroup([0, 1])
        group.all_reduce(torch.ones(3), async_op=True).wait()
        group.barrier("used")

    for i in range(3):
        cycle(i)
    before = now()
    for i in range(50):
        cycle(i)
    return before, now()


def test_groups_that_are_let_go_leave_no_descriptor_and_no_thread():
    for before, after in run(count_resources, 2):
        assert after[0] <= before[0]
        assert after[1] <= before[1]


# ---- options ----


def test_options_out_of_range_name_the_rule_and_the_value():
    for timeout_s in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"timeout_s must be in \(0, 1e6\]; got {timeout_s}"):
            Ranks.world(timeout_s=timeout_s)
    for count in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"ranks_per_machine must be at least 1; got {count}"):
            Ranks.world(ranks_per_machine=count)
    for device in ("tpu", "mps", 3.5):
        with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda'; got"):
            Ranks.world(device)
    with pytest.raises(ValueError, match="group must be a ProcessGroup this process is in"):
        Ranks.wrap(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_a_gpu_is_refused(device):
    with pytest.raises(ValueError, match="torch finds no CUDA device"):
        Ranks.world(device)


def test_half_of_torchruns_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ValueError, match="RANK but not WORLD_SIZE, MASTER_PORT"):
        Ranks.world()


TORCHRUN = """
import os, sys, torch
from septet_shared.ranks import Ranks
ranks = Ranks.world("cpu", timeout_s=30)
total = ranks.all_reduce(torch.tensor([ranks.rank + 1.0]))
pair = ranks.duplicate("again").all_gather_object(ranks.rank)
left = [ranks.all_reduce(torch.ones(100_000), async_op=True) for _ in range(5)]  # in flight at exit
print(f"rank {ranks.rank} of {ranks.size}: {total.item()} {pair} {ranks.on_one_host}\\n", end="")
"""


def test_torchrun_starts_ranks_that_meet(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == [
        "rank 0 of 2: 3.0 [0, 1] True",
        "rank 1 of 2: 3.0 [0, 1] True",
    ]


def test_a_world_whose_other_rank_never_comes_is_given_up(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "from septet_shared.ranks import Ranks, RankError\n"
        "try:\n    Ranks.world('cpu', timeout_s=1)\n"
        "except RankError as error:\n    print('gave up:', error)\n"
    )
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = "0"
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert "gave up: world: the ranks did not meet within" in done.stdout, done.stderr


# ---- a wait with a limit of its own ----


def wait_a_little(ranks):
    if ranks.rank == 1:
        time.sleep(1.5)
    work = ranks.all_reduce(torch.ones(2), async_op=True)
    early = None
    if ranks.rank == 0:
        started = time.monotonic()
        try:
            work.wait(0.3)
        except RankTimeout as error:
            early = str(error), error.rank, time.monotonic() - started, work.is_completed()
    return early, work.wait().tolist(), work.is_completed()


def test_a_wait_that_runs_out_names_the_rank_and_leaves_the_operation_under_way():
    (early, total, done), _ = run(wait_a_little, 2)
    message, rank, waited_s, was_done = early
    assert "rank 1 has not come" in message
    assert rank == 1
    assert 0.3 <= waited_s < 1.4
    assert not was_done
    assert total == [2, 2]
    assert done
