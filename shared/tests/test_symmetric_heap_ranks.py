"""The heap between processes: what holds while all live, and what happens when one does not."""

import gc
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from septet_shared import ranks as ranks_module
from septet_shared.ranks import (
    CollectiveMismatch,
    PeerLost,
    RankError,
    RanksDiverged,
    RankTimeout,
)
from septet_shared.symmetric_heap import HeapUnavailable, SymmetricHeap

pytestmark = pytest.mark.ranks


def run(fn, size, *args):
    return ranks_module.run(fn, size, *args, timeout_s=60)


def exchange(heap, channel, t, turn):
    """Each rank writes to every peer, all meet, each checks what it got."""
    for p in range(heap.size):
        heap.peer(t, p)[heap.rank] = 1000 * turn + heap.rank
    channel.barrier("written")
    assert t.tolist() == [1000 * turn + r for r in range(heap.size)]
    channel.barrier("read")


# ---- while all live ----


def every_pair(ranks, turns):
    heap = SymmetricHeap.create(ranks, 1 << 16)
    t, channel = heap.empty(ranks.size, torch.int64), heap.channel("x")
    for turn in range(turns):
        exchange(heap, channel, t, turn)
    heap.close()
    return heap.backend


@pytest.mark.parametrize(("size", "backend"), [(1, "local"), (2, "posix"), (4, "posix")])
def test_every_pair_of_ranks_writes_and_reads_in_order(size, backend):
    assert run(every_pair, size, 300) == [backend] * size


def overlapping_subgroups(ranks):
    groups = [g for g in (ranks.subgroup([0, 1]), ranks.subgroup([1, 2])) if g is not None]
    heaps = [SymmetricHeap.create(g, 1 << 12) for g in groups]
    channels = [h.channel("same name") for h in heaps]
    tensors = [h.empty(2, torch.int64) for h in heaps]
    for turn in range(200):
        for heap, channel, t in zip(heaps, channels, tensors, strict=True):
            exchange(heap, channel, t, turn)
    return len(heaps)


def test_two_overlapping_subgroups_take_turns():
    assert run(overlapping_subgroups, 3) == [1, 2, 1]


def two_heaps(ranks):
    heaps = [SymmetricHeap.create(ranks, 1 << 12) for _ in range(2)]

    def work(heap):
        t, channel = heap.empty(2, torch.int64), heap.channel("same name")
        for turn in range(200):
            exchange(heap, channel, t, turn)

    for heap in heaps:
        work(heap)
    errors = []

    def guarded(heap):
        try:
            work(heap)
        except Exception as error:  # noqa: BLE001 - the test's thread reports to the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(h,)) for h in heaps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heaps[0].close()
    work(heaps[1])
    return errors


def test_two_heaps_of_one_group_are_used_at_once_and_one_outlives_the_other():
    assert run(two_heaps, 2) == [[], []]


def growing(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 12)
    channel = heap.channel("x")
    kept = []
    for turn in range(5):
        t = heap.empty(512, torch.int64).fill_(100 * turn + ranks.rank)
        kept.append((t, [heap.peer(t, r) for r in range(2)], heap.pointers(t).tolist()))
        channel.barrier("written")
        heap.grow(1 << 12)
        for k, (old, views, pointers) in enumerate(kept):
            assert heap.pointers(old).tolist() == pointers
            for r, view in enumerate(views):
                assert view.tolist() == [100 * k + r] * 512
    return heap.statistics().segments


def test_growing_leaves_what_is_in_use_valid():
    assert run(growing, 2) == [6, 6]


def random_signals(ranks):
    size, words = ranks.size, 3
    heap = SymmetricHeap.create(ranks, 1 << 12)
    channel = heap.channel("c", words * size)
    payload = heap.empty((size, words), torch.int64)
    rng = torch.Generator().manual_seed(ranks.rank)
    for epoch in range(1, 1001):
        for k in torch.randperm(size * words, generator=rng).tolist():
            r, i = divmod(k, words)
            heap.peer(payload, r)[ranks.rank, i] = epoch
            channel.signal(r, ranks.rank * words + i, epoch)
        for k in torch.randperm(size * words, generator=rng).tolist():
            channel.wait(k, epoch)
            assert payload.view(-1)[k] >= epoch  # what was written before the signal is there
    return True


def test_a_thousand_epochs_in_random_order_carry_their_payload():
    assert all(run(random_signals, 3))


def emulated_machines(ranks):
    return every_pair(ranks, 3), ranks.machine


def test_a_heap_spans_emulated_machines():
    results = ranks_module.run(emulated_machines, 2, ranks_per_machine=1)
    assert results == [("posix", 0), ("posix", 1)]


def outliving(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 12)
    t = heap.empty(4, torch.int32).fill_(ranks.rank)
    heap.channel("c").barrier("written")
    view = heap.peer(t, 1 - ranks.rank)
    ranks.barrier("viewed")
    heap.close()
    del heap, t
    gc.collect()
    return view.tolist()


def test_views_of_a_peer_outlive_both_heaps():
    assert run(outliving, 2) == [[1] * 4, [0] * 4]


def waiting_costs(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 12)
    channel = heap.channel("c")
    channel.barrier("begin")
    if ranks.rank == 1:
        time.sleep(1.0)
    before = time.process_time()
    channel.barrier("late")
    return time.process_time() - before


def test_a_rank_that_waits_for_long_sleeps():
    assert run(waiting_costs, 2)[0] < 0.5  # of one second


def descriptors_after_close(ranks):
    def cycle():
        heap = SymmetricHeap.create(ranks, 1 << 12)
        t, channel = heap.empty(4, torch.int32), heap.channel("c")
        heap.grow(1 << 12)
        channel.barrier("b")
        heap.peer(t, 1 - ranks.rank).fill_(1)
        del t
        heap.close()
        return heap, channel

    kept = [cycle()]  # the first opens what stays open: libraries, the store
    counts = []
    for _ in range(3):
        kept.append(cycle())
        counts.append((len(list(Path("/proc/self/fd").iterdir())), maps()))
    return counts


def maps():
    return sum("memfd:septet" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_closing_leaves_no_descriptor_and_no_mapping():
    for counts in run(descriptors_after_close, 2):
        assert len(set(counts)) == 1


# ---- when one fails ----


def report(folder, ranks, **what):
    (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(what))


def lost_peer(ranks, folder, where):
    heap = SymmetricHeap.create(ranks, 1 << 12)
    t, channel = heap.empty(4, torch.int32), heap.channel("c", 1)
    t.fill_(ranks.rank)
    channel.barrier("begin")
    if ranks.rank == 1:
        if where == "in a wait":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
            channel.wait(0, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        if where == "peers wait for a flag":
            channel.wait(0, 1)
        channel.barrier("with the dead")
    except PeerLost as error:
        raised_s = time.monotonic() - started
        after = [heap.recover(), heap.recover()]
        channel.barrier("of the living")
        with pytest.raises(HeapUnavailable, match=r"only \[0, 2\] live"):
            heap.grow(64)
        report(folder, ranks, rank=error.rank, op=error.op, s=raised_s, after=after,
               theirs=heap.peer(t, 1).tolist())  # fmt: skip


@pytest.mark.parametrize("where", ["in a wait", "peers wait for a flag", "between waits"])
def test_a_killed_rank_is_named_by_all_others_who_recover_without_it(where, tmp_path):
    before = set(Path("/dev/shm").glob("septet*"))
    with pytest.raises(PeerLost, match="rank 1 died: killed by SIGKILL"):
        run(lost_peer, 3, str(tmp_path), where)
    for rank in (0, 2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["rank"] == 1
        assert "c." in found["op"]
        assert found["s"] <= 5
        assert found["after"] == [[0, 2], [0, 2]]
        assert found["theirs"] == [1] * 4
    assert set(Path("/dev/shm").glob("septet*")) <= before


def raising_in_an_arena(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 12)
    channel = heap.channel("c")
    try:
        with heap.arena(1 << 10) as arena:
            arena.empty(4, torch.int32)
            if ranks.rank == 1:
                time.sleep(0.2)  # its peer has made the next call
                raise KeyError("no such table")
            arena.empty(4, torch.int32)
    except KeyError as error:
        heap.channel("c").poison(error)
        return str(error)
    with pytest.raises(RankError, match="poisoned the heap: KeyError: 'no such table'") as raised:
        channel.barrier("all have filled it")
    return str(raised.value)


def test_an_exception_inside_an_arena_is_not_hidden_by_the_end_of_the_arena():
    first, second = run(raising_in_an_arena, 2)
    assert "no such table" in first
    assert second == "'no such table'"


def growing_badly(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 12, timeout_s=20.0)
    with pytest.raises((ValueError, RankError)) as raised:
        heap.grow(0 if ranks.rank == 1 else 64)
    return type(raised.value).__name__


def test_a_bad_size_on_one_rank_is_told_to_all_at_once():
    started = time.monotonic()
    assert set(run(growing_badly, 2)) <= {"RanksDiverged", "ValueError"}
    assert time.monotonic() - started < 15


def returned_peer(ranks, way, folder):
    heap = SymmetricHeap.create(ranks, 1 << 12)
    channel = heap.channel("c", 1)
    channel.barrier("begin")
    if ranks.rank == 1:
        channel.signal(0, 0, 1)
        return
    time.sleep(0.3)
    channel.wait(0, 1)  # what it did before it returned has been done
    started = time.monotonic()
    try:
        channel.barrier("never") if way == "barrier" else channel.wait(0, 2)
    except PeerLost as error:
        report(folder, ranks, message=str(error), rank=error.rank, s=time.monotonic() - started)


@pytest.mark.parametrize("way", ["barrier", "wait"])
def test_a_wait_for_a_rank_that_has_returned_ends_and_names_it(way, tmp_path):
    run(returned_peer, 2, way, str(tmp_path))
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["rank"] == 1
    assert "returned without taking part" in found["message"]
    assert found["s"] <= 5


def raising_inside(ranks, folder):
    started = time.monotonic()
    try:
        with SymmetricHeap.create(ranks, 1 << 12) as heap:
            channel = heap.channel("c")
            channel.barrier("begin")
            if ranks.rank == 1:
                raise ValueError("no rows")
            channel.barrier("never")
    except RankError as error:
        report(folder, ranks, message=str(error), s=time.monotonic() - started)
        raise


def test_an_exception_on_one_rank_is_what_the_others_raise(tmp_path):
    with pytest.raises(RankError, match="rank 1 raised ValueError: no rows"):
        run(raising_inside, 3, str(tmp_path))
    for rank in (0, 2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "rank 1 poisoned the heap: ValueError: no rows" in found["message"]
        assert found["s"] <= 5


def mismatched(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 12)
    with pytest.raises(CollectiveMismatch) as raised:
        heap.channel("c").barrier("forward" if ranks.rank else "backward")
    heap.channel("c").barrier("in step")
    return str(raised.value)


def test_different_barriers_raise_on_every_rank_naming_both():
    for message in run(mismatched, 3):
        assert "'forward'" in message
        assert "'backward'" in message


def diverging(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 12)
    channel = heap.channel("c")

    def allocate():  # whoever comes first passes, and raises at the barrier
        heap.empty(2 + ranks.rank, torch.int8)
        channel.barrier("allocated")

    with pytest.raises(RanksDiverged, match=r"empty\(\[[23]\]"):
        allocate()
    return True


def test_different_allocations_raise_on_every_rank():
    assert all(run(diverging, 2))


def group_abort(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 12)
    channel = heap.channel("c")
    if ranks.rank == 1:
        ranks.abort(ValueError("stage 2"), "moe")
    with pytest.raises(RankError, match="stage 2"):
        channel.barrier("b") if ranks.rank == 0 else channel.check()
    heap.recover()
    channel.check()
    channel.barrier("without a group")
    heap.recover(ranks.recover())
    channel.barrier("again")
    heap.grow(64)
    exchange(heap, channel, heap.empty(2, torch.int64), 1)
    return True


def test_an_abort_of_the_group_ends_heap_waits_and_both_recover():
    assert all(run(group_abort, 2))


def refused(ranks):
    found = []
    for nbytes, options in [
        (1 << 50, {}),
        (0, {}),
        (64, {"backend": "carrier pigeon"}),
        (64, {"backend": "local"}),
        (64, {"backend": "torch"}),
        (64, {"backend": "cuda_ipc"}),
        (64 + ranks.rank, {}),
        (64, {"slots": 0}),
    ]:
        try:
            SymmetricHeap.create(ranks, nbytes, **options)
        except (ValueError, MemoryError, HeapUnavailable, RanksDiverged) as error:
            found.append((type(error), str(error)))
    heap = SymmetricHeap.create(ranks, 64)
    for nbytes in (1 << 50, 64 + ranks.rank):
        try:
            heap.grow(nbytes)
        except (MemoryError, RanksDiverged) as error:
            found.append((type(error), str(error)))
    ranks.session.on_one_host = False
    with pytest.raises(HeapUnavailable, match="several hosts"):
        SymmetricHeap.create(ranks, 64)
    return found


def test_what_cannot_be_is_refused_alike_on_every_rank():
    first, second = run(refused, 2)
    assert [k for k, _ in first] == [k for k, _ in second] == [
        MemoryError, ValueError, ValueError, ValueError, HeapUnavailable, HeapUnavailable,
        RanksDiverged, ValueError, MemoryError, RanksDiverged,
    ]  # fmt: skip
    assert "2251799813685248 in all" in first[0][1]
    assert "got 'carrier pigeon'" in first[2][1]
    assert "needs ranks on GPUs" in first[4][1]
    assert "64" in first[6][1]
    assert "65" in first[6][1]


def late(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 12, timeout_s=0.3)
    channel = heap.channel("c")
    if ranks.rank == 0:
        with pytest.raises(RankTimeout, match="rank 1 did not come") as raised:
            channel.barrier("b")
        assert raised.value.rank == 1
    ranks.barrier("both")
    channel.barrier("b")
    return True


def test_a_missing_rank_is_named_after_the_heaps_time_out():
    assert all(run(late, 2))


def test_ctrl_c_ends_a_wait():
    heap = SymmetricHeap.local(2, 64)
    threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        heap.channel("c").barrier("b")


# ---- without a compiler ----


def without_compiler(ranks, who):
    if ranks.rank in who:
        os.environ["SEPTET_CXX"] = "no-such-compiler"
    heap = SymmetricHeap.create(ranks, 1 << 12)
    t, channel = heap.empty(ranks.size, torch.int64), heap.channel("c", ranks.size)
    for turn in range(50):
        exchange(heap, channel, t, turn)
    for epoch in range(1, 50):
        heap.peer(t, 0)[ranks.rank] = epoch
        channel.signal(0, ranks.rank, epoch)
        if ranks.rank == 0:
            for r in range(ranks.size):
                channel.wait(r, epoch)
                assert t[r] >= epoch
    with pytest.raises(CollectiveMismatch):
        channel.barrier(f"of rank {ranks.rank}")
    ranks.barrier("nobody is in the barrier any more")
    if ranks.rank == 0:
        channel.poison("enough")
    with pytest.raises(RankError, match="enough"):
        channel.barrier("poisoned")
    heap.recover()
    channel.barrier("recovered")
    return type(heap._control.flags).__name__


@pytest.mark.parametrize("who", [(0, 1, 2), (1,)])
def test_ranks_without_a_compiler_meet_those_with_one(who):
    names = run(without_compiler, 3, who)
    assert names == ["PlainFlags" if r in who else "NativeFlags" for r in range(3)]
