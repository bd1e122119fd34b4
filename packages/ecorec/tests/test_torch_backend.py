import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ecorec import TTSpec, reference
from ecorec.torch_backend import unique_rows

SPECS = {
    2: TTSpec(2000, 15, p=(20, 100), q=(3, 5), ranks=(6,)),
    3: TTSpec(2000, 24, p=(8, 10, 25), q=(2, 3, 4), ranks=(5, 6)),
    4: TTSpec(2000, 24, p=(4, 5, 10, 10), q=(2, 2, 3, 2), ranks=(3, 5, 4)),
}


def make_cores(d, dtype=torch.float32):
    rng = torch.Generator().manual_seed(d)
    return [torch.randn(shape, generator=rng, dtype=dtype) for shape in SPECS[d].core_shapes]


def sorted_rows(count):
    return torch.randperm(2000, generator=torch.Generator().manual_seed(9))[:count].sort().values


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 57, 2000])
def test_rows_equal_the_reference(d, count):
    cores, rows = make_cores(d, torch.float64), sorted_rows(count)
    truth = reference.rows(cores, rows, SPECS[d].embedding_dim)
    torch.testing.assert_close(unique_rows(cores, rows), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 57, 900])
def test_each_different_prefix_is_multiplied_once(d, count):
    spec, rows = SPECS[d], sorted_rows(count)
    with FlopCounterMode(display=False) as counter:
        unique_rows(make_cores(d), rows)
    expected = 0
    for k in range(2, d + 1):
        prefixes = {row // math.prod(spec.p[k:]) for row in rows.tolist()}
        _, left, q, right = spec.core_shapes[k - 1]
        expected += len(prefixes) * 2 * math.prod(spec.q[: k - 1]) * left * q * right
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("d", [2, 3, 4])
def test_no_rows_give_every_core_a_zero_gradient(d):
    cores = [core.requires_grad_() for core in make_cores(d)]
    found = unique_rows(cores, torch.empty(0, dtype=torch.int64))
    assert found.shape == (0, SPECS[d].embedding_dim)
    found.sum().backward()
    assert all(core.grad is not None and core.grad.eq(0).all() for core in cores)


def test_gradients_equal_those_of_the_reference():
    cores = [core.requires_grad_() for core in make_cores(4, torch.float64)]
    rows = sorted_rows(300)
    chosen = torch.randn(300, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad((unique_rows(cores, rows) * chosen).sum(), cores)
    truth = torch.autograd.grad((reference.rows(cores, rows, 24) * chosen).sum(), cores)
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10)
