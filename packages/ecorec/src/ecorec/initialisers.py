"""Cores whose product has entries of a given variance."""

import math
from typing import Protocol

import torch
from torch import Tensor

from .shapes import TTSpec


class Initialiser(Protocol):
    """What gives a table its first cores."""

    def __call__(
        self,
        spec: TTSpec,
        std: float,
        *,
        generator: torch.Generator | None,
        device: torch.device | str | None,
    ) -> list[Tensor]:
        """Cores of `spec.core_shapes` and `spec.dtype`."""


@torch.no_grad()
def match_normal(
    spec: TTSpec,
    std: float = 1.0,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Cores of a table whose entries have mean 0 and standard deviation `std`.

    Rows of the first core (and columns of the last, when d > 2) have a fixed norm and a random
    direction; the cores between them are independent Gaussian numbers. So for d = 2 and 3 every
    entry is exactly N(0, std^2), as in nn.EmbeddingBag; independent Gaussian cores would give a
    kurtosis of 3 (1 + 2/r_1)(1 + 2/r_2). For d = 4 it is 3 (1 + 2/r_2). All cores have the same
    root mean square, so that one learning rate suits them all.

    Args:
        spec: the shape; its dtype is that of the cores.
        std: standard deviation of the table's entries, not below 0.
        generator: source of the random numbers; on `device`.
        device: of the cores.

    Raises:
        ValueError: std is negative or not finite.

    Cost: one pass over the cores.
    """
    if not (math.isfinite(std) and std >= 0):
        raise ValueError(f"init_std must be finite and at least 0; got {std}")
    scale = (std**2 / math.prod(spec.ranks)) ** (1 / (2 * len(spec.p)))
    cores = [
        torch.randn(shape, generator=generator, device=device, dtype=spec.dtype)
        for shape in spec.core_shapes
    ]
    ends = [(cores[0], 3, spec.ranks[0]), (cores[-1], 1, spec.ranks[-1])]
    for core, rank_dim, rank in ends[: 1 if len(cores) == 2 else 2]:
        norm = torch.linalg.vector_norm(core, dim=rank_dim, keepdim=True)
        core.mul_(math.sqrt(rank) / norm)
    return [core.mul_(scale) for core in cores]


def match_uniform(
    spec: TTSpec,
    std: float = 1.0,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Cores of a table whose entries have the deviation of numbers uniform in [-std, std].

    That is std / sqrt(3), as in DLRM's tables with std = N^(-1/2). The entries' distribution is
    match_normal's, not flat: sums of products of many numbers are close to Gaussian.

    Args, Raises, Cost: as match_normal.
    """
    return match_normal(spec, std / math.sqrt(3), generator=generator, device=device)


INITIALISERS: dict[str, Initialiser] = {
    "match-normal": match_normal,
    "match-uniform": match_uniform,
}
