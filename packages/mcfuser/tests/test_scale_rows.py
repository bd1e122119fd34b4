import pytest
import torch

from mcfuser import reference, scale_rows
from septet_shared.testing import assert_no_worse_than

SHAPES = [(0, 3), (1, 1), (5, 0), (7, 65), (16, 100)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_each_row_is_multiplied_by_its_weight(shape, dtype, backend):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=rng).to(dtype)
    weight = torch.randn(shape[0], generator=rng).to(dtype)
    plain = reference.scale_rows(x, weight)
    truth = reference.scale_rows(x.double(), weight.double())
    assert_no_worse_than(scale_rows(x, weight, backend=backend), plain, truth)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_strided_matrix_gives_what_its_copy_gives(backend):
    x = torch.arange(24.0).view(6, 4).t()[1:]
    weight = torch.arange(3.0)
    expected = weight[:, None] * x.clone()
    torch.testing.assert_close(scale_rows(x, weight, backend=backend), expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gradients_equal_those_of_the_reference(backend):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5, 9, generator=rng, requires_grad=True)
    weight = torch.randn(5, generator=rng, requires_grad=True)
    chosen = torch.randn(5, 9, generator=rng)
    ours = torch.autograd.grad((scale_rows(x, weight, backend=backend) * chosen).sum(), (x, weight))
    truth = torch.autograd.grad((reference.scale_rows(x, weight) * chosen).sum(), (x, weight))
    torch.testing.assert_close(ours, truth)


def test_a_weight_of_another_length_is_refused_by_name():
    with pytest.raises(ValueError, match=r"weight must be \[2\] like x; got \(3,\)"):
        scale_rows(torch.zeros(2, 4), torch.zeros(3))


def test_an_unknown_backend_is_told_what_exists():
    with pytest.raises(ValueError, match="auto, torch, triton; got 'cuda'"):
        scale_rows(torch.zeros(2, 4), torch.zeros(2), backend="cuda")
