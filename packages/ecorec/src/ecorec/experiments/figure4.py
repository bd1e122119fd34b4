"""Calibration (figure 4): different rows and front pairs of a batch, for five features.

This is a calibration, not a reproduction: the trace generator was fitted to the figure's fractions
of different rows, so that they agree says that the fit is good, and nothing else.
Paper: figure 4 shows how many of a batch's lookups are different rows and different front pairs
(numbers from the result files of the authors' artifact; its traces come with no package). Its pairs
are the first two of four factors, about sqrt(N) possible ones, so they stand beside nothing here.
Counted here: different rows of generated lookups, and their different front pairs in a table of
three near-cubic row factors and in the one that `suggest` finds, both D = 32 and rank 32 and the
second at no more bytes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ecorec.shape_search import near_cubic, suggest
from ecorec.shapes import TTSpec
from ecorec.traces import FEATURES, TableTrace
from septet_shared.experiment import Claim, Rows, Sweep
from septet_shared.profiling import bench_row

NAME = "figure4"
TITLE = "Calibration of the trace generator: different rows and front pairs of a batch"
BATCHES = [2048, 4096, 8192, 16384, 32768, 65536, 131072]
SCALES = {
    "smoke": Sweep(tables=["f44", "f125"], batches=BATCHES[:3]),
    "cpu": Sweep(tables=list(FEATURES), batches=BATCHES),
}
ROWS_OF_PAPER = {
    "f0": [0.0020, 0.0010, 0.0005, 0.0002, 0.0001, 0.0001, 0.0000],
    "f4": [0.3209, 0.3078, 0.2859, 0.2600, 0.2367, 0.2103, 0.1801],
    "f44": [0.4726, 0.3319, 0.2109, 0.1240, 0.0667, 0.0345, 0.0176],
    "f94": [0.1963, 0.1761, 0.1507, 0.1277, 0.1111, 0.0932, 0.0739],
    "f125": [0.1657, 0.1471, 0.1246, 0.1037, 0.0894, 0.0770, 0.0644],
}
PAIRS_OF_PAPER = {
    "f4": [0.0564, 0.0280, 0.0140, 0.0070, 0.0035, 0.0017, 0.0009],
    "f44": [0.0139, 0.0069, 0.0035, 0.0018, 0.0009, 0.0004, 0.0002],
    "f94": [0.0057, 0.0028, 0.0014, 0.0007, 0.0004, 0.0002, 0.0001],
    "f125": [0.0437, 0.0224, 0.0114, 0.0057, 0.0028, 0.0014, 0.0007],
}
PAPER = [
    {
        "name": name,
        "variant": variant,
        "table": table,
        "batch": batch,
        "value": value,
        "from": "figure 4, result file of the artifact" + remark,
    }
    for name, variant, of_table, remark in (
        ("unique_fraction", "rows", ROWS_OF_PAPER, ""),
        ("pair_fraction", "first two of four", PAIRS_OF_PAPER, ", pairs of four factors"),
    )
    for table, values in of_table.items()
    for batch, value in zip(BATCHES, values, strict=True)
]
FIGURES = ("value",)
LEAST_PRINTED = 0.0010  # below, four decimals say too little
TINY = "f0"  # a table of four rows, which has no pairs to save
DIM, RANK = 32, 32


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Rows unique_fraction and pair_fraction (of near-cubic and searched shape), for each batch."""
    for name in sweep.tables:
        trace = FEATURES[name]
        for batch in sweep.batches:
            yield from _rows(trace, batch)


def claims(rows: Rows) -> Iterator[Claim]:
    """The fit, and that searched shapes have fewer pairs."""
    off = {
        (row["table"], row["batch"]): abs(row["value"] / printed - 1)
        for row in rows.where(name="unique_fraction")
        if (printed := _printed(row["table"], row["batch"])) >= LEAST_PRINTED
    }
    worst = max(off, key=lambda point: off[point])
    yield Claim(
        "calibration: unique fractions are within 10 % of the table that they are fitted to",
        off[worst] <= 0.1,
        f"at most {off[worst]:.1%} off ({worst[0]} at {worst[1]:,} samples; {len(off)} points)",
    )
    pairs = rows.where(name="pair_fraction")
    shared = Rows([row for row in pairs if row["table"] != TINY], rows.scale)
    fewer = shared.ratio("value", "cubic", "searched", by=("table", "batch"))
    yield Claim(
        f"searched shapes have fewer front pairs than near-cubic ones ({TINY} left out)",
        fewer.min("ratio") > 1,
        f"{fewer.min('ratio'):.1f} to {fewer.max('ratio'):.1f} times fewer",
    )
    sizes = pairs.ratio("bytes", "searched", "cubic", by=("table", "batch"))
    yield Claim(
        "searched shapes take no more bytes than near-cubic ones",
        sizes.max("ratio") <= 1,
        f"{sizes.min('ratio'):.2f} to {sizes.max('ratio'):.2f} of them",
    )


def plot(rows: Rows, ax: Any) -> None:
    """Different rows (solid; the paper's as points), pairs of both shapes (dashed, dotted)."""
    for number, table in enumerate(dict.fromkeys(rows.column("table"))):
        for name, variant, line in (
            ("unique_fraction", "rows", "-"),
            ("pair_fraction", "cubic", "--"),
            ("pair_fraction", "searched", ":"),
        ):
            found = rows.where(name=name, variant=variant, table=table)
            label = table if variant == "rows" else None
            x, y = found.column("batch"), found.column("value")
            ax.plot(x, y, line, color=f"C{number}", label=label)
        printed = [(batch, _printed(table, batch)) for batch in BATCHES if _printed(table, batch)]
        ax.plot(*zip(*printed, strict=True), "o", color=f"C{number}")
    ax.set(xscale="log", yscale="log", xlabel="samples of a batch", ylabel="part of its lookups")
    ax.legend()


def _printed(table: str, batch: int) -> float:
    return ROWS_OF_PAPER[table][BATCHES.index(batch)]


def _rows(trace: TableTrace, batch: int) -> Iterator[dict[str, Any]]:
    indices = trace.batch(batch).indices.numpy()
    occurs = np.zeros(trace.num_embeddings, dtype=np.bool_)
    occurs[indices] = True
    uniques = np.flatnonzero(occurs)
    lookups = len(indices)

    def row(name: str, variant: str, count: int, spec: TTSpec | None = None) -> dict[str, Any]:
        shape = "" if spec is None else f"; p = {spec.p}, q = {spec.q}"
        return {
            "table": trace.name,
            "batch": batch,
            "bytes": None if spec is None else spec.bytes,
            **bench_row(
                name,
                variant,
                count / lookups,
                "",
                kind="counted",
                notes=f"calibration: {count:,} of {lookups:,} lookups{shape}",
            ),
        }

    yield row("unique_fraction", "rows", len(uniques))
    for variant, spec in (
        ("cubic", near_cubic(trace.num_embeddings, DIM, rank=RANK)),
        ("searched", suggest(trace.num_embeddings, DIM, rank=RANK)),
    ):
        pairs = uniques // spec.p[2]  # ascending
        yield row("pair_fraction", variant, 1 + int(np.count_nonzero(np.diff(pairs))), spec)
