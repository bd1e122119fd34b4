import copy

import pytest
import torch
from torch import nn

from ecorec import TTEmbeddingBag
from ecorec.convert_module import convert_module
from ecorec.embedding import TTEmbedding
from ecorec.shapes import default_spec


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model(nn.Module):
    """A bag, an embedding with padding, and one table under two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(3000, 16, sparse=True, mode="mean")
        self.item = nn.Embedding(2000, 16, padding_idx=0)
        self.towers = nn.ModuleDict({"left": nn.Sequential(nn.Embedding(2500, 16))})
        self.towers["right"] = nn.ModuleList([self.towers["left"][0]])
        self.head = nn.Linear(64, 1)

    def forward(self, input):
        features = [
            self.bag(input % 3000),
            self.item(input[:, 0] % 2000),
            self.towers["left"](input[:, 1] % 2500),
            self.towers["right"][0](input[:, 2] % 2500),
        ]
        return self.head(torch.cat(features, 1))


def batch(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(3000, (64, 5), generator=rng), torch.randn(64, 1, generator=rng)


def losses(model, steps, optimiser=None):
    optimiser = optimiser or torch.optim.Adam(model.parameters(), lr=0.01)
    input, target = batch()
    found = []
    for _ in range(steps):
        loss = (model(input) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found


def test_the_embeddings_of_a_model_are_replaced_wherever_they_are():
    model = Model()
    report = convert_module(model, rank=8)
    assert type(model.bag) is TTEmbeddingBag
    assert type(model.item) is TTEmbedding
    assert type(model.towers["left"][0]) is TTEmbedding
    assert type(model.head) is nn.Linear
    assert [table.names for table in report.tables] == [
        ("bag",),
        ("item",),
        ("towers.left.0", "towers.right.0"),
    ]


def test_a_converted_model_learns_and_the_tie_remains():
    model = Model()
    convert_module(model, rank=8)
    assert model.towers["left"][0] is model.towers["right"][0]
    found = losses(model, 20)
    assert found[-1] < 0.7 * found[0]
    assert model.towers["left"][0] is model.towers["right"][0]


def test_the_state_of_a_converted_model_goes_round():
    one, other = Model(), Model()
    for model in (one, other):
        convert_module(model, rank=8, optimizer="adagrad", lr=0.1)
        losses(model, 2 if model is one else 1)
    assert not one(batch()[0]).equal(other(batch()[0]))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert one(batch()[0]).equal(other(batch()[0]))


def test_a_scheduler_of_the_fused_optimiser_changes_the_step():
    def moved(factor):
        model = Model()
        convert_module(model, rank=8, optimizer="sgd", lr=0.5)
        table = model.bag
        torch.optim.lr_scheduler.LambdaLR(table.fused_optimizer, lambda _: factor)
        before = table.cores[1].detach().clone()
        (model(batch()[0]) - batch()[1]).square().mean().backward()
        return (table.cores[1].detach() - before).norm().item()

    torch.manual_seed(0)
    full = moved(1.0)
    torch.manual_seed(0)
    assert moved(0.5) == pytest.approx(full / 2, rel=1e-3)
    assert full > 0


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("init", ["match", "from_dense"])
def test_flags_of_a_bag_are_kept(mode, init):
    old = nn.EmbeddingBag(
        400,
        8,
        mode=mode,
        padding_idx=-3,
        include_last_offset=True,
        scale_grad_by_freq=mode != "max",
        dtype=torch.float64,
    ).eval()
    old.weight.requires_grad_(False)
    model = nn.Sequential(old)
    convert_module(model, rank=3, init=init)
    new = model[0]
    for name in ("mode", "padding_idx", "include_last_offset", "scale_grad_by_freq", "training"):
        assert getattr(new, name) == getattr(old, name), name
    assert new.padding_idx == 397
    assert all(core.dtype == torch.float64 and not core.requires_grad for core in new.cores)


def test_flags_of_an_embedding_are_kept():
    model = nn.ModuleList([nn.Embedding(400, 8, padding_idx=5, scale_grad_by_freq=True)])
    model.train()
    convert_module(model, rank=3)
    assert model[0].padding_idx == 5
    assert model[0].scale_grad_by_freq
    assert model[0].training
    assert all(core.requires_grad for core in model[0].cores)
    assert model[0](torch.tensor([[5, 1]])).shape == (1, 2, 8)


@pytest.mark.parametrize("std", [1.0, 0.01])
def test_match_keeps_the_standard_deviation(std):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4000, 16))
    with torch.no_grad():
        model[0].weight.normal_(0, std)
    report = convert_module(model, rank=16)
    # One table's entries depend on each other through 16 x 16 ranks.
    assert model[0].to_dense().std().item() == pytest.approx(std, rel=0.15)
    assert report.tables[0].relative_error is None


def test_from_dense_starts_at_the_table_and_says_how_far_from_it():
    dense = TTEmbeddingBag(2000, 16, spec=default_spec(2000, 16, 6)).to_dense().detach()
    model = nn.Sequential(nn.EmbeddingBag.from_pretrained(dense.clone()))
    near = convert_module(copy.deepcopy(model), rank=3, init="from_dense").tables[0]
    assert 0.1 < near.relative_error < 1
    (table,) = convert_module(model, rank=6, init="from_dense").tables
    assert table.relative_error < 1e-6
    difference = (model[0].to_dense().detach() - dense).abs().max()
    assert difference < 1e-5 * dense.abs().max()


def shared(first, second):
    second.weight = first.weight
    return nn.ModuleDict({"first": first, "second": second})


def test_alike_modules_of_one_weight_become_one_module():
    model = shared(nn.Embedding(900, 8), nn.Embedding(900, 8))
    report = convert_module(model, rank=3)
    assert model["first"] is model["second"]
    assert [table.names for table in report.tables] == [("first", "second")]
    assert report.bytes_before == 900 * 8 * 4


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (nn.EmbeddingBag(900, 8, mode="sum"), nn.EmbeddingBag(900, 8, mode="mean")),
        (nn.Embedding(900, 8), nn.EmbeddingBag(900, 8, mode="sum")),
    ],
)
def test_modules_of_one_weight_with_other_flags_share_their_cores(first, second):
    model = shared(first, second)
    convert_module(model, rank=3, optimizer="sgd", lr=0.1)
    one, other = model["first"], model["second"]
    assert one is not other
    assert all(a is b for a, b in zip(one.cores, other.cores, strict=True))
    assert one.to_dense().equal(other.to_dense())
    # One update, of the sum of both gradients, after the second backward.
    before = one.to_dense().detach()
    input = torch.tensor([[1, 2]])
    outputs = [table(input).sum() for table in (one, other)]
    outputs[0].backward()
    assert one.to_dense().equal(before)
    outputs[1].backward()
    assert not one.to_dense().equal(before)
    assert one.fused_optimizer is other.fused_optimizer


def test_a_weight_that_belongs_to_another_module_too_is_left_alone():
    head = nn.Linear(8, 900, bias=False)
    model = nn.ModuleDict({"words": nn.Embedding(900, 8), "head": head})
    model["words"].weight = head.weight
    (table,) = convert_module(model, rank=2).tables
    assert model["words"].weight is head.weight
    assert table.spec is None
    assert "head" in table.reason


def test_half_of_a_tie_is_left_alone():
    model = shared(nn.Embedding(900, 8), nn.EmbeddingBag(900, 8))
    (table,) = convert_module(model, select=["first"], rank=2).tables
    assert type(model["first"]) is nn.Embedding
    assert "second" in table.reason


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(3, 4), "its cores would take"),
        (nn.Embedding(0, 4), "empty"),
        (nn.Embedding.from_pretrained(torch.zeros(900, 8)), "equal"),
        (type("Mine", (nn.Embedding,), {})(900, 8), "Mine is a subclass"),
    ],
)
def test_what_cannot_gain_is_left_alone_with_the_reason(module, reason):
    model = nn.Sequential(module, nn.Embedding(900, 8))
    report = convert_module(model, rank=2)
    assert model[0] is module
    assert type(model[1]) is TTEmbedding
    assert reason in report.tables[0].reason
    assert report.tables[0].bytes_after == report.tables[0].bytes_before == module.weight.nbytes
    assert report.tables[1].reason == ""


def test_a_module_with_hooks_is_left_alone():
    model = nn.Sequential(nn.Embedding(900, 8))
    model[0].register_forward_hook(lambda *_: None)
    (table,) = convert_module(model, rank=2).tables
    assert type(model[0]) is nn.Embedding
    assert "hooks" in table.reason


@pytest.mark.parametrize(
    "select",
    [["item"], {"item"}, lambda name, module: name == "item" and module.padding_idx == 0],
)
def test_select_chooses(select):
    model = Model()
    report = convert_module(model, select=select, rank=4)
    assert type(model.item) is TTEmbedding
    assert type(model.bag) is nn.EmbeddingBag
    assert len(report.tables) == 1


@pytest.mark.parametrize("select", [["towers.right.0"], lambda name, _: "right" in name])
def test_one_of_its_names_selects_a_module(select):
    model = Model()
    convert_module(model, select=select, rank=4)
    assert type(model.towers["left"][0]) is TTEmbedding
    assert model.towers["left"][0] is model.towers["right"][0]


@pytest.mark.parametrize("init", ["match", "from_dense"])
def test_max_bytes_is_kept_by_each_table(init):
    model = Model()
    report = convert_module(model, max_bytes=20_000, init=init)
    assert all(table.bytes_after <= 20_000 for table in report.tables)
    assert sum(core.nbytes for core in model.bag.cores) == report.tables[0].bytes_after
    assert report.bytes_after < report.bytes_before == (3000 + 2000 + 2500) * 16 * 4


def test_a_table_within_max_bytes_is_left_alone():
    model = nn.Sequential(nn.Embedding(900, 8))
    (table,) = convert_module(model, max_bytes=900 * 8 * 4).tables
    assert type(model[0]) is nn.Embedding
    assert "max_bytes" in table.reason


def test_a_rank_above_the_limit_warns_only_of_tables_that_are_converted():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Embedding(1000, 16))
    with pytest.warns(UserWarning, match="ranks .* are above the limits") as caught:
        convert_module(model, rank=16)
    assert len(caught) == 1


def test_explain_shows_bytes_error_and_reasons():
    model = nn.ModuleDict({"long": nn.Embedding(5000, 8), "short": nn.Embedding(3, 4)})
    report = convert_module(model, rank=3, init="from_dense")
    text = report.explain()
    assert "160,000" in text
    assert f"{report.tables[0].relative_error:.2g}" in text
    assert f"p = {model['long'].spec.p}" in text
    assert "short: left alone: its cores would take" in text


def test_a_model_without_embeddings_stays_as_it_is():
    report = convert_module(nn.Sequential(nn.Linear(2, 2)))
    assert report.tables == ()
    assert report.bytes_before == 0


def with_max_norm():
    model = Model()
    model.item.max_norm = 1.0
    return model


def with_half():
    return nn.Sequential(nn.Embedding(900, 8), nn.Embedding(900, 8, dtype=torch.float16))


def with_nan():
    model = nn.Sequential(nn.Embedding(900, 8), nn.Embedding(900, 8))
    with torch.no_grad():
        model[1].weight[7, 3] = torch.nan
    return model


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (lambda: nn.Embedding(9, 4), {}, ValueError, "use TTEmbeddingBag.from_dense"),
        (lambda: nn.EmbeddingBag(9, 4), {}, ValueError, "use TTEmbeddingBag.from_dense"),
        (Model, {"init": "svd"}, ValueError, "init must be one of match, from_dense; got 'svd'"),
        (Model, {"rank": 4, "max_bytes": 9}, ValueError, "exclude each other; got 4 and 9"),
        (Model, {"rank": 0}, ValueError, "rank must be at least 1; got 0"),
        (Model, {"max_bytes": -1}, ValueError, "max_bytes must be at least 1; got -1"),
        (Model, {"max_bytes": 9}, ValueError, "bag: max_bytes must be at least .* got 9"),
        (Model, {"select": ["bag", "head"]}, ValueError, "bag, item, towers.* got 'head'"),
        (Model, {"select": "bag"}, TypeError, "collection of paths; got 'bag'"),
        (Model, {"colour": 3}, TypeError, "colour"),
        (Model, {"optimizer": "lion"}, ValueError, "bag: optimizer must be one of"),
        (with_max_norm, {}, NotImplementedError, "max_norm of item .* got 1.0"),
        (with_half, {"rank": 2}, TypeError, "1: dtype must be .* got torch.float16"),
        (with_nan, {"rank": 2}, ValueError, "1: weight must be finite"),
        (with_nan, {"rank": 2, "init": "from_dense"}, ValueError, "1: weight must be finite"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(make, arguments, error, message):
    model = make()
    before = list(model.modules())
    with pytest.raises(error, match=message):
        convert_module(model, **arguments)
    assert len(before) == len(list(model.modules()))
    assert all(a is b for a, b in zip(before, model.modules(), strict=True))


def test_max_norm_may_be_left_out_by_select():
    model = with_max_norm()
    convert_module(model, select=lambda name, _: name != "item", rank=4)
    assert type(model.item) is nn.Embedding
    assert type(model.bag) is TTEmbeddingBag
