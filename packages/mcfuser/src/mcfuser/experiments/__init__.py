"""The paper's figures and tables, one module each; `mcfuser reproduce` runs them."""

from septet_shared.experiment import Demo, Headline, Rows, Sweep


def _headline(rows: Rows) -> Headline:
    counts = {row["rule"]: row["candidates"] for row in rows if row["rule"] != "best"}
    return Headline(
        ran="the search space of a chain of products 1024 x 1024 x 512 x 512, half precision, A100",
        ours=f"{counts['live']:,} of {counts['raw']:,} candidates left, none of them measured",
        kind="counted",
        paper="about 1e8 to 1e4",
    )


DEMO = Demo(
    experiment="tab_pruning_funnel",
    sweep=Sweep(shapes=[[1024, 1024, 512, 512]]),
    headline=_headline,
)
