"""Conversion of dense tables by TT-SVD: what it loses, and whether it says so.

Paper: EcoRec trains tensor trains from scratch and reports nothing of this.
Counted here: the relative error that `tt_svd.decompose` reports; the true one, from rows multiplied
out in float64 by `reference`; and the identity of TT-SVD, that the squares of what the truncations
take away add up to the squared error. Of four tables at equal rank:
  trained    an nn.Embedding, trained by SGD on ratings of a made-up catalogue, whose ids enumerate
             the attributes of its articles (brand, model, colour)
  shuffled   the same table with its ids permuted: what random labels as ids leave of the structure
  noise      independent normal numbers
  exact      a table of just this rank, in float32
"""

import math
import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ecorec import reference
from ecorec.initialisers import match_normal
from ecorec.shapes import TTSpec, check_positive, default_spec
from ecorec.tt_svd import decompose
from septet_shared import ranks
from septet_shared.experiment import Claim, Rows, Sweep, progress
from septet_shared.memory_pool import track_peak
from septet_shared.profiling import bench_row

NAME = "conversion"
TITLE = "TT-SVD of trained, shuffled, random and exact tables"
SCALES = {
    "smoke": Sweep(p=[10, 20, 100], q=[2, 2, 4], ranks=[4]),
    "cpu": Sweep(p=[40, 40, 625], q=[2, 2, 4], ranks=[8, 16]),
}
PAPER: list[dict[str, Any]] = []
FIGURES = ("reported_error", "true_error", "identity_error")

# The catalogue: article = (brand * MODELS + model) * COLOURS + colour.
MODELS, COLOURS = 100, 10
RATINGS_PER_ARTICLE = 40
BATCH = 65_536
LEARNING_RATE = 0.05
# Standard deviations of what a brand, a model, a colour and the article itself are liked for.
WEIGHTS = (1.0, 0.7, 0.5, 0.2)
NOISE = 0.1
TIMEOUT_S = 1800.0

# Said, because torch warns when nobody says whether sparse gradients are checked.
_sparse: Any = torch.sparse  # untyped in torch


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """A row for each rank and table; the factors multiply to the table's size: no padding."""
    N, D = math.prod(sweep.p), math.prod(sweep.q)
    generator = torch.Generator().manual_seed(0)
    trained = trained_table(N, D, generator)
    tables = {
        "trained": trained,
        "shuffled": trained[torch.randperm(N, generator=generator)],
        "noise": torch.randn(N, D, generator=generator),
    }
    for rank in sweep.ranks:
        spec = TTSpec(N, D, sweep.p, sweep.q, (rank,) * (len(sweep.p) - 1))
        for name, table in (*tables.items(), ("exact", table_of_rank(spec, 0.0, seed=1))):
            _, cores, report = decompose(table, spec=spec)
            squares = sum(lost**2 for lost in report.per_unfolding)
            yield {
                "table": name,
                "rank": rank,
                "rows": N,
                "dim": D,
                "compression": spec.compression,
                "reported_error": report.relative_error,
                "true_error": _true_error(table, cores),
                "identity_error": abs(squares / report.absolute_error**2 - 1),
                "kind": "counted",
            }


def claims(rows: Rows) -> Iterator[Claim]:
    """The same at every scale: nothing here depends on the machine."""
    off = max(abs(row["reported_error"] / row["true_error"] - 1) for row in rows)
    yield Claim("the reported error is the true one within 0.1 %", off <= 1e-3, f"{off:.1e}")
    exact = rows.max("true_error", table="exact")
    yield Claim("a table of exact rank loses less than 1e-5", exact < 1e-5, f"{exact:.1e}")
    lossy = [row for row in rows if row["table"] != "exact"]  # there only rounding is left
    off = max(row["identity_error"] for row in lossy)
    yield Claim("the squares of the truncations add up to the error's", off <= 1e-3, f"{off:.1e}")
    for other in ("noise", "shuffled"):
        most = rows.ratio("true_error", {"table": "trained"}, {"table": other}, by="rank").max(
            "ratio"
        )
        text = f"the trained table loses less than the {other} one at equal rank"
        yield Claim(text, most < 0.95, f"at most {most:.3f} times its error")


def plot(rows: Rows, ax: Any) -> None:
    """Relative error against rank, a line for each table that loses something."""
    for table in ("noise", "shuffled", "trained"):
        found = rows.where(table=table)
        ax.plot(found.column("rank"), found.column("true_error"), marker="o", label=table)
    ax.set(xlabel="rank", ylabel="relative error", ylim=(0, 1.05))
    ax.legend()


def trained_table(articles: int, dim: int, generator: torch.Generator) -> Tensor:
    """[articles, dim] float32 weights of an nn.Embedding after training.

    A rating is the dot product of a customer's tastes (normal numbers) with what an article is
    liked for (the sum of what its brand, its model, its colour and itself are liked for), and
    noise. The loss is the squared error.
    """
    models = torch.randn(MODELS, dim, generator=generator)
    colours = torch.randn(COLOURS, dim, generator=generator)
    brands = torch.randn(-(-articles // (MODELS * COLOURS)), dim, generator=generator)
    own = torch.randn(articles, dim, generator=generator)
    embedding = nn.Embedding(articles, dim, sparse=True)
    with torch.no_grad():
        embedding.weight.normal_(0, 0.01, generator=generator)
    optimiser = torch.optim.SGD(embedding.parameters(), lr=LEARNING_RATE)
    batch = min(BATCH, articles)
    for _ in progress(RATINGS_PER_ARTICLE * articles // batch, "training a dense table"):
        article = torch.randint(articles, (batch,), generator=generator)
        tastes = torch.randn(batch, dim, generator=generator)
        liked_for = (
            WEIGHTS[0] * brands[article // (MODELS * COLOURS)]
            + WEIGHTS[1] * models[article // COLOURS % MODELS]
            + WEIGHTS[2] * colours[article % COLOURS]
            + WEIGHTS[3] * own[article]
        )
        rating = (tastes * liked_for).sum(1) + NOISE * torch.randn(batch, generator=generator)
        loss = (rating - (tastes * embedding(article)).sum(1)).square().sum() / 2
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        with _sparse.check_sparse_tensor_invariants(False):
            optimiser.step()
    return embedding.weight.detach()


def table_of_rank(spec: TTSpec, noise: float, seed: int) -> Tensor:
    """[N, D] float32: a table of unit variance of the ranks of `spec` (d = 3), and normal noise.

    Cost: r_1 / (p_1 q_1) of the table besides it.
    """
    generator = torch.Generator().manual_seed(seed)
    first, second, last = match_normal(spec, generator=generator)
    rest = torch.einsum("arjs,bslo->rabjl", second, last).flatten(3).flatten(1, 2)
    table = torch.empty(spec.num_embeddings, spec.embedding_dim)
    for block, head in zip(torch.split(table, rest.shape[1]), first[:, 0], strict=False):
        rows = torch.einsum("jr,rml->mjl", head, rest).flatten(1)
        block.copy_(rows[: len(block), : spec.embedding_dim])
        if noise:
            block.add_(torch.randn(block.shape, generator=generator), alpha=noise)
    return table


def bench_rows(rows: int, dim: int, rank: int, threads: int = 2) -> Iterator[dict[str, Any]]:
    """Rows seconds, extra_resident and relative_error of one conversion, in a fresh process.

    The table is one of exact rank, with noise of a tenth of its standard deviation. extra_resident
    is the growth of the process's peak memory over its state before, in which the table stands.

    Raises:
        ValueError: a number is below 1.
        RankError: the process failed, for lack of memory say.

    Cost: 4 * rows * dim bytes; 10,000,000 x 32 took about 45 s on two cores, half of it to make
    the table.
    """
    for name, number in (("rows", rows), ("dim", dim), ("rank", rank), ("threads", threads)):
        check_positive(name, number)
    return _bench_rows(rows, dim, rank, threads)


def _bench_rows(rows: int, dim: int, rank: int, threads: int) -> Iterator[dict[str, Any]]:
    (found,) = ranks.run(
        _measure, 1, rows, dim, rank, threads_per_rank=threads, timeout_s=TIMEOUT_S
    )
    variant = f"{rows} x {dim}, R={rank}"
    promised = (rows, dim, rank) == (10_000_000, 32, 16)
    figures: list[tuple[str, str, str | None, Literal["measured", "counted"], str]] = [
        ("seconds", "s", "< 60", "measured", f"{4 * rows * dim:,} bytes to {found['bytes']:,}"),
        ("extra_resident", "B", "< 2e9", "measured", found["notes"]),
        ("relative_error", "", None, "counted", f"the noise has {NOISE} of the standard deviation"),
    ]
    for name, unit, bound, kind, notes in figures:
        yield bench_row(
            name,
            variant,
            found[name],
            unit,
            must=bound if promised else None,
            kind=kind,
            notes=notes,
            threads=threads,
        )


def _measure(own: ranks.Ranks, rows: int, dim: int, rank: int) -> dict[str, Any]:
    spec = default_spec(rows, dim, rank)
    table = table_of_rank(spec, NOISE, seed=0)
    with track_peak() as peak:
        start = time.perf_counter()
        report = decompose(table, spec=spec)[2]
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "extra_resident": peak.resident_bytes,
        "relative_error": report.relative_error,
        "bytes": report.bytes,
        "notes": peak.notes,
    }


def _true_error(table: Tensor, cores: list[Tensor]) -> float:
    apart, whole = 0.0, 0.0
    for rows in torch.split(torch.arange(len(table)), 8192):
        part = table[rows].double()
        apart += float((part - reference.rows(cores, rows, table.shape[1])).square().sum())
        whole += float(part.square().sum())
    return math.sqrt(apart / whole)
