"""The heap in GPU memory: virtual ranks on one GPU, and two processes that share it."""

import time

import pytest
import torch

from septet_shared import ranks as ranks_module
from septet_shared.ranks import RankError, RankTimeout
from septet_shared.symmetric_heap import SymmetricHeap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("size", [1, 4])
def test_virtual_ranks_of_one_gpu_pass_the_selftest(size):
    heap = SymmetricHeap.local(size, 1 << 16, "cuda")
    heap.selftest()
    heap.selftest()
    heap.close()


def test_a_wait_for_nobody_ends_and_is_raised_by_check():
    with SymmetricHeap.local(2, 1 << 16, "cuda") as heap:
        channel = heap.channel("c", 1)
        channel.wait(0, 1, timeout_s=0.1)
        with pytest.raises(RankTimeout, match=r"c.wait\(0, 1\): nobody came"):
            channel.check()


def test_poison_ends_a_kernel_that_waits():
    with SymmetricHeap.local(2, 1 << 16, "cuda") as heap:
        channel = heap.channel("c", 1)
        started = time.monotonic()
        channel.wait(0, 1, timeout_s=60)
        channel.poison("no more rows")
        with pytest.raises(RankError, match="no more rows"):
            channel.check()
        assert time.monotonic() - started < 10


def exchange(ranks, backend):
    heap = SymmetricHeap.create(ranks, 1 << 16, backend=backend)
    channel = heap.channel("c", 2)
    t = heap.empty(2, torch.int64)
    for turn in range(100):
        for p in range(2):
            heap.peer(t, p)[ranks.rank] = 10 * turn + ranks.rank
        channel.barrier("written")
        assert t.tolist() == [10 * turn, 10 * turn + 1]
        channel.barrier("read")
    channel.check()
    heap.grow(1 << 16)
    heap.close()
    return heap.backend


@pytest.mark.ranks
def test_two_processes_exchange_through_one_gpu():
    pytest.importorskip("cupy")
    found = ranks_module.run(exchange, 2, "cuda_ipc", device="cuda")
    assert found == ["cuda_ipc"] * 2


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_exchange_through_torchs_symmetric_memory():
    assert ranks_module.run(exchange, 2, "torch", device="cuda") == ["torch"] * 2
