"""The emulated link: rate and latency asked against measured, processor used while it waits.

Rate: bytes over seconds of a transfer, no latency asked. Latency: seconds of a transfer of (almost)
nothing. Seconds count from the last rank's start to the last rank's end, median of the rounds.
Waiting: processor time of a rank over wall
time, while its transfer is held and while it waits for a peer. Overlap: a computation beside a held
transfer, over the longer of the two alone.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from septet_shared.link import LinkSpec, emulate
from septet_shared.profiling import bench_row
from septet_shared.ranks import Ranks
from septet_shared.ranks import run as run_ranks
from septet_shared.symmetric_heap import SymmetricHeap

RATES = {"100mbit": 625_000, "1gbit": 6_250_000, "2gbit": 12_500_000}  # bytes: 50 ms
ONE_SIDED = {"100mbit": 1_228_800, "1gbit": 12_288_000, "10gbit": 122_880_000}
LATENCIES_S = (0.002, 0.010, 0.050)
ROUNDS = 7
ROW_BYTES = 4096


def run() -> Iterator[dict[str, Any]]:
    """Rows as tools/bench.py wants them."""
    for rate, nbytes in RATES.items():
        for way in ("all_to_all_rows", "all_gather", "broadcast"):
            yield rate_row(rate, way, nbytes, run_ranks(collective_rate, 2, rate, nbytes, way))
    for rate, nbytes in ONE_SIDED.items():
        for way in ("get_rows", "put_rows"):
            yield rate_row(rate, way, nbytes, run_ranks(one_sided_rate, 2, rate, nbytes, way))
    for latency_s in LATENCIES_S:
        for way in ("barrier", "all_gather", "get_rows"):
            measured = median_s(run_ranks(latency_of, 2, latency_s, way))
            yield row(
                "link latency",
                f"{latency_s * 1e3:g} ms, {way}",
                abs(measured - latency_s) * 1e3,
                "ms apart",
                f"<= {(0.05 * latency_s + 0.5e-3) * 1e3:.3g}",
                f"measured {measured * 1e3:.3f} ms, median of 15",
            )
    held, peer = zip(*run_ranks(waiting_share, 2), strict=True)
    notes = "processor time over wall time, 2 s"
    yield row("link, waiting", "for a held transfer", max(held), "of a core", "<= 0.03", notes)
    yield row("link, waiting", "for a peer that is held", peer[1], "of a core", "<= 0.03", notes)
    stretch, comm_s, compute_s = max(run_ranks(overlap, 2))
    yield row(
        "link, overlap",
        "computation beside a held transfer",
        stretch,
        "of the longer",
        "<= 1.15",
        f"transfer {comm_s * 1e3:.0f} ms, computation {compute_s * 1e3:.0f} ms alone",
    )


def row(name: str, variant: str, value: float, unit: str, must: str, notes: str) -> dict[str, Any]:
    """A row of this benchmark: ranks have one thread each."""
    return bench_row(name, variant, value, unit, must=must, notes=notes, threads=1)


def rate_row(rate: str, way: str, nbytes: int, spans: list[Any]) -> dict[str, Any]:
    """The relative error of the rate."""
    asked, measured = LinkSpec(rate).bytes_per_s, nbytes / median_s(spans)
    notes = f"measured {measured * 8e-6:.1f} Mbit/s, {nbytes / 1e6:g} MB, median of {ROUNDS}"
    error = abs(measured / asked - 1)
    return row("link rate", f"{rate}, {way}", error, "of the asked", "<= 0.05", notes)


Spans = list[tuple[float, float]]  # of each round, on the clock that all ranks share


def spans_of(ranks: Ranks, transfer: Callable[[], object], rounds: int = ROUNDS) -> Spans:
    """(start, end) of transfers that the ranks start together, after one that is not counted."""
    spans = []
    for _ in range(rounds + 1):
        ranks.barrier("together")
        started = time.monotonic()
        transfer()
        spans.append((started, time.monotonic()))
    return spans[1:]


def median_s(spans_of_ranks: list[Spans]) -> float:
    """Seconds from the last start to the last end, median of the rounds."""
    rounds = zip(*spans_of_ranks, strict=True)
    return statistics.median(max(e for _, e in r) - max(s for s, _ in r) for r in rounds)


def collective_rate(ranks: Ranks, rate: str, nbytes: int, way: str) -> Spans:
    """Of collectives that bring each rank `nbytes`, or take them from it."""
    t = torch.ones(nbytes, dtype=torch.uint8)
    counts = [0 if r == ranks.rank else nbytes for r in range(2)]
    transfer = {
        "all_to_all_rows": lambda: ranks.all_to_all_rows(t, counts, counts),
        "all_gather": lambda: ranks.all_gather(t),
        "broadcast": lambda: ranks.broadcast(t),
    }[way]
    with emulate(ranks, LinkSpec(rate, 0.0)):
        return spans_of(ranks, transfer)


def one_sided_rate(ranks: Ranks, rate: str, nbytes: int, way: str) -> Spans:
    """Of one-sided copies, both ranks at the same time."""
    heap = SymmetricHeap.create(ranks, nbytes + 2 * ROW_BYTES)
    t = heap.empty((nbytes // ROW_BYTES, ROW_BYTES), torch.uint8)
    index, rows = torch.arange(len(t)), torch.empty_like(t)
    peer = 1 - ranks.rank
    with emulate(ranks, LinkSpec(rate, 0.0)) as link:
        copy = link.get_rows if way == "get_rows" else link.put_rows
        spans = spans_of(ranks, lambda: copy(heap, t, peer, index, rows))
        ranks.barrier("done")
    return spans


def latency_of(ranks: Ranks, latency_s: float, way: str) -> Spans:
    """Of transfers of (almost) nothing."""
    heap = SymmetricHeap.create(ranks, 4096)
    t = heap.empty((1, 8), torch.float32)
    index, out = torch.zeros(1, dtype=torch.int64), torch.empty(1, 8)
    with emulate(ranks, LinkSpec("1tbit", latency_s)) as link:
        transfer = {
            "barrier": lambda: ranks.barrier("latency"),
            "all_gather": lambda: ranks.all_gather(out),
            "get_rows": lambda: link.get_rows(heap, t, 1 - ranks.rank, index, out),
        }[way]
        return spans_of(ranks, transfer, 15)


def waiting_share(ranks: Ranks) -> tuple[float, float]:
    """Processor time over wall time of a held transfer, and of waiting for a rank that sleeps."""
    shares = []
    with emulate(ranks, LinkSpec(500_000.0, 0.0)):
        for wait in (
            lambda: ranks.all_gather(torch.ones(1_000_000, dtype=torch.uint8)),
            lambda: time.sleep(2) if ranks.rank == 0 else ranks.barrier("a peer that is held"),
        ):
            ranks.barrier("together")
            started, used = time.monotonic(), time.process_time()
            wait()
            shares.append((time.process_time() - used) / (time.monotonic() - started))
        if ranks.rank == 0:
            ranks.barrier("a peer that is held")
    return shares[0], shares[1]


def overlap(ranks: Ranks) -> tuple[float, float, float]:
    """(both together over the longer alone, seconds of the transfer, of the computation)."""
    t = torch.ones(2_000_000, dtype=torch.uint8)
    a = torch.randn(200, 200)

    def compute() -> None:
        for _ in range(products):
            a @ a

    def own_s(call: Callable[[], object]) -> float:
        return median_s([spans_of(ranks, call)])

    with emulate(ranks, LinkSpec(20_000_000.0, 0.0)):
        comm_s = own_s(lambda: ranks.all_gather(t))
        products = 100
        products = max(1, round(products * comm_s / own_s(compute)))
        compute_s = own_s(compute)

        def both() -> None:
            work = ranks.all_gather(t, async_op=True)
            compute()
            work.wait()

        return own_s(both) / max(comm_s, compute_s), comm_s, compute_s
