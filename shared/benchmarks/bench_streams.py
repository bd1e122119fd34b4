"""streams.simulate: a pipeline of 1,000 ops on one rank, and of 200 ops on each of 64 ranks.

The pipeline is the one that the simulator is for: dispatch, compute, combine and offload of chunks
on four streams, two buffers in each ring, exchanges as collectives that share one link. Building
the graph is not timed. Pure Python on one thread: CPU time is what it takes on an idle core.
"""

from collections.abc import Iterator
from typing import Any

from septet_shared.profiling import HardwareProfile, bench_row, measure
from septet_shared.streams import OpGraph, simulate


def pipeline(chunks: int) -> OpGraph:
    """4 * chunks ops: S (dispatch), C (compute), R (combine) and O (offload) of every chunk."""
    graph = OpGraph()

    def dispatch(i: int) -> None:
        graph.op(
            f"S{i}", stream="S", kind="link:nic", work=1e6, collective=True, slot=("DI", i % 2)
        )

    dispatch(0)
    for i in range(chunks):
        if i + 1 < chunks:
            dispatch(i + 1)
        di, do = ("DI", i % 2), ("DO", i % 2)
        graph.op(f"C{i}", stream="C", kind="gemm:tf32", work=5e9, reads=di, slot=do)
        graph.op(f"R{i}", stream="R", kind="link:nic", work=1e6, collective=True, reads=do)
        graph.op(f"O{i}", stream="O", kind="copy", work=1e6, reads=di)
    return graph


def run() -> Iterator[dict[str, Any]]:
    """One row for each of the two sizes; value is the median of 15 calls in seconds."""
    cases = [
        ("simulate 1,000 ops on 1 rank", pipeline(250), "<= 0.01"),
        ("simulate 200 ops on each of 64 ranks", [pipeline(50) for _ in range(64)], "<= 1"),
    ]
    profile = HardwareProfile.load("dgx-a100-8x8")
    for name, graphs, must in cases:
        timing = measure(lambda graphs=graphs: simulate(graphs, profile), rounds=15, clock="cpu")
        notes = f"CPU time, median of 15, interquartile range {timing.iqr_s:.2g} s"
        variant = "septet_shared.streams"
        yield bench_row(name, variant, timing.median_s, "s", must=must, notes=notes, threads=1)
