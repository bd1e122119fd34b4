"""Training steps over ranks: exchanges behind computation, one gradient of all samples."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from septet_shared.ranks import Ranks

from .embedding import TTTable
from .table_wise_pipeline import DistributedTTCollection


class PipelinedTrainer:
    """Steps of a model whose tables are over ranks and whose other parameters are on every rank.

    Args:
        model: called with a batch, returns the loss of each local sample, [B]. Has one or more
            DistributedTTCollections among its modules; its other parameters take rank 0's values,
            as DistributedDataParallel does.
        optimizer: of the parameters that no fused optimiser has; None where there are none.
        ranks: those of the collections.
        features: what of a batch the collections are called with; by default its
            `sparse_features`, as TorchRec's batches have it.

    Collective.

    Raises:
        ValueError: the model has no DistributedTTCollection.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ranks: Ranks,
        *,
        features: Callable[[Any], Any] = lambda batch: batch.sparse_features,
    ) -> None:
        self.model, self.optimizer, self.ranks, self.features = model, optimizer, ranks, features
        self.collections = [m for m in model.modules() if isinstance(m, DistributedTTCollection)]
        if not self.collections:
            raise ValueError("model must have a DistributedTTCollection; it has none")
        elsewhere, self._replicas = set(), []
        for collection in self.collections:
            for name, bag in collection.embedding_bags.items():
                fused = bag.fused_optimizer if isinstance(bag, TTTable) else None
                if collection.plan.kind[name] == "tw" or fused is not None:
                    elsewhere |= set(bag.parameters())
                if collection.plan.kind[name] == "dp" and fused is not None:
                    self._replicas.append(fused)
        learning = (p for p in model.parameters() if p.requires_grad)
        self.replicated = [p for p in learning if p not in elsewhere]
        for parameter in self.replicated:
            ranks.broadcast(parameter.data)

    def step(self, batch: Any, next_batch: Any = None) -> Tensor:
        """One update from the samples of all ranks; their mean loss, [] on every rank.

        Collective. Ranks may have different numbers of samples, and none.

        Args:
            batch: of this rank. next_batch: of the next step, on every rank or none: its indices
                travel during this step's backward.

        Raises:
            ValueError: the model returned something else than a loss for each sample.
            as the model does, and as `DistributedTTCollection.forward`.
        """
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        losses: Tensor = self.model(batch)
        samples = self.collections[0].samples
        count = samples[self.ranks.rank]
        if not isinstance(losses, Tensor) or losses.shape != (count,):
            got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses)
            raise ValueError(f"model must return the loss of each sample, [{count}]; got {got}")
        loss = losses.sum() / max(1, sum(samples))
        if next_batch is not None:
            for collection in self.collections:
                collection.start(self.features(next_batch))
        with ExitStack() as updates:
            # Replicas are updated after the backward: summed within it, they would wait for rows.
            for fused in self._replicas:
                updates.enter_context(fused.accumulate())
            torch.autograd.backward(loss)
        mean = self._sum_gradients(loss.detach())
        if self.optimizer is not None:
            self.optimizer.step()
        return mean

    def _sum_gradients(self, loss: Tensor) -> Tensor:
        """Over ranks, in one exchange: gradients of replicated parameters, and the loss."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.replicated]
        whole = torch.cat([*(g.flatten().to(loss) for g in gradients), loss[None]])
        self.ranks.all_reduce(whole)
        parts = torch.split(whole, [*(g.numel() for g in gradients), 1])
        for parameter, part in zip(self.replicated, parts, strict=False):
            parameter.grad = part.view_as(parameter).to(parameter)
        return parts[-1][0]
