"""Tiling expressions: in which order, and how nested, the loops over tiles run.

A letter is a loop, `mhnk` four of them one inside the other (deep tiling); in `mn(k,h)` the loops
k and h stand one after the other inside n (flat tiling). Loops may be siblings when no contraction
is indexed by both. A chain of two products has 26 expressions; loops over the output's own letters
that nothing keeps in the block go to the grid, and what is left is the sub-tiling expression: five
different ones.
Source: MCFuser, SC 2024, tiling expressions and its first pruning rule; the counts of 26 and 5 are
the paper's, how loops are bound to the grid is reconstructed from them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .chain import Chain


@dataclass(frozen=True)
class Loop:
    """A loop over tiles of one letter, and what is nested in it."""

    letter: str
    body: tuple["Loop", ...] = ()

    def __str__(self) -> str:
        if not self.body:
            return self.letter
        inner = ",".join(map(str, self.body))
        return f"{self.letter}{inner}" if len(self.body) == 1 else f"{self.letter}({inner})"

    @property
    def letters(self) -> frozenset[str]:
        """Of this loop and all inside."""
        return frozenset(self.letter).union(*(loop.letters for loop in self.body))


@lru_cache(maxsize=256)
def expressions(chain: Chain) -> tuple[str, ...]:
    """All tiling expressions of a chain: the deep ones first, each kind in alphabetical order."""
    loops = frozenset(chain.loops)
    found = {",".join(map(str, forest)) for forest in _forests(loops, chain)}
    return tuple(sorted(found, key=lambda text: ("(" in text, text)))


def parse(text: str, chain: Chain) -> tuple[Loop, ...]:
    """The loops of an expression, outermost first.

    Raises:
        ValueError: it is not one of the chain's; lists those.
    """
    if text not in expressions(chain):
        raise ValueError(f"expression must be one of {', '.join(expressions(chain))}; got {text!r}")
    return _parse(text)


@lru_cache(maxsize=1024)
def canonical(text: str, chain: Chain) -> str:
    """The sub-tiling expression: what is left in a block once loops are bound to the grid.

    Loops of the output's letters that every contraction has (m) are bound. Neighbours that no
    contraction shares change places freely (k, h); an output's letter that then has no reduction
    around it is bound, too (h), unless its loop stands beside others.
    """
    return ",".join(str(loop) for loop in sub_tiling(text, chain))


def grid(text: str, chain: Chain) -> str:
    """Letters of the loops that are bound to the grid, batch first: bm or bmh."""
    inside = {x for loop in sub_tiling(text, chain) for x in loop.letters}
    output = chain.indices(chain.output)
    return "".join(x for x in output if x not in inside)


@lru_cache(maxsize=1024)
def sub_tiling(text: str, chain: Chain) -> tuple[Loop, ...]:
    """The loops of `canonical`."""
    loops = parse(text, chain)
    if "(" in text:
        return _without(loops, _spatial_everywhere(chain))
    order = [x for x in text if x not in _spatial_everywhere(chain)]
    # A loop of the output moves out past neighbours with which no contraction shares it.
    for letter in reversed([x for x in chain.indices(chain.output) if x in order]):
        at = order.index(letter)
        while at > 0 and not _share(order[at - 1], letter, chain):
            order[at - 1], order[at] = order[at], order[at - 1]
            at -= 1
        if at == 0:
            order.pop(0)
    return _nested(order)


def _forests(letters: frozenset[str], chain: Chain) -> Iterator[tuple[Loop, ...]]:
    """Every way to nest these loops in which each contraction's loops lie on one path."""
    if not letters:
        yield ()
        return
    groups = _connected(letters, chain)
    if len(groups) > 1:
        yield from _beside(groups, chain)
    for letter in sorted(letters):
        for body in _forests(letters - {letter}, chain):
            yield (Loop(letter, body),)


def _beside(groups: Sequence[frozenset[str]], chain: Chain) -> Iterator[tuple[Loop, ...]]:
    if not groups:
        yield ()
        return
    for first in _forests(groups[0], chain):
        for rest in _beside(groups[1:], chain):
            yield (*first, *rest)


def _connected(letters: frozenset[str], chain: Chain) -> list[frozenset[str]]:
    """Loops that contractions share, in the contractions' order."""
    groups: list[frozenset[str]] = []
    for contraction in chain.contractions:
        own = contraction.loops & letters
        if not own:
            continue
        touching = [g for g in groups if g & own]
        groups = [g for g in groups if g not in touching] + [own.union(*touching)]
    return groups


def _share(one: str, other: str, chain: Chain) -> bool:
    return any({one, other} <= c.loops for c in chain.contractions)


def _spatial_everywhere(chain: Chain) -> frozenset[str]:
    """Letters of the output that every contraction has and none sums over."""
    common = frozenset.intersection(*(c.loops for c in chain.contractions))
    return common & frozenset(chain.indices(chain.output)) - frozenset(chain.batch)


def _without(loops: tuple[Loop, ...], letters: frozenset[str]) -> tuple[Loop, ...]:
    kept: list[Loop] = []
    for loop in loops:
        body = _without(loop.body, letters)
        kept += body if loop.letter in letters else (Loop(loop.letter, body),)
    return tuple(kept)


def _nested(order: Sequence[str]) -> tuple[Loop, ...]:
    loops: tuple[Loop, ...] = ()
    for letter in reversed(order):
        loops = (Loop(letter, loops),)
    return loops


def _parse(text: str) -> tuple[Loop, ...]:
    """Loops of a text that is known to be well formed."""
    parts, depth, start = [], 0, 0
    for i, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    if len(parts) > 1:
        return tuple(loop for part in parts for loop in _parse(part))
    letter, rest = text[0], text[1:]
    if rest.startswith("("):
        rest = rest[1:-1]
    return (Loop(letter, _parse(rest) if rest else ()),)
