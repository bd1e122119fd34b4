import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ecorec import TTSpec
from ecorec.shapes import GFLOP_S, ROW_NS, default_spec, largest_ranks, product_ns, row_ns
from ecorec.torch_backend import unique_rows

pytestmark = pytest.mark.filterwarnings("ignore:ranks .* are above the limits")


@given(
    num_embeddings=st.integers(1, 10**9),
    embedding_dim=st.integers(1, 200),
    ranks=st.lists(st.integers(1, 40), min_size=1, max_size=3),
)
def test_the_default_shape_covers_any_table_with_little_padding(
    num_embeddings, embedding_dim, ranks
):
    spec = default_spec(num_embeddings, embedding_dim, ranks)
    assert num_embeddings <= math.prod(spec.p) < num_embeddings + math.prod(spec.p[:-1])
    assert embedding_dim <= math.prod(spec.q) <= embedding_dim + embedding_dim // 4 + 1
    assert len(spec.p) == len(spec.q) == len(ranks) + 1
    assert len(set(spec.p[:-1])) == 1


def test_the_default_shape_is_smaller_and_has_fewer_pairs_than_the_cubic_one():
    spec = default_spec(10_000_000, 32, 32)
    cubic = TTSpec(10_000_000, 32, p=(216, 216, 216), q=(2, 4, 4), ranks=(32, 32))
    assert spec.q == (2, 4, 4)
    assert spec.p[0] * spec.p[1] < 5_000 < 216 * 216
    assert cubic.bytes / 3 < spec.bytes < cubic.bytes


def test_bytes_and_compression_are_those_of_the_cores():
    spec = TTSpec(1000, 12, p=(5, 10, 20), q=(2, 2, 3), ranks=(3, 4), dtype=torch.float64)
    cores = [torch.empty(shape, dtype=torch.float64) for shape in spec.core_shapes]
    assert [tuple(core.shape) for core in cores] == [
        (5, 1, 2, 3),
        (10, 3, 2, 4),
        (20, 4, 3, 1),
    ]
    assert spec.bytes == sum(core.nbytes for core in cores)
    assert spec.num_parameters == sum(core.numel() for core in cores)
    assert spec.dense_bytes == torch.empty(1000, 12, dtype=torch.float64).nbytes
    assert spec.compression == pytest.approx(96_000 / spec.bytes)


@pytest.mark.parametrize(
    ("p", "q", "ranks"),
    [
        ((7, 300), (3, 5), (6,)),
        ((6, 7, 50), (2, 3, 4), (5, 6)),
        ((3, 4, 5, 35), (2, 2, 3, 2), (3, 5, 4)),
    ],
)
def test_flops_are_what_a_forward_executes(p, q, ranks):
    """Every row of the table, so that the pairs and triples are as many as their factors."""
    spec = TTSpec(math.prod(p), math.prod(q), p, q, ranks)
    cores = [torch.randn(shape) for shape in spec.core_shapes]
    rows = torch.arange(spec.num_embeddings)
    with FlopCounterMode(display=False) as counter:
        unique_rows(cores, rows)
    assert counter.get_total_flops() == spec.flops(len(rows), p[0] * p[1])


def test_flops_with_back_pairs_are_those_of_the_cheaper_direction():
    spec = TTSpec(1000, 32, p=(10, 10, 10), q=(2, 4, 4), ranks=(8, 16))
    front = 2 * 2 * 4 * 8 * 16 * 90 + 2 * 32 * 16 * 400
    back = 2 * 8 * 4 * 4 * 16 * 50 + 2 * 32 * 8 * 400
    assert spec.flops(400, 90) == front
    assert spec.flops(400, 90, 50) == min(front, back) == back
    assert spec.flops(400, 1, 100) == spec.flops(400, 1)


def test_a_rank_above_what_is_possible_is_clipped_with_one_warning_that_gives_both():
    with pytest.warns(UserWarning, match=r"ranks \(9, 2\) .* limits \(4, 6\).*\(4, 2\)") as caught:
        spec = TTSpec(8, 12, p=(2, 2, 2), q=(2, 2, 3), ranks=(9, 2))
    assert spec.ranks == (4, 2)
    assert len(caught) == 1


def test_the_largest_rank_of_an_unfolding_is_its_shorter_side():
    p, q = (2, 3, 4, 5), (3, 1, 2, 2)
    sides = [(6, 240), (18, 80), (144, 10)]
    assert largest_ranks(p, q) == tuple(min(pair) for pair in sides)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings must be at least 1; got 0"),
        ({"embedding_dim": -1}, "embedding_dim must be at least 1; got -1"),
        ({"num_embeddings": 1001}, r"p must be at least num_embeddings = 1001; got .* = 1000"),
        ({"embedding_dim": 9}, "q must be at least embedding_dim = 9"),
        ({"ranks": (0, 4)}, "every number of ranks must be at least 1; got 0"),
        ({"q": (2, -2, 2)}, "every number of q must be at least 1; got -2"),
        ({"ranks": (4,)}, "d, d and d - 1 numbers"),
        ({"p": (1000,)}, r"2, 3 or 4 factors; got \(1000,\)"),
        ({"p": (1, 1, 1, 1, 1000)}, "2, 3 or 4 factors"),
    ],
)
def test_a_shape_that_is_none_is_refused_by_name(wrong, message):
    given_ = {
        "num_embeddings": 1000,
        "embedding_dim": 8,
        "p": (10, 10, 10),
        "q": (2, 2, 2),
        "ranks": (4, 4),
    }
    with pytest.raises(ValueError, match=message):
        TTSpec(**(given_ | wrong))


def test_half_precision_is_a_type_error():
    with pytest.raises(TypeError, match=r"float32 or torch\.float64; got torch\.float16"):
        TTSpec(1000, 8, (10, 10, 10), (2, 2, 2), (4, 4), torch.float16)


@pytest.mark.parametrize("ranks", [0, (3, 0), (), (1, 1, 1, 1)])
def test_ranks_that_make_no_shape_are_refused(ranks):
    with pytest.raises(ValueError, match="rank"):
        default_spec(1000, 8, ranks)


def test_explain_gives_the_bytes_of_both_and_what_the_cost_model_takes():
    spec = TTSpec(1000, 8, (10, 10, 10), (2, 2, 2), (4, 4))
    text = spec.explain()
    assert f"{spec.bytes:,} bytes instead of 32,000" in text
    assert f"row: {2 * 8 * 4} FLOPs, about {row_ns(4, 4, 2):.0f} ns" in text
    assert f"front pair: {2 * 4 * 4 * 4} FLOPs, about {product_ns(4, 4, 4):.0f} ns" in text
    assert f"{GFLOP_S:g} GFLOP/s" in text
    assert f"{ROW_NS:g} ns a row" in text
    assert "not smaller" not in text
    two = TTSpec(1000, 8, (10, 100), (2, 4), (4,)).explain()
    assert "row" in two
    assert "pair" not in two


def test_explain_says_when_the_dense_table_is_not_larger():
    assert (
        "not smaller than the dense table" in TTSpec(8, 8, (2, 2, 2), (2, 2, 2), (4, 4)).explain()
    )


def test_a_product_of_few_columns_takes_as_long_as_one_that_fills_the_lanes():
    assert product_ns(1, 4, 4) == product_ns(8, 4, 4) == product_ns(9, 4, 4) / 2
    assert row_ns(3, 4, 2) == row_ns(8, 4, 2) > ROW_NS + product_ns(8, 4, 2)
    columns = np.array([1.0, 8.0, 9.0])
    assert product_ns(columns, 4, 4).tolist() == [product_ns(n, 4, 4) for n in (1, 8, 9)]


def test_numpy_integers_are_numbers_and_floats_are_not():
    assert default_spec(1000, 8, np.int64(4)) == default_spec(1000, 8, 4)
    assert TTSpec(1000, 8, tuple(np.array([10, 10, 10])), (2, 2, 2), (4, 4)).p == (10, 10, 10)
    with pytest.raises(TypeError, match="float"):
        TTSpec(1000, 8, (10, 10.5, 10), (2, 2, 2), (4, 4))
