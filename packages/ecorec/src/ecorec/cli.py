"""The command `ecorec`."""

from typing import Annotated, Any

import typer

from septet_shared import experiment

app = typer.Typer(
    no_args_is_help=True, help="Tensor-train embedding tables, a drop-in for nn.EmbeddingBag."
)
experiment.mount(app, "ecorec")
bench = typer.Typer(no_args_is_help=True, help="Times and sizes beside those of other tables.")
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Rows as one JSON list.")]


def _show(title: str, rows: list[dict[str, Any]], json: bool) -> None:
    from septet_shared.experiment.commands import print_json, print_table
    from septet_shared.experiment.results import show

    if json:
        print_json(rows)
        return
    names = ["name", "variant", "peer", "ratio", "value", "unit", "kind", "notes"]
    shown = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    print_table(title, shown, [[show(row[key]) for key in shown] for row in rows])


@app.command()
def suggest(
    rows: Annotated[int, typer.Option(help="Rows of the table.")],
    dim: Annotated[int, typer.Option(help="Its columns.")],
    rank: Annotated[int | None, typer.Option(help="Both ranks; else --max-bytes.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Most bytes of the cores.")] = None,
    ndim: Annotated[int, typer.Option(help="Cores: 2, 3 or 4.")] = 3,
    lookups: Annotated[int, typer.Option(help="Of a batch.")] = 65536,
    json: Json = False,
) -> None:
    """The shape of a tensor-train table that is fast for its size."""
    from septet_shared.profiling import bench_row

    from .shape_search import suggest as search

    with experiment.user_errors():
        spec = search(rows, dim, rank=rank, max_bytes=max_bytes, ndim=ndim, lookups=lookups)
    shape = f"p = {spec.p}, q = {spec.q}, ranks = {spec.ranks}"
    if not json:
        print(spec.explain())  # noqa: T201 - what was asked for
        return
    variant = "x".join(map(str, spec.p))
    counted = {"parameters": (spec.bytes, "B", shape), "compression": (spec.compression, "", shape)}
    found = [
        bench_row(name, variant, value, unit, kind="counted", notes=notes)
        for name, (value, unit, notes) in counted.items()
    ]
    _show("suggest", found, json)


@bench.command()
def step(
    rows: Annotated[int, typer.Option(help="Rows of the table.")] = 10_000_000,
    dim: Annotated[int, typer.Option(help="Its columns.")] = 32,
    rank: Annotated[int, typer.Option(help="Both ranks.")] = 32,
    batch: Annotated[int, typer.Option(help="Bags.")] = 4096,
    pooling: Annotated[int, typer.Option(help="Lookups of a bag.")] = 20,
    zipf: Annotated[float, typer.Option(help="Exponent of the lookups.")] = 1.05,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    peers: Annotated[
        str, typer.Option(help="Some of torch-tt, torch-tt-unique, nn, fbgemm-rowwise, fbgemm-sgd.")
    ] = "nn,fbgemm-rowwise,fbgemm-sgd",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 7,
    json: Json = False,
) -> None:
    """A training step against those of dense tables and of other tensor trains."""
    from .step_benchmark import step_rows

    with experiment.user_errors():
        found = list(step_rows(
            rows=rows, dim=dim, rank=rank, batch=batch, pooling=pooling, zipf=zipf,
            threads=threads, peers=[peer.strip() for peer in peers.split(",")], rounds=rounds,
        ))  # fmt: skip
    _show("a training step", found, json)


@app.command()
def train(
    data: Annotated[str, typer.Option(help="movielens, or a path to ml-100k.inter.")] = "movielens",
    tables: Annotated[
        str, typer.Option(help="Kinds of table: tt, dense, qr, hash, zero.")
    ] = "tt,dense,zero",
    epochs: Annotated[int, typer.Option(help="Passes over the training part.")] = 4,
    seeds: Annotated[int, typer.Option(help="Runs of each kind, seeds from 0.")] = 1,
    json: Json = False,
) -> None:
    """Train a recommendation model on MovieLens-100k with each kind of table."""
    from .movielens import load
    from .train import train_rows

    with experiment.user_errors():
        ratings = load(None if data == "movielens" else data)
        kinds = [kind.strip() for kind in tables.split(",")]
        rows = list(train_rows(ratings, kinds, epochs=epochs, seeds=seeds))
    _show("MovieLens-100k", rows, json)


@app.command("train-dist")
def train_dist(
    data: Annotated[str, typer.Option(help="synthetic.")] = "synthetic",
    steps: Annotated[int, typer.Option(help="Of each rank.")] = 20,
    local_batch: Annotated[int, typer.Option(help="Samples of a rank's step.")] = 128,
    samples: Annotated[
        int | None, typer.Option(help="Of all ranks; fewer than the steps take leave some empty.")
    ] = None,
    plan: Annotated[str, typer.Option(help="auto, tw (owners) or dp (replicas).")] = "auto",
    link: Annotated[
        str | None, typer.Option(help="Emulate this rate between the ranks, like 1gbit.")
    ] = None,
    check_against_single: Annotated[
        bool, typer.Option("--check-against-single", help="Train one process too, and compare.")
    ] = False,
    json: Json = False,
) -> None:
    """Train with tables over ranks: torchrun --nproc-per-node 2 -m ecorec train-dist."""
    from .train_dist import train_dist_rows

    with experiment.user_errors():
        rows = train_dist_rows(
            data=data, steps=steps, local_batch=local_batch, samples=samples, plan=plan, link=link,
            check_against_single=check_against_single,
        )  # fmt: skip
    if rows:
        _show("training over ranks", rows, json)


@app.command()
def plan(
    tables: Annotated[
        str, typer.Option(help="meta788, or its first 480 or 240 tables: meta480, meta240.")
    ] = "meta788",
    ranks: Annotated[int, typer.Option(help="Ranks of the job.")] = 32,
    local_batch: Annotated[int, typer.Option(help="Samples of a rank's step.")] = 4096,
    link_gbit: Annotated[float, typer.Option(help="Of a rank, Gbit/s.")] = 100.0,
    json: Json = False,
) -> None:
    """Which rank computes which table: predicted steps of plans."""
    from .sharding_plan import plan_rows

    with experiment.user_errors():
        rows = plan_rows(tables, ranks=ranks, local_batch=local_batch, link_gbit=link_gbit)
    _show("predicted steps", rows, json)


@bench.command()
def pipeline(
    ranks: Annotated[int, typer.Option(help="Local processes.")] = 2,
    link: Annotated[
        str,
        typer.Option(help="Emulated rate, like 1gbit; auto: exchanges take as long as computing."),
    ] = "auto",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 11,
    json: Json = False,
) -> None:
    """A pipelined step over ranks against one that waits for each exchange."""
    from .pipeline_benchmark import pipeline_rows

    with experiment.user_errors():
        rows = pipeline_rows(ranks=ranks, link=link, rounds=rounds)
    _show("a step over ranks", rows, json)


@bench.command("convert")
def bench_convert(
    rows: Annotated[int, typer.Option(help="Rows of the dense table.")] = 10_000_000,
    dim: Annotated[int, typer.Option(help="Its columns.")] = 32,
    rank: Annotated[int, typer.Option(help="Both ranks.")] = 16,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    json: Json = False,
) -> None:
    """Time and memory of a TT-SVD, in a process of its own."""
    from .experiments.conversion import bench_rows

    with experiment.user_errors():
        found = list(bench_rows(rows, dim, rank, threads))
    _show("a conversion", found, json)


@app.command()
def convert(
    table: Annotated[str, typer.Argument(help="A dense table [N, D]: .npy, or .pt of torch.save.")],
    output: Annotated[str, typer.Option(help="Where the tensor train goes, a .pt.")],
    key: Annotated[str | None, typer.Option(help="Its name, when the .pt holds a dict.")] = None,
    rank: Annotated[int | None, typer.Option(help="One of these three: both ranks,")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="the most bytes of the cores,")] = None,
    rel_error: Annotated[float | None, typer.Option(help="the most relative error.")] = None,
    json: Json = False,
) -> None:
    """Convert a dense table to a tensor train by TT-SVD; tells the true error."""
    from .convert_file import convert_rows

    with experiment.user_errors():
        rows = convert_rows(
            table, output, key=key, rank=rank, max_bytes=max_bytes, rel_error=rel_error
        )
    _show("a conversion", rows, json)
