"""Tables over ranks: each has an owner or a replica on every rank; exchanges behind computation.

A table-wise (`tw`) table lives on its owner, which looks up the bags of all ranks' samples: indices
go to it, pooled rows come back, and in the backward their gradients go to it. Tables are cut into
groups; while a group's rows travel the next group is computed, and backwards likewise. A
data-parallel (`dp`) table has a replica on every rank, whose gradients are summed before the
update.
Source: EcoRec, SC 2024 (table-wise pipeline); dp is what EL-Rec, SC 2022, does with all tables.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from septet_shared.ranks import Ranks, Work

from .collection import (
    KeyedJaggedTensor,
    KeyedTensor,
    TableConfig,
    TTEmbeddingBagCollection,
    as_batch,
    check_features,
    check_tensors,
    fused_optimizers_of,
    lookups,
)
from .embedding import TTTable
from .fused_optimizer import FusedOptimizer
from .sharding_plan import Plan, simple_plan

Counts = list[list[int]]  # of each rank, of each feature: how many values
ERRORS = {kind.__name__: kind for kind in (IndexError, ValueError, TypeError, NotImplementedError)}


@dataclass
class InputExchange:
    """The lookups of a batch on their way to the owners of their tables.

    features: what was given. batch: the local part. samples: [W] of each rank. counts: of each rank
    and feature. send: each payload (indices with lengths, then weights) with its counts, until it
    has departed.
    """

    features: Any
    batch: KeyedJaggedTensor
    samples: list[int]
    counts: Counts
    send: list[tuple[Tensor, list[int], list[int]]]
    works: list[Work[Tensor]]

    def depart(self, ranks: Ranks) -> None:
        """Sends what has not been sent."""
        while self.send:
            self.works.append(ranks.all_to_all_rows(*self.send.pop(0), async_op=True))


class DistributedTTCollection(nn.Module):
    """TTEmbeddingBagCollection over the ranks of a job; called with each rank's own samples.

    Args:
        tables: as in TTEmbeddingBagCollection, the same on every rank.
        ranks: who takes part.
        plan: a `sharding_plan.Plan`, or "tw" (every table has an owner) or "dp" (every table is
            everywhere), "auto" for the least predicted step if each feature had one lookup a
            sample; where more is known, `sharding_plan.plan` makes a better one.
        groups: of a plan made here: how many exchanges a step's rows travel in, or "auto".
        order: of a plan made here: "cost" (cheap tables first in the forward, last in the
            backward) or "given".
        overlap: whether rows travel while the next group is computed; else each is waited for.
        kwargs: of TTEmbeddingBagCollection.

    Attributes:
        plan: the Plan.
        tables: the TableConfigs.
        embedding_bags: the modules that are on this rank, by table name.
        fused_optimizers: those of them that have one, by table name, for schedulers.
        samples: [W] of each rank in the last batch.

    What each rank backpropagates is added up: divide a loss by the samples of all ranks, as
    `PipelinedTrainer` does, for the gradients of one process that has all samples. A fused
    optimiser makes one update from that sum. Entries start as those of one process whose generator
    (the default one, when none is given) is rank 0's.

    Raises:
        ValueError: as TTEmbeddingBagCollection; a plan for other tables or ranks; an unknown plan.
        NotImplementedError: scale_grad_by_freq with dp tables, whose ranks count for themselves.

    Cost: every rank makes all tables and keeps its own.
    """

    def __init__(
        self,
        tables: Iterable[TableConfig],
        ranks: Ranks,
        *,
        plan: Plan | str = "auto",
        groups: int | str = "auto",
        order: str = "cost",
        overlap: bool = True,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.ranks, self.overlap = ranks, overlap
        # Every rank draws all tables, so that each gets the entries that one process gives it.
        source = generator or _default_generator(kwargs.get("device"))
        drawn = torch.Generator(source.device)
        drawn.set_state(ranks.all_gather_object(source.get_state())[0])
        whole = TTEmbeddingBagCollection(tables, generator=drawn, **kwargs)
        if generator is not None or ranks.rank == 0:
            source.set_state(drawn.get_state())  # as it is left where one process has drawn
        self.tables = whole.tables
        if isinstance(plan, str):
            plan = simple_plan(self.tables, plan, ranks.size, groups=groups, order=order)
        plan.check(self.tables, ranks.size)
        if kwargs.get("scale_grad_by_freq") and "dp" in plan.kind.values():
            raise NotImplementedError(
                "scale_grad_by_freq needs plan 'tw': ranks with replicas count for themselves"
            )
        self.plan = plan
        ranks.agree((plan.to_json(), self.tables), "tables and plan")
        self._config = {table.name: table for table in self.tables}
        self._shapes = {key: tensor.shape for key, tensor in whole.state_dict().items()}
        self.embedding_bags = nn.ModuleDict()
        for table in self.tables:
            if plan.owner.get(table.name, ranks.rank) != ranks.rank:
                continue
            bag = whole.embedding_bags[table.name]
            self.embedding_bags[table.name] = bag
            if plan.kind[table.name] == "dp" and isinstance(bag, TTTable) and bag.fused_optimizer:
                bag.fused_optimizer.combine = self._summed
        # What weights of a batch must be like, also of tables that are elsewhere.
        self._like = next(whole.parameters()).detach()[:0]
        self._dims = {t.name: t.embedding_dim * len(t.feature_names) for t in self.tables}
        # Exchanges must happen on every rank, also where a group has no table that learns.
        self._anchor = self._like.new_zeros(()).requires_grad_()
        self._started: InputExchange | None = None
        self.samples: list[int] = []

    # ---- the batch ----

    @property
    def fused_optimizers(self) -> dict[str, FusedOptimizer]:
        """The optimisers in the backward of this rank's tables, by table name."""
        return fused_optimizers_of(self.embedding_bags)

    def start(self, features: Any) -> None:
        """Tells all ranks of a batch; the `forward` of this batch takes it over.

        Collective, in the order of `forward` and `start` on every rank. The indices themselves
        travel in the backward of the present batch, after its gradients, while tables are updated.

        Raises:
            ValueError, IndexError, TypeError, NotImplementedError: as TTEmbeddingBagCollection
                does, on every rank, when any rank's part is wrong.
        """
        self._started = self._exchange(features)

    def _exchange(self, features: Any) -> InputExchange:
        batch, problem = None, None
        try:
            batch = as_batch(features)
            self._check(batch)
        except tuple(ERRORS.values()) as error:
            problem = (type(error).__name__, str(error))
        mine = None
        if batch is not None and problem is None:
            mine = (batch.stride(), self._value_counts(batch), batch.weights_or_none() is not None)
        told = self.ranks.all_gather_object((problem, mine))
        for rank, (wrong, _) in enumerate(told):
            if wrong is not None:
                raise ERRORS[wrong[0]](f"rank {rank}: {wrong[1]}")
        if len({weighted for _, (_, _, weighted) in told}) > 1:
            having = [rank for rank, (_, (_, _, weighted)) in enumerate(told) if weighted]
            raise ValueError(f"weights must be given on every rank or none; ranks {having} do")
        assert batch is not None
        samples = [said[0] for _, said in told]
        counts = [said[1] for _, said in told]
        exchange = InputExchange(features, batch, samples, counts, [], [])
        if not self.plan.owner:
            return exchange
        of_rank = [self._owned(r) for r in range(self.ranks.size)]
        place, me = batch._place, self.ranks.rank
        lengths = batch.lengths().view(len(batch.keys()), batch.stride())
        packed, weights = [], []
        largest = max(self._config[name].num_embeddings for name in self.plan.owner)
        wide = torch.int32 if largest < 2**31 else torch.int64
        for names in of_rank:
            for feature in self._features(names):
                k = place[feature]
                begin, end = batch._bounds[k], batch._bounds[k + 1]
                packed += [lengths[k].to(wide), batch.values()[begin:end].to(wide)]
                if batch.weights_or_none() is not None:
                    weights.append(cast(Tensor, batch.weights_or_none())[begin:end].detach())
        where = self._feature_index

        def values(sender: int, receiver: int) -> int:
            return sum(counts[sender][where[f]] for f in self._features(of_rank[receiver]))

        size = range(self.ranks.size)
        sent = [len(self._features(of_rank[r])) * samples[me] + values(me, r) for r in size]
        mine_count = len(self._features(of_rank[me]))
        got = [mine_count * samples[r] + values(r, me) for r in size]
        nothing = batch.values().new_empty(0, dtype=wide)
        exchange.send.append((torch.cat([nothing, *packed]), sent, got))
        if batch.weights_or_none() is not None:
            like = cast(Tensor, batch.weights_or_none())
            out = [values(me, r) for r in size]
            into = [values(r, me) for r in size]
            exchange.send.append((torch.cat([like.new_empty(0), *weights]), out, into))
        return exchange

    def _check(self, batch: KeyedJaggedTensor) -> None:
        weights = batch.weights_or_none()
        if weights is not None and weights.requires_grad:
            raise NotImplementedError("weights that need a gradient cannot go to other ranks")
        for table in self.tables:
            check_tensors(batch, table, self._like)
        check_features(batch, self.tables)

    def _value_counts(self, batch: KeyedJaggedTensor) -> list[int]:
        bounds, place = batch._bounds, batch._place
        return [bounds[place[f] + 1] - bounds[place[f]] for f in self._feature_index]

    @property
    def _feature_index(self) -> dict[str, int]:
        features = (f for table in self.tables for f in table.feature_names)
        return {feature: k for k, feature in enumerate(features)}

    def _owned(self, rank: int) -> list[str]:
        """The tw tables of a rank, in the order in which they are computed."""
        return [name for group in self.plan.groups for name in group if self._is_of(name, rank)]

    def _is_of(self, name: str, rank: int) -> bool:
        return self.plan.owner[name] == rank

    def _features(self, names: Sequence[str]) -> list[str]:
        return [feature for name in names for feature in self._config[name].feature_names]

    def _received(self, exchange: InputExchange) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
        """For each tw table of this rank: indices, edges and weights of all ranks' bags."""
        if not exchange.works:
            return {}
        names = self._owned(self.ranks.rank)
        features = self._features(names)
        where, samples = self._feature_index, exchange.samples
        received, *rest = [work.wait() for work in exchange.works]
        weights = rest[0] if rest else None
        pieces: dict[str, list[tuple[Tensor, Tensor, Tensor | None]]] = {f: [] for f in features}
        at, weight_at = 0, 0
        for rank, count in enumerate(samples):
            for feature in features:
                number = exchange.counts[rank][where[feature]]
                lengths = received[at : at + count]
                at += count
                values = received[at : at + number]
                at += number
                own = None if weights is None else weights[weight_at : weight_at + number]
                weight_at += number
                pieces[feature].append((lengths, values, own))
        found = {}
        for name in names:
            parts = [part for f in self._config[name].feature_names for part in pieces[f]]
            lengths = torch.cat([part[0] for part in parts])
            edges = nn.functional.pad(lengths.long().cumsum(0), (1, 0))
            own = None
            if weights is not None:
                own = torch.cat([cast(Tensor, part[2]) for part in parts])
            found[name] = (torch.cat([part[1] for part in parts]), edges, own)
        return found

    # ---- forward and backward ----

    def forward(self, features: Any) -> KeyedTensor:
        """Pooled embeddings [B, ...] of this rank's samples, as of TTEmbeddingBagCollection.

        Collective. B may differ between ranks and be 0. Every rank must backpropagate through the
        result, or none: the gradients of tw tables travel in the backward.

        Raises:
            as `start`; PeerLost, RankError: another rank is lost or has failed.
        """
        started, self._started = self._started, None
        if started is not None and started.features is not features:
            raise RuntimeError("forward must be called with the batch that start was called with")
        exchange = started or self._exchange(features)
        exchange.depart(self.ranks)
        return self._arrived(*self._departed(exchange))

    def _departed(
        self, exchange: InputExchange
    ) -> tuple[InputExchange, list[tuple["Flight", Tensor]], dict[str, Tensor]]:
        """Every group computed and its rows on their way; the bags of replicas."""
        self.samples = exchange.samples
        received = self._received(exchange)
        sent = []
        for group in self.plan.groups:
            mine = [name for name in group if self._is_of(name, self.ranks.rank)]
            pooled = [self._bags(name, *received[name]) for name in mine]
            sent.append(self._send(group, mine, pooled, exchange.samples))
        return exchange, sent, self._replicas(exchange.batch)

    def _arrived(
        self,
        exchange: InputExchange,
        sent: list[tuple["Flight", Tensor]],
        columns: dict[str, Tensor],
    ) -> KeyedTensor:
        for group, (flight, rows) in zip(self.plan.groups, sent, strict=True):
            arrived = _arrive(flight, rows, self._anchor)
            columns |= self._columns(group, arrived, exchange.samples[self.ranks.rank])
        names = [f for table in self.tables for f in table.feature_names]
        dims = [t.embedding_dim for t in self.tables for _ in t.feature_names]
        return KeyedTensor(names, dims, torch.cat([columns[name] for name in names], dim=1))

    def _bags(self, name: str, values: Tensor, edges: Tensor, weights: Tensor | None) -> Tensor:
        """[features, samples of all ranks, D]."""
        bags: Tensor = self.embedding_bags[name](values, edges, weights)
        features = len(self._config[name].feature_names)
        return bags.view(features, len(bags) // features, bags.shape[1])

    def _send(
        self, group: Sequence[str], mine: Sequence[str], pooled: list[Tensor], samples: list[int]
    ) -> tuple["Flight", Tensor]:
        me, ranks = self.ranks.rank, range(self.ranks.size)
        width = [sum(self._dims[n] for n in group if self._is_of(n, r)) for r in ranks]
        flight = Flight(
            self.ranks,
            [samples[r] * width[me] for r in ranks],
            [samples[me] * width[r] for r in ranks],
            samples,
            self.overlap,
            self._depart_started,
        )
        return flight, _depart(flight, self._anchor, *pooled)

    def _depart_started(self) -> None:
        if self._started is not None:
            self._started.depart(self.ranks)

    def _columns(self, group: Sequence[str], arrived: Tensor, samples: int) -> dict[str, Tensor]:
        """[B, D] of each feature of the group, from the rows of each owner in turn."""
        columns, at = {}, 0
        for rank in range(self.ranks.size):
            for name in group:
                if not self._is_of(name, rank):
                    continue
                table = self._config[name]
                for feature in table.feature_names:
                    end = at + samples * table.embedding_dim
                    columns[feature] = arrived[at:end].view(samples, table.embedding_dim)
                    at = end
        return columns

    def _replicas(self, batch: KeyedJaggedTensor) -> dict[str, Tensor]:
        columns: dict[str, Tensor] = {}
        for table in self.tables:
            if self.plan.kind[table.name] == "dp":
                bags = self._bags(table.name, *lookups(batch, table))
                columns |= dict(zip(table.feature_names, bags.unbind(0), strict=True))
        return columns

    def _summed(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Over ranks: what the replicas of a table have each found."""
        given = [g for g in gradients if g is not None]
        if not given or self.ranks.size == 1:
            return list(gradients)
        whole = self.ranks.all_reduce(torch.cat([g.flatten() for g in given]))
        parts = iter(torch.split(whole, [g.numel() for g in given]))
        return [None if g is None else next(parts).view_as(g) for g in gradients]

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Parameters of dp tables without a fused optimiser: sum their gradients over ranks."""
        return [
            parameter
            for name, bag in self.embedding_bags.items()
            if self.plan.kind[name] == "dp" and getattr(bag, "fused_optimizer", None) is None
            for parameter in bag.parameters()
        ]

    # ---- state ----

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every table's state, with the names of the one-process collection; on every rank.

        Collective. Cost: every table's bytes, on every rank.
        """
        mine = {
            name: {key: tensor.cpu() for key, tensor in bag.state_dict().items()}
            for name, bag in self.embedding_bags.items()
            if self.plan.owner.get(name, 0) == self.ranks.rank
        }
        states: dict[str, dict[str, Tensor]] = {}
        for part in self.ranks.all_gather_object(mine):
            states |= part
        return {
            f"embedding_bags.{table.name}.{key}": tensor.to(self._like.device)
            for table in self.tables
            for key, tensor in states[table.name].items()
        }

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes this rank's tables from a full state, of any number of ranks and any plan.

        Raises:
            ValueError: names or shapes are not those of the one-process collection; the same on
                every rank, before anything is changed.
        """
        for what, names in (
            ("lacks", self._shapes.keys() - state.keys()),
            ("has", state.keys() - self._shapes.keys()),
        ):
            if names:
                raise ValueError(
                    "the state must be that of a TTEmbeddingBagCollection of these tables and "
                    f"options; it {what} {', '.join(sorted(names))}"
                )
        for key, shape in self._shapes.items():
            if state[key].shape != shape:
                raise ValueError(
                    f"{key} must have shape {tuple(shape)}; got {tuple(state[key].shape)}"
                )
        for name, bag in self.embedding_bags.items():
            prefix = f"embedding_bags.{name}."
            mine = {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
            bag.load_state_dict(mine)


class Flight:
    """The rows of one group between its computation and its use, and their gradients back."""

    def __init__(
        self,
        ranks: Ranks,
        send: list[int],
        receive: list[int],
        samples: list[int],
        overlap: bool,
        then: Callable[[], None],
    ) -> None:
        self.ranks, self.send, self.receive = ranks, send, receive
        self.samples, self.overlap, self.then = samples, overlap, then
        self.work: Work[Tensor] | None = None
        self.gradient: Tensor | None = None

    def take_off(self, rows: Tensor, there: bool) -> Tensor:
        """Where the rows (not `there`: their gradients) will be once they have landed."""
        send, receive = (self.send, self.receive) if there else (self.receive, self.send)
        out = rows.new_empty(sum(receive))
        self.work = self.ranks.all_to_all_rows(rows, send, receive, async_op=True, out=out)
        if not self.overlap:
            self.land()
        return out

    def pack(self, pooled: Sequence[Tensor], like: Tensor) -> Tensor:
        """[sum of send] the bags of each rank's samples, from [features, all samples, D] each."""
        parts = [torch.split(bags, self.samples, dim=1) for bags in pooled]
        flat = [part[rank].flatten() for rank in range(self.ranks.size) for part in parts]
        return torch.cat([like.new_empty(0), *flat])

    def unpack(self, rows: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """What `pack` was made of."""
        found = [rows.new_empty(shape) for shape in shapes]
        at = 0
        for rank, count in enumerate(self.samples):
            begin = sum(self.samples[:rank])
            for whole in found:
                size = whole.shape[0] * count * whole.shape[2]
                part = rows[at : at + size].view(whole.shape[0], count, whole.shape[2])
                whole[:, begin : begin + count] = part
                at += size
        return found

    def land(self) -> None:
        """Waits until the rows are there."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class _Depart(torch.autograd.Function):
    """Starts the exchange of a group's rows; its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, anchor: Tensor, *pooled: Tensor) -> Tensor:
        like = pooled[0] if pooled else anchor
        rows = flight.pack([bags.detach() for bags in pooled], like)
        ctx.flight, ctx.shapes = flight, [bags.shape for bags in pooled]
        return flight.take_off(rows, there=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        flight = ctx.flight
        flight.then()  # all gradients are on their way: the link is free behind them
        flight.land()
        assert flight.gradient is not None  # what `gradient` has become on its way
        return None, gradient.new_zeros(()), *flight.unpack(flight.gradient, ctx.shapes)


class _Arrive(torch.autograd.Function):
    """Waits for a group's rows; its backward starts the exchange of their gradients."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, rows: Tensor, anchor: Tensor) -> Tensor:
        flight.land()
        ctx.flight = flight
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # It has another shape where it goes: `_Depart` takes it from the flight.
        ctx.flight.gradient = ctx.flight.take_off(gradient.contiguous(), there=False)
        return None, gradient, gradient.new_zeros(())


# Untyped in torch.
_depart: Callable[..., Tensor] = cast(Any, _Depart).apply
_arrive: Callable[..., Tensor] = cast(Any, _Arrive).apply


def _default_generator(device: torch.device | str | None) -> torch.Generator:
    """The one that a table on this device draws from when none is given."""
    place = torch.get_default_device() if device is None else torch.device(device)
    if place.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if place.index is None else place.index
    return torch.cuda.default_generators[index]
