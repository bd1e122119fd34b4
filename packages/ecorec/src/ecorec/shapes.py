"""The shape of a tensor-train table: factors of its rows, factors of its columns, ranks."""

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index, mul
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

DTYPES = (torch.float32, torch.float64)

# The cost model of the C++ kernels: one thread of a CPU, float32, fitted to the steps of 36 shapes
# within 13 % (root mean square). `shape_search.suggest` minimises with it; what counts are ratios.
GFLOP_S = 60.0
LANES = 8  # columns that one instruction multiplies; a product of fewer costs as many
ROW_NS = 40.0  # of a row beside its arithmetic: sorting, gathering, adding to its bags
PRODUCT_GB_S = 75.0  # a row reads its pair's product from the cache

Number = TypeVar("Number", float, NDArray[np.float64])
CoreShapes = tuple[tuple[int, int, int, int], ...]  # [p_k, r_(k-1), q_k, r_k] of each core


@dataclass(frozen=True)
class TTSpec:
    """A table of N rows and D columns, held as d cores [p_k, r_(k-1), q_k, r_k] with r_0 = r_d = 1.

    Row i has the digits (i_1, ..., i_d) in the mixed radix p, the last fastest; column j likewise
    over q. Element (i, j) is the product of the r_(k-1) x r_k matrices core_k[i_k, :, j_k, :].

    Args:
        num_embeddings: N.
        embedding_dim: D.
        p: d factors of the rows, product >= N; d is 2, 3 or 4.
        q: d factors of the columns, product >= D.
        ranks: the d - 1 inner ranks. A rank above what its unfolding can have is clipped, with one
            warning that gives both.
        dtype: torch.float32 or torch.float64.

    Raises:
        ValueError: a number is below 1, the lengths do not fit, or p, q do not cover N, D.
        TypeError: another dtype, or a factor or rank that is no integer.

    Source: TT-Rec, MLSys 2021, section 3; the index order is the one of its released code.
    """

    num_embeddings: int
    embedding_dim: int
    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("p", "q", "ranks"):
            object.__setattr__(self, name, tuple(index(n) for n in getattr(self, name)))
        check_dtype(self.dtype)
        d = len(self.p)
        if d not in (2, 3, 4):
            raise ValueError(f"p must have 2, 3 or 4 factors; got {self.p}")
        if len(self.q) != d or len(self.ranks) != d - 1:
            raise ValueError(
                f"p, q and ranks must have d, d and d - 1 numbers; "
                f"got {self.p}, {self.q}, {self.ranks}"
            )
        for name in ("num_embeddings", "embedding_dim"):
            check_positive(name, getattr(self, name))
        for name in ("p", "q", "ranks"):
            for number in getattr(self, name):
                check_positive(f"every number of {name}", number)
        for factors, total, factors_name, total_name in (
            (self.p, self.num_embeddings, "p", "num_embeddings"),
            (self.q, self.embedding_dim, "q", "embedding_dim"),
        ):
            if math.prod(factors) < total:
                raise ValueError(
                    f"the product of {factors_name} must be at least {total_name} = {total}; "
                    f"got {factors} = {math.prod(factors)}"
                )
        possible = largest_ranks(self.p, self.q)
        clipped = tuple(map(min, self.ranks, possible))
        if clipped != self.ranks:
            warnings.warn(
                f"ranks {self.ranks} are above the limits {possible} of p = {self.p}, "
                f"q = {self.q}; using {clipped}",
                stacklevel=callers_level(),
            )
            object.__setattr__(self, "ranks", clipped)

    @property
    def core_shapes(self) -> CoreShapes:
        """The shapes [p_k, r_(k-1), q_k, r_k] of the cores."""
        ranks = (1, *self.ranks, 1)
        return tuple(zip(self.p, ranks[:-1], self.q, ranks[1:], strict=True))

    @property
    def num_parameters(self) -> int:
        """The number of elements of all cores."""
        return sum(math.prod(shape) for shape in self.core_shapes)

    @property
    def bytes(self) -> int:
        """The bytes of all cores."""
        return self.num_parameters * self.dtype.itemsize

    @property
    def dense_bytes(self) -> int:
        """The bytes of the [N, D] table that the cores stand for, in the same dtype."""
        return self.num_embeddings * self.embedding_dim * self.dtype.itemsize

    @property
    def compression(self) -> float:
        """How many times fewer bytes the cores have than the dense table."""
        return self.dense_bytes / self.bytes

    def flops(self, uniques: int, front_pairs: int, back_pairs: int | None = None) -> int:
        """Floating-point operations of a forward: two for each multiply-add, no bag reduction.

        Args:
            uniques: U, different rows of the batch.
            front_pairs: F, different (i_1, i_2); not used when d = 2.
            back_pairs: K, different (i_(d-1), i_d). When given, the result is that of the cheaper
                direction (first core first, or last core first); else of first core first.

        When d = 4, triples are taken to be as many as the uniques or as the product of their
        three factors, whichever is less: an upper bound.
        """

        def chain(shapes: CoreShapes, pairs: int) -> int:
            d, products = len(shapes), [pairs, uniques]
            if d == 4:
                products.insert(1, min(uniques, math.prod(p for p, *_ in shapes[:3])))
            return chain_flops(shapes, products[-(d - 1) :])

        front = chain(self.core_shapes, front_pairs)
        if back_pairs is None:
            return front
        return min(front, chain(mirrored(self.core_shapes), back_pairs))

    def explain(self) -> str:
        """Lines for people: the shape, the bytes, and what a row and a front pair cost."""
        cores = " ".join("x".join(map(str, shape)) for shape in self.core_shapes)
        *before, last = self.q
        lines = [
            f"{self.num_embeddings:,} x {self.embedding_dim} rows as p = {self.p}, q = {self.q}, "
            f"ranks = {self.ranks}: cores {cores}",
            f"{self.bytes:,} bytes instead of {self.dense_bytes:,}: {self.compression:,.1f} times "
            f"fewer",
            f"each different row: {self.flops(1, 0):,} FLOPs, about "
            f"{row_ns(math.prod(before), self.ranks[-1], last):.0f} ns",
        ]
        if len(self.p) > 2:
            pair = product_ns(self.q[0] * self.q[1], *self.ranks[:2])
            lines.append(
                f"each different front pair: {self.flops(0, 1):,} FLOPs, about {pair:.0f} ns"
            )
        lines.append(
            f"(a forward on one CPU thread: {GFLOP_S:g} GFLOP/s on columns padded to {LANES}, "
            f"{ROW_NS:g} ns a row, products read at {PRODUCT_GB_S:g} GB/s)"
        )
        if self.bytes >= self.dense_bytes:
            lines.append("not smaller than the dense table: lower the ranks, or use that")
        return "\n".join(lines)


def product_ns(columns: Number, left: Number, right: Number) -> Number:
    """Predicted time of one product of a prefix with a core: [columns, left] by [left, right]."""
    return 2 * padded(columns) * left * right / GFLOP_S


def row_ns(columns: Number, rank: Number, last: Number) -> Number:
    """Predicted time of one row: the product [columns, rank] by a slice [rank, last]."""
    read_bytes = 4 * padded(columns) * rank
    return ROW_NS + read_bytes / PRODUCT_GB_S + product_ns(columns, rank, last)


def default_spec(
    num_embeddings: int,
    embedding_dim: int,
    ranks: int | Sequence[int] = 32,
    dtype: torch.dtype = torch.float32,
) -> TTSpec:
    """A TTSpec whose last row factor is long, so that a batch has few different prefixes.

    Args:
        num_embeddings: N.
        embedding_dim: D.
        ranks: one rank for three cores, or the d - 1 ranks of d cores.
        dtype: of the cores.

    The first d - 1 row factors are equal, and such that the last two cores have about equally
    many parameters. The column factors are nearly equal, with up to a quarter of padding where D
    has no good factors (D = 7 becomes 2 * 2 * 2; the padding is never seen).
    """
    check_positive("num_embeddings", num_embeddings)
    check_positive("embedding_dim", embedding_dim)
    if not isinstance(ranks, Sequence):
        ranks = (index(ranks), index(ranks))
    for rank in ranks:
        check_positive("every rank", rank)
    d = len(ranks) + 1
    if d not in (2, 3, 4):
        raise ValueError(f"ranks must be one number or 1, 2 or 3 of them; got {tuple(ranks)}")
    q = column_factors(embedding_dim, d)
    left = (1, *ranks)[d - 2]
    # p_(d-1) * left * q_(d-1) * r = p_d * r * q_d with p_d = N / p_(d-1)^(d-1)
    short = max(1, round((num_embeddings * q[-1] / (q[-2] * left)) ** (1 / d)))
    long = -(-num_embeddings // short ** (d - 1))
    p = (short,) * (d - 1) + (long,)
    return TTSpec(num_embeddings, embedding_dim, p, q, tuple(ranks), dtype)


def largest_ranks(p: Sequence[int], q: Sequence[int]) -> tuple[int, ...]:
    """The greatest rank that each of the d - 1 unfoldings can have."""
    sizes = [pk * qk for pk, qk in zip(p, q, strict=True)]
    left = list(accumulate(sizes, mul))
    right = list(accumulate(reversed(sizes), mul))[::-1]
    return tuple(map(min, left[:-1], right[1:]))


def chain_flops(shapes: CoreShapes, products: Sequence[int]) -> int:
    """FLOPs of products that extend prefixes core by core.

    Args:
        shapes: of the d cores, in the order in which they are multiplied.
        products: for k = 2 ... d, the different prefixes of k digits; the last are the rows.
    """
    columns, flops = shapes[0][2], 0
    for (_, left, q, right), count in zip(shapes[1:], products, strict=True):
        columns *= q
        flops += 2 * count * columns * left * right
    return flops


def mirrored(shapes: CoreShapes) -> CoreShapes:
    """The cores as they look from the last to the first."""
    return tuple((p, right, q, left) for p, left, q, right in reversed(shapes))


def column_factors(columns: int, d: int) -> tuple[int, ...]:
    """d nearly equal factors of D, ascending, with up to a quarter of padding where D has none."""
    candidates = (
        factors
        for padded in range(columns, columns + columns // 4 + 2)
        for factors in _sorted_factorisations(padded, d, smallest=1)
    )
    return min(candidates, key=lambda factors: (math.prod(factors) * sum(factors), factors))


def check_positive(name: str, number: int) -> None:
    """Raises ValueError when the number is below 1."""
    if number < 1:
        raise ValueError(f"{name} must be at least 1; got {number}")


def check_dtype(dtype: torch.dtype) -> None:
    """Raises TypeError when cores cannot have this dtype."""
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be torch.float32 or torch.float64; got {dtype}")


def callers_level() -> int:
    """The `stacklevel` of a warning that shows the line which called into this package."""
    # `dataclasses.replace` makes specs, too, and `no_grad` wraps what does.
    inside = (__name__.split(".")[0], "dataclasses", "torch.utils._contextlib")
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


def padded(columns: Number) -> Number:
    """Columns as the kernels' lanes take them."""
    return -(-columns // LANES) * LANES


def _sorted_factorisations(number: int, d: int, smallest: int) -> list[tuple[int, ...]]:
    if d == 1:
        return [(number,)] if number >= smallest else []
    return [
        (first, *rest)
        for first in range(smallest, int(number ** (1 / d) + 1e-9) + 1)
        if number % first == 0
        for rest in _sorted_factorisations(number // first, d - 1, first)
    ]
