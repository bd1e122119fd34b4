"""The symmetric heap between processes: barrier, signal, all-to-all against gloo, a killed rank.

Barrier and signal: microseconds of one call, median over all ranks and calls. All-to-all: each rank
holds an equal part of its bytes for every rank. Over the heap it writes the parts into its peers'
memory between two barriers; its own part stays where it is, or ("one tensor") is copied beside
what came from the others. gloo is `all_to_all_single` on preallocated tensors, which always copies
it. Taken in turns, outputs checked equal. Kill: seconds from SIGKILL of one rank until each of two
others, inside a heap wait, has raised PeerLost naming it.
"""

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from septet_shared import ranks as ranks_module
from septet_shared.profiling import bench_row, compare
from septet_shared.ranks import PeerLost, Ranks
from septet_shared.symmetric_heap import SymmetricHeap, copy_

CALLS = 20_000
MIB = (1, 4, 16, 64)
REPEATS = {1: 20, 4: 8, 16: 3, 64: 1}  # exchanges in one measured call
ROUNDS = 15
KILLS = 50


def run() -> Iterator[dict[str, Any]]:
    """Rows as tools/bench.py wants them."""
    for size, must in ((2, "<= 10"), (4, None)):
        times = sorted(t for us in ranks_module.run(barriers, size) for t in us)
        yield row("heap.barrier", f"{size} ranks", times, must)
    times = sorted(t for us in ranks_module.run(signals, 2) for t in us)
    yield row("heap.signal and wait", "2 ranks, one way", times, None)
    for mib, whole in [(mib, whole) for whole in (False, True) for mib in MIB]:
        ratio, ours_s, peer_s, alone_s = ranks_module.run(exchanges, 2, mib, whole)[0]
        yield bench_row(
            "heap.all_to_all",
            f"2 ranks, {mib} MiB a rank" + whole * ", one tensor",
            ours_s * 1e3,
            "ms",
            must=None if whole else ">= 5",
            peer="gloo all_to_all_single",
            ratio=ratio,
            notes=f"gloo {peer_s * 1e3:.3g} ms; its copies alone {alone_s * 1e3:.3g} ms; "
            f"{ROUNDS} rounds, outputs checked equal",
            threads=1,
        )
    seconds = [seconds_to_notice() for _ in range(KILLS)]
    notes = f"{KILLS} of {KILLS} named; median {statistics.median(seconds):.3g} s"
    name, variant = "heap wait, peer killed", "slowest survivor"
    yield bench_row(name, variant, max(seconds), "s", must="<= 5", notes=notes, threads=1)


def row(name: str, variant: str, ordered: list[float], must: str | None) -> dict[str, Any]:
    """A row of microseconds; value is the median."""
    tail = ordered[int(len(ordered) * 0.99)]
    notes = f"{len(ordered)} calls, 99 % within {tail:.3g} us, {os.cpu_count()} cores"
    median = statistics.median(ordered)
    return bench_row(name, variant, median, "us", must=must, notes=notes, threads=1)


def barriers(ranks: Ranks) -> list[float]:
    """Microseconds of each barrier."""
    heap = SymmetricHeap.create(ranks, 64)
    channel = heap.channel("bench")
    times = []
    for number in range(CALLS // ranks.size + 100):
        start = time.perf_counter_ns()
        channel.barrier("bench")
        if number >= 100:
            times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def signals(ranks: Ranks) -> list[float]:
    """Microseconds of each half of a ping-pong."""
    heap = SymmetricHeap.create(ranks, 64)
    channel = heap.channel("bench", 1)
    channel.barrier("begin")
    times = []
    for epoch in range(1, CALLS + 1):
        start = time.perf_counter_ns()
        if ranks.rank == 0:
            channel.signal(1, 0, epoch)
            channel.wait(0, epoch)
        else:
            channel.wait(0, epoch)
            channel.signal(0, 0, epoch)
        if ranks.rank == 0 and epoch > 100:
            times.append((time.perf_counter_ns() - start) / 2e3)
    return times


def exchanges(ranks: Ranks, mib: int, whole: bool) -> tuple[Any, float, float, float]:
    """(ratio of gloo to the heap, seconds of one exchange: heap, gloo, its copies alone).

    The copies alone are the limit: as many bytes, moved by both ranks at once, with no waiting.
    """
    rank, size, repeats = ranks.rank, ranks.size, REPEATS[mib]
    heap = SymmetricHeap.create(ranks, 2 * (mib << 20))
    channel = heap.channel("bench")
    rng = torch.Generator().manual_seed(rank)
    sent = torch.randint(2**31, (size, (mib << 18) // size), generator=rng, dtype=torch.int32)
    received = heap.empty(sent.shape, torch.int32)
    slots = [heap.peer(received, r)[rank] for r in range(size)]
    targets = [(rank + r) % size for r in range(0 if whole else 1, size)]
    parts = [received[r] if whole or r != rank else sent[r] for r in range(size)]
    plain = torch.empty_like(sent)

    def over_heap() -> list[torch.Tensor]:
        for _ in range(repeats):
            channel.barrier("received rows are no longer read")
            for r in targets:
                copy_(slots[r], sent[r])
            channel.barrier("all rows have arrived")
        return parts

    def copies_alone() -> list[torch.Tensor]:
        for _ in range(repeats):
            for r in targets:
                copy_(slots[r], sent[r])
        channel.barrier("all rows have arrived")
        return parts

    def over_gloo() -> list[torch.Tensor]:
        for _ in range(repeats):
            dist.all_to_all_single(plain, sent, group=ranks.group)
        return list(plain)

    ways = {"heap": over_heap, "gloo": over_gloo, "copies": copies_alone}
    result = compare(ways, rounds=ROUNDS)
    ours, peer, alone = (result.timings[way].median_s / repeats for way in ways)
    return result.ratio("gloo", "heap"), ours, peer, alone


def killed_waiting(ranks: Ranks, folder: str) -> None:
    """Rank 1 dies; every other writes how many seconds later it was told who."""
    heap = SymmetricHeap.create(ranks, 64)
    channel = heap.channel("bench", 1)
    channel.barrier("begin")
    if ranks.rank == 1:
        (Path(folder) / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        channel.wait(0, 1)
    except PeerLost as error:
        (Path(folder) / str(ranks.rank)).write_text(f"{error.rank} {time.monotonic()}")
        raise


def seconds_to_notice() -> float:
    """Seconds until the slowest of two survivors named rank 1."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks_module.run(killed_waiting, 3, folder)
        except PeerLost:
            killed = float((Path(folder) / "killed").read_text())
            told = [(Path(folder) / r).read_text().split() for r in ("0", "2")]
            assert [rank for rank, _ in told] == ["1", "1"]
            return max(float(at) for _, at in told) - killed
    raise AssertionError("a killed rank went unnoticed")
