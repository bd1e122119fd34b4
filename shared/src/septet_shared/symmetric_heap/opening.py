"""How a heap is made: arguments compared between ranks, a backend tried, everything tested."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import torch

from septet_shared._shared_pages import share
from septet_shared.ranks import RanksDiverged
from septet_shared.symmetric_heap.channel import BARRIER_LINES
from septet_shared.symmetric_heap.control import CONTROL_BYTES, Control
from septet_shared.symmetric_heap.cuda_ipc import CudaIpcMemory
from septet_shared.symmetric_heap.flags import LINE_BYTES
from septet_shared.symmetric_heap.heap import SymmetricHeap, check_whole
from septet_shared.symmetric_heap.memory import (
    HeapUnavailable,
    LocalMemory,
    Memory,
    PosixMemory,
    private_pages,
    together,
)
from septet_shared.symmetric_heap.torch_symmetric import TorchMemory

if TYPE_CHECKING:
    from septet_shared.ranks import Ranks

BACKENDS = ("auto", "posix", "torch", "cuda_ipc", "local")


def create(ranks: Ranks, nbytes: int, backend: str, timeout_s: float, slots: int) -> SymmetricHeap:
    """As `SymmetricHeap.create`."""
    mine = (nbytes, backend, timeout_s, slots)
    asked = ranks.all_gather_object((mine, uuid.uuid4().hex))
    for r, (theirs, _) in enumerate(asked):
        if theirs != asked[0][0]:
            options = f"{asked[0][0]} on rank 0 and {theirs} on rank {r}"
            message = f"(nbytes, backend, timeout_s, slots) is {options}"
            raise RanksDiverged(message, rank=r, op="SymmetricHeap.create")
    _check(nbytes, timeout_s, slots)
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "local" and ranks.size > 1:
        raise ValueError(f"backend 'local' joins no processes; got {ranks.size} ranks")
    if not ranks.on_one_host:
        raise HeapUnavailable("these ranks are on several hosts and share no memory")
    if ranks.size == 1:
        device = torch.device("cpu") if backend == "posix" else ranks.device
        heap = local(1, nbytes, device, timeout_s, slots)
        heap._control.check_alive = ranks.check_alive
        return heap
    choices = [backend]
    if backend == "auto":
        choices = ["torch", "cuda_ipc"] if ranks.device.type == "cuda" else ["posix"]
    reasons = []
    for choice in choices:
        try:
            return _open(choice, ranks, nbytes, timeout_s, slots, f"heap/{asked[0][1]}/{choice}")
        except HeapUnavailable as error:
            reasons.append(f"{choice}: {error}")
    raise HeapUnavailable("; ".join(reasons))


def local(
    size: int, nbytes: int, device: torch.device, timeout_s: float, slots: int
) -> SymmetricHeap:
    """As `SymmetricHeap.local`."""
    if size < 1:
        raise ValueError(f"size must be at least 1; got {size}")
    _check(nbytes, timeout_s, slots)
    slots += slots_of_selftest(size)
    pages = [private_pages(CONTROL_BYTES + slots * LINE_BYTES) for _ in range(size)]
    first = LocalMemory(size, device)
    views: list[SymmetricHeap] = []
    for rank in range(size):
        control = Control(rank, list(pages), lambda op, s, missing: None, lambda r: True, timeout_s)
        memory = first if rank == 0 else LocalMemory(size, device, like=first)
        views.append(SymmetricHeap(memory, control, slots))
        views[-1]._views = views
        views[-1].add_segment(nbytes)
    return views[0]


def _open(
    backend: str, ranks: Ranks, nbytes: int, timeout_s: float, slots: int, name: str
) -> SymmetricHeap:
    def memory() -> Memory:
        if backend == "posix":
            return PosixMemory(ranks, name)
        if ranks.device.type != "cuda":
            message = f"backend {backend!r} needs ranks on GPUs; these are on {ranks.device}"
            raise HeapUnavailable(message)
        return TorchMemory(ranks) if backend == "torch" else CudaIpcMemory(ranks)

    return open_on(together(ranks, memory), ranks, nbytes, timeout_s, slots, name)


def open_on(
    memory: Memory, ranks: Ranks, nbytes: int, timeout_s: float, slots: int, name: str
) -> SymmetricHeap:
    """A tested heap in this memory; HeapUnavailable on every rank when one finds it unusable."""
    made: list[SymmetricHeap] = []
    slots += slots_of_selftest(ranks.size)

    def make() -> SymmetricHeap:
        pages = share(ranks, CONTROL_BYTES + slots * LINE_BYTES, f"{name}/control")
        lives = [identity.lives for identity in ranks.identities]
        control = Control(ranks.rank, pages, ranks.check_alive, lambda r: lives[r](), timeout_s)
        made.append(SymmetricHeap(memory, control, slots, ranks))
        return made[0]

    try:
        heap = together(ranks, make)
        heap.add_segment(nbytes)
        together(ranks, heap.selftest)
    except BaseException:
        for heap in made:
            heap.close()
        raise
    return heap


def slots_of_selftest(size: int) -> int:
    """Flag words that the selftest's channel takes beside those asked for."""
    return size + max(BARRIER_LINES, size)


def _check(nbytes: int, timeout_s: float, slots: int) -> None:
    check_whole("nbytes", nbytes)
    check_whole("slots", slots)
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0; got {timeout_s}")
