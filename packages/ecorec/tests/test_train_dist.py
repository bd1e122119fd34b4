"""Training over torchrun's ranks equals one process."""

import json
import subprocess
import sys

import pytest
import torch

from ecorec import (
    DistributedTTCollection,
    KeyedJaggedTensor,
    PipelinedTrainer,
    TTEmbeddingBagCollection,
)
from ecorec.train_dist import TABLES, ClickModel, Clicks, train_dist_rows
from septet_shared import ranks as ranks_module


def test_torchrun_s_two_ranks_end_where_one_process_ends():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--plan", "tw", "--samples", "4992", "--link", "1gbit", "--check-against-single"]
    done = subprocess.run(
        [*command, "-m", "ecorec", "train-dist", *options, "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert 0 < rows["loss"]["value"] < 2
    assert rows["max_relative_difference"]["value"] < 1e-4


def in_ranks(ranks):
    rows = [
        train_dist_rows(plan=plan, samples=samples, check_against_single=True)
        for plan, samples in (("tw", None), ("dp", 4992), ("auto", 4992))
    ]
    return rows, trainers(ranks)


def trainers(ranks):
    """What a trainer does with ranks that start apart, with wrong batches and wrong models."""
    torch.manual_seed(ranks.rank)
    collection = DistributedTTCollection(TABLES, ranks, plan="tw", optimizer="sgd", lr=0.1)
    model = ClickModel(collection, seed=ranks.rank)
    plain = torch.optim.SGD(model.top.parameters(), lr=0.1)
    trainer = PipelinedTrainer(model, plain, ranks)
    start = [parameter.clone() for parameter in trainer.replicated]
    clicks = Clicks(12)
    batch = clicks.batch(0, 8) if ranks.rank == 0 else clicks.batch(8, 12)
    values = batch.sparse_features.values().clone()
    values[2] = 200_000
    features = KeyedJaggedTensor(
        batch.sparse_features.keys(), values, batch.sparse_features.lengths()
    )
    wrong = batch._replace(sparse_features=features) if ranks.rank == 1 else batch
    told = []
    for following in (wrong, None):  # the same step again
        try:
            loss = trainer.step(batch, following)
        except IndexError as error:
            told.append(str(error))
    for bad in (lambda b: b.mean(), lambda b: (b, b), lambda b: b[:1]):
        model.forward = lambda batch, bad=bad: bad(ClickModel.forward(model, batch))
        try:
            trainer.step(batch)
        except ValueError as error:
            told.append(str(error))
    return start, loss, told


@pytest.fixture(scope="module")
def two_ranks():
    return ranks_module.run(in_ranks, 2)


def test_every_plan_ends_where_one_process_ends(two_ranks):
    (found, _), (nothing, _) = two_ranks
    assert nothing == [[], [], []]
    for rows in found:
        values = {row["name"]: row["value"] for row in rows}
        assert 0 < values["loss"] < 2
        assert values["max_relative_difference"] < 1e-4


def test_a_trainer_starts_all_ranks_alike_and_gives_them_the_loss_of_all_samples(two_ranks):
    (start, loss, _), (other_start, other_loss, _) = (found for _, found in two_ranks)
    assert all(torch.equal(a, b) for a, b in zip(start, other_start, strict=True))
    assert torch.equal(loss, other_loss)
    torch.manual_seed(0)
    model = ClickModel(TTEmbeddingBagCollection(TABLES, optimizer="sgd", lr=0.1), seed=0)
    torch.testing.assert_close(loss, model(Clicks(12).batch(0, 12)).mean().detach())


def test_a_wrong_next_batch_and_a_wrong_model_raise_on_all_ranks(two_ranks):
    (_, _, told), (_, _, other) = (found for _, found in two_ranks)
    assert told[0] == other[0]
    assert told[0].startswith("rank 1: feature 'user' must be in [0, 200000), the rows of table")
    assert "got 200000 at position 2" in told[0]
    assert told[1:] == [
        f"model must return the loss of each sample, [8]; got {got}"
        for got in ("shape []", "<class 'tuple'>", "shape [1]")
    ]
    assert len(other) == 4


def test_a_trainer_needs_tables_over_ranks():
    alone = ranks_module.Ranks.world("cpu")
    with pytest.raises(ValueError, match="must have a DistributedTTCollection"):
        PipelinedTrainer(torch.nn.Linear(2, 1), None, alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "criteo"}, "data must be synthetic; got 'criteo'"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"plan": "rw"}, "plan must be auto, tw, dp or a Plan; got 'rw'"),
        ({"samples": 10**6}, r"samples must be in \[1, 2560\], the steps' batches; got 1000000"),
        ({"link": "fast"}, "rate must be like '100mbit'"),
    ],
)
def test_a_wrong_argument_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        train_dist_rows(**options)
