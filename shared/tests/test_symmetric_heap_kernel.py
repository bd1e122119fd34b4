"""One Triton kernel that reads other ranks' memory behind flags, in processes and in one."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch

from septet_shared import ranks as ranks_module
from septet_shared.symmetric_heap import SymmetricHeap

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, and cannot read host memory", allow_module_level=True)


def load_kernel():
    path = Path(__file__).parent / "kernels" / "gather_rows.py"
    spec = importlib.util.spec_from_file_location("gather_rows", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.gather_rows_kernel


def table(rank, rows, dim, epoch):
    """What a rank holds at an epoch; each value names its rank, epoch, row and column."""
    cells = torch.arange(rows * dim, dtype=torch.float32).view(rows, dim)
    return cells + 10_000 * rank + 100_000 * epoch


class Gathering:
    """One rank's part: `publish` flags its rows, `gather` runs the kernel over the rows of all."""

    ROWS, DIM, COUNT = 9, 70, 13

    def __init__(self, heap):
        self.heap, self.kernel = heap, load_kernel()
        self.x = heap.empty((self.ROWS, self.DIM), torch.float32)
        self.channel = heap.channel("rows", 1)
        self.flags = heap.flag_pointers() + 64 * self.channel.first_word
        self.rng = torch.Generator().manual_seed(heap.rank)

    def publish(self, epoch):
        self.x.copy_(table(self.heap.rank, self.ROWS, self.DIM, epoch))
        self.channel.signal(self.heap.rank, 0, epoch)  # own word: who reads the rows polls it

    def gather(self, epoch, max_polls=10**6):
        """(rows that the kernel gathered, rows as they must be, which owners were late)"""
        size = self.heap.size
        owner = torch.randint(size, (self.COUNT,), generator=self.rng)
        index = torch.randint(self.ROWS, (self.COUNT,), generator=self.rng)
        out = torch.full((self.COUNT, self.DIM), -1.0)
        late = torch.zeros(size, dtype=torch.int32)
        self.kernel[(self.COUNT, 2)](
            self.heap.pointers(self.x), self.flags, owner, index, out, late, self.DIM,
            self.x.stride(0), out.stride(0), epoch, max_polls, BLOCK_D=64,
        )  # fmt: skip
        tables = [table(r, self.ROWS, self.DIM, epoch) for r in range(size)]
        truth = torch.stack([tables[o][i] for o, i in zip(owner, index, strict=True)])
        return out, truth, late


def in_processes(ranks):
    heap = SymmetricHeap.create(ranks, 1 << 14)
    part = Gathering(heap)
    for epoch in range(1, 4):
        if ranks.rank == epoch % ranks.size:
            time.sleep(0.05)  # the others' kernels wait for this rank's flag
        part.publish(epoch)
        out, truth, late = part.gather(epoch)
        assert torch.equal(out, truth)
        assert not late.any()
        part.channel.barrier("all have read")
    return heap.backend


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
def test_processes_read_each_others_rows_behind_flags(size):
    assert ranks_module.run(in_processes, size) == ["posix"] * size


def test_the_same_kernel_runs_on_virtual_ranks():
    heap = SymmetricHeap.local(3, 1 << 14)
    parts = [Gathering(heap.on(r)) for r in range(3)]
    for epoch in (1, 2):
        for part in parts:
            part.publish(epoch)
        for part in parts:
            out, truth, late = part.gather(epoch)
            assert torch.equal(out, truth)
            assert not late.any()


def test_rows_of_an_owner_that_has_not_flagged_them_are_not_read():
    heap = SymmetricHeap.local(2, 1 << 14)
    parts = [Gathering(heap.on(r)) for r in range(2)]
    parts[0].publish(1)
    out, truth, late = parts[0].gather(1, max_polls=3)
    assert late.tolist() == [0, 1]
    unread = out.isnan().all(1)
    assert 0 < unread.sum() < len(out)
    assert torch.equal(out[~unread], truth[~unread])
