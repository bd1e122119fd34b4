"""The definition in float64, slow and short: what every other path is tested against."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def rows(cores: Sequence[Tensor], indices: Tensor, embedding_dim: int) -> Tensor:
    """Rows [V, D] float64 of the table, each multiplied out by itself.

    Args:
        cores: d tensors [p_k, r_(k-1), q_k, r_k].
        indices: [V] integers in [0, prod p).
        embedding_dim: D <= prod q.
    """
    digits = []
    rest = indices.long()
    for core in reversed(cores):
        digits.append(rest % core.shape[0])
        rest = rest // core.shape[0]
    product = torch.ones(len(indices), 1, 1, dtype=torch.float64)
    for core, digit in zip(cores, reversed(digits), strict=True):
        product = torch.einsum("vqr,vrjs->vqjs", product, core.double()[digit]).flatten(1, 2)
    return product[:, :embedding_dim, 0]


def embedding_bag(
    cores: Sequence[Tensor],
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    embedding_dim: int,
    mode: str = "mean",
    padding_idx: int | None = None,
    include_last_offset: bool = False,
) -> Tensor:
    """Bags [B, D] float64: torch.nn.functional.embedding_bag over the table, in a Python loop.

    Indices after the last offset of `include_last_offset` belong to no bag.
    """
    if input.ndim == 2:
        bags = list(range(len(input) * input.shape[1]))
        members = [bags[b * input.shape[1] : (b + 1) * input.shape[1]] for b in range(len(input))]
    else:
        assert offsets is not None
        edges = offsets.tolist() if include_last_offset else [*offsets.tolist(), len(input)]
        members = [list(range(a, b)) for a, b in pairwise(edges)]
    flat = input.flatten()
    table_rows = rows(cores, flat, embedding_dim)
    output = []
    for positions in members:
        kept = [v for v in positions if padding_idx is None or int(flat[v]) != padding_idx]
        total = torch.zeros(embedding_dim, dtype=torch.float64)
        for v in kept:
            weight = 1.0 if per_sample_weights is None else per_sample_weights.flatten()[v].double()
            total = total + table_rows[v] * weight
        output.append(total / len(kept) if mode == "mean" and kept else total)
    if not output:
        return table_rows.new_zeros(0, embedding_dim)
    return torch.stack(output)
