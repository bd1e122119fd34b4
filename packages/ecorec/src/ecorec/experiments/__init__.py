"""The paper's figures and tables, one module each; `ecorec reproduce` runs them."""

from septet_shared.experiment import Demo, Headline, Rows, Sweep


def _headline(rows: Rows) -> Headline:
    tt, dense, zero = (rows.mean("value", name="auc", variant=v) for v in ("tt", "dense", "zero"))
    fewer = rows.mean("value", name="embedding_bytes", variant="dense") / rows.mean(
        "value", name="embedding_bytes", variant="tt"
    )
    return Headline(
        ran="a DLRM on MovieLens-100k, one hashed table of 1,000,000 x 16",
        ours=f"test AUC {tt:.3f} with {fewer:.0f} times fewer embedding bytes than the dense "
        f"table's {dense:.3f} ({zero:.3f} without a table)",
        paper="0.0003 to 0.003 lost at 4x to 221x (TT-Rec, on Criteo)",
    )


DEMO = Demo(
    experiment="accuracy",
    sweep=Sweep(tables=["tt", "dense", "zero"], epochs=4, seeds=1),
    headline=_headline,
)
