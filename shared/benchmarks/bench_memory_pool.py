"""Pools against what one would do without: torch.empty each time, torch.save to a file.

"use" allocates, fills and drops a tensor of the given size, so that page faults count; "empty" does
not touch it: what is left is the cost of the bookkeeping. Both are CPU time of one thread.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from septet_shared.memory_pool import Arena, BufferRing, SpillFile, pinned
from septet_shared.profiling import Comparison, bench_row, compare

KIB, MIB = 2**10, 2**20
ROUNDS = 15


def run() -> Iterator[dict[str, Any]]:
    """Rows, value in us a tensor or in GB/s of the variant; ratio of the peer's time to ours."""
    for nbytes in (4 * KIB, MIB, 64 * MIB):
        size = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
        for touch in (False, True):
            repeats = max(2, min(500, 64 * MIB // nbytes)) if touch else 500
            name = f"memory_pool.{'use' if touch else 'empty'} {size}"
            yield from pools(name, nbytes, repeats, touch)
    yield from spill(64 * MIB)


def pools(name: str, nbytes: int, repeats: int, touch: bool) -> Iterator[dict[str, Any]]:
    """One row for each pool against torch.empty."""
    arena, ring = Arena(nbytes), BufferRing(1, nbytes)

    def with_arena() -> int:
        with arena.scope() as scope:
            return touched(scope.empty(nbytes, torch.uint8), touch)

    def with_ring() -> int:
        with ring.slot() as buffer:
            return touched(buffer, touch)

    ways = {
        "torch.empty": lambda: touched(torch.empty(nbytes, dtype=torch.uint8), touch),
        "Arena": with_arena,
        "BufferRing": with_ring,
        "pinned": lambda: touched(pinned(nbytes, torch.uint8), touch),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls = {way: repeated(use, repeats) for way, use in ways.items()}
        times = compare(calls, rounds=ROUNDS, clock="cpu")
    finally:
        torch.set_num_threads(threads)
    for way in list(ways)[1:]:
        microseconds = times.timings[way].median_s / repeats * 1e6
        yield {**row(name, times, way, "torch.empty", microseconds, "us"), "threads": 1}


def spill(nbytes: int) -> Iterator[dict[str, Any]]:
    """Rates of `SpillFile` in the system's temporary folder, against torch.save and torch.load."""
    t, out = torch.randn(nbytes // 4), torch.empty(nbytes // 4)
    with tempfile.TemporaryDirectory() as folder, SpillFile(folder) as file:
        path, handle = Path(folder) / "t.pt", file.put(t)

        def load() -> torch.Tensor:
            return out.copy_(torch.load(path, weights_only=True))

        for name, ways in (
            ("put", {"SpillFile": lambda: file.put(t) and None, "torch": lambda: save(t, path)}),
            ("get", {"SpillFile": lambda: file.get(handle, out), "torch": load}),
        ):
            times = compare(ways, rounds=ROUNDS)
            gigabytes_s = nbytes / times.timings["SpillFile"].median_s / 1e9
            yield row(f"memory_pool.spill {name}", times, "SpillFile", "torch", gigabytes_s, "GB/s")


def save(t: torch.Tensor, path: Path) -> None:
    """torch.save, which gives no result to compare."""
    torch.save(t, path)


def touched(t: torch.Tensor, touch: bool) -> int:
    """Something to compare: the last byte after filling all, or the size."""
    return int(t.fill_(3)[-1]) if touch else t.nbytes


def repeated(use: Callable[[], int], repeats: int) -> Callable[[], int]:
    """A function that calls use so often that a clock can tell."""

    def several() -> int:
        return sum(use() for _ in range(repeats))

    return several


def row(
    name: str, times: Comparison, variant: str, peer: str, value: float, unit: str
) -> dict[str, Any]:
    """One row of the benchmark's table."""
    ratio, notes = times.ratio(peer, variant), f"{times.notes}, {ROUNDS} rounds"
    return bench_row(name, variant, value, unit, peer=peer, ratio=ratio, notes=notes)
