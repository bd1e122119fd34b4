"""The heap's logic, on virtual ranks in one process."""

import ctypes
import threading
import time

import pytest
import torch

from septet_shared.ranks import (
    CollectiveMismatch,
    PeerLost,
    RankError,
    RanksDiverged,
    RankTimeout,
)
from septet_shared.symmetric_heap import HeapUnavailable, SymmetricHeap, copy_, copying
from septet_shared.symmetric_heap import control as control_module
from septet_shared.symmetric_heap.blocks import Block, Blocks
from septet_shared.symmetric_heap.flags import PlainFlags
from septet_shared.symmetric_heap.selftest import scratch


@pytest.fixture(autouse=True, params=["with a compiler", "without"])
def flags(request, monkeypatch):
    """Every test holds for the C++ flags and for the Python ones."""
    if request.param == "without":
        monkeypatch.setattr(control_module, "flags", PlainFlags)


def in_threads(heap, fn):
    """fn(view) on every virtual rank at once; the results, or the first error."""
    results, errors = [None] * heap.size, []

    def work(rank):
        try:
            results[rank] = fn(heap.on(rank))
        except BaseException as error:  # noqa: BLE001 - given to the caller below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(heap.size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
        assert not t.is_alive()
    if errors:
        raise errors[0]
    return results


def everywhere(heap, fn):
    return [fn(heap.on(r)) for r in range(heap.size)]


# ---- memory ----


@pytest.mark.parametrize("shape", [(), (0,), 5, (3, 0, 2), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128])
def test_a_tensor_has_the_shape_and_dtype_asked_for_and_shares_memory_with_its_peers(shape, dtype):
    heap = SymmetricHeap.local(3, 1 << 16)
    tensors = everywhere(heap, lambda h: h.empty(shape, dtype))
    expected = torch.empty(shape, dtype=dtype)
    for rank, t in enumerate(tensors):
        assert t.shape == expected.shape
        assert t.dtype == dtype
        assert t.is_contiguous()
        t.fill_(rank % 2)
    for rank in range(3):
        seen = heap.on((rank + 1) % 3).peer(tensors[(rank + 1) % 3], rank)
        assert torch.equal(seen, torch.full_like(expected, rank % 2))


def test_new_memory_is_zero():
    heap = SymmetricHeap.local(2, 1 << 12)
    assert not heap.empty(1024, torch.int32).any()


def test_equal_calls_give_equal_offsets_on_every_rank():
    heap = SymmetricHeap.local(2, 1 << 16)

    def offsets(h):
        first = h.empty(0, torch.uint8)
        ts = [h.empty(n, torch.int16, align) for n, align in [(1, 1), (100, 4096), (3, 128)]]
        base = int(h.pointers(first)[h.rank])
        return [int(h.pointers(t)[h.rank]) - base for t in ts]

    a, b = everywhere(heap, offsets)
    assert a == b
    assert len(set(a)) == 3


@pytest.mark.parametrize("align", [1, 64, 256, 4096])
def test_addresses_are_multiples_of_the_alignment_asked_for(align):
    heap = SymmetricHeap.local(1, 1 << 16)
    heap.empty(1, torch.uint8)
    assert heap.empty(3, torch.float32, align).data_ptr() % align == 0
    with heap.arena(1 << 13) as a:
        a.empty(1, torch.uint8)
        assert a.empty(3, torch.float32, align).data_ptr() % align == 0


def test_peer_follows_slices_strides_and_dtype_views():
    heap = SymmetricHeap.local(2, 1 << 12)
    own, other = everywhere(heap, lambda h: h.empty((6, 4), torch.int32))
    other.copy_(torch.arange(24, dtype=torch.int32).view(6, 4))
    for view in (own[1:5:2, ::2], own.t(), own[3], own[5, 3], own[6:], own.view(torch.int16)):
        like = other.as_strided(view.shape, view.stride(), view.storage_offset())
        if view.dtype == torch.int16:
            like = other.view(torch.int16)
        assert torch.equal(heap.peer(view, 1), like)
        assert heap.peer(view, 1).stride() == view.stride()


def test_peer_of_a_parameter_over_the_heap_reads_the_peers_values():
    heap = SymmetricHeap.local(2, 1 << 12)
    own, other = everywhere(heap, lambda h: torch.nn.Parameter(h.empty(4, torch.float32)))
    with torch.no_grad():
        other.fill_(2.5)
    assert heap.peer(own, 1).tolist() == [2.5] * 4


def test_pointers_are_the_addresses_of_the_first_element_on_each_rank():
    heap = SymmetricHeap.local(3, 1 << 12)
    tensors = everywhere(heap, lambda h: h.empty(10, torch.int64))
    for rank, t in enumerate(tensors):
        t.fill_(100 + rank)
    table = heap.pointers(tensors[0][7:])
    assert table.dtype == torch.int64
    assert [ctypes.c_int64.from_address(a).value for a in table.tolist()] == [100, 101, 102]
    assert table.tolist() == [t[7:].data_ptr() for t in tensors]


def test_growing_leaves_tensors_views_and_pointer_tables_valid():
    heap = SymmetricHeap.local(2, 256)
    old = everywhere(heap, lambda h: h.empty(64, torch.int32))
    old[1].fill_(1)
    view, table = heap.peer(old[0], 1), heap.pointers(old[0])
    everywhere(heap, lambda h: h.grow(1 << 12))
    new = everywhere(heap, lambda h: h.empty(1000, torch.int32))
    new[1].fill_(11)
    assert view.tolist() == [1] * 64
    assert heap.pointers(old[0]).tolist() == table.tolist()
    assert heap.peer(new[0], 1).tolist() == [11] * 1000
    assert heap.statistics().segments == 2


def test_a_heap_without_room_says_how_much_it_has():
    heap = SymmetricHeap.local(1, 256)
    heap.empty(129, torch.uint8)
    with pytest.raises(MemoryError, match=r"128 bytes .* has 64 bytes, 192 of 256 are in use"):
        heap.empty(100, torch.uint8)


def test_statistics_count_bytes_in_use_and_the_most_that_was():
    heap = SymmetricHeap.local(1, 1 << 12)
    assert heap.statistics().bytes_reserved == 1 << 12
    heap.empty(65, torch.uint8)  # two cache lines
    with heap.arena(512):
        assert heap.statistics().bytes_used == 128 + 512
    heap.empty(1, torch.uint8)
    s = heap.statistics()
    assert (s.bytes_used, s.peak_bytes, s.segments) == (192, 640, 1)


def test_an_arena_is_released_as_a_block_and_then_refuses():
    heap = SymmetricHeap.local(1, 1 << 12)
    with heap.arena(1 << 12) as a:
        first = a.empty(1 << 11, torch.uint8).data_ptr()
        a.empty(1 << 11, torch.uint8)
        with pytest.raises(MemoryError, match="0 of 4096 are left"):
            a.empty(1, torch.uint8)
    with pytest.raises(RuntimeError, match="not in use"):
        a.empty(1, torch.uint8)
    assert heap.empty(1 << 12, torch.uint8).data_ptr() == first


def test_memory_of_a_closed_heap_stays_readable_through_its_tensors():
    heap = SymmetricHeap.local(2, 1 << 12)
    own, other = everywhere(heap, lambda h: h.empty(8, torch.int32))
    view = heap.peer(own, 1)
    other.fill_(3)
    heap.close()
    del heap, other
    assert view.tolist() == [3] * 8


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("extra", [-1, 0, 1, 63, 64, 65])
def test_large_copies_are_exact_at_every_alignment_and_touch_nothing_else(extra, one_thread):
    n = copying.STREAM_BYTES + extra
    rng = torch.Generator().manual_seed(extra)
    for start, offset in [(0, 0), (1, 0), (0, 3), (61, 17)]:
        source = torch.randint(256, (n + 200,), generator=rng, dtype=torch.uint8)
        target = torch.randint(256, (n + 200,), generator=rng, dtype=torch.uint8)
        expected = target.clone()
        expected[start : start + n] = source[offset : offset + n]
        part = target[start : start + n]
        assert copy_(part, source[offset : offset + n]) is part
        assert torch.equal(target, expected)


def test_copies_that_cannot_be_streamed_do_what_torch_does(monkeypatch, one_thread):
    monkeypatch.setattr(copying, "STREAM_BYTES", 0)
    a = torch.arange(12.0).view(3, 4)
    for target, source in [
        (torch.empty(4, 3).t(), a),  # not contiguous
        (torch.empty(3, 4, dtype=torch.int32), a),  # another dtype
        (torch.empty(2, 3, 4), a),  # broadcast
        (torch.empty(3, 4, dtype=torch.complex64), (a + 1j).conj()),  # lazy
        (torch.empty(0), torch.empty(0)),
    ]:
        expected = torch.empty_like(target).copy_(source)
        assert torch.equal(copy_(target, source), expected)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        copy_(torch.empty(3, requires_grad=True), torch.zeros(3))
    saved = torch.ones(3)
    product = (torch.ones(3, requires_grad=True) * saved).sum()
    copy_(saved, torch.zeros(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_blocks_that_touch_are_joined_when_given_back():
    blocks = Blocks()
    blocks.add_segment(64, 256)
    taken = [blocks.take(64, 1) for _ in range(4)]
    for i in (1, 3, 2, 0):
        blocks.give_back(taken[i])
    assert blocks.free == [Block(0, 64, 320)]
    assert blocks.used_bytes == 0


# ---- flags ----


def test_a_wait_returns_once_the_word_is_at_or_above_the_epoch():
    heap = SymmetricHeap.local(2, 64)
    a, b = everywhere(heap, lambda h: h.channel("c", 2))
    a.signal(1, 0, 5)
    for epoch in (1, 5):
        b.wait(0, epoch)
    for word, epoch in [(0, 6), (1, 1)]:
        with pytest.raises(RankTimeout):
            b.wait(word, epoch, timeout_s=0)


def test_words_never_fall():
    heap = SymmetricHeap.local(2, 64)
    a, b = everywhere(heap, lambda h: h.channel("c", 1))
    a.signal(1, 0, 9)
    a.signal(1, 0, 3)
    b.wait(0, 9, timeout_s=0)


def test_a_slot_never_signalled_times_out_naming_word_epoch_and_seconds():
    heap = SymmetricHeap.local(2, 64)
    channel = heap.on(1).channel("moe", 3)
    with pytest.raises(RankTimeout, match=r"wait\(2, 7\): word 2 is at 0.*within 0\.") as raised:
        channel.wait(2, 7, timeout_s=0.05)
    assert 0.05 <= raised.value.waited_s < 5
    assert raised.value.op == "moe.wait(2, 7)"


def test_channels_do_not_share_words():
    heap = SymmetricHeap.local(1, 64)
    a, b = heap.channel("a", 2), heap.channel("b", 2)
    for i in range(2):
        a.signal(0, i, 1)
        with pytest.raises(RankTimeout):
            b.wait(i, 1, timeout_s=0)
    spans = [set(range(c.first_word, c.first_word + c.n)) for c in (a, b)]
    assert not spans[0] & spans[1]


def test_flag_pointers_and_first_word_lead_to_the_word():
    heap = SymmetricHeap.local(2, 64)
    a, b = everywhere(heap, lambda h: h.channel("c", 4))
    a.signal(1, 3, 77)
    address = int(heap.flag_pointers()[1]) + 64 * (a.first_word + 3)
    assert ctypes.c_int32.from_address(address).value == 77
    ctypes.c_int32.from_address(address).value = 78
    b.wait(3, 78, timeout_s=0)


def test_the_same_name_gives_the_same_channel_and_another_n_is_refused():
    heap = SymmetricHeap.local(1, 64)
    assert heap.channel("c", 2) is heap.channel("c", 2)
    with pytest.raises(ValueError, match="has n=2; got n=3"):
        heap.channel("c", 3)


def test_slots_that_are_used_up_are_refused_with_the_number_left():
    heap = SymmetricHeap.local(1, 64, slots=10)
    heap.channel("a", 2)
    with pytest.raises(ValueError, match=r"channel 'b' needs 6 of .* 5 are left"):
        heap.channel("b", 3)


def test_a_thousand_epochs_of_signals_from_random_order_are_all_seen():
    size, words, epochs = 3, 4, 1000
    heap = SymmetricHeap.local(size, 64)

    def work(h):
        channel = h.channel("c", words * size)
        rng = torch.Generator().manual_seed(h.rank)
        order = [(r, i, e) for r in range(size) for i in range(words) for e in (1, 2)]
        for block in range(0, epochs, 2):
            for k in torch.randperm(len(order), generator=rng).tolist():
                r, i, e = order[k]
                channel.signal(r, h.rank * words + i, block + e)
            for k in torch.randperm(words * size, generator=rng).tolist():
                channel.wait(k, block + 2, timeout_s=20)

    in_threads(heap, work)
    channel = heap.channel("c", words * size)
    for k in range(words * size):
        channel.wait(k, epochs, timeout_s=0)
        with pytest.raises(RankTimeout):
            channel.wait(k, epochs + 1, timeout_s=0)


def test_no_rank_passes_a_barrier_before_all_have_come():
    heap = SymmetricHeap.local(3, 64)
    arrived = [0] * 3

    def work(h):
        channel = h.channel("c")
        for turn in range(1, 200):
            if (turn + h.rank) % 50 == 0:
                time.sleep(1e-3)
            arrived[h.rank] = turn
            channel.barrier("turn")
            assert min(arrived) >= turn
            channel.barrier("checked")

    in_threads(heap, work)


def test_barriers_work_across_the_wrap_of_their_epoch():
    heap = SymmetricHeap.local(2, 64)
    channels = everywhere(heap, lambda h: h.channel("c"))
    for c in channels:
        c.restart(2**31 - 3)

    def work(h):
        channel = h.channel("c")
        for _ in range(6):
            channel.barrier("b")
        return channel.latest_epoch()

    assert in_threads(heap, work) == [-(2**31) + 3] * 2
    with pytest.raises(RankTimeout):
        channels[0].barrier("alone", timeout_s=0.01)


def test_two_ranks_in_different_barriers_both_raise_naming_both():
    heap = SymmetricHeap.local(2, 64)
    messages = []

    def work(h):
        channel = h.channel("c")
        with pytest.raises(CollectiveMismatch) as raised:
            channel.barrier(["moe.forward", "moe.backward"][h.rank])
        messages.append(str(raised.value))
        channel.barrier("again")  # the ranks are still in step
        assert channel.latest_epoch() == 2

    in_threads(heap, work)
    assert len(messages) == 2
    for m in messages:
        assert "'moe.forward'" in m
        assert "'moe.backward'" in m


def test_names_alike_in_their_first_63_bytes_are_told_apart():
    heap = SymmetricHeap.local(2, 64)

    def work(h):
        with pytest.raises(CollectiveMismatch):
            h.channel("c").barrier("x" * 100 + str(h.rank))

    in_threads(heap, work)


def test_a_barrier_that_timed_out_is_resumed_not_passed_twice():
    heap = SymmetricHeap.local(2, 64)
    a, b = everywhere(heap, lambda h: h.channel("c"))
    for _ in range(3):
        with pytest.raises(RankTimeout, match="rank 1 did not come") as raised:
            a.barrier("late", timeout_s=0.01)
    assert raised.value.rank == 1
    b.barrier("late")
    a.barrier("late")
    with pytest.raises(RankTimeout, match="rank 0 did not come, last seen in 'late'"):
        b.barrier("next", timeout_s=0.01)


# ---- ranks that fail ----


def test_poison_raises_in_present_and_later_waits_of_every_rank_with_the_first_reason():
    heap = SymmetricHeap.local(3, 64)
    entered = threading.Barrier(3)

    def work(h):
        channel, other = h.channel("c", 1), h.channel("d", 1)
        entered.wait()
        if h.rank == 2:
            time.sleep(0.05)
            channel.poison(ValueError("bad rows"))
            channel.poison("a later reason")
        for wait in (lambda: channel.wait(0, 1), lambda: other.barrier("b"), channel.check):
            with pytest.raises(RankError, match="rank 2 poisoned the heap: ValueError: bad rows"):
                wait()
        assert h.recover() == [0, 1, 2]
        channel.barrier("sound again")
        other.barrier("sound again")

    in_threads(heap, work)


def test_poison_stops_waits_that_are_satisfied_too():
    heap = SymmetricHeap.local(1, 64)
    channel = heap.channel("c", 1)
    channel.signal(0, 0, 1)
    channel.poison("stop")
    with pytest.raises(RankError, match="stop"):
        channel.wait(0, 1)
    with pytest.raises(RankError, match="stop"):
        channel.barrier("b")


def test_recovery_brings_ranks_at_different_barriers_into_step():
    heap = SymmetricHeap.local(2, 64)

    def work(h):
        channel = h.channel("c")
        channel.barrier("both")
        if h.rank == 0:
            only = h.channel("only rank 0 so far")
            for c in (channel, only):
                with pytest.raises(RankTimeout):
                    c.barrier("rank 0 alone", timeout_s=0.01)
        h.recover()
        channel.barrier("both again")
        h.channel("only rank 0 so far").barrier("both")
        if h.rank == 0:
            time.sleep(0.1)
            with pytest.raises(RankTimeout):
                channel.barrier("alone", timeout_s=0.01)

    in_threads(heap, work)


def test_recovery_of_a_sound_heap_is_harmless():
    heap = SymmetricHeap.local(2, 64)

    def work(h):
        h.channel("c").barrier("before")
        assert h.recover() == [0, 1]
        h.channel("c").barrier("after")

    in_threads(heap, work)


def test_ranks_may_be_lost_one_after_the_other():
    heap = SymmetricHeap.local(3, 64)
    dead = {2}
    for r in range(3):
        heap.on(r)._control.lives = lambda rank: rank not in dead

    def first_loss(h):
        if h.rank < 2:
            with pytest.raises(PeerLost) as raised:
                h.channel("c").barrier("of three")
            assert raised.value.rank == 2
            assert h.recover() == [0, 1]
            h.channel("c").barrier("of two")

    in_threads(heap, first_loss)
    dead.add(1)
    with pytest.raises(PeerLost, match="lost rank 1") as raised:
        heap.channel("c").barrier("of one and a dead")
    assert raised.value.rank == 1
    assert heap.recover() == [0]
    heap.channel("c").barrier("alone")


def test_a_recovery_that_some_ranks_come_late_to_succeeds_when_called_again():
    heap = SymmetricHeap.local(2, 64, timeout_s=0.2)
    with pytest.raises(RankTimeout, match="recover: rank 1 did not come"):
        heap.recover()

    def work(h):
        assert h.recover() == [0, 1]
        assert h.recover() == [0, 1]
        h.channel("c").barrier("b")

    in_threads(heap, work)


@pytest.mark.parametrize(
    "calls",
    [
        (lambda h: h.empty(3, torch.float32), lambda h: h.empty(4, torch.float32)),
        (lambda h: h.empty(3, torch.float32), lambda h: h.empty(3, torch.int32)),
        (lambda h: h.empty(3, torch.float32), lambda h: h.channel("c")),
        (lambda h: h.channel("c", 1), lambda h: h.channel("c", 2)),
        (lambda h: h.arena(64).__enter__(), lambda h: h.arena(128).__enter__()),
        (lambda h: h.grow(64), lambda h: h.grow(128)),
    ],
)
def test_the_second_rank_to_call_differently_raises_and_so_does_the_first_at_its_next_wait(calls):
    heap = SymmetricHeap.local(2, 1 << 12)
    channel = everywhere(heap, lambda h: h.channel("before"))[0]
    calls[0](heap.on(0))
    with pytest.raises(RanksDiverged, match=r"on rank 1 and .* on rank 0"):
        calls[1](heap.on(1))
    with pytest.raises(RanksDiverged, match="rank 1 poisoned the heap"):
        channel.barrier("b")


def test_a_difference_is_found_although_one_rank_is_far_ahead():
    heap = SymmetricHeap.local(2, 1 << 16)
    heap.empty(1, torch.uint8)
    for _ in range(100):
        heap.empty(2, torch.uint8)
    ahead = heap.on(1)
    ahead.empty(2, torch.uint8)  # rank 0 allocated 1 here

    def catch_up():
        for _ in range(100):
            ahead.empty(2, torch.uint8)

    with pytest.raises(RanksDiverged, match="or an earlier one differed"):
        catch_up()


def test_an_exception_inside_with_poisons_the_heap_for_the_others():
    heap = SymmetricHeap.local(1, 64)
    channel = heap.channel("c")
    held = heap._control.hold()

    def leave():
        with heap:
            raise KeyError("lost")

    with pytest.raises(KeyError):
        leave()
    assert ctypes.c_int32.from_address(held[0].address).value == 1
    with pytest.raises(RuntimeError, match="closed"):
        channel.barrier("b")


def test_a_closed_heap_refuses_every_call_and_closing_twice_is_harmless():
    heap = SymmetricHeap.local(2, 1 << 12)
    t, channel = heap.empty(3, torch.int32), heap.channel("c", 1)
    other = heap.on(1)
    heap.close()
    heap.close()
    for call in (
        lambda: heap.empty(3, torch.int32),
        lambda: heap.arena(64).__enter__(),
        lambda: heap.peer(t, 1),
        lambda: heap.pointers(t),
        lambda: heap.flag_pointers(),
        lambda: heap.channel("d"),
        lambda: heap.channel("c", 1),
        lambda: heap.grow(64),
        lambda: heap.recover(),
        lambda: heap.selftest(),
        lambda: channel.signal(0, 0, 1),
        lambda: channel.wait(0, 1),
        lambda: channel.barrier("b"),
        lambda: channel.poison("p"),
        lambda: channel.check(),
        lambda: other.empty(3, torch.int32),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_closing_while_another_thread_waits_ends_that_wait():
    heap = SymmetricHeap.local(2, 64)
    channel, raised = heap.channel("c", 1), []

    def wait():
        with pytest.raises(RuntimeError, match="closed"):
            channel.wait(0, 1)
        raised.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    heap.close()
    thread.join(10)
    assert raised == [True]


def test_the_selftest_passes_again_and_again():
    heap = SymmetricHeap.local(4, 64)
    heap.selftest()
    heap.selftest()


@pytest.mark.parametrize("broken", ["a copy of the peer's memory", "a pointer"])
def test_the_selftest_refuses_memory_that_is_not_shared(broken, monkeypatch):
    heap = SymmetricHeap.local(2, 64)
    if broken == "a pointer":
        table = heap.pointers(scratch(heap))
        table[1] = table[0]
        monkeypatch.setattr(heap, "pointers", lambda t: table)
    else:
        heap._segments[0] = [t.clone() if r else t for r, t in enumerate(heap._segments[0])]
    with pytest.raises(HeapUnavailable, match=r"rank \d reads 0 where|misses rank 1's memory"):
        heap.selftest()


# ---- bad input ----


def test_a_heap_larger_than_memory_is_refused_with_both_numbers():
    with pytest.raises(MemoryError, match=r"1125899906842624 bytes .* 2251799813685248 in all"):
        SymmetricHeap.local(2, 1 << 50)
    heap = SymmetricHeap.local(1, 64)
    with pytest.raises(MemoryError, match=r"1125899906842624 .* \d+ are available"):
        heap.grow(1 << 50)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h: SymmetricHeap.local(0, 64), "size must be at least 1; got 0"),
        (lambda h: SymmetricHeap.local(1, 0), "nbytes must be .* at least 1; got 0"),
        (lambda h: SymmetricHeap.local(1, 1.5), r"nbytes must be a whole .* got 1\.5"),
        (lambda h: SymmetricHeap.local(1, 64, slots=0), "slots must be .* at least 1; got 0"),
        (lambda h: SymmetricHeap.local(1, 64, timeout_s=0), "timeout_s must be above 0; got 0"),
        (lambda h: h.grow(-1), "nbytes must be a whole number of at least 1; got -1"),
        (lambda h: h.arena(0), "nbytes must be at least 1; got 0"),
        (lambda h: h.empty((2, -1), torch.int8), r"shape must .* got \[2, -1\]"),
        (lambda h: h.empty(1, torch.int8, align=3), "align must be a power of two .* got 3"),
        (lambda h: h.empty(1, torch.int8, align=8192), "up to 4096; got 8192"),
        (lambda h: h.peer(h.empty(1, torch.int8), 2), r"rank must be in \[0, 2\); got 2"),
        (lambda h: h.peer(torch.zeros(3), 1), r"t must be a tensor of rank 0 .* shape \[3\]"),
        (lambda h: h.pointers(h.peer(h.empty(1, torch.int8), 1)), "t must be a tensor of rank 0"),
        (lambda h: h.on(2), r"rank must be in \[0, 2\); got 2"),
        (lambda h: h.channel("c", -1), "n must be at least 0; got -1"),
        (lambda h: h.channel("c", 1).signal(2, 0, 1), r"rank must be in \[0, 2\); got 2"),
        (lambda h: h.channel("c", 1).signal(0, 1, 1), r"i must be in \[0, 1\); got 1"),
        (lambda h: h.channel("c", 1).signal(0, 0, 0), r"epoch must be in \[1, 2\*\*31\); got 0"),
        (lambda h: h.channel("c", 1).wait(0, 2**31), "got 2147483648"),
        (lambda h: h.channel("c", 1).wait(-1, 1), "got -1"),
        (lambda h: h.channel("c", 1).wait(0, 1, timeout_s=-1), "timeout_s must be .* got -1"),
        (lambda h: h.channel("c", 1).barrier("b", timeout_s=float("nan")), "got nan"),
    ],
)
def test_bad_arguments_are_named_with_their_rule_and_value(call, message):
    heap = SymmetricHeap.local(2, 1 << 12)
    with pytest.raises(ValueError, match=message):
        call(heap)


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"torch.dtype; got 'float'"):
        SymmetricHeap.local(1, 64).empty(1, "float")
