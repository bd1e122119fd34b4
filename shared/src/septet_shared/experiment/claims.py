"""What an experiment is made of: a sweep, the rows that it yields, the claims made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Protocol, overload

Row = dict[str, Any]
KINDS = ("measured", "simulated", "counted")


class Sweep:
    """The points that one scale of an experiment visits: `Sweep(lengths=[64, 256], repeats=7)`.

    Read as attributes (`sweep.lengths`). Frozen: lists become tuples, and setting an attribute
    raises AttributeError, so that a run cannot change the next one.
    """

    def __init__(self, **points: Any) -> None:
        for name, value in points.items():
            self.__dict__[name] = tuple(value) if isinstance(value, list) else value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this sweep has no {name!r}; it has {', '.join(vars(self)) or '-'}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Sweep is frozen: {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Sweep is frozen: {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sweep) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # its values may be anything

    def __repr__(self) -> str:
        return f"Sweep({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


@dataclass(frozen=True)
class Claim:
    """A statement about the shape of a result, whether it holds and, as `detail`, by how much."""

    text: str
    holds: bool
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", bool(self.holds))  # numpy and torch booleans too


class Rows(Sequence[Row]):
    """The rows of a run: a read-only sequence of dicts with the questions that claims ask.

    `scale` is the scale that they were run at ("smoke", "cpu", ..., "demo"): claims about measured
    time ask for it. Every question raises KeyError when no row has the column named, and
    ValueError when it would be asked of no value at all: a claim about nothing never holds.
    A row whose value is None (a peer that is not installed) is left out.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], scale: str = "") -> None:
        self._rows = [dict(row) for row in rows]
        self.scale = scale

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return Rows(self._rows[index], self.scale)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"Rows({len(self)} rows; columns {', '.join(self.columns) or '-'})"

    @cached_property
    def columns(self) -> list[str]:
        """Names of all columns, in order of first appearance."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def column(self, name: str) -> list[Any]:
        """The values of one column in row order, None where a row lacks it."""
        if name not in self.columns:
            raise KeyError(f"no row has a column {name!r}; there are {', '.join(self.columns)}")
        return [row.get(name) for row in self._rows]

    def where(self, **values: Any) -> Rows:
        """The rows whose columns equal the given values; may be empty."""
        for name in values:
            self.column(name)
        kept = [r for r in self._rows if all(r.get(n) == value for n, value in values.items())]
        return Rows(kept, self.scale)

    def min(self, column: str, **where: Any) -> Any:
        """The smallest value of a column among the rows that match `where`."""
        return min(self._values(column, where))

    def max(self, column: str, **where: Any) -> Any:
        """The largest value of a column among the rows that match `where`."""
        return max(self._values(column, where))

    def mean(self, column: str, **where: Any) -> float:
        """The arithmetic mean of a column over the rows that match `where`."""
        values = self._values(column, where)
        return float(sum(values) / len(values))

    def ratio(
        self,
        column: str,
        over: str | Mapping[str, Any],
        under: str | Mapping[str, Any],
        by: str | Sequence[str],
    ) -> Rows:
        """`column` of the rows `over` divided by that of the rows `under`, for each value of `by`.

        Args:
            column: a column of numbers.
            over: the rows above the line: a value of `variant`, or a dict of columns and values.
            under: the rows below the line, likewise.
            by: the column, or columns, in which a pair agrees.

        Returns:
            one row per pair: the columns `by`, `ratio`, and `kind` ("simulated" when either is).

        Raises:
            ValueError: a row has no partner or more than one, or there is no pair.
        """
        by = [by] if isinstance(by, str) else list(by)
        above, below = self._keyed(column, over, by), self._keyed(column, under, by)
        if above.keys() != below.keys() or not above:
            alone = sorted(map(str, above.keys() ^ below.keys())) or "none at all"
            raise ValueError(
                f"ratio needs a row of {over} and one of {under} for each {', '.join(by)}; "
                f"without a partner: {alone}"
            )
        pairs = []
        for key, top in above.items():
            bottom = below[key]
            kinds = {top.get("kind"), bottom.get("kind")}
            kind = next((k for k in ("simulated", "measured", "counted") if k in kinds), None)
            ratio = top[column] / bottom[column]
            pairs.append({**dict(zip(by, key, strict=True)), "ratio": ratio, "kind": kind})
        return Rows(pairs, self.scale)

    def is_increasing(self, column: str, by: str, **where: Any) -> bool:
        """Whether a column grows strictly with the column `by`, among the rows that match `where`.

        Raises:
            ValueError: two rows have the same `by` (narrow them with `where`), or fewer than two
                values of it: one point shows no growth.
        """
        for name in (column, by):
            self.column(name)
        points = sorted(
            (row[by], row[column])
            for row in self.where(**where)
            if row.get(by) is not None and row.get(column) is not None
        )
        if len(points) < 2 or any(a == b for (a, _), (b, _) in pairwise(points)):
            values = [x for x, _ in points]
            raise ValueError(f"is_increasing needs two or more different {by}; got {values}")
        return all(a < b for (_, a), (_, b) in pairwise(points))

    def _values(self, column: str, where: Mapping[str, Any]) -> list[Any]:
        if self:
            self.column(column)
        chosen = self.where(**where) if self else self
        values = [row[column] for row in chosen if row.get(column) is not None]
        if not values:
            raise ValueError(f"no row has a value of {column!r} where {dict(where) or 'any'}")
        return values

    def _keyed(self, column: str, chosen: str | Mapping[str, Any], by: list[str]) -> dict[Any, Row]:
        where = {"variant": chosen} if isinstance(chosen, str) else dict(chosen)
        keyed: dict[Any, Row] = {}
        for row in self.where(**where):
            if row.get(column) is None:
                continue
            key = tuple(row.get(name) for name in by)
            if key in keyed:
                raise ValueError(
                    f"ratio found two rows of {where} for {dict(zip(by, key, strict=True))}"
                )
            keyed[key] = row
        return keyed


class Experiment(Protocol):
    """The names that a module of a system's `experiments` package has: one figure or table.

    SCALES: scale name -> sweep. "smoke" takes seconds and runs in tests, "cpu" minutes on 2 cores,
    "gpu" one GPU, "paper" the paper's cluster, simulated.
    PAPER: the paper's points. `from` says where a point stands in the paper; it is shown beside
    our rows that equal it in all its other columns except the figures.
    FIGURES (optional): the columns that are results, first the one that the plain plot shows.
    Without it: `ratio` and `value` where rows have them, else the columns of fractions.
    run: the rows; each has `kind`, one of "measured", "simulated", "counted".
    claims: made of the rows, for every scale; about counted things only where `rows.scale` is
    "smoke".
    plot (optional): draws on a matplotlib Axes.
    """

    NAME: str
    TITLE: str
    SCALES: ClassVar[dict[str, Sweep]]
    PAPER: ClassVar[list[dict[str, Any]]]

    def run(self, sweep: Sweep) -> Iterator[Row]:
        """Rows, one at a time, so that progress shows."""
        ...

    def claims(self, rows: Rows) -> Iterator[Claim]:
        """Claims made of the rows."""
        ...


@dataclass(frozen=True)
class Headline:
    """A demo in one row of the final table: texts, and the kind of our figure."""

    ran: str  # what ran, on which input
    ours: str
    paper: str = "-"  # the paper's figure and where it stands
    kind: str = "measured"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")


@dataclass(frozen=True)
class Demo:
    """A system's headline job (`experiments.DEMO`): an experiment, its sweep, what to show of it.

    The sweep is real input at the smallest honest size, under 40 s on 2 cores. Rows carry
    `scale="demo"`.
    """

    experiment: str
    sweep: Sweep
    headline: Callable[[Rows], Headline]
