"""The GPU backends' logic with fakes of torch's symmetric memory and of CUDA's runtime.

The fakes are memory that processes really share, and the flag kernel runs in Triton's interpreter:
what is not tested here is what only a GPU can show.
"""

import ctypes
import fcntl
import mmap
import os
import signal
import time

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, and cannot read host memory", allow_module_level=True)

from septet_shared import ranks as ranks_module
from septet_shared._shared_pages import share
from septet_shared.ranks import CollectiveMismatch, PeerLost, RankError, RankTimeout
from septet_shared.symmetric_heap import HeapUnavailable
from septet_shared.symmetric_heap.cuda_ipc import CudaIpcMemory
from septet_shared.symmetric_heap.opening import open_on
from septet_shared.symmetric_heap.torch_symmetric import TorchMemory

pytestmark = pytest.mark.ranks


class FakeSymmetricMemory:
    """As `torch.distributed._symmetric_memory`: tensors lie at an offset within an allocation."""

    OFFSET = 4096

    def __init__(self, ranks):
        self.ranks, self.allocations = ranks, []

    def empty(self, nbytes, dtype, device):
        assert device == self.ranks.device
        name = f"fake/{len(self.allocations)}"
        buffers = [memoryview(p.buffer) for p in share(self.ranks, self.OFFSET + nbytes, name)]
        self.allocations.append(buffers)
        own = buffers[self.ranks.rank][self.OFFSET :]
        return torch.frombuffer(own, dtype=dtype).fill_(99)  # memory comes with what was there

    def rendezvous(self, tensor, group):
        assert group is self.ranks.group
        self.ranks.barrier("rendezvous")
        return FakeHandle(self.allocations[-1])


class FakeHandle:
    def __init__(self, buffers):
        self.buffers = buffers

    def get_remote_tensor(self, peer, sizes, dtype):
        start = FakeSymmetricMemory.OFFSET
        return torch.frombuffer(self.buffers[peer][start : start + sizes[0]], dtype=dtype)

    def get_buffer(self, peer, sizes, dtype):
        return torch.frombuffer(self.buffers[peer][: sizes[0]], dtype=dtype)


class FakeCuda:
    """As `cupy.cuda.runtime`: handles name a file of their process; each counts who has it open."""

    def __init__(self, fail_on=()):
        self.maps, self.fail_on = {}, fail_on

    def malloc(self, nbytes):
        if "malloc" in self.fail_on:
            raise MemoryError("cudaErrorMemoryAllocation: out of memory")
        fd = os.memfd_create("fake")
        os.ftruncate(fd, nbytes + 8)
        return self._map(fd, nbytes)

    def memset(self, address, value, nbytes):
        ctypes.memset(address, value, nbytes)

    def deviceSynchronize(self):
        pass

    def ipcGetMemHandle(self, address):
        _, fd, nbytes = self.maps[address]
        return f"{os.getpid()} {fd} {nbytes}".encode().ljust(64)

    def ipcOpenMemHandle(self, handle):
        if "open" in self.fail_on:
            raise OSError("cudaErrorPeerAccessUnsupported")
        pid, fd, nbytes = map(int, handle.split())
        assert pid != os.getpid(), "CUDA refuses to open a handle in the process that made it"
        address = self._map(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), nbytes)
        self._count(address, 1)
        return address

    def ipcCloseMemHandle(self, address):
        self._count(address, -1)
        self._unmap(address)

    def free(self, address):
        assert self._users(address).value == 0, "freed while a peer had it open"
        self._unmap(address)

    def over(self, address, nbytes, device):
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def _map(self, fd, nbytes):
        m = mmap.mmap(fd, nbytes + 8)
        address = ctypes.addressof(ctypes.c_char.from_buffer(m))
        self.maps[address] = (m, fd, nbytes)
        return address

    def _count(self, address, by):
        _, fd, _ = self.maps[address]
        fcntl.flock(fd, fcntl.LOCK_EX)  # two peers may open at once
        self._users(address).value += by
        fcntl.flock(fd, fcntl.LOCK_UN)

    def _users(self, address):
        return ctypes.c_int64.from_address(address + self.maps[address][2])

    def _unmap(self, address):
        m, fd, _ = self.maps.pop(address)
        m.close()
        os.close(fd)


def make(ranks, backend, timeout_s=30.0, **fake):
    """(heap, the fake CUDA or None)"""
    if backend == "torch":
        memory, cuda = TorchMemory(ranks, FakeSymmetricMemory(ranks)), None
    else:
        cuda = FakeCuda(**fake)
        memory = CudaIpcMemory(ranks, cuda, cuda.over)
    return open_on(memory, ranks, 1 << 12, timeout_s, 64, "heap"), cuda


def exchange(heap, channel, t, turn):
    for p in range(heap.size):
        heap.peer(t, p)[heap.rank] = 1000 * turn + heap.rank
    channel.barrier("written")
    channel.check()
    assert t.tolist() == [1000 * turn + r for r in range(heap.size)]
    channel.barrier("read")


def whole_life(ranks, backend):
    heap, cuda = make(ranks, backend)
    size = ranks.size
    t, channel = heap.empty(size, torch.int64), heap.channel("c", size)
    assert not t.any()
    channel.barrier("seen new")
    for turn in range(3):
        exchange(heap, channel, t, turn)
    heap.grow(1 << 12)
    exchange(heap, channel, heap.empty(size, torch.int64, 4096), 7)
    assert heap.pointers(t).tolist() == [heap.peer(t, r).data_ptr() for r in range(size)]
    for epoch in (1, 5):
        for r in range(size):
            channel.signal(r, ranks.rank, epoch)
        channel.signal(0, ranks.rank, 1)  # words never fall
        for r in range(size):
            channel.wait(r, epoch)
    channel.check()
    channel.barrier("before the end")
    del t
    heap.close()
    heap.close()
    assert cuda is None or not cuda.maps
    return heap.backend


@pytest.mark.parametrize(("backend", "size"), [("torch", 2), ("cuda_ipc", 3)])
def test_a_heap_in_device_memory_works_from_its_making_to_its_close(backend, size):
    assert ranks_module.run(whole_life, size, backend) == [backend] * size


def failing(ranks, step):
    with pytest.raises(HeapUnavailable) as raised:
        make(ranks, "cuda_ipc", fail_on=(step,) if ranks.rank == 1 else ())
    return str(raised.value)


@pytest.mark.parametrize("step", ["malloc", "open"])
def test_a_refusal_of_cuda_on_one_rank_is_raised_on_all(step):
    for message in ranks_module.run(failing, 2, step):
        assert "rank 1: " in message
        assert "cudaError" in message


def failures_on_the_device(ranks):
    heap, _ = make(ranks, "torch")
    channel, other = heap.channel("c", 1), heap.channel("d", 1)
    channel.wait(0, 3, timeout_s=1e-4)  # enqueued: the failure shows later
    with pytest.raises(RankTimeout, match=r"c.wait\(0, 3\): nobody came") as raised:
        other.signal(0, 0, 1)
    assert raised.value.op == "c.wait(0, 3)"
    ranks.barrier("both have seen it")  # a rank that recovers ends the waits of all
    heap.recover()
    channel.barrier("sound")
    channel.barrier(f"of rank {ranks.rank}")
    with pytest.raises(CollectiveMismatch, match="of rank"):
        channel.check()
    ranks.barrier("both have seen it")
    heap.recover()
    if ranks.rank == 0:
        other.poison("no more")

    def wait():  # enqueued, or refused at once
        channel.wait(0, 9)
        channel.check()

    with pytest.raises(RankError, match="no more"):
        wait()
    ranks.barrier("both have seen it")
    heap.recover()
    for c in (channel, other):
        c.restart(2**31 - 2)
    heap.recover()
    for _ in range(3):
        channel.barrier("across the wrap")
    channel.check()
    return channel.latest_epoch()


def test_what_fails_on_the_device_is_raised_by_the_next_call_and_recovered_from():
    assert ranks_module.run(failures_on_the_device, 2) == [-(2**31) + 1] * 2


def dying(ranks, folder):
    heap, _ = make(ranks, "torch", timeout_s=1000.0)
    channel = heap.channel("c", 1)
    channel.barrier("begin")
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    channel.wait(0, 1)  # the kernel ends although nobody signals
    with pytest.raises(PeerLost) as raised:
        channel.check()
    (folder / str(ranks.rank)).write_text(f"{raised.value.rank} {time.monotonic() - started}")


def test_a_dead_peer_ends_the_kernels_that_wait(tmp_path):
    with pytest.raises(PeerLost):
        ranks_module.run(dying, 2, tmp_path)
    rank, seconds = (tmp_path / "0").read_text().split()
    assert rank == "1"
    assert float(seconds) <= 5
