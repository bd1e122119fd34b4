"""The different prefixes of a batch: what has to be multiplied, each once.

Rows that share (i_1, ..., i_k) share the product of their first k cores. For sorted different
rows the prefixes come out sorted too, and the rows of one prefix lie next to each other.
Source: TT-Rec and EL-Rec reuse rows or pairs; EcoRec, SC 2024, sorts and contracts both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PrefixLevel(NamedTuple):
    """The different prefixes of one length k, sorted.

    digit: [F_k] int64, i_k of each prefix.
    parent: [F_k] int64, its first k - 1 digits as a position in the level before (level 1: empty).
    """

    digit: Tensor
    parent: Tensor


def unique_prefixes(rows: Tensor, p: Sequence[int]) -> list[PrefixLevel]:
    """The d levels of prefixes of sorted different rows; the last level is the rows themselves.

    Args:
        rows: [U] int64, ascending, all different, in [0, prod p).
        p: the d row factors.

    Cost: one pass over the prefixes of each level.
    """
    levels = []
    prefixes = rows
    for factor in reversed(p[1:]):
        shorter, parent = torch.unique_consecutive(prefixes // factor, return_inverse=True)
        levels.append(PrefixLevel(prefixes % factor, parent))
        prefixes = shorter
    levels.append(PrefixLevel(prefixes, prefixes.new_empty(0)))
    return levels[::-1]
