"""Accuracy of a tensor-train table against the dense one, on MovieLens-100k.

Paper: EcoRec trains DLRMs whose tables are tensor trains; its full text could not be had. TT-Rec
(MLSys 2021, abstract) reports 0.03 % to 0.3 % loss of accuracy for 4x to 221x fewer bytes on
Criteo Kaggle.
Measured here: test AUC and logloss of a DLRM whose user, item, user x hour and user x genre
lookups share one hashed table of 1,000,000 rows, held as a tensor train (`tt`), dense (`dense`), or
frozen at 0 (`zero`: what the table is worth). Everything else is the same, and so is the rule that
the epoch with the best validation AUC is reported. Counted: bytes allocated; about 19,400 of the
rows are ever used.
Not reproduced: Criteo, which no package ships.
"""

from collections.abc import Iterator
from typing import Any

from ecorec import movielens
from ecorec.train import train_rows
from septet_shared.experiment import Claim, Rows, Sweep

NAME = "accuracy"
TITLE = "Test AUC on MovieLens-100k, tensor-train table against dense"
SCALES = {
    "smoke": Sweep(tables=["tt", "dense", "zero"], epochs=1, seeds=1),
    "cpu": Sweep(tables=["tt", "dense", "zero"], epochs=4, seeds=3),
}
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
    """Rows auc, logloss, embedding_bytes, seconds, test_rows of each kind of table."""
    ratings = movielens.load()
    return train_rows(ratings, sweep.tables, epochs=sweep.epochs, seeds=sweep.seeds)


def claims(rows: Rows) -> Iterator[Claim]:
    """Bytes and parts at every scale; accuracy after enough epochs, so not at smoke."""

    def value(name: str, kind: str) -> float:
        return rows.mean("value", name=name, variant=kind)

    fewer = value("embedding_bytes", "dense") / value("embedding_bytes", "tt")
    yield Claim("tt takes at least 50 times fewer embedding bytes", fewer >= 50, f"{fewer:.1f}")
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
