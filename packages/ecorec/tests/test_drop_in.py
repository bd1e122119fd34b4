"""Every backend is nn.EmbeddingBag over `to_dense()`: outputs and gradients, random settings."""

import random
import warnings
from itertools import pairwise

import pytest
import torch

from ecorec import TTEmbedding, TTEmbeddingBag

SIZES = (1, 2, 3, 7, 13, 60, 97, 500, 1009, 4999)


def setting(seed, backend, dtype):
    """An embedding and a batch for it, with everything that may vary chosen by the seed."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    d = chance.choice([2, 3, 4] if backend == "torch" else [2, 3])
    rows = chance.choice([*SIZES, chance.randint(1, 5000)])
    mode = chance.choice(["sum", "mean"] if backend == "triton" else ["sum", "mean", "max"])
    if mode == "max":
        dtype = torch.float64  # where near-ties do not flip
    last = chance.random() < 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small tables are no smaller as tensor trains
        emb = TTEmbeddingBag(
            rows,
            chance.randint(1, 70),
            tt_ranks=[chance.randint(1, 40) for _ in range(d - 1)],
            mode=mode,
            padding_idx=chance.choice([None, None, chance.randrange(rows)]),
            include_last_offset=last,
            dtype=dtype,
            backend=backend,
            generator=generator,
            max_workspace_bytes=chance.choice([1 << 20, 64 << 20]),
        )
    lookups = chance.randint(0, 30 if backend == "triton" else 80)  # interpreted kernels are slow
    index = torch.randint(rows, (lookups,), generator=generator)
    if lookups and chance.random() < 0.5:  # duplicates
        index = index[torch.randint(max(1, lookups // 4), (lookups,), generator=generator)]
    index = index.to(chance.choice([torch.int32, torch.int64]))
    offsets, bags = None, chance.randint(0, 12)
    if chance.random() < 0.4:
        size = chance.randint(0, 5)
        bags = lookups // size if size else bags
        index = index[: bags * size].view(bags, size)
    else:
        index = index if bags else index[:0]
        edges = torch.randint(len(index) + 1, (bags + 1,), generator=generator).sort().values
        edges[0] = 0
        offsets = (edges if last else edges[:-1]).to(chance.choice([torch.int32, torch.int64]))
    weights = None
    if mode == "sum" and chance.random() < 0.5:
        weights = torch.randn(index.shape, generator=generator, dtype=dtype).requires_grad_()
    if seed % 7 == 0:
        emb.cores[0].requires_grad_(False)
    return emb, index, offsets, weights


def bags_of(emb, table, index, offsets, weights):
    """The definition, bag by bag in Python, over the dense table."""
    flat = index.reshape(-1).long()
    if offsets is None:
        edges = [b * index.shape[1] for b in range(len(index) + 1)]
    else:
        edges = offsets.tolist() + ([] if emb.include_last_offset else [len(flat)])
    found = []
    for start, end in pairwise(edges):
        chosen = [v for v in range(start, end) if int(flat[v]) != emb.padding_idx]
        rows = table[flat[chosen]]
        if weights is not None:
            rows = rows * weights.reshape(-1)[chosen][:, None]
        if not chosen:
            found.append(table.new_zeros(table.shape[1]))
        elif emb.mode == "max":
            found.append(rows.max(0).values)
        else:
            found.append(rows.sum(0) if emb.mode == "sum" else rows.mean(0))
    return torch.stack(found) if found else table.sum() * table.new_zeros(0, table.shape[1])


def assert_close(actual, expected, what):
    if actual is None or expected is None:
        assert not any(x.any() for x in (actual, expected) if x is not None), what
        return
    assert actual.shape == expected.shape, what
    if not expected.numel():
        return
    tolerance = 1e-5 if expected.dtype == torch.float32 else 1e-9
    apart = (actual - expected).abs().max()
    assert apart <= tolerance * expected.abs().max(), f"{what}: {apart}"


def assert_drops_in(seed, backend, dtype):
    emb, index, offsets, weights = setting(seed, backend, dtype)
    if dtype == torch.float32 and min(core.numel() for core in emb.cores) < 8:
        # The largest of so few sums may cancel, and no order of float32 gives it to 1e-5 then.
        emb, index, offsets, weights = setting(seed, backend, torch.float64)
    ours = emb(index, offsets, weights)
    theirs = bags_of(emb, emb.to_dense(), index, offsets, weights)
    what = f"seed {seed}, {emb}"
    assert_close(ours.detach(), theirs.detach(), what)
    leaves = [core for core in emb.cores if core.requires_grad]
    leaves += [weights] if weights is not None else []
    if not theirs.requires_grad:
        return
    gradient = torch.randn(
        ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(seed + 1)
    )
    found = torch.autograd.grad(ours, leaves, gradient, allow_unused=True)
    expected = torch.autograd.grad(theirs, leaves, gradient, allow_unused=True)
    for k, (a, e) in enumerate(zip(found, expected, strict=True)):
        assert_close(a, e, f"gradient {k}, {what}")


@pytest.mark.parametrize(
    ("backend", "settings"), [("torch", 500), ("cpu", 500), ("triton", 40), ("reference", 50)]
)
@pytest.mark.parametrize("part", range(5))
def test_outputs_and_gradients_are_those_of_the_dense_table(backend, settings, part):
    for seed in range(part, settings, 5):
        assert_drops_in(seed, backend, torch.float32 if seed % 2 else torch.float64)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_an_embedding_gives_rows_of_any_shape_and_padding_is_zeros_without_gradient(padding_idx):
    emb = TTEmbedding(50, 6, padding_idx, tt_ranks=3, dtype=torch.float64)
    index = torch.tensor([[[3, 49], [0, 3]], [[7, 7], [1, 2]]])
    table = emb.to_dense()
    expected = table[index]
    if padding_idx is not None:
        expected = expected * (index != padding_idx)[..., None]
    rows = emb(index)
    torch.testing.assert_close(rows, expected)
    gradient = torch.randn(rows.shape, dtype=rows.dtype, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad(rows, list(emb.cores), gradient)
    for a, e in zip(found, torch.autograd.grad(expected, list(emb.cores), gradient), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
def test_frequent_rows_have_their_gradient_divided_by_how_often_they_are_asked_for(backend):
    options = {"tt_ranks": 4, "mode": "sum", "dtype": torch.float64, "backend": backend}
    emb = TTEmbeddingBag(60, 8, scale_grad_by_freq=True, **options)
    index = torch.tensor([[5, 5, 9], [5, 0, 59]])
    gradient = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad(emb(index), list(emb.cores), gradient)
    counts = torch.bincount(index.flatten(), minlength=60)
    dense = torch.zeros(60, 8, dtype=torch.float64)
    for bag, rows in enumerate(index):
        for row in rows:
            dense[row] += gradient[bag] / counts[row]
    expected = torch.autograd.grad(emb.to_dense(), list(emb.cores), dense)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("d", [2, 3, 4])
def test_gradients_agree_with_finite_differences(backend, mode, d):
    if backend == "cpu" and d == 4:
        pytest.skip("cpu has two or three cores")
    emb = TTEmbeddingBag(
        20, 4, tt_ranks=[2] * (d - 1), mode=mode, dtype=torch.float64, backend=backend
    )
    index, offsets = torch.tensor([3, 3, 19, 0, 7]), torch.tensor([0, 2, 2])
    weights = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = weights.requires_grad_() if mode == "sum" else None

    def bags(*inputs):
        return emb(index, offsets, weights)

    inputs = [*emb.cores] + ([weights] if weights is not None else [])
    assert torch.autograd.gradcheck(bags, inputs)
