"""The plot of a result: the experiment's own, or a plain one. Needs matplotlib."""

from __future__ import annotations

import io
import re
from importlib.util import find_spec
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

from .claims import Row, Rows
from .results import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .results import Result

_INK = "#31363f"
_COLOURS = ("#3f83c8", "#e07b39", "#46a06a", "#b35fb8", "#c79a1e", "#7c8794")
_PAPER = "#d1556b"
_STYLE = {
    "font.size": 11,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "hatch.linewidth": 0.8,
}


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def png(result: Result) -> bytes:
    """The plot as PNG on white."""
    return _render(result, "png", dpi=180)


def svg(result: Result) -> str:
    """The plot as SVG to put into a page: its ink is the page's text colour, its ground is bare."""
    text = _render(result, "svg", transparent=True, metadata={"Date": None}).decode()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 system-ui, sans-serif", text)
    referenced = set(re.findall(r"#([\w-]+)", text))
    return re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in referenced else "", text)


def _render(result: Result, kind: str, **options: Any) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    style: Any = {
        **_STYLE,
        "axes.prop_cycle": cycler(color=_COLOURS),
        # the ids inside must differ between the plots of one page
        "svg.hashsalt": f"{result.system}.{result.experiment.NAME}",
    }
    out = io.BytesIO()
    with mpl.rc_context(style):
        own = getattr(result.experiment, "plot", None)
        if own:
            figure = Figure(figsize=(5.2, 3.4), layout="constrained")
            own(result.rows, figure.subplots())
        else:
            figure = _plain(result)
        figure.savefig(out, format=kind, **options)
    return out.getvalue()


def _plain(result: Result) -> Figure:
    """The first figure of the rows that have it: a panel for each `name`, hollow if simulated."""
    from matplotlib.figure import Figure

    if not result.figures:
        raise ValueError(f"{result.experiment.NAME} has no column of numbers to plot")
    shown = result.figures[0]
    panels: dict[str, list[Row]] = {}
    for row in result.rows:
        if row.get(shown) is not None:
            panels.setdefault(str(row.get("name", "")), []).append(row)
    down, across = -(-len(panels) // 2), min(2, len(panels))
    figure = Figure(figsize=(5.2, 1.2 + 2.1 * down), layout="constrained")
    places = list(figure.subplots(down, across, squeeze=False).flat)
    legend: dict[str, Any] = {}
    for ax, (name, rows) in zip(places, panels.items(), strict=False):
        ax.set_title(name if len(panels) > 1 else "")
        units = {row.get("unit") for row in rows if row.get("unit")} if shown == "value" else ()
        ax.set_ylabel(f"{shown} ({', '.join(map(str, units))})" if units else shown)
        _draw_panel(ax, result, Rows(rows), shown)
        legend.update(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    for ax in places[len(panels) :]:
        ax.remove()
    if legend:
        figure.legend(
            legend.values(), legend.keys(), loc="outside lower center", ncols=3, handlelength=2.5
        )
    return figure


def _draw_panel(ax: Axes, result: Result, rows: Rows, shown: str) -> None:
    """Lines over the first column of numbers that varies and is no result; without one, bars."""
    unplaced = (*result.figures, "name", "kind", "unit", "notes", "ratio_low", "ratio_high")
    varying = [
        column
        for column in rows.columns
        if column not in unplaced and len(set(map(str, rows.column(column)))) > 1
    ]
    axis = next((c for c in varying if all(_is_number(x) for x in rows.column(c))), None)
    labels = [c for c in varying if not all(_is_number(x) for x in rows.column(c))]
    telling = [*labels, "kind", axis or "kind"]
    places = {tuple(str(row.get(c)) for c in telling) for row in rows}
    if len(places) < len(rows):  # words do not tell the points apart
        labels = [column for column in varying if column != axis]
    series: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        words = [
            f"{c} {show(row[c])}" if _is_number(row[c]) else str(row[c]) for c in row if c in labels
        ]
        series.setdefault((" ".join(words), row["kind"] == "simulated"), []).append(row)
    paper = [(row, p[shown]) for row in rows for p in result.paper_beside(row) if shown in p]
    numbered = zip(count(), cycle(_COLOURS), series.items(), strict=False)
    for place, colour, ((label, simulated), points) in numbered:
        if axis:
            points.sort(key=lambda row: row[axis])
            ax.plot(
                [row[axis] for row in points],
                [row[shown] for row in points],
                color=colour,
                label=label + (" (simulated)" if simulated else "") or None,
                marker="o",
                linestyle="--" if simulated else "-",
                markerfacecolor="none" if simulated else colour,
            )
        else:
            bars = ax.bar(
                [place],
                [points[-1][shown]],
                label="simulated" if simulated else None,
                facecolor="none" if simulated else colour,
                edgecolor=colour,
                hatch="///" if simulated else None,
            )
            ax.bar_label(bars, [_short(points[-1][shown])], padding=2, fontsize=9)
        marks = [row[axis] if axis else place + 0.3 for row, _ in paper if row in points]
        values = [value for row, value in paper if row in points]
        if values:
            ax.plot(marks, values, "D", color=_PAPER, label="paper", zorder=3, linestyle="")
    ax.margins(y=0.12)
    ax.yaxis.set_major_formatter(lambda value, _: _short(value))
    if not axis:
        ax.grid(visible=False, axis="x")
        ax.set_xticks(range(len(series)), [label for label, _ in series])
        ax.tick_params(axis="x", length=0, rotation=0 if len(series) < 5 else 20)
        return
    ax.set_xlabel(axis)
    ticks = sorted(set(rows.column(axis)))
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= 8:
        ax.set_xscale("log", base=2)
    if len(ticks) <= 6:
        ax.set_xticks(ticks, [show(tick) for tick in ticks])


def _short(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if size == 1e3 else 1):
            return f"{value / size:.3g}{letter}"
    return f"{value:.4g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
