import pytest
import torch

from ecorec.compressors import HashedEmbeddingBag, QREmbeddingBag

KINDS = (HashedEmbeddingBag, QREmbeddingBag)


def make(kind, rows=1000, dim=6, **changed):
    settings = {"max_bytes": 4 * dim * 100, "generator": torch.Generator().manual_seed(0)}
    return kind(rows, dim, **(settings | changed))


def whole(table, rows):
    """All rows of the table as they are documented, one after the other."""
    if isinstance(table, HashedEmbeddingBag):
        return torch.stack([table.weight[i % len(table.weight)] for i in range(rows)])
    m = len(table.remainder)
    return torch.stack([table.quotient[i // m] * table.remainder[i % m] for i in range(rows)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[], [0], [3], [2, 0, 5, 1], [0, 0, 4, 0]])
def test_bags_and_gradients_are_those_of_the_whole_table(kind, lengths):
    table, twin = make(kind), make(kind)
    rng = torch.Generator().manual_seed(1)
    indices = torch.randint(1000, (sum(lengths),), generator=rng)
    indices[: len(indices) // 2] = 999  # a repeated index, the last one
    edges = torch.tensor([sum(lengths[:b]) for b in range(len(lengths) + 1)])
    bags = table(indices, edges)
    rows = whole(twin, 1000)
    parts = [rows[part].sum(0) for part in indices.split(lengths)] if lengths else []
    expected = torch.stack(parts) if parts else torch.zeros(0, 6)
    torch.testing.assert_close(bags, expected)
    bags.square().sum().backward()
    if parts:
        expected.square().sum().backward()
        for ours, theirs in zip(table.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("rows", [1, 2, 7, 60, 1000, 12_345])
@pytest.mark.parametrize("budget_rows", [2, 24, 100, 223, 1001, 20_000])
def test_qr_takes_the_greatest_remainder_that_fits(rows, budget_rows):
    dim = 3
    fitting = [m for m in range(1, rows + 1) if m + -(-rows // m) <= budget_rows]
    if not fitting:
        least = min(m + -(-rows // m) for m in range(1, rows + 1))
        with pytest.raises(ValueError, match=f"at least {least * dim * 4:,}, {least:,} rows"):
            QREmbeddingBag(rows, dim, max_bytes=budget_rows * dim * 4)
        return
    table = QREmbeddingBag(rows, dim, max_bytes=budget_rows * dim * 4)
    assert len(table.remainder) == fitting[-1]
    assert len(table.quotient) == -(-rows // fitting[-1])


@pytest.mark.parametrize(("max_bytes", "rows"), [(24, 1), (47, 1), (48, 2), (10**6, 1000)])
def test_hashing_takes_the_rows_that_fit_and_no_more_than_there_are(max_bytes, rows):
    assert make(HashedEmbeddingBag, max_bytes=max_bytes).weight.shape == (rows, 6)


def test_no_two_indices_of_qr_share_a_row():
    table = make(QREmbeddingBag)
    rows = table(torch.arange(1000), torch.arange(1001)).detach()
    assert len(rows.unique(dim=0)) == 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("std", [0.01, 3.0])
def test_entries_are_normal_with_the_asked_deviation(kind, std):
    table = make(kind, 40_000, 16, max_bytes=64 * 10_000, init_std=std)
    entries = table(torch.arange(40_000), torch.arange(40_001)).detach().double()
    assert entries.mean().abs() < 0.02 * std
    assert entries.std().item() == pytest.approx(std, rel=0.02)
    kurtosis = (entries**4).mean() / (entries**2).mean() ** 2
    assert kurtosis.item() == pytest.approx(3, abs=0.1)
    sizes = [p.square().mean().sqrt().item() for p in table.parameters()]
    assert max(sizes) == pytest.approx(min(sizes), rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_decides_the_start(kind):
    one, same = make(kind), make(kind)
    other = make(kind, generator=torch.Generator().manual_seed(1))
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert a.equal(b)
        assert not a.equal(c)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "dim", "message"),
    [
        (0, 4, "num_embeddings must be at least 1; got 0"),
        (4, 0, "embedding_dim must be at least 1; got 0"),
    ],
)
def test_sizes_below_one_are_refused(kind, rows, dim, message):
    with pytest.raises(ValueError, match=message):
        kind(rows, dim, max_bytes=1000)


def test_a_budget_below_one_row_is_refused():
    with pytest.raises(ValueError, match=r"at least 24, 1 rows .*; got 23"):
        make(HashedEmbeddingBag, max_bytes=23)
