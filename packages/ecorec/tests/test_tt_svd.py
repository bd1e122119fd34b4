import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecorec import TTSpec, reference
from ecorec.experiments import conversion
from ecorec.initialisers import match_normal
from ecorec.shapes import default_spec
from ecorec.tt_svd import decompose, largest_spec
from septet_shared.memory_pool import track_peak

NO_PADDING = {
    2: TTSpec(600, 12, p=(12, 50), q=(3, 4), ranks=(7,)),
    3: TTSpec(600, 12, p=(5, 6, 20), q=(2, 2, 3), ranks=(4, 6)),
    4: TTSpec(600, 12, p=(3, 4, 5, 10), q=(1, 2, 2, 3), ranks=(2, 5, 6)),
}
PADDED = {
    "rows": TTSpec(571, 12, p=(5, 6, 20), q=(2, 2, 3), ranks=(4, 6)),
    "columns": TTSpec(600, 11, p=(5, 6, 20), q=(2, 2, 3), ranks=(4, 6)),
    "both": TTSpec(571, 11, p=(5, 6, 20), q=(2, 2, 3), ranks=(4, 6)),
    "both, d = 2": TTSpec(593, 11, p=(12, 50), q=(3, 4), ranks=(7,)),
    "both, d = 4": TTSpec(593, 11, p=(3, 4, 5, 10), q=(1, 2, 2, 3), ranks=(2, 5, 6)),
    "a whole digit": TTSpec(470, 5, p=(5, 6, 20), q=(2, 2, 3), ranks=(3, 6)),
    "all but one digit": TTSpec(97, 3, p=(5, 6, 20), q=(2, 2, 3), ranks=(1, 2)),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noise(n, d, seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=rng, dtype=dtype)


def table_of(cores, n, d):
    return reference.rows(cores, torch.arange(n), d)


def of_rank(spec, dtype=torch.float64, seed=0):
    """A table that has exactly the ranks of a spec."""
    cores = match_normal(spec, generator=torch.Generator().manual_seed(seed))
    cores = [core.double() for core in cores]
    return table_of(cores, spec.num_embeddings, spec.embedding_dim).to(dtype)


def smooth(n, d):
    """Rows that change slowly with the index, and some noise."""
    waves = torch.linspace(0, 1, n)[:, None] * 20 * noise(1, d, seed=3)
    return torch.sin(waves + noise(1, d, seed=4)) + 0.05 * noise(n, d, seed=5)


def error(weight, spec, cores):
    difference = weight.double() - table_of(cores, spec.num_embeddings, spec.embedding_dim)
    return float(difference.norm()), float(difference.norm() / weight.double().norm())


def plain_tt_svd(weight, spec):
    """What each truncation loses, by singular values of the whole unfoldings in numpy."""
    p, q, d = spec.p, spec.q, len(spec.p)
    tensor = weight.double().numpy().reshape(*p, *q)
    rest = tensor.transpose([axis for k in range(d) for axis in (k, d + k)])
    lost, rank = [], 1
    for k in range(d - 1):
        matrix = rest.reshape(rank * p[k] * q[k], -1)
        _, s, right = np.linalg.svd(matrix, full_matrices=False)
        rank = spec.ranks[k]
        lost.append(math.sqrt((s[rank:] ** 2).sum()))
        rest = s[:rank, None] * right[:rank]
    return lost


@pytest.mark.parametrize("d", NO_PADDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_truncation_loses_what_the_singular_values_say(d, dtype):
    spec = NO_PADDING[d]
    weight = smooth(600, 12).to(dtype)
    _, _, report = decompose(weight, spec=spec)
    expected = plain_tt_svd(weight, spec)
    assert report.per_unfolding == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("spec", [*NO_PADDING.values(), *PADDED.values()])
@pytest.mark.parametrize("make", [noise, smooth])
def test_the_reported_error_is_the_true_one(spec, make):
    weight = make(spec.num_embeddings, spec.embedding_dim)
    found, cores, report = decompose(weight, spec=spec)
    assert found == spec
    absolute, relative = error(weight, spec, cores)
    assert report.absolute_error == pytest.approx(absolute, rel=1e-6)
    assert report.relative_error == pytest.approx(relative, rel=1e-6)
    assert report.bytes == sum(core.nbytes for core in cores) == spec.bytes
    assert 0.01 < relative < 1


@pytest.mark.parametrize("d", NO_PADDING)
def test_squares_of_the_truncations_add_up_to_the_squared_error(d):
    _, _, report = decompose(noise(600, 12), spec=NO_PADDING[d])
    assert math.hypot(*report.per_unfolding) == pytest.approx(report.absolute_error, rel=1e-6)


@pytest.mark.parametrize("name", PADDED)
def test_with_padding_the_truncations_lose_no_less_than_the_error(name):
    spec = PADDED[name]
    _, _, report = decompose(noise(spec.num_embeddings, spec.embedding_dim), spec=spec)
    assert math.hypot(*report.per_unfolding) >= report.absolute_error * (1 - 1e-6)


@pytest.mark.parametrize("spec", [*NO_PADDING.values(), *PADDED.values()])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 3e-7), (torch.float64, 1e-12)])
def test_a_table_of_the_rank_of_the_spec_loses_nothing(spec, dtype, most):
    weight = of_rank(spec, dtype)
    spec = TTSpec(spec.num_embeddings, spec.embedding_dim, spec.p, spec.q, spec.ranks, dtype)
    _, cores, report = decompose(weight, spec=spec)
    assert report.relative_error < most
    # Also at this size the report is right, rounding of the cores included.
    assert report.relative_error == pytest.approx(error(weight, spec, cores)[1], rel=0.05)


def test_padding_is_not_guessed_wildly_from_few_rows():
    # One row of the last i_1: its 16 numbers can be met exactly by 8 coefficients of noise.
    spec, short = (TTSpec(n, 16, (10, 10, 100), (2, 2, 4), (8, 10)) for n in (9001, 9000))
    weight = noise(9001, 16)
    padded, full = (decompose(weight[: s.num_embeddings], spec=s)[2] for s in (spec, short))
    assert padded.relative_error < 1.002 * full.relative_error
    # As many coefficients as the complete rows have, so that nothing looks like noise.
    spec = TTSpec(481, 12, p=(5, 6, 20), q=(2, 2, 3), ranks=(8, 10))
    assert decompose(smooth(481, 12), spec=spec)[2].relative_error < 0.08


def test_a_large_table_of_exact_rank_loses_nothing():
    spec = default_spec(200_000, 64, 8)
    assert math.prod(spec.p) > 200_000  # padded
    weight = conversion.table_of_rank(spec, 0.0, seed=0)
    assert decompose(weight, spec=spec)[2].relative_error < 1e-6


def test_singular_values_of_very_different_size_are_all_found():
    spec = TTSpec(600, 12, p=(12, 50), q=(3, 4), ranks=(6,))
    rng = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(36, 6, generator=rng, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(200, 6, generator=rng, dtype=torch.float64))[0]
    matrix = left * 10.0 ** -torch.arange(6) @ right.T  # (i1, j1) x (i2, j2)
    weight = matrix.view(12, 3, 50, 4).transpose(1, 2).reshape(600, 12)
    _, _, report = decompose(weight.float(), spec=spec)
    assert report.relative_error < 3e-7
    _, _, fewer = decompose(weight, spec=TTSpec(600, 12, spec.p, spec.q, (5,), torch.float64))
    assert fewer.absolute_error == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("make", [noise, smooth])
def test_unfoldings_of_many_rows_lose_hardly_more_than_the_best(make):
    spec = TTSpec(6000, 8, p=(1500, 4), q=(2, 4), ranks=(5,))
    assert spec.p[0] * spec.q[0] > 1024  # no Gram matrix
    weight = make(6000, 8)
    _, _, report = decompose(weight, spec=spec)
    assert report.per_unfolding[0] == pytest.approx(plain_tt_svd(weight, spec)[0], rel=2e-3)
    assert report.absolute_error == pytest.approx(report.per_unfolding[0], rel=1e-6)


def test_unfoldings_of_many_rows_find_an_exact_rank():
    spec = TTSpec(5990, 8, p=(1500, 4), q=(2, 4), ranks=(5,))
    _, _, report = decompose(of_rank(spec, torch.float32), spec=spec)
    assert report.relative_error < 3e-7


@pytest.mark.parametrize("rel_error", [0.9, 0.5, 0.1, 1e-3, 1e-5])
@pytest.mark.parametrize(("n", "d"), [(600, 12), (1009, 7), (4000, 16)])
@pytest.mark.parametrize("make", [noise, smooth])
def test_rel_error_is_kept(rel_error, n, d, make):
    weight = make(n, d)
    spec, cores, report = decompose(weight, rel_error=rel_error)
    assert error(weight, spec, cores)[1] <= rel_error
    assert report.relative_error <= rel_error
    assert [tuple(core.shape) for core in cores] == list(spec.core_shapes)


def test_rel_error_takes_no_more_ranks_than_the_table_has():
    shape = decompose(noise(3000, 16), rel_error=0.9)[0]
    weight = of_rank(TTSpec(3000, 16, shape.p, shape.q, (2, 5)), torch.float32)
    assert decompose(weight, rel_error=1e-4)[0].ranks == (2, 5)
    low, high = (decompose(smooth(3000, 16), rel_error=e)[0].bytes for e in (0.5, 0.1))
    assert low < high


@pytest.mark.parametrize("rel_error", [0.5, 0.06])
def test_rel_error_is_kept_where_unfoldings_have_many_rows(rel_error, monkeypatch):
    weight = smooth(9000, 48)
    expected = decompose(weight, rel_error=rel_error)[0]
    monkeypatch.setattr("ecorec.tt_svd.GRAM_ROWS", 0)
    spec, cores, _ = decompose(weight, rel_error=rel_error)
    assert spec.ranks[0] * spec.p[1] * spec.q[1] > 4 * 32  # or the Gram matrix is taken at once
    assert (spec.ranks[1] > 32) == (rel_error == 0.06)  # then 32 values are not enough
    assert error(weight, spec, cores)[1] <= rel_error
    assert sum(spec.ranks) <= 1.1 * sum(expected.ranks)


@pytest.mark.parametrize("max_bytes", [900, 3000, 20_000, 10**9])
@pytest.mark.parametrize("make", [noise, smooth])
def test_max_bytes_is_kept(max_bytes, make):
    weight = make(1009, 7)
    spec, cores, report = decompose(weight, max_bytes=max_bytes)
    assert sum(core.nbytes for core in cores) == report.bytes == spec.bytes <= max_bytes


@pytest.mark.parametrize(
    ("make", "max_bytes"), [(smooth, 4000), (smooth, 12_000), (smooth, 40_000), (noise, 4000)]
)
def test_ranks_under_max_bytes_are_better_than_equal_ones(make, max_bytes):
    weight = make(2000, 16)
    _, _, chosen = decompose(weight, max_bytes=max_bytes)
    equal = largest_spec(2000, 16, max_bytes, torch.float32)
    assert chosen.relative_error < decompose(weight, spec=equal)[2].relative_error


def test_bytes_are_not_spent_on_rounding():
    shape = largest_spec(3000, 16, 60_000, torch.float32)
    weight = of_rank(TTSpec(3000, 16, shape.p, shape.q, (2, 5)), torch.float32)
    spec, _, report = decompose(weight, max_bytes=60_000)
    assert spec.ranks == (2, 5)
    assert report.relative_error < 3e-7


@given(
    n=st.integers(1, 400),
    d=st.integers(1, 20),
    rank=st.integers(1, 12),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_any_small_table_is_converted_and_its_error_true(n, d, rank, seed):
    weight = noise(n, d, seed, torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ranks .* are above the limits")
        spec, cores, report = decompose(weight, rank=rank)
    assert report.absolute_error == pytest.approx(error(weight, spec, cores)[0], abs=1e-9)
    assert report.relative_error <= 1


def test_full_ranks_lose_nothing():
    spec = TTSpec(571, 11, p=(5, 6, 20), q=(2, 2, 3), ranks=(10, 60), dtype=torch.float64)
    assert decompose(noise(571, 11, dtype=torch.float64), spec=spec)[2].relative_error < 1e-12


def test_a_rank_that_the_one_before_does_not_allow_is_filled_with_zeros():
    spec = TTSpec(600, 12, p=(5, 6, 20), q=(2, 2, 3), ranks=(1, 40))
    possible = TTSpec(600, 12, spec.p, spec.q, ranks=(1, 12))
    _, cores, report = decompose(noise(600, 12), spec=spec)
    assert [tuple(core.shape) for core in cores] == list(spec.core_shapes)
    best = decompose(noise(600, 12), spec=possible)[2]
    assert report.relative_error == pytest.approx(best.relative_error, rel=1e-6)


def test_left_cores_are_orthogonal_and_all_have_the_same_root_mean_square():
    spec = NO_PADDING[3]
    _, cores, _ = decompose(noise(600, 12) * 37, spec=spec)
    for core in cores[:-1]:
        matrix = core.transpose(0, 1).flatten(0, 2)
        gram = matrix.T @ matrix
        assert torch.allclose(gram, gram[0, 0] * torch.eye(len(gram)), atol=1e-5 * gram[0, 0])
    rms = [float(core.square().mean().sqrt()) for core in cores]
    assert max(rms) / min(rms) < 1.0001


@pytest.mark.parametrize("name", ["both", "both, d = 4"])
def test_the_size_of_chunks_changes_nothing(name):
    spec = PADDED[name]
    weight = smooth(spec.num_embeddings, spec.embedding_dim).double()
    results = [decompose(weight, spec=spec, chunk_bytes=size) for size in (1, 3000, 32 << 20)]
    first = results[0][2]
    for _, cores, report in results:
        assert report.relative_error == pytest.approx(first.relative_error, rel=1e-9)
        assert report.absolute_error == pytest.approx(error(weight, spec, cores)[0], rel=1e-6)


def from_file(weight, path):
    weight.numpy().tofile(path / "table")
    return torch.from_file(str(path / "table"), size=weight.numel()).view(weight.shape)


def from_memmap(weight, path):
    np.save(path / "table.npy", weight.numpy())
    return torch.from_numpy(np.load(path / "table.npy", mmap_mode="c"))


@pytest.mark.parametrize(
    "same",
    [
        lambda weight, path: torch.nn.Parameter(weight),
        lambda weight, path: weight.T.contiguous().T,
        lambda weight, path: torch.stack([weight, weight + 1], 2)[..., 0],
        from_file,
        from_memmap,
    ],
)
def test_it_matters_not_where_a_table_lies(same, tmp_path):
    spec = PADDED["both"]
    weight = smooth(571, 11)
    other = same(weight, tmp_path)
    expected, found = (decompose(table, spec=spec) for table in (weight, other))
    for a, b in zip(expected[1], found[1], strict=True):
        assert a.equal(b)
        assert not b.requires_grad
    assert found[2] == expected[2]
    assert other.detach().equal(weight)  # and it is left as it was


def test_a_table_of_one_number_has_rank_one():
    weight = torch.tensor(7.0).expand(571, 11)
    assert decompose(weight, rank=1)[2].relative_error < 3e-7


def test_a_table_of_zeros_has_no_error():
    spec, cores, report = decompose(torch.zeros(571, 11), rank=3)
    assert report.relative_error == report.absolute_error == 0
    assert table_of(cores, 571, 11).eq(0).all()
    assert any(core.ne(0).any() for core in cores)  # or no gradient would reach any
    assert decompose(torch.zeros(571, 11), max_bytes=10_000)[0].ranks == (1, 1)
    assert decompose(torch.zeros(571, 11), rel_error=0.1)[0].ranks == (1, 1)
    assert spec.ranks == (3, 3)


def test_the_spec_gives_the_dtype_of_the_cores():
    spec = TTSpec(600, 12, p=(5, 6, 20), q=(2, 2, 3), ranks=(4, 6), dtype=torch.float64)
    weight = of_rank(spec, torch.float32)
    _, cores, report = decompose(weight, spec=spec)
    assert all(core.dtype == torch.float64 for core in cores)
    assert report.bytes == 8 * sum(core.numel() for core in cores)


@pytest.mark.parametrize("n", [400_000, 399_001])
def test_the_table_is_never_copied(n):
    weight = noise(n, 16)
    spec = TTSpec(n, 16, p=(40, 40, 250), q=(2, 2, 4), ranks=(4, 4))
    with track_peak() as peak:
        decompose(weight, spec=spec, chunk_bytes=1 << 20)
    # Twice the projection to 4 of 80 rows, and a few buffers.
    assert peak.bytes < 2 * weight.nbytes * 4 / 80 + 6 * (1 << 20) < weight.nbytes / 2


def test_the_search_for_ranks_never_copies_the_table():
    weight = noise(400_000, 16)
    shape = largest_spec(400_000, 16, 30_000, torch.float32)
    with track_peak() as peak:
        decompose(weight, max_bytes=30_000, chunk_bytes=1 << 20)
    share = 4 * max(shape.ranks) / (shape.p[0] * shape.q[0])
    assert peak.bytes < 2 * share * weight.nbytes + 6 * (1 << 20) < weight.nbytes


@pytest.mark.parametrize(
    ("weight", "arguments", "error", "message"),
    [
        (noise(9, 4), {}, ValueError, "exactly one of spec, rank, .* got none"),
        (noise(9, 4), {"rank": 2, "max_bytes": 500}, ValueError, "got rank, max_bytes"),
        (noise(9, 4).half(), {"rank": 2}, TypeError, "got torch.float16"),
        (noise(9, 4)[0], {"rank": 2}, ValueError, r"\[N, D\].* got shape \(4,\)"),
        (noise(0, 4), {"rank": 2}, ValueError, r"not empty; got shape \(0, 4\)"),
        (noise(9, 4), {"rank": 0}, ValueError, "rank must be at least 1; got 0"),
        (noise(9, 4), {"rank": 2, "chunk_bytes": 0}, ValueError, "chunk_bytes must .* got 0"),
        (noise(9, 4), {"max_bytes": -1}, ValueError, "max_bytes must be at least 1; got -1"),
        (noise(9, 4), {"max_bytes": 10}, ValueError, r"max_bytes must be at least \d+, .* got 10"),
        (noise(9, 4), {"rel_error": 1.0}, ValueError, r"rel_error must be in \[1e-05, 1\); got 1"),
        (noise(9, 4), {"rel_error": -0.1}, ValueError, "got -0.1"),
        (noise(9, 4), {"rel_error": 1e-9}, ValueError, "got 1e-09"),
        (noise(9, 4), {"rel_error": math.nan}, ValueError, "got nan"),
        (noise(9, 4), {"spec": NO_PADDING[2]}, ValueError, "9 x 4; got 600 x 12"),
        (noise(9, 4).log(), {"rank": 1}, ValueError, "weight must be finite"),
        (noise(9, 4) / 0, {"rel_error": 0.1}, ValueError, "weight must be finite"),
    ],
)
def test_bad_input_is_refused_by_name(weight, arguments, error, message):
    with pytest.raises(error, match=message):
        decompose(weight, **arguments)


@pytest.mark.ranks
def test_the_benchmark_measures_one_conversion_in_its_own_process():
    rows = {row["name"]: row for row in conversion.bench_rows(20_000, 16, 4, threads=1)}
    assert rows.keys() == {"seconds", "extra_resident", "relative_error"}
    assert rows["seconds"]["value"] > 0
    assert rows["extra_resident"]["value"] > 0
    assert rows["relative_error"]["value"] == pytest.approx(0.1, rel=0.15)
    assert all(row["must"] is None and row["threads"] == 1 for row in rows.values())


@pytest.mark.parametrize("name", ["rows", "dim", "rank", "threads"])
def test_the_benchmark_refuses_numbers_below_one_by_name(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        conversion.bench_rows(**{"rows": 9, "dim": 4, "rank": 2, "threads": 1, name: 0})
