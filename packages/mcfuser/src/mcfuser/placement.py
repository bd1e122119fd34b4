"""Where loads, products and stores stand among a tiling expression's loops, and what that moves.

A load or store leaves every loop that does not count its operand's tiles; products stay. A loop of
one turn disappears, and what stood in it may then leave further loops. Where the reduction of the
first product stands outside a loop over its columns, the product is complete only behind it: its
partial tiles stay, and the second product's statements stand in loops of their own behind it.

    mh(n(k(L_A,L_B,C_C),L_D,C_E),S_E)

Source: MCFuser, SC 2024, analysis of the scheduling graph; the second copy of loops is our reading
of what the paper prunes as overwhelming intermediates.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from . import reference
from .chain import Chain, Contraction
from .chain import chain as parse_chain
from .tiling import Loop, grid, sub_tiling

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Statement:
    """L_X loads a tile of an input, C_X adds to a tile of a product, S_X stores finished tiles."""

    kind: str
    operand: str

    def __str__(self) -> str:
        return f"{self.kind}_{self.operand}"


@dataclass
class PlacedLoop:
    """A loop inside a block, and what is done in it, in order."""

    letter: str
    body: "list[PlacedLoop | Statement]" = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.letter}({','.join(map(str, self.body))})"


@dataclass(frozen=True)
class Placed:
    """The placed graph of a chain, an expression and tiles; `place` makes it.

    Attributes:
        sizes, tiles: of every letter. dtype: what `lower` prints for.
        grid: letters of loops of more than one turn that the grid runs, batch first.
        body: what a block does.
    """

    chain: Chain
    sizes: Mapping[str, int]
    expression: str
    tiles: Mapping[str, int]
    dtype: torch.dtype
    grid: str
    body: tuple[PlacedLoop | Statement, ...]

    def __str__(self) -> str:
        inside = ",".join(map(str, self.body))
        return f"{self.grid}({inside})" if self.grid else inside

    def extent(self, letter: str) -> int:
        """Turns of the loop over a letter's tiles."""
        return -(-self.sizes[letter] // self.tiles[letter])

    def traffic(self) -> dict[str, int]:
        """Elements that each load and store moves in all, tiles counted whole."""
        return {
            str(s): self.area(s) * self._turns(around)
            for s, around in self.statements()
            if s.kind != "C"
        }

    def flops(self) -> int:
        """FLOPs of all products, recomputed ones each time, tiles counted whole."""
        total = 0
        for s, around in self.statements():
            if s.kind == "C":
                letters = self._contraction(s.operand).loops
                total += 2 * math.prod(self.tiles[x] for x in letters) * self._turns(around)
        return total

    def area(self, statement: Statement) -> int:
        """Elements of one load or store: a tile, or the whole row block that a store waits with."""
        return math.prod(self._side(statement, x) for x in self.chain.indices(statement.operand))

    @property
    def keeps_partial_tiles(self) -> bool:
        """Whether tiles of an intermediate wait, unfinished, for a reduction around them."""
        return any(
            s.kind == "C" and self._waits_for(s.operand, around) for s, around in self.statements()
        )

    @property
    def row_block(self) -> bool:
        """Whether a block keeps all columns of its rows of the result."""
        return any(
            self._side(s, x) != self.tiles[x]
            for s, _ in self.statements()
            if s.kind == "S"
            for x in self.chain.indices(s.operand)
        )

    def statements(self) -> Iterator[tuple[Statement, tuple[str, ...]]]:
        """Each statement with the letters of the loops around it in a block, outermost first."""
        yield from statements(self.body)

    def execute(self, *tensors: Tensor) -> tuple[Tensor, dict[str, int]]:
        """The result in float64, tile by tile as placed, and the elements that were moved.

        Memory that nothing wrote is NaN, so that a value used too early shows.

        Args:
            tensors: the inputs, of the sizes that were placed.

        Raises:
            ValueError: sizes differ.

        Cost: Python's, a few microseconds a statement: for small sizes.
        """
        sizes = self.chain.sizes([t.shape for t in tensors])
        if sizes != dict(self.sizes):
            raise ValueError(
                f"sizes must be those that were placed, {dict(self.sizes)}; got {sizes}"
            )
        run = _Run(self, dict(zip(self.chain.operands, tensors, strict=True)))
        return run.result(), run.counted

    def _turns(self, around: tuple[str, ...]) -> int:
        return math.prod(self.extent(x) for x in (*self.grid, *around))

    def _contraction(self, output: str) -> Contraction:
        return next(c for c in self.chain.contractions if c.output == output)

    def _side(self, statement: Statement, letter: str) -> int:
        inside = {x for s, around in self.statements() if s.kind == "C" for x in around}
        around = next(around for s, around in self.statements() if s == statement)
        if statement.kind == "S" and letter in inside and letter not in around:
            return self.extent(letter) * self.tiles[letter]
        return self.tiles[letter]

    def _waits_for(self, output: str, around: tuple[str, ...]) -> bool:
        own = self._contraction(output)
        if own.reduction not in around or output == self.chain.output:
            return False
        behind = around[around.index(own.reduction) + 1 :]
        return any(x in own.indices[output] for x in behind)


def place(
    chain: Chain | str,
    sizes: Mapping[str, int],
    expression: str,
    tiles: Mapping[str, int],
    dtype: torch.dtype = torch.float32,
) -> Placed:
    """The statements of a chain placed among the loops of an expression.

    Args:
        chain: a Chain or its text.
        sizes: of every letter, at least 1.
        expression: one of `tiling.expressions(chain)`.
        tiles: of every letter, at least 1; a batch letter that is missing has tiles of 1.
        dtype: float32, bfloat16 or float16.

    Raises:
        ValueError: an unknown expression, letter or dtype, a size or tile that is missing or below
            1; lists what exists.
    """
    if isinstance(chain, str):
        chain = parse_chain(chain)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
    letters = chain.batch + chain.loops
    tiles = dict.fromkeys(chain.batch, 1) | dict(tiles)
    for name, numbers in (("sizes", sizes), ("tiles", tiles)):
        if set(numbers) != set(letters):
            given = ", ".join(sorted(numbers))
            raise ValueError(f"{name} must have the letters {', '.join(letters)}; got {given}")
        for letter, number in numbers.items():
            if number < 1:
                raise ValueError(f"{name} must be at least 1; got {letter}: {number}")
    live = frozenset(x for x in letters if sizes[x] > tiles[x])
    return Placed(chain, dict(sizes), expression, tiles, dtype, *structure(chain, expression, live))


@lru_cache(maxsize=4096)
def structure(
    chain: Chain, expression: str, live: frozenset[str]
) -> tuple[str, tuple[PlacedLoop | Statement, ...]]:
    """(loops of the grid, body of a block) where loops over `live` letters have several turns."""
    forest = sub_tiling(expression, chain)
    body: list[PlacedLoop | Statement] = []
    for number, contraction in enumerate(chain.contractions):
        path = _path(forest, contraction, alone=number > 0)
        _add(body, [x for x in path if x in live], chain, contraction)
    return "".join(x for x in grid(expression, chain) if x in live), tuple(body)


def _path(forest: tuple[Loop, ...], contraction: Contraction, alone: bool) -> list[str]:
    """Letters of the loops around a product, outermost first, down to its own innermost one.

    alone: without loops that are not its own, from which it has to be behind.
    """
    path: list[str] = []
    own = 0
    while loop := next((x for x in forest if x.letters & contraction.loops), None):
        path.append(loop.letter)
        if loop.letter in contraction.loops:
            own = len(path)
        forest = loop.body
    return [x for x in path[:own] if not alone or x in contraction.loops]


def _add(
    body: list[PlacedLoop | Statement], path: list[str], chain: Chain, contraction: Contraction
) -> None:
    """A product with its loads, and its store where it is the last, in loops that go on as far as
    they agree with those of the product before.
    """
    bodies = [body]
    for letter in path:
        last = bodies[-1][-1] if bodies[-1] else None
        if not (isinstance(last, PlacedLoop) and last.letter == letter):
            last = PlacedLoop(letter)
            bodies[-1].append(last)
        bodies.append(last.body)
    for operand in (contraction.left, contraction.right):
        if operand in chain.operands:
            depth = len(path)
            while depth > 0 and path[depth - 1] not in chain.indices(operand):
                depth -= 1
            # Before the loop that it left; else before the product.
            at = len(bodies[depth]) - (depth < len(path))
            bodies[depth].insert(at, Statement("L", operand))
    bodies[-1].append(Statement("C", contraction.output))
    if contraction.output == chain.output:
        reductions = [i for i, x in enumerate(path) if x == contraction.reduction]
        depth = reductions[0] if reductions else len(path)
        bodies[depth].append(Statement("S", contraction.output))


def statements(
    body: "Sequence[PlacedLoop | Statement]",
    around: tuple[str, ...] = (),
) -> Iterator[tuple[Statement, tuple[str, ...]]]:
    """Each statement of a block with the letters of the loops around it, outermost first."""
    for item in body:
        if isinstance(item, Statement):
            yield item, around
        else:
            yield from statements(item.body, (*around, item.letter))


class _Run:
    """One execution: tiles in NaN-filled buffers."""

    def __init__(self, placed: Placed, inputs: dict[str, Tensor]) -> None:
        self.placed, self.chain = placed, placed.chain
        self.counted = {str(s): 0 for s, _ in placed.statements() if s.kind != "C"}
        self.padded = {name: self._pad(name, t.double()) for name, t in inputs.items()}
        out = self.chain.output
        shape = [placed.extent(x) * placed.tiles[x] for x in self.chain.indices(out)]
        self.out = torch.full(shape, torch.nan, dtype=torch.float64)

    def result(self) -> Tensor:
        placed = self.placed
        for turns in itertools.product(*(range(placed.extent(x)) for x in placed.grid)):
            self.at = dict.fromkeys(placed.sizes, 0) | dict(zip(placed.grid, turns, strict=True))
            self.tiles: dict[str, Tensor] = {}
            self.products: dict[tuple[str, tuple[int, ...]], Tensor] = {}
            self.running: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
            self._run(placed.body)
        return self.out[
            tuple(slice(placed.sizes[x]) for x in self.chain.indices(self.chain.output))
        ]

    def _run(
        self, body: "list[PlacedLoop | Statement] | tuple[PlacedLoop | Statement, ...]"
    ) -> None:
        for item in body:
            if isinstance(item, PlacedLoop):
                for turn in range(self.placed.extent(item.letter)):
                    self.at[item.letter] = turn
                    self._run(item.body)
                self.at[item.letter] = -1  # a statement behind the loop has no turn of it
            elif item.kind == "L":
                self._load(item)
            elif item.kind == "C":
                self._multiply(self.placed._contraction(item.operand))
            else:
                self._store(item)

    def _pad(self, name: str, tensor: Tensor) -> Tensor:
        shape = [self.placed.extent(x) * self.placed.tiles[x] for x in self.chain.indices(name)]
        padded = torch.zeros(shape, dtype=torch.float64)
        padded[tuple(slice(n) for n in tensor.shape)] = tensor
        return padded

    def _slices(self, operand: str) -> tuple[slice, ...]:
        tiles = self.placed.tiles
        return tuple(
            slice(self.at[x] * tiles[x], (self.at[x] + 1) * tiles[x])
            for x in self.chain.indices(operand)
        )

    def _load(self, statement: Statement) -> None:
        tile = self.padded[statement.operand][self._slices(statement.operand)]
        self.tiles[statement.operand] = tile.clone()
        self.counted[str(statement)] += tile.numel()

    def _key(self, operand: str) -> tuple[str, tuple[int, ...]]:
        return operand, tuple(self.at[x] for x in self.chain.indices(operand))

    def _multiply(self, contraction: Contraction) -> None:
        key = self._key(contraction.output)
        tiles = self.placed.tiles
        shape = [tiles[x] for x in self.chain.indices(contraction.output)]
        first = self.at[contraction.reduction] <= 0
        total = torch.zeros(shape, dtype=torch.float64) if first else self.products[key]
        left = self._left(contraction, first, key)
        equation = f"{contraction.letters[0]},{contraction.letters[1]}->{contraction.letters[2]}"
        if isinstance(left, tuple):
            left, shrink = left
            total = total * shrink
        right = self.tiles.get(contraction.right)
        if right is None:
            right = torch.full((1,), torch.nan, dtype=torch.float64)
        self.products[key] = total + torch.einsum(equation, left, right)

    def _left(
        self, contraction: Contraction, first: bool, key: tuple[str, tuple[int, ...]]
    ) -> "Tensor | tuple[Tensor, Tensor]":
        """The left operand after its stage; for a softmax, also what the sum so far shrinks by."""
        if contraction.left in self.chain.operands:
            return self.tiles[contraction.left]
        value = self.products[self._key(contraction.left)]
        before = next(c for c in self.chain.contractions if c.output == contraction.left)
        if before.stages != ("softmax",):
            return reference.stage(value, before.stages)
        columns = self.placed.sizes[contraction.reduction]
        tile = self.placed.tiles[contraction.reduction]
        begin = max(self.at[contraction.reduction], 0) * tile
        value = value.clone()
        value[..., max(columns - begin, 0) :] = -torch.inf
        peak, total = self.running.get(key[1], (torch.full_like(value[..., :1], -torch.inf),) * 2)
        if first:
            peak, total = torch.full_like(value[..., :1], -torch.inf), torch.zeros_like(peak)
        higher = torch.maximum(peak, value.amax(-1, keepdim=True))
        weights = torch.exp(value - higher)
        shrink = torch.exp(peak - higher)
        self.running[key[1]] = higher, total * shrink + weights.sum(-1, keepdim=True)
        return weights, shrink

    def _store(self, statement: Statement) -> None:
        """All tiles of the result that the block has, which may be a whole row of them."""
        letters = self.chain.indices(statement.operand)
        for (operand, turns), tile in self.products.items():
            if operand != statement.operand:
                continue
            if any(self.at[x] not in (-1, turn) for x, turn in zip(letters, turns, strict=True)):
                continue
            if turns in self.running:
                tile = tile / self.running[turns][1]
            where = tuple(
                slice(turn * self.placed.tiles[x], (turn + 1) * self.placed.tiles[x])
                for x, turn in zip(letters, turns, strict=True)
            )
            self.out[where] = tile
            self.counted[str(statement)] += tile.numel()
