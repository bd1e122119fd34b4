import contextlib
import copy
import gc
import random
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from septet_shared.memory_pool import (
    Arena,
    BufferRing,
    lending,
    pinned,
    ring,
)

MIB = 2**20
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def address(t):
    return t.untyped_storage().data_ptr()


KEPT = {  # ways of keeping memory of a lent tensor that are not the tensor itself
    "slice": lambda t: t[1:],
    "reshaped": lambda t: t.view(-1),
    "detached": lambda t: t.detach(),
    "numpy": lambda t: t.numpy(),
    "numpy slice": lambda t: t.numpy()[1:, 1],
    "numpy back in torch": lambda t: torch.from_numpy(t.numpy()),
    "dlpack": lambda t: torch.from_dlpack(t),
    "storage": lambda t: t.untyped_storage(),
    "graph": lambda t: (t * torch.ones_like(t, requires_grad=True)).sum(),
    "parameter": lambda t: torch.nn.Parameter(t),
}


# Arena


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_a_scope_are_aligned_and_do_not_overlap(device):
    arena = Arena(device=device)
    with arena.scope() as scope:
        tensors = [scope.empty((i, 3), dtype=torch.int16) for i in range(1, 40)]
        for i, t in enumerate(tensors):
            t.fill_(i)
        assert all(t.data_ptr() % 64 == 0 and t.is_contiguous() for t in tensors)
        assert all(bool((t == i).all()) for i, t in enumerate(tensors))
        assert {t.device.type for t in tensors} == {device}


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex128, torch.float8_e4m3fn],
)
def test_an_arena_gives_the_shape_and_dtype_asked_for(dtype):
    with Arena(1000).scope() as scope:
        for shape in [(), (1,), 5, (0, 3), [2, 3], torch.Size([7])]:
            t, plain = scope.empty(shape, dtype), torch.empty(shape, dtype=dtype)
            assert (t.shape, t.dtype, t.stride()) == (plain.shape, plain.dtype, plain.stride())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grow", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_no_living_tensor_is_overwritten_in_any_order_of_scopes(seed, grow, device):
    rng = random.Random(seed)
    arena = Arena(20_000, device, grow=grow)
    scopes, kept, mark = {}, [], 0  # scope -> (context, [(tensor, fill)])
    for _ in range(300):
        action = rng.choice(["open", "close", "drop", "empty", "empty", "empty"])
        if action == "open" and len(scopes) < 4:
            context = arena.scope()
            scopes[context.__enter__()] = (context, [])
        elif action == "close" and scopes:
            context, lent = scopes.pop(rng.choice(list(scopes)))
            for t, fill in lent:
                if rng.random() < 0.2:
                    kept.append((rng.choice([t[:1], t.view(-1), t.detach()]), fill))
            context.__exit__(None, None, None)
            lent = t = None
        elif action == "drop" and kept:
            kept.pop(rng.randrange(len(kept)))
        elif action == "empty" and scopes:
            mark += 1
            scope, (_, lent) = rng.choice(list(scopes.items()))
            with contextlib.nullcontext() if grow else contextlib.suppress(RuntimeError):
                t = scope.empty((1 + rng.randrange(20), 30), torch.int32)
                lent.append((t.fill_(mark), mark))
        for t, fill in [*(pair for _, lent in scopes.values() for pair in lent), *kept]:
            assert bool((t == fill).all())
        assert arena.used_bytes <= arena.reserved_bytes
    for context, _ in scopes.values():
        context.__exit__(None, None, None)
    scopes.clear()
    kept.clear()
    lent = t = None
    with arena.scope():  # its end frees what was kept
        pass
    assert arena.used_bytes == 0
    assert arena.peak_bytes <= arena.reserved_bytes or grow


def test_a_tensor_read_after_its_scope_raises():
    with Arena().scope() as scope:
        t = scope.empty((2, 3)).fill_(1)
    assert t.shape == (2, 3)
    with pytest.raises(NotImplementedError, match="meta"):
        t.tolist()
    with pytest.raises(TypeError, match="meta"):
        t.numpy()


def test_a_variable_left_from_the_last_scope_keeps_no_memory():
    arena = Arena(1024, grow=False)
    for step in range(5):
        with arena.scope() as scope:
            t = scope.empty(256)
            t.fill_(step)
            assert arena.used_bytes == 1024
    assert t.is_meta
    assert (arena.peak_bytes, arena.reuses) == (1024, 5)


@pytest.mark.parametrize("way", KEPT)
def test_what_outlives_a_scope_stays_right_and_its_bytes_are_not_lent(way):
    arena = Arena(1024, grow=False)
    with arena.scope() as scope:
        t = scope.empty((16, 16)).fill_(7)
        kept = KEPT[way](t)
    assert arena.used_bytes == 1024
    with arena.scope() as scope, pytest.raises(RuntimeError, match="full"):
        scope.empty(256)
    if isinstance(kept, (torch.Tensor, np.ndarray)) and way != "graph":
        assert (np.asarray(kept.detach() if isinstance(kept, torch.Tensor) else kept) == 7).all()
    del kept
    with arena.scope() as scope:  # although `t` is still a name of what was kept
        assert scope.empty(256).fill_(1).sum() == 256


def test_a_saved_arena_tensor_gives_the_right_gradient_after_its_scope():
    x = torch.ones(8, requires_grad=True)
    arena = Arena()
    with arena.scope() as scope:
        y = (x * scope.empty(8).fill_(3)).sum()
    with arena.scope() as scope:
        scope.empty(8).fill_(99)
    y.backward()
    assert x.grad.tolist() == [3.0] * 8


def test_writing_one_tensor_is_no_change_of_another_for_autograd():
    x = torch.ones(4, requires_grad=True)
    with Arena().scope() as scope:
        saved, other = scope.empty(4).fill_(2), scope.empty(4)
        y = (x * saved).sum()
        other.zero_()
        y.backward()
    assert x.grad.tolist() == [2.0] * 4


def test_blocks_of_a_grown_arena_become_one_of_the_peaks_size():
    arena = Arena()
    for step in range(3):
        with arena.scope() as scope:
            tensors = [scope.empty(50_000, torch.uint8) for _ in range(20)]
            assert len({address(t) for t in tensors}) == 20
        if step:
            assert arena.reserved_bytes == arena.peak_bytes == 20 * 50_048
            assert arena.reuses >= 20 * step - 1


def test_an_outer_scope_may_allocate_while_an_inner_one_is_open():
    arena = Arena(4096, grow=False)
    with arena.scope() as outer:
        a = outer.empty(256).fill_(1)
        with arena.scope() as inner:
            inner.empty(256).fill_(2)
            b = outer.empty(256).fill_(3)
        with arena.scope() as inner:
            c = inner.empty(256).fill_(4)
            d = inner.empty(256).fill_(5)
            assert [int(t.sum()) for t in (a, b, c, d)] == [256, 768, 1024, 1280]
    assert arena.used_bytes == 0


def test_an_error_inside_a_scope_frees_it():
    arena, lent = Arena(1024, grow=False), []

    def fail():
        with arena.scope() as scope:
            lent.append(scope.empty(256))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert lent[0].is_meta
    assert arena.used_bytes == 0


def test_a_full_arena_names_bytes_asked_and_available():
    arena = Arena(1000, grow=False)
    with arena.scope() as scope:
        scope_tensor = scope.empty(600, torch.uint8)
        with pytest.raises(RuntimeError, match=r"512 bytes asked, 384 of 1024 available"):
            scope.empty(500, torch.uint8)
        assert scope.empty(384, torch.uint8).fill_(1).sum() == 384
    assert scope_tensor.is_meta


def test_an_ended_scope_refuses_to_allocate():
    with Arena().scope() as scope:
        pass
    with pytest.raises(RuntimeError, match="ended"):
        scope.empty(1)


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (1.5,), ("a",)])
def test_a_bad_shape_is_refused_with_its_value(shape):
    with (
        Arena().scope() as scope,
        pytest.raises(ValueError, match=r"shape must hold integers >= 0"),
    ):
        scope.empty(shape)


@pytest.mark.parametrize("arguments", [{"nbytes": -1}, {"grow": False}, {"device": "meta"}])
def test_an_impossible_arena_is_refused(arguments):
    with pytest.raises(ValueError, match=r"must be .*got"):
        Arena(**arguments)


def test_what_is_lent_in_inference_mode_works_outside_of_it():
    arena, buffers = Arena(), BufferRing(1, (4,), torch.float32)
    with arena.scope() as scope:
        with torch.inference_mode():
            t, buffer = scope.empty(4), buffers.acquire(0)
        assert not t.is_inference()
        assert not buffer.is_inference()
        t.fill_(1)
        with torch.inference_mode():
            buffers.release(buffer)
    assert buffers.in_use == 0


def test_threads_share_an_arena_without_seeing_each_others_memory():
    arena, wrong = Arena(), []

    def work(mark):
        for _ in range(100):
            with arena.scope() as scope:
                tensors = [scope.empty(100, torch.int32).fill_(mark) for _ in range(5)]
                wrong.extend(t for t in tensors if not bool((t == mark).all()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not wrong
    assert arena.used_bytes == 0


# BufferRing


@pytest.mark.parametrize("device", DEVICES)
def test_a_released_buffer_is_lent_again(device):
    buffers = BufferRing(1, (3, 5), torch.float32, device)
    buffer = buffers.acquire(0)
    first = address(buffer)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((3, 5), torch.float32, device)
    buffers.release(buffer)
    again = buffers.acquire(0)
    assert address(again) == first
    assert (buffers.count, buffers.in_use, buffers.peak_in_use, buffers.reuses) == (1, 1, 1, 1)


def test_a_released_buffer_cannot_be_read_any_more():
    buffers = BufferRing(1, (3,), torch.float32)
    buffer = buffers.acquire(0)
    buffers.release(buffer)
    with pytest.raises(NotImplementedError, match="meta"):
        buffer.tolist()


def test_a_dropped_buffer_comes_back_without_release():
    buffers = BufferRing(1, 64)
    buffer = buffers.acquire(0)
    del buffer
    assert buffers.in_use == 0
    buffers.acquire(0)


@pytest.mark.parametrize("way", KEPT)
@pytest.mark.parametrize("give_back", ["release", "drop"])
def test_a_buffer_is_not_lent_again_while_something_keeps_it(way, give_back):
    buffers = BufferRing(1, (16, 16), torch.float32)
    buffer = buffers.acquire(0).fill_(7)
    kept = KEPT[way](buffer)
    if give_back == "release":
        buffers.release(buffer)
    else:
        del buffer
    with pytest.raises(TimeoutError):
        buffers.acquire(0.03)
    if isinstance(kept, (torch.Tensor, np.ndarray)) and way != "graph":
        assert (np.asarray(kept.detach() if isinstance(kept, torch.Tensor) else kept) == 7).all()
    del kept
    # With "release" the variable `buffer` is still there.
    assert buffers.acquire(1.0).shape == (16, 16)


def test_a_view_that_goes_while_another_thread_waits_ends_the_wait():
    buffers = BufferRing(1, (4,), torch.float32)
    buffer = buffers.acquire(0)
    views = [buffer[1:]]
    buffers.release(buffer)
    timer = threading.Timer(0.05, views.clear)
    timer.start()
    assert buffers.acquire(30).shape == (4,)
    timer.join(10)


def test_a_buffer_saved_by_autograd_gives_the_right_gradient_after_release():
    buffers = BufferRing(1, (4,), torch.float32, grow=True)
    x = torch.ones(4, requires_grad=True)
    buffer = buffers.acquire(0).fill_(3)
    y = (x * buffer).sum()
    buffers.release(buffer)
    other = buffers.acquire(0).fill_(99)
    y.backward()
    assert x.grad.tolist() == [3.0] * 4
    assert address(other) != address(buffer)


def test_buffers_may_be_released_in_any_order_and_from_any_thread():
    buffers = BufferRing(3, (4,), torch.int64)
    lent = [buffers.acquire(0).fill_(i) for i in range(3)]
    assert len({address(t) for t in lent}) == 3
    threads = [threading.Thread(target=buffers.release, args=(lent[i],)) for i in (1, 2, 0)]
    for each in threads:
        each.start()
        each.join(10)
    assert buffers.in_use == 0


def test_a_waiting_acquire_gets_what_another_thread_releases():
    buffers = BufferRing(1, (4,), torch.float32)
    buffer = buffers.acquire(0)
    timer = threading.Timer(0.05, buffers.release, args=(buffer,))
    timer.start()
    assert address(buffers.acquire(30)) != 0
    timer.join(10)


def test_threads_never_hold_the_same_buffer_at_one_time():
    buffers, wrong = BufferRing(2, (64,), torch.int64), []

    def work(mark):
        for i in range(200):
            buffer = buffers.acquire(30).fill_(mark)
            if i % 3 == 0:
                kept = buffer[32:]
                buffers.release(buffer)
                wrong.extend(kept[kept != mark].tolist())
                del kept
            elif i % 3 == 1:
                wrong.extend(buffer[buffer != mark].tolist())
                buffers.release(buffer)
            else:
                wrong.extend(buffer[buffer != mark].tolist())
                del buffer

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads)
    assert not wrong
    assert (buffers.count, buffers.in_use, buffers.peak_in_use) == (2, 0, 2)


def test_a_time_out_names_ring_count_and_seconds_waited():
    buffers = BufferRing(2, (3,), torch.int8)
    lent = [buffers.acquire(0) for _ in range(2)]
    with pytest.raises(
        TimeoutError, match=r"BufferRing\(2 of \(3,\) torch.int8 on cpu\).*0.0\d\d s"
    ):
        buffers.acquire(0.02)
    del lent


def test_growing_makes_a_buffer_instead_of_waiting():
    buffers = BufferRing(0, (3,), torch.float32, grow=True)
    lent = [buffers.acquire(0) for _ in range(5)]
    assert len({address(t) for t in lent}) == 5
    assert (buffers.count, buffers.reserved_bytes) == (5, 60)
    lent.clear()
    lent = [buffers.acquire(0) for _ in range(5)]
    assert (buffers.count, buffers.reuses) == (5, 5)


def test_a_with_block_gives_its_buffer_back_also_after_an_error():
    buffers = BufferRing(1, (3,), torch.float32)
    for _ in range(3):
        with buffers.slot(0) as buffer:
            buffer.zero_()
    with pytest.raises(KeyError), buffers.slot(0) as buffer:
        raise KeyError
    with buffers.slot(0) as buffer:
        buffers.release(buffer)
    assert buffers.in_use == 0


def test_what_was_not_lent_or_is_back_already_cannot_be_released():
    buffers, other = BufferRing(2, (3,)), BufferRing(1, (3,))
    buffer, foreign = buffers.acquire(0), other.acquire(0)
    for t in (foreign, buffer[:], torch.empty(3, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="buffer must be a tensor that acquire of BufferRing"):
            buffers.release(t)
    buffers.release(buffer)
    with pytest.raises(ValueError, match="not released before"):
        buffers.release(buffer)
    assert (buffers.in_use, other.in_use) == (0, 1)


def test_a_buffer_outlives_its_ring():
    buffers = BufferRing(1, (1000,), torch.int64)
    buffer = buffers.acquire(0).fill_(5)
    gone = weakref.ref(buffers)
    del buffers
    gc.collect()
    assert gone() is None
    assert bool((buffer == 5).all())


def test_a_buffer_can_be_copied_but_not_resized():
    buffer = BufferRing(1, (4,), torch.float32).acquire(0).fill_(2)
    assert copy.deepcopy(buffer).tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="resiz"):
        buffer.resize_(100)


def test_a_size_in_bytes_gives_a_flat_buffer():
    assert BufferRing(1, 24, torch.float64).acquire(0).shape == (3,)
    assert BufferRing(1, (0, 4), torch.float64).acquire(0).shape == (0, 4)
    with pytest.raises(ValueError, match=r"multiple of 8.*got 25"):
        BufferRing(1, 25, torch.float64)


@pytest.mark.parametrize(("count", "grow"), [(0, False), (-1, True)])
def test_a_ring_of_no_buffers_is_refused(count, grow):
    with pytest.raises(ValueError, match=f"count must be .*got {count}"):
        BufferRing(count, 8, grow=grow)


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
def test_an_impossible_time_out_is_refused(timeout_s):
    with pytest.raises(ValueError, match="timeout_s must be >= 0"):
        BufferRing(1, 8).acquire(timeout_s)


# What CUDA would do, with a driver that hands out CPU memory.


def test_device_memory_is_lent_by_address_for_as_long_as_its_storage_lives(monkeypatch):
    def as_tensor(lease, device):
        described = SimpleNamespace(__array_interface__=lease.__cuda_array_interface__, lease=lease)
        return torch.from_numpy(np.asarray(described))

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    memory = torch.arange(256, dtype=torch.uint8)  # a tensor, as CUDA memory is
    returned = []
    t, lease = lending.lend(memory, 64, 128, (4, 4), torch.int32, returned.append)
    assert t.data_ptr() == memory.data_ptr() + 64
    view = t[1:]
    del t
    assert (lease() is not None, returned) == (True, [])
    del view
    assert (lease(), len(returned)) == (None, 1)


def test_on_cuda_a_buffer_waits_for_the_stream_that_gave_it_back(monkeypatch):
    log = []
    stream = SimpleNamespace(wait_event=lambda event: log.append(("wait", event)))
    event = SimpleNamespace(record=lambda on: log.append(("record", on)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(ring, "checked_device", torch.device)
    monkeypatch.setattr(
        ring, "new_memory", lambda nbytes, device: lending.new_memory(nbytes, torch.device("cpu"))
    )
    buffers = BufferRing(1, 64, device="cuda:0")
    with buffers.slot(0):
        assert log == []
    with buffers.slot(0):
        assert log == [("record", stream), ("wait", event)]


# pinned


def test_staging_memory_comes_back_with_its_last_view():
    first = pinned((1000, 3), torch.float64)
    where, view = address(first), first[5:]
    assert (first.shape, first.dtype, first.device.type) == ((1000, 3), torch.float64, "cpu")
    assert first.is_pinned() == torch.cuda.is_available()
    del first
    second = pinned((1000, 3), torch.float64)
    assert address(second) != where
    del view
    third = pinned(20_000, torch.uint8)  # of the same power of two
    assert address(third) == where


def test_staging_memory_of_no_bytes_and_bad_shapes():
    assert pinned((3, 0)).shape == (3, 0)
    with pytest.raises(ValueError, match="shape"):
        pinned((-1,))
