import itertools

import pytest
import torch
import torch.nn.functional as F

from ecorec import reference


def test_a_row_is_the_product_of_its_slices_written_out():
    rng = torch.Generator().manual_seed(0)
    shapes = [(2, 1, 3, 2), (3, 2, 2, 4), (5, 4, 2, 1)]
    cores = [torch.randn(shape, generator=rng) for shape in shapes]
    rows = reference.rows(cores, torch.arange(2 * 3 * 5), embedding_dim=11)
    assert rows.dtype == torch.float64
    for i1, i2, i3 in itertools.product(range(2), range(3), range(5)):
        row = rows[(i1 * 3 + i2) * 5 + i3].tolist()
        for j, element in enumerate(row):
            j1, j2, j3 = j // 4, j // 2 % 2, j % 2
            slices = [cores[0][i1, :, j1], cores[1][i2, :, j2], cores[2][i3, :, j3]]
            product = torch.linalg.multi_dot([s.double() for s in slices])
            assert element == pytest.approx(product.item(), rel=1e-12)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_bags_equal_those_of_torch_where_torch_is_right(mode, padding_idx):
    rng = torch.Generator().manual_seed(1)
    cores = [torch.randn(shape, generator=rng) for shape in [(4, 1, 2, 3), (6, 3, 3, 1)]]
    table = reference.rows(cores, torch.arange(24), embedding_dim=6)
    indices = torch.randint(0, 5, (30,), generator=rng)
    offsets = torch.tensor([0, 4, 4, 17])
    options = {"mode": mode, "padding_idx": padding_idx}
    ours = reference.embedding_bag(cores, indices, offsets, embedding_dim=6, **options)
    torch.testing.assert_close(ours, F.embedding_bag(indices, table, offsets, **options))
    square = indices.view(5, 6)
    ours = reference.embedding_bag(cores, square, embedding_dim=6, **options)
    torch.testing.assert_close(ours, F.embedding_bag(square, table, **options))
