"""The C++ path: a sorted batch, its products, its bags and their gradients, in host memory.

One product a front pair, one row a different index, gradients contracted in the same order: bits
depend on the batch (gradients: also on `max_workspace_bytes`), not on the number of threads.
"""

import ctypes
import functools
import math
import threading
from collections.abc import Callable
from ctypes import POINTER, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from septet_shared import native

from .backend import Lookups, index_error
from .contraction import Costs, prices
from .micro_batching import LEAST_PAIRS, LEAST_ROWS, Chunks, plan_chunks
from .shapes import TTSpec

SORT_COUNTS_BYTES = 4096 * 4  # of each thread that sorts; of a pass, where one sorts alone
LOOKUPS_PER_SORTER, MOST_SORTERS = 16384, 8  # a thread more for so many lookups
# From so many lookups on, and so many a bag, a forward adds up two halves of the rows.
HALVED_LOOKUPS, HALVED_LOOKUPS_A_BAG = 32768, 4
MODES = {"sum": 0, "mean": 1, "max": 2}
BAG = 0x7FFFFFFF  # in entry_bag; the rest of it is FIRST_OF_ROW
LETTER = {torch.float32: "f32", torch.float64: "f64"}


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("p1", "p2", "p3", "q1", "q2", "q3", "r1", "r2", "dim")),
        ("column", c_void_p),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("uniques", c_int64),
        ("pairs", c_int64),
        ("rows", c_int64),
        *(
            (name, c_void_p)
            for name in (
                *("i3", "id", "pair_start", "pair_i1", "pair_i2"),
                *("entry_start", "entry_bag", "entry_at"),
            )
        ),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, built. Raises native.NativeUnavailable without a compiler."""
    folder = Path(__file__).with_name("native")
    lib = native.build("ecorec_tt", sorted(folder.glob("*.cpp")))
    pointer, number = c_void_p, c_int64
    shape, batch = POINTER(_Shape), POINTER(_Batch)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "tt_sort": (
            number,
            [*(pointer, *[number] * 4, pointer, number, number), *[pointer] * 5, number, pointer],
        ),
        "tt_count": (None, [pointer, *[number] * 3, *[pointer] * 9]),
        "tt_pairs": (None, [pointer, *[number] * 4, pointer, number, *[pointer] * 7]),
        "tt_chunks": (number, [batch, *[number] * 3]),
        "tt_forward_bytes": (number, [shape, *[number] * 5]),
        "tt_backward_bytes": (number, [shape, *[number] * 5]),
    }
    for letter in LETTER.values():
        signatures[f"tt_forward_{letter}"] = (
            None,
            [
                *(shape, batch, *[pointer] * 4, number, number, *[pointer] * 4, number, number),
                *(pointer, number, pointer),
            ],
        )
        signatures[f"tt_backward_{letter}"] = (
            None,
            [
                *(shape, batch, *[pointer] * 4, number, *[pointer] * 4, *[number] * 3),
                *(pointer, number),
            ],
        )
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class Direction:
    """A table as three cores, multiplied first core first, or (mirrored) last core first."""

    def __init__(self, spec: TTSpec, back: bool) -> None:
        p, q, r = spec.p, spec.q, spec.ranks
        if len(p) == 2:
            p, q, r = (1, *p), (1, *q), (1, *r)
        columns = np.arange(math.prod(q), dtype=np.int32).reshape(q)
        columns[columns >= spec.embedding_dim] = -1
        if back:
            p, q, r, columns = p[::-1], q[::-1], r[::-1], columns.transpose(2, 1, 0)
        self.back = back
        self.p, self.q, self.r = p, q, r
        self.columns = np.ascontiguousarray(columns)
        whole = not back and spec.embedding_dim == columns.size
        self.shape = _Shape(
            *p, *q, *r, spec.embedding_dim, None if whole else self.columns.ctypes.data
        )
        self.product = q[0] * q[1] * r[1]  # numbers of a pair's product

    def mirrored_bytes(self, item: int) -> int:
        """Of the cores, and of their gradients, that last core first lie in another order."""
        (p1, p2, p3), (q1, q2, q3), (r1, r2) = self.p, self.q, self.r
        numbers = p1 * q1 * r1 + p2 * r1 * q2 * r2 + p3 * r2 * q3
        return 2 * numbers * item if self.back else 0

    def cores(self, cores: list[Tensor]) -> list[Tensor]:
        """G1 [p1, q1, r1], G2 [p2, r1, q2, r2], G3 [p3, r2, q3] of this direction, contiguous."""
        found = cores
        if len(found) == 2:
            found = [torch.ones(1, 1, 1, 1, dtype=found[0].dtype), *found]
        if self.back:
            found = [core.transpose(1, 3) for core in reversed(found)]
        return [core if core.is_contiguous() else core.contiguous() for core in found]


class _Working:
    """Bytes that a forward or a backward works in: sums of what the kernels take for each thing.

    The kernels' own counts are linear; asked once for each thing, they need not be called again.
    """

    def __init__(self, direction: Direction, item: int) -> None:
        lib, shape = library(), ctypes.byref(direction.shape)

        def forward(pairs: int, rows: int, threads: int, keep: bool) -> int:
            return int(lib.tt_forward_bytes(shape, item, rows, pairs, keep, threads))

        def backward(pairs: int, slots: int, threads: int, keep: bool) -> int:
            return int(lib.tt_backward_bytes(shape, item, pairs, keep, slots, threads))

        def steps(count: Callable[[int, int, int, bool], int], keep: bool) -> list[int]:
            base = count(0, 0, 0, keep)
            each = [count(1, 0, 0, keep), count(0, 1, 0, keep), count(0, 0, 1, keep)]
            return [base, *(one - base for one in each)]

        self._forward = [steps(forward, keep) for keep in (False, True)]
        self._backward = [steps(backward, keep) for keep in (False, True)]
        self.thread = max(self._forward[1][3], self._backward[1][3])

    def forward(self, rows: int, pairs: int, keep: bool, threads: int = 0) -> int:
        """Of chunks of so many rows and pairs."""
        base, pair, row, thread = self._forward[keep]
        return base + pair * pairs + row * rows + thread * threads

    def backward(self, pairs: int, keep: bool, slots: int, threads: int = 0) -> int:
        """Of chunks of so many pairs, with slots for gradients of the last core."""
        base, pair, slot, thread = self._backward[keep]
        return base + pair * pairs + slot * slots + thread * threads


def _bytes_of_halves(working: _Working, second: int) -> int:
    """What a forward in halves takes beside one without, at the most, and beside `second`."""
    return 2 * working.forward(2, 2, True) if second else 0


def _forward_bytes(working: _Working, chunks: Chunks, second: int) -> int:
    """Of a forward's chunks; two threads with a half of the rows each have chunks of their own."""
    rows, pairs, keep = chunks.forward_rows, chunks.forward_pairs, chunks.keep
    whole = working.forward(rows, pairs, keep, chunks.threads)
    if not second or chunks.threads != 2:
        return whole
    return max(whole, 2 * (working.forward(rows // 2 + 1, pairs // 2 + 1, keep, 1) + 64))


class _Scratch(threading.local):
    """Memory for the time of one call into C, one piece for each thread of Python.

    Kept: pages taken anew for each batch would be cleared each time.
    """

    memory = torch.empty(0, dtype=torch.uint8)

    def address(self, nbytes: int) -> int:
        """Where `nbytes` lie, until the next call."""
        if len(self.memory) < nbytes:
            with torch.inference_mode(False):
                self.memory = torch.empty(nbytes, dtype=torch.uint8)
        return self.memory.data_ptr()


SCRATCH = _Scratch()


@dataclass
class Part:
    """The rows of a batch that go in one direction."""

    direction: Direction
    uniques: int
    pairs: int
    arrays: list[Tensor]
    batch: _Batch


@dataclass
class Prepared:
    """A sorted batch. `counts`: [B] lookups of each bag, for means."""

    lookups: int
    uniques: int
    bags: int
    parts: list[Part]
    arrays: list[Tensor]
    flops: int
    counts: Tensor | None = None
    chunks: list[Chunks] = field(default_factory=list)
    nbytes: int = 0  # of all arrays
    peak_bytes: int = 0  # most that the workspace held so far
    second_bytes: int = 0  # of the bags of the second half of the rows, where there are halves
    chunk_count: int = 0  # of the forward
    extra_flops: int = 0  # of pairs that a chunk's end cut, multiplied twice

    def add(
        self,
        direction: Direction,
        rows: int,
        pairs: int,
        of_pairs: list[int],
        ids: int | None,
        entries: tuple[int, int, int | None],
        memory: list[Tensor],
    ) -> None:
        """Rows of one direction, given by addresses in `memory` and in the batch's own."""
        i3, *rest = of_pairs
        batch = _Batch(rows, pairs, self.uniques, i3, ids, *rest, *entries)
        self.parts.append(Part(direction, rows, pairs, memory, batch))


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _int32(count: int) -> Tensor:
    return torch.empty(max(count, 1), dtype=torch.int32)


def sort_bytes(spec: TTSpec, lookups: int, positions: bool) -> int:
    """Bytes that `prepare` takes at the most, its results included."""
    front, mixed = directions_of(spec)[0], len(spec.p) == 3
    scratch = _prepare_scratch(front, mixed, lookups, _most_sorters(lookups))
    # Entries and rows; i3 and pairs of all rows, then of those of each direction.
    return scratch + 4 * lookups * (3 + positions + 4 + 5 * mixed) + 32


def _most_sorters(lookups: int) -> int:
    return max(1, min(lookups // LOOKUPS_PER_SORTER, MOST_SORTERS))


def _counts_bytes(threads: int) -> int:
    return max(3, threads) * SORT_COUNTS_BYTES


def _prepare_scratch(front: Direction, mixed: bool, lookups: int, threads: int) -> int:
    """Bytes of scratch: keys twice and counters; then three counts for each i2, its direction, and
    flags for pairs.
    """
    _, p2, p3 = front.p
    counting = 32 * p2 + 8 + mixed * (p2 * p3 // 8 + 8)
    return max(16 * lookups + _counts_bytes(threads), counting)


@functools.lru_cache(maxsize=1024)
def _prices(spec: TTSpec) -> ctypes.Array[c_int64]:
    price = prices(spec)
    return (c_int64 * 4)(price.front_pair, price.front_row, price.back_pair, price.back_row)


def _split(memory: Tensor, rows: int, pairs: int) -> list[int]:
    """Addresses of i3 [rows], of the pairs' starts [pairs + 1], i1 and i2 [pairs]."""
    i3 = memory.data_ptr()
    starts = i3 + 4 * rows
    first = starts + 4 * (pairs + 1)
    return [i3, starts, first, first + 4 * pairs]


def prepare(
    spec: TTSpec,
    directions: tuple[Direction, Direction],
    flat: Tensor,
    edges: Tensor | None,
    bags: int,
    bag_size: int,
    padding_idx: int | None,
    positions: bool,
) -> Prepared:
    """The batch sorted by row, its front or back pairs found.

    Args:
        flat: [V] int32 or int64, contiguous.
        edges: [B + 1] int64, or None for bags of `bag_size` each.
        positions: whether kernels need the position of each lookup (weights, max).

    Raises:
        IndexError: its arguments are (position, value) of an index outside [0, N).
    """
    lib, lookups = library(), len(flat)
    threads = min(torch.get_num_threads(), _most_sorters(lookups))
    front = directions[0]
    p1, p2, p3 = front.p
    mixed = len(spec.p) == 3
    # Entries' bags and positions, where each row's begin, and the rows.
    memory = _int32(lookups * (3 + positions) + 1)
    bag, rows = memory.data_ptr(), memory.data_ptr() + 4 * lookups
    start = rows + 4 * lookups
    at = start + 4 * (lookups + 1) if positions else None
    scratch_bytes = _prepare_scratch(front, mixed, lookups, threads)
    scratch = SCRATCH.address(scratch_bytes)
    sizes = (c_int64 * 4)()
    place = ctypes.addressof(sizes)
    failed = lib.tt_sort(
        *(flat.data_ptr(), flat.dtype == torch.int64, lookups, spec.num_embeddings),
        *(-1 if padding_idx is None else padding_idx, _address(edges), bags, bag_size),
        *(bag, at, start, rows, scratch, threads, place),
    )
    if failed:
        raise IndexError(sizes[0], int(flat[sizes[0]]))
    entries, uniques, *_ = sizes
    # Each row's i3; where the rows of each pair begin, and its i1 and i2.
    most_pairs = min(uniques, p1 * p2)
    of_front = _int32(uniques + 3 * most_pairs + 1)
    arrays = _split(of_front, uniques, most_pairs)
    choice = scratch + 24 * p2
    lib.tt_count(
        *(rows, uniques, p2, p3, _prices(spec) if mixed else None),
        *(scratch, choice + 8 * (-(-p2 // 8)), choice, *arrays, place),
    )
    pairs, back_rows, saved, back_pairs = sizes
    cost = Costs.of(spec)
    flops = cost.front_pair * (pairs - saved) + cost.front_row * (uniques - back_rows)
    made = Prepared(entries, uniques, bags, [], [memory], flops)
    if not uniques:
        pass
    elif not back_rows:
        made.add(directions[0], uniques, pairs, arrays, None, (start, bag, at), [of_front])
    else:
        made.flops += cost.back_pair * back_pairs + cost.back_row * back_rows
        chosen = np.ctypeslib.as_array(ctypes.cast(choice, POINTER(ctypes.c_uint8)), (p2,)).copy()
        for back, part_rows, part_pairs in (
            (False, uniques - back_rows, pairs - saved),
            (True, back_rows, back_pairs),
        ):
            if not part_rows:
                continue
            of_part = _int32(2 * part_rows + 3 * part_pairs + 1)
            ids = of_part.data_ptr()
            arrays = _split(of_part[part_rows:], part_rows, part_pairs)
            lib.tt_pairs(
                *(rows, uniques, p1, p2, p3, chosen.ctypes.data, back, ids, *arrays),
                *(scratch, place),
            )
            made.add(
                directions[back], part_rows, part_pairs, arrays, ids, (start, bag, at), [of_part]
            )
    made.nbytes = memory.nbytes + sum(x.nbytes for part in made.parts for x in part.arrays)
    made.peak_bytes = made.nbytes + scratch_bytes + (of_front.nbytes if back_rows else 0)
    return made


def pair_flops(parts: list[Part]) -> int:
    """FLOPs of a front (or, mirrored, back) pair; the larger when both occur."""
    return max((2 * part.direction.product * part.direction.r[0] for part in parts), default=0)


def chunk(prepared: Prepared, dtype: torch.dtype, available_bytes: int, backward: bool) -> bool:
    """Whether the batch has room; `prepared.chunks` are then set, for each part."""
    item, found = dtype.itemsize, []
    left = available_bytes - prepared.nbytes - prepared.second_bytes
    for part in prepared.parts:
        direction = part.direction
        working = _working(direction, item)
        mirrored = direction.mirrored_bytes(item)
        halves = _bytes_of_halves(working, prepared.second_bytes)
        chunks = plan_chunks(
            uniques=part.uniques,
            pairs=part.pairs,
            last_lines=direction.p[2],
            product_bytes=direction.product * item,
            scratch_bytes=working.thread,
            forward_bytes=working.forward,
            backward_bytes=working.backward,
            available_bytes=left - mirrored - halves,
            threads=torch.get_num_threads(),
            backward=backward,
        )
        if chunks is None:
            return False
        left -= chunks.keep * (part.pairs * direction.product * item + 64)
        found.append(chunks)
    prepared.chunks = found
    return True


def second_bytes(spec: TTSpec, lookups: int, bags: int, mode: str) -> int:
    """Of the bags of the second half of the rows; 0 where a forward has no halves."""
    halved = lookups >= max(HALVED_LOOKUPS, HALVED_LOOKUPS_A_BAG * bags) and mode != "max"
    return halved * bags * spec.embedding_dim * spec.dtype.itemsize


@functools.lru_cache(maxsize=1024)
def smallest_bytes(
    spec: TTSpec, direction: Direction, lookups: int, positions: bool, second: int
) -> int:
    """Bytes that suffice for any batch of so many lookups; `second`: `second_bytes`."""
    working = _working(direction, spec.dtype.itemsize)
    most = max(
        working.forward(LEAST_ROWS, LEAST_PAIRS + 2 * LEAST_ROWS, False, 1),
        working.backward(LEAST_PAIRS, False, 1, 1),
    )
    arrays = lookups * 4 * (8 + positions)
    mirrored = directions_of(spec)[1].mirrored_bytes(spec.dtype.itemsize)
    halves = _bytes_of_halves(working, second)
    after_sort = arrays + second + halves + mirrored + most * 4 // 3
    return max(sort_bytes(spec, lookups, positions), after_sort) + 4096


def forward(
    prepared: Prepared,
    cores: list[Tensor],
    weights: Tensor | None,
    mode: str,
    dim: int,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """(bags [B, D], for max the position each number comes from, kept products of each part).

    weights: [V], by position in the flattened input.
    """
    dtype = cores[0].dtype
    run = getattr(library(), f"tt_forward_{LETTER[dtype]}")
    output = torch.zeros(prepared.bags, dim, dtype=dtype)
    position = None
    if mode == "max":
        position = torch.full((prepared.bags, dim), -1, dtype=torch.int32)
    kept: list[Tensor | None] = []
    held, done = prepared.nbytes, (c_int64 * 2)()
    for part, chunks in zip(prepared.parts, prepared.chunks, strict=True):
        shape, found = ctypes.byref(part.direction.shape), part.direction.cores(cores)
        product = part.direction.product
        kept.append(torch.empty(part.pairs * product, dtype=dtype) if chunks.keep else None)
        sizes = (chunks.forward_rows, chunks.forward_pairs)
        working = _working(part.direction, dtype.itemsize)
        nbytes = _forward_bytes(working, chunks, prepared.second_bytes)
        held += kept[-1].nbytes if kept[-1] is not None else 0
        mirrored = part.direction.mirrored_bytes(dtype.itemsize) // 2
        second = prepared.second_bytes
        prepared.peak_bytes = max(prepared.peak_bytes, held + second + nbytes + mirrored)
        place = SCRATCH.address(second + nbytes)
        run(
            *(shape, ctypes.byref(part.batch), *(core.data_ptr() for core in found)),
            *(_address(weights), MODES[mode], prepared.bags, output.data_ptr()),
            *(place if second else None, _address(position), _address(kept[-1]), *sizes),
            *(place + second, chunks.threads, ctypes.addressof(done)),
        )
    prepared.chunk_count = done[0]
    twice = done[1] - sum(part.pairs for part in prepared.parts)
    prepared.extra_flops = twice * pair_flops(prepared.parts)
    if mode == "mean":
        assert prepared.counts is not None
        output /= prepared.counts.clamp(min=1).to(dtype)[:, None]
    return output, position, kept


def backward(
    prepared: Prepared,
    cores: list[Tensor],
    weights: Tensor | None,
    mode: str,
    position: Tensor | None,
    kept: list[Tensor | None],
    gradient: Tensor,
    by_count: bool,
    wanted: list[bool],
    weights_wanted: bool,
) -> tuple[list[Tensor | None], Tensor | None]:
    """(gradient of each core or None, gradient of the weights [V] or None).

    wanted: for each core.
    """
    dtype = cores[0].dtype
    run = getattr(library(), f"tt_backward_{LETTER[dtype]}")
    gradient = gradient.contiguous()
    scale = None
    if mode == "mean":
        assert prepared.counts is not None
        scale = prepared.counts.clamp(min=1).to(dtype).reciprocal()
    # The kernels add to the gradients of the first two cores and write that of the last.
    has_front = any(not part.direction.back for part in prepared.parts)
    found = [
        None
        if not want
        else torch.empty(core.shape, dtype=dtype)
        if has_front and core is cores[-1]
        else torch.zeros(core.shape, dtype=dtype)
        for core, want in zip(cores, wanted, strict=True)
    ]
    if len(cores) == 2:
        found.insert(0, None)
    of_weights = (
        torch.zeros(weights.shape, dtype=dtype) if weights_wanted and weights is not None else None
    )
    held = prepared.nbytes + sum(k.nbytes for k in kept if k is not None)
    for part, chunks, products in zip(prepared.parts, prepared.chunks, kept, strict=True):
        shape, of_part = ctypes.byref(part.direction.shape), part.direction.cores(cores)
        nbytes = _working(part.direction, dtype.itemsize).backward(
            chunks.backward_pairs, chunks.keep, chunks.slots, chunks.threads
        )
        gradients = found
        mirrored = part.direction.mirrored_bytes(dtype.itemsize)
        if part.direction.back:
            gradients = [
                None if target is None else torch.zeros_like(core)
                for target, core in zip(found[::-1], of_part, strict=True)
            ]
        prepared.peak_bytes = max(prepared.peak_bytes, held + nbytes + mirrored)
        pointers = (c_void_p * 3)(*(core.data_ptr() for core in of_part))
        targets = (c_void_p * 3)(*map(_address, gradients))
        run(
            *(shape, ctypes.byref(part.batch), ctypes.addressof(pointers)),
            *(_address(weights), _address(scale), _address(position), by_count),
            *(gradient.data_ptr(), _address(products), ctypes.addressof(targets)),
            *(_address(of_weights), part.uniques, chunks.backward_pairs, chunks.slots),
            *(SCRATCH.address(nbytes), chunks.threads),
        )
        if part.direction.back:
            for target, mirror in zip(found[::-1], gradients, strict=True):
                if target is not None and mirror is not None:
                    target += mirror.transpose(1, 3)
    return found[3 - len(cores) :], of_weights


@functools.lru_cache(maxsize=1024)
def _working(direction: Direction, item: int) -> _Working:
    return _Working(direction, item)


@functools.lru_cache(maxsize=1024)
def directions_of(spec: TTSpec) -> tuple[Direction, Direction]:
    """The table first core first, and last core first (the same for two cores)."""
    front = Direction(spec, back=False)
    return front, Direction(spec, back=True) if len(spec.p) == 3 else front


def start(
    spec: TTSpec, lookups: Lookups, weighted: bool, backward: bool, max_workspace_bytes: int
) -> Prepared:
    """The batch sorted and cut into chunks that stay within `max_workspace_bytes`.

    Raises:
        IndexError: an index outside [0, N), with its position.
        ValueError: the batch does not fit; names the bytes that suffice.
    """
    positions = weighted or lookups.mode == "max"
    flat = lookups.flat.contiguous()
    edges = lookups.edges
    if edges is not None:  # what comes after the last bag belongs to none
        flat = flat[: int(edges[-1])]
    directions = directions_of(spec)
    second = second_bytes(spec, len(flat), lookups.bags, lookups.mode)
    needed = smallest_bytes(spec, directions[0], len(flat), positions, second)
    if max_workspace_bytes < needed:
        raise _too_small(len(flat), needed, max_workspace_bytes)
    try:
        prepared = prepare(
            spec,
            directions,
            flat,
            edges,
            lookups.bags,
            lookups.bag_size,
            lookups.padding_idx,
            positions,
        )
    except IndexError as error:
        raise index_error(spec, *error.args) from None
    prepared.second_bytes = second
    if not chunk(prepared, spec.dtype, max_workspace_bytes, backward):
        raise _too_small(len(flat), needed, max_workspace_bytes)
    if lookups.mode == "mean":
        bag_of = prepared.arrays[0][: prepared.lookups] & BAG
        if lookups.padding_idx is not None:
            prepared.counts = torch.bincount(bag_of, minlength=lookups.bags)
        elif edges is not None:
            prepared.counts = edges.diff()
        else:
            prepared.counts = torch.full((lookups.bags,), lookups.bag_size)
    return prepared


def _too_small(lookups: int, needed: int, given: int) -> ValueError:
    return ValueError(
        f"max_workspace_bytes must be at least {needed} for a batch of {lookups} lookups; "
        f"got {given}"
    )


class CpuCall:
    """One forward and, maybe, its backward, in C++."""

    def __init__(
        self,
        spec: TTSpec,
        lookups: Lookups,
        weights: Tensor | None,
        needs_graph: bool,
        max_workspace_bytes: int,
    ) -> None:
        self.spec, self.lookups = spec, lookups
        self.prepared = start(spec, lookups, weights is not None, needs_graph, max_workspace_bytes)
        self.statistics: dict[str, Any] = {"backend": "cpu"}
        self._kept: list[Tensor | None] = []
        self._position: Tensor | None = None

    def forward(self, cores: list[Tensor], weights: Tensor | None) -> Tensor:
        """Bags [B, D]."""
        mode, dim = self.lookups.mode, self.spec.embedding_dim
        weights = None if weights is None else weights.contiguous()
        output, self._position, self._kept = forward(self.prepared, cores, weights, mode, dim)
        self.statistics.update(
            workspace_bytes=self.prepared.peak_bytes,
            chunks=self.prepared.chunk_count,
            flops=self.prepared.flops + self.prepared.extra_flops,
        )
        return output

    def foreseen(self) -> tuple[int, int]:
        """(chunks of the forward, most workspace bytes of it and its backward)."""
        prepared, item = self.prepared, self.spec.dtype.itemsize
        count, peak, held = 0, prepared.peak_bytes, prepared.nbytes
        after: list[int] = []  # of each part's backward, when all products are kept
        for part, sizes in zip(prepared.parts, prepared.chunks, strict=True):
            working, mirrored = _working(part.direction, item), part.direction.mirrored_bytes(item)
            held += sizes.keep * part.pairs * part.direction.product * item
            forward = _forward_bytes(working, sizes, prepared.second_bytes)
            peak = max(peak, held + prepared.second_bytes + forward + mirrored // 2)
            backward = (sizes.backward_pairs, sizes.keep, sizes.slots, sizes.threads)
            after.append(working.backward(*backward) + mirrored)
            halves = prepared.second_bytes > 0
            apart = 2 if halves and sizes.threads == 2 else 1
            rows = (max(1, sizes.forward_rows // apart), max(1, sizes.forward_pairs // apart))
            count += int(library().tt_chunks(ctypes.byref(part.batch), *rows, halves))
        return count, max([peak, *(held + most for most in after)])

    def backward(
        self,
        cores: list[Tensor],
        weights: Tensor | None,
        gradient: Tensor,
        wanted: list[bool],
        weights_wanted: bool,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Gradients of the wanted cores, and of the weights [V]."""
        found = backward(
            self.prepared,
            cores,
            None if weights is None else weights.contiguous(),
            self.lookups.mode,
            self._position,
            self._kept,
            gradient,
            self.lookups.by_frequency,
            wanted,
            weights_wanted,
        )
        self.statistics["workspace_bytes"] = self.prepared.peak_bytes
        return found
