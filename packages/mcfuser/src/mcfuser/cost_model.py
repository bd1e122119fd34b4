"""Predicted time of candidates, many at once, from what they load, store and multiply.

    t = (bytes / bandwidth + FLOPs / rate) * (blocks + SMs) / blocks

Loads and stores count whole tiles as often as the loops around them turn (`Placed.traffic`), a
product that is recomputed counts each time; few blocks leave SMs idle.
Source: MCFuser, SC 2024, analytical performance model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from septet_shared.profiling import HardwareProfile

from .chain import Chain
from .placement import PlacedLoop, Statement, structure
from .placement import statements as statements_of

Numbers = NDArray[np.int64]
_PROFILES = {"a100": "dgx-a100-8x8", "rtx3080": "rtx3080", "h100": "h100", "h200": "h200"}
DEVICES = (*_PROFILES, "cpu")


@dataclass(frozen=True)
class Work:
    """Of candidates of one expression, each an element: elements moved, FLOPs, blocks."""

    moved: Numbers
    flops: Numbers
    blocks: Numbers


def profile_of(device: str) -> HardwareProfile:
    """The constants of a device.

    Raises:
        ValueError: an unknown device; lists those that exist.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {device!r}")
    return HardwareProfile.load(_PROFILES.get(device, "cpu-2core"))


def work(
    chain: Chain, sizes: Mapping[str, int], expression: str, tiles: Mapping[str, Numbers]
) -> Work:
    """What candidates of an expression take.

    Args:
        tiles: for each letter of `chain.loops` [C] numbers of the C candidates; batch tiles are 1.

    Cost: a few vector operations for each of the at most 16 sets of loops that turn.
    """
    extents = {x: -(-sizes[x] // t) for x, t in tiles.items()}
    count = len(next(iter(tiles.values())))
    moved, flops, blocks = (np.zeros(count, np.int64) for _ in range(3))
    pattern = sum((extents[x] > 1).astype(np.int64) << i for i, x in enumerate(chain.loops))
    batch = {x: sizes[x] for x in chain.batch}
    for value in np.unique(pattern):
        chosen = pattern == value
        turning = [x for i, x in enumerate(chain.loops) if value >> i & 1]
        live = frozenset(turning) | {x for x in chain.batch if sizes[x] > 1}
        of = {x: t[chosen] for x, t in tiles.items()} | dict.fromkeys(chain.batch, 1)
        turns = {x: e[chosen] for x, e in extents.items()} | batch
        found = _work_of(chain, structure(chain, expression, live), of, turns)
        moved[chosen], flops[chosen], blocks[chosen] = found
    return Work(moved, flops, blocks)


def _work_of(
    chain: Chain,
    placed: tuple[str, tuple[PlacedLoop | Statement, ...]],
    tiles: Mapping[str, Numbers | int],
    turns: Mapping[str, Numbers | int],
) -> tuple[Numbers | int, Numbers | int, Numbers | int]:
    grid, body = placed
    blocks = _product(turns, grid)
    inside = {x for s, around in statements_of(body) if s.kind == "C" for x in around}
    moved: Numbers | int = 0
    flops: Numbers | int = 0
    for statement, around in statements_of(body):
        times = blocks * _product(turns, around)
        if statement.kind == "C":
            loops = next(c.loops for c in chain.contractions if c.output == statement.operand)
            flops = flops + 2 * times * _product(tiles, loops)
            continue
        area = _product(tiles, chain.indices(statement.operand))
        if statement.kind == "S":  # with all tiles of the loops that it left
            left = [x for x in chain.indices(statement.operand) if x in inside and x not in around]
            area = area * _product(turns, left)
        moved = moved + times * area
    return moved, flops, blocks


def _product(numbers: Mapping[str, Numbers | int], letters: object) -> Numbers | int:
    product: Numbers | int = 1
    for letter in letters:  # type: ignore[attr-defined]
        product = product * numbers[letter]
    return product


def gpu_seconds(found: Work, profile: HardwareProfile, dtype: torch.dtype) -> NDArray[np.float64]:
    """Seconds of each candidate on a GPU, by the paper's model."""
    name = str(dtype).removeprefix("torch.")
    bandwidth = profile.rate("memory", float(found.moved.max(initial=1)) * dtype.itemsize)
    rate = profile.rate(f"gemm:{name}", float(found.flops.max(initial=1)))
    sms = profile.sm_count or 1
    idle = (found.blocks + sms) / found.blocks
    return np.asarray((found.moved * dtype.itemsize / bandwidth + found.flops / rate) * idle)
