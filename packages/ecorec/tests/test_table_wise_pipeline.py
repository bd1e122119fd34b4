"""Tables over ranks give what one process gives that has all samples."""

import functools

import pytest
import torch

from ecorec import (
    KeyedJaggedTensor,
    PipelinedTrainer,
    TableConfig,
    TTEmbeddingBagCollection,
)
from ecorec.sharding_plan import Plan
from ecorec.table_wise_pipeline import DistributedTTCollection
from septet_shared import ranks as ranks_module
from septet_shared.ranks import RankError

TABLES = (
    TableConfig("user", 500, 8, ["u", "friend"], rank=4),
    TableConfig("item", 300, 4, ["i"], pooling="mean", rank=3),
    TableConfig("hour", 24, 2, ["h"], kind="dense"),
    TableConfig("tag", 200, 6, ["t"], rank=2),
)
MIXED = Plan(
    kind={"user": "tw", "item": "dp", "hour": "dp", "tag": "tw"},
    owner={"user": 1, "tag": 0},
    groups=(("user",), ("tag",)),
    order="given",
    world_size=2,
    local_batch=4,
)
FEATURES = ("i", "h", "friend", "t", "u", "unused")
ROWS = {"u": 500, "friend": 500, "i": 300, "h": 24, "t": 200, "unused": 5}


def batch(samples, seed, weighted=False):
    """The whole batch of one step: for each feature, the bags of all samples."""
    generator = torch.Generator().manual_seed(seed)
    bags = {}
    for feature in FEATURES:
        sizes = torch.randint(0, 4, (samples,), generator=generator).tolist()
        bags[feature] = [
            (
                torch.randint(ROWS[feature], (size,), generator=generator),
                torch.rand(size, generator=generator, dtype=torch.float64),
            )
            for size in sizes
        ]
    return bags


def part(bags, begin, end, weighted=False):
    """Samples [begin, end) as a KeyedJaggedTensor."""
    chosen = [bag for feature in FEATURES for bag in bags[feature][begin:end]]
    values = torch.cat([torch.zeros(0, dtype=torch.int64), *(v for v, _ in chosen)])
    weights = torch.cat([torch.zeros(0, dtype=torch.float64), *(w for _, w in chosen)])
    lengths = torch.tensor([len(v) for v, _ in chosen], dtype=torch.int64)
    return KeyedJaggedTensor(FEATURES, values, lengths, weights=weights if weighted else None)


def make(kind, tables=TABLES, **options):
    generator = torch.Generator().manual_seed(3)
    return kind(tables, generator=generator, dtype=torch.float64, **options)


def loss_of(pooled, begin, samples):
    """Of each sample another function of its embeddings; over the samples of all ranks."""
    x = pooled.values()
    scale = torch.arange(begin + 1, begin + 1 + len(x), dtype=x.dtype)[:, None]
    return ((x * scale).cos()).sum() / samples


def single(shares, optimizer, weighted, tables):
    """(states after three steps, outputs of the last) of one process with all samples."""
    collection = make(TTEmbeddingBagCollection, tables, optimizer=optimizer, lr=0.1)
    plain = torch.optim.SGD(plain_parameters(collection), lr=0.1)
    samples = sum(shares)
    for step in range(3):
        pooled = collection(part(batch(samples, step), 0, samples, weighted))
        plain.zero_grad()
        loss_of(pooled, 0, samples).backward()
        plain.step()
    return collection.state_dict(), pooled.values().detach()


def plain_parameters(collection):
    """Those that no fused optimiser has."""
    return [
        parameter
        for bag in collection.embedding_bags.values()
        if getattr(bag, "fused_optimizer", None) is None
        for parameter in bag.parameters()
    ]


def train(ranks, shares, plan, optimizer, weighted, tables, options):
    samples, begin = sum(shares), sum(shares[: ranks.rank])
    make_it = functools.partial(DistributedTTCollection, ranks=ranks, plan=plan, **options)
    collection = make(make_it, tables, optimizer=optimizer, lr=0.1)
    parameters = plain_parameters(collection)
    plain = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    for step in range(3):
        features = part(batch(samples, step), begin, begin + shares[ranks.rank], weighted)
        if step == 1:
            collection.start(features)
        pooled = collection(features)
        if plain:
            plain.zero_grad()
        loss_of(pooled, begin, samples).backward()
        for parameter in collection.replicated_parameters():
            ranks.all_reduce(parameter.grad)
        if plain:
            plain.step()
    state = collection.full_state_dict()
    # Another plan takes over, and goes on from there.
    other = make(functools.partial(DistributedTTCollection, ranks=ranks, plan="dp"), tables)
    other.load_full_state_dict({k: v for k, v in state.items() if "optimizer" not in k})
    with torch.no_grad():
        again = other(features).values() if optimizer is None else None
        now = collection(features).values()
    return pooled.values().detach(), state, again, now


SETTINGS = [
    ((5, 3), "tw", "adagrad", False, {}),
    ((5, 3), "dp", "sgd", False, {}),
    ((4, 0), MIXED, "adagrad", False, {"overlap": False}),
    ((0, 4), "tw", None, False, {"groups": 3, "order": "given"}),
    ((3, 4), "auto", None, False, {}),
    ((3, 4), "tw", "sgd", True, {"groups": 2}),
    ((2, 3), MIXED, "slice_adagrad", True, {}),
]


def all_settings(ranks):
    found = []
    for shares, plan, optimizer, weighted, options in SETTINGS:
        tables = tuple(t for t in TABLES if t.pooling == "sum" or not weighted)
        if weighted and isinstance(plan, Plan):
            kind = {k: v for k, v in plan.kind.items() if k != "item"}
            plan = Plan(kind, plan.owner, plan.groups, "given", 2, 4)
        found.append(train(ranks, shares, plan, optimizer, weighted, tables, options))
    return found


def assert_close(actual, expected, what):
    apart = (actual - expected).abs().max() if actual.numel() else 0.0
    assert apart <= 1e-9 * max(1e-30, float(expected.abs().max() if expected.numel() else 0)), what


@pytest.fixture(scope="module")
def two_ranks():
    return ranks_module.run(all_settings, 2)


@pytest.mark.parametrize("k", range(len(SETTINGS)))
def test_two_ranks_train_as_one_process_does(two_ranks, k):
    shares, _, optimizer, weighted, _ = SETTINGS[k]
    tables = tuple(t for t in TABLES if t.pooling == "sum" or not weighted)
    expected, pooled = single(shares, optimizer, weighted, tables)
    begin = 0
    for rank, (mine, state, again, now) in enumerate(found[k] for found in two_ranks):
        assert_close(mine, pooled[begin : begin + shares[rank]], f"bags of rank {rank}")
        begin += shares[rank]
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_close(state[name], tensor, f"{name} on rank {rank}")
        if again is not None:
            assert_close(again, now, "after loading into another plan")


def three(ranks):
    return train(ranks, (2, 0, 3), "tw", "sgd", False, TABLES, {"groups": 2})


def test_three_ranks_of_which_one_has_no_samples_train_as_one_process_does():
    expected, _ = single((2, 0, 3), "sgd", False, TABLES)
    for _, state, _, _ in ranks_module.run(three, 3):
        for name, tensor in expected.items():
            assert_close(state[name], tensor, name)


def wrong_batches(ranks):
    collection = make(functools.partial(DistributedTTCollection, ranks=ranks, plan="tw"))
    found = []
    right = part(batch(4, 0), 0, 4)
    for wrong in ("index", "feature", "weights"):
        features = right
        if ranks.rank == 1:
            if wrong == "index":
                values = right.values().clone()
                values[0] = 300
                features = KeyedJaggedTensor(FEATURES, values, right.lengths())
            elif wrong == "feature":
                features = KeyedJaggedTensor(
                    ["i"], torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
                )
            else:
                features = part(batch(4, 0), 0, 4, weighted=True)
        try:
            collection(features)
        except (IndexError, ValueError, NotImplementedError) as error:
            found.append(f"{type(error).__name__}: {error}")
    collection(right)  # and nothing is left over
    return found


def test_a_wrong_batch_on_one_rank_raises_the_same_on_all():
    one, other = ranks_module.run(wrong_batches, 2)
    assert one == other
    assert one[0].startswith("IndexError: rank 1: feature 'i'")
    assert "got 300 at position 0" in one[0]
    assert one[1].startswith("ValueError: rank 1: the batch must have feature")
    assert one[2].startswith("NotImplementedError: rank 1")


class Foreign:
    """A batch of somebody else's: its methods, and nothing of ours."""

    def __init__(self, batch):
        self.keys, self.values, self.lengths = batch.keys, batch.values, batch.lengths
        self.weights_or_none = batch.weights_or_none


class Model(torch.nn.Module):
    def __init__(self, collection, of_each):
        super().__init__()
        self.collection, self.head, self.of_each = collection, torch.nn.Linear(28, 1), of_each

    def forward(self, features):
        losses = self.head(self.collection(features).values().float()).squeeze(1).square()
        return losses if self.of_each else losses.mean()


def habits(ranks):
    """What users of other libraries bring along."""
    collection = make(functools.partial(DistributedTTCollection, ranks=ranks, plan="tw"))
    features = Foreign(part(batch(4, 0), 0, 4))
    collection.start(features)
    found = [list(collection(features).values().shape)]
    torch.manual_seed(ranks.rank)
    models = [Model(collection, of_each) for of_each in (True, False)]
    trainers = [
        PipelinedTrainer(model, None, ranks, features=lambda batch: batch) for model in models
    ]
    found.append(models[0].head.weight.tolist())
    found.append(float(trainers[0].step(features, features)))
    try:
        trainers[1].step(features)
    except ValueError as error:
        found.append(str(error))
    return found


def test_foreign_batches_other_seeds_and_mean_losses_are_met_as_users_expect():
    one, other = ranks_module.run(habits, 2)
    assert one == other
    assert one[0] == [4, 28]
    assert one[3] == "model must return the loss of each sample, [4]; got shape []"


def wrong_states(ranks):
    """What states raise that lack a tensor, have one too many, or have one of another shape."""
    collection = make(functools.partial(DistributedTTCollection, ranks=ranks, plan=MIXED))
    before = {name: tensor.clone() for name, tensor in collection.full_state_dict().items()}
    name = "embedding_bags.tag.cores.1"  # rank 1 does not hold it
    found = []
    for state in (
        {k: v for k, v in before.items() if k != name},
        before | {"more": before[name]},
        {k: v + 1 for k, v in before.items()} | {name: before[name][:, :, :1]},
    ):
        try:
            collection.load_full_state_dict(state)
        except ValueError as error:
            found.append(str(error))
    assert all(torch.equal(before[k], v) for k, v in collection.full_state_dict().items())
    return found, draw(ranks)


def draw(ranks):
    """Entries from the default generator of each kind of collection, and what it gives next."""
    found = []
    for kind in (
        TTEmbeddingBagCollection,
        functools.partial(DistributedTTCollection, ranks=ranks, plan="dp"),
        functools.partial(DistributedTTCollection, ranks=ranks, plan=MIXED),
    ):
        torch.manual_seed(5 if ranks.rank == 0 else 6)
        collection = kind(TABLES)
        whole = getattr(collection, "full_state_dict", collection.state_dict)()
        found.append((whole, torch.rand(3)))
    return found


@pytest.fixture(scope="module")
def states():
    return ranks_module.run(wrong_states, 2)


def test_a_wrong_state_raises_the_same_on_all_ranks_and_changes_nothing(states):
    (one, _), (other, _) = states
    assert one == other
    assert one[0].endswith("it lacks embedding_bags.tag.cores.1")
    assert one[1].endswith("it has more")
    assert one[2].startswith("embedding_bags.tag.cores.1 must have shape")


def test_entries_start_as_in_one_process_and_its_generator_goes_on_alike(states):
    _, ((expected, following), *others) = states[0]
    for state, after in others:
        assert torch.equal(after, following)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def lose_a_rank(ranks):
    import os

    collection = make(functools.partial(DistributedTTCollection, ranks=ranks, plan="tw"))
    pooled = collection(part(batch(4, 0), 0, 4))
    if ranks.rank == 1:
        os._exit(3)
    pooled.values().sum().backward()


def test_a_dead_rank_is_named():
    with pytest.raises(RankError, match="rank 1"):
        ranks_module.run(lose_a_rank, 2, timeout_s=30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 3}, "plan must be for 1 ranks"),
        ({"groups": ()}, "one group"),
        ({"kind": {"user": "tw"}}, "differs in hour, item, tag"),
    ],
)
def test_a_plan_for_something_else_is_refused(change, message):
    single_plan = {**MIXED.__dict__, "owner": {"user": 0, "tag": 0}, "world_size": 1, **change}
    alone = ranks_module.Ranks.world("cpu")
    with pytest.raises(ValueError, match=message):
        make(functools.partial(DistributedTTCollection, ranks=alone, plan=Plan(**single_plan)))
