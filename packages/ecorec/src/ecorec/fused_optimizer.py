"""The update of a table's cores at the end of backward, and the torch Optimizer that shows it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

RULES = {  # what each keeps for a core, besides the number of its updates
    "sgd": (),
    "adagrad": ("sum",),
    "slice_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}


class FusedOptimizer(torch.optim.Optimizer):
    """A torch Optimizer over the cores of one table, which steps by itself at the end of backward.

    Learning rate schedulers, `state_dict` and step hooks work as on any Optimizer. The training
    loop needs neither `step()` nor `zero_grad()`; both may be called.

    Args:
        cores: d parameters [p_k, r_(k-1), q_k, r_k]. A list is kept, not copied: when a module
            puts other parameters into its ParameterList, they are the ones that are updated.
        rule: "sgd", "adagrad" and "adam" equal the classes of torch.optim with these arguments.
            "slice_adagrad" keeps one number for each slice core[i] instead of one for each
            element: sum[i] += mean(g[i]^2); core[i] -= lr * g[i] / (sqrt(sum[i]) + eps).
        lr: learning rate; `param_groups[0]["lr"]` may be changed at any time.
        eps: added to the root; of adagrad, slice_adagrad and adam. Mind that torch.optim.Adagrad
            has another default.
        betas: of adam.
        weight_decay: times the core is added to the gradient.

    When it steps: a forward takes a ticket by `begin`, its backward returns it with the gradients.
    Gradients are summed while tickets are out or `accumulate` is open; then one update follows. So
    three forwards before three backwards give one update, after the last of them. A ticket whose
    graph was dropped counts no more; gradients that waited for it are applied before the next
    forward reads the cores, at the next backward, or at `step()`, whichever comes first. An output
    that is kept holds the update up as long as it lives: evaluate under torch.no_grad().

    Raises:
        ValueError: an unknown rule, no cores, or a number outside of its range.

    Cost: state of as many numbers as the cores have (adagrad), twice (adam), one for a slice
    (slice_adagrad), none (sgd). Without weight decay and waiting gradients nothing is copied.
    Source: Duchi et al., Adagrad, 2011; Kingma and Ba, Adam, 2015; slice_adagrad is the row-wise
    Adagrad of dense tables, by slice of a core.
    """

    _pending: list[Tensor | None] | None

    def __init__(
        self,
        cores: Iterable[nn.Parameter],
        rule: str,
        lr: float = 0.01,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"optimizer must be one of {', '.join(RULES)}; got {rule!r}")
        for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not number >= 0:
                raise ValueError(f"{name} must be at least 0; got {number}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1); got {betas}")
        self.rule = rule
        self._cores = cores if isinstance(cores, list | nn.ParameterList) else list(cores)
        self._start_pending()
        settings = {"lr": lr, "eps": eps, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(list(self._cores), settings)
        for core in self._cores:
            self.state[core] = _fresh_state(rule, core)

    # --- when an update is due

    def begin(self) -> "Ticket":
        """The ticket of a forward that is about to read the cores; held by its graph.

        First applies gradients that waited for a graph that has been dropped.
        """
        with self._lock:
            self.step_if_due()
            ticket = Ticket(self)
            self._outstanding.add(ticket)
            return ticket

    def finish(self, ticket: "Ticket", gradients: Sequence[Tensor | None]) -> None:
        """Takes a backward's gradients, like the cores, None for a frozen one; see the class.

        A ticket may come back twice (retain_graph): its gradients are added each time. The
        gradients are kept until the update, and not written to.
        """
        with self._lock:
            self._outstanding.discard(ticket)
            self._pending = _added(self._pending, gradients)
            self.step_if_due()

    def step_if_due(self) -> None:
        """Applies gradients that waited for a graph that has been dropped; a `step` only then."""
        if self._is_due():
            self.step()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """One update, at the end, for all backward passes inside.

        When a forward's backward is still to come at the end, the update comes after it. When the
        block raises, the gradients of its backward passes are dropped and no update is made.
        Blocks may be nested; the outermost one counts.
        """
        with self._lock:
            self.step_if_due()
            before, self._pending = self._pending, None
            self._accumulating += 1
        try:
            yield
        except BaseException:
            with self._lock:
                self._accumulating -= 1
                self._pending = before
            raise
        with self._lock:
            self._accumulating -= 1
            inside, self._pending = self._pending, before
            if inside is not None:
                self._pending = _added(before, inside)
            self.step_if_due()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies what is due, which after a backward is nothing: it has been applied by then.

        Called by the optimiser itself for every update, so that schedulers see it and step hooks
        run. A closure is called first, and what it returns is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            if self._is_due():
                gradients, self._pending = self._pending or [], None
                if self.combine is not None:
                    gradients = self.combine(gradients)
                self.apply(gradients)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the cores' `.grad` is never set, and what is pending is not the user's."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the cores are there.

        Raises:
            ValueError: always.
        """
        if self.param_groups:
            raise ValueError(
                "a fused optimiser has the cores of one table and nothing else; give other "
                "parameters to an optimiser of their own"
            )
        super().add_param_group(param_group)

    # --- the rules

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor | None]) -> None:
        """One update of the cores, in place, whatever is pending; a None leaves its core alone."""
        group = self.param_groups[0]
        lr, eps, weight_decay = float(group["lr"]), float(group["eps"]), group["weight_decay"]
        for core, given in zip(self._follow_cores(), gradients, strict=True):
            if given is None:
                continue
            gradient = given.add(core, alpha=weight_decay) if weight_decay else given
            state = self.state[core]
            state["step"] += 1
            if self.rule == "sgd":
                core.add_(gradient, alpha=-lr)
            elif self.rule == "adagrad":
                state["sum"].addcmul_(gradient, gradient)
                core.addcdiv_(gradient, state["sum"].sqrt().add_(eps), value=-lr)
            elif self.rule == "slice_adagrad":
                state["sum"] += gradient.square().mean((1, 2, 3))
                root = state["sum"].sqrt().add_(eps)
                core.addcdiv_(gradient, root.view(-1, 1, 1, 1), value=-lr)
            else:
                self._apply_adam(core, gradient, state, lr, eps)

    def _apply_adam(
        self, core: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, eps: float
    ) -> None:
        beta1, beta2 = self.param_groups[0]["betas"]
        steps = int(state["step"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = state["exp_avg_sq"].sqrt().div_((1 - beta2**steps) ** 0.5).add_(eps)
        core.addcdiv_(state["exp_avg"], root, value=-lr / (1 - beta1**steps))

    # --- state

    def state_for_module(self) -> dict[str, Tensor]:
        """What a module puts into its own state_dict: `optimizer.<rule>.<core>.<name>`.

        The tensors themselves, like those of nn.Module.state_dict. `step` is int64 []; the others
        have a core's dtype and device, and its shape, or [p_k] with slice_adagrad.
        """
        return {
            f"optimizer.{self.rule}.{k}.{name}": tensor
            for k, core in enumerate(self._follow_cores())
            for name, tensor in self.state[core].items()
        }

    def load_from_module(self, state: Mapping[str, Tensor]) -> None:
        """Takes values from a dict like that of `state_for_module`; drops pending gradients.

        Raises:
            ValueError: a name is missing or too many, or a shape differs; nothing is changed then.
        """
        ours = self.state_for_module()
        for word, names in (
            ("lacks", ours.keys() - state.keys()),
            ("has", state.keys() - ours.keys()),
        ):
            if names:
                raise ValueError(
                    f"the state of the fused optimiser must be that of {self.rule!r} and "
                    f"{len(self._cores)} cores; it {word} {', '.join(sorted(names))}"
                )
        for name, tensor in ours.items():
            if state[name].shape != tensor.shape:
                raise ValueError(
                    f"{name} must have shape {tuple(tensor.shape)}; got {tuple(state[name].shape)}"
                )
        with self._lock:
            self._pending = None
            for name, tensor in ours.items():
                tensor.copy_(state[name])

    def _follow_cores(self) -> list[Tensor]:
        """The cores. State goes where they went by `module.to()`, also when they are new ones."""
        params, cores = self.param_groups[0]["params"], list(self._cores)
        for k, core in enumerate(cores):
            if params[k] is not core:
                self.state[core] = self.state.pop(params[k])
                params[k] = core
            for name, tensor in self.state[core].items():
                if name == "step" or (tensor.device, tensor.dtype) == (core.device, core.dtype):
                    continue
                if tensor.is_meta:  # has no values: the start
                    self.state[core][name] = _fresh_state(self.rule, core)[name]
                else:
                    self.state[core][name] = tensor.to(core)
        return cores

    # --- pending gradients; not copied or stored: they belong to graphs of this process

    # What an update's gradients become before it: of replicas of a table, their sum over ranks.
    combine: Callable[[Sequence[Tensor | None]], list[Tensor | None]] | None

    def _start_pending(self) -> None:
        self._lock = threading.RLock()  # a GPU's backward runs in a thread of its own
        self._outstanding: WeakSet[Ticket] = WeakSet()
        self._pending = None
        self._accumulating = 0
        self.combine = None

    def _is_due(self) -> bool:
        waiting = self._accumulating or len(self._outstanding)
        return self._pending is not None and not waiting

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"rule": self.rule, "_cores": self._cores}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_lock" not in self.__dict__:  # a copy; load_state_dict comes here too
            self._start_pending()


class Ticket:
    """What a forward holds until its backward; `FusedOptimizer.begin` gives it.

    The optimiser knows it only as long as its graph lives.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        """Gives a backward's gradients to the optimiser (`FusedOptimizer.finish`)."""
        self._optimizer.finish(self, gradients)


def _fresh_state(rule: str, core: Tensor) -> dict[str, Tensor]:
    like = core.detach()
    if rule == "slice_adagrad":
        like = like[:, 0, 0, 0]
    state = {"step": torch.zeros((), dtype=torch.int64)}
    return state | {
        name: torch.zeros_like(like, memory_format=torch.contiguous_format) for name in RULES[rule]
    }


@torch.no_grad()
def _added(
    one: Sequence[Tensor | None] | None, other: Sequence[Tensor | None]
) -> list[Tensor | None]:
    if one is None:
        return list(other)
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]
