"""A training step and a forward of TTEmbeddingBag against the dense bag and a naive tensor train.

N = 10,000,000 rows of D = 32, 4,096 bags of 20 lookups, hashed Zipf 1.05, one thread. The step is
forward, backward and SGD; for the dense bag with sparse gradients. `torch-tt` is FBTT's algorithm
in torch operations: a chain of products for each lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ecorec import TTEmbeddingBag, TTSpec
from septet_shared.profiling import Comparison, bench_row, compare

ROWS, DIM, BAGS, POOLING, ZIPF = 10_000_000, 32, 4096, 20, 1.05
P, Q = (64, 64, 2500), (2, 4, 4)
LEARNING_RATE = 1e-3
ROUNDS = 7
THREADS = 1
THEIRS = "nn.EmbeddingBag(sparse=True)"


def run() -> Iterator[dict[str, Any]]:
    """Rows of step and forward at ranks 32 and 16, of parameter bytes, of the batch's prefixes."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        for rank in (32, 16):
            yield from _rows_of_rank(rank, hashed_zipf(BAGS * POOLING).view(BAGS, POOLING))
    finally:
        torch.set_num_threads(before)


def hashed_zipf(lookups: int) -> Tensor:
    """Rows [lookups]: the k-th of 1..N with probability ~ k^-1.05, scattered over the table."""
    ranks = torch.arange(1, ROWS + 1, dtype=torch.float64)
    cumulated = ranks.pow_(-ZIPF).cumsum_(0)
    drawn = torch.rand(lookups, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k = torch.searchsorted(cumulated, drawn * cumulated[-1]) + 1
    return (k * 2_654_435_761 + 12_345) % ROWS


def torch_tt(cores: Sequence[Tensor], input: Tensor) -> Tensor:
    """Sums of bags [B, D] for input [B, L], every lookup multiplied out by itself."""
    rest = input.flatten()
    slices = []
    for core in reversed(cores):
        slices.append(core[rest % core.shape[0]].flatten(2))  # [V, r_(k-1), q_k r_k]
        rest = rest // core.shape[0]
    product = slices.pop().view(len(slices[0]), cores[0].shape[2], -1)  # [V, q_1, r_1]
    for core in cores[1:]:
        product = torch.bmm(product, slices.pop()).view(len(product), -1, core.shape[3])
    return product.view(*input.shape, -1).sum(1)


def _rows_of_rank(rank: int, input: Tensor) -> Iterator[dict[str, Any]]:
    spec = TTSpec(ROWS, DIM, P, Q, (rank, rank))
    ours = TTEmbeddingBag(
        ROWS, DIM, spec=spec, mode="sum", generator=torch.Generator().manual_seed(rank)
    )
    cores = nn.ParameterList([core.detach().clone() for core in ours.cores])
    with torch.no_grad():
        table = ours.to_dense().contiguous()
    dense = nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True)
    chosen = torch.randn(BAGS, DIM, generator=torch.Generator().manual_seed(1))
    variant = f"R={rank}"
    forwards: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ours(input),
        THEIRS: lambda: dense(input),
        "torch-tt": lambda: torch_tt(list(cores), input),
    }
    with torch.no_grad():
        found = compare(forwards, check=_same, rounds=ROUNDS)
    yield from _ratios("forward", variant, found)
    steps = {
        "ours": _step(forwards["ours"], ours, chosen),
        THEIRS: _step(forwards[THEIRS], dense, chosen),
        "torch-tt": _step(forwards["torch-tt"], cores, chosen),
    }
    yield from _ratios("step", variant, compare(steps, check=_same, rounds=ROUNDS))
    pairs = torch.unique(input.flatten() // P[2])
    uniques = torch.unique(input)
    flops = spec.flops(len(uniques), len(pairs))
    counted = f"{len(uniques):,} different rows, {len(pairs):,} different front pairs"
    for name, value, unit, ratio, notes in (
        ("parameters", spec.bytes, "B", spec.compression, "times fewer bytes than the dense table"),
        ("flops", flops, "FLOP", None, f"of a forward; {counted} of {input.numel():,} lookups"),
    ):
        peer = THEIRS if ratio else None
        yield bench_row(
            name, variant, value, unit, peer=peer, ratio=ratio, kind="counted", notes=notes
        )


def _step(forward: Callable[[], Tensor], module: nn.Module, chosen: Tensor) -> Callable[[], Tensor]:
    """A step of SGD; returns the output from before the update."""
    optimiser = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def step() -> Tensor:
        output = forward()
        optimiser.zero_grad()
        output.backward(chosen)
        with torch.sparse.check_sparse_tensor_invariants(False):
            optimiser.step()
        return output.detach()

    return step


def _same(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest magnitude."""
    difference = (actual - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max(), f"they differ by {difference}"


def _ratios(name: str, variant: str, found: Comparison) -> Iterator[dict[str, Any]]:
    for row in found.rows(name):
        if row["peer"] is not None:
            peer_s = found.timings[row["peer"]].median_s
            notes = f"{row['notes']}; the peer takes {peer_s:.4g} s"
            yield {**row, "variant": variant, "notes": notes, "must": None}
