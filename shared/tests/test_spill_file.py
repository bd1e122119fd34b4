import os
import random
import resource
import select
import signal
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from septet_shared.memory_pool import SpillFile

MIB = 2**20


@pytest.fixture
def spill(tmp_path):
    with SpillFile(tmp_path) as file:
        yield file


def sample(dtype, shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=rng)
    return raw.to(torch.uint8).view(dtype).reshape(shape)  # all bits, NaN too


def same_bits(a, b):
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128,
     torch.float8_e5m2],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (7, 5), (1025, 3)])
def test_a_tensor_comes_back_with_the_same_bits(spill, dtype, shape):
    t = sample(dtype, shape)
    handle = spill.put(t)
    assert same_bits(spill.get(handle), t)
    out = torch.empty(shape, dtype=dtype)
    assert spill.get(handle, out) is out
    assert same_bits(out, t)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t[:1].expand(5, 40),
        lambda t: t.conj(),
        lambda t: t.conj().imag,
        lambda t: t[0, 0].conj().imag,
        lambda t: torch.nn.Parameter(t),
    ],
)
def test_a_view_of_any_kind_comes_back_and_goes_into_any_kind(spill, view):
    t = view(sample(torch.int32, (24, 40)).to(torch.complex64))
    handle = spill.put(t)
    assert torch.equal(spill.get(handle), t.detach())
    strided = torch.empty(t.shape[::-1], dtype=t.dtype).t()
    assert torch.equal(spill.get(handle, strided), t.detach())


def test_many_tensors_share_the_file_and_freed_ranges_are_used_again(spill):
    rng, held, most = random.Random(0), {}, 0
    for step in range(400):
        if held and rng.random() < 0.45:
            held.pop(rng.choice(list(held)))
        else:
            t = sample(torch.uint8, (rng.choice([0, 1, 4095, 4096, 4097, 20_000]),), seed=step)
            held[step] = (spill.put(t), t)
        pages = sum(-(-len(t) // 4096) for _, t in held.values())
        assert spill.used_bytes == 4096 * pages
        most = max(most, spill.used_bytes)
        if step % 20 == 0:
            assert all(torch.equal(spill.get(handle), t) for handle, t in held.values())
    assert most <= spill.file_bytes + 4096 <= 2 * most
    size = spill.file_bytes
    held.clear()
    whole = spill.put(torch.zeros(size // 4096 * 4096, dtype=torch.uint8))  # needs it in one piece
    assert spill.file_bytes <= size + 4096
    del whole
    assert spill.used_bytes == 0


def test_a_file_that_cannot_grow_is_left_as_it_was(spill):
    small = spill.put(torch.arange(1000))
    used = spill.used_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            spill.put(torch.zeros(8 * MIB, dtype=torch.uint8))
        assert (spill.file_bytes, spill.used_bytes) == (8192, used)
        other = spill.put(torch.ones(MIB, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(spill.get(small), torch.arange(1000))
    assert int(spill.get(other).sum()) == MIB


def test_a_short_read_is_an_error_and_never_stale_data(spill, monkeypatch):
    handle = spill.put(torch.zeros(5000, dtype=torch.uint8))
    os.ftruncate(spill._opened().descriptor, 4096)
    with pytest.raises(OSError, match="904 bytes too early"):
        spill.get(handle)


def test_partial_transfers_are_continued(spill, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read(fd, [into[0][:777]], at))
    t = sample(torch.uint8, (5001,))
    assert torch.equal(spill.get(spill.put(t)), t)


def test_nothing_is_left_in_the_folder_and_no_descriptor_is_left_open(tmp_path):
    before = len(list(Path("/dev/fd").iterdir()))
    spill = SpillFile(tmp_path)
    handle = spill.put(torch.ones(10))
    assert list(tmp_path.iterdir()) == []
    del spill
    assert len(list(Path("/dev/fd").iterdir())) == before
    del handle


def test_a_closed_file_refuses_transfers_but_ends_the_running_one(spill, monkeypatch):
    handle, write = spill.put(torch.ones(3)), os.pwrite

    def close_first(descriptor, data, at):
        spill.close()
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", close_first)
    spill.put(torch.ones(3))
    for use in (lambda: spill.put(torch.ones(3)), lambda: spill.get(handle)):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    spill.close()


def test_bad_arguments_of_a_spill_file_are_named(spill, tmp_path):
    handle = spill.put(torch.ones(3))
    with pytest.raises(ValueError, match="folder; got"):
        SpillFile(tmp_path / "absent")
    with pytest.raises(TypeError, match="t must be a Tensor; got list"):
        spill.put([1])
    for t in (torch.ones(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(ValueError, match="t must be dense"):
            spill.put(t)
    with SpillFile() as other, pytest.raises(ValueError, match="handle must come from put"):
        other.get(handle)
    for out in (torch.empty(4), torch.empty(3, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"out must be \(3,\) torch.float32"):
            spill.get(handle, out)


def test_reading_into_a_saved_tensor_is_seen_by_autograd(spill):
    handle, saved = spill.put(torch.ones(3)), torch.full((3,), 2.0)
    y = (saved * torch.ones(3, requires_grad=True)).sum()
    spill.get(handle, saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_threads_spill_at_the_same_time(spill):
    wrong = []

    def work(seed):
        for i in range(30):
            t = sample(torch.uint8, (5000 * (i % 4),), seed=seed * 100 + i)
            if not torch.equal(spill.get(spill.put(t)), t):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not wrong
    assert spill.used_bytes == 0


def test_a_forked_child_may_not_use_its_parents_file(spill):
    handle = spill.put(torch.ones(3))
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads; it only reports
        child = os.fork()
    if child == 0:
        try:
            spill.get(handle)
            os.write(writer, b"read")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    told = select.select([reader], [], [], 30)[0] and os.read(reader, 1000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    assert b"process that made it" in (told or b"nothing within 30 s")
