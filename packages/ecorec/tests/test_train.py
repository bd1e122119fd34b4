import dataclasses

import pytest
import torch
from torch import nn

from ecorec import TTEmbeddingBag, TTSpec, movielens
from ecorec.compressors import HashedEmbeddingBag, QREmbeddingBag
from ecorec.dlrm import DLRM
from ecorec.train import (
    EMBEDDING_DIM,
    KINDS,
    TABLE_ROWS,
    ZeroTable,
    auc,
    make_table,
    train,
    train_rows,
)


@pytest.fixture(scope="session")
def few(ratings):
    """Real ratings with a short training part."""
    return dataclasses.replace(ratings, training=ratings.training[:4000])


def same(one, other):
    return (
        one.logits.equal(other.logits)
        and one.validation_auc == other.validation_auc
        and (one.test_auc, one.test_logloss) == (other.test_auc, other.test_logloss)
    )


@pytest.mark.parametrize("n", [2, 7, 60])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_auc_counts_pairs_and_half_of_the_ties(n, levels):
    rng = torch.Generator().manual_seed(n)
    scores = torch.randint(0, levels, (n,), generator=rng).float()
    labels = (torch.arange(n) % 3 == 0).float()
    pairs = [
        (positive > negative) + (positive == negative) / 2
        for positive in scores[labels == 1].tolist()
        for negative in scores[labels == 0].tolist()
    ]
    assert auc(labels, scores) == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


def test_auc_needs_both_labels():
    with pytest.raises(ValueError, match="got 0 positive, 3 negative"):
        auc(torch.zeros(3), torch.rand(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_gives_the_same_numbers_again_whatever_ran_before(few, kind):
    torch.manual_seed(1)
    one = train(few, kind, epochs=1, seed=3)
    train(few, "zero", epochs=1, seed=5)
    torch.rand(7)
    assert same(one, train(few, kind, epochs=1, seed=3))
    assert not one.logits.equal(train(few, kind, epochs=1, seed=4).logits)


def test_a_run_leaves_the_callers_threads_and_random_state(few):
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        train(few, "zero", epochs=1, seed=0)
        assert torch.get_num_threads() == 2
        assert torch.get_rng_state().equal(state)
    finally:
        torch.set_num_threads(before)


def test_the_reported_epoch_is_the_one_with_the_best_validation(few):
    run = train(few, "dense", epochs=4, seed=0)
    assert len(run.validation_auc) == 4
    assert run.validation_auc[run.best_epoch - 1] == max(run.validation_auc)
    assert run.best_epoch < 4  # 4,000 samples are soon learnt by heart: later epochs are worse
    until = train(few, "dense", epochs=run.best_epoch, seed=0)
    assert until.logits.equal(run.logits)
    assert until.test_auc == run.test_auc


def test_the_test_part_chooses_nothing(few):
    labels = few.labels.clone()
    labels[few.test] = 1 - labels[few.test]
    turned = dataclasses.replace(few, labels=labels)
    one, other = (train(each, "tt", epochs=2, seed=0) for each in (few, turned))
    assert one.logits.equal(other.logits)
    assert one.best_epoch == other.best_epoch
    assert other.test_auc == pytest.approx(1 - one.test_auc)


def test_all_kinds_start_from_the_same_model_and_see_the_same_batches(few, monkeypatch):
    seen = {}
    for kind in KINDS:
        starts, batches = [], []
        monkeypatch.setattr(
            "ecorec.train._step",
            lambda model, optimiser, batch, starts=starts, batches=batches: (
                starts.append(model.top[0].weight.detach().clone()),
                batches.append(batch.indices),
            ),
        )
        train(few, kind, epochs=1, seed=0)
        seen[kind] = (starts[0], torch.cat(batches))
    assert all(weight.equal(seen["tt"][0]) for weight, _ in seen.values())
    assert all(indices.equal(seen["tt"][1]) for _, indices in seen.values())


def test_a_trained_tt_model_predicts_the_same_from_its_dense_copy(ratings):
    table = make_table("tt", seed=0)
    model = DLRM(table, ratings.dense.shape[1], 4, EMBEDDING_DIM)
    optimiser = torch.optim.Adagrad(model.parameters(), lr=0.02)
    for batch in ratings.batches(ratings.training[:3000], 500):
        logits = model(batch.dense, batch.indices, batch.offsets)
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimiser.step()
        optimiser.zero_grad()
    batch = ratings.batch(ratings.test)
    arguments = (batch.dense, batch.indices, batch.offsets)
    with torch.no_grad():
        ours = model(*arguments)
        model.table = nn.EmbeddingBag.from_pretrained(
            table.to_dense(), mode="sum", include_last_offset=True
        )
        torch.testing.assert_close(model(*arguments), ours)


def test_the_zero_table_gives_what_a_frozen_table_of_zeros_gives():
    indices, offsets = torch.tensor([5, 9, 5]), torch.tensor([0, 2, 2, 3])
    frozen = nn.EmbeddingBag.from_pretrained(
        torch.zeros(10, EMBEDDING_DIM), mode="sum", include_last_offset=True
    )
    assert ZeroTable()(indices, offsets).equal(frozen(indices, offsets))


def test_tables_have_the_same_entries_spread_and_the_bytes_they_report(few):
    tt, dense = make_table("tt", 0), make_table("dense", 0)
    assert isinstance(tt, TTEmbeddingBag)
    assert dense.weight.shape == (TABLE_ROWS, EMBEDDING_DIM)
    ours = tt.lookup(torch.arange(0, TABLE_ROWS, 50)).detach()
    assert ours.std() == pytest.approx(dense.weight.std().item(), rel=0.1)
    for kind, peer in (("qr", QREmbeddingBag), ("hash", HashedEmbeddingBag)):
        table = make_table(kind, 0)
        assert isinstance(table, peer)
        indices = torch.arange(0, TABLE_ROWS, 50)
        rows = table(indices, torch.arange(len(indices) + 1)).detach()
        assert rows.std() == pytest.approx(dense.weight.std().item(), rel=0.1)
        assert 0.99 <= sum(p.nbytes for p in table.parameters()) / tt.spec.bytes <= 1
    run = train(few, "tt", epochs=1, seed=0)
    assert run.embedding_bytes == tt.spec.bytes
    assert dense.weight.nbytes >= 50 * run.embedding_bytes


def test_small_tables_take_no_more_bytes_than_the_given_shape(few):
    spec = TTSpec(TABLE_ROWS, EMBEDDING_DIM, (100, 100, 100), (2, 2, 4), (16, 16))
    taken = {
        kind: train(few, kind, epochs=1, seed=0, spec=spec).embedding_bytes
        for kind in ("tt", "qr", "hash")
    }
    assert taken["tt"] == spec.bytes
    assert all(spec.bytes - 4 * EMBEDDING_DIM < taken[kind] <= spec.bytes for kind in taken)


def test_every_table_but_zero_learns(few):
    auc_of = {kind: train(few, kind, epochs=2, seed=0).test_auc for kind in KINDS}
    assert all(auc_of[kind] > auc_of["zero"] + 0.02 for kind in KINDS if kind != "zero"), auc_of


def test_permuted_ratings_teach_no_table_anything(ratings):
    shuffled = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))
    permuted = dataclasses.replace(
        ratings, labels=ratings.labels[shuffled], training=ratings.training[::3]
    )
    for kind in KINDS:
        assert abs(train(permuted, kind, epochs=1, seed=0).test_auc - 0.5) <= 0.03, kind


def test_rows_give_the_mean_and_each_seed(small_data):
    ratings = movielens.load(small_data)
    rows = list(train_rows(ratings, ["zero", "tt"], epochs=1, seeds=2))
    assert [(row["name"], row["variant"]) for row in rows] == [
        (name, kind)
        for kind in ("zero", "tt")
        for name in ("auc", "logloss", "embedding_bytes", "seconds", "test_rows")
    ]
    runs = [train(ratings, "tt", epochs=1, seed=seed) for seed in (0, 1)]
    row = next(row for row in rows if (row["name"], row["variant"]) == ("auc", "tt"))
    assert row["value"] == (runs[0].test_auc + runs[1].test_auc) / 2
    assert row["notes"] == f"seed 0: {runs[0].test_auc:.4f}, seed 1: {runs[1].test_auc:.4f}"
    assert {row["kind"] for row in rows} == {"measured", "counted"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": ["tt", "robe"]}, "one of tt, dense, qr, hash, zero; got 'robe'"),
        ({"kinds": []}, "one of tt, dense, qr, hash, zero; got ''"),
        ({"kinds": ["tt", "zero", "tt"]}, "tables must differ; got tt,zero,tt"),
        ({"epochs": 0}, "epochs must be at least 1; got 0"),
        ({"seeds": -2}, "seeds must be at least 1; got -2"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_trained(small_data, arguments, message):
    ratings = movielens.load(small_data)
    with pytest.raises(ValueError, match=message):
        train_rows(ratings, **({"kinds": ["tt"], "epochs": 1, "seeds": 1} | arguments))
