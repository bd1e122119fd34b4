import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecorec import shape_search
from ecorec.shape_search import near_cubic, suggest
from ecorec.shapes import TTSpec, largest_ranks


def hashed_zipf_rows(num_embeddings, lookups):
    rng = np.random.default_rng(0)
    weights = np.cumsum(np.arange(1, num_embeddings + 1) ** -1.05)
    ranks = 1 + np.searchsorted(weights / weights[-1], rng.random(lookups))
    return np.unique((ranks * 2654435761 + 12345) % num_embeddings)


def test_the_searched_shape_needs_a_quarter_of_the_cubic_ones_flops_and_a_500th_of_the_bytes():
    rows = hashed_zipf_rows(10_000_000, 81_920)
    assert 31_000 < len(rows) < 32_000

    def flops(p, q, ranks):
        pairs = len(np.unique(rows // p[2]))
        return 2 * q[0] * q[1] * ranks[0] * ranks[1] * pairs + 2 * 32 * ranks[1] * len(rows)

    spec = suggest(10_000_000, 32, rank=32, lookups=81_920)
    assert flops(spec.p, spec.q, spec.ranks) <= 0.25 * flops((216,) * 3, (2, 4, 4), (32, 32))
    assert spec.bytes <= 1_280_000_000 / 500


@settings(deadline=None, max_examples=150)
@given(
    num_embeddings=st.one_of(st.integers(1, 5000), st.integers(1, 10**9)),
    embedding_dim=st.one_of(st.integers(1, 70), st.integers(1, 1024)),
    ranks=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    lookups=st.integers(1, 10**6),
)
def test_any_table_gets_a_shape_between_a_third_and_all_of_the_cubic_one(
    num_embeddings, embedding_dim, ranks, lookups
):
    ndim = len(ranks) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # ranks are clipped in silence
        spec = suggest(num_embeddings, embedding_dim, rank=ranks, ndim=ndim, lookups=lookups)
        cubic = near_cubic(num_embeddings, embedding_dim, rank=ranks, ndim=ndim)
    assert len(spec.p) == ndim
    assert spec.ranks == tuple(map(min, ranks, largest_ranks(spec.p, spec.q)))
    assert cubic.num_parameters / 3 <= spec.num_parameters <= cubic.num_parameters
    assert num_embeddings <= math.prod(spec.p)
    assert embedding_dim <= math.prod(spec.q) <= embedding_dim + embedding_dim // 4 + 1
    if spec != cubic:
        assert math.prod(spec.p) <= 1.05 * num_embeddings
        assert max(spec.p[:-1]) <= 2 * min(spec.p[:-1])


def slow_step_ns(spec, uniques, prefixes):
    """The model of `suggest` for one shape, prefixes given by their tail."""

    def padded(columns):
        return 8 * math.ceil(columns / 8)

    d, forward = len(spec.p), 0.0
    for k in range(2, d):
        flops = 2 * padded(math.prod(spec.q[:k])) * spec.ranks[k - 2] * spec.ranks[k - 1]
        forward += prefixes(math.prod(spec.p[k:])) * flops / 60
    columns, rank, last = padded(math.prod(spec.q[:-1])), spec.ranks[-1], spec.q[-1]
    flops = 2 * columns * rank * last
    if d == 3:
        flops = max(flops, 2 * padded(spec.q[1] * spec.q[2]) * spec.ranks[0] * spec.q[0])
    forward += uniques * (40 + 4 * columns * rank / 75 + flops / 60)
    return 3 * forward + 1.1 * spec.num_parameters


@pytest.mark.parametrize("lookups", [30, 900, 9000])
@pytest.mark.parametrize(
    ("num_embeddings", "dim", "ndim"), [(5003, 12, 3), (997, 7, 3), (20_000, 18, 2), (4_000, 8, 4)]
)
def test_no_candidate_as_fast_is_smaller_when_each_is_counted_alone(
    num_embeddings, dim, ndim, lookups
):
    rng = np.random.default_rng(1)
    rows = np.sort(rng.choice(num_embeddings, 700, replace=False))
    numbers = rng.integers(1, 50, len(rows))
    share = numbers / numbers.sum()

    def prefixes(tail):
        weight = {}
        for row, part in zip(rows // tail, share, strict=True):
            weight[row] = weight.get(row, 0.0) + part
        return sum(1 - (1 - part) ** lookups for part in weight.values())

    cubic = near_cubic(num_embeddings, dim, rank=6, ndim=ndim)
    counted = []
    for p in shape_search._row_factors(num_embeddings, ndim):
        for columns in shape_search._padded_columns(dim):
            for q in shape_search._ordered_factorisations(columns, ndim):
                ranks = tuple(min(6, limit) for limit in largest_ranks(p, q))
                spec = TTSpec(num_embeddings, dim, p, q, ranks)
                if 1 / 3 <= spec.num_parameters / cubic.num_parameters <= 1:
                    time = slow_step_ns(spec, prefixes(1), prefixes)
                    counted.append((time, spec.num_parameters))
    found = suggest(
        num_embeddings,
        dim,
        rank=6,
        ndim=ndim,
        lookups=lookups,
        counts=np.stack([rows, numbers], axis=1),
    )
    # Between counted prefix lengths `suggest` interpolates: a hundredth for that.
    least = min(time for time, _ in counted)
    assert slow_step_ns(found, prefixes(1), prefixes) <= 1.05 * least
    assert found.num_parameters <= min(size for time, size in counted if time <= 1.03 * least)


def test_expected_rows_without_counts_are_those_of_a_zipf_batch():
    batch = shape_search._zipf_batch(1_000_000, 50_000)
    found = len(hashed_zipf_rows(1_000_000, 50_000))
    assert batch.uniques == pytest.approx(found, rel=0.02)
    few_and_many = batch.prefixes(np.array([1e5, 1.0]))
    assert few_and_many.tolist() == [10, batch.uniques]


def test_expected_prefixes_are_those_of_drawn_batches():
    rng = np.random.default_rng(2)
    numbers = rng.random(5000) ** 8
    batch = shape_search._counted_batch(5000, 3000, numbers)
    drawn = [
        rng.choice(5000, 3000, p=numbers / numbers.sum()) for _ in range(40)
    ]  # a batch has some 1,000 rows with a deviation below 20
    for tail in (1, 10, 333):
        mean = np.mean([len(np.unique(rows // tail)) for rows in drawn])
        assert batch.prefixes(np.array([float(tail)]))[0] == pytest.approx(mean, rel=0.02)
    assert batch.uniques == pytest.approx(np.mean([len(np.unique(r)) for r in drawn]), rel=0.02)


def test_both_forms_of_counts_are_the_same():
    rng = np.random.default_rng(3)
    numbers = np.zeros(30_000, dtype=np.int64)
    rows = rng.permutation(30_000)[:500]
    numbers[rows] = rng.integers(1, 9, 500)
    every = suggest(30_000, 16, rank=8, lookups=2000, counts=torch.from_numpy(numbers))
    some = suggest(
        30_000, 16, rank=8, lookups=2000, counts=np.stack([rows, numbers[rows]], 1).tolist()
    )
    assert every == some


def test_rows_that_lie_together_are_given_a_shape_with_fewer_parameters():
    """Their prefixes are few under any shape, so that bytes are all that is left to save."""
    together = suggest(1_000_000, 32, rank=32, counts=[[row, 1] for row in range(20_000, 30_000)])
    apart = suggest(1_000_000, 32, rank=32, counts=[[100 * row, 1] for row in range(10_000)])
    assert together.bytes < 0.8 * apart.bytes


def test_one_row_that_takes_every_lookup_is_no_division_by_zero():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert suggest(1000, 8, rank=4, counts=[[7, 3]]).num_embeddings == 1000


@pytest.mark.parametrize("ndim", [2, 3, 4])
@pytest.mark.parametrize("max_bytes", [50_000, 1_000_000, 30_000_000])
def test_bytes_alone_give_the_greatest_rank_that_the_cubic_shape_has_room_for(ndim, max_bytes):
    spec = suggest(1_000_000, 32, max_bytes=max_bytes, ndim=ndim)
    assert spec.bytes <= max_bytes
    rank = max(spec.ranks)
    cubic = near_cubic(1_000_000, 32, rank=rank, ndim=ndim)
    assert cubic.bytes / 3 <= spec.bytes
    if ndim > 2 or max_bytes > 50_000:  # else not even rank 1 fits with equal factors
        assert cubic.bytes <= max_bytes < near_cubic(1_000_000, 32, rank=rank + 1, ndim=ndim).bytes


def test_bytes_below_a_third_are_kept_when_asked_for():
    wide = suggest(10_000_000, 32, rank=32)
    narrow = suggest(10_000_000, 32, rank=32, max_bytes=1_000_000)
    assert narrow.ranks == wide.ranks == (32, 32)
    assert 333_333 <= narrow.bytes <= 1_000_000 < wide.bytes


def test_bytes_that_no_shape_fits_name_those_of_the_smallest():
    with pytest.raises(ValueError, match=r"max_bytes must be at least ([\d,]+) .* got 900") as told:
        suggest(1_000_000, 32, rank=8, max_bytes=900)
    smallest = int(str(told.value).split("at least ")[1].split()[0].replace(",", ""))
    assert suggest(1_000_000, 32, rank=8, max_bytes=smallest).bytes <= smallest
    with pytest.raises(ValueError, match="at least"):
        suggest(1_000_000, 32, rank=8, max_bytes=smallest - 4)


def test_the_default_is_rank_32_in_three_cores():
    assert suggest(10_000_000, 32) == suggest(10_000_000, 32, rank=(32, 32), ndim=3)


def test_columns_fill_the_lanes_of_both_directions():
    for dim in (8, 16, 32, 64):
        q = suggest(10_000_000, dim, rank=32).q
        assert q[0] * q[1] % 8 == q[1] * q[2] % 8 == 0


def test_columns_without_factors_are_padded():
    assert math.prod(suggest(10_000_000, 31, rank=16).q) == 32
    assert math.prod(suggest(10_000_000, 509, rank=16).q) == 512


@pytest.mark.parametrize(
    ("num_embeddings", "ndim", "p"),
    [(10_000_000, 3, (216, 216, 215)), (27, 3, (3, 3, 3)), (1, 4, (1, 1, 1, 1)), (17, 2, (5, 4))],
)
def test_near_cubic_factors_are_near_the_root(num_embeddings, ndim, p):
    assert near_cubic(num_embeddings, 32, rank=4, ndim=ndim).p == p


def test_near_cubic_is_the_shape_that_the_numbers_are_compared_with():
    assert near_cubic(216**3, 32, rank=32) == TTSpec(216**3, 32, (216,) * 3, (2, 4, 4), (32, 32))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings must be at least 1; got 0"),
        ({"embedding_dim": 0}, "embedding_dim must be at least 1; got 0"),
        ({"rank": 0}, "every rank must be at least 1; got 0"),
        ({"rank": (4, 4, 4)}, r"ndim - 1 = 2 of them; got \(4, 4, 4\)"),
        ({"max_bytes": -1}, "max_bytes must be at least 1; got -1"),
        ({"ndim": 5}, "ndim must be 2, 3 or 4; got 5"),
        ({"ndim": 1, "max_bytes": 10}, "ndim must be 2, 3 or 4; got 1"),
        ({"lookups": 0}, "lookups must be at least 1; got 0"),
        ({"counts": np.ones(999)}, r"shape \[1000\] or \[n, 2\]; got \[999\]"),
        ({"counts": np.zeros(1000)}, "not all 0; their sum is 0.0"),
        ({"counts": [[5, -1], [6, 3]]}, "not negative"),
        ({"counts": [[5, math.nan]]}, "finite"),
        ({"counts": [[5, 1], [5, 2]]}, "some occur twice"),
        ({"counts": [[0.5, 1]]}, "must be integers"),
        ({"counts": [[5, 1], [1000, 1]]}, r"\[0, 1000\); got 1000"),
        ({"counts": [[-1, 1]]}, r"\[0, 1000\); got -1"),
        ({"counts": np.zeros((0, 2))}, "not all 0"),
    ],
)
def test_what_makes_no_search_is_refused_by_name(wrong, message):
    given_ = {"num_embeddings": 1000, "embedding_dim": 8}
    with pytest.raises(ValueError, match=message):
        suggest(**(given_ | wrong))
