import pytest
import torch

from ecorec import TTEmbeddingBag, TTSpec
from ecorec.initialisers import match_normal

SHAPES = {
    2: TTSpec(40_000, 16, p=(200, 200), q=(4, 4), ranks=(12,)),
    3: TTSpec(40_000, 16, p=(25, 40, 40), q=(2, 2, 4), ranks=(12, 16)),
    4: TTSpec(40_000, 16, p=(10, 10, 20, 20), q=(2, 2, 2, 2), ranks=(8, 16, 12)),
}


def entries(d, std=1.0, tables=6):
    """Entries of several tables: those of one table depend on each other through its cores."""
    found = []
    for seed in range(tables):
        rng = torch.Generator().manual_seed(seed)
        emb = TTEmbeddingBag(
            40_000, 16, spec=SHAPES[d], init_std=std, generator=rng, dtype=torch.float32
        )
        found.append(emb.to_dense().detach().double().flatten())
    return torch.cat(found)


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("std", [1.0, 0.01])
def test_entries_have_the_variance_asked_for(d, std):
    table = entries(d, std)
    assert table.var() == pytest.approx(std**2, rel=0.06)
    assert abs(table.mean()) < 0.02 * std


@pytest.mark.parametrize(("d", "expected"), [(2, 3.0), (3, 3.0), (4, 3 * (1 + 2 / 16))])
def test_entries_have_the_kurtosis_of_the_docstring(d, expected):
    table = entries(d)
    kurtosis = ((table / table.std()) ** 4).mean()
    assert kurtosis == pytest.approx(expected, rel=0.05)


def test_all_cores_have_the_same_root_mean_square():
    rms = [core.square().mean().sqrt() for core in match_normal(SHAPES[3], 0.3)]
    assert max(rms) / min(rms) < 1.05


def test_a_generator_makes_the_cores_repeatable():
    def first_core(seed):
        return match_normal(SHAPES[2], generator=torch.Generator().manual_seed(seed))[0]

    assert torch.equal(first_core(1), first_core(1))
    assert not torch.equal(first_core(1), first_core(2))


def test_a_deviation_of_zero_makes_a_table_of_zeros():
    assert all(core.eq(0).all() for core in match_normal(SHAPES[3], 0.0))


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_a_deviation_that_is_none_is_refused(std):
    with pytest.raises(ValueError, match=f"init_std must be finite and at least 0; got {std}"):
        match_normal(SHAPES[3], std)
