"""What only the Triton path promises, in the interpreter; `test_drop_in` compares its results."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from ecorec import TTEmbeddingBag, TTSpec, suggest
from ecorec.kernels import grouped_product, outer_products, segment_sum, weight_gradient
from ecorec.step_benchmark import hashed_zipf

MODULES = (grouped_product, outer_products, segment_sum, weight_gradient)


class Recorder:
    """Takes a kernel's place and keeps what it is launched with."""

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        def launch(*arguments, **constexprs):
            absent = [k for k, argument in enumerate(arguments) if argument is None]
            self.launches.append((absent, constexprs))

        return launch


def test_what_a_batch_of_the_benchmark_launches_is_what_is_compiled_ahead(monkeypatch):
    launches = {}
    for module in MODULES:
        for name in module.SIGNATURES:
            launches[module, name] = []
            monkeypatch.setattr(module, name, Recorder(launches[module, name]))
    spec = suggest(10_000_000, 32, rank=32, lookups=81920)
    input = hashed_zipf(10_000_000, 81920, 1.05).view(4096, 20)
    for mode in ("sum", "mean"):
        emb = TTEmbeddingBag(10_000_000, 32, spec=spec, mode=mode, backend="triton")
        emb(input).sum().backward()
    weights = torch.ones(input.shape, requires_grad=True)
    emb = TTEmbeddingBag(10_000_000, 32, spec=spec, mode="sum", backend="triton")
    emb(input, None, weights).sum().backward()
    for (module, name), seen in launches.items():
        compiled = [
            {k: v for k, v in constexprs.items() if v is not None}
            for _, constexprs in module.SIGNATURES[name]
        ]
        assert seen, name
        for _, constexprs in seen:
            given = dict(constexprs)
            assert any(given.items() <= variant.items() for variant in compiled), (name, given)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_chunks_of_a_small_workspace_change_no_result(mode):
    spec = TTSpec(210, 10, (5, 6, 7), (2, 2, 3), (3, 4), torch.float64)
    generator = torch.Generator().manual_seed(0)
    input = torch.randint(210, (300,), generator=generator)
    offsets = torch.tensor([0, 0, 10, 150])
    found, chunks = [], []
    for workspace in (34_000, 1 << 20):
        emb = TTEmbeddingBag(
            210, 10, spec=spec, mode=mode, backend="triton", max_workspace_bytes=workspace,
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        output = emb(input, offsets)
        found.append([output, *torch.autograd.grad(output.square().sum(), list(emb.cores))])
        chunks.append(emb.statistics()["chunks"])
        assert emb.statistics()["workspace_bytes"] <= workspace
    assert chunks[0] > chunks[1] == 1
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_rows_and_pairs_that_are_cut_into_pieces_count_once():
    spec = TTSpec(600, 4, (1, 2, 300), (1, 2, 2), (1, 2), torch.float64)
    emb = TTEmbeddingBag(
        600, 4, spec=spec, mode="sum", backend="triton", scale_grad_by_freq=True,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    often = torch.full((300,), 7)  # more lookups than a row has room for
    input = torch.cat([often, torch.arange(290)])  # more rows than a slot has room for
    offsets = torch.tensor([0, 100, 400])
    output, table = emb(input, offsets), emb.to_dense()
    torch.testing.assert_close(output, F.embedding_bag(input, table, offsets, mode="sum"))
    found = torch.autograd.grad(output.sum(), list(emb.cores))
    occurring = table[input.unique()].sum()  # every different row once: its gradient by frequency
    expected = torch.autograd.grad(occurring, list(emb.cores))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_reruns_have_the_same_bits():
    emb = TTEmbeddingBag(500, 8, tt_ranks=4, mode="sum", backend="triton")
    input = torch.randint(500, (20, 4), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(2):
        output = emb(input)
        found.append([output, *torch.autograd.grad(output, list(emb.cores), torch.cos(output))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("shape", "bags"), [((0,), 3), ((0,), 0), ((4, 0), 4), ((0, 3), 0)])
def test_batches_of_nothing_are_zeros_without_gradient(shape, bags):
    emb = TTEmbeddingBag(500, 8, tt_ranks=4, mode="mean", backend="triton")
    offsets = torch.zeros(bags, dtype=torch.int64) if len(shape) == 1 else None
    output = emb(torch.zeros(shape, dtype=torch.int64), offsets)
    output.sum().backward()
    assert output.shape == (bags, 8)
    assert not output.any()
    assert not any(core.grad.any() for core in emb.cores)


def test_a_workspace_that_is_too_small_is_refused_with_the_size_that_suffices():
    emb = TTEmbeddingBag(500, 8, tt_ranks=4, backend="triton", max_workspace_bytes=100)
    with pytest.raises(ValueError, match=r"max_workspace_bytes must be at least \d+") as refused:
        emb(torch.arange(40).view(4, 10))
    words = str(refused.value).split()
    emb.max_workspace_bytes = int(words[words.index("least") + 1])
    emb(torch.arange(40).view(4, 10)).sum().backward()


def test_cores_in_host_memory_are_refused_when_kernels_are_compiled():
    code = (
        "import torch, ecorec\n"
        "emb = ecorec.TTEmbeddingBag(500, 8, tt_ranks=4, backend='triton')\n"
        "emb(torch.zeros(2, 2, dtype=torch.int64))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ValueError: backend 'triton' needs cores on a CUDA device" in done.stderr
