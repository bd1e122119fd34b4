"""A table with a fused optimiser learns what its twin learns with torch.optim."""

import copy

import pytest
import torch

from ecorec import TTEmbeddingBag

RULES = {
    "sgd": lambda cores, **kw: torch.optim.SGD(cores, lr=kw["lr"]),
    "adagrad": lambda cores, **kw: torch.optim.Adagrad(cores, lr=kw["lr"], eps=1e-8),
    "adam": lambda cores, **kw: torch.optim.Adam(cores, lr=kw["lr"], eps=1e-8),
}
BACKENDS = ["torch", "cpu"]


class SliceAdagrad:
    def __init__(self, cores, lr):
        self.cores, self.lr = cores, lr
        self.sums = [torch.zeros(len(core)) for core in cores]

    def zero_grad(self):
        for core in self.cores:
            core.grad = None

    @torch.no_grad()
    def step(self):
        for core, total in zip(self.cores, self.sums, strict=True):
            total += (core.grad**2).mean((1, 2, 3))
            core -= self.lr * core.grad / (total.sqrt() + 1e-8)[:, None, None, None]


def twins(rule, backend, lr=0.05):
    options = {"tt_ranks": 6, "mode": "sum", "init_std": 0.5, "backend": backend}
    fused = TTEmbeddingBag(
        997, 12, optimizer=rule, lr=lr, generator=torch.Generator().manual_seed(0), **options
    )
    plain = TTEmbeddingBag(997, 12, **options)
    plain.load_state_dict({k: v.clone() for k, v in fused.state_dict().items() if "cores" in k})
    make = RULES.get(rule)
    cores = list(plain.cores)
    return fused, plain, make(cores, lr=lr) if make else SliceAdagrad(cores, lr)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(997, (16, 5), generator=generator) for _ in range(count)]


def loss_of(emb, batch):
    return (emb(batch) - 1).square().mean()


def assert_same_cores(fused, plain):
    for ours, theirs in zip(fused.cores, plain.cores, strict=True):
        assert ours.grad is None
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", [*RULES, "slice_adagrad"])
def test_a_hundred_fused_steps_are_those_of_the_rule_on_a_twin(rule, backend):
    fused, plain, optimizer = twins(rule, backend)
    start = [core.detach().clone() for core in fused.cores]
    for batch in batches(100):
        loss_of(fused, batch).backward()
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
    assert_same_cores(fused, plain)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(start, fused.cores, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["forwards first", "one loss", "accumulate"])
def test_several_uses_give_one_update_of_the_summed_gradient(way, backend):
    fused, plain, optimizer = twins("adagrad", backend)
    for turn in range(3):
        three = batches(9)[3 * turn : 3 * turn + 3]
        if way == "forwards first":
            for loss in [loss_of(fused, batch) for batch in three]:
                loss.backward()
        elif way == "one loss":
            sum(loss_of(fused, batch) for batch in three).backward()
        else:
            with fused.accumulate():
                for batch in three:
                    loss_of(fused, batch).backward()
        optimizer.zero_grad()
        sum(loss_of(plain, batch) for batch in three).backward()
        optimizer.step()
        assert_same_cores(fused, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_is_dropped_does_not_hold_updates_up(backend):
    fused, plain, optimizer = twins("sgd", backend)
    first, second = batches(2)
    loss_of(fused, first)
    loss_of(fused, second).backward()
    loss_of(plain, second).backward()
    optimizer.step()
    assert_same_cores(fused, plain)


def test_a_copy_of_the_state_goes_on_where_it_was():
    fused, _, _ = twins("adam", "cpu")
    for batch in batches(5):
        loss_of(fused, batch).backward()
    twin, _, _ = twins("adam", "torch")
    twin.load_state_dict(copy.deepcopy(fused.state_dict()))
    for batch in batches(8)[5:]:
        loss_of(fused, batch).backward()
        loss_of(twin, batch).backward()
    for ours, theirs in zip(fused.cores, twin.cores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_scheduler_changes_the_step():
    fused, _, _ = twins("sgd", "cpu", lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(fused.fused_optimizer, lambda epoch: 0.0**epoch)
    before = [core.detach().clone() for core in fused.cores]
    loss_of(fused, batches(1)[0]).backward()
    assert any(not torch.equal(a, b) for a, b in zip(before, fused.cores, strict=True))
    scheduler.step()
    before = [core.detach().clone() for core in fused.cores]
    loss_of(fused, batches(1)[0]).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, fused.cores, strict=True))
