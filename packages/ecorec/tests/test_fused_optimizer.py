import copy
import gc
import io
import threading
import warnings

import pytest
import torch
from torch import nn

from ecorec.fused_optimizer import RULES, FusedOptimizer

SHAPES = [(3, 1, 2, 5), (4, 5, 3, 2), (7, 2, 2, 1)]


def make_cores(seed=0, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in SHAPES]


def random_gradients(seed, cores):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(c.shape, generator=rng).to(c.dtype) for c in cores]


def bowl_gradients(cores, step):
    """Of a bowl whose middle is 1, with noise of its own in each step."""
    noise = random_gradients(step, cores)
    return [2 * (c.detach() - 1) + n for c, n in zip(cores, noise, strict=True)]


def peer(rule, cores, **settings):
    if rule == "sgd":
        del settings["eps"], settings["betas"]
        return torch.optim.SGD(cores, **settings)
    if rule == "adagrad":
        del settings["betas"]
        return torch.optim.Adagrad(cores, **settings)
    return torch.optim.Adam(cores, **settings)


def largest_difference(ours, theirs):
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)
    )


class Times(torch.autograd.Function):
    """What a table does: a ticket per forward, gradients to it, none to the cores' .grad."""

    @staticmethod
    def forward(ctx, fused, factor, *cores):
        ctx.ticket = fused.begin()
        ctx.factor, ctx.shapes = factor, [core.shape for core in cores]
        return factor * sum(core.sum() for core in cores)

    @staticmethod
    def backward(ctx, grad):
        ctx.ticket.finish([grad * torch.full(shape, ctx.factor) for shape in ctx.shapes])
        return None, None, *[None] * len(ctx.shapes)


@pytest.fixture
def sgd():
    """Cores and an optimiser that takes the whole gradient away: what moved is what came."""
    cores = make_cores()
    return cores, FusedOptimizer(cores, "sgd", lr=1.0)


def moved(cores):
    """By how much all elements of all cores have sunk since `make_cores()`."""
    sunk = [(a - b).detach() for a, b in zip(make_cores(), cores, strict=True)]
    assert all((s - s.flatten()[0]).abs().max() < 1e-5 for s in sunk)
    return pytest.approx(sunk[0].flatten()[0].item(), abs=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_a_rule_equals_torch_step_by_step(rule, weight_decay):
    settings = {"lr": 0.05, "eps": 1e-6, "betas": (0.8, 0.95), "weight_decay": weight_decay}
    ours, theirs = make_cores(), make_cores()
    fused, torchs = FusedOptimizer(ours, rule, **settings), peer(rule, theirs, **settings)
    for step in range(100):
        fused.begin().finish(bowl_gradients(ours, step))
        for core, gradient in zip(theirs, bowl_gradients(theirs, step), strict=True):
            core.grad = gradient
        torchs.step()
        assert largest_difference(ours, theirs) <= 2e-6
    assert largest_difference(ours, make_cores()) > 0.1


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_defaults_are_lr_001_eps_1e8_and_torchs_betas(rule):
    ours, theirs = make_cores(), make_cores()
    fused = FusedOptimizer(ours, rule)
    torchs = peer(rule, theirs, lr=0.01, eps=1e-8, betas=(0.9, 0.999), weight_decay=0)
    for step in range(5):
        gradients = [1e-8 * g for g in random_gradients(step, ours)]  # where eps is felt
        fused.begin().finish(gradients)
        for core, gradient in zip(theirs, gradients, strict=True):
            core.grad = gradient.clone()
        torchs.step()
    assert largest_difference(ours, theirs) <= 1e-6


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_slice_adagrad_equals_its_rule_slice_by_slice(weight_decay):
    cores, expected = make_cores(), [core.detach().clone() for core in make_cores()]
    fused = FusedOptimizer(cores, "slice_adagrad", lr=0.1, eps=1e-3, weight_decay=weight_decay)
    state = [[0.0] * len(core) for core in expected]
    for step in range(20):
        fused.begin().finish(bowl_gradients(cores, step))
        for k, gradient in enumerate(bowl_gradients(expected, step)):
            for i in range(len(gradient)):
                g = gradient[i] + weight_decay * expected[k][i]
                state[k][i] += (g**2).mean().item()
                expected[k][i] -= 0.1 * g / (state[k][i] ** 0.5 + 1e-3)
    assert largest_difference(cores, expected) <= 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_a_frozen_core_stays_and_its_state_too(rule):
    cores = make_cores()
    fused = FusedOptimizer(cores, rule, weight_decay=0.1)
    fused.begin().finish([None, *random_gradients(0, cores)[1:]])
    same = [a.equal(b) for a, b in zip(cores, make_cores(), strict=True)]
    assert same == [True, False, False]
    state = fused.state_for_module()
    assert [int(state[f"optimizer.{rule}.{k}.step"]) for k in range(3)] == [0, 1, 1]


@pytest.mark.parametrize("rule", RULES)
def test_nan_in_a_gradient_passes_to_the_core_as_in_torch(rule):
    cores = make_cores()
    gradients = random_gradients(0, cores)
    gradients[1][2, 0, 0, 0] = torch.nan
    FusedOptimizer(cores, rule).begin().finish(gradients)
    hit = cores[1].isnan().nonzero()[:, 0].unique().tolist()
    assert hit == [2]
    assert cores[1].isnan().sum() == (cores[1][0].numel() if rule == "slice_adagrad" else 1)
    assert not cores[0].isnan().any()


def test_given_gradients_are_not_written_and_may_be_expanded(sgd):
    cores, fused = sgd
    for group in fused.param_groups:
        group["weight_decay"] = 0.5
    one, two = fused.begin(), fused.begin()
    gradients = [torch.ones(()).expand(core.shape) for core in cores]
    one.finish(gradients)
    two.finish(gradients)
    assert all((g == 1).all() for g in gradients)
    expected = [core - (2 + 0.5 * core) for core in make_cores()]
    assert largest_difference(cores, expected) <= 1e-6


def test_three_forwards_before_three_backwards_give_one_update_after_the_last(sgd):
    cores, fused = sgd
    outputs = [Times.apply(fused, factor, *cores) for factor in (1.0, 2.0, 4.0)]
    outputs[1].backward()
    outputs[0].backward()
    assert moved(cores) == 0
    outputs[2].backward()
    assert moved(cores) == 7
    assert int(fused.state_for_module()["optimizer.sgd.0.step"]) == 1
    assert all(core.grad is None for core in cores)


def test_a_dropped_graph_does_not_hold_later_updates_up(sgd):
    cores, fused = sgd
    Times.apply(fused, 100.0, *cores)
    Times.apply(fused, 1.0, *cores).backward()
    assert moved(cores) == 1


def test_a_graph_held_in_a_cycle_counts_until_it_is_collected(sgd):
    cores, fused = sgd
    cycle = [Times.apply(fused, 100.0, *cores)]
    cycle.append(cycle)
    Times.apply(fused, 1.0, *cores).backward()
    assert moved(cores) == 0
    del cycle
    gc.collect()
    Times.apply(fused, 2.0, *cores)  # a forward reads the cores: what waited is applied before
    assert moved(cores) == 1


@pytest.mark.parametrize("how", ["forward", "backward", "step", "accumulate"])
def test_gradients_that_waited_for_a_dropped_graph_are_applied_at_the_next_chance(sgd, how):
    cores, fused = sgd
    dropped = Times.apply(fused, 100.0, *cores)
    later = Times.apply(fused, 2.0, *cores) if how == "backward" else None
    Times.apply(fused, 1.0, *cores).backward()
    del dropped
    assert moved(cores) == 0
    if how == "forward":
        Times.apply(fused, 1.0, *cores)
    elif how == "backward":
        later.backward()
    elif how == "step":
        fused.step()
    else:
        with fused.accumulate():
            assert moved(cores) == 1  # not part of the block
    assert moved(cores) == (3 if how == "backward" else 1)


def test_a_second_backward_through_one_graph_adds_again(sgd):
    cores, fused = sgd
    waits = Times.apply(fused, 1.0, *cores)
    twice = Times.apply(fused, 2.0, *cores)
    twice.backward(retain_graph=True)
    twice.backward()
    waits.backward()
    assert moved(cores) == 5
    assert int(fused.state_for_module()["optimizer.sgd.0.step"]) == 1


def test_accumulate_gives_one_update_at_its_end(sgd):
    cores, fused = sgd
    with fused.accumulate():
        for factor in (1.0, 2.0):
            Times.apply(fused, factor, *cores).backward()
            fused.step()
            fused.zero_grad()
            assert moved(cores) == 0
        with fused.accumulate():
            Times.apply(fused, 4.0, *cores).backward()
        assert moved(cores) == 0
    assert moved(cores) == 7
    assert int(fused.state_for_module()["optimizer.sgd.0.step"]) == 1


def test_nothing_is_updated_by_an_accumulate_without_a_backward():
    cores = make_cores()
    fused = FusedOptimizer(cores, "adam", weight_decay=0.1)
    with fused.accumulate():
        pass
    fused.step()
    assert moved(cores) == 0


def test_a_backward_after_the_end_of_accumulate_still_joins_its_update(sgd):
    cores, fused = sgd
    before = Times.apply(fused, 1.0, *cores)
    with fused.accumulate():
        inside = Times.apply(fused, 2.0, *cores)
        Times.apply(fused, 4.0, *cores).backward()
    inside.backward()
    assert moved(cores) == 0
    before.backward()
    assert moved(cores) == 7


def test_an_exception_in_accumulate_drops_its_gradients_and_only_those(sgd):
    cores, fused = sgd
    waits = Times.apply(fused, 1.0, *cores)
    Times.apply(fused, 2.0, *cores).backward()

    def fail():
        with fused.accumulate():
            Times.apply(fused, 100.0, *cores).backward()
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        fail()
    assert moved(cores) == 0
    waits.backward()
    assert moved(cores) == 3
    with fused.accumulate():
        Times.apply(fused, 4.0, *cores).backward()
    assert moved(cores) == 7


def test_a_backward_in_another_thread_is_not_lost(sgd):
    cores, fused = sgd
    tickets = [fused.begin() for _ in range(64)]

    def finish(some):
        for ticket in some:
            ticket.finish([torch.ones_like(core) for core in cores])

    threads = [threading.Thread(target=finish, args=(tickets[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moved(cores) == 64


def test_a_scheduler_changes_the_step_and_does_not_warn(sgd):
    cores, fused = sgd
    scheduler = torch.optim.lr_scheduler.LambdaLR(fused, lambda epoch: 0.5**epoch)
    for _ in range(3):
        Times.apply(fused, 1.0, *cores).backward()
        scheduler.step()
    assert moved(cores) == 1 + 0.5 + 0.25


def test_a_scheduler_still_warns_when_there_was_no_update(sgd):
    _, fused = sgd
    scheduler = torch.optim.lr_scheduler.LambdaLR(fused, lambda epoch: 0.5**epoch)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_a_loop_written_for_any_optimizer_makes_the_same_updates(sgd):
    cores, fused = sgd
    updates = []
    fused.register_step_post_hook(lambda *_: updates.append(moved(cores)))
    fused.zero_grad()
    Times.apply(fused, 1.0, *cores).backward()
    assert updates == [1]
    fused.step()
    assert moved(cores) == 1

    def closure():
        fused.zero_grad()
        loss = Times.apply(fused, 2.0, *cores)
        loss.backward()
        return loss.item()

    before = sum(core.sum() for core in cores).item()
    assert fused.step(closure) == pytest.approx(2 * before)
    assert moved(cores) == 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["state_dict", "module", "pickle", "deepcopy"])
def test_a_run_goes_on_from_its_saved_state_as_if_nothing_had_been(rule, how):
    cores = make_cores()
    fused = FusedOptimizer(cores, rule, lr=0.1, weight_decay=0.1)
    for step in range(3):
        fused.begin().finish(bowl_gradients(cores, step))
    if how == "deepcopy":
        other_cores, other = copy.deepcopy((cores, fused))
    elif how == "pickle":
        buffer = io.BytesIO()
        torch.save((cores, fused), buffer)
        buffer.seek(0)
        other_cores, other = torch.load(buffer, weights_only=False)
    else:
        other_cores = [nn.Parameter(core.detach().clone()) for core in cores]
        other = FusedOptimizer(other_cores, rule, lr=0.1, weight_decay=0.1)
        if how == "module":
            other.load_from_module(fused.state_for_module())
        else:
            other.load_state_dict(copy.deepcopy(fused.state_dict()))
    for step in range(3, 6):
        fused.begin().finish(bowl_gradients(cores, step))
        other.begin().finish(bowl_gradients(other_cores, step))
    assert all(a.equal(b) for a, b in zip(cores, other_cores, strict=True))
    assert not cores[0].equal(make_cores()[0])


def test_names_and_shapes_of_the_state_are_the_documented_ones():
    expected = {
        "sgd": {},
        "adagrad": {"sum": SHAPES},
        "slice_adagrad": {"sum": [shape[:1] for shape in SHAPES]},
        "adam": {"exp_avg": SHAPES, "exp_avg_sq": SHAPES},
    }
    assert expected.keys() == RULES.keys()
    for rule, tensors in expected.items():
        names = {f"optimizer.{rule}.{k}.step": () for k in range(3)} | {
            f"optimizer.{rule}.{k}.{name}": shapes[k]
            for name, shapes in tensors.items()
            for k in range(3)
        }
        state = FusedOptimizer(make_cores(), rule).state_for_module()
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == names


def test_loaded_state_leaves_no_gradient_pending(sgd):
    cores, fused = sgd
    waits = Times.apply(fused, 1.0, *cores)
    Times.apply(fused, 100.0, *cores).backward()
    fused.load_from_module(fused.state_for_module())
    waits.backward()
    assert moved(cores) == 1


def test_state_loaded_into_the_optimizer_alone_leaves_what_is_pending(sgd):
    cores, fused = sgd
    waits = Times.apply(fused, 1.0, *cores)
    Times.apply(fused, 2.0, *cores).backward()
    fused.load_state_dict(fused.state_dict())
    assert moved(cores) == 0
    waits.backward()
    assert moved(cores) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("optimizer.adam.1.exp_avg"), r"lacks optimizer\.adam\.1\.exp_avg$"),
        (
            lambda s: s.update({"optimizer.adagrad.0.sum": torch.zeros(3)}),
            r"must be that of 'adam' and 3 cores; it has optimizer\.adagrad\.0\.sum$",
        ),
        (
            lambda s: s.update({"optimizer.adam.2.exp_avg": torch.zeros(7)}),
            r"optimizer\.adam\.2\.exp_avg must have shape \(7, 2, 2, 1\); got \(7,\)",
        ),
    ],
)
def test_state_of_another_optimiser_is_refused_and_nothing_changes(change, message):
    cores = make_cores()
    fused = FusedOptimizer(cores, "adam")
    fused.begin().finish(random_gradients(0, cores))
    before = {name: tensor.clone() for name, tensor in fused.state_for_module().items()}
    state = {name: tensor + 1 for name, tensor in before.items()}
    change(state)
    with pytest.raises(ValueError, match=message):
        fused.load_from_module(state)
    assert all(tensor.equal(before[name]) for name, tensor in fused.state_for_module().items())


@pytest.mark.parametrize("rule", RULES)
def test_state_follows_the_cores_to_another_dtype(rule):
    module = nn.ParameterList(make_cores())
    fused = FusedOptimizer(module, rule)
    ours = make_cores(dtype=torch.float64)
    twin = FusedOptimizer(ours, rule)
    for step in range(4):
        if step == 2:
            module.double()
        fused.begin().finish(random_gradients(step, list(module)))
        twin.begin().finish(random_gradients(step, ours))
    assert largest_difference(list(module), ours) <= 1e-5
    tensors = fused.state_for_module()
    floats = {t.dtype for name, t in tensors.items() if not name.endswith("step")}
    assert floats <= {torch.float64}
    assert int(tensors[f"optimizer.{rule}.0.step"]) == 4


@pytest.mark.parametrize("rule", RULES)
def test_a_module_made_on_meta_and_given_memory_later_is_updated(rule):
    module = nn.ParameterList([nn.Parameter(core.to("meta")) for core in make_cores()])
    fused = FusedOptimizer(module, rule)
    module.to_empty(device="cpu")  # puts new parameters into the list
    twin_cores = make_cores()
    with torch.no_grad():
        for core, start in zip(module, twin_cores, strict=True):
            core.copy_(start)
    twin = FusedOptimizer(twin_cores, rule)
    for step in range(2):
        fused.begin().finish(random_gradients(step, twin_cores))
        twin.begin().finish(random_gradients(step, twin_cores))
    assert all(a.equal(b) for a, b in zip(module, twin_cores, strict=True))
    assert fused.param_groups[0]["params"][0] is module[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "rmsprop"}, "one of sgd, adagrad, slice_adagrad, adam; got 'rmsprop'"),
        ({"lr": -1.0}, "lr must be at least 0; got -1.0"),
        ({"lr": float("nan")}, "lr must be at least 0; got nan"),
        ({"eps": -1e-8}, "eps must be at least 0; got -1e-08"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0; got -0.1"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\); got \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\); got \(0.9,\)"),
    ],
)
def test_a_wrong_setting_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FusedOptimizer(make_cores(), **({"rule": "adam"} | arguments))


def test_other_parameters_are_refused(sgd):
    _, fused = sgd
    with pytest.raises(ValueError, match="cores of one table and nothing else"):
        fused.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="empty"):
        FusedOptimizer([], "sgd")


def test_constructing_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FusedOptimizer(make_cores(), "adam")
