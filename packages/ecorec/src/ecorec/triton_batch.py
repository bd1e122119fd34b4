"""A batch sorted and cut for the Triton kernels, so that they need no atomics.

At each level it is cut into pieces that keep a program busy for a short time only, however often an
index occurs:

    entries   the V lookups, sorted by index
    rows      up to ENTRIES_PER_ROW entries of one index; a row is multiplied once
    slots     up to ROWS_PER_SLOT rows of one front pair (i1, i2); a slot holds the pair's product
    tiles     slots of one i2, with about ROWS_PER_TILE rows of G1
    chunks    consecutive rows whose buffers fit the workspace; nothing crosses their borders

Source: EcoRec, SC 2024 (micro-batching on sorted indices).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .shapes import TTSpec

ENTRIES_PER_ROW = 256
ROWS_PER_SLOT = 256
ROWS_PER_TILE = 128

# Device bytes for a while, when torch sorts 4-byte keys (36) beside what is there already.
SORT_BYTES_PER_LOOKUP = 48
# Device bytes of a sorted batch and what a backward adds, if each row has its own slot and groups.
KEPT_BYTES_PER_LOOKUP = 24
KEPT_BYTES_PER_ROW = 80
KEPT_BYTES_PER_BAG = 16
# Kernels number the elements of a chunk's buffers in int32.
LARGEST_CHUNK_BYTES = 2**31 - 1


class Shape(NamedTuple):
    """The sizes of the cores G1 [p1, q1, r1], G2 [p2, r1, q2, r2], G3 [p3, r2, q3].

    Two cores are three, the first of them 1 x 1 x 1.
    """

    p1: int
    p2: int
    p3: int
    q1: int
    q2: int
    q3: int
    r1: int
    r2: int

    @classmethod
    def of(cls, spec: TTSpec) -> "Shape":
        """The shape of a table with two or three cores."""
        ones = (1,) * (3 - len(spec.p))
        return cls(*ones, *spec.p, *ones, *spec.q, *ones, *spec.ranks)

    def row_numbers(self, backward: bool) -> int:
        """What a row takes in a chunk: its values, or their gradient and that of G3[i3]."""
        return self.q3 * (self.q1 * self.q2 + backward * self.r2)

    def slot_numbers(self, backward: bool) -> int:
        """What a slot takes in a chunk: its product; its gradient and that of G1[i1]."""
        product = self.q1 * self.q2 * self.r2
        return product + backward * (product + self.q1 * self.r1)


class Groups(NamedTuple):
    """Neighbours in an array that share a digit and a chunk.

    first: [G + 1] int32, the first of each group, and the end. digit: [G] int32.
    bounds: the first group of each chunk, and the end.
    """

    first: Tensor
    digit: Tensor
    bounds: list[int]


class Chunk(NamedTuple):
    """The rows and slots of one chunk; by its number, its groups."""

    number: int
    rows: range
    slots: range


@dataclass(frozen=True)
class SortedBatch:
    """A batch as the kernels take it. Tensors are int32, on the device of the indices.

    Attributes:
        shape: of the table.
        lookups, rows, slots, bags: V, U (different indices, and a few twice), R (different front
            pairs, and a few twice), B.
        workspace_bytes: an upper bound of what preparation, forward and backward allocate, besides
            results.
        chunks: on the host.
        bag_sizes: [B].
        entry_bag, entry_position: [V] bag of each entry, and its position among the indices.
        row_first: [U + 1] first entry of each row, and the end.
        row_index, row_i3, row_chunk: [U]; row_index is int64 where prod p asks for it.
        slot_i1, slot_chunk, slot_begin, slot_end: [R] in the order (chunk, i2, i1); first row, end.
        tiles, groups: slots of one i2, cut and whole.
        pooled_row, pooled_position: [V] row within the chunk, and position among the indices, of
            each entry in the order (chunk, position).
        segments: pooled entries of one bag.
    """

    shape: Shape
    lookups: int
    rows: int
    slots: int
    bags: int
    workspace_bytes: int
    chunks: list[Chunk]
    bag_sizes: Tensor
    entry_bag: Tensor
    entry_position: Tensor
    row_first: Tensor
    row_index: Tensor
    row_i3: Tensor
    row_chunk: Tensor
    slot_i1: Tensor
    slot_chunk: Tensor
    slot_begin: Tensor
    slot_end: Tensor
    tiles: Groups
    groups: Groups
    pooled_row: Tensor
    pooled_position: Tensor
    segments: Groups

    def slots_by_i1(self) -> tuple[Tensor, Groups]:
        """[R] int32, the slots in the order (chunk, i1, i2), and its groups."""
        return _grouped(self.slot_chunk, self.slot_i1, self.shape.p1, len(self.chunks))

    def rows_by_i3(self) -> tuple[Tensor, Groups]:
        """[U] int32, the rows in the order (chunk, i3), and its groups."""
        return _grouped(self.row_chunk, self.row_i3, self.shape.p3, len(self.chunks))

    def index_counts(self) -> Tensor:
        """[U] int32: how often the index of each row is looked up."""
        number = _changes(self.row_index).cumsum(0) - 1
        counts = torch.zeros_like(self.row_i3)
        counts.index_add_(0, number, self.row_first.diff())  # integers: the same in any order
        return counts[number]


def sort_batch(
    spec: TTSpec, indices: Tensor, edges: Tensor, max_workspace_bytes: int, backward: bool
) -> SortedBatch:
    """The batch sorted by row and cut.

    Args:
        spec: of the table, two or three cores.
        indices: [V] integers in [0, N); padding is left out.
        edges: [B + 1] int64, the bags of the indices: ascending from 0 to V.
        max_workspace_bytes: what may be allocated for a while, besides results.
        backward: whether one follows the forward.

    Raises:
        ValueError: 2**31 lookups or more, or a workspace that is too small; says what suffices for
            this batch.

    Cost: sorts of V and of R keys (with more than one chunk a further one, of V small keys), some
    20 passes over V numbers; waits for the device at each size that the batch decides.
    """
    shape = Shape.of(spec)
    lookups, bags, device = len(indices), len(edges) - 1, indices.device
    if lookups >= 2**31:
        raise ValueError(f"input must have fewer than 2**31 lookups; got {lookups}")
    index, order = _sorted(indices, math.prod(spec.p))
    entry_position = order.int()
    row_first = _starts(_cut(_changes(index), ENTRIES_PER_ROW))
    row_index = index[row_first[:-1]]
    rows = len(row_index)
    del index, order

    # A chunk ends where its rows and slots have used up `step` bytes.
    pair = row_index // shape.p3
    new_slot = _cut(_changes(pair), ROWS_PER_SLOT)
    row_bytes = shape.row_numbers(backward) * spec.dtype.itemsize
    slot_bytes = shape.slot_numbers(backward) * spec.dtype.itemsize
    # The row that passes `step` is in the next chunk whole, and opens its slot there once more.
    margin = row_bytes + 2 * slot_bytes
    # With mean, a backward divides the gradient of the bags first.
    bag_bytes = bags * (KEPT_BYTES_PER_BAG + spec.embedding_dim * spec.dtype.itemsize)
    kept_bytes = bag_bytes + KEPT_BYTES_PER_LOOKUP * lookups + KEPT_BYTES_PER_ROW * rows
    sort_bytes = bag_bytes + SORT_BYTES_PER_LOOKUP * lookups + KEPT_BYTES_PER_ROW * rows
    least = max(kept_bytes + margin + row_bytes + slot_bytes, sort_bytes)
    if max_workspace_bytes < least:
        raise ValueError(
            f"max_workspace_bytes must be at least {least} for {lookups} lookups of {rows} rows "
            f"in {bags} bags; got {max_workspace_bytes}"
        )
    step = min(max_workspace_bytes - kept_bytes, LARGEST_CHUNK_BYTES) - margin
    used = torch.arange(1, rows + 1, device=device) * row_bytes + new_slot.cumsum(0) * slot_bytes
    row_chunk = ((used - 1) // step).int()
    chunks = int(row_chunk[-1]) + 1 if rows else 0
    del used

    slot_first = _starts(new_slot | _changes(row_chunk))
    slot_row = slot_first[:-1]
    slot_pair = pair[slot_row]
    order, slot_chunk, slot_i2 = _by_digit(
        row_chunk[slot_row], slot_pair % shape.p2, shape.p2, chunks
    )
    new_group = _changes(slot_chunk, slot_i2)
    row_bounds, slot_bounds = _bounds(row_chunk, chunks), _bounds(slot_chunk, chunks)
    ranges = zip(pairwise(row_bounds), pairwise(slot_bounds), strict=True)
    found = [Chunk(number, range(*r), range(*s)) for number, (r, s) in enumerate(ranges)]
    buffers = max((len(c.rows) * row_bytes + len(c.slots) * slot_bytes for c in found), default=0)

    bag_sizes = edges.diff().int()
    bag = _repeated(bag_sizes, lookups)
    entry_bag = bag[entry_position]
    pooled_row = torch.empty_like(entry_position)
    pooled_row[entry_position] = _repeated(row_first.diff(), lookups)
    pooled_chunk, pooled_position = _sorted(row_chunk[pooled_row], chunks)
    pooled_row = pooled_row[pooled_position]
    pooled_row -= pooled_row.new_tensor(row_bounds)[pooled_chunk]
    bag = bag[pooled_position]
    return SortedBatch(
        shape=shape,
        lookups=lookups,
        rows=rows,
        slots=len(slot_row),
        bags=bags,
        workspace_bytes=max(kept_bytes + buffers, sort_bytes),
        chunks=found,
        bag_sizes=bag_sizes,
        entry_bag=entry_bag,
        entry_position=entry_position,
        row_first=row_first,
        row_index=row_index,
        row_i3=(row_index % shape.p3).int(),
        row_chunk=row_chunk,
        slot_i1=(slot_pair // shape.p2).int()[order],
        slot_chunk=slot_chunk,
        slot_begin=slot_row[order],
        slot_end=slot_first[1:][order],
        tiles=_groups(
            _cut(new_group, max(1, ROWS_PER_TILE // shape.q1)), slot_i2, slot_chunk, chunks
        ),
        groups=_groups(new_group, slot_i2, slot_chunk, chunks),
        pooled_row=pooled_row,
        pooled_position=pooled_position.int(),
        segments=_groups(_changes(bag, pooled_chunk), bag, pooled_chunk, chunks),
    )


def _sorted(keys: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Keys in [0, bound) in stable order, as int32 or int64, and where they were (int64)."""
    wide = torch.int32 if bound <= 2**31 else torch.int64
    if bound <= 1:
        return keys.to(wide), torch.arange(len(keys), device=keys.device)
    dtypes = (torch.uint8, torch.int16, torch.int32, torch.int64)
    narrow = next(dtype for dtype in dtypes if bound - 1 <= torch.iinfo(dtype).max)
    values, order = torch.sort(keys.to(narrow), stable=True)  # a GPU takes a pass for each byte
    return values.to(wide), order


def _by_digit(
    chunk: Tensor, digit: Tensor, digits: int, chunks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The stable order by (chunk, digit) [n] int64, and both in that order, int32."""
    keys, order = _sorted(chunk.long() * digits + digit, chunks * digits)
    return order, (keys // digits).int(), (keys % digits).int()


def _changes(*keys: Tensor) -> Tensor:
    """[n] bool: the first, and where a key differs from the one before."""
    changed = torch.zeros(len(keys[0]), dtype=torch.bool, device=keys[0].device)
    changed[:1] = True
    for key in keys:
        changed[1:] |= key[1:] != key[:-1]
    return changed


def _cut(starts: Tensor, most: int) -> Tensor:
    """[n] bool: the starts, and every `most` after the last start."""
    place = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    last = torch.cummax(place * starts, dim=0).values
    return (place - last) % most == 0


def _starts(starts: Tensor) -> Tensor:
    """[m + 1] int32: where `starts` is True, then its length."""
    return F.pad(starts.nonzero()[:, 0].int(), (0, 1), value=len(starts))


def _bounds(chunk: Tensor, chunks: int) -> list[int]:
    """The first place of each chunk in an ascending array, then its length."""
    numbers = torch.arange(chunks + 1, dtype=torch.int32, device=chunk.device)
    return [int(bound) for bound in torch.searchsorted(chunk, numbers).tolist()]


def _groups(starts: Tensor, digit: Tensor, chunk: Tensor, chunks: int) -> Groups:
    first = _starts(starts)
    return Groups(first, digit[first[:-1]], _bounds(chunk[first[:-1]], chunks))


def _grouped(chunk: Tensor, digit: Tensor, digits: int, chunks: int) -> tuple[Tensor, Groups]:
    """The order by (chunk, digit) [n] int32, and its groups."""
    order, chunk, digit = _by_digit(chunk, digit, digits, chunks)
    return order.int(), _groups(_changes(chunk, digit), digit, chunk, chunks)


def _repeated(counts: Tensor, total: int) -> Tensor:
    """[total] int32: i, counts[i] times."""
    numbers = torch.arange(len(counts), dtype=torch.int32, device=counts.device)
    return torch.repeat_interleave(numbers, counts, output_size=total)
