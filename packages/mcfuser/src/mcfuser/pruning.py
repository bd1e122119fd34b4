"""The search space of a chain, and the four rules that prune it before anything is measured.

raw            every expression with every vector of tiles
dedup          expressions that leave the same loops in a block are one kernel
intermediates  a reduction outside the loop over its product's columns keeps partial tiles alive
padding        tiles that do not divide a size waste less than 5 % of it
shared_memory  a block's tiles fit into 1.2 times its shared memory
live           ours: with the whole row block of the result where a block keeps it

Source: MCFuser, SC 2024; what its first and fourth rule count is reconstructed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from .chain import Chain
from .chain import chain as parse_chain
from .cost_model import Numbers, gpu_seconds, profile_of, work
from .placement import place
from .tiling import canonical, expressions, grid

GRANULE = 16  # of tiles: what tensor cores multiply
MOST_PADDING = 0.05
SHARED_MEMORY_SLACK = 1.2  # Triton may use a buffer twice, or need none


@dataclass(frozen=True)
class Step:
    """What is left after a rule: expressions, and candidates (expressions times tiles)."""

    rule: str
    expressions: tuple[str, ...]
    candidates: int


@dataclass(frozen=True)
class Candidate:
    """An expression with tiles, and its predicted seconds."""

    expression: str
    tiles: dict[str, int]
    predicted_s: float


@dataclass(frozen=True)
class Space:
    """All candidates of a chain on a device; `space` makes it."""

    chain: Chain
    sizes: Mapping[str, int]
    device: str
    dtype: torch.dtype

    def funnel(self) -> list[Step]:
        """The rules in order, each with what it leaves."""
        every = expressions(self.chain)
        lattice = int(np.prod([len(t) for t in self._lattice.values()]))
        padded = int(np.prod([mask.sum() for mask in self._unpadded.values()]))
        survivors = self._survivors
        deduped, kept = tuple(self._kernels), tuple(survivors)
        in_memory = sum(int(fits.sum()) for fits, _ in survivors.values())
        live = sum(int(fits.sum()) for _, fits in survivors.values())
        return [
            Step("raw", every, len(every) * lattice),
            Step("dedup", deduped, len(deduped) * lattice),
            Step("intermediates", kept, len(kept) * lattice),
            Step("padding", kept, len(kept) * padded),
            Step("shared_memory", kept, in_memory),
            Step("live", kept, live),
        ]

    def expressions(self) -> tuple[str, ...]:
        """Sub-tiling expressions that no rule drops."""
        return tuple(self._survivors)

    def scored(self) -> dict[str, tuple[dict[str, Numbers], NDArray[np.float64]]]:
        """For each expression, of the candidates that no rule drops: tiles of each letter [C], and
        the model's seconds [C].

        Cost: a few vector operations; 7 ms for 12,000 candidates.
        """
        profile, found = profile_of(self.device), {}
        for form, (_, fits) in self._survivors.items():
            if fits.any():
                tiles = {x: t[fits] for x, t in self._tiles.items()}
                expression = self._kernels[form]
                taken = work(self.chain, self.sizes, expression, tiles)
                found[expression] = tiles, gpu_seconds(taken, profile, self.dtype)
        return found

    def candidates(self) -> Iterator[Candidate]:
        """Those that no rule drops, with the model's time, one by one."""
        for expression, (tiles, seconds) in self.scored().items():
            columns = [tiles[x].tolist() for x in self.chain.loops]
            for predicted_s, *chosen in zip(seconds.tolist(), *columns, strict=True):
                made = dict(zip(self.chain.loops, chosen, strict=True))
                yield Candidate(expression, made, predicted_s)

    @cached_property
    def _kernels(self) -> dict[str, str]:
        """An expression for each sub-tiling expression: its loops of the grid, then the rest."""
        found: dict[str, str] = {}
        for text in expressions(self.chain):
            form = canonical(text, self.chain)
            bound = grid(text, self.chain).removeprefix(self.chain.batch)
            found.setdefault(form, bound + form)
        return found

    @cached_property
    def _lattice(self) -> dict[str, Numbers]:
        return {
            x: np.arange(GRANULE, -(-self.sizes[x] // GRANULE) * GRANULE + 1, GRANULE)
            for x in self.chain.loops
        }

    @cached_property
    def _unpadded(self) -> dict[str, NDArray[np.bool_]]:
        return {
            x: -(-self.sizes[x] // t) * t < (1 + MOST_PADDING) * self.sizes[x]
            for x, t in self._lattice.items()
        }

    @cached_property
    def _tiles(self) -> dict[str, Numbers]:
        """Of each letter, the vectors that padding leaves."""
        axes = [self._lattice[x][self._unpadded[x]] for x in self.chain.loops]
        meshes = np.meshgrid(*axes, indexing="ij")
        return {x: mesh.ravel() for x, mesh in zip(self.chain.loops, meshes, strict=True)}

    @cached_property
    def _survivors(self) -> dict[str, tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
        """For each expression without overwhelming intermediates: which vectors fit, by tiles
        alone, and with what else is alive.
        """
        limit = profile_of(self.device).shared_bytes_per_block or np.inf
        most = SHARED_MEMORY_SLACK * limit / self.dtype.itemsize
        found = {}
        for form, expression in self._kernels.items():
            smallest = dict.fromkeys(self.chain.loops, 1)
            unit = place(self.chain, self._twos, expression, smallest)
            if unit.keeps_partial_tiles:
                continue
            areas = self._areas(())
            row = [x for x in self.chain.indices(self.chain.output) if unit.row_block]
            found[form] = (areas <= most, self._areas(row) <= most)
        return found

    @property
    def _twos(self) -> dict[str, int]:
        return dict.fromkeys(self.chain.batch, 1) | dict.fromkeys(self.chain.loops, 2)

    def _areas(self, whole: tuple[str, ...] | list[str]) -> Numbers:
        """Elements of one tile of every operand; of the result all tiles of the row, if `whole`."""
        total = np.zeros(len(next(iter(self._tiles.values()))), np.int64)
        names = [t for c in self.chain.contractions for t in c.names]
        for name in dict.fromkeys(names):
            area = np.ones_like(total)
            for letter in self.chain.indices(name):
                if letter in self.chain.batch:
                    continue
                tile = self._tiles[letter]
                if name == self.chain.output and whole and letter == whole[-1]:
                    tile = -(-self.sizes[letter] // tile) * tile
                area = area * tile
            total = total + area
        return total


def space(
    chain: Chain | str,
    sizes: Mapping[str, int],
    device: str = "a100",
    dtype: torch.dtype = torch.float16,
) -> Space:
    """The candidates of a chain for a device.

    Args:
        chain: a Chain or its text.
        sizes: of every letter.
        device: one of `cost_model.DEVICES`.
        dtype: of the inputs.

    Raises:
        ValueError: an unknown device, a letter without a size, a size below 1.
    """
    if isinstance(chain, str):
        chain = parse_chain(chain)
    profile_of(device)
    letters = chain.batch + chain.loops
    if set(sizes) != set(letters) or min(sizes.values()) < 1:
        raise ValueError(
            f"sizes must have {', '.join(letters)}, each at least 1; got {dict(sizes)}"
        )
    return Space(chain, dict(sizes), device, dtype)
