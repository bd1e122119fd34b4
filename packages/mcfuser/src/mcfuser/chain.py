"""A chain of contractions with pointwise stages or a softmax between them, as data.

    bmk,bkn->bmn; gelu; bmn,bnh->bmh

Single letters are dimensions, a word is a stage on the intermediate before it. Operands are named
A, B, C, ... in the order in which they appear; the output of a contraction is the first operand of
the next one: A and B give C, C and D give E.
Source: MCFuser, SC 2024, the chains of its evaluation; the notation is einsum's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

STAGES = ("relu", "gelu", "gelu_tanh", "silu", "softmax")
_MOST_CONTRACTIONS = 2


@dataclass(frozen=True)
class Contraction:
    """One batched matrix product: output [*, x, y] = sum over r of left [*, x, r] right [*, r, y].

    names: of left, right and output. letters: of each. stages: words for what happens to the output
    before it is used.
    """

    names: tuple[str, str, str]
    letters: tuple[str, str, str]
    stages: tuple[str, ...] = ()

    @property
    def left(self) -> str:
        """Name of the first operand."""
        return self.names[0]

    @property
    def right(self) -> str:
        """Name of the second operand."""
        return self.names[1]

    @property
    def output(self) -> str:
        """Name of the product."""
        return self.names[2]

    @property
    def indices(self) -> dict[str, str]:
        """Letters of each operand by its name."""
        return dict(zip(self.names, self.letters, strict=True))

    @property
    def reduction(self) -> str:
        """The letter that is summed over."""
        (letter,) = set(self.indices[self.left]) - set(self.indices[self.output])
        return letter

    @property
    def loops(self) -> frozenset[str]:
        """Letters of its loops: those of all its operands."""
        return frozenset("".join(self.letters))


@dataclass(frozen=True)
class Chain:
    """Contractions, each the left operand of the next.

    Attributes:
        contractions: in order.
        batch: letters that every operand has.
        operands: names of the inputs, as they are passed: A, B, D.
        output: name of the result: E.
    """

    contractions: tuple[Contraction, ...]

    @property
    def batch(self) -> str:
        """Letters that every operand has, in the order of the output."""
        return "".join(x for x in self.indices(self.output) if self._everywhere(x))

    @property
    def loops(self) -> str:
        """Letters of loops that are tiled, batch excluded, as they appear: m, k, n, h."""
        letters = dict.fromkeys("".join(t for c in self.contractions for t in c.letters))
        return "".join(x for x in letters if x not in self.batch)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the inputs in the order of a call."""
        first, *rest = self.contractions
        return (first.left, first.right, *(c.right for c in rest))

    @property
    def output(self) -> str:
        """Name of the result."""
        return self.contractions[-1].output

    def indices(self, operand: str) -> str:
        """Letters of an operand, batch first."""
        for contraction in self.contractions:
            if operand in contraction.indices:
                return contraction.indices[operand]
        raise ValueError(f"operand must be one of the chain's; got {operand!r}")

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Each letter's size, from the inputs' shapes.

        Raises:
            ValueError: a number of inputs or dimensions that does not fit, or a letter of two
                sizes; names the letter and both.
        """
        if len(shapes) != len(self.operands):
            names = ", ".join(self.operands)
            raise ValueError(f"the chain takes {names}: {len(self.operands)}; got {len(shapes)}")
        found: dict[str, tuple[int, str]] = {}
        for name, shape in zip(self.operands, shapes, strict=True):
            letters = self.indices(name)
            if len(shape) != len(letters):
                raise ValueError(f"{name} must have dimensions {letters}; got shape {tuple(shape)}")
            for letter, size in zip(letters, shape, strict=True):
                known, where = found.setdefault(letter, (size, name))
                if known != size:
                    raise ValueError(
                        f"sizes of a letter must agree; got {letter}: {known} in {where}, "
                        f"{size} in {name}"
                    )
        return {letter: size for letter, (size, _) in found.items()}

    def _everywhere(self, letter: str) -> bool:
        return all(letter in t for c in self.contractions for t in c.letters)

    def __str__(self) -> str:
        parts = []
        for c in self.contractions:
            left, right, output = c.letters
            parts += [f"{left},{right}->{output}", *c.stages]
        return "; ".join(parts)


def chain(text: str) -> Chain:
    """The Chain that a text describes; `str` of it gives an equal text.

    Args:
        text: contractions "bmk,bkn->bmn" and words (relu, gelu, gelu_tanh, silu, softmax) between
            them, separated by semicolons; two contractions.

    Raises:
        ValueError: quotes the stage that is unknown, does not chain, or is not a matrix product.
    """
    contractions: list[Contraction] = []
    for stage in (part.strip() for part in text.split(";")):
        if "->" not in stage:
            contractions = _with_word(contractions, stage)
        else:
            contractions.append(_contraction(stage, contractions))
    if len(contractions) != _MOST_CONTRACTIONS:
        raise ValueError(
            f"a chain must have {_MOST_CONTRACTIONS} contractions; got {len(contractions)} in "
            f"{text!r}"
        )
    if contractions[-1].stages:
        raise ValueError(
            f"a stage must stand between contractions; got {contractions[-1].stages[-1]!r} after "
            "the last one"
        )
    made = Chain(tuple(contractions))
    for c in contractions:
        for name, letters in c.indices.items():
            batch = len(made.batch)
            if letters[:batch] != made.batch or len(letters) != batch + 2:
                raise ValueError(
                    f"operands must be matrices with the batch letters {made.batch!r} first; got "
                    f"{letters!r} for {name} in {text!r}"
                )
    return made


def _with_word(contractions: list[Contraction], word: str) -> list[Contraction]:
    if word not in STAGES:
        raise ValueError(f"a stage must be one of {', '.join(STAGES)}, or a product; got {word!r}")
    if not contractions:
        raise ValueError(f"a chain must begin with a contraction; got {word!r}")
    *before, last = contractions
    if last.stages:
        raise ValueError(f"one stage may follow a contraction; got {word!r} after {last.stages[0]}")
    return [*before, replace(last, stages=(*last.stages, word))]


def _contraction(stage: str, before: list[Contraction]) -> Contraction:
    operands, _, output = stage.replace(" ", "").partition("->")
    inputs = operands.split(",")
    letters = [*inputs, output]
    if len(inputs) != 2 or not all(x.isalpha() and len(set(x)) == len(x) for x in letters):
        raise ValueError(
            f"a contraction must be like 'bmk,bkn->bmn', each letter once an operand; got {stage!r}"
        )
    left, right = inputs
    if before and left != before[-1].indices[before[-1].output]:
        wanted = before[-1].indices[before[-1].output]
        raise ValueError(
            f"a contraction must begin with the output before it, {wanted!r}; got {stage!r}"
        )
    summed = set(left) & set(right) - set(output)
    rows, columns = set(left) - set(right), set(right) - set(left)
    if len(summed) != 1 or len(rows) != 1 or len(columns) != 1 or not rows | columns <= set(output):
        raise ValueError(
            f"a contraction must sum over one letter and keep one of each operand; got {stage!r}"
        )
    if set(output) - set(left) - set(right) or set(output) != (set(left) | set(right)) - summed:
        raise ValueError(f"an output must have the letters of its operands; got {stage!r}")
    used = set("".join(t for c in before for t in c.letters))
    if before and columns & used:
        raise ValueError(f"a contraction must bring a new letter; got {stage!r}")
    first = before[-1].output if before else "A"
    other = chr(ord(first) + 1)
    result = chr(ord(other) + 1)
    return Contraction((first, other, result), (left, right, output))
