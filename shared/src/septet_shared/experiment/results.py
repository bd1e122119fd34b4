"""One run of an experiment: found by name, run, laid beside the paper, written to files."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import pkgutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from septet_shared._whole_files import write_whole

from .claims import KINDS, Claim, Experiment, Row, Rows, Sweep
from .doctor import machine, versions
from .terminal import progress


def experiments(package: str) -> dict[str, Experiment]:
    """The experiments of a system by name: the modules of `<package>.experiments` with a NAME.

    Raises:
        ValueError: the system has no `experiments` package, a module with a NAME lacks another
            name of `Experiment`, or two have the same NAME.

    Cost: imports all of them.
    """
    try:
        folder = importlib.import_module(f"{package}.experiments")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.experiments"):
            raise
        raise ValueError(f"{package} has no package {package}.experiments") from None
    found: dict[str, Experiment] = {}
    for info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        module = importlib.import_module(info.name)
        if not hasattr(module, "NAME"):
            continue  # data and helpers of the experiments
        lacking = [
            name
            for name in ("TITLE", "SCALES", "PAPER", "run", "claims")
            if not hasattr(module, name)
        ]
        if lacking:
            raise ValueError(f"experiment {info.name} lacks {', '.join(lacking)}")
        if module.NAME in found:
            raise ValueError(f"two experiments of {package} have the NAME {module.NAME!r}")
        found[module.NAME] = cast(Experiment, module)
    return found


@dataclass(frozen=True)
class Result:
    """What one run gave, with all that is needed to judge it."""

    system: str
    experiment: Experiment
    scale: str
    command: str
    rows: Rows
    claims: list[Claim]
    seconds: float
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def holds(self) -> bool:
        """Whether every claim holds."""
        return all(claim.holds for claim in self.claims)

    @property
    def about(self) -> str:
        """The experiment's docstring: what the paper claims, what is measured, what is not."""
        return (self.experiment.__doc__ or "").strip()

    def record(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "system": self.system,
            "experiment": self.experiment.NAME,
            "title": self.experiment.TITLE,
            "scale": self.scale,
            "command": self.command,
            "date": self.date,
            "seconds": round(self.seconds, 3),
            "machine": machine(),
            "versions": versions(self.system),
            "paper": plain(self.experiment.PAPER),
            "rows": plain(self.rows),
            "claims": [asdict(claim) for claim in self.claims],
        }

    @cached_property
    def figures(self) -> list[str]:
        """The columns that are results rather than the point at which they were got."""
        named = getattr(self.experiment, "FIGURES", None)
        if named is not None:
            return [name for name in named if name in self.rows.columns]
        common: list[str] = [n for n in ("ratio", "value") if n in self.rows.columns]
        return common or [
            name
            for name in self.rows.columns
            if any(isinstance(value, float) for value in self.rows.column(name))
        ]

    def paper_beside(self, row: Mapping[str, Any]) -> list[Row]:
        """The paper's points that equal `row` in every column but the figures."""
        return [point for point in self.experiment.PAPER if self._is_point_of(point, row)]

    def _is_point_of(self, point: Row, row: Mapping[str, Any]) -> bool:
        place = [name for name in point if name != "from" and name not in self.figures]
        return (
            bool(place)
            and all(name in row and row[name] == point[name] for name in place)
            and any(name in point for name in self.figures)
        )

    def table(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Header, cells and footnotes of the rows, the paper's figures beside ours, as text.

        What is the same in every row stands in a footnote; so do the sources of the figures.
        """
        rows = self.rows
        beside = [self.paper_beside(row) for row in rows]
        merged = {"ratio_low": "ratio", "ratio_high": "ratio", "unit": "value"}
        header: list[str] = []
        cells: list[list[str]] = [[] for _ in rows]
        constant: list[str] = []
        for name in rows.columns:
            values = [show(value) for value in rows.column(name)]
            if merged.get(name) in rows.columns or not any(values):
                continue
            if len(rows) > 1 and len(set(values)) == 1 and name not in ("kind", *self.figures):
                constant.append(f"{name} {values[0]}")
                continue
            header.append(name)
            for line, row in zip(cells, rows, strict=True):
                line.append(_cell(row, name))
            if name in self.figures and any(name in p for points in beside for p in points):
                header.append(f"paper's {name}")
                for line, points in zip(cells, beside, strict=True):
                    figures = [show(p[name]) + self._mark(p) for p in points if name in p]
                    line.append(", ".join(figures))
        notes = [f"in every row: {', '.join(constant)}"] if constant else []
        notes += [f"[{n}] {source}" for n, source in enumerate(self._sources, 1)]
        return header, cells, notes

    def paper_alone(self) -> list[str]:
        """The paper's points that no row of this scale stands beside, as text."""
        used = {id(point) for row in self.rows for point in self.paper_beside(row)}
        return [
            ", ".join(f"{name} {show(value)}" for name, value in point.items() if name != "from")
            + self._mark(point)
            for point in self.experiment.PAPER
            if id(point) not in used
        ]

    @cached_property
    def _sources(self) -> list[str]:
        return list(dict.fromkeys(p.get("from", "the paper") for p in self.experiment.PAPER))

    def _mark(self, point: Row) -> str:
        return f" [{self._sources.index(point.get('from', 'the paper')) + 1}]"

    def csv(self) -> str:
        """The rows as CSV; the paper's figures in columns named `paper_...`."""
        out = io.StringIO()
        beside = [
            {f"paper_{n}": p[n] for p in self.paper_beside(row) for n in self.figures if n in p}
            for row in self.rows
        ]
        extra = dict.fromkeys(name for points in beside for name in points)
        writer = csv.DictWriter(out, [*self.rows.columns, *extra], lineterminator="\n")
        writer.writeheader()
        for row, points in zip(self.rows, beside, strict=True):
            line = {**row, **points}
            writer.writerow(
                {k: json.dumps(plain(v)) if _is_nested(v) else v for k, v in line.items()}
            )
        return out.getvalue()

    def markdown(self) -> str:
        """The report: what was claimed, the table, the claims, the machine and how to repeat it."""
        header, cells, notes = self.table()
        lines = [header, ["---"] * len(header), *cells]
        table = "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
            for line in lines
        )
        claims = "\n".join(
            f"- {'holds' if c.holds else '**does not hold**'}: {c.text}"
            + (f" ({c.detail})" if c.detail else "")
            for c in self.claims
        )
        facts = {**machine(), **versions(self.system)}
        parts = [
            f"# {self.system} {self.experiment.NAME} ({self.scale}): {self.experiment.TITLE}",
            self.about,
            f"    {self.command}",
            table,
            "\n".join(f"- {note}" for note in notes),
            "\n".join(f"- the paper also has: {point}" for point in self.paper_alone()),
            "## Claims",
            claims,
            f"{self.date}, {self.seconds:.1f} s. "
            + ", ".join(f"{k} {v}" for k, v in facts.items()),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, folder: Path) -> list[Path]:
        """The files `<name>.<scale>.{json,csv,md}`, and `.png` where matplotlib is installed.

        Each is complete or absent: written beside its place, then renamed.
        """
        from . import plot

        stem = f"{self.experiment.NAME}.{self.scale}"
        files: dict[str, str | bytes] = {
            "json": json.dumps(self.record(), indent=1),
            "csv": self.csv(),
            "md": self.markdown(),
        }
        if plot.is_available():
            files["png"] = plot.png(self)
        return [write_whole(folder / f"{stem}.{end}", data) for end, data in files.items()]


def run_experiment(
    package: str, name: str, scale: str, sweep: Sweep | None = None, command: str | None = None
) -> Result:
    """The rows and claims of one experiment at a scale, with a progress bar.

    Args:
        package: import name of the system.
        name: NAME of the experiment.
        scale: one of its SCALES, or any word with a `sweep` of its own.
        sweep: the points to visit instead of those of `scale`.
        command: recorded as what repeats this run; by default that of `reproduce`.

    Raises:
        ValueError: an unknown name or scale (the error names those that exist), a run without
            rows, a row that is no dict or whose `kind` is missing or unknown.
    """
    known = experiments(package)
    if name not in known:
        raise ValueError(f"{package} has no experiment {name!r}; it has {', '.join(known)}")
    module = known[name]
    if sweep is None:
        if scale not in module.SCALES:
            raise ValueError(f"{name} has no scale {scale!r}; it has {', '.join(module.SCALES)}")
        sweep = module.SCALES[scale]
    start = time.perf_counter()
    rows: list[Row] = []
    for row in progress(module.run(sweep), f"{package} {name} {scale}"):
        if not isinstance(row, dict) or row.get("kind") not in KINDS:
            raise ValueError(
                f"row {len(rows)} of {name} must be a dict whose kind is one of "
                f"{', '.join(KINDS)}; got {row!r}"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{name} at scale {scale!r} gave no rows")
    table = Rows(rows, scale)
    claims = list(module.claims(table))
    seconds = time.perf_counter() - start
    command = command or f"python -m {package} reproduce {name} --scale {scale}"
    return Result(package, module, scale, command, table, claims, seconds)


def show(value: Any) -> str:
    """A value as a person wants to read it in a table: 4 digits, thousands apart."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if _is_nested(value):
        text = json.dumps(plain(value))
        return text if len(text) <= 40 else text[:36] + " ..."
    value = plain_number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def plain(value: Any) -> Any:
    """`value` in JSON's own types; numbers that JSON lacks (nan, inf) become null."""
    value = plain_number(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)


def plain_number(value: Any) -> Any:
    """A number of numpy or torch as Python's own; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _is_nested(value: Any) -> bool:
    return (
        isinstance(value, Iterable) and not isinstance(value, str) and plain_number(value) is value
    )


def _cell(row: Mapping[str, Any], name: str) -> str:
    text = show(row.get(name))
    if name == "value" and text and row.get("unit"):
        return f"{text} {row['unit']}"
    if name == "ratio" and text and row.get("ratio_low") is not None:
        return f"{text} [{row['ratio_low']:.3g}, {row['ratio_high']:.3g}]"
    return text
