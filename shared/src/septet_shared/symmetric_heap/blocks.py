"""Which bytes of the segments are taken: first fit, so equal calls give equal places everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field

UNIT_BYTES = 64  # blocks start and end on cache lines, so that two tensors never share one


@dataclass(frozen=True)
class Block:
    """Bytes [start, stop) of a segment."""

    segment: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class HeapStatistics:
    """Bytes of one rank's part of a heap, and how many segments it has."""

    bytes_reserved: int
    bytes_used: int
    peak_bytes: int
    segments: int


@dataclass
class Blocks:
    """Free and taken bytes of a heap's segments."""

    free: list[Block] = field(default_factory=list)  # in order, never two that touch
    reserved_bytes: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    segments: int = 0

    def add_segment(self, start: int, nbytes: int) -> None:
        """Bytes [start, start + nbytes) of a new segment are free."""
        self.free.append(Block(self.segments, start, start + nbytes))
        self.segments += 1
        self.reserved_bytes += nbytes

    def take(self, nbytes: int, align: int) -> Block:
        """A block of at least `nbytes`, its start a multiple of `align`.

        Raises:
            MemoryError: no free block is large enough.
        """
        nbytes = max(1, -(-nbytes // UNIT_BYTES)) * UNIT_BYTES
        align = max(align, UNIT_BYTES)
        for i, hole in enumerate(self.free):
            start = -(-hole.start // align) * align
            if start + nbytes <= hole.stop:
                block = Block(hole.segment, start, start + nbytes)
                rest = [
                    Block(hole.segment, hole.start, start),
                    Block(hole.segment, block.stop, hole.stop),
                ]
                self.free[i : i + 1] = [r for r in rest if r.nbytes]
                self.used_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                return block
        largest = max((hole.nbytes for hole in self.free), default=0)
        raise MemoryError(
            f"{nbytes} bytes aligned to {align} do not fit: the largest free block of this heap "
            f"has {largest} bytes, {self.used_bytes} of {self.reserved_bytes} are in use; "
            "grow(nbytes) adds a segment"
        )

    def statistics(self) -> HeapStatistics:
        """As `SymmetricHeap.statistics`."""
        return HeapStatistics(self.reserved_bytes, self.used_bytes, self.peak_bytes, self.segments)

    def give_back(self, block: Block) -> None:
        """The block is free again."""
        self.used_bytes -= block.nbytes
        merged: list[Block] = []
        for b in sorted([*self.free, block], key=lambda b: (b.segment, b.start)):
            last = merged[-1] if merged else None
            if last and (last.segment, last.stop) == (b.segment, b.start):
                merged[-1] = Block(b.segment, last.start, b.stop)
            else:
                merged.append(b)
        self.free = merged
