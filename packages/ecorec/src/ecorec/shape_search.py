"""The shape of a table whose training step is predicted to take least time.

A batch of rows that share their first digits shares the products of the first cores. Short first
factors and a long last one make such prefixes few, at no more parameters than factors that are all
alike; so shapes are searched for the batch that they are to serve.
Source: the cost model is our own; the products it counts are those of EcoRec, SC 2024.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, product
from operator import index

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .shapes import (
    TTSpec,
    check_positive,
    column_factors,
    largest_ranks,
    product_ns,
    row_ns,
)

Floats = NDArray[np.float64]
DEFAULT_RANK = 32
FLOAT_BYTES = 4
MOST_PADDING = 1.05  # rows that the factors address, over the rows of the table
LEAST_SHARE = 1 / 3  # of the near-cubic shape's parameters
ZIPF_EXPONENT = 1.05
STEP_FORWARDS = 3  # a backward multiplies twice what its forward does
PARAMETER_NS = 1.1  # of a step: gradient cleared, summed and read, core read and written
AS_FAST = 1.04  # closer predictions are no difference
STEP_OF_FACTORS = 1.05
COUNTED_PREFIXES = 40
PADDED_COLUMNS = 3


def suggest(
    num_embeddings: int,
    embedding_dim: int,
    *,
    rank: int | Sequence[int] | None = None,
    max_bytes: int | None = None,
    ndim: int = 3,
    lookups: int = 65536,
    counts: ArrayLike | None = None,
) -> TTSpec:
    """The float32 TTSpec of an [N, D] table that trains fastest for its bytes, by a cost model.

    Args:
        num_embeddings: N.
        embedding_dim: D.
        rank: one rank for all, or the ndim - 1 of them; 32 when neither this nor max_bytes is
            given. Ranks above what their unfolding can have are clipped in silence.
        max_bytes: the most that the cores may take. Without `rank`, the rank is the greatest one
            with which `near_cubic` fits.
        ndim: d, the number of cores: 2, 3 or 4.
        lookups: V, lookups of the batches that the table is to serve.
        counts: how often each row is looked up: [N] numbers, or [n, 2] pairs (row, number) of
            different rows. Expected different rows and prefixes are then
            sum(1 - (1 - share)^V) over rows or prefixes (counted for 40 prefix lengths, a power
            law between). Without it the rows of a batch are those of a Zipf law of exponent 1.05
            over N, and its prefixes as many as could be: the rows or the possible prefixes,
            whichever are fewer.

    Time of a step = 3 * (each different prefix's product and each different row, at the rates of
    `shapes`, which `TTSpec.explain` prints) + 1.1 ns for each parameter. Products start at the
    first core; of three cores, a row's product is taken for that of the dearer direction. Of the
    shapes within 4 % of the least time, the one with the fewest parameters is taken.

    Searched: row factors whose product is at most 5 % above N, the first d - 1 within a factor
    of two of each other (one of 1 would leave its core a single slice, and threads nothing to
    share); all ordered column factors of D and, where D has a prime factor above 5, of the first
    three numbers above it that have none, at most a quarter above. With `rank`, the result has no
    more parameters than `near_cubic` of that rank. It never has fewer than a third of those,
    which would starve the model, unless max_bytes asks for it. Where nothing else fits, as with
    ranks of 1 or tables of a few rows, it is `near_cubic` itself, whatever its padding.

    Raises:
        ValueError: a number is below 1, ndim is not 2, 3 or 4, as many ranks as do not fit it,
            counts of another shape, negative, all 0 or of rows outside [0, N); or no shape fits
            max_bytes, with the bytes of the smallest.

    Cost: tens of ms at any N; with counts, 40 passes over the rows that were looked up.
    """
    for name, number in (
        ("num_embeddings", num_embeddings),
        ("embedding_dim", embedding_dim),
        ("lookups", lookups),
    ):
        check_positive(name, index(number))
    if max_bytes is not None:
        check_positive("max_bytes", index(max_bytes))
    if ndim not in (2, 3, 4):
        raise ValueError(f"ndim must be 2, 3 or 4; got {ndim}")
    if rank is None and max_bytes is not None:
        ranks = _largest_cubic_ranks(num_embeddings, embedding_dim, ndim, max_bytes)
    else:
        ranks = _as_ranks(DEFAULT_RANK if rank is None else rank, ndim)
    cubic = near_cubic(num_embeddings, embedding_dim, rank=ranks, ndim=ndim)

    most = math.inf if max_bytes is None else max_bytes // FLOAT_BYTES
    least = LEAST_SHARE * min(cubic.num_parameters, most)
    if rank is not None or max_bytes is None:
        most = min(most, cubic.num_parameters)
    batch = (
        _zipf_batch(num_embeddings, lookups)
        if counts is None
        else _counted_batch(num_embeddings, lookups, counts)
    )
    found = _fastest(_candidates(num_embeddings, embedding_dim, ranks), batch, least, most)
    if found is not None:
        return _clipped(num_embeddings, embedding_dim, *found, ranks)
    if cubic.num_parameters <= most:
        return cubic
    raise ValueError(
        f"max_bytes must be at least {_least_bytes(num_embeddings, embedding_dim, ranks):,} for "
        f"{num_embeddings} x {embedding_dim} in {ndim} cores of rank {ranks[0]}; got {max_bytes}"
    )


def near_cubic(
    num_embeddings: int, embedding_dim: int, *, rank: int | Sequence[int] = 32, ndim: int = 3
) -> TTSpec:
    """The float32 TTSpec whose row factors are all near N^(1/d), its column factors near D^(1/d).

    What tensor-train tables are given elsewhere (TT-Rec, MLSys 2021): the yardstick of `suggest`.

    Args:
        num_embeddings: N.
        embedding_dim: D.
        rank: one rank for all, or the ndim - 1 of them; clipped in silence.
        ndim: d, 2, 3 or 4.

    Raises:
        ValueError: a number is below 1, or as many ranks as do not fit ndim.
    """
    ranks = _as_ranks(rank, ndim)
    check_positive("num_embeddings", num_embeddings)
    check_positive("embedding_dim", embedding_dim)
    p, rest = [], num_embeddings
    for cores_left in range(ndim, 0, -1):
        factor = round(rest ** (1 / cores_left))
        factor += factor**cores_left < rest
        p.append(factor)
        rest = -(-rest // factor)
    q = column_factors(embedding_dim, ndim)
    return _clipped(num_embeddings, embedding_dim, tuple(p), q, ranks)


@dataclass(frozen=True)
class _Batch:
    """Expected different rows of a batch, and different values of row // tail for any tails."""

    uniques: float
    prefixes: Callable[[Floats], Floats]


def _zipf_batch(num_embeddings: int, lookups: int) -> _Batch:
    edges = np.geomspace(0.5, num_embeddings + 0.5, 300)  # of classes of ranks
    shares = -np.diff(edges ** (1 - ZIPF_EXPONENT))
    sizes = np.diff(edges)
    found = sizes * _chance_of_any(shares / shares.sum() / sizes, lookups)
    uniques = float(found.sum())
    return _Batch(uniques, lambda tail: np.minimum(uniques, np.ceil(num_embeddings / tail)))


def _counted_batch(num_embeddings: int, lookups: int, counts: ArrayLike) -> _Batch:
    rows, shares = _rows_and_shares(num_embeddings, counts)

    def expected(tail: int) -> float:
        prefix = rows // tail
        starts = np.flatnonzero(np.diff(prefix, prepend=-1))
        return float(_chance_of_any(np.add.reduceat(shares, starts), lookups).sum())

    def prefixes(tail: Floats) -> Floats:
        # The number falls smoothly with the length of the tail: counted at some, and between them
        # on a power law.
        counted = np.unique(tail)
        if len(counted) > COUNTED_PREFIXES:
            counted = np.unique(np.geomspace(counted[0], counted[-1], COUNTED_PREFIXES).round())
        values = np.array([expected(int(length)) for length in counted])
        between: Floats = np.exp(np.interp(np.log(tail), np.log(counted), np.log(values)))
        return between

    return _Batch(expected(1), prefixes)


def _rows_and_shares(num_embeddings: int, counts: ArrayLike) -> tuple[NDArray[np.int64], Floats]:
    """The rows that are looked up, ascending, and their shares of the lookups."""
    given = np.asarray(counts)
    if given.shape == (num_embeddings,):
        rows, numbers = np.arange(num_embeddings), given
    elif given.ndim == 2 and given.shape[1] == 2:
        rows, numbers = given[:, 0].astype(np.int64), given[:, 1]
        if (rows != given[:, 0]).any():
            raise ValueError("the rows of counts must be integers; some are not")
        order = np.argsort(rows)
        rows, numbers = rows[order], numbers[order]
        if not (np.diff(rows) > 0).all():
            raise ValueError("the rows of counts must differ; some occur twice")
        if len(rows) and not 0 <= rows[0] <= rows[-1] < num_embeddings:
            outside = rows[0] if rows[0] < 0 else rows[-1]
            raise ValueError(f"the rows of counts must be in [0, {num_embeddings}); got {outside}")
    else:
        raise ValueError(
            f"counts must have the shape [{num_embeddings}] or [n, 2]; got {list(given.shape)}"
        )
    numbers = numbers.astype(np.float64)
    total = numbers.sum()
    if not (np.isfinite(total) and total > 0 and (numbers >= 0).all()):
        raise ValueError(
            f"counts must be finite, not negative, and not all 0; their sum is {total}"
        )
    looked_up = numbers > 0
    return rows[looked_up], numbers[looked_up] / total


def _chance_of_any(share: Floats, lookups: int) -> Floats:
    """1 - (1 - share)^lookups."""
    below_one = np.minimum(share, 1 - 1e-12)  # log(0) would warn
    chance: Floats = -np.expm1(lookups * np.log1p(-below_one))
    return chance


@dataclass(frozen=True)
class _Candidates:
    """All pairs of row factors (first dimension) and column factors (second).

    p: d arrays [m, 1]. q: d arrays [1, n]. ranks: d + 1 arrays [m, n], the outer ones 1.
    """

    p: list[Floats]
    q: list[Floats]
    ranks: list[Floats]

    @property
    def parameters(self) -> Floats:
        """[m, n]."""
        total: Floats = np.zeros(1)
        for p, left, q, right in zip(self.p, self.ranks[:-1], self.q, self.ranks[1:], strict=True):
            total = total + p * left * q * right
        return total

    def step_ns(self, batch: _Batch) -> Floats:
        """[m, n] predicted times of a training step."""
        forward: Floats = np.zeros(1)
        columns = self.q[0]
        for k in range(1, len(self.p) - 1):
            columns = columns * self.q[k]
            products = batch.prefixes(math.prod(self.p[k + 1 :], start=np.ones(1)))
            forward = forward + products * product_ns(columns, self.ranks[k], self.ranks[k + 1])
        row = row_ns(columns, self.ranks[-2], self.q[-1])
        if len(self.p) == 3:  # small batches start at the last core, where other columns are padded
            front = product_ns(columns, self.ranks[2], self.q[2])
            back = product_ns(self.q[1] * self.q[2], self.ranks[1], self.q[0])
            row = row + np.maximum(0, back - front)
        forward = forward + batch.uniques * row
        return STEP_FORWARDS * forward + PARAMETER_NS * self.parameters


def _candidates(num_embeddings: int, embedding_dim: int, ranks: Sequence[int]) -> _Candidates:
    d = len(ranks) + 1
    p_table = np.array(_row_factors(num_embeddings, d), dtype=np.float64)
    q_table = np.array(
        [
            factors
            for columns in _padded_columns(embedding_dim)
            for factors in _ordered_factorisations(columns, d)
        ],
        dtype=np.float64,
    )
    p = [column[:, None] for column in p_table.T]
    q = [column[None, :] for column in q_table.T]
    sizes = [pk * qk for pk, qk in zip(p, q, strict=True)]
    inner = [
        np.minimum(
            np.minimum(rank, math.prod(sizes[:k], start=np.ones(1))),
            math.prod(sizes[k:], start=np.ones(1)),
        )
        for k, rank in enumerate(ranks, start=1)
    ]
    outer = np.ones((len(p_table), len(q_table)))
    return _Candidates(p, q, [outer, *inner, outer])


def _fastest(
    candidates: _Candidates, batch: _Batch, least: float, most: float
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """p and q of the smallest of the fastest with parameters in [least, most], if there is one."""
    parameters = candidates.parameters
    allowed = (parameters >= least) & (parameters <= most)
    if not allowed.any():
        return None
    time = np.where(allowed, candidates.step_ns(batch), np.inf)
    small = np.where(time <= AS_FAST * time.min(), parameters, np.inf)
    i, j = np.unravel_index(np.argmin(small), small.shape)
    return tuple(int(pk[i, 0]) for pk in candidates.p), tuple(int(qk[0, j]) for qk in candidates.q)


def _row_factors(rows: int, d: int) -> list[tuple[int, ...]]:
    """Candidates for p: the last factor covers what the others leave."""
    found = set()
    for base in _factor_sizes(math.ceil(rows ** (1 / d))):
        for multiples in product((1, 2), repeat=d - 1):
            first = tuple(base * multiple for multiple in multiples)
            last = -(-rows // math.prod(first))
            if math.prod(first) * last <= MOST_PADDING * rows:
                found.add((*first, last))
    return sorted(found)


def _factor_sizes(most: int) -> list[int]:
    """Integers from 1 to `most`, each about STEP_OF_FACTORS above the one before."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(max(sizes[-1] + 1, round(sizes[-1] * STEP_OF_FACTORS)))
    return sizes


def _padded_columns(columns: int) -> list[int]:
    if _is_smooth(columns):
        return [columns]
    above = filter(_is_smooth, range(columns + 1, columns + columns // 4 + 2))
    return [columns, *islice(above, PADDED_COLUMNS)]


def _is_smooth(number: int) -> bool:
    """Whether no prime factor is above 5."""
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


def _ordered_factorisations(number: int, d: int) -> list[tuple[int, ...]]:
    if d == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in _ordered_factorisations(number // first, d - 1)
    ]


def _as_ranks(rank: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    if ndim not in (2, 3, 4):
        raise ValueError(f"ndim must be 2, 3 or 4; got {ndim}")
    given = rank if isinstance(rank, Sequence) else (rank,) * (ndim - 1)
    ranks = tuple(index(number) for number in given)
    if len(ranks) != ndim - 1:
        raise ValueError(f"rank must be one number or ndim - 1 = {ndim - 1} of them; got {rank}")
    for number in ranks:
        check_positive("every rank", number)
    return ranks


def _clipped(
    num_embeddings: int,
    embedding_dim: int,
    p: tuple[int, ...],
    q: tuple[int, ...],
    ranks: Sequence[int],
) -> TTSpec:
    ranks = tuple(map(min, ranks, largest_ranks(p, q)))
    return TTSpec(num_embeddings, embedding_dim, p, q, ranks)


def _largest_cubic_ranks(
    num_embeddings: int, embedding_dim: int, ndim: int, max_bytes: int
) -> tuple[int, ...]:
    """The greatest rank with which `near_cubic` fits, or 1 where none does; by bisection."""

    def fits(rank: int) -> bool:
        spec = near_cubic(num_embeddings, embedding_dim, rank=rank, ndim=ndim)
        return spec.bytes <= max_bytes

    smallest = near_cubic(num_embeddings, embedding_dim, rank=1, ndim=ndim)
    low, high = 1, max(largest_ranks(smallest.p, smallest.q))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return (low,) * (ndim - 1)


def _least_bytes(num_embeddings: int, embedding_dim: int, ranks: Sequence[int]) -> int:
    candidates = _candidates(num_embeddings, embedding_dim, ranks)
    cubic = near_cubic(num_embeddings, embedding_dim, rank=ranks, ndim=len(ranks) + 1)
    return FLOAT_BYTES * min(int(candidates.parameters.min()), cubic.num_parameters)
