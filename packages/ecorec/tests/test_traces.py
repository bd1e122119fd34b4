import gzip
import io
import pickle

import numpy as np
import pytest
import torch

from ecorec.experiments import figure4
from ecorec.traces import FEATURES, TableTrace, load, meta788
from septet_shared.experiment import Rows

SKEWED = TableTrace("skewed", 5000, 3.5, 4000, exponent=1.2, shift=5.0, hot_share=0.3)


def fraction(trace, samples, seed=0):
    indices = trace.batch(samples, seed=seed).indices
    return len(torch.unique(indices)) / len(indices)


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_has_the_unique_fractions_of_the_paper(name):
    trace = FEATURES[name]
    for samples, printed in zip(figure4.BATCHES, figure4.ROWS_OF_PAPER[name], strict=True):
        if printed < 0.0010:
            continue
        lookups = samples * trace.pooling
        assert trace.expected_uniques(lookups) / lookups == pytest.approx(printed, rel=0.03)
        if lookups < 500_000:
            assert fraction(trace, samples) == pytest.approx(printed, rel=0.03)


@pytest.mark.parametrize(
    "trace",
    [
        SKEWED,
        TableTrace("even", 3000, 2.0, 3000, exponent=0.0),
        TableTrace("steep", 100_000, 1.0, 50_000, exponent=2.5),
        TableTrace("one row", 7, 1.0, 1),
    ],
    ids=lambda trace: trace.name,
)
def test_drawn_batches_have_the_expected_different_rows(trace):
    seen = [len(torch.unique(trace.batch(1500, seed=seed).indices)) for seed in range(20)]
    expected = trace.expected_uniques(1500 * trace.pooling)
    assert np.mean(seen) == pytest.approx(expected, rel=0.02)


def test_popularity_falls_with_the_exponent_and_hot_rows_have_their_share():
    """Counted over many lookups, against the law written out for every rank."""
    counts = np.sort(np.bincount(SKEWED.batch(200_000).indices.numpy(), minlength=5000))[::-1]
    law = (np.arange(4000 - 8) + 5.0) ** -1.2
    law = np.concatenate([np.full(8, 0.3 / 8), 0.7 * law / law.sum()])
    shares = counts / counts.sum()
    for top in (8, 20, 100, 1000):
        expected = np.sort(law)[::-1][:top].sum()
        assert shares[:top].sum() == pytest.approx(expected, rel=0.03)
    assert np.count_nonzero(counts) <= 4000


def test_a_batch_has_the_lengths_of_its_pooling():
    one = FEATURES["f44"].batch(1000)
    assert one.lengths.tolist() == [1] * 1000
    many = SKEWED.batch(20_000)
    assert many.lengths.float().mean() == pytest.approx(3.5, rel=0.02)
    assert many.lengths.float().var() == pytest.approx(3.5, rel=0.05)  # as of a Poisson number
    assert (many.lengths == 0).any()
    assert many.offsets[0] == 0
    assert many.offsets[-1] == many.lengths.sum() == len(many.indices)
    assert many.indices.dtype == many.offsets.dtype == torch.int64


def test_no_samples_are_an_empty_batch():
    indices, offsets = SKEWED.batch(0)
    assert indices.shape == (0,)
    assert offsets.tolist() == [0]
    assert SKEWED.expected_uniques(0) == 0


def test_the_same_seed_gives_the_same_lookups_and_another_seed_or_name_others():
    first, again = SKEWED.batch(50, seed=3), SKEWED.batch(50, seed=3)
    assert torch.equal(first.indices, again.indices)
    assert torch.equal(first.offsets, again.offsets)
    twin = TableTrace("twin", 5000, 3.5, 4000, exponent=1.2, shift=5.0, hot_share=0.3)
    for other in (SKEWED.batch(50, seed=4), twin.batch(50, seed=3)):
        assert not torch.equal(first.offsets, other.offsets)


@pytest.mark.parametrize("rows", [1, 8, 12_345, 2**31])
def test_different_ranks_are_different_rows_of_the_table(rows):
    trace = TableTrace("all", rows, 1.0, rows, exponent=0.0)
    indices = trace.batch(200_000).indices
    assert 0 <= indices.min() <= indices.max() < rows
    # Even draws of so many rows; a scatter that let rows meet would have fewer.
    expected = trace.expected_uniques(200_000)
    assert len(torch.unique(indices)) == pytest.approx(expected, rel=0.005)
    if rows < 100_000:
        assert len(torch.unique(indices)) == rows


def test_the_population_is_the_same_for_a_seed_and_holds_the_known_features():
    tables = meta788()
    assert len(tables) == 788
    assert tables == meta788(0) != meta788(1)
    assert [table.name for table in tables] == [f"f{n}" for n in range(788)]
    for name, trace in FEATURES.items():
        assert tables[int(name[1:])] == trace


def test_the_population_spreads_over_sizes_and_pooling():
    tables = meta788(5)
    rows = np.array([table.num_embeddings for table in tables])
    pooling = np.array([table.pooling for table in tables])
    for low, high in ((10, 10**3), (10**3, 10**5), (10**5, 10**7), (10**7, 10**8)):
        assert np.mean((rows >= low) & (rows < high)) > 0.08
    assert 0.3 < np.mean(pooling == 1) < 0.5
    assert np.median(pooling[pooling != 1]) == pytest.approx(8, rel=0.25)
    assert pooling.max() <= 200
    assert all(table.batch(3).indices.max() < table.num_embeddings for table in tables[::50])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_embeddings": 0}, "num_embeddings must be in"),
        ({"num_embeddings": 2**31 + 1}, "num_embeddings must be in"),
        ({"pooling": 0.0}, "pooling must be positive and finite; got 0.0"),
        ({"pooling": float("nan")}, "pooling must be"),
        ({"used_rows": 101}, "used_rows must be from 1 to num_embeddings; got 101"),
        ({"used_rows": 8, "hot_share": 0.1}, "used_rows must be from 9"),
        ({"exponent": -1.0}, "exponent must be at least 0"),
        ({"shift": 0.0}, "shift must be positive"),
        ({"hot_share": 1.0}, r"hot_share must be in \[0, 1\); got 1.0"),
    ],
)
def test_a_law_that_is_none_is_refused_by_name(wrong, message):
    given = {"name": "t", "num_embeddings": 100, "pooling": 1.0, "used_rows": 50}
    with pytest.raises(ValueError, match=message):
        TableTrace(**(given | wrong))


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="samples must be at least 0; got -1"):
        SKEWED.batch(-1)
    with pytest.raises(ValueError, match="seed must be at least 0; got -2"):
        SKEWED.batch(1, seed=-2)
    with pytest.raises(ValueError, match="seed must be at least 0; got -2"):
        meta788(-2)
    with pytest.raises(ValueError, match="lookups must be at least 0; got -3"):
        SKEWED.expected_uniques(-3)


def write(path, held):
    buffer = io.BytesIO()
    torch.save(held, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue()))
    return path


INDICES = torch.tensor([5, 6, 7, 8, 9, 1], dtype=torch.int32)
LENGTHS = torch.tensor([[2, 0, 1], [0, 0, 3]], dtype=torch.int32)
OFFSETS = torch.tensor([0, 2, 2, 3, 3, 3, 6])


@pytest.mark.parametrize("container", [tuple, list])
def test_an_original_file_gives_each_table_its_batch(tmp_path, container):
    first, second = load(write(tmp_path / "trace.pt.gz", container([INDICES, OFFSETS, LENGTHS])))
    assert first.indices.tolist() == [5, 6, 7]
    assert first.offsets.tolist() == [0, 2, 2, 3]
    assert first.lengths.tolist() == [2, 0, 1]
    assert second.indices.tolist() == [8, 9, 1]
    assert second.offsets.tolist() == [0, 0, 0, 3]
    assert first.indices.dtype == torch.int64


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ((INDICES, OFFSETS), "must hold three tensors"),
        ((INDICES, OFFSETS, [2, 1]), "must hold three tensors"),
        ({"indices": INDICES}, "must hold three tensors"),
        ((INDICES, OFFSETS, LENGTHS.flatten()), r"shapes .*; got \[6\], \[7\], \[6\]"),
        ((INDICES[:-1], OFFSETS, LENGTHS), "from 0 to V = 5"),
        ((INDICES, OFFSETS + 1, LENGTHS), "running sum of lengths"),
        ((INDICES, OFFSETS[:-1], LENGTHS), "running sum of lengths"),
        (
            (INDICES, torch.tensor([0, 7, 6]), torch.tensor([[7, -1]])),
            "running sum of lengths, none",
        ),
        ((INDICES.float(), OFFSETS, LENGTHS), "integers"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, held, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "trace.pt.gz", held))


class Harmful:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def test_nothing_in_a_file_is_executed(tmp_path):
    path = tmp_path / "trace.pt.gz"
    with pytest.raises(ValueError, match=r"torch\.save of three tensors"):
        load(write(path, (INDICES, OFFSETS, Harmful())))
    path.write_bytes(gzip.compress(pickle.dumps(Harmful(), protocol=2)))
    with pytest.raises(ValueError, match=r"torch\.save of three tensors"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"plain text", gzip.compress(b""), b"\x1f\x8b\x08"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "trace.pt.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"torch\.save of three tensors"):
        load(tmp_path / "trace.pt.gz")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.pt.gz")


def test_figure4_calls_itself_a_calibration_and_holds_for_the_fit_only():
    rows = list(figure4.run(figure4.SCALES["smoke"]))
    assert "Calibration" in figure4.TITLE
    assert "calibration, not a reproduction" in figure4.__doc__
    assert all(row["notes"].startswith("calibration") for row in rows)
    assert {row["kind"] for row in rows} == {"counted"}
    assert all(claim.holds for claim in figure4.claims(Rows(rows, "smoke")))
    off = [row | {"value": 0.85 * row["value"]} for row in rows]
    assert [claim.holds for claim in figure4.claims(Rows(off, "smoke"))] == [False, True, True]
    swapped = {"cubic": "searched", "searched": "cubic", "rows": "rows"}
    turned = [row | {"variant": swapped[row["variant"]]} for row in rows]
    assert [claim.holds for claim in figure4.claims(Rows(turned, "smoke"))] == [True, False, False]


def test_the_figures_of_the_paper_stand_beside_rows_of_the_same_point():
    points = {(p["name"], p["variant"], p["table"], p["batch"]): p["value"] for p in figure4.PAPER}
    assert points["unique_fraction", "rows", "f4", 2048] == 0.3209
    assert points["unique_fraction", "rows", "f125", 131072] == 0.0644
    assert points["pair_fraction", "first two of four", "f44", 4096] == 0.0069
    for row in figure4.run(figure4.SCALES["smoke"]):
        place = (row["name"], row["variant"], row["table"], row["batch"])
        assert (place in points) == (row["name"] == "unique_fraction")
