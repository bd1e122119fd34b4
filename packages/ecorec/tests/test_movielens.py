import importlib.metadata

import numpy as np
import pytest
import torch

from ecorec import movielens


def test_the_split_has_the_published_sizes(ratings):
    parts = (ratings.training, ratings.validation, ratings.test)
    assert [len(part) for part in parts] == [70_771, 9_596, 19_633]
    assert torch.cat(parts).sort().values.equal(torch.arange(100_000))


def test_the_split_is_by_each_users_time_and_by_file_order_at_ties():
    rng = np.random.default_rng(0)
    user = rng.integers(0, 7, 200)
    timestamp = rng.integers(0, 9, 200)  # many ties
    expected: tuple[list, list, list] = ([], [], [])
    for one in range(7):
        own = [i for i in range(200) if user[i] == one]
        own.sort(key=lambda i: timestamp[i])  # stable
        late, middle = len(own) // 5, len(own) // 10
        expected[0].extend(own[: len(own) - late - middle])
        expected[1].extend(own[len(own) - late - middle : len(own) - late])
        expected[2].extend(own[len(own) - late :])
    parts = movielens.split_by_user(user, timestamp)
    assert [part.tolist() for part in parts] == [sorted(part) for part in expected]


def test_a_sample_looks_up_its_user_item_hour_and_genres(small_data):
    loaded = movielens.load(small_data)
    one = 2 * 12 + 3  # user u2, n = 3: item 11, rating 1 + 6 % 5, hour 17, genres of 11 % 4
    batch = loaded.batch(torch.tensor([one]))

    def rows(*keys):
        return [int(movielens.hashed_rows(k, np.array([a]), b)[0]) for k, a, b in keys]

    genres = sorted(["Drama", "War", "Western"])
    expected = rows((0, 2, 0), (1, 11, 0), (2, 2, 17))
    expected += rows(*[(3, 2, genres.index(name)) for name in ("Drama", "War", "Western")])
    assert batch.indices.tolist() == expected
    assert batch.offsets.tolist() == [0, 1, 2, 3, 6]
    assert batch.labels.tolist() == [0.0]


def test_labels_are_ratings_from_four_on(small_data):
    lines = small_data.read_text().splitlines()[1:]
    expected = [float(float(line.split("\t")[2]) >= 4) for line in lines]
    assert movielens.load(small_data).labels.tolist() == expected


def test_a_batch_is_its_samples_one_after_another(small_data):
    loaded = movielens.load(small_data)
    samples = torch.tensor([5, 400, 0, 5])
    batch = loaded.batch(samples)
    singles = [loaded.batch(sample.view(1)) for sample in samples]
    assert batch.indices.equal(torch.cat([one.indices for one in singles]))
    lengths = torch.cat([one.offsets.diff() for one in singles])
    assert batch.offsets.diff().equal(lengths)
    assert batch.dense.equal(torch.cat([one.dense for one in singles]))
    assert len(loaded.batches(torch.arange(480), 100)) == 5


def test_dense_features_have_no_missing_values(small_data):
    loaded = movielens.load(small_data)  # item i0 has no release year
    assert loaded.dense.shape == (480, 1 + 2 + 2 + 1 + 3)
    assert loaded.dense.isfinite().all()
    assert loaded.dense[:, 0].unique().numel() == 40


def test_hashed_rows_spread_over_the_whole_table():
    first, second = np.divmod(np.arange(200_000), 200)
    rows = movielens.hashed_rows(3, first, second)
    assert rows.min() >= 0
    assert rows.max() < movielens.TABLE_ROWS
    used = len(np.unique(rows))
    expected = movielens.TABLE_ROWS * -np.expm1(-200_000 / movielens.TABLE_ROWS)
    assert used == pytest.approx(expected, rel=0.005)  # as of independent uniform rows
    other = movielens.hashed_rows(2, first, second)
    assert np.mean(rows == other) < 1e-4


def test_absent_data_end_with_the_command_that_brings_them(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(FileNotFoundError) as caught:
        movielens.load()
    last = str(caught.value).splitlines()[-1]
    assert last == "pip install --no-deps -r ci/no-deps.txt"


def test_a_missing_companion_is_named(small_data):
    small_data.with_suffix(".user").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file .*small\.user"):
        movielens.load(small_data)


@pytest.mark.parametrize(
    ("suffix", "old", "new", "message"),
    [
        (".inter", "rating:float", "stars:float", "has no column rating; it has user_id"),
        (".item", "class:", "genre:", "has no column class"),
        (".inter", "u0\ti0\t1\t", "u0\ti0\tfour\t", "rating of .* must be numbers.*four"),
        (".inter", "u0\ti0\t", "u0\ti99\t", "item_id 'i99' .* has no line"),
        (".inter", "u0\ti0\t", "u0\t", "line 2: 4 columns wanted; got 3"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(small_data, suffix, old, new, message):
    path = small_data.with_suffix(suffix)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        movielens.load(small_data)
