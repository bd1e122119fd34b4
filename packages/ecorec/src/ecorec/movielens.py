"""MovieLens-100k as lookups into one hashed table, split by each user's own time.

The data are the files `ml-100k.inter`, `.item` and `.user` (tab-separated, one header line) that
lie inside the recbole wheel; recbole itself is never imported.
"""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TABLE_ROWS = 1_000_000
INSTALL = "pip install --no-deps -r ci/no-deps.txt"
INSTALL_ANYWHERE = "pip install --no-deps recbole==1.2.1"
LIKED = 4.0  # a rating from here on is the positive label
COLUMNS = (  # of .inter, .item, .user
    ("user_id", "item_id", "rating", "timestamp"),
    ("item_id", "release_year", "class"),
    ("user_id", "age", "gender", "occupation"),
)
FEATURES = ("user", "item", "user x hour", "user x genre")


@dataclass(frozen=True)
class Batch:
    """Samples of one step.

    dense: [B, C] float32; indices: [V] int64 table rows; offsets: [4 B + 1] int64, the bags of the
    four FEATURES of the first sample, then of the second, ...; labels: [B] float32, 0 or 1.
    """

    dense: Tensor
    indices: Tensor
    offsets: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Ratings:
    """All samples in file order, and the three parts of the split as positions among them.

    dense: [n, C] float32.
    indices: [V] int64 table rows; offsets: [4 n + 1] int64 bags as in Batch.
    labels: [n] float32; training, validation, test: int64 positions.
    """

    dense: Tensor
    indices: Tensor
    offsets: Tensor
    labels: Tensor
    training: Tensor
    validation: Tensor
    test: Tensor

    def batch(self, samples: Tensor) -> Batch:
        """The Batch of these samples [B], in their order."""
        features = len(FEATURES)
        bags = (samples[:, None] * features + torch.arange(features)).flatten()
        starts, lengths = self.offsets[bags], self.offsets[bags + 1] - self.offsets[bags]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
        indices = self.indices[torch.arange(len(shift)) + shift]
        return Batch(self.dense[samples], indices, offsets, self.labels[samples])

    def batches(self, samples: Tensor, size: int) -> list[Batch]:
        """Batches of `size` samples, the last one shorter."""
        return [self.batch(part) for part in torch.split(samples, size)]


def find_data() -> Path:
    """The path of `ml-100k.inter` inside the installed recbole distribution.

    Raises:
        FileNotFoundError: it is not installed; the last line is the command that brings it.
    """
    try:
        files = importlib.metadata.files("recbole") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "ml-100k.inter" and (path := Path(str(file.locate()))).is_file():
            return path
    raise FileNotFoundError(
        "MovieLens-100k is not here: it comes inside the recbole wheel, without its dependencies.\n"
        f"Without a checkout: {INSTALL_ANYWHERE}\n"
        f"{INSTALL}"
    )


def load(path: Path | str | None = None) -> Ratings:
    """The ratings as lookups, labels and a split.

    Args:
        path: an `.inter` file with `.item` and `.user` of the same name beside it; by default the
            one that `find_data` finds.

    Raises:
        FileNotFoundError: one of the three files is missing; the last line is the command that
            brings them.
        ValueError: a column is missing, a number is not one, or a user or item is unknown.

    Label: rating >= 4. Split: `split_by_user`. Dense features: age, release year, gender,
    occupation, genres. Every feature of FEATURES becomes rows of one table by `hashed_rows`.
    """
    inter_path = find_data() if path is None else Path(path)
    paths = [inter_path.with_suffix(suffix) for suffix in (".inter", ".item", ".user")]
    for file in (inter_path, *paths):
        if not file.is_file():
            raise FileNotFoundError(
                f"no file {file}; its copy comes with recbole.\n"
                f"Without a checkout: {INSTALL_ANYWHERE}\n"
                f"{INSTALL}"
            )
    inter, items, users = (
        _read_columns(file, names) for file, names in zip(paths, COLUMNS, strict=True)
    )
    item_of = _positions(inter, "item_id", items, paths)
    user_of = _positions(inter, "user_id", users, paths)
    rating = _numbers(inter, "rating", paths[0])
    timestamp = _numbers(inter, "timestamp", paths[0]).astype(np.int64)
    training, validation, test = split_by_user(user_of, timestamp)

    genre_names = sorted({genre for genres in items["class"] for genre in genres.split()})
    genres = np.array([[name in row.split() for name in genre_names] for row in items["class"]])
    hour = timestamp // 3600 % 24
    # One entry for each genre of each sample, in sample order.
    sample, genre = np.nonzero(genres[item_of])
    samples = np.arange(len(rating))
    bag = np.concatenate([4 * samples, 4 * samples + 1, 4 * samples + 2, 4 * sample + 3])
    rows = np.concatenate(
        [
            hashed_rows(0, user_of),
            hashed_rows(1, item_of),
            hashed_rows(2, user_of, hour),
            hashed_rows(3, user_of[sample], genre),
        ]
    )
    lengths = np.bincount(bag, minlength=4 * len(samples))
    about_user = np.column_stack(
        [_standardised(users["age"]), _one_hot(users["gender"]), _one_hot(users["occupation"])]
    )
    about_item = np.column_stack([_standardised(items["release_year"]), genres])
    return Ratings(
        dense=torch.from_numpy(np.hstack([about_user[user_of], about_item[item_of]])).float(),
        indices=torch.from_numpy(rows[np.argsort(bag, kind="stable")]),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        labels=torch.from_numpy(rating >= LIKED).float(),
        training=torch.from_numpy(training),
        validation=torch.from_numpy(validation),
        test=torch.from_numpy(test),
    )


def split_by_user(
    user: np.ndarray, timestamp: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions of the training, validation and test part, each ascending.

    Of the n ratings of a user, ordered by time and then by position, the last n // 5 are for test,
    the n // 10 before them for validation, the rest for training.
    """
    order = np.lexsort((timestamp, user))
    counts = np.bincount(user)
    first = np.cumsum(counts) - counts
    place = np.arange(len(user)) - first[user[order]]
    n = counts[user[order]]
    test_start = n - n // 5
    validation_start = test_start - n // 10
    parts = (
        place < validation_start,
        (place >= validation_start) & (place < test_start),
        place >= test_start,
    )
    training, validation, test = (np.sort(order[part]) for part in parts)
    return training, validation, test


def hashed_rows(feature: int, first: np.ndarray, second: np.ndarray | int = 0) -> np.ndarray:
    """Table rows [n] int64 of a feature's values, or of pairs of values.

    64 bits are mixed (the finaliser of MurmurHash3) so that rows of all features spread evenly
    over the table; values collide as in any hashed table.
    """
    key = (np.uint64(feature) << np.uint64(56)) ^ (first.astype(np.uint64) << np.uint64(28))
    key = key ^ np.asarray(second).astype(np.uint64)
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        key = (key ^ (key >> np.uint64(33))) * np.uint64(multiplier)
    return ((key ^ (key >> np.uint64(33))) % np.uint64(TABLE_ROWS)).astype(np.int64)


def _read_columns(path: Path, wanted: Sequence[str]) -> dict[str, list[str]]:
    """The wanted columns of a file by name; a header cell is `name:type`."""
    header, *lines = path.read_text(encoding="utf-8").split("\n")
    names = [cell.split(":")[0] for cell in header.split("\t")]
    if absent := [name for name in wanted if name not in names]:
        raise ValueError(f"{path} has no column {', '.join(absent)}; it has {', '.join(names)}")
    table = [line.split("\t") for line in lines if line]
    for number, cells in enumerate(table, start=2):
        if len(cells) != len(names):
            raise ValueError(
                f"{path}, line {number}: {len(names)} columns wanted; got {len(cells)}"
            )
    return {name: [cells[names.index(name)] for cells in table] for name in wanted}


def _positions(
    inter: dict[str, list[str]], column: str, table: dict[str, list[str]], paths: list[Path]
) -> np.ndarray:
    """[n] int64: where each rating's user or item stands in its own file."""
    position = {name: i for i, name in enumerate(table[column])}
    unknown = next((name for name in inter[column] if name not in position), None)
    if unknown is not None:
        raise ValueError(f"{column} {unknown!r} of {paths[0]} has no line in its own file")
    return np.array([position[name] for name in inter[column]], dtype=np.int64)


def _numbers(inter: dict[str, list[str]], column: str, path: Path) -> np.ndarray:
    try:
        return np.array(inter[column], dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{column} of {path} must be numbers: {error}") from None


def _standardised(cells: list[str]) -> np.ndarray:
    """[n] with mean 0 and deviation 1; cells that are no number (three release years) become 0."""
    numbers = np.array([float(cell) if cell.isdigit() else np.nan for cell in cells])
    deviation = np.nanstd(numbers) or 1.0
    return np.asarray(np.nan_to_num((numbers - np.nanmean(numbers)) / deviation))


def _one_hot(cells: list[str]) -> np.ndarray:
    """[n, names] bool, the names in alphabetical order."""
    names = sorted(set(cells))
    return np.array([[cell == name for name in names] for cell in cells])
