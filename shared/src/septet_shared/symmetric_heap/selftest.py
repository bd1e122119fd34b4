"""Whether memory and flags of a heap do what they promise, between all pairs of ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from septet_shared.symmetric_heap.memory import HeapUnavailable

if TYPE_CHECKING:
    from septet_shared.symmetric_heap.heap import SymmetricHeap

SCRATCH_BYTES = 64  # for each rank, at the start of the first segment
TEST_CHANNEL = "heap.selftest"
ROUNDS = 10


def selftest(views: Sequence[SymmetricHeap]) -> None:
    """As `SymmetricHeap.selftest`, for the views that this process drives."""
    if len(views) == 1:
        _run(views[0])
        return
    with ThreadPoolExecutor(len(views)) as threads:
        errors = [t.exception() for t in [threads.submit(_run, view) for view in views]]
    raised = [e for e in errors if e is not None]
    # Who found it comes before who was told of it.
    for error in sorted(raised, key=lambda e: not isinstance(e, HeapUnavailable)):
        raise error


def scratch(heap: SymmetricHeap) -> torch.Tensor:
    """int64 [size, 8] of this rank; row r is for rank r to write."""
    own = heap._segments[0][heap.rank]
    return own[: SCRATCH_BYTES * heap.size].view(torch.int64).view(-1, 8)


def _run(heap: SymmetricHeap) -> None:
    on_gpu = heap.device.type == "cuda"
    # Virtual ranks of one GPU wait for each other: on one stream they would never meet.
    stream: AbstractContextManager[object] = nullcontext()
    if on_gpu:
        own = torch.cuda.Stream(heap.device)  # type: ignore[no-untyped-call]
        stream = torch.cuda.stream(own)
    channel = heap.channel(TEST_CHANNEL, heap.size)
    try:
        with stream:
            _exchange(heap)
    except HeapUnavailable as error:
        channel.poison(error)  # the others would wait for this rank
        raise


def _exchange(heap: SymmetricHeap) -> None:
    rank, size = heap.rank, heap.size
    channel = heap.channel(TEST_CHANNEL, size)
    own = scratch(heap)
    base = int(own[rank, 7])  # epochs of an earlier test
    limit_s = 10.0

    def mark(writer: int, owner: int) -> int:
        return base + 1 + writer * size + owner

    channel.barrier("selftest: begin", limit_s)
    for p in range(size):
        heap.peer(own, p)[rank].fill_(mark(rank, p))
    channel.barrier("selftest: written", limit_s)
    channel.check()
    for p in range(size):
        for r, seen in enumerate(heap.peer(own, p)[:, 0].tolist()):
            if seen != mark(r, p):
                raise HeapUnavailable(
                    f"rank {rank} reads {seen} where rank {r} wrote {mark(r, p)} for rank {p}"
                )
    for p, address in enumerate(heap.pointers(own).tolist()):
        seen = heap.peer(own, p).data_ptr()
        if heap.device.type == "cpu":
            seen = address if ctypes.c_int64.from_address(address).value == mark(0, p) else 0
        if seen != address:
            raise HeapUnavailable(f"pointer {address:#x} of rank {rank} misses rank {p}'s memory")
    channel.barrier("selftest: read", limit_s)
    after, before = (rank + 1) % size, (rank - 1) % size
    first = base + 1 + size * size
    for epoch in range(first, first + ROUNDS):
        heap.peer(own, after)[rank].fill_(epoch)
        channel.signal(after, rank, epoch)
        channel.wait(before, epoch, limit_s)
        if int(own[before, 0]) < epoch:
            channel.check()
            raise HeapUnavailable(f"rank {rank} saw rank {before}'s signal before its write")
    for r in range(size):
        own[r].fill_(first + ROUNDS)
    channel.barrier("selftest: end", limit_s)
    channel.check()
