"""Accuracy of a tensor-train table against the dense one, on MovieLens-100k.

Paper: EcoRec trains DLRMs whose tables are tensor trains; its full text could not be had. TT-Rec
(MLSys 2021, abstract) reports 0.03 % to 0.3 % loss of accuracy for 4x to 221x fewer bytes on
Criteo Kaggle.
Measured here: test AUC and logloss of a DLRM whose user, item, user x hour and user x genre
lookups share one hashed table of 1,000,000 rows, held as a tensor train with few short prefixes
(`tt`) or nearly cubic (`tt_cubic`), dense (`dense`), as quotient and remainder (`qr`), hashed once
more (`hash`), all three small ones at no more bytes than tt, or frozen at 0 (`zero`: what the table
is worth). Everything else is the same, and so is the rule that the epoch with the best validation
AUC is reported. `tt_above` is the AUC of tt less that of another small table: a figure, not a
claim, since against qr and hash its sign depends on settings (chosen for dense and tt together).
Counted: bytes allocated; about 19,400 of the rows are ever used.
Not reproduced: Criteo, which no package ships.
"""

from collections.abc import Iterator
from typing import Any

from ecorec import movielens
from ecorec.shapes import TTSpec
from ecorec.train import EMBEDDING_DIM, THREADS, train_rows
from septet_shared.experiment import Claim, Rows, Sweep
from septet_shared.profiling import bench_row

NAME = "accuracy"
TITLE = "Test AUC on MovieLens-100k, tensor-train table against dense and other small ones"
SMALL = ("tt_cubic", "qr", "hash")  # beside tt
SCALES = {
    "smoke": Sweep(tables=["tt", "dense", "qr", "hash", "zero"], epochs=1, seeds=1),
    "cpu": Sweep(tables=["tt", "tt_cubic", "dense", "qr", "hash", "zero"], epochs=4, seeds=3),
}
CUBIC = TTSpec(movielens.TABLE_ROWS, EMBEDDING_DIM, (100, 100, 100), (2, 2, 4), (38, 38))
PAPER = [
    {
        "name": "loss of accuracy",
        "variant": "tt",
        "value": 0.003,
        "from": "TT-Rec, MLSys 2021, abstract: at most, at 4x to 221x fewer bytes, Criteo Kaggle",
    }
]
FIGURES = ("value",)


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Rows auc, logloss, embedding_bytes, seconds, test_rows of each kind of table; tt_above."""
    ratings = movielens.load()
    settings = {"epochs": sweep.epochs, "seeds": sweep.seeds}
    auc = {}
    for table in sweep.tables:
        if table == "tt_cubic":
            rows = train_rows(ratings, ["tt"], **settings, spec=CUBIC)
        else:
            rows = train_rows(ratings, [table], **settings)
        for row in rows:
            if row["name"] == "auc":
                auc[table] = row["value"]
            yield row | {"variant": table}
    for small in SMALL:
        if small in auc:
            above = auc["tt"] - auc[small]
            yield bench_row("tt_above", small, above, "", kind="measured", threads=THREADS)


def claims(rows: Rows) -> Iterator[Claim]:
    """Bytes and parts at every scale; accuracy after enough epochs, so not at smoke."""

    def value(name: str, kind: str) -> float:
        return rows.mean("value", name=name, variant=kind)

    fewer = value("embedding_bytes", "dense") / value("embedding_bytes", "tt")
    yield Claim("tt takes at least 50 times fewer embedding bytes", fewer >= 50, f"{fewer:.1f}")
    for small in SMALL:
        if not rows.where(variant=small):
            continue
        part = value("embedding_bytes", small) / value("embedding_bytes", "tt")
        text = f"{small} takes the bytes of tt: no more, and at least 99 %"
        yield Claim(text, 0.99 <= part <= 1, f"{part:.4f}")
    tested = {row["value"] for row in rows.where(name="test_rows")}
    counts = ", ".join(f"{n:,}" for n in sorted(tested))
    yield Claim("every kind is tested on the same 19,633 ratings", tested == {19_633}, counts)
    if rows.scale == "smoke":
        return
    lost = value("auc", "dense") - value("auc", "tt")
    yield Claim("tt is within 0.01 test AUC of dense", lost <= 0.01, f"{lost:.4f} below")
    worth = value("auc", "dense") - value("auc", "zero")
    yield Claim("the table is worth 0.05 test AUC", worth >= 0.05, f"{worth:.4f}")


def plot(rows: Rows, ax: Any) -> None:
    """A bar of test AUC for each kind of table, its bytes beside its name."""
    found = rows.where(name="auc")
    bytes_of = {row["variant"]: row["value"] for row in rows.where(name="embedding_bytes")}
    names = [f"{row['variant']}\n{bytes_of[row['variant']] / 1e6:.2f} MB" for row in found]
    bars = ax.bar(names, [row["value"] for row in found], width=0.6)
    ax.bar_label(bars, fmt="%.4f")
    ax.set(ylabel="test AUC", ylim=(0.5, 0.85))
