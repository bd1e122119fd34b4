"""TT-SVD: the tensor-train cores of a dense table, and the error that they leave.

The table is read a few times, chunk by chunk, and never copied: a pass fills one buffer of float64.
Padding (rows from N to prod p, columns from D to prod q) is free: it is guessed from the rest of
the table, in that buffer alone, so that a table of low rank stays one.
Source: Oseledets, Tensor-Train Decomposition, SIAM J. Sci. Comput. 33 (2011), algorithm 1.
"""

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .shapes import TTSpec, check_dtype, check_positive, default_spec, largest_ranks

CHUNK_BYTES = 32 << 20
# The eigenvectors of a Gram matrix of 1,024 rows take 0.3 s, those of one of 4,096 more than 10 s;
# the first few come sooner by subspace iteration.
GRAM_ROWS = 1024
MOST_PASSES = 16
# What float32 rounds away is below this part of the energy (the squared norm).
ROUNDING = 1e-13
SMALLEST_REL_ERROR = 1e-5


@dataclass(frozen=True)
class ErrorReport:
    """How far the table of the cores is from the dense one, in Frobenius norms.

    relative_error: the norm of the difference over that of the dense table (0 for a table of
        zeros): of the cores as they are stored, over the N x D entries alone.
    absolute_error: the norm of the difference.
    per_unfolding: what each of the d - 1 truncations took away, absolute, padding included. The
        root of the sum of their squares is at least `absolute_error`, and equal to it without
        padding, both but for the rounding of the cores to their dtype.
    bytes: of the cores.
    """

    relative_error: float
    absolute_error: float
    per_unfolding: tuple[float, ...]
    bytes: int


@torch.no_grad()
def decompose(
    weight: Tensor,
    *,
    spec: TTSpec | None = None,
    rank: int | None = None,
    max_bytes: int | None = None,
    rel_error: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[TTSpec, list[Tensor], ErrorReport]:
    """Shape, cores [p_k, r_(k-1), q_k, r_k] and true error of a tensor train close to a table.

    The left cores are orthogonal up to a factor, which gives all cores the same root mean square,
    so that one learning rate suits them all.

    Args:
        weight: [N, D] float32 or float64, of any strides, on any device, memory-mapped or not.
        spec: the whole shape, and the dtype of the cores.
        rank: the rank of every unfolding, under the factors of `shapes.default_spec`.
        max_bytes: the most bytes of all cores. Ranks start at 1 and grow where a byte adds most to
            the product of the parts of the energy that the unfoldings keep; singular values below
            3e-7 of the norm are left out.
        rel_error: the largest relative error, in [1e-5, 1). Each unfolding may take away an equal
            part of what those before it have left.
        chunk_bytes: size of the buffer; at least one row of the table for each i_1.
        Exactly one of spec, rank, max_bytes and rel_error is given.

    Raises:
        ValueError: none or several of the four are given; `weight` is not 2-D, is empty, or is
            not finite; `spec` is for another size; a rank or a number of bytes that is too small;
            rel_error outside its range.
        TypeError: `weight` is neither float32 nor float64.

    Cost: four passes over the table, of which one is of 2 p_1 q_1 FLOPs an entry, one of 4 r_1 and
    one of 2 r_1; two more where there is padding, and the same again with max_bytes. Extra
    memory: r_1 / (p_1 q_1) of the table (twice that with padding, and up to four times the ranks
    with max_bytes), a few buffers, the square of p_1 q_1. Where p_1 q_1 is above 1,024, randomised
    subspace iteration of 4 r_1 FLOPs an entry and pass takes the place of the pass for the Gram
    matrix; it ends when a pass has lowered the squared error by less than 0.01 %. So it is for
    later, smaller unfoldings.
    Source: Oseledets 2011, algorithm 1; Halko, Martinsson and Tropp, SIAM Review 53 (2011),
    algorithm 4.4.
    """
    given = {"spec": spec, "rank": rank, "max_bytes": max_bytes, "rel_error": rel_error}
    _check(weight, given, chunk_bytes)
    table = weight.detach()
    N, D = weight.shape
    norm = _norm(table, chunk_bytes)
    if not math.isfinite(norm):
        raise ValueError("weight must be finite; got a NaN or an infinity in it")
    if rank is not None:
        spec = default_spec(N, D, rank, weight.dtype)
    elif max_bytes is not None:
        shape = largest_spec(N, D, max_bytes, weight.dtype)
        spec = _best_ranks(table, shape, max_bytes, chunk_bytes)
    if spec is not None:
        p, q, pick = spec.p, spec.q, _fixed_ranks(spec.ranks)
    else:
        assert rel_error is not None
        shape = _quiet_default_spec(N, D, 32, weight.dtype)
        # A little below what may be lost: rounding the cores adds to the error.
        p, q, pick = shape.p, shape.q, _within(0.999 * rel_error * norm, len(shape.p))
    cores, lost = _tt_svd(table, p, q, pick, chunk_bytes)
    if spec is None:
        spec = TTSpec(N, D, p, q, tuple(core.shape[3] for core in cores[:-1]), weight.dtype)
    stored = [core.to(spec.dtype).contiguous() for core in _with_equal_rms(cores)]
    error = _distance(table, stored, chunk_bytes)
    return spec, stored, ErrorReport(error / norm if norm else 0.0, error, lost, spec.bytes)


def largest_spec(
    num_embeddings: int, embedding_dim: int, max_bytes: int, dtype: torch.dtype
) -> TTSpec:
    """The TTSpec of the highest rank, equal for all unfoldings, that takes at most `max_bytes`.

    Raises:
        ValueError: even rank 1 takes more.
    """
    check_positive("max_bytes", max_bytes)

    def spec_of(rank: int) -> TTSpec:
        return _quiet_default_spec(num_embeddings, embedding_dim, rank, dtype)

    if spec_of(1).bytes > max_bytes:
        raise ValueError(
            f"max_bytes must be at least {spec_of(1).bytes:,}, the bytes of a table of "
            f"{num_embeddings} x {embedding_dim} at rank 1; got {max_bytes:,}"
        )
    ranks = range(1, num_embeddings * embedding_dim + 1)
    return spec_of(bisect_right(ranks, max_bytes, key=lambda rank: spec_of(rank).bytes))


class _Unfolding:
    """A table [left, n, m] as the matrix of rows (l, i, j) and columns (i', j'), read in blocks.

    Its row is i * rest + i' and its column j * width + j', for i < p and j < q. What it has not is
    zeros, until `guess_padding`.
    """

    def __init__(
        self, table: Tensor, p: int, rest: int, q: int, width: int, chunk_bytes: int
    ) -> None:
        left, n, m = table.shape
        # What no row has stays away: it comes back as padding of the next unfolding.
        self.table, self.rest, self.width = table, min(rest, n), min(width, m)
        self.shape = left, p, q
        self.rows, self.columns = left * p * q, self.rest * self.width
        self.chunk_bytes = chunk_bytes
        self.step = min(self.rest, max(1, chunk_bytes // (8 * self.rows * self.width)))
        self.full = n // self.rest, m // self.width
        self.guess: tuple[Tensor, Tensor] | None = None

    def blocks(self) -> Iterator[tuple[int, int, Tensor]]:
        """a, b and the columns of i' in [a, b): [rows, (b - a) * width] float64, in one buffer."""
        buffer = self.buffer()
        for a in range(0, self.rest, self.step):
            b = min(a + self.step, self.rest)
            yield a, b, self.fill(buffer, a, b)

    def buffer(self) -> Tensor:
        """Room for `step` values of i'."""
        return self.table.new_empty(self.rows * self.step * self.width, dtype=torch.float64)

    def fill(self, buffer: Tensor, a: int, b: int) -> Tensor:
        """The columns of i' in [a, b)."""
        block = buffer[: self.rows * (b - a) * self.width].view(self.rows, -1)
        if self.table.numel() < self.rows * self.columns:
            block.zero_()
        if self.guess is not None:
            coefficients, basis = self.guess
            for some, _, _ in self.incomplete():
                inside = basis[:, a:b].double().flatten(1)
                block.view(*self.shape, -1)[some] = coefficients[some] @ inside
        for part, source in self.parts(block, a, b):
            part.copy_(source)
        return block

    def parts(self, block: Tensor, a: int, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The block without padding: views of it, each with the equal view of the table."""
        block = block.view(*self.shape, b - a, self.width)
        full_i, full_j = self.full
        rest, width = self.rest, self.width
        whole = torch.unflatten(self.table[:, : full_i * rest], 1, (full_i, rest))
        pairs = [(block[:, :full_i], whole[:, :, a:b])]
        last = self.table[:, full_i * rest :][:, a:b]
        if last.shape[1]:
            pairs.append((block[:, full_i : full_i + 1, :, : last.shape[1]], last[:, None]))
        for mine, theirs in pairs:
            columns = torch.unflatten(theirs[..., : full_j * width], -1, (full_j, width))
            yield mine[:, :, :full_j].transpose(2, 3), columns
            over = theirs[..., full_j * width :]
            if over.shape[-1]:
                yield mine[:, :, full_j, :, : over.shape[-1]], over

    def incomplete(self) -> list[tuple[tuple[slice | int, ...], int, int]]:
        """The rows that the table has in part: their (l, i, j), and how many i' and j' it has."""
        full_i, full_j = self.full
        every, over_i = slice(None), self.table.shape[1] - full_i * self.rest
        over_j = self.table.shape[2] - full_j * self.width
        found: list[tuple[tuple[slice | int, ...], int, int]] = []
        if over_i:
            found.append(((every, full_i, slice(full_j)), over_i, self.width))
        if over_j:
            found.append(((every, slice(full_i), full_j), self.rest, over_j))
        if over_i and over_j:
            found.append(((every, full_i, full_j), over_i, over_j))
        return found

    def guess_padding(self, basis_of: Callable[["_Unfolding"], Tensor]) -> None:
        """Fills what incomplete rows miss by their regression on the complete rows.

        Zeros would raise the rank. Ridge regression, the prior being that of probabilistic PCA:
        where the complete rows are of low rank, so are the filled ones, and noise is not followed.
        """
        incomplete = self.incomplete()
        if not incomplete:
            return
        full_i, full_j = self.full
        known = self.table[:, : full_i * self.rest, : full_j * self.width]
        complete = _Unfolding(known, full_i, self.rest, full_j, self.width, self.chunk_bytes)
        vectors = basis_of(complete)
        rank = vectors.shape[1]
        basis = self.table.new_empty(rank, self.rest, self.width)
        coefficients = vectors.new_zeros(*self.shape, rank)
        normal = [vectors.new_zeros(rank, rank) for _ in incomplete]
        everywhere = torch.zeros_like(coefficients)
        everywhere[:, :full_i, :full_j] = vectors.view(-1, full_i, full_j, rank)
        lost = 0.0
        for a, b, block in self.blocks():
            rows = block.view(*self.shape, -1)
            inside = everywhere.flatten(0, 2).T @ block
            lost += _energy(rows[:, :full_i, :full_j]) - _energy(inside)
            for matrix, (some, rest, width) in zip(normal, incomplete, strict=True):
                seen = inside.view(rank, b - a, -1)[:, : max(0, rest - a), :width].flatten(1)
                matrix.addmm_(seen, seen.T)
                coefficients[some] += rows[some] @ inside.T
            basis[:, a:b] = inside.view(rank, b - a, -1)
        ridge = max(0.0, lost) / self.columns
        for matrix, (some, _, _) in zip(normal, incomplete, strict=True):
            matrix.diagonal().add_(ridge)
            inverse = torch.linalg.pinv(matrix, hermitian=True, rtol=ROUNDING)
            coefficients[some] = coefficients[some] @ inverse
        self.guess = coefficients, basis

    def leading(self, count: int) -> tuple[Tensor, Tensor, float]:
        """Squared singular values [l], falling; their left vectors [rows, l]; the energy.

        l is at least `count`, or all there are. The Gram matrix squares the condition number, but
        in float64: what it cannot resolve is below 1e-8 of the norm, less than float32 rounds away.
        """
        if self.rows <= max(GRAM_ROWS, 4 * count):
            gram = self.table.new_zeros(self.rows, self.rows, dtype=torch.float64)
            for _, _, block in self.blocks():
                gram.addmm_(block, block.T)
            energy = float(gram.trace())
            values, vectors = torch.linalg.eigh(gram)
            return values.flip(0).clamp(min=0), vectors.flip(1), energy
        count = min(count, self.rows, self.columns)
        size = min(count + max(10, count // 4), self.rows, self.columns)
        generator = torch.Generator(self.table.device).manual_seed(0)
        basis = torch.empty(self.rows, size, dtype=torch.float64, device=self.table.device)
        basis = torch.linalg.qr(basis.normal_(generator=generator))[0]
        before = -math.inf
        for passes in range(1, MOST_PASSES + 1):
            product, energy = self._times_transpose_times(basis)
            values, turn = torch.linalg.eigh(basis.T @ product)
            caught = float(values[-count:].sum())
            if caught - before <= 1e-4 * (energy - caught) + ROUNDING * energy:
                break
            if passes < MOST_PASSES:
                basis, before = torch.linalg.qr(product)[0], caught
        return values.flip(0).clamp(min=0), basis @ turn.flip(1), energy

    def project(self, basis: Tensor) -> tuple[Tensor, float]:
        """basis.T @ matrix as the table [r, rest, width] to go on with; the energy it has not."""
        kept = self.table.new_empty(basis.shape[1], self.rest, self.width)
        lost = 0.0
        for a, b, block in self.blocks():
            inside = basis.T @ block
            kept[:, a:b] = inside.view(-1, b - a, self.width)
            lost += _energy(block.addmm_(basis, inside, alpha=-1))
        return kept, lost

    def _times_transpose_times(self, basis: Tensor) -> tuple[Tensor, float]:
        """matrix @ matrix.T @ basis, and the energy of the matrix."""
        product, energy = torch.zeros_like(basis), 0.0
        for _, _, block in self.blocks():
            product.addmm_(block, (basis.T @ block).T)
            energy += _energy(block)
        return product, energy


# From k, the energies lost so far and unfolding k: an orthonormal basis [rows, r_k] to keep.
_Pick = Callable[[int, Sequence[float], _Unfolding], Tensor]


def _tt_svd(
    table: Tensor, p: Sequence[int], q: Sequence[int], pick: _Pick, chunk_bytes: int
) -> tuple[list[Tensor], tuple[float, ...]]:
    """Cores in float64, all but the last orthogonal, and what each truncation took away."""
    cores: list[Tensor] = []
    lost: list[float] = []
    table = table[None]
    for k in range(len(p) - 1):
        rest, width = math.prod(p[k + 1 :]), math.prod(q[k + 1 :])
        unfolding = _Unfolding(table, p[k], rest, q[k], width, chunk_bytes)
        choose = partial(pick, k, lost)
        unfolding.guess_padding(choose)
        basis = choose(unfolding)
        cores.append(basis.view(*unfolding.shape, -1).transpose(0, 1))
        table, energy = unfolding.project(basis)
        lost.append(energy)
    missing = (0, q[-1] - table.shape[2], 0, p[-1] - table.shape[1])
    last = torch.nn.functional.pad(table.double(), missing)
    return [*cores, last.transpose(0, 1)[..., None]], tuple(map(math.sqrt, lost))


def _fixed_ranks(ranks: Sequence[int]) -> _Pick:
    def pick(k: int, lost: Sequence[float], unfolding: _Unfolding) -> Tensor:
        basis = unfolding.leading(ranks[k])[1][:, : ranks[k]]
        # Fewer rows than the rank: r_(k-1) is so low that r_k cannot be had.
        return torch.nn.functional.pad(basis, (0, ranks[k] - basis.shape[1])).contiguous()

    return pick


def _within(error: float, d: int) -> _Pick:
    """Ranks that lose at most this error in all."""

    def pick(k: int, lost: Sequence[float], unfolding: _Unfolding) -> Tensor:
        allowed = max(0.0, error**2 - sum(lost)) / (d - 1 - k)
        count = 32
        while True:
            values, vectors, energy = unfolding.leading(count)
            # tail[r]: what is lost when r vectors are kept
            tail = torch.nn.functional.pad(values.flip(0).cumsum(0).flip(0), (0, 1))
            tail += max(0.0, energy - float(values.sum()))
            if tail[-1] <= allowed or len(values) >= min(unfolding.rows, unfolding.columns):
                rank = int((tail[1:-1] > allowed).sum()) + 1
                return vectors[:, :rank].contiguous()
            count *= 2

    return pick


def _best_ranks(table: Tensor, shape: TTSpec, max_bytes: int, chunk_bytes: int) -> TTSpec:
    """`shape` with ranks that grew from 1 as `decompose` says of max_bytes."""
    p, q, itemsize = shape.p, shape.q, shape.dtype.itemsize
    # Four times the equal rank that the bytes are enough for: one unfolding may need more than
    # another. Not all there are, for the projection to so many is held in memory.
    highest = [min(4 * max(shape.ranks), most) for most in largest_ranks(p, q)]
    spectra: dict[int, list[float]] = {}

    def pick(k: int, lost: Sequence[float], unfolding: _Unfolding) -> Tensor:
        values, vectors, energy = unfolding.leading(highest[k])
        kept = values[: highest[k]]
        spectra[k] = kept[kept > ROUNDING * energy].tolist()
        return vectors[:, : highest[k]].contiguous()

    def bytes_of(ranks: Sequence[int]) -> int:
        ends = pairwise((1, *ranks, 1))
        return sum(p[k] * q[k] * a * b for k, (a, b) in enumerate(ends)) * itemsize

    _tt_svd(table, p, q, pick, chunk_bytes)
    ranks = [1] * len(spectra)
    while True:
        gains = {}
        for k, spectrum in spectra.items():
            grown = [*ranks[:k], ranks[k] + 1, *ranks[k + 1 :]]
            rows = (1, *ranks)[k] * p[k] * q[k]
            if ranks[k] < min(len(spectrum), rows) and bytes_of(grown) <= max_bytes:
                bytes_more = bytes_of(grown) - bytes_of(ranks)
                gains[k] = spectrum[ranks[k]] / sum(spectrum[: ranks[k]]) / bytes_more
        if not gains:
            N, D = shape.num_embeddings, shape.embedding_dim
            return TTSpec(N, D, p, q, tuple(ranks), shape.dtype)
        ranks[max(gains, key=lambda k: gains[k])] += 1


def _with_equal_rms(cores: list[Tensor]) -> list[Tensor]:
    """The same table from cores of one root mean square; as they are when one is all zeros."""
    rms = [math.sqrt(_energy(core) / core.numel()) for core in cores]
    if min(rms) == 0:
        return cores
    common = math.exp(sum(map(math.log, rms)) / len(rms))
    return [core * (common / each) for core, each in zip(cores, rms, strict=True)]


def _norm(table: Tensor, chunk_bytes: int) -> float:
    rows = max(1, chunk_bytes // (8 * table.shape[1]))
    return math.sqrt(sum(_energy(chunk.double()) for chunk in torch.split(table, rows)))


def _distance(table: Tensor, cores: Sequence[Tensor], chunk_bytes: int) -> float:
    """The norm of the difference between a table and that of the cores."""
    p = [core.shape[0] for core in cores]
    q = [core.shape[2] for core in cores]
    rest, width = math.prod(p[1:]), math.prod(q[1:])
    unfolding = _Unfolding(table[None], p[0], rest, q[0], width, chunk_bytes)
    first = cores[0].double().flatten(0, 2)
    buffer, a, energy = unfolding.buffer(), 0, 0.0
    for digits in _boxes(p[1:], unfolding.step):
        rows = _rest_of_rows(cores[1:], digits)[:, : unfolding.rest - a, : unfolding.width]
        b = a + rows.shape[1]
        block = unfolding.fill(buffer, a, b).addmm_(first, rows.flatten(1), alpha=-1)
        energy += sum(_energy(part) for part, _ in unfolding.parts(block, a, b))
        if b == unfolding.rest:
            break
        a = b
    return math.sqrt(energy)


def _rest_of_rows(cores: Sequence[Tensor], digits: Sequence[slice]) -> Tensor:
    """Products [r_1, i', j'] float64 of the cores after the first, for a box of i'."""
    product = cores[0][digits[0]].double().transpose(0, 1)  # [r_1, i', j', r_k]
    for core, chosen in zip(cores[1:], digits[1:], strict=True):
        product = torch.einsum("aijr,prqs->aipjqs", product, core[chosen].double())
        product = product.flatten(3, 4).flatten(1, 2)
    return product.squeeze(3)


def _boxes(p: Sequence[int], limit: int) -> Iterator[list[slice]]:
    """Ranges of digits in the mixed radix p: consecutive runs of at most `limit` numbers."""
    rest = math.prod(p[1:])
    if rest > limit:
        for digit in range(p[0]):
            for inner in _boxes(p[1:], limit):
                yield [slice(digit, digit + 1), *inner]
    else:
        step = limit // rest
        for digit in range(0, p[0], step):
            yield [slice(digit, min(digit + step, p[0])), *(slice(n) for n in p[1:])]


def _energy(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) ** 2


def _quiet_default_spec(
    num_embeddings: int, embedding_dim: int, rank: int, dtype: torch.dtype
) -> TTSpec:
    """`default_spec` without a word about ranks that nobody asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return default_spec(num_embeddings, embedding_dim, rank, dtype)


def _check(weight: Tensor, given: dict[str, Any], chunk_bytes: int) -> None:
    check_dtype(weight.dtype)
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"weight must be [N, D], not empty; got shape {tuple(weight.shape)}")
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ValueError(
            f"exactly one of {', '.join(given)} must be given; got {', '.join(named) or 'none'}"
        )
    check_positive("chunk_bytes", chunk_bytes)
    spec, rel_error = given["spec"], given["rel_error"]
    if spec is not None and (spec.num_embeddings, spec.embedding_dim) != weight.shape:
        raise ValueError(
            f"spec must be for weight's {weight.shape[0]} x {weight.shape[1]}; "
            f"got {spec.num_embeddings} x {spec.embedding_dim}"
        )
    if rel_error is not None and not SMALLEST_REL_ERROR <= rel_error < 1:
        raise ValueError(f"rel_error must be in [{SMALLEST_REL_ERROR:g}, 1); got {rel_error}")
