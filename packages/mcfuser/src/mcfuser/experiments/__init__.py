"""The paper's figures and tables, one module each; `mcfuser reproduce` runs them."""

from septet_shared.experiment import Demo, Headline, Rows, Sweep


def _headline(rows: Rows) -> Headline:
    moved = rows.max("bytes_moved", variant="fused")
    return Headline(ran="rows scaled, 1024 x 64", ours=f"{moved:,} bytes moved", kind="counted")


DEMO = Demo(experiment="figure1", sweep=Sweep(rows=[1024], columns=64), headline=_headline)
