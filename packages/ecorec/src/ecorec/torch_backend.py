"""Rows of a tensor-train table in plain torch operations, each different prefix multiplied once.

Any number of cores, any device, any dtype; gradients by autograd.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .contraction import PrefixLevel, unique_prefixes


def unique_rows(cores: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows [U, prod q] of the table, for sorted different `rows` [U] int64.

    Shapes: cores [p_k, r_(k-1), q_k, r_k].
    Cost: 2 * q_1 q_2 r_1 r_2 FLOPs for each front pair, 2 * prod(q) * r_(d-1) for each row.
    Autograd keeps U * prod(q) / q_d * r_(d-1) numbers for the backward.
    Source: EcoRec, SC 2024 (multiplication before expansion).
    """
    levels = unique_prefixes(rows, [core.shape[0] for core in cores])
    products = cores[0].squeeze(1).index_select(0, levels[0].digit)  # [F_1, q_1, r_1]
    for core, level in zip(cores[1:-1], levels[1:-1], strict=True):
        products = _extend_by_digit(products, level, core)
    p, left, q, _ = cores[-1].shape
    last = cores[-1].reshape(p, left, q).index_select(0, levels[-1].digit)
    return torch.bmm(products.index_select(0, levels[-1].parent), last).flatten(1)


def _extend_by_digit(products: Tensor, level: PrefixLevel, core: Tensor) -> Tensor:
    """Products [F_k, q_1 ... q_k, r_k] from those of the level before.

    One matrix product for each digit that occurs: a product per prefix would have to copy
    core[digit] (r_(k-1) q_k r_k numbers) for each, which takes longer than the arithmetic.
    """
    p, left, q, right = core.shape
    order = torch.argsort(level.digit, stable=True)
    counts = torch.bincount(level.digit, minlength=p).tolist()
    columns = products.shape[1] * q  # q_1 ... q_k
    by_digit = torch.split(products.index_select(0, level.parent[order]), counts)
    slices = core.reshape(p, left, q * right).unbind(0)
    # An empty batch still multiplies once, by nothing, so that every core gets a zero gradient.
    occurring = [digit for digit, count in enumerate(counts) if count] or [0]
    extended = torch.cat([by_digit[i].flatten(0, 1) @ slices[i] for i in occurring])
    extended = extended.view(len(order), columns, right)
    return extended.index_select(0, torch.argsort(order))
