import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from ecorec import TTEmbeddingBag, TTSpec
from ecorec.collection import (
    KeyedJaggedTensor,
    KeyedTensor,
    TableConfig,
    TTEmbeddingBagCollection,
)

TABLES = (
    TableConfig("users", 300, 8, ["user"], rank=4),
    TableConfig("words", 101, 6, ["title", "query"], pooling="mean", rank=(3, 2)),
    TableConfig("days", 7, 3, ["day"], kind="dense"),
    TableConfig("places", 60, 5, ["from", "to"], spec=TTSpec(60, 5, (3, 20), (2, 3), (4,))),
)
FEATURES = ["user", "title", "query", "day", "from", "to"]
KEYS = ["to", "unused", "day", "title", "query", "from", "user"]  # words neighbours, places not
ROWS = {"user": 300, "title": 101, "query": 101, "day": 7, "from": 60, "to": 60, "unused": 9}
DIMS = [8, 6, 6, 3, 5, 5]


def collection(tables=TABLES, seed=0, **kwargs):
    return TTEmbeddingBagCollection(tables, generator=torch.Generator().manual_seed(seed), **kwargs)


def content(samples, longest=4, seed=0, keys=KEYS):
    """Indices of each sample of each key, as lists."""
    rng = torch.Generator().manual_seed(seed)
    return {
        key: [
            torch.randint(
                ROWS[key], (int(torch.randint(longest + 1, (), generator=rng)),), generator=rng
            ).tolist()
            for _ in range(samples)
        ]
        for key in keys
    }


def arguments(lists, dtype=torch.int64):
    """Values and lengths of these lists."""
    bags = [bag for bags in lists.values() for bag in bags]
    values = torch.tensor([index for bag in bags for index in bag], dtype=dtype)
    return values, torch.tensor([len(bag) for bag in bags], dtype=dtype)


def batch_of(lists, weights=None, dtype=torch.int64):
    values, lengths = arguments(lists, dtype)
    return KeyedJaggedTensor(list(lists), values, lengths=lengths, weights=weights)


def dense_tables(model):
    return {
        table.name: bag.weight if isinstance(bag, nn.EmbeddingBag) else bag.to_dense()
        for table, bag in zip(model.tables, model.embedding_bags.values(), strict=True)
    }


def expected_columns(model, lists, weights=None):
    """One feature and one bag after the other, over the whole tables."""
    whole = dense_tables(model)
    starts, place = {}, 0
    for key, bags in lists.items():
        for sample, bag in enumerate(bags):
            starts[key, sample] = place
            place += len(bag)
    columns = {}
    for table in model.tables:
        for feature in table.feature_names:
            bags = []
            for sample, bag in enumerate(lists[feature]):
                total = torch.zeros(table.embedding_dim)
                for n, index in enumerate(bag):
                    weight = 1 if weights is None else weights[starts[feature, sample] + n]
                    total = total + whole[table.name][index] * weight
                bags.append(total / max(1, len(bag)) if table.pooling == "mean" else total)
            columns[feature] = torch.stack(bags) if bags else torch.zeros(0, table.embedding_dim)
    return columns


class Batch:
    """Another library's batch: the methods and nothing else."""

    def __init__(self, keys, values, lengths, weights=None):
        self.keys, self.values = lambda: keys, lambda: values
        self.lengths, self.weights_or_none = lambda: lengths, lambda: weights


@pytest.fixture(scope="module")
def torchrec_batch():
    """TorchRec's own class, without the rest of TorchRec, which needs FBGEMM; or a stand-in."""
    found = importlib.util.find_spec("torchrec")
    if found is None:
        yield lambda keys, values, **rest: Batch(keys, values, **rest)
        return
    before = set(sys.modules)
    package = types.ModuleType("torchrec")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["torchrec"] = package
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as Theirs

    yield Theirs
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "torchrec":
            del sys.modules[name]


@pytest.mark.parametrize(("samples", "longest"), [(0, 4), (1, 4), (1, 0), (7, 1), (5, 0), (33, 6)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_columns_are_the_bags_of_each_feature_in_the_order_of_tables(samples, longest, dtype):
    model, lists = collection(), content(samples, longest)
    out = model(batch_of(lists, dtype=dtype))
    assert (out.keys(), out.length_per_key()) == (FEATURES, DIMS)
    assert out.values().shape == (samples, sum(DIMS))
    expected = expected_columns(model, lists)
    for feature, columns in out.to_dict().items():
        torch.testing.assert_close(columns, expected[feature], rtol=1e-5, atol=1e-5)
        assert columns.equal(out[feature])
    out.values().sum().backward()  # also without bags, or with empty ones only


def test_gradients_are_those_through_the_whole_tables():
    model, twin = collection(), collection()
    lists = content(20)
    slopes = torch.randn(20, sum(DIMS), generator=torch.Generator().manual_seed(1))
    (model(batch_of(lists)).values() * slopes).sum().backward()
    columns = expected_columns(twin, lists)
    (torch.cat([columns[feature] for feature in FEATURES], dim=1) * slopes).sum().backward()
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), twin.named_parameters(), strict=True
    ):
        largest = theirs.grad.abs().max()
        assert largest > 0, name
        assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * largest, name


def test_weights_scale_their_rows_and_get_gradients():
    tables = [table for table in TABLES if table.pooling == "sum"]
    model, lists = collection(tables), content(9)
    values, _ = arguments(lists)
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(2))
    weights[-1] = torch.nan
    last = len(lists["user"][-1])
    assert last > 0
    ours, theirs = (weights.clone().requires_grad_() for _ in range(2))
    out = model(batch_of(lists, ours)).to_dict()
    expected = expected_columns(model, lists, theirs)
    assert out["user"][-1].isnan().all()
    out["user"], expected["user"] = out["user"][:-1], expected["user"][:-1]
    for feature, columns in out.items():
        torch.testing.assert_close(columns, expected[feature], rtol=1e-5, atol=1e-5)
    sum(columns.square().sum() for columns in out.values()).backward()
    sum(columns.square().sum() for columns in expected.values()).backward()
    finite = slice(0, len(values) - last)
    torch.testing.assert_close(ours.grad[finite], theirs.grad[finite], rtol=1e-4, atol=1e-4)
    assert ours.grad[finite].abs().max() > 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("given", ["lengths", "offsets"])
@pytest.mark.parametrize("samples", [0, 6])
def test_a_batch_of_torchrec_gives_the_same_as_ours(torchrec_batch, weighted, given, samples):
    tables = [table for table in TABLES if table.pooling == "sum" or not weighted]
    model = collection(tables)
    values, lengths = arguments(content(samples))
    weights = torch.rand(len(values), generator=torch.Generator().manual_seed(3))
    rest = {"weights": weights if weighted else None}
    if given == "lengths":
        rest["lengths"] = lengths
    elif torchrec_batch.__name__ == "KeyedJaggedTensor":
        rest["offsets"] = nn.functional.pad(lengths.cumsum(0), (1, 0))
    else:
        pytest.skip("TorchRec is not installed: pip install --no-deps -r ci/no-deps.txt")
    ours = model(KeyedJaggedTensor(KEYS, values, **rest))
    theirs = model(torchrec_batch(KEYS, values, **rest))
    assert theirs.values().equal(ours.values())
    assert theirs.keys() == ours.keys()


def test_a_torchrec_batch_with_unequal_samples_is_refused(torchrec_batch):
    if torchrec_batch.__name__ != "KeyedJaggedTensor":
        pytest.skip("TorchRec is not installed: pip install --no-deps -r ci/no-deps.txt")
    batch = torchrec_batch(
        ["a", "b"],
        torch.zeros(4, dtype=torch.int64),
        lengths=torch.ones(4, dtype=torch.int64),
        stride_per_key_per_rank=[[3], [1]],  # 4 bags: two keys of two samples would fit as well
    )
    model = collection([TableConfig("t", 9, 4, ["a", "b"], kind="dense")])
    with pytest.raises(NotImplementedError, match="the same number of samples"):
        model(batch)


def test_anything_with_the_methods_is_a_batch_and_torchrec_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrec", None)  # an import of it would raise
    model, lists = collection(), content(5)
    values, lengths = arguments(lists)
    out = model(Batch(KEYS, values, lengths))
    assert out.values().equal(model(batch_of(lists)).values())


@pytest.mark.parametrize(
    "keys",
    ["to day from", "user to day from", "day to from", "to user day from", "to user from day"],
)
def test_features_of_one_table_are_one_call_wherever_they_stand(keys):
    table = TableConfig("words", 101, 6, ["to", "day", "from"], rank=(3, 2))
    model, lists = collection([table]), content(6, keys=keys.split())
    calls = []
    bag = model.embedding_bags["words"]
    bag.register_forward_pre_hook(lambda module, given: calls.append(given[1].tolist()))
    out = model(batch_of(lists))
    assert len(calls) == 1
    assert len(calls[0]) == 3 * 6 + 1
    for feature, columns in expected_columns(model, lists).items():
        torch.testing.assert_close(out[feature], columns, rtol=1e-5, atol=1e-5)


def test_a_shared_table_is_updated_once_from_the_sum_of_its_features():
    table = TableConfig("words", 101, 6, ["title", "query"], rank=3)
    fused = collection([table], optimizer="adagrad", lr=0.1, eps=1e-8)
    twin = collection([table])
    bag = twin.embedding_bags["words"]
    optimiser = torch.optim.Adagrad(bag.parameters(), lr=0.1, eps=1e-8)
    for step in range(10):
        lists = content(8, keys=["title", "query"], seed=step)
        fused(batch_of(lists)).values().square().sum().backward()
        optimiser.zero_grad()
        for feature in ("title", "query"):  # two lookups, whose gradients torch adds up
            values, lengths = arguments({feature: lists[feature]})
            edges = nn.functional.pad(lengths.cumsum(0), (1, 0))
            bag(values, edges).square().sum().backward()
        optimiser.step()
    for ours, theirs in zip(fused.parameters(), bag.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_dense_tables_stay_ordinary_parameters_beside_fused_ones():
    model = collection(optimizer="sgd", lr=0.1)
    cores = [core.detach().clone() for core in model.embedding_bags["users"].cores]
    model(batch_of(content(8))).values().sum().backward()
    assert model.embedding_bags["days"].weight.grad.abs().sum() > 0
    assert model.embedding_bags["users"].cores[0].grad is None
    assert not model.embedding_bags["users"].cores[0].equal(cores[0])


def test_names_in_the_state_are_those_of_the_tables_and_a_round_trip_is_exact():
    model, other = collection(seed=0), collection(seed=1)
    names = model.state_dict().keys()
    assert {name.split(".")[1] for name in names} == {table.name for table in TABLES}
    assert {"embedding_bags.users.cores.0", "embedding_bags.days.weight"} <= names
    batch = batch_of(content(5))
    assert not other(batch).values().equal(model(batch).values())
    other.load_state_dict(model.state_dict())
    assert other(batch).values().equal(model(batch).values())


def test_entries_of_both_kinds_have_the_asked_spread_and_dtype():
    tables = [
        TableConfig("tt", 4000, 8, ["a"], rank=8),
        TableConfig("dense", 4000, 8, ["b"], kind="dense"),
    ]
    model = collection(tables, init_std=0.02, dtype=torch.float64)
    for whole in dense_tables(model).values():
        assert whole.dtype == torch.float64
        assert whole.std().item() == pytest.approx(0.02, rel=0.05)
    again = collection(tables, init_std=0.02, dtype=torch.float64)
    assert all(a.equal(b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_arguments_that_every_bag_has_are_for_both_kinds():
    tables = [
        TableConfig("tt", 50, 4, ["a"], rank=2),
        TableConfig("dense", 50, 4, ["b"], kind="dense"),
    ]
    model = collection(tables, padding_idx=3)
    out = model(batch_of({"a": [[3, 7]], "b": [[3, 7]]}))
    whole = dense_tables(model)
    torch.testing.assert_close(out["a"][0], whole["tt"][7], rtol=1e-5, atol=1e-5)
    assert out["b"][0].equal(whole["dense"][7])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "hybrid"}, "kind of table 't' must be one of tt, dense; got 'hybrid'"),
        ({"pooling": "last"}, "pooling of table 't' must be one of sum, mean, max; got 'last'"),
        ({"feature_names": []}, r"feature_names of table 't' .* one or more names; got \[\]"),
        ({"feature_names": "ab"}, "must be a list of one or more names; got 'ab'"),
        ({"num_embeddings": 0}, "num_embeddings of table 't' must be at least 1; got 0"),
        ({"embedding_dim": -1}, "embedding_dim of table 't' must be at least 1; got -1"),
        (
            {"rank": 2, "spec": TTSpec(10, 4, (2, 5), (2, 2), (2,))},
            "table 't' of kind 'tt' takes spec or rank; got spec and rank",
        ),
        ({"kind": "dense", "rank": 2}, "'dense' takes neither spec nor rank; got rank"),
    ],
)
def test_a_wrong_table_is_refused(changed, message):
    right = {"name": "t", "num_embeddings": 10, "embedding_dim": 4, "feature_names": ["a"]}
    with pytest.raises(ValueError, match=message):
        TableConfig(**(right | changed))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "tables must have one or more"),
        ([("t", ["a"]), ("s", ["b"]), ("t", ["c"])], "names of tables must differ; got 't' more"),
        ([("t", ["a", "b"]), ("s", ["c", "b"])], "feature names must differ; got 'b' more"),
        ([("t", ["a", "a"])], "feature names must differ; got 'a' more"),
        ([("t.s", ["a"])], "have a dot .*; got 't.s'"),
        ([("", ["a"])], "must not be empty"),
        ([("keys", ["a"])], "an attribute of nn.ModuleDict; got 'keys'"),
    ],
)
def test_tables_that_do_not_go_together_are_refused(tables, message):
    configs = [TableConfig(name, 10, 4, features, kind="dense") for name, features in tables]
    with pytest.raises(ValueError, match=message):
        TTEmbeddingBagCollection(configs)


def test_half_precision_is_refused_for_dense_tables_too():
    with pytest.raises(TypeError, match="float16"):
        TTEmbeddingBagCollection([TABLES[2]], dtype=torch.float16)


def test_a_missing_feature_is_named_with_its_table():
    lists = content(3, keys=[key for key in KEYS if key != "query"])
    message = "must have feature 'query' of table 'words'; its keys are to, unused, day, title"
    with pytest.raises(ValueError, match=message):
        collection()(batch_of(lists))


@pytest.mark.parametrize("wrong", [-1, 60, 2**40])
@pytest.mark.parametrize("key", ["from", "to"])
def test_an_index_outside_names_table_feature_value_and_position(key, wrong):
    lists = content(4)
    lists[key][2] = [1, wrong]
    values, _ = arguments(lists)
    position = values.tolist().index(wrong)
    message = rf"'{key}' .* \[0, 60\), .* table 'places'; got {wrong} at position {position} of"
    with pytest.raises(IndexError, match=message):
        collection()(batch_of(lists))


def test_with_a_wrong_index_anywhere_no_table_is_called():
    model, lists = collection(), content(4)
    calls = []
    for bag in model.embedding_bags.values():
        bag.register_forward_pre_hook(lambda *_: calls.append(1))
    lists["to"][-1] = [60]
    with pytest.raises(IndexError):
        model(batch_of(lists))
    assert not calls


def test_unused_features_may_hold_anything():
    lists = content(4)
    lists["unused"][0] = [-5, 2**50]
    assert collection()(batch_of(lists)).values().isfinite().all()


def test_weights_are_refused_where_a_table_does_not_sum():
    lists = content(4)
    weights = torch.ones(len(arguments(lists)[0]))
    with pytest.raises(NotImplementedError, match=r"only supported for mode='sum'.*'words'"):
        collection()(batch_of(lists, weights))
    with pytest.raises(TypeError, match="float32 like table 'users'; got"):
        collection(TABLES[:1])(batch_of(lists, weights.double()))


def test_a_batch_on_another_device_is_refused():
    values, lengths = arguments(content(3))
    model = collection().to("meta")
    with pytest.raises(ValueError, match="must be on meta like table 'users'; got cpu"):
        model(KeyedJaggedTensor(KEYS, values, lengths))


def test_lengths_and_offsets_give_each_other():
    values, lengths = arguments(content(5))
    offsets = torch.tensor([sum(lengths[:n].tolist()) for n in range(len(lengths) + 1)])
    from_lengths = KeyedJaggedTensor(KEYS, values, lengths)
    from_offsets = KeyedJaggedTensor(KEYS, values, offsets=offsets)
    for batch in (from_lengths, from_offsets, KeyedJaggedTensor(KEYS, values, lengths, offsets)):
        assert batch.lengths().equal(lengths)
        assert batch.offsets().equal(offsets)
        assert batch.values() is values
        assert batch.keys() == KEYS
        assert batch.weights_or_none() is None
        assert batch.stride() == 5
    assert KeyedJaggedTensor([], values[:0], lengths[:0]).stride() == 0


INT = torch.int64


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"keys": ["a", "a"]}, ValueError, "keys must differ; got 'a' more than once"),
        ({"keys": ["a", "b", "c"]}, ValueError, "B numbers for each of the 3 keys; got 4"),
        ({"keys": []}, ValueError, "each of the 0 keys; got 4"),
        ({"values": torch.zeros(3)}, TypeError, "values must be int32 or int64; got torch.float32"),
        (
            {"values": torch.zeros(3, 1, dtype=INT)},
            ValueError,
            r"values must be 1-D; got .*\(3, 1\)",
        ),
        ({"lengths": None}, ValueError, "lengths or offsets must be given; got neither"),
        (
            {"lengths": torch.tensor([1, -1, 2, 1])},
            ValueError,
            "lengths must be at least 0; got -1",
        ),
        ({"lengths": torch.tensor([1, 1, 2, 1])}, ValueError, "the 3 values; got a sum of 5"),
        (
            {"lengths": torch.ones(3)},
            TypeError,
            "lengths must be int32 or int64; got torch.float32",
        ),
        ({"lengths": torch.ones(2, 2, dtype=INT)}, ValueError, "lengths must be 1-D"),
        ({"offsets": torch.tensor([1, 1, 2, 3, 3])}, ValueError, r"must start at 0; got \[1\]"),
        ({"offsets": torch.tensor([], dtype=INT)}, ValueError, r"must start at 0; got \[\]"),
        ({"offsets": torch.tensor([0, 2, 1, 3, 3])}, ValueError, "not decrease; got 1 at 2"),
        ({"offsets": torch.tensor([0, 1, 2, 2, 2])}, ValueError, "end at the 3 values; got 2"),
        ({"offsets": torch.tensor([0, 0, 2, 3, 3])}, ValueError, "the differences of offsets"),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "the differences of offsets"),
        ({"weights": torch.ones(2)}, ValueError, "the 3 numbers of values; got 2"),
        ({"weights": torch.ones(3, dtype=INT)}, TypeError, "weights must be floats"),
        (
            {"weights": torch.ones(3, device="meta")},
            ValueError,
            "weights must be on cpu .*got meta",
        ),
    ],
)
def test_a_wrong_batch_is_refused(changed, error, message):
    right = {
        "keys": ["a", "b"],
        "values": torch.tensor([4, 5, 6]),
        "lengths": torch.tensor([1, 0, 1, 1]),
    }
    KeyedJaggedTensor(**right)
    with pytest.raises(error, match=message):
        KeyedJaggedTensor(**(right | changed))


def test_a_keyed_tensor_gives_views_of_its_columns():
    values = torch.arange(12.0).view(2, 6)
    keyed = KeyedTensor(["a", "b", "c"], [1, 3, 2], values)
    assert keyed.keys() == ["a", "b", "c"]
    assert keyed.length_per_key() == [1, 3, 2]
    assert keyed["b"].equal(values[:, 1:4])
    assert keyed["b"].data_ptr() == values[:, 1:4].data_ptr()
    assert list(keyed.to_dict()) == ["a", "b", "c"]
    with pytest.raises(KeyError, match="d"):
        keyed["d"]


def test_a_table_of_the_collection_is_a_bag_of_its_own():
    model = collection()
    assert isinstance(model.embedding_bags["users"], TTEmbeddingBag)
    assert model.embedding_bags["places"].spec is TABLES[3].spec
    assert model.embedding_bags["words"].spec.ranks == (3, 2)
    assert isinstance(model.embedding_bags["days"], nn.EmbeddingBag)


def test_lookups_say_what_they_are_and_go_to_a_device():
    features = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([7, 7, 1, 3]),
        lengths=torch.tensor([2, 1, 1, 0]),
        weights=torch.ones(4),
    )
    assert repr(features) == "KeyedJaggedTensor(2 samples, values {a: 3, b: 1}, weights)"
    moved = features.to("meta")
    assert (moved.keys(), moved.stride()) == (["a", "b"], 2)
    tensors = (moved.values(), moved.lengths(), moved.offsets(), moved.weights_or_none())
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert features.values().device.type == "cpu"


def test_fused_optimisers_of_a_collection_are_there_for_schedulers():
    collection = TTEmbeddingBagCollection(
        [
            TableConfig("tt", 100, 8, ["a"], rank=2),
            TableConfig("dense", 100, 8, ["b"], kind="dense"),
        ],
        optimizer="sgd",
        lr=0.5,
    )
    (optimizer,) = collection.fused_optimizers.values()
    assert optimizer is collection.embedding_bags["tt"].fused_optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    features = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    collection(features).values().sum().backward()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
