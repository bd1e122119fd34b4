"""A training step beside the steps of other tables: `ecorec bench step`.

Peers: `torch-tt` is FBTT's algorithm, a chain of products for each lookup, and `torch-tt-unique`
EL-Rec's, a chain for each different row, both ours in torch operations on near-cubic factors;
`nn` is nn.EmbeddingBag(sparse=True) with SGD; `fbgemm-sgd` and `fbgemm-rowwise` are FBGEMM's
table-batched bags with exact SGD and row-wise Adagrad. Tables of the same content are compared by
their first output; tensor trains of another shape with `reference` on their own cores.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from septet_shared.experiment import progress
from septet_shared.profiling import Ratio, bench_row, compare

from . import reference
from .embedding import TTEmbeddingBag
from .shape_search import suggest
from .shapes import TTSpec

PEERS = ("torch-tt", "torch-tt-unique", "nn", "fbgemm-rowwise", "fbgemm-sgd")
LEARNING_RATE = 1e-3
Run = Callable[[], Tensor]


def step_rows(
    *,
    rows: int = 10_000_000,
    dim: int = 32,
    rank: int = 32,
    batch: int = 4096,
    pooling: int = 20,
    zipf: float = 1.05,
    threads: int = 1,
    peers: Sequence[str] = PEERS,
    rounds: int = 7,
) -> Iterator[dict[str, Any]]:
    """Rows `step` and `forward` against each peer, `preparation`, `parameters`, `flops`.

    Args:
        rows, dim, rank: of the table; its shape is `suggest`'s.
        batch, pooling: bags, and lookups of each.
        zipf: exponent of the batch (`hashed_zipf`).
        threads: of torch.
        peers: of PEERS. One that is not installed has a row without ratio that says so.
        rounds: interleaved, after two that are not measured.

    Raises:
        ValueError: an unknown peer, a number below 1, or one round; before anything is allocated.
    """
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"a peer must be one of {', '.join(PEERS)}; got {peer!r}")
    sizes = {"rows": rows, "dim": dim, "rank": rank, "batch": batch, "pooling": pooling}
    for name, number in {**sizes, "threads": threads, "rounds": rounds}.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1; got {number}")
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2; got {rounds}")
    return _Benchmark(rows, dim, rank, batch, pooling, zipf, threads, rounds).rows(peers)


def hashed_zipf(rows: int, lookups: int, exponent: float, seed: int = 0) -> Tensor:
    """Indices [lookups] int64: rank k of 1..N with probability ~ k^-exponent, row (k h + c) mod N.

    h = 2,654,435,761 and c = 12,345 scatter the ranks over the table.

    Cost: a float64 array of N numbers.
    """
    ranks = torch.arange(1, rows + 1, dtype=torch.float64)
    cumulated = ranks.pow_(-exponent).cumsum_(0)
    drawn = torch.rand(lookups, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    k = torch.searchsorted(cumulated, drawn * cumulated[-1]).clamp_(max=rows - 1) + 1
    return (k * 2_654_435_761 + 12_345) % rows


def cubic_spec(rows: int, dim: int, rank: int) -> TTSpec:
    """Near-cubic row factors, and column factors that grow: what FBTT and EL-Rec choose."""
    side = round(rows ** (1 / 3))
    while side**3 < rows:
        side += 1
    q = next(
        (a, b, dim // (a * b))
        for a in range(round(dim ** (1 / 3)), 0, -1)
        for b in range(round((dim / a) ** 0.5), 0, -1)
        if dim % (a * b) == 0
    )
    return TTSpec(rows, dim, (side, side, side), q, (rank, rank))


def chain_of_lookups(cores: Sequence[Tensor], input: Tensor) -> Tensor:
    """Sums of bags [B, D] for input [B, L], every lookup multiplied out by itself."""
    return _chains(cores, input.flatten()).view(*input.shape, -1).sum(1)


def chain_of_rows(cores: Sequence[Tensor], input: Tensor) -> Tensor:
    """Sums of bags [B, D] for input [B, L], every different row multiplied out by itself."""
    uniques, place = torch.unique(input, return_inverse=True)
    return nn.functional.embedding_bag(place, _chains(cores, uniques), mode="sum")


def _chains(cores: Sequence[Tensor], rows: Tensor) -> Tensor:
    slices = []
    for core in reversed(cores):
        slices.append(core[rows % core.shape[0]].flatten(2))  # [V, r_(k-1), q_k r_k]
        rows = rows // core.shape[0]
    product = slices.pop().view(len(slices[0]), cores[0].shape[2], -1)  # [V, q_1, r_1]
    for core in cores[1:]:
        product = torch.bmm(product, slices.pop()).view(len(product), -1, core.shape[3])
    return product.flatten(1)


class _Benchmark:
    def __init__(
        self,
        rows: int,
        dim: int,
        rank: int,
        batch: int,
        pooling: int,
        zipf: float,
        threads: int,
        rounds: int,
    ) -> None:
        self.threads, self.rounds, self.rank = threads, rounds, rank
        self.spec = suggest(rows, dim, rank=rank, lookups=batch * pooling)
        self.cubic = cubic_spec(rows, dim, rank)
        self.input = hashed_zipf(rows, batch * pooling, zipf).view(batch, pooling)
        self.gradient = torch.randn(batch, dim, generator=torch.Generator().manual_seed(1))
        self.variant = f"R={rank}"

    def rows(self, peers: Sequence[str]) -> Iterator[dict[str, Any]]:
        with _threads(self.threads):
            for peer in progress(list(peers), "ecorec bench step"):
                yield from self._against(peer)
            yield self._preparation()
        ours = self._ours("sgd")
        plan = ours.plan(self.input)
        counts = (
            f"{plan.uniques:,} different rows, {plan.front_pairs:,} different front pairs of "
            f"{plan.lookups:,} lookups; p = {self.spec.p}, q = {self.spec.q}"
        )
        yield bench_row(
            "parameters", self.variant, self.spec.bytes, "B", peer="nn",
            ratio=self.spec.compression, kind="counted", threads=self.threads,
            notes="times fewer bytes than the dense table",
        )  # fmt: skip
        yield bench_row(
            "flops", self.variant, plan.flops, "FLOP", kind="counted", threads=self.threads,
            notes=f"of a forward; {counts}",
        )  # fmt: skip

    def _ours(self, optimizer: str) -> TTEmbeddingBag:
        return TTEmbeddingBag(
            self.spec.num_embeddings,
            self.spec.embedding_dim,
            spec=self.spec,
            mode="sum",
            optimizer=optimizer,
            lr=LEARNING_RATE,
            generator=torch.Generator().manual_seed(self.rank),
        )

    def _against(self, peer: str) -> Iterator[dict[str, Any]]:
        missing = peer.startswith("fbgemm") and importlib.util.find_spec("fbgemm_gpu") is None
        if missing:
            notes = "fbgemm_gpu is not installed: pip install 'ecorec[peers]'"
            for name in ("step", "forward"):
                yield bench_row(
                    name, self.variant, None, "s", peer=peer, notes=notes, threads=self.threads
                )
            return
        ours = self._ours("slice_adagrad" if peer == "fbgemm-rowwise" else "sgd")
        forward, step = self._peer(peer, ours)
        runs: dict[str, tuple[Run, Run]] = {
            "step": (lambda: self._step(ours), step),
            "forward": (lambda: ours(self.input), forward),
        }
        for name, (mine, theirs) in runs.items():
            with torch.set_grad_enabled(name == "step"):
                check = None if peer.startswith("torch-tt") or name == "forward" else _same
                found = compare({"ours": mine, peer: theirs}, check=check, rounds=self.rounds)
            ratio: Ratio | None = None
            notes = f"{found.notes}, {self.rounds} rounds"
            if found.differences:
                notes = f"outputs differ: {found.differences[peer]}"
            else:
                ratio = found.ratio(peer, "ours")
                notes += f"; the peer takes {found.timings[peer].median_s * 1e3:.4g} ms"
            if peer.startswith("torch-tt"):
                notes += "; its outputs checked against the reference on its own cores"
            yield bench_row(
                name, self.variant, found.timings["ours"].median_s, "s", peer=peer, ratio=ratio,
                notes=notes, threads=self.threads,
            )  # fmt: skip

    def _step(self, ours: TTEmbeddingBag) -> Tensor:
        output: Tensor = ours(self.input)
        torch.autograd.backward(output, self.gradient)
        return output.detach()

    def _peer(self, peer: str, ours: TTEmbeddingBag) -> tuple[Run, Run]:
        if peer.startswith("torch-tt"):
            return self._tensor_train(
                chain_of_rows if peer.endswith("unique") else chain_of_lookups
            )
        with torch.no_grad():
            table = ours.to_dense().contiguous()
        if peer == "nn":
            return self._dense(table)
        return self._fbgemm(table, peer)

    def _tensor_train(self, chain: Callable[[Sequence[Tensor], Tensor], Tensor]) -> tuple[Run, Run]:
        generator = torch.Generator().manual_seed(self.rank)
        shapes = self.cubic.core_shapes
        cores = [torch.randn(shape, generator=generator) / self.rank**0.5 for shape in shapes]
        leaves = [nn.Parameter(core) for core in cores]
        optimiser = torch.optim.SGD(leaves, lr=LEARNING_RATE)
        few = self.input[:8]
        bags = reference.embedding_bag(
            cores, few, embedding_dim=self.spec.embedding_dim, mode="sum"
        )
        _same(chain(cores, few), bags.float())

        def step() -> Tensor:
            output = chain(leaves, self.input)
            optimiser.zero_grad()
            torch.autograd.backward(output, self.gradient)
            optimiser.step()
            return output.detach()

        return lambda: chain(leaves, self.input), step

    def _dense(self, table: Tensor) -> tuple[Run, Run]:
        dense = nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True)
        optimiser = torch.optim.SGD(dense.parameters(), lr=LEARNING_RATE)
        sparse: Any = torch.sparse

        def step() -> Tensor:
            output: Tensor = dense(self.input)
            optimiser.zero_grad()
            torch.autograd.backward(output, self.gradient)
            with sparse.check_sparse_tensor_invariants(False):
                optimiser.step()
            return output.detach()

        return lambda: dense(self.input), step

    def _fbgemm(self, table: Tensor, peer: str) -> tuple[Run, Run]:
        from fbgemm_gpu import split_embedding_configs as configs
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

        rules = configs.EmbOptimType
        bags = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(*table.shape, training.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
            optimizer=rules.EXACT_SGD if peer.endswith("sgd") else rules.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=1e-8,
        )
        bags.split_embedding_weights()[0].copy_(table)
        flat = self.input.flatten()
        offsets = torch.arange(0, len(flat) + 1, self.input.shape[1])

        def step() -> Tensor:
            output: Tensor = bags(flat, offsets)
            torch.autograd.backward(output, self.gradient)
            return output.detach()

        return lambda: bags(flat, offsets), step

    def _preparation(self) -> dict[str, Any]:
        from . import cpu_backend
        from .backend import Lookups

        ours = self._ours("sgd")
        flat, (bags, size) = self.input.flatten(), self.input.shape
        lookups = Lookups(flat, None, bags, size, None, "sum", False)
        parts: list[float] = []
        for turn in range(self.rounds + 2):
            begin = time.perf_counter()
            self._step(ours)
            middle = time.perf_counter()
            cpu_backend.start(self.spec, lookups, False, True, ours.max_workspace_bytes)
            if turn > 1:
                parts.append((time.perf_counter() - middle) / (middle - begin))
        parts.sort()
        return bench_row(
            "preparation", self.variant, parts[len(parts) // 2], "fraction", threads=self.threads,
            notes="of a step: sort, different rows, pairs, chunks",
        )  # fmt: skip


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _same(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest magnitude."""
    difference = (actual - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max(), f"they differ by {difference}"
