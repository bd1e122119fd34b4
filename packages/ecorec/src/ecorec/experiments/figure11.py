"""Time of a training step on the largest tables, against the algorithms of FBTT and EL-Rec.

Paper: figure 11, the 28 largest tables on one GPU: EcoRec's step is 1.18 to 2.68 times as fast as
EL-Rec's and 3.9 to 16.6 times as fast as FBTT's, more with larger batches (result files of the
authors' artifact; its traces come with no package).
Measured here: forward and whole step (forward, backward, SGD) of TTEmbeddingBag, and of our ports
in torch operations of FBTT's algorithm (a chain of products for each lookup) and EL-Rec's (for each
different row) on near-cubic factors, on the largest tables of generated lookups with few enough
lookups. One thread; outputs of the ports are checked against the reference on their own cores.
Not reproduced: their CUDA kernels, so no ratio here stands for one of the paper.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ecorec import reference
from ecorec.embedding import TTEmbeddingBag
from ecorec.shape_search import near_cubic, suggest
from ecorec.step_benchmark import chain_of_lookups, chain_of_rows
from ecorec.traces import Batch, TableTrace, meta788
from septet_shared.experiment import Claim, Rows, Sweep, progress
from septet_shared.profiling import bench_row, compare

NAME = "figure11"
TITLE = "A training step on the largest tables, against the algorithms of FBTT and EL-Rec"
SCALES = {
    "smoke": Sweep(tables=2, batches=[1024], most_pooling=8, rank=32),
    "cpu": Sweep(tables=4, batches=[2048, 4096, 8192], most_pooling=12, rank=32),
    "gpu": Sweep(tables=28, batches=[2048, 8192, 32768, 131072], most_pooling=200, rank=32),
}
_BATCHES = [2048, 4096, 8192, 16384, 32768, 65536, 131072]
_TOTALS = {
    "ours": [93.9, 142.6, 214.1, 329.0, 524.8, 843.5, 1420.4],
    "el-rec": [110.4, 187.3, 320.1, 574.6, 1079.9, 2077.9, 3809.5],
    "fbtt": [370.0, 732.7, 1449.1, 2926.9, 5900.2, 11760.7, 23565.3],
}
PAPER = [
    {
        "name": "times as fast",
        "variant": peer,
        "batch": batch,
        "value": theirs / ours,
        "from": "figure 11, total time on one GPU, 28 tables",
    }
    for peer in ("el-rec", "fbtt")
    for batch, ours, theirs in zip(_BATCHES, _TOTALS["ours"], _TOTALS[peer], strict=True)
]
FIGURES = ("value",)
DIM = 32
LEARNING_RATE = 1e-4
PORT_LOOKUPS = 16_384  # that a port multiplies at once: it takes 37 KB for each
PORTS: dict[str, Callable[[Sequence[Tensor], Tensor], Tensor]] = {
    "fbtt": chain_of_lookups,
    "el-rec": chain_of_rows,
}


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Rows seconds of forward and step, summed over tables; and how many times as fast ours is."""
    few = [trace for trace in meta788() if 2 <= trace.pooling <= sweep.most_pooling]
    traces = sorted(few, key=lambda trace: -trace.num_embeddings)[: sweep.tables]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for batch in progress(sweep.batches, "figure11"):
            yield from _of_batch(traces, batch, sweep.rank)
    finally:
        torch.set_num_threads(threads)


def claims(rows: Rows) -> Iterator[Claim]:
    """Faster than both, at every size."""
    for peer in PORTS:
        ratios = rows.where(name="times as fast", variant=peer).column("value")
        yield Claim(
            f"a step is faster than that of {peer}'s algorithm at every batch",
            min(ratios) > 1,
            f"{min(ratios):.1f} to {max(ratios):.1f} times",
        )


def plot(rows: Rows, ax: Any) -> None:
    """Seconds of a step against samples of a batch."""
    for variant in ("ours", *PORTS):
        found = rows.where(name="step", variant=variant)
        ax.plot(found.column("batch"), found.column("value"), "o-", label=variant)
    ax.set(xscale="log", yscale="log", xlabel="samples of a batch", ylabel="seconds")
    ax.legend()


def _of_batch(traces: Sequence[TableTrace], samples: int, rank: int) -> Iterator[dict[str, Any]]:
    total: dict[tuple[str, str], float] = {}
    lookups = 0
    for trace in traces:
        batch = trace.batch(samples)
        lookups += len(batch.indices)
        for what, seconds in _of_table(trace, batch, rank).items():
            total[what] = total.get(what, 0.0) + seconds
    notes = f"{len(traces)} tables, {lookups:,} lookups, rank {rank}"
    for (name, variant), seconds in total.items():
        row = bench_row(name, variant, seconds, "s", threads=1, notes=notes)
        yield {"batch": samples, **row}
    for peer in PORTS:
        ratio = total["step", peer] / total["step", "ours"]
        row = bench_row("times as fast", peer, ratio, "", threads=1, notes=f"of a step; {notes}")
        yield {"batch": samples, **row}


def _of_table(trace: TableTrace, batch: Batch, rank: int) -> dict[tuple[str, str], float]:
    indices, offsets = batch
    gradient = torch.ones(len(offsets) - 1, DIM)
    spec = suggest(trace.num_embeddings, DIM, rank=rank, lookups=max(1, len(indices)))
    ours = TTEmbeddingBag(
        trace.num_embeddings, DIM, spec=spec, mode="sum", include_last_offset=True,
        optimizer="sgd", lr=LEARNING_RATE,
    )  # fmt: skip
    cubic = near_cubic(trace.num_embeddings, DIM, rank=rank)
    cores = [nn.Parameter(torch.randn(shape) / rank) for shape in cubic.core_shapes]
    optimiser = torch.optim.SGD(cores, lr=LEARNING_RATE)

    def step_of_ours() -> Tensor:
        output: Tensor = ours(indices, offsets)
        torch.autograd.backward(output, gradient)
        return output.detach()

    def forward_of(chain: Callable[..., Tensor]) -> Tensor:
        return _bags_of(chain, cores, indices, offsets)

    def step_of(chain: Callable[..., Tensor]) -> Tensor:
        optimiser.zero_grad()
        output = torch.zeros(len(offsets) - 1, DIM)
        for chosen, bags in _pieces(chain, indices, offsets):
            rows = chain(cores, chosen[:, None])
            torch.autograd.backward(rows, gradient[bags])
            output.index_add_(0, bags, rows.detach())
        optimiser.step()
        return output

    few = indices[:64]
    for chain in PORTS.values():
        expected = reference.rows([core.detach() for core in cores], few, DIM).float()
        torch.testing.assert_close(
            chain(cores, few[:, None]).detach(), expected, rtol=1e-4, atol=1e-5
        )
    seconds = {}
    for name, mine, theirs in (
        ("forward", lambda: ours(indices, offsets), forward_of),
        ("step", step_of_ours, step_of),
    ):
        calls: dict[str, Callable[[], object]] = {"ours": mine}
        for peer, chain in PORTS.items():
            calls[peer] = lambda theirs=theirs, chain=chain: theirs(chain)  # type: ignore[misc]
        with torch.set_grad_enabled(name == "step"):
            found = compare(calls, check=None, rounds=2)
        for variant, timing in found.timings.items():
            seconds[name, variant] = timing.median_s
    return seconds


def _pieces(
    chain: Callable[..., Tensor], indices: Tensor, offsets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """(indices, their bags): those of a port that keeps every lookup in pieces that fit."""
    bags = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    size = PORT_LOOKUPS if chain is chain_of_lookups else max(1, len(indices))
    yield from zip(torch.split(indices, size), torch.split(bags, size), strict=True)


def _bags_of(
    chain: Callable[..., Tensor], cores: Sequence[Tensor], indices: Tensor, offsets: Tensor
) -> Tensor:
    output = torch.zeros(len(offsets) - 1, DIM)
    for chosen, bags in _pieces(chain, indices, offsets):
        output.index_add_(0, bags, chain(cores, chosen[:, None]))
    return output
