"""Ranks: a killed rank, what meetings and exchanges cost, a pipeline against its simulation.

Kill: SIGKILL from outside at a random moment, 3 ranks, four places in turn. A round counts when
both survivors raised PeerLost naming the rank within 5 s, nothing is left in /dev/shm and no
process lives on. Exchanges: against gloo itself, in turns, outputs checked equal. Pipeline:
micro-batches that come in, are computed on, go out; both exchanges asynchronous on duplicates of
the group, over an emulated link; the simulation knows the link's specification and the compute time
alone.
"""

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from septet_shared.hardware import HardwareProfile, Link
from septet_shared.link import LinkSpec, emulate
from septet_shared.profiling import Ratio, bench_row, compare, measure
from septet_shared.ranks import PeerLost, Ranks
from septet_shared.ranks import run as run_ranks
from septet_shared.streams import OpGraph, simulate
from septet_shared.symmetric_heap import SymmetricHeap

KILLS = 50
PLACES = ("collective", "heap wait", "between", "asynchronous")
ROUNDS = 15
KIB = 1024


def run() -> Iterator[dict[str, Any]]:
    """Rows as tools/bench.py wants them."""
    yield from kills()
    yield from starts()
    for size in (2, 4):
        times = sorted(t for us in run_ranks(barriers, size) for t in us)
        notes = f"median of {len(times)}; 99 % within {times[len(times) * 99 // 100]:.3g} us"
        yield row("ranks.barrier", f"{size} ranks", statistics.median(times), "us", notes=notes)
    for kib in (1, 64, 1024, 16384):
        for name, (ratio, ours_s, peer_s) in run_ranks(exchanges, 2, kib)[0].items():
            yield bench_row(
                f"ranks.{name}",
                f"2 ranks, {kib} KiB a rank",
                ours_s * 1e6,
                "us",
                peer="gloo",
                ratio=ratio,
                notes=f"gloo {peer_s * 1e6:.4g} us; {ROUNDS} rounds, outputs checked equal",
                threads=1,
            )
    for variant, shape in PIPELINES.items():
        yield pipeline_row(variant, *shape)


def row(
    name: str, variant: str, value: float, unit: str, must: str | None = None, notes: str = ""
) -> dict[str, Any]:
    """A row of this benchmark: ranks have one thread each."""
    return bench_row(name, variant, value, unit, must=must, notes=notes, threads=1)


# ---- a killed rank ----


def until_killed(ranks: Ranks, folder: str, place: str, victim: int) -> None:
    """Do what the place says for ever; the others write whom they were told of, and when."""
    (Path(folder) / f"pid{ranks.rank}").write_text(str(os.getpid()))
    channel = SymmetricHeap.create(ranks, 64).channel("bench", 1)
    rows, counts = torch.ones(300 * ranks.size, 16), [300] * ranks.size
    ranks.barrier("ready")
    if ranks.rank == victim:
        (Path(folder) / "ready").touch()
    try:
        while True:
            if place == "collective":
                ranks.all_reduce(torch.ones(50_000))
            elif place == "heap wait":
                channel.wait(0, 1)
            elif place == "between":
                time.sleep(0.002)
                ranks.barrier("between")
            else:
                ranks.all_to_all_rows(rows, counts, counts, async_op=True).wait()
    except PeerLost as error:
        (Path(folder) / f"told{ranks.rank}").write_text(f"{error.rank} {time.monotonic()}")
        raise


def kills() -> Iterator[dict[str, Any]]:
    """How many of `KILLS` kills went as they must, and the slowest survivor."""
    rng, good, slowest, wrong = random.Random(0), 0, 0.0, []
    for number in range(KILLS):
        place, victim = PLACES[number % len(PLACES)], number % 3
        seconds = kill_once(place, victim, rng.uniform(0.0, 0.05))
        if seconds is None or seconds > 5:
            wrong.append(f"round {number}: {place}, rank {victim}")
        else:
            good += 1
            slowest = max(slowest, seconds)
    notes = f"of {KILLS} rounds with 3 ranks: {', '.join(PLACES)} in turn. {'; '.join(wrong)}"
    name = "ranks, a rank killed"
    yield row(name, "every other rank named it", good, "rounds", f">= {KILLS}", notes)
    yield row(name, "slowest survivor", slowest, "s", "<= 5", "from SIGKILL to PeerLost")


def kill_once(place: str, victim: int, after_s: float) -> float | None:
    """Seconds until the slower of two survivors was told; None when a rule was broken."""
    memory = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory() as name:
        folder, killed = Path(name), []
        killer = os.fork()
        if killer == 0:  # a process, so that it neither waits for the caller nor shares its locks
            try:
                deadline = time.monotonic() + 60
                while not (folder / "ready").exists() and time.monotonic() < deadline:
                    time.sleep(0.001)
                time.sleep(after_s)
                killed_at = time.monotonic()
                os.kill(int((folder / f"pid{victim}").read_text()), signal.SIGKILL)
                (folder / "killed").write_text(str(killed_at))
            finally:
                os._exit(0)
        try:
            run_ranks(until_killed, 3, name, place, victim)
        except PeerLost:
            os.waitpid(killer, 0)
            told = [(folder / f"told{r}") for r in range(3) if r != victim]
            if not all(file.exists() for file in told):
                return None
            killed = float((folder / "killed").read_text())
            named, at = zip(*(file.read_text().split() for file in told), strict=True)
            pids = [int((folder / f"pid{r}").read_text()) for r in range(3)]
            left = [p for p in set(Path("/dev/shm").iterdir()) - memory if "septet" in p.name]
            if set(named) != {str(victim)} or left or any(map(is_there, pids)):
                return None
            return max(map(float, at)) - killed
    return None


def is_there(pid: int) -> bool:
    """Whether a process of that number exists."""
    return Path(f"/proc/{pid}").exists()


# ---- costs ----


def nothing(ranks: Ranks) -> int:
    """What a rank does that does nothing."""
    return ranks.rank


def starts() -> Iterator[dict[str, Any]]:
    """Seconds of a whole `run` of ranks that do nothing, after the first of a process."""
    for size in (1, 2, 4):
        timing = measure(lambda size=size: run_ranks(nothing, size), rounds=7)
        notes = f"interquartile range {timing.iqr_s:.2g} s"
        yield row("ranks.run", f"{size} ranks", timing.median_s, "s", notes=notes)


def barriers(ranks: Ranks) -> list[float]:
    """Microseconds of each barrier."""
    times = []
    for number in range(4000 // ranks.size + 100):
        start = time.perf_counter_ns()
        ranks.barrier("bench")
        if number >= 100:
            times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def exchanges(ranks: Ranks, kib: int) -> dict[str, tuple[Ratio, float, float]]:
    """Of each collective: ratio of gloo's time to ours, our seconds, gloo's."""
    repeats = max(1, min(100, 4096 // kib))
    rng = torch.Generator().manual_seed(ranks.rank)
    # Whole numbers: gloo may add in any order.
    sent = torch.randint(100, (kib * KIB // 4,), generator=rng).float()
    got, into = torch.empty_like(sent), torch.empty_like(sent)
    gathered = sent.new_empty(ranks.size * len(sent))
    half = [len(sent) // 2] * 2

    def gloo_reduce(t: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(t, group=ranks.group)
        return t

    def gloo_exchange() -> torch.Tensor:
        dist.all_to_all_single(got, sent, half, half, group=ranks.group)
        return got

    def gloo_gather() -> torch.Tensor:
        dist.all_gather(list(gathered.chunk(ranks.size)), sent, group=ranks.group)
        return gathered.view(ranks.size, -1)

    cases = {
        "all_to_all_rows": (
            lambda: ranks.all_to_all_rows(sent, half, half, out=into),
            gloo_exchange,
        ),
        "all_gather": (lambda: ranks.all_gather(sent), gloo_gather),
        "all_reduce": (lambda: ranks.all_reduce(sent.clone()), lambda: gloo_reduce(sent.clone())),
    }
    found = {}
    for name, (ours, peer) in cases.items():

        def repeated(fn: Any) -> Any:
            return lambda: [fn() for _ in range(repeats)][-1]

        result = compare({"ours": repeated(ours), "gloo": repeated(peer)}, rounds=ROUNDS)
        medians = [result.timings[v].median_s / repeats for v in ("ours", "gloo")]
        found[name] = (result.ratio("gloo", "ours"), *medians)
    return found


# ---- a pipeline against its simulation ----

LINK = LinkSpec("100mbit", 1e-3)
BATCHES = 12
PIPELINES = {  # bytes to the peer in and out, compute in seconds
    "balanced": (125_000, 125_000, 0.020),
    "bound by compute": (60_000, 60_000, 0.030),
    "bound by the link": (250_000, 125_000, 0.010),
}


def pipeline_row(variant: str, bytes_in: int, bytes_out: int, compute_s: float) -> dict[str, Any]:
    """Relative error of the simulated makespan."""
    alone, whole = zip(*run_ranks(pipeline, 2, bytes_in, bytes_out, compute_s), strict=True)
    measured = statistics.median(map(max, *whole))
    profile = HardwareProfile(
        name="emulated link",
        gemm_flops={},
        copy_bytes_s=1e9,
        memory_bytes_s=1e9,
        link={"nic": Link(LINK.latency_s, LINK.bytes_per_s)},
    )
    graphs = [graph(bytes_in, bytes_out, own_s) for own_s in alone]
    predicted = simulate(graphs, profile).makespan_s
    return row(
        "simulated against measured makespan",
        f"3-stage pipeline, {variant}",
        abs(predicted / measured - 1),
        "of the measured",
        "<= 0.10",
        f"simulated {predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms, median of "
        f"{len(whole[0])}; a computation {max(alone) * 1e3:.1f} ms; {BATCHES} micro-batches, "
        f"2 ranks, {LINK.rate} and {LINK.latency_s * 1e3:g} ms",
    )


def graph(bytes_in: int, bytes_out: int, compute_s: float) -> OpGraph:
    """The op graph of `pipeline` on one rank."""
    g = OpGraph()
    for i in range(BATCHES):
        after = [f"compute {i - 2}"] if i >= 2 else []
        link = {"kind": "link:nic", "collective": True}
        g.op(f"in {i}", stream="in", work=bytes_in, after=after, **link)
        g.op(f"compute {i}", stream="compute", seconds=compute_s, after=f"in {i}")
        g.op(f"out {i}", stream="out", work=bytes_out, after=f"compute {i}", **link)
    return g


def pipeline(
    ranks: Ranks, bytes_in: int, bytes_out: int, compute_s: float
) -> tuple[float, list[float]]:
    """Seconds of one computation, on both ranks together; of the pipeline in each round."""
    arrive, leave = ranks.duplicate("in"), ranks.duplicate("out")
    a = torch.randn(400, 400)
    took = measure(lambda: a @ a, rounds=50).median_s
    products = max(1, round(compute_s / took))

    def compute() -> None:
        for _ in range(products):
            a @ a

    def exchange(group: Ranks, nbytes: int) -> Any:
        rows = torch.zeros(nbytes, dtype=torch.uint8)
        counts = [0 if r == ranks.rank else nbytes for r in range(2)]
        return group.all_to_all_rows(rows, counts, counts, async_op=True)

    alone, whole = [], []
    for _ in range(15):
        ranks.barrier("computation alone")
        started = time.monotonic()
        for _ in range(BATCHES):
            compute()
            ranks.barrier("in step")  # as exchanges keep the ranks
        alone.append((time.monotonic() - started) / BATCHES)
        with emulate(ranks, LINK):
            ranks.barrier("pipeline")
            started = time.monotonic()
            coming, leaving = [exchange(arrive, bytes_in)], []
            for i in range(BATCHES):
                coming[i].wait()
                if i + 1 < BATCHES:
                    coming.append(exchange(arrive, bytes_in))
                compute()
                leaving.append(exchange(leave, bytes_out))
            for work in leaving:
                work.wait()
            whole.append(time.monotonic() - started)
    return statistics.median(alone), whole
