"""Arenas: scratch memory that is taken back a scope at a time."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from septet_shared.memory_pool.lending import (
    Memory,
    Shape,
    aligned,
    checked_device,
    end,
    lend,
    measured,
    new_memory,
)


class Arena:
    """Scratch memory given out by moving a pointer and taken back a scope at a time.

    nbytes: capacity to begin with. With grow, what does not fit gets a further block; once nothing
    is lent the blocks become one, as large as the peak was. Thread-safe; scopes may nest, overlap
    and belong to different threads. Every tensor starts on a multiple of 64 bytes.

    Counters: reserved_bytes (taken from torch), used_bytes (lent now), peak_bytes (most ever lent),
    reuses (tensors given without asking torch for memory).
    Raises ValueError: nbytes < 0, or missing without grow. Cost: see `ArenaScope.empty`.
    """

    def __init__(
        self, nbytes: int | None = None, device: str | torch.device = "cpu", *, grow: bool = True
    ) -> None:
        if (nbytes is None and not grow) or (nbytes or 0) < 0:
            raise ValueError(f"nbytes must be >= 0, and given when grow is False; got {nbytes}")
        self.device, self.grow = checked_device(device), grow
        self.used_bytes = self.peak_bytes = self.reuses = 0
        self._blocks: list[_Block] = []
        self._lock = threading.RLock()  # an abandoned scope may be closed by the collector
        if nbytes:
            self._blocks.append(_Block(new_memory(aligned(nbytes), self.device)))

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from torch, lent or not."""
        return sum(len(block.memory) for block in self._blocks)

    @contextlib.contextmanager
    def scope(self) -> Iterator[ArenaScope]:
        """A scope whose tensors end with the `with` block, also when it ends by an error.

        Views, NumPy arrays and graphs that outlive it stay right; the bytes of a tensor that they
        hold are not lent again before they are gone.
        """
        scope = ArenaScope(self)
        try:
            yield scope
        finally:
            with self._lock:
                scope._is_open = False
                for tensor in scope._lent:
                    end(tensor)
                self._settle()
                if len(self._blocks) > 1 and not self.used_bytes:
                    self._blocks.clear()

    def _settle(self) -> None:
        """Frees what nothing holds any more."""
        for block in self._blocks:
            block.lent = [piece for piece in block.lent if piece.lease() is not None]
        self.used_bytes = sum(p.end - p.start for block in self._blocks for p in block.lent)

    def _place(self, size: int) -> tuple[_Block, int, int]:
        """A block, an offset in it with `size` free bytes, and its index in the block's list."""
        self.reuses += 1
        for block in self._blocks:
            top = block.lent[-1].end if block.lent else 0
            if len(block.memory) - top >= size:
                return block, top, len(block.lent)
        self._settle()
        for block in self._blocks:
            ends = [0, *(piece.end for piece in block.lent)]
            starts = [*(piece.start for piece in block.lent), len(block.memory)]
            for i, (low, high) in enumerate(zip(ends, starts, strict=True)):
                if high - low >= size:
                    return block, low, i
        self.reuses -= 1
        reserved = self.reserved_bytes
        if not self.grow:
            raise RuntimeError(
                f"arena on {self.device} is full: {size} bytes asked, {reserved - self.used_bytes} "
                f"of {reserved} available, perhaps not in one piece (grow is False)"
            )
        wanted = reserved // 2 if reserved else self.peak_bytes
        self._blocks.append(_Block(new_memory(max(size, wanted, 1 << 16), self.device)))
        return self._blocks[-1], 0, 0


@dataclass(eq=False)
class ArenaScope:
    """What `Arena.scope` gives: `empty` allocates, the end of the `with` block frees."""

    _arena: Arena
    _lent: list[weakref.ref[Tensor]] = field(default_factory=list)
    _is_open: bool = True

    def empty(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised contiguous tensor that lives until the scope ends.

        Raises ValueError for a bad shape; RuntimeError when the scope has ended, or when the arena
        is full and must not grow (names the bytes asked and available).
        Cost: some 10 us, its end included, against 1 us of torch.empty, but no page faults once
        the arena is warm: worth it from some MiB on.
        """
        shape, nbytes = measured(shape, dtype)
        size, arena = aligned(nbytes), self._arena
        with arena._lock:
            if not self._is_open:
                raise RuntimeError("scope must be open to allocate from it; it has ended")
            if not size:
                return torch.empty(shape, dtype=dtype, device=arena.device)
            block, start, i = arena._place(size)
            tensor, lease = lend(block.memory, start, start + size, shape, dtype)
            block.lent.insert(i, _Piece(start, start + size, lease))
            self._lent.append(weakref.ref(tensor))
            arena.used_bytes += size
            arena.peak_bytes = max(arena.peak_bytes, arena.used_bytes)
            return tensor


@dataclass(eq=False)
class _Piece:
    start: int
    end: int
    lease: weakref.ref[Any]  # dead when nothing holds the bytes


@dataclass(eq=False)
class _Block:
    memory: Memory
    lent: list[_Piece] = field(default_factory=list)  # by start
