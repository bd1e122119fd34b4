"""The emulated link: what is paid, by whom, and that waiting for it neither blinds nor blocks.

No test asks that something is fast: a transfer may end late on a busy machine, but never early.
"""

import contextlib
import gc
import itertools
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from septet_shared.link import LinkSpec, emulate
from septet_shared.ranks import PeerLost, RankError, RanksDiverged, RankTimeout, run
from septet_shared.symmetric_heap import SymmetricHeap

pytestmark = pytest.mark.ranks

KB = 1000


def seconds_of(fn):
    started = time.monotonic()
    fn()
    return time.monotonic() - started


# ---- specification ----


@pytest.mark.parametrize(
    ("rate", "bytes_per_s"),
    [
        ("100mbit", 12.5e6),
        ("1gbit", 125e6),
        (" 2.5 Gbit/s ", 312.5e6),
        ("8kbit", 1e3),
        (".5tbit", 62.5e9),
        (1_000_000, 1e6),
        (0.5, 0.5),
        (math.inf, math.inf),
    ],
)
def test_a_rate_is_bits_with_a_unit_or_bytes_without(rate, bytes_per_s):
    assert LinkSpec(rate).bytes_per_s == pytest.approx(bytes_per_s, rel=1e-12)


@pytest.mark.parametrize("rate", ["1gb", "", "fast", "-1gbit", "1.2.3gbit", "0gbit"])
def test_a_rate_that_means_nothing_is_refused(rate):
    with pytest.raises(ValueError, match="rate must be"):
        LinkSpec(rate)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, None, [1]])
def test_a_rate_must_be_above_zero(rate):
    with pytest.raises(ValueError, match="rate must be above 0; got"):
        LinkSpec(rate)


@pytest.mark.parametrize("latency_s", [-1e-9, 60, math.nan, math.inf])
def test_a_latency_must_be_below_a_minute(latency_s):
    with pytest.raises(ValueError, match=r"latency_s must be in \[0, 60\); got"):
        LinkSpec("1gbit", latency_s)


# ---- what collectives pay ----

RATE = 20_000_000  # bytes per second
LATENCY_S = 0.002


def pay(ranks):
    """(bytes sent, bytes received, seconds) of each collective; seconds that the link was busy."""
    floats, r = 100 * KB // 4, ranks.rank
    counts = [[0, 100, 0], [50, 0, 200], [0, 0, 0]]
    send, receive = counts[r], [c[r] for c in counts]
    rows = torch.ones(sum(send), 250)  # 1 KB a row
    calls = [
        lambda: ranks.barrier("pay"),
        lambda: ranks.all_gather(torch.ones(floats)),
        lambda: ranks.broadcast(torch.ones(floats), 1),
        lambda: ranks.all_to_all_rows(rows, send, receive),
        lambda: ranks.all_reduce(torch.ones(100)),
        lambda: ranks.all_reduce(torch.ones(90 * KB)),
        lambda: ranks.all_gather_object(b"x" * (r * 10 * KB)),
    ]
    out = []
    with emulate(ranks, LinkSpec(RATE, LATENCY_S)) as link:
        for call in calls:
            ranks.barrier("apart")
            before = link.bytes_sent, link.bytes_received
            seconds = seconds_of(call)
            out.append((link.bytes_sent - before[0], link.bytes_received - before[1], seconds))
        return out, link.busy_s


def test_collectives_pay_for_what_leaves_and_enters_and_end_no_sooner():
    n = 100 * KB
    expected = [  # bytes sent and received by each rank; exchanges one after another
        ([0, 0, 0], [0, 0, 0], 1),
        ([2 * n] * 3, [2 * n] * 3, 1),
        ([0, 2 * n, 0], [n, 0, n], 1),
        ([100 * KB, 250 * KB, 0], [50 * KB, 100 * KB, 200 * KB], 1),
        ([800] * 3, [800] * 3, 1),
        ([2 * 2 * 120 * KB] * 3, [2 * 2 * 120 * KB] * 3, 2),
    ]
    results, busy_s = zip(*run(pay, 3), strict=True)
    for i, (sent, received, exchanges) in enumerate(expected):
        for r in range(3):
            out, into, seconds = results[r][i]
            assert (out, into) == (sent[r], received[r]), (i, r)
            assert seconds >= max(out, into) / RATE + exchanges * LATENCY_S
    for r in range(3):  # pickles have a few bytes of their own
        out, into, _ = results[r][6]
        assert 2 * r * 10 * KB <= out < 2 * r * 10 * KB + 200
        assert (3 - r) * 10 * KB <= into < (3 - r) * 10 * KB + 200
        out, into, _ = map(sum, zip(*results[r], strict=True))
        assert busy_s[r] == pytest.approx(max(out, into) / RATE)
    # A receiver with nothing to send waits for the sender's last byte.
    assert results[2][3][2] >= 250 * KB / RATE + LATENCY_S


def pay_by_machine(ranks):
    local, across = ranks.by_machine()
    early = ranks.subgroup([0, 2])
    with emulate(ranks, LinkSpec(RATE, LATENCY_S)) as link:
        bytes_sent = []

        def note(group, t):
            if group is not None:
                group.all_gather(t)
            bytes_sent.append(link.bytes_sent)

        note(local, torch.ones(250))
        note(across, torch.ones(250))
        note(early, torch.ones(250))
        late = ranks.duplicate("late")
        base = link.bytes_sent
        note(late, torch.ones(250))
        note(late.subgroup([1, 3]), torch.ones(250))
    outside = link.bytes_sent
    ranks.all_gather(torch.ones(250))
    return bytes_sent, base, link.bytes_sent - outside


def test_traffic_inside_a_machine_is_free_and_groups_made_before_and_after_pay_from_one_purse():
    results = run(pay_by_machine, 4, ranks_per_machine=2)
    for rank, (sent, base, outside) in enumerate(results):
        even = rank % 2 == 0
        assert sent[0] == 0
        assert sent[1] == 1000
        assert sent[2] == (2000 if even else 1000)
        assert sent[3] - base == 2000  # to two ranks of the other machine
        assert sent[4] - base == (2000 if even else 3000)
        assert outside == 0


def share_one_bucket(ranks):
    other, pair = ranks.duplicate("other"), ranks.subgroup([0, 1])
    with emulate(ranks, LinkSpec(RATE, 0.0)):
        groups = [ranks, other, pair]
        t = torch.ones(100 * KB)  # 400 KB: 20 ms each
        ranks.barrier("together")
        started = time.monotonic()
        works = [g.all_gather(t, async_op=True) for g in groups]
        ends = []
        for work in works:
            work.wait()
            ends.append(time.monotonic() - started)
    return max(ends)


def test_groups_that_move_at_the_same_time_share_the_bucket():
    assert min(run(share_one_bucket, 2)) >= 3 * 400 * KB / RATE


def wait_for_a_busy_sender(ranks):
    groups = [ranks.subgroup([0, r]) for r in (1, 2)]
    with emulate(ranks, LinkSpec(RATE, 0.0)):
        ranks.barrier("start")
        started = time.monotonic()
        rows = torch.ones(1000, 250)  # 1 MB: 50 ms
        works = []
        for group in groups:
            if group is not None and ranks.rank == 0:
                works.append(group.all_to_all_rows(rows, [0, 1000], [0, 0], async_op=True))
                time.sleep(0.01)
        if ranks.rank == 2:
            time.sleep(0.02)  # the other transfer has left first
        for group in groups:
            if group is not None and ranks.rank != 0:
                works.append(group.all_to_all_rows(rows[:0], [0, 0], [1000, 0], async_op=True))
        for work in works:
            work.wait()
        return time.monotonic() - started


def test_a_receiver_waits_for_what_its_sender_still_owes_others():
    sender, _, second = run(wait_for_a_busy_sender, 3)
    assert sender >= 0.1
    assert second >= 0.1


def both_ways(ranks, duplex):
    with emulate(ranks, LinkSpec(RATE, 0.0, duplex)) as link:
        ranks.barrier("start")
        seconds = seconds_of(lambda: ranks.all_gather(torch.ones(100 * KB)))
        return seconds, link.busy_s


@pytest.mark.parametrize(("duplex", "needed_s"), [(True, 0.02), (False, 0.04)])
def test_directions_share_a_bucket_only_when_not_duplex(duplex, needed_s):
    for seconds, busy_s in run(both_ways, 2, duplex):
        assert seconds >= needed_s
        assert busy_s == pytest.approx(needed_s)


def change_while_running(ranks):
    with emulate(ranks, LinkSpec(RATE, 0.0)) as link:
        busy = [0.0]

        def gather():
            ranks.all_gather(torch.ones(100 * KB))
            busy.append(link.busy_s)

        gather()
        ranks.barrier("before")
        if ranks.rank == 1:
            link.change(LinkSpec(RATE / 4, 0.05))
        ranks.barrier("after")
        gather()
        seconds = seconds_of(lambda: ranks.barrier("latency"))
        return [b - a for a, b in itertools.pairwise(busy)], seconds


def test_a_change_by_one_rank_holds_for_all():
    for (before, after), seconds in run(change_while_running, 2):
        assert before == pytest.approx(0.02)
        assert after == pytest.approx(0.08)
        assert seconds >= 0.05


# ---- waiting ----


def work_while_held(ranks):
    with emulate(ranks, LinkSpec(RATE, 0.0)):
        t = torch.ones(3_000_000)  # 12 MB: 0.6 s
        ranks.barrier("start")
        started, cpu = time.monotonic(), time.process_time()
        work = ranks.all_gather(t, async_op=True)
        early = work.is_completed()
        time.sleep(0.6)
        work.wait()
        return early, time.monotonic() - started, time.process_time() - cpu


def test_work_done_while_a_completion_is_held_is_hidden():
    for early, seconds, cpu_s in run(work_while_held, 2):
        assert not early
        assert 0.6 <= seconds < 1.1  # the sum would be 1.2
        assert cpu_s < 0.3  # the copy on loopback itself, not the waiting


def leave_with_work_in_flight(ranks):
    with emulate(ranks, LinkSpec(RATE, 0.0)) as link:
        works = [ranks.all_gather(torch.ones(25 * KB), async_op=True) for _ in range(10)]
        if ranks.rank == 0:  # ranks leave at different moments of their queue
            works[5].wait()
    for work in works:
        work.wait()
    sent = link.bytes_sent
    with emulate(ranks, LinkSpec(RATE, 0.0)) as second:
        ranks.all_gather(torch.ones(25 * KB))
        return sent, second.bytes_sent


def test_operations_asked_for_under_a_link_pay_though_it_has_ended():
    assert run(leave_with_work_in_flight, 2) == [(1000 * KB, 100 * KB)] * 2


def die_while_held(ranks, folder):
    with emulate(ranks, LinkSpec(RATE / 100, 0.0)):
        if ranks.rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        started = time.monotonic()
        try:
            ranks.all_gather(torch.ones(1_000_000))  # 20 s
        except PeerLost as error:
            seconds = time.monotonic() - started
            (Path(folder) / str(ranks.rank)).write_text(f"{error.rank} {seconds}")
            raise


def test_a_rank_killed_while_transfers_are_held_is_named_soon(tmp_path):
    with pytest.raises(PeerLost, match="rank 1 died"):
        run(die_while_held, 2, tmp_path)
    rank, seconds = (tmp_path / "0").read_text().split()
    assert rank == "1"
    assert float(seconds) < 6.0


def too_slow(ranks):
    with emulate(ranks, LinkSpec(1000.0, 0.0)):
        ranks.all_gather(torch.ones(1_000_000))


def test_a_transfer_longer_than_the_time_out_is_refused_at_once():
    with pytest.raises(RankTimeout, match=r"the emulated link needs 4000\.\d s for it, more than"):
        run(too_slow, 2)


def count_descriptors(ranks):
    def now():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    for i in range(40):
        with emulate(ranks, LinkSpec("1gbit", 0.0)):
            ranks.barrier("used")
        if i == 2:
            before = now()
    return before, now()


def test_links_that_have_ended_leave_no_descriptor():
    for before, after in run(count_descriptors, 2):
        assert after <= before


# ---- who may have a link ----


def wrong_links(ranks):
    seen = []
    spec = LinkSpec("1gbit")
    with emulate(ranks, spec):
        for group in (ranks, ranks.duplicate("d")):
            try:
                with emulate(group, spec):
                    pass
            except ValueError as error:
                seen.append(str(error))
    try:
        with emulate(ranks, LinkSpec("1gbit" if ranks.rank else "2gbit")):
            pass
    except RanksDiverged as error:
        seen.append(error.op)
    with contextlib.suppress(ZeroDivisionError), emulate(ranks, spec):
        raise ZeroDivisionError
    return seen, ranks.family.find_link() is None


def test_a_second_link_and_ranks_that_want_different_links_are_refused():
    for seen, ended in run(wrong_links, 2):
        assert seen[0] == seen[1]
        assert "have an emulated link already" in seen[0]
        assert seen[2] == "the emulated link"
        assert ended


def alone(ranks):
    with emulate(ranks, LinkSpec("1mbit", 1.0)) as link:
        ranks.all_gather(torch.ones(1000))
        ranks.barrier("nobody")
        return link.bytes_sent, link.busy_s


def test_a_single_rank_has_nobody_to_pay_for():
    assert run(alone, 1) == [(0, 0.0)]


# ---- one-sided copies ----


def copy_rows(ranks):
    out = {}
    with emulate(ranks, LinkSpec(RATE, LATENCY_S)) as link:
        heap = SymmetricHeap.create(ranks, 1 << 20)
        t = heap.empty((10, 250), torch.float32)
        t.copy_(torch.arange(10.0)[:, None] + 100 * ranks.rank)
        ranks.barrier("filled")
        index = torch.tensor([7, 0, 7])
        for peer in (ranks.rank ^ 1, ranks.rank ^ 2):  # of this machine, of the other
            sent, received = link.bytes_sent, link.bytes_received
            ranks.barrier("read")
            target = torch.empty(3, 500)[:, ::2]
            seconds = seconds_of(lambda p=peer, o=target: link.get_rows(heap, t, p, index, o))
            ranks.barrier("has read")
            moved = link.bytes_sent - sent, link.bytes_received - received
            ranks.barrier("counted")
            out["get", peer] = target[:, 0].tolist(), seconds, moved
        work = link.put_rows(
            heap, t, ranks.rank ^ 2, torch.tensor([1]), torch.full((1, 250), -1.0), async_op=True
        )
        out["put"] = work.wait().shape
        empty = torch.zeros(0, dtype=torch.int64)
        link.get_rows(heap, t, ranks.rank ^ 2, empty, torch.empty(0, 250))
        ranks.barrier("written")
        out["own"] = t[:3, 0].tolist()
        problems = []
        for bad in (
            lambda: link.get_rows(heap, t, 0, torch.tensor([10]), torch.empty(1, 250)),
            lambda: link.get_rows(heap, t, 0, torch.tensor([-1]), torch.empty(1, 250)),
            lambda: link.get_rows(heap, t, 0, index.int(), torch.empty(3, 250)),
            lambda: link.get_rows(heap, t, 0, index, torch.empty(3, 251)),
            lambda: link.put_rows(heap, t, 0, index, torch.empty(3, 250).double()),
            lambda: link.get_rows(heap, t, 4, index, torch.empty(3, 250)),
        ):
            try:
                bad()
            except ValueError as error:
                problems.append(str(error))
        other = SymmetricHeap.local(2, 1 << 16)
        try:
            link.get_rows(other, other.empty((1,), torch.float32), 0, index, index)
        except ValueError as error:
            problems.append(str(error))
        out["problems"] = problems
        heap.close()
    return out


def test_rows_are_got_and_put_and_paid_for_when_they_come_from_another_machine():
    results = run(copy_rows, 4, ranks_per_machine=2)
    for rank, out in enumerate(results):
        near, far = rank ^ 1, rank ^ 2
        rows, _, moved = out["get", near]
        assert rows == [100 * near + i for i in (7, 0, 7)]
        assert moved == (0, 0)
        rows, seconds, moved = out["get", far]
        assert rows == [100 * far + i for i in (7, 0, 7)]
        assert moved == (3000, 3000)  # its own, and what its peer got from it
        assert seconds >= 3000 / RATE + LATENCY_S
        assert out["put"] == (10, 250)
        assert out["own"] == [100 * rank, -1, 100 * rank + 2]
        expected = ["[0, 10); got 10", "[0, 10); got -1", "int64", "251", "float64", "rank", "heap"]
        for text, part in zip(out["problems"], expected, strict=True):
            assert part in text


def put_all_dtypes(ranks):
    out = []
    heap = SymmetricHeap.create(ranks, 1 << 20)
    with emulate(ranks, LinkSpec("10gbit", 0.0)) as link:
        for shape, dtype in ROWS:
            flat = heap.empty((1 + 7 * math.prod(shape),), dtype)
            t = flat.zero_()[1:].view(7, *shape)  # starts where no wider type may
            ranks.barrier("cleared")
            rows = row_values(shape, dtype, ranks.rank)
            index = torch.tensor([5, 0, 3]) + ranks.rank
            link.put_rows(heap, t, 1 - ranks.rank, index, rows)
            link.put_rows(heap, t, 1 - ranks.rank, index[:0], rows[:0])
            ranks.barrier("written")
            out.append(t.clone())
    heap.close()
    return out


ROWS = [
    ((), torch.float64),
    ((), torch.uint8),
    ((8,), torch.uint8),
    ((3,), torch.uint8),
    ((2, 4), torch.bfloat16),
    ((5,), torch.float32),
    ((0,), torch.float32),
]


def row_values(shape, dtype, rank):
    """[3, *shape], with an offset that no wider type has."""
    rng = torch.Generator().manual_seed(rank)
    flat = torch.randint(1, 100, (1 + 3 * math.prod(shape),), generator=rng).to(dtype)
    return flat[1:].view(3, *shape)


def test_rows_of_every_width_are_put_where_they_belong():
    results = run(put_all_dtypes, 2)
    for rank, case in itertools.product(range(2), range(len(ROWS))):
        shape, dtype = ROWS[case]
        expected = torch.zeros(7, *shape, dtype=dtype)
        for i, row in zip((5, 0, 3), row_values(shape, dtype, 1 - rank), strict=True):
            expected[i + 1 - rank] = row
        assert torch.equal(results[rank][case], expected), ROWS[case]


def gather_after_a_kill(ranks, folder):
    heap = SymmetricHeap.create(ranks, 1 << 24)
    t = heap.empty((1000, 1000), torch.float32)
    with emulate(ranks, LinkSpec(RATE / 100, 0.0)) as link:
        ranks.barrier("start")
        if ranks.rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            link.get_rows(heap, t, 1, torch.arange(1000), torch.empty(1000, 1000))  # 20 s
        except RankError as error:
            (Path(folder) / "seen").write_text(f"{type(error).__name__} {error.rank}")
            raise


def test_a_one_sided_copy_from_a_rank_that_dies_names_it(tmp_path):
    with pytest.raises(PeerLost, match="rank 1 died"):
        run(gather_after_a_kill, 2, tmp_path)
    assert (tmp_path / "seen").read_text() == "PeerLost 1"
