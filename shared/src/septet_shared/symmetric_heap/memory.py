"""Where segments come from; one subclass a backend."""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from septet_shared._shared_pages import SharedPages, share

if TYPE_CHECKING:
    from septet_shared.ranks import Ranks

T = TypeVar("T")


class HeapUnavailable(RuntimeError):
    """These ranks cannot share memory this way; callers fall back to collectives."""


def together(ranks: Ranks, step: Callable[[], T]) -> T:
    """What `step` returns; HeapUnavailable on every rank when it fails on one. Collective.

    A step may be collective itself when it raises on all ranks or on none once it has begun to be.
    """
    result, problem = [], ""
    try:
        result.append(step())
    except Exception as error:  # noqa: BLE001 - CuPy's errors have no common base
        problem = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    problems = [p for p in ranks.all_gather_object(problem) if p]
    if problems:
        raise HeapUnavailable("; ".join(problems))
    return result[0]


class Memory(ABC):
    """Segments of memory that all ranks map.

    Attributes:
        backend: its name.
        device: where the segments lie.
        shares: how many ranks take from what `available_bytes` counts.
        on_stream: whether flags lie there too, and are used in the order of a stream.
    """

    backend: str
    device = torch.device("cpu")
    shares = 1
    on_stream = False

    @abstractmethod
    def segment(self, nbytes: int) -> list[Tensor]:
        """[size] uint8 [nbytes] zeros: each rank's memory, a whole storage each; collective."""

    def available_bytes(self) -> int:
        """Memory that may still be taken."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return available_bytes()

    def unmap_peers(self) -> None:  # noqa: B027 - host memory goes with its last tensor
        """Let go of the peers' memory."""

    def free(self) -> None:  # noqa: B027
        """Free this rank's memory, after every peer has let go of it."""


class PosixMemory(Memory):
    """Host memory of several processes: anonymous files that each of them maps."""

    backend = "posix"

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks, self._name, self._shared = ranks, name, 0
        self.shares = ranks.size

    def segment(self, nbytes: int) -> list[Tensor]:
        """As `Memory.segment`."""
        self._shared += 1
        return [over(p) for p in share(self._ranks, nbytes, f"{self._name}/{self._shared}")]


class LocalMemory(Memory):
    """Memory of virtual ranks in one process: the n-th request of each gives the n-th segment."""

    backend = "local"

    def __init__(self, size: int, device: torch.device, like: LocalMemory | None = None) -> None:
        self.shares, self.device = size, device
        self.on_stream = device.type == "cuda"
        self._segments: list[list[Tensor]] = like._segments if like else []
        self._lock: threading.Lock = like._lock if like else threading.Lock()
        self._requests = 0

    def segment(self, nbytes: int) -> list[Tensor]:
        """As `Memory.segment`, but does not wait."""
        with self._lock:
            if self._requests == len(self._segments):
                self._segments.append([self._zeros(nbytes) for _ in range(self.shares)])
            self._requests += 1
            return list(self._segments[self._requests - 1])

    def available_bytes(self) -> int:
        """As `Memory.available_bytes`, for the rank that comes first; the others take no more."""
        if self._requests < len(self._segments):
            return 2**63 - 1
        return super().available_bytes()

    def free(self) -> None:
        """As `Memory.free`: the last tensor goes with the heap."""
        self._segments.clear()

    def _zeros(self, nbytes: int) -> Tensor:
        if self.device.type == "cpu":
            return over(private_pages(nbytes))
        zeros = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        return zeros


def private_pages(nbytes: int) -> SharedPages:
    """Zeros on whole pages of this process, none of them taken before it is touched."""
    return SharedPages(mmap.mmap(-1, nbytes), nbytes)


def over(pages: SharedPages) -> Tensor:
    """A uint8 tensor over the pages; the mapping lives as long as any view of the tensor."""
    # A memoryview, not the mapping itself: while one exists, the mapping refuses to be undone.
    return torch.frombuffer(memoryview(pages.buffer), dtype=torch.uint8)


def available_bytes() -> int:
    """Host memory that this process may still take: what is free, within its control group."""
    limits = [
        int(line.split()[1]) * 1024
        for line in _lines(Path("/proc/meminfo"))
        if line.startswith("MemAvailable:")
    ]
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _cgroup(Path("/sys/fs/cgroup" + path), "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/memory" + path)
            limits += _cgroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return max(0, min(limits, default=2**63 - 1))


def _cgroup(folder: Path, limit: str, usage: str) -> list[int]:
    """What each group on the way to the root still allows."""
    left = []
    while folder.is_relative_to("/sys/fs/cgroup"):
        text = "".join(_lines(folder / limit))
        if text.isdigit():
            used = int("".join(_lines(folder / usage)))
            # Cached file pages are given back before anything is refused.
            cached = [
                int(x.split()[1]) for x in _lines(folder / "memory.stat") if "inactive_file" in x
            ]
            left.append(int(text) - used + max(cached, default=0))
        folder = folder.parent
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
