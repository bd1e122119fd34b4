"""What only the C++ path promises: bits, bounded workspace, errors before anything runs."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ecorec import TTEmbeddingBag, TTSpec

ROWS, DIM = 1_000_003, 32
BITS = """
import hashlib, sys, torch
from ecorec import TTEmbeddingBag
emb = TTEmbeddingBag(1_000_003, 32, tt_ranks=16, mode="sum", backend="cpu",
                     generator=torch.Generator().manual_seed(0),
                     max_workspace_bytes=int(sys.argv[1]))
index = torch.randint(1_000_003, (512, 16), generator=torch.Generator().manual_seed(1))
for turn in range(2):
    output = emb(index)
    gradients = torch.autograd.grad(output, list(emb.cores), torch.cos(output))
    for x in (output.detach(), *gradients):
        print(hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16], end=" ")
print(torch.get_num_threads(), emb.statistics()["chunks"])
"""


def test_bits_do_not_depend_on_threads_or_runs_nor_those_of_outputs_on_the_workspace():
    found = {}
    for threads in (1, 2):
        for workspace in (1 << 20, 64 << 20):
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            command = [sys.executable, "-c", BITS, str(workspace)]
            out = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True, timeout=120
            ).stdout.split()
            *digests, used, chunks = out
            assert int(used) == threads
            assert digests[:4] == digests[4:]
            found[threads, workspace] = (digests[:4], int(chunks))
    for workspace in (1 << 20, 64 << 20):
        assert found[1, workspace][0] == found[2, workspace][0]
    (small, small_chunks), (large, large_chunks) = found[1, 1 << 20], found[1, 64 << 20]
    assert small[0] == large[0]
    assert small_chunks > large_chunks


@pytest.fixture
def threads_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("layout", ["offsets", "rectangular", "one row", "all padding"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_that_several_threads_sort_comes_out_as_one_thread_sorts_it(layout, weighted):
    generator = torch.Generator().manual_seed(0)
    emb = TTEmbeddingBag(
        5000, 8, tt_ranks=4, mode="sum", padding_idx=3, backend="cpu", generator=generator
    )
    lookups = 70_000  # four threads sort so many
    input = torch.randint(5000, (lookups,), generator=generator)
    input[::7] = 3
    edges = torch.randint(lookups, (300,), generator=generator).sort().values
    edges[:5], edges[-3:] = 0, lookups  # empty bags at both ends
    if layout == "rectangular":
        input, edges = input.view(700, 100), None
    elif layout != "offsets":
        input = torch.full_like(input, 17 if layout == "one row" else 3)
    weights = torch.randn(input.shape, generator=generator) if weighted else None
    found = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        output = emb(input, edges, weights)
        gradients = torch.autograd.grad(output, list(emb.cores), torch.cos(output.detach()))
        found.append([output, *gradients])
    dense = torch.nn.functional.embedding_bag(
        input, emb.to_dense(), edges, mode="sum", per_sample_weights=weights, padding_idx=3
    )
    torch.testing.assert_close(
        found[0][0], dense, rtol=0, atol=1e-5 * dense.detach().abs().max().item()
    )
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("wrong", [0, 20_000, 39_999])
def test_the_first_wrong_index_is_named_by_whichever_thread_meets_it(wrong):
    emb = TTEmbeddingBag(5000, 8, tt_ranks=4, backend="cpu")
    input = torch.zeros(40_000, dtype=torch.int32)
    input[wrong:] = 5000
    torch.set_num_threads(2)
    with pytest.raises(IndexError, match=f"got 5000 at position {wrong} "):
        emb(input.view(100, 400))


@pytest.mark.parametrize("workspace", [1 << 20, 3 << 20, 64 << 20])
def test_the_workspace_that_is_taken_stays_within_what_is_allowed(workspace):
    emb = TTEmbeddingBag(
        ROWS, DIM, tt_ranks=16, mode="sum", backend="cpu", max_workspace_bytes=workspace
    )
    index = torch.randint(ROWS, (512, 16), generator=torch.Generator().manual_seed(0))
    emb(index).sum().backward()
    taken = emb.statistics()
    assert taken["backend"] == "cpu"
    assert 0 < taken["workspace_bytes"] <= workspace
    assert taken["flops"] >= emb.plan(index).flops
    assert taken["flops"] <= 1.1 * emb.plan(index).flops


def test_a_workspace_that_is_too_small_is_refused_with_the_size_that_suffices():
    emb = TTEmbeddingBag(ROWS, DIM, tt_ranks=16, backend="cpu", max_workspace_bytes=1 << 20)
    index = torch.zeros(4096, 20, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"max_workspace_bytes must be at least \d+ .*81920") as e:
        emb(index)
    enough = int(str(e.value).split("at least ")[1].split()[0])
    TTEmbeddingBag(ROWS, DIM, tt_ranks=16, backend="cpu", max_workspace_bytes=enough)(index)


@pytest.mark.parametrize(
    ("rows", "dim", "rank", "lookups"),
    [
        (1000, 8, 4, (64, 5)),
        (ROWS, DIM, 16, (512, 16)),
        (50_000, 48, 8, (300, 7)),  # some rows go back-first: mirrored cores
        (100_000_000, 32, 32, (40, 4)),  # gradients of the last core are most of it
    ],
)
@pytest.mark.parametrize("mode", ["sum", "max"])
def test_the_size_that_is_named_suffices_is_kept_and_is_the_least(mode, rows, dim, rank, lookups):
    emb = TTEmbeddingBag(rows, dim, mode=mode, tt_ranks=rank, max_workspace_bytes=1000)
    index = torch.randint(rows, lookups, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="max_workspace_bytes") as told:
        emb(index)
    enough = int(str(told.value).split("at least ")[1].split()[0])
    emb.max_workspace_bytes = enough
    output = emb(index)
    output.sum().backward()
    assert emb.statistics()["workspace_bytes"] == emb.plan(index).workspace_bytes <= enough
    emb.max_workspace_bytes = 64 << 20
    assert torch.equal(output, emb(index))
    emb.max_workspace_bytes = enough - 1
    with pytest.raises(ValueError, match=f"at least {enough}"):
        emb(index)


def test_cores_that_became_double_keep_within_the_workspace_and_half_ones_are_refused():
    emb = TTEmbeddingBag(ROWS, DIM, tt_ranks=16, mode="sum", max_workspace_bytes=3 << 19).double()
    index = torch.randint(ROWS, (256, 16), generator=torch.Generator().manual_seed(0))
    emb(index).sum().backward()
    assert emb.spec.dtype == torch.float64
    assert emb.statistics()["workspace_bytes"] <= 3 << 19
    with pytest.raises(TypeError, match=r"float32 or torch\.float64; got torch\.float16"):
        emb.half()(index)


@pytest.mark.parametrize("given", [[[1, 2]], None, np.zeros((2, 2), dtype=np.int64)])
def test_what_is_no_tensor_is_refused_by_its_type(given):
    emb = TTEmbeddingBag(100, 8, tt_ranks=2)
    with pytest.raises(
        TypeError, match=f"input must be a torch.Tensor; got {type(given).__name__}"
    ):
        emb(given)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.usefixtures("threads_restored")
def test_a_large_batch_has_the_same_bits_for_any_threads_and_workspace(mode):
    generator = torch.Generator().manual_seed(0)
    emb = TTEmbeddingBag(
        30_000, 12, mode=mode, tt_ranks=5, padding_idx=7, init_std=1.0, generator=generator
    )
    lookups = torch.randint(30_000, (40_000,), generator=generator)
    lookups[::9] = 7
    offsets = torch.cat([torch.zeros(2), torch.arange(1, 1999) * 19]).long()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for workspace in (64 << 20, 4 << 20):
            emb.max_workspace_bytes = workspace
            found.append(emb(lookups, offsets).detach())
            planned, taken = emb.plan(lookups, offsets), emb.statistics()
            assert taken["chunks"] == planned.chunks
            assert taken["workspace_bytes"] <= planned.workspace_bytes <= workspace
    assert all(torch.equal(found[0], other) for other in found[1:])
    table = emb.to_dense().detach()
    truth = F.embedding_bag(lookups, table, offsets, mode=mode, padding_idx=7)
    torch.testing.assert_close(found[0], truth, rtol=1e-4, atol=1e-4)


def test_directions_are_mixed_where_each_is_the_cheaper_for_some_rows():
    spec = TTSpec(300 * 8 * 300, 16, (300, 8, 300), (2, 4, 2), (8, 8))
    emb = TTEmbeddingBag(spec.num_embeddings, 16, spec=spec, mode="sum", dtype=torch.float32)
    ends, middle = torch.arange(300), torch.arange(8)[:, None]
    even = middle % 2 == 0
    rows = torch.where(even, (7 * 8 + middle) * 300 + ends, (ends * 8 + middle) * 300 + 11)
    plan = emb.plan(rows.flatten()[None])
    assert plan.direction == "mixed"
    output = emb(rows).detach()
    torch.testing.assert_close(
        output,
        emb.to_dense().detach()[rows].sum(1),
        rtol=1e-4,
        atol=1e-5 * float(output.abs().max()),
    )


def test_a_core_that_is_written_between_forward_and_backward_is_named():
    emb = TTEmbeddingBag(60, 8, tt_ranks=4, backend="cpu")
    output = emb(torch.zeros(2, 3, dtype=torch.int64))
    with torch.no_grad():
        emb.cores[1].mul_(2)
    with pytest.raises(RuntimeError, match="core 1 was written between this forward and its"):
        output.sum().backward()


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_position_and_a_value_are_named_for_an_index_outside_the_table(backend):
    emb = TTEmbeddingBag(61, 8, tt_ranks=4, backend=backend)  # the cores would answer up to 64
    for value in (61, -1, 2**40):
        index = torch.tensor([[0, 1], [2, value]])
        with pytest.raises(IndexError, match=rf"\[0, 61\).*got {value} at position 3"):
            emb(index)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_four_cores_are_refused_by_name_and_auto_takes_torch(backend):
    with pytest.raises(NotImplementedError, match=f"'{backend}' has 2 or 3 cores.*'torch' has"):
        TTEmbeddingBag(60, 8, tt_ranks=[2, 2, 2], backend=backend)
    emb = TTEmbeddingBag(60, 8, tt_ranks=[2, 2, 2])
    emb(torch.zeros(1, 1, dtype=torch.int64))
    assert emb.statistics()["backend"] == "torch"


def test_nan_weights_stay_in_their_bag():
    emb = TTEmbeddingBag(60, 8, tt_ranks=4, mode="sum", backend="cpu")
    weights = torch.tensor([[1.0, float("nan")], [1.0, 1.0]])
    output = emb(torch.tensor([[1, 2], [2, 1]]), None, weights)
    assert output[0].isnan().all()
    assert not output[1].isnan().any()


def test_without_a_compiler_torch_takes_over_with_one_warning():
    script = (
        "import torch, warnings; from ecorec import TTEmbeddingBag\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    emb = TTEmbeddingBag(1000, 8, tt_ranks=4)\n"
        "    for _ in range(2): emb(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()\n"
        "print(emb.statistics()['backend'], len(seen), 'compiler' in str(seen[0].message))"
    )
    environment = {**os.environ, "SEPTET_CXX": "/nonexistent"}
    command = [sys.executable, "-c", script]
    out = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert out.split() == ["torch", "1", "True"]
