"""How a batch is cut so that what it needs for a while stays within `max_workspace_bytes`.

The different rows of a batch are sorted, so the rows of one front pair lie together: cut into
contiguous chunks, at most one pair a boundary is multiplied twice. Sizes that gradients depend on
come from the batch and the bytes allowed, never from the number of threads.
Source: EcoRec, SC 2024 (micro-batching on sorted indices).
"""

from collections.abc import Callable
from dataclasses import dataclass

# Rows of a forward chunk: of one thread what its cache holds; of several as many as there is room
# for, since they meet four times a chunk, and where another process has one of their cores each
# meeting waits for the scheduler.
FORWARD_ROWS, SHARED_ROWS = 4096, 1 << 20
BACKWARD_BYTES = 1 << 20  # of a backward chunk's product gradients: what a core's own cache holds
# A slot of gradients for the last core is cleared and summed up: worth it from so many rows a line
# on, and the second, without which one thread would work alone, from half of them.
ROWS_PER_SLOT = 6
MOST_SLOTS = 16
LEAST_ROWS, LEAST_PAIRS = 32, 8  # of the smallest chunk


@dataclass(frozen=True)
class Chunks:
    """Sizes for one batch.

    forward_rows, forward_pairs: most rows and pairs of a forward chunk.
    backward_pairs: most pairs of a backward chunk. slots: partial gradients of the last core.
    keep: whether the pair products of the forward stay for the backward.
    threads: how many may work.
    """

    forward_rows: int
    forward_pairs: int
    backward_pairs: int
    slots: int
    keep: bool
    threads: int


def largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest n in [least, most] for which `fits` (which falls once) holds, or least - 1."""
    if most <= least or not fits(least):
        return least if fits(least) else least - 1
    if fits(most):
        return most
    low, high = least, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def evenly(total: int, most: int) -> int:
    """The size of equal chunks of at most `most`, as few as possible."""
    chunks = -(-total // most)
    return -(-total // chunks) if chunks else most


def plan_chunks(
    *,
    uniques: int,
    pairs: int,
    last_lines: int,
    product_bytes: int,
    scratch_bytes: int,
    forward_bytes: Callable[[int, int, bool], int],
    backward_bytes: Callable[[int, bool, int], int],
    available_bytes: int,
    threads: int,
    backward: bool,
) -> Chunks | None:
    """The chunks of a batch within `available_bytes`; None when it has no room.

    Args:
        uniques, pairs: U and F.
        last_lines: p of the last core.
        product_bytes: of one pair's product.
        scratch_bytes: what each thread takes.
        forward_bytes: (rows, pairs, keep) -> bytes without threads.
        backward_bytes: (pairs, keep, slots) -> bytes without threads.
        available_bytes: for all of it.
        threads: how many there are.
        backward: whether one will follow.
    """
    for_threads = max(scratch_bytes, available_bytes // 4)
    threads = max(1, min(threads, for_threads // scratch_bytes))
    room = available_bytes - for_threads
    kept_bytes = pairs * product_bytes + 64
    lines = max(last_lines, 1)
    most_slots = min(MOST_SLOTS, uniques // (ROWS_PER_SLOT * lines))
    most_slots = max(most_slots, 1 + (uniques >= ROWS_PER_SLOT * lines))
    cached = max(LEAST_PAIRS, BACKWARD_BYTES // product_bytes)
    pairs_a_row = pairs / max(uniques, 1)

    def pairs_of(rows: int) -> int:
        return max(LEAST_PAIRS, int(2 * rows * pairs_a_row))

    def fitted(keep: bool) -> Chunks | None:
        left = room - keep * kept_bytes
        rows = largest(
            lambda n: forward_bytes(n, pairs_of(n), keep) <= left,
            LEAST_ROWS,
            FORWARD_ROWS if threads == 1 else max(LEAST_ROWS, min(uniques, SHARED_ROWS)),
        )
        slots = most_slots
        while slots > 1 and backward_bytes(LEAST_PAIRS, keep, slots) > left // 2:
            slots -= 1
        most = largest(
            lambda n: backward_bytes(n, keep, slots) <= left,
            LEAST_PAIRS,
            max(min(pairs, cached), LEAST_PAIRS),
        )
        if rows < LEAST_ROWS or (backward and most < LEAST_PAIRS):
            return None
        return Chunks(
            forward_rows=rows,
            forward_pairs=pairs_of(rows),
            backward_pairs=evenly(pairs, most) if pairs else LEAST_PAIRS,
            slots=slots,
            keep=keep,
            threads=threads,
        )

    with_products = fitted(True) if backward and kept_bytes <= room // 2 else None
    return with_products or fitted(False)
