import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ecorec import TTEmbedding, TTEmbeddingBag, TTSpec, reference
from ecorec.shapes import default_spec

pytestmark = pytest.mark.filterwarnings(
    "ignore:ranks .* are above the limits", "ignore:the cores take"
)


def assert_near(actual, expected, tolerance, what="output", scale=0.0):
    """Within `tolerance` of the largest magnitude: two right orders of summation differ so much.

    scale: the magnitude of what was summed, where a single sum may cancel.
    """
    assert actual.shape == expected.shape, what
    if expected.numel():
        difference = (actual - expected).detach().abs().max()
        allowed = tolerance * max(float(expected.detach().abs().max()), float(scale))
        assert difference <= allowed, f"{what} differs by {difference}"


@st.composite
def calls(draw):
    """A module and a call of it: any shape, mode, padding, weights, duplicates, empty bags."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n, dim = draw(st.integers(1, 5000)), draw(st.integers(1, 70))
    ranks = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    mode = draw(st.sampled_from(["sum", "mean"]))
    weighted = mode == "sum" and draw(st.booleans())
    last = draw(st.booleans())
    emb = TTEmbeddingBag(
        n,
        dim,
        spec=default_spec(n, dim, ranks, dtype),
        mode=mode,
        padding_idx=draw(st.none() | st.integers(0, min(n, 3) - 1) | st.integers(-n, n - 1)),
        include_last_offset=last,
        generator=rng,
    )
    rows = min(n, draw(st.sampled_from([3, 5000])))  # few rows make duplicates
    integers = draw(st.sampled_from([torch.int32, torch.int64]))
    bags = draw(st.integers(0, 6))
    if draw(st.booleans()):
        input = torch.randint(0, rows, (bags, draw(st.integers(1, 5))), generator=rng)
        offsets = None
    else:
        lengths = torch.randint(0, 5, (bags,), generator=rng)
        input = torch.randint(0, rows, (int(lengths.sum()),), generator=rng)
        ends = lengths.cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        offsets = offsets if last else offsets[:-1]
        offsets = offsets.to(draw(st.sampled_from([torch.int32, torch.int64])))
    weights = torch.randn(input.shape, generator=rng, dtype=dtype) if weighted else None
    return emb, input.to(integers), offsets, weights


@settings(max_examples=250, deadline=None, derandomize=True)
@given(calls())
def test_a_call_and_its_gradients_equal_torch_on_the_dense_table(call):
    emb, input, offsets, weights = call
    tolerance = 1e-9 if emb.spec.dtype == torch.float64 else 1e-5
    leaves = list(emb.cores) + ([] if weights is None else [weights.requires_grad_()])
    ours = emb(input, offsets, weights)
    theirs = F.embedding_bag(
        input.long(),
        emb.to_dense(),
        None if offsets is None else offsets.long(),
        mode=emb.mode,
        per_sample_weights=weights,
        padding_idx=emb.padding_idx,
        include_last_offset=emb.include_last_offset and offsets is not None,
    )
    assert_near(ours, theirs, tolerance)
    chosen = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(0)).to(theirs)
    gradients = torch.autograd.grad((ours * chosen).sum(), leaves)
    expected = torch.autograd.grad((theirs * chosen).sum(), leaves)
    table, d = emb.to_dense().detach(), len(emb.cores)
    for k, pair in enumerate(zip(gradients, expected, strict=True)):
        # A weight's gradient is the dot product of a row and the bag's gradient.
        dot = table.norm(dim=1).max() * chosen.norm(dim=1).amax() if k == d and len(chosen) else 0
        assert_near(*pair, tolerance, f"gradient {k}", scale=dot)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(calls())
def test_a_call_equals_the_reference(call):
    emb, input, offsets, weights = call
    truth = reference.embedding_bag(
        list(emb.cores),
        input,
        offsets,
        weights,
        embedding_dim=emb.embedding_dim,
        mode=emb.mode,
        padding_idx=emb.padding_idx,
        include_last_offset=emb.include_last_offset,
    )
    assert_near(emb(input, offsets, weights).double(), truth, 1e-5)


def make(d=3, dtype=torch.float64, **options):
    ranks = {2: (3,), 3: (2, 3), 4: (2, 3, 2)}[d]
    rng = torch.Generator().manual_seed(d)
    return TTEmbeddingBag(60, 6, tt_ranks=ranks, dtype=dtype, generator=rng, **options)


@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_are_those_of_finite_differences(d, mode):
    emb = make(d, mode=mode, padding_idx=1)
    indices, offsets = torch.tensor([4, 1, 59, 4, 0, 7, 1]), torch.tensor([0, 3, 3, 5])
    weights = torch.rand(7, dtype=torch.float64, requires_grad=True) if mode == "sum" else None

    def call(*leaves):
        cores = dict(zip(["cores.0", "cores.1", "cores.2", "cores.3"], leaves[:d], strict=False))
        return torch.func.functional_call(emb, cores, (indices, offsets, *leaves[d:]))

    leaves = [core.detach().clone().requires_grad_() for core in emb.cores]
    assert torch.autograd.gradcheck(call, [*leaves, *([] if weights is None else [weights])])


def test_weights_get_their_gradient_when_the_cores_are_frozen():
    emb = make(mode="sum").requires_grad_(False)
    weights = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    emb(torch.tensor([[3, 5], [5, 7]]), None, weights).sum().backward()
    expected = emb.to_dense().sum(1)[[3, 5, 5, 7]].view(2, 2)
    torch.testing.assert_close(weights.grad, expected)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_core_changes_no_other_gradient(frozen):
    emb, partly = make(mode="sum"), make(mode="sum")
    partly.cores[frozen].requires_grad_(False)
    input = torch.tensor([[3, 5], [5, 7]])
    for each in (emb, partly):
        each(input).square().sum().backward()
    assert partly.cores[frozen].grad is None
    for k in {0, 1, 2} - {frozen}:
        torch.testing.assert_close(emb.cores[k].grad, partly.cores[k].grad)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    ("input", "offsets", "bags"),
    [
        (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 0),
        (torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 3),
        (torch.empty(0, 4, dtype=torch.int64), None, 0),
        (torch.empty(2, 0, dtype=torch.int64), None, 2),
        (torch.tensor([5, 5]), torch.empty(0, dtype=torch.int64), 0),
        (torch.full((2, 3), 9), None, 2),  # padding only
    ],
)
def test_bags_of_nothing_are_zeros_and_give_zero_gradients(mode, input, offsets, bags):
    emb = make(mode=mode, padding_idx=9)
    output = emb(input, offsets)
    assert output.shape == (bags, 6)
    assert output.eq(0).all()
    output.sum().backward()
    assert all(core.grad.eq(0).all() for core in emb.cores)


def test_an_empty_bag_among_others_is_zero_and_moves_nothing():
    emb = make(mode="mean")
    output = emb(torch.tensor([3, 4]), torch.tensor([0, 1, 1]))
    assert output[1].eq(0).all()
    torch.testing.assert_close(output[[0, 2]], emb.to_dense()[[3, 4]])


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_indices_after_the_last_offset_belong_to_no_bag(mode, dtype):
    """torch counts them in the mean, or gives them gradients of no meaning."""
    emb = make(dtype=dtype, mode=mode, include_last_offset=True)
    table = emb.to_dense()
    pair = table[4] + table[5]
    expected = torch.stack([table[3], pair if mode == "sum" else pair / 2])
    output = emb(torch.tensor([3, 4, 5, 6]), torch.tensor([0, 1, 3]))
    torch.testing.assert_close(output, expected)
    ours = torch.autograd.grad(output.sum(), list(emb.cores))
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), list(emb.cores)))
    assert emb(torch.tensor([3]), torch.tensor([0])).shape == (0, 6)


def test_a_weight_that_is_nan_stays_in_its_bag():
    emb = make(mode="sum")
    weights = torch.ones(3, 2, dtype=torch.float64)
    weights[1, 0] = float("nan")
    output = emb(torch.tensor([[3, 4], [5, 6], [3, 4]]), None, weights)
    assert output[1].isnan().all()
    torch.testing.assert_close(output[[0, 2]], emb.to_dense()[[3, 4]].sum(0).expand(2, 6))


def test_strides_of_inputs_and_of_the_gradient_change_nothing():
    emb = make(mode="sum")
    input, weights = torch.arange(12).view(3, 4), torch.rand(3, 4, dtype=torch.float64)
    emb(input.t(), None, weights.t()).backward(torch.ones(1, 1, dtype=torch.float64).expand(4, 6))
    strided = [core.grad for core in emb.cores]
    emb.zero_grad()
    emb(input.t().contiguous(), None, weights.t().contiguous()).sum().backward()
    for core, gradient in zip(emb.cores, strided, strict=True):
        torch.testing.assert_close(core.grad, gradient)


def test_lookup_has_the_shape_of_its_indices():
    emb = make(dtype=torch.float32)
    indices = torch.tensor([[[3, 59]], [[0, 3]]], dtype=torch.int32)
    found = emb.lookup(indices)
    assert found.shape == (2, 1, 2, 6)
    torch.testing.assert_close(found, emb.to_dense()[indices.long()])
    assert emb.lookup(torch.tensor(7)).shape == (6,)
    assert emb.lookup(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 6)


@pytest.mark.parametrize("d", [2, 3, 4])
def test_the_dense_table_equals_the_reference(d):
    emb = make(d)
    truth = reference.rows(list(emb.cores), torch.arange(60), 6)
    torch.testing.assert_close(emb.to_dense(), truth)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda emb: pickle.loads(pickle.dumps(emb))])
def test_a_copy_has_the_same_spec_and_gives_the_same(copied):
    emb = make(mode="sum")
    twin = copied(emb)
    assert twin.spec == emb.spec
    assert torch.equal(twin(torch.tensor([[3, 4]])), emb(torch.tensor([[3, 4]])))


def test_a_state_dict_carries_the_table():
    emb, other = make(2), TTEmbeddingBag(60, 6, tt_ranks=(3,), dtype=torch.float64)
    assert not torch.equal(other.to_dense(), emb.to_dense())
    other.load_state_dict(emb.state_dict())
    assert torch.equal(other.to_dense(), emb.to_dense())


def test_a_module_made_double_later_takes_double_weights():
    emb = make(dtype=torch.float32, mode="sum").double()
    weights = torch.ones(1, 2, dtype=torch.float64)
    assert emb(torch.tensor([[3, 4]]), None, weights).dtype == torch.float64


@pytest.mark.parametrize(
    ("index", "value"), [([[0, 1], [2, -1]], -1), ([[0, 1], [2, 60]], 60), ([[0, 1], [2, 61]], 61)]
)
def test_an_index_outside_the_table_is_named_with_its_place(index, value):
    emb = TTEmbeddingBag(60, 6, spec=TTSpec(60, 6, (4, 4, 4), (1, 2, 3), (2, 2)))
    message = rf"\[0, 60\).*got {value} at position 3"
    with pytest.raises(IndexError, match=message):
        emb(torch.tensor(index))
    with pytest.raises(IndexError, match=message):
        emb.lookup(torch.tensor(index))


INPUT = torch.tensor([1, 2, 3])
WRONG_CALLS = {
    "offsets that start late": (ValueError, "start at 0; got 1", (INPUT, torch.tensor([1, 2]))),
    "offsets that fall": (
        ValueError,
        "not decrease; got 1 after 2 at position 2",
        (INPUT, torch.tensor([0, 2, 1])),
    ),
    "offsets beyond": (ValueError, "not pass the input's 3; got 4", (INPUT, torch.tensor([0, 4]))),
    "offsets in 2-D": (ValueError, r"1-D; got shape \(1, 1\)", (INPUT, torch.tensor([[0]]))),
    "float offsets": (TypeError, "offsets must be int32 or int64", (INPUT, torch.tensor([0.0]))),
    "no offsets": (ValueError, "offsets must be given with a 1-D input", (INPUT,)),
    "offsets with 2-D": (
        ValueError,
        "offsets must be None with a 2-D input",
        (INPUT[None], torch.tensor([0])),
    ),
    "3-D": (ValueError, r"1-D or 2-D; got shape \(1, 1, 3\)", (INPUT[None, None],)),
    "0-D": (ValueError, "1-D or 2-D", (torch.tensor(3),)),
    "float indices": (
        TypeError,
        "input must be int32 or int64; got torch.float",
        (INPUT[None] / 1,),
    ),
    "weights of another shape": (
        ValueError,
        r"shape of input, \(1, 3\); got \(3,\)",
        (INPUT[None], None, torch.ones(3, dtype=torch.float64)),
    ),
    "weights of another dtype": (
        TypeError,
        "float64 like the cores; got torch.float32",
        (INPUT[None], None, torch.ones(1, 3)),
    ),
    "another device": (
        ValueError,
        "input must be on cpu like the cores; got meta",
        (torch.empty(1, 3, dtype=torch.int64, device="meta"),),
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_refused_with_its_reason(name):
    error, message, arguments = WRONG_CALLS[name]
    with pytest.raises(error, match=message):
        make(mode="sum")(*arguments)


def test_include_last_offset_needs_an_offset():
    with pytest.raises(ValueError, match=r"B \+ 1 >= 1 numbers"):
        make(include_last_offset=True)(INPUT, torch.empty(0, dtype=torch.int64))


def test_weights_with_a_mean_get_the_words_of_torch():
    input, weights = torch.tensor([[1, 2]]), torch.ones(1, 2, dtype=torch.float64)
    with pytest.raises(NotImplementedError) as theirs:
        F.embedding_bag(input, torch.ones(3, 2), mode="mean", per_sample_weights=weights)
    with pytest.raises(NotImplementedError) as ours:
        make(mode="mean")(input, None, weights)
    assert str(theirs.value).startswith(str(ours.value))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "prod"}, ValueError, "sum, mean, max; got 'prod'"),
        ({"max_norm": 1.0}, NotImplementedError, "shares its cores .* got max_norm=1.0"),
        ({"dtype": torch.float16}, TypeError, "float32 or torch.float64; got torch.float16"),
        ({"padding_idx": 60}, ValueError, r"padding_idx must be in \[-60, 60\); got 60"),
        ({"tt_ranks": 0}, ValueError, "every rank must be at least 1; got 0"),
        ({"init_std": -1.0}, ValueError, "init_std"),
        ({"tt_ranks": 2, "spec": TTSpec(60, 6, (60, 1), (6, 1), (1,))}, ValueError, "exclude"),
        (
            {"spec": TTSpec(61, 6, (61, 1), (6, 1), (1,))},
            ValueError,
            "num_embeddings .* 61; got 60",
        ),
        ({"spec": TTSpec(60, 5, (60, 1), (6, 1), (1,))}, ValueError, "embedding_dim .* 5; got 6"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        TTEmbeddingBag(60, 6, **options)


def test_cores_that_are_not_smaller_than_the_table_are_told_with_both_sizes():
    spec = TTSpec(4, 4, (2, 2), (2, 2), (4,))
    with pytest.warns(UserWarning, match="128 bytes, the dense table would take 64"):
        TTEmbeddingBag(4, 4, spec=spec)


def test_a_negative_padding_index_counts_from_the_end():
    assert make(padding_idx=-1).padding_idx == 59


def test_warnings_show_the_line_that_called():
    weight = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    for call in (
        lambda: TTEmbeddingBag(40, 8, tt_ranks=8),
        lambda: TTEmbedding(40, 8, tt_ranks=8),
        lambda: TTEmbeddingBag.from_dense(weight, rank=8),
        lambda: TTSpec(40, 8, (5, 8), (2, 4), (500,)),
        lambda: replace(TTSpec(40, 8, (5, 8), (2, 4), (2,)), ranks=(500,)),
    ):
        with pytest.warns(UserWarning, match="limits|the cores take") as told:
            call()
        assert {warning.filename for warning in told} == {__file__}
