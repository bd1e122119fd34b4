"""Memory of a heap that is released as a block."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from septet_shared.symmetric_heap.blocks import UNIT_BYTES, Block

if TYPE_CHECKING:
    from septet_shared.symmetric_heap.heap import SymmetricHeap

LARGEST_ALIGN = 4096  # mappings start on pages


class Arena:
    """A block of a heap, in use inside `with`; made by `heap.arena`."""

    def __init__(self, heap: SymmetricHeap, nbytes: int) -> None:
        self.nbytes = nbytes
        self._heap = heap
        self._block: Block | None = None
        self._next = 0

    def __enter__(self) -> Arena:
        self._heap._control.record(f"arena({self.nbytes})")
        self._block = self._heap.blocks.take(self.nbytes, UNIT_BYTES)
        self._next = self._block.start
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        block, self._block = self._block, None
        if block is not None and not self._heap.closed:
            self._heap.blocks.give_back(block)
            if kind is None:  # an exception is its own news: peers that go on are told by it
                self._heap._control.record("end of arena")

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype, align: int = 64) -> Tensor:
        """As `SymmetricHeap.empty`, from this block; not to be used after `with` ends.

        Raises:
            RuntimeError: outside of `with`. MemoryError: the block is full.
        """
        if self._block is None:
            raise RuntimeError("this arena is not in use: allocate inside `with heap.arena(...)`")
        sizes, nbytes = layout(shape, dtype, align)
        self._heap._control.record(f"arena.empty({list(sizes)}, {dtype}, align={align})")
        align = max(align, UNIT_BYTES)
        start = -(-self._next // align) * align
        if start + nbytes > self._block.stop:
            left = self._block.stop - self._next
            raise MemoryError(f"{nbytes} bytes do not fit: {left} of {self.nbytes} are left")
        self._next = start + nbytes
        return self._heap.tensor(Block(self._block.segment, start, self._next), sizes, dtype)


def layout(
    shape: int | Sequence[int], dtype: torch.dtype, align: int
) -> tuple[tuple[int, ...], int]:
    """(sizes, bytes) of a tensor, checked as `SymmetricHeap.empty` says."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype; got {dtype!r}")
    sizes = tuple(operator.index(n) for n in ([shape] if isinstance(shape, int) else shape))
    if any(n < 0 for n in sizes):
        raise ValueError(f"shape must have no negative size; got {list(sizes)}")
    if align < 1 or align & (align - 1) or align > LARGEST_ALIGN:
        raise ValueError(f"align must be a power of two up to {LARGEST_ALIGN}; got {align}")
    return sizes, math.prod(sizes) * dtype.itemsize
