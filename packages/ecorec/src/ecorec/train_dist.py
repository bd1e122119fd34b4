"""Training over ranks on made-up clicks, and whether it equals one process: `ecorec train-dist`."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from septet_shared.link import LinkSpec, emulate
from septet_shared.profiling import bench_row
from septet_shared.ranks import Ranks

from .collection import KeyedJaggedTensor, KeyedTensor, TableConfig, TTEmbeddingBagCollection
from .dlrm import mlp
from .pipelined_trainer import PipelinedTrainer
from .table_wise_pipeline import DistributedTTCollection

DATA = ("synthetic",)
DENSE_FEATURES, HIDDEN = 4, 32
LEARNING_RATE = 0.05
TABLES = (
    TableConfig("user", 200_000, 16, ["user"], rank=8),
    TableConfig("item", 50_000, 16, ["item", "last_item"], rank=8),
    TableConfig("shop", 5_000, 16, ["shop"], rank=4),
    TableConfig("tag", 20_000, 16, ["tags"], pooling="mean", rank=8),
    TableConfig("hour", 24, 16, ["hour"], kind="dense"),
)
LOOKUPS = {"tags": 4, "last_item": 2}  # mean number a sample; else one


class Batch(NamedTuple):
    """dense_features [B, 4], sparse_features, labels [B]."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


class ClickModel(nn.Module):
    """The loss [B] of each sample of a Batch, from its embeddings and dense features."""

    def __init__(
        self, collection: TTEmbeddingBagCollection | DistributedTTCollection, seed: int
    ) -> None:
        super().__init__()
        self.collection = collection
        columns = sum(t.embedding_dim * len(t.feature_names) for t in TABLES)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bottom = mlp(DENSE_FEATURES, HIDDEN, HIDDEN)
            self.top = mlp(columns + HIDDEN, HIDDEN, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Binary cross-entropy of each sample."""
        pooled: KeyedTensor = self.collection(batch.sparse_features)
        dense = self.bottom(batch.dense_features)
        logits = self.top(torch.cat([pooled.values(), dense], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")


class Clicks:
    """Samples that the seed decides; any slice of them is a Batch."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.dense = torch.randn(samples, DENSE_FEATURES, generator=generator)
        self.lookups: dict[str, tuple[Tensor, Tensor]] = {}
        score = self.dense.sum(1)
        for table in TABLES:
            for feature in table.feature_names:
                most = 2 * LOOKUPS.get(feature, 1)
                lengths = torch.ones(samples, dtype=torch.int64)
                if feature in LOOKUPS:
                    lengths = torch.randint(most + 1, (samples,), generator=generator)
                skewed = torch.rand(int(lengths.sum()), generator=generator) ** 3
                self.lookups[feature] = ((skewed * table.num_embeddings).long(), lengths)
                score += 0.5 * torch.sin(torch.arange(samples) + lengths)
        self.labels = (score > 0).float()

    def batch(self, begin: int, end: int) -> Batch:
        """Samples [begin, end)."""
        values, lengths = [], []
        for all_values, all_lengths in self.lookups.values():
            first = int(all_lengths[:begin].sum())
            last = first + int(all_lengths[begin:end].sum())
            values.append(all_values[first:last])
            lengths.append(all_lengths[begin:end])
        features = KeyedJaggedTensor(list(self.lookups), torch.cat(values), torch.cat(lengths))
        return Batch(self.dense[begin:end], features, self.labels[begin:end])


def train_dist_rows(
    *,
    data: str = "synthetic",
    steps: int = 20,
    local_batch: int = 128,
    samples: int | None = None,
    plan: str = "auto",
    link: str | None = None,
    check_against_single: bool = False,
) -> list[dict[str, Any]]:
    """Rows `loss`, and `max_relative_difference` when asked for; collective, for torchrun's ranks.

    Args:
        data: "synthetic".
        steps, local_batch: of each rank.
        samples: of all ranks together, at most steps * local_batch * W: the last ranks' last
            batches are smaller, or empty.
        plan: "auto", "tw" or "dp".
        link: a rate like "1gbit", emulated between the ranks.
        check_against_single: train one process with the same batches; the row is the largest
            difference of any core, table, weight or bias, over that tensor's largest magnitude.

    Raises:
        ValueError: unknown data or plan, a number below 1, more samples than fit.
    """
    if data not in DATA:
        raise ValueError(f"data must be {' or '.join(DATA)}; got {data!r}")
    for name, number in (("steps", steps), ("local_batch", local_batch)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1; got {number}")
    spec = None if link is None else LinkSpec(link)
    ranks = Ranks.world("cpu", ranks_per_machine=None if spec is None else 1)
    share = steps * local_batch
    most = share * ranks.size
    total = most if samples is None else samples
    if not 1 <= total <= most:
        raise ValueError(f"samples must be in [1, {most}], the steps' batches; got {total}")
    clicks = Clicks(total)

    def part(rank: int, step: int) -> tuple[int, int]:
        begin = rank * share + step * local_batch
        return min(begin, total), min(begin + local_batch, (rank + 1) * share, total)

    held = contextlib.nullcontext() if spec is None else emulate(ranks, spec)
    with held:
        collection = DistributedTTCollection(TABLES, ranks, plan=plan, **_options())
        model = ClickModel(collection, seed=0)
        trainer = PipelinedTrainer(model, _optimizer(model), ranks)
        batches = [clicks.batch(*part(ranks.rank, step)) for step in range(steps)]
        losses = [
            trainer.step(batch, following)
            for batch, following in zip(batches, [*batches[1:], None], strict=True)
        ]
        state = collection.full_state_dict()
    notes = f"{ranks.size} ranks, plan {plan}, {total} samples"
    rows = [bench_row("loss", plan, float(losses[-1]), "nats", notes=f"of the last step; {notes}")]
    if check_against_single:
        state |= {n: p for n, p in model.state_dict().items() if not n.startswith("collection.")}
        alone = _train_alone(
            clicks, [[part(r, s) for r in range(ranks.size)] for s in range(steps)]
        )
        worst, name = max(_differences(state, alone))
        worst, name = max(ranks.all_gather_object((worst, name)))
        rows.append(
            bench_row(
                "max_relative_difference", plan, worst, "", must="< 1e-4", notes=f"{name}; {notes}"
            )
        )
    return rows if ranks.rank == 0 else []


def _options() -> dict[str, Any]:
    return {
        "optimizer": "adagrad",
        "lr": LEARNING_RATE,
        "init_std": 0.05,
        "generator": torch.Generator().manual_seed(0),
    }


def _optimizer(model: ClickModel) -> torch.optim.Optimizer:
    """Of what no fused optimiser has: the MLPs and the dense tables of this rank."""
    fused = {
        parameter
        for bag in model.collection.embedding_bags.values()
        if getattr(bag, "fused_optimizer", None) is not None
        for parameter in bag.parameters()
    }
    plain = [p for p in model.parameters() if p not in fused]
    return torch.optim.SGD(plain, lr=LEARNING_RATE)


def _train_alone(clicks: Clicks, parts: list[list[tuple[int, int]]]) -> dict[str, Tensor]:
    """One process, whose batch of each step is that of all ranks together."""
    model = ClickModel(TTEmbeddingBagCollection(TABLES, **_options()), seed=0)
    optimiser = _optimizer(model)
    for step in parts:
        batch = _together([clicks.batch(*each) for each in step])
        optimiser.zero_grad()
        model(batch).mean().backward()
        optimiser.step()
    return {name.removeprefix("collection."): p for name, p in model.state_dict().items()}


def _together(batches: list[Batch]) -> Batch:
    keys = batches[0].sparse_features.keys()
    values, lengths = [], []
    for k in range(len(keys)):
        for batch in batches:
            features = batch.sparse_features
            begin, count = k * features.stride(), features.stride()
            lengths.append(features.lengths()[begin : begin + count])
            bounds = features.offsets()[[begin, begin + count]].tolist()
            values.append(features.values()[slice(*bounds)])
    return Batch(
        torch.cat([batch.dense_features for batch in batches]),
        KeyedJaggedTensor(keys, torch.cat(values), torch.cat(lengths)),
        torch.cat([batch.labels for batch in batches]),
    )


def _differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[Any]:
    for name, tensor in expected.items():
        if "optimizer" in name:
            continue
        largest = float(tensor.abs().max())
        apart = float((found[name] - tensor).abs().max())
        yield apart / largest if largest else apart, name
