"""Rows scaled by their weights; also what CI runs from outside the checkout."""

import torch

from mcfuser import scale_rows

x = torch.randn(4, 8)  # [N, D]
weight = torch.rand(4)  # [N]
out = scale_rows(x, weight)
assert torch.equal(out, weight[:, None] * x)
print(out.shape)
