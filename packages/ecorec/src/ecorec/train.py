"""One training run per kind of table on MovieLens-100k: same model, batches and optimiser for all.

Kinds: `tt` (TTEmbeddingBag), `dense` (nn.EmbeddingBag), `qr` and `hash` (`compressors`, at no more
bytes than tt), `zero` (the table frozen at 0, which shows what the table is worth).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from septet_shared.experiment import progress
from septet_shared.profiling import bench_row

from .compressors import HashedEmbeddingBag, QREmbeddingBag
from .dlrm import DLRM
from .embedding import TTEmbeddingBag
from .movielens import FEATURES, TABLE_ROWS, Batch, Ratings
from .shapes import TTSpec

KINDS = ("tt", "dense", "qr", "hash", "zero")
EMBEDDING_DIM = 16
# Few short prefixes and a long last factor; chosen by validation AUC among shapes of >= 50x.
TT_SPEC = TTSpec(TABLE_ROWS, EMBEDDING_DIM, p=(20, 20, 2500), q=(2, 2, 4), ranks=(28, 28))
INIT_STD = 0.01
LEARNING_RATE = 0.02
BATCH = 256
THREADS = 1

# Said, because torch warns when nobody says whether sparse gradients (of `dense`) are checked.
_sparse: Any = torch.sparse  # untyped in torch


@dataclass(frozen=True)
class Run:
    """What one training run gave.

    test_auc, test_logloss: of the epoch with the best validation AUC (the earliest at a tie).
    best_epoch: that epoch, from 1. validation_auc: of every epoch. seconds: wall time of the
    training and of what it evaluated. logits: of the test part, [test] float32.
    """

    kind: str
    seed: int
    test_auc: float
    test_logloss: float
    best_epoch: int
    validation_auc: tuple[float, ...]
    embedding_bytes: int
    seconds: float
    logits: Tensor


class ZeroTable(nn.Module):
    """Bags of a table whose rows are all 0 and stay so; it needs no memory."""

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """[B, D] zeros for offsets [B + 1]."""
        return torch.zeros(len(offsets) - 1, EMBEDDING_DIM)


def make_table(kind: str, seed: int, spec: TTSpec = TT_SPEC) -> nn.Module:
    """The table of TABLE_ROWS x EMBEDDING_DIM of one of KINDS, entries N(0, INIT_STD^2).

    Args:
        kind: one of KINDS.
        seed: of the entries.
        spec: the shape of tt; qr and hash take as many rows as fit into its bytes.

    Raises:
        ValueError: an unknown kind.
    """
    check_kinds([kind])
    generator = torch.Generator().manual_seed(seed)
    if kind == "zero":
        return ZeroTable()
    if kind == "tt":
        return TTEmbeddingBag(
            TABLE_ROWS,
            EMBEDDING_DIM,
            spec=spec,
            mode="sum",
            include_last_offset=True,
            init_std=INIT_STD,
            generator=generator,
        )
    if kind in ("qr", "hash"):
        compressor = QREmbeddingBag if kind == "qr" else HashedEmbeddingBag
        return compressor(
            TABLE_ROWS,
            EMBEDDING_DIM,
            max_bytes=spec.bytes,
            init_std=INIT_STD,
            generator=generator,
        )
    weight = torch.empty(TABLE_ROWS, EMBEDDING_DIM).normal_(0, INIT_STD, generator=generator)
    return nn.EmbeddingBag.from_pretrained(
        weight, freeze=False, mode="sum", sparse=True, include_last_offset=True
    )


def train(ratings: Ratings, kind: str, *, epochs: int, seed: int, spec: TTSpec = TT_SPEC) -> Run:
    """A DLRM trained with Adagrad on one kind of table.

    Nothing depends on runs before: the numbers come from generators of this run's seed, which are
    the same for all kinds but for the table's own start.

    Args:
        ratings: from `movielens.load`.
        kind: one of KINDS.
        epochs: passes over the training part.
        seed: of weights, table and order of batches.
        spec: as in `make_table`.

    Runs on one thread. The same seed gives the same numbers.

    Raises:
        ValueError: an unknown kind, epochs < 1, or a part of the split with one label only.
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1; got {epochs}")
    with _one_thread():
        return _train(ratings, kind, epochs, seed, spec)


def train_rows(
    ratings: Ratings, kinds: Sequence[str], *, epochs: int, seeds: int, spec: TTSpec = TT_SPEC
) -> Iterator[dict[str, Any]]:
    """Rows auc, logloss, embedding_bytes, seconds, test_rows of each kind, kind after kind.

    `variant` is the kind, `value` the mean over the seeds 0 .. seeds - 1, `notes` each seed's.

    Raises:
        ValueError: an unknown or repeated kind, epochs or seeds < 1; before anything is trained.
    """
    check_kinds(kinds)
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"tables must differ; got {','.join(kinds)}")
    for name, number in (("epochs", epochs), ("seeds", seeds)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1; got {number}")
    return _rows(ratings, kinds, epochs, seeds, spec)


def check_kinds(kinds: Sequence[str]) -> None:
    """Raises ValueError when one is not in KINDS, or there is none."""
    for kind in kinds or [""]:
        if kind not in KINDS:
            raise ValueError(f"a table must be one of {', '.join(KINDS)}; got {kind!r}")


def auc(labels: Tensor, scores: Tensor) -> float:
    """The probability that a positive scores above a negative, ties counting one half.

    Args:
        labels: [n], 0 or 1.
        scores: [n], any order-preserving score.

    Raises:
        ValueError: only one of the labels occurs.
    """
    positive = labels.numpy() > 0.5
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        raise ValueError(
            f"labels must have both values for an AUC; got {positives} positive, "
            f"{negatives} negative"
        )
    _, place, ties = np.unique(scores.detach().numpy(), return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(ties) - (ties - 1) / 2  # from 1
    above = mean_rank[place][positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread inside: a step is many small operations, and the result then depends on no count.

    A second thread gains nothing here, and the two wait for each other where cores are shared.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(ratings: Ratings, kind: str, epochs: int, seed: int, spec: TTSpec) -> Run:
    start = time.perf_counter()
    table = make_table(kind, seed, spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DLRM(table, ratings.dense.shape[1], len(FEATURES), EMBEDDING_DIM)
    optimiser = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
    shuffle = torch.Generator().manual_seed(seed)
    validation, test = ratings.batch(ratings.validation), ratings.batch(ratings.test)
    validation_auc: list[float] = []
    logits = torch.empty(0)
    for epoch in progress(epochs, f"{kind} table, seed {seed}"):
        order = ratings.training[torch.randperm(len(ratings.training), generator=shuffle)]
        batches = ratings.batches(order, BATCH)
        with _sparse.check_sparse_tensor_invariants(False):
            for batch in progress(batches, f"epoch {epoch + 1} of {epochs}"):
                _step(model, optimiser, batch)
        validation_auc.append(auc(validation.labels, _logits(model, validation)))
        if validation_auc[-1] > max(validation_auc[:-1], default=-1.0):
            logits = _logits(model, test)
    return Run(
        kind=kind,
        seed=seed,
        test_auc=auc(test.labels, logits),
        test_logloss=float(
            F.binary_cross_entropy_with_logits(logits.double(), test.labels.double())
        ),
        best_epoch=1 + validation_auc.index(max(validation_auc)),
        validation_auc=tuple(validation_auc),
        embedding_bytes=sum(p.numel() * p.element_size() for p in table.parameters()),
        seconds=time.perf_counter() - start,
        logits=logits,
    )


def _step(model: DLRM, optimiser: torch.optim.Optimizer, batch: Batch) -> None:
    logits = model(batch.dense, batch.indices, batch.offsets)
    loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    optimiser.step()


@torch.no_grad()
def _logits(model: DLRM, batch: Batch) -> Tensor:
    logits: Tensor = model(batch.dense, batch.indices, batch.offsets)
    return logits


def _rows(
    ratings: Ratings, kinds: Sequence[str], epochs: int, seeds: int, spec: TTSpec
) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        runs = [train(ratings, kind, epochs=epochs, seed=seed, spec=spec) for seed in range(seeds)]
        figures: list[tuple[str, str, Literal["measured", "counted"], list[float]]] = [
            ("auc", "", "measured", [run.test_auc for run in runs]),
            ("logloss", "nats", "measured", [run.test_logloss for run in runs]),
            ("embedding_bytes", "B", "counted", [run.embedding_bytes for run in runs]),
            ("seconds", "s", "measured", [run.seconds for run in runs]),
            ("test_rows", "", "counted", [len(run.logits) for run in runs]),
        ]
        for name, unit, measured, values in figures:
            each = ", ".join(
                f"seed {run.seed}: {_plain(v)}" for run, v in zip(runs, values, strict=True)
            )
            mean = values[0] if len(set(values)) == 1 else sum(values) / len(values)
            yield bench_row(name, kind, mean, unit, kind=measured, notes=each, threads=THREADS)


def _plain(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
