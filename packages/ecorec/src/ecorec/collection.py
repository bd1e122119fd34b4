"""Many tables called at once: a batch of named features in, their pooled embeddings out."""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .embedding import TTEmbeddingBag
from .fused_optimizer import FusedOptimizer
from .shapes import TTSpec, check_dtype, check_positive

POOLINGS = ("sum", "mean", "max")
KINDS = ("tt", "dense")
INTEGERS = (torch.int32, torch.int64)
OF_ANY_BAG = ("padding_idx", "scale_grad_by_freq")  # keywords that nn.EmbeddingBag has too


@dataclass(frozen=True)
class TableConfig:
    """One table of N rows and D columns, and the features that look it up.

    Args:
        name: of the table; a part of its parameters' names, so without a dot.
        num_embeddings: N.
        embedding_dim: D.
        feature_names: one or more features of the batch.
        pooling: "sum", "mean" or "max" of the rows of a bag.
        kind: "tt" (TTEmbeddingBag) or "dense" (nn.EmbeddingBag), which small tables are for.
        spec: the shape of a tt table.
        rank: its rank or ranks, instead of `spec`; with neither, TTEmbeddingBag's default.

    Raises:
        ValueError: an unknown pooling or kind, a number below 1, no or repeated feature names, spec
            and rank together or with kind "dense".
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]
    pooling: str = "sum"
    kind: str = "tt"
    spec: TTSpec | None = None
    rank: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        for argument, word, existing in (
            ("pooling", self.pooling, POOLINGS),
            ("kind", self.kind, KINDS),
        ):
            if word not in existing:
                raise ValueError(
                    f"{argument} of table {self.name!r} must be one of {', '.join(existing)}; "
                    f"got {word!r}"
                )
        check_positive(f"num_embeddings of table {self.name!r}", self.num_embeddings)
        check_positive(f"embedding_dim of table {self.name!r}", self.embedding_dim)
        if isinstance(self.feature_names, str) or not self.feature_names:
            raise ValueError(
                f"feature_names of table {self.name!r} must be a list of one or more names; "
                f"got {self.feature_names!r}"
            )
        object.__setattr__(self, "feature_names", tuple(self.feature_names))
        given = [word for word in ("spec", "rank") if getattr(self, word) is not None]
        if len(given) > (self.kind == "tt"):
            raise ValueError(
                f"table {self.name!r} of kind {self.kind!r} takes "
                f"{'spec or rank' if self.kind == 'tt' else 'neither spec nor rank'}; "
                f"got {' and '.join(given)}"
            )


class KeyedJaggedTensor:
    """The lookups of B samples in several features, feature after feature.

    Args:
        keys: K different feature names.
        values: [V] int32 or int64 indices: those of the first key's samples, one sample after the
            other, then those of the second key, ...
        lengths: [K * B] int32 or int64, how many values each sample has of each key.
        offsets: [K * B + 1], where they start, instead of `lengths`; if both are given they agree.
        weights: [V] floats, of `values`.

    The methods have TorchRec's names. `TTEmbeddingBagCollection` takes TorchRec's own objects too.

    Raises:
        ValueError: a repeated key, a shape that does not fit, lengths below 0 or whose sum is not
            V, offsets that do not go from 0 to V without falling, tensors on different devices.
        TypeError: values, lengths or offsets that are not integers, weights that are not floats.

    Cost: the checks read lengths or offsets, which on a GPU waits for it.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self._keys = list(keys)
        _check_different("keys", self._keys)
        for name, tensor in (("values", values), ("lengths", lengths), ("offsets", offsets)):
            if tensor is not None:
                _check_vector(name, tensor, values.device)
                if tensor.dtype not in INTEGERS:
                    raise TypeError(f"{name} must be int32 or int64; got {tensor.dtype}")
        if weights is not None:
            _check_vector("weights", weights, values.device)
            if not weights.is_floating_point():
                raise TypeError(f"weights must be floats; got {weights.dtype}")
            if len(weights) != len(values):
                raise ValueError(
                    f"weights must have the {len(values)} numbers of values; got {len(weights)}"
                )
        if offsets is None:
            if lengths is None:
                raise ValueError("lengths or offsets must be given; got neither")
            _check_lengths(lengths, len(values))
            offsets = F.pad(lengths.long().cumsum(0), (1, 0))
        else:
            _check_offsets(offsets, len(values))
            if lengths is None:
                lengths = offsets.diff()
            elif not (len(offsets) == len(lengths) + 1 and bool((offsets.diff() == lengths).all())):
                raise ValueError("lengths must be the differences of offsets; they are not")
        if len(lengths) % max(1, len(self._keys)) or (len(lengths) and not self._keys):
            raise ValueError(
                f"lengths must have B numbers for each of the {len(self._keys)} keys; "
                f"got {len(lengths)}"
            )
        self._values = values
        self._lengths = lengths
        self._offsets = offsets
        self._weights = weights
        # Where the values of each key start, and V: read once, every table asks for it.
        key_starts = torch.arange(len(self._keys) + 1, device=values.device) * self.stride()
        self._bounds: list[int] = offsets[key_starts].tolist()
        self._place = {key: k for k, key in enumerate(self._keys)}

    def keys(self) -> list[str]:
        """The K feature names."""
        return self._keys

    def values(self) -> Tensor:
        """[V] indices."""
        return self._values

    def lengths(self) -> Tensor:
        """[K * B] values of each sample, key by key."""
        return self._lengths

    def offsets(self) -> Tensor:
        """[K * B + 1] starts of these, the last one V."""
        return self._offsets

    def weights_or_none(self) -> Tensor | None:
        """[V] weights of the values, if there are any."""
        return self._weights

    def stride(self) -> int:
        """B."""
        return len(self._lengths) // max(1, len(self._keys))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedJaggedTensor":
        """The same lookups on another device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        made = copy.copy(self)
        made._values, made._lengths = moved(self._values), moved(self._lengths)  # type: ignore[assignment]
        made._offsets, made._weights = moved(self._offsets), moved(self._weights)  # type: ignore[assignment]
        return made

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{key}: {end - start}"
            for key, start, end in zip(self._keys, self._bounds, self._bounds[1:], strict=False)
        )
        weights = "" if self._weights is None else ", weights"
        return f"KeyedJaggedTensor({self.stride()} samples, values {{{sizes}}}{weights})"


class KeyedTensor:
    """Pooled embeddings of B samples, the features side by side.

    Args:
        keys: K feature names.
        length_per_key: the columns of each.
        values: [B, sum of length_per_key].

    The methods have TorchRec's names.
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys, self._length_per_key, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        """The K feature names."""
        return self._keys

    def length_per_key(self) -> list[int]:
        """The columns of each."""
        return self._length_per_key

    def values(self) -> Tensor:
        """[B, sum of length_per_key]."""
        return self._values

    def to_dict(self) -> dict[str, Tensor]:
        """A view [B, D] for each name, in the order of `keys`."""
        columns = torch.split(self._values, self._length_per_key, dim=1)
        return dict(zip(self._keys, columns, strict=True))

    def __getitem__(self, key: str) -> Tensor:
        return self.to_dict()[key]


def fused_optimizers_of(bags: nn.ModuleDict) -> dict[str, FusedOptimizer]:
    """The fused optimiser of each table that has one, by its name."""
    found = {name: getattr(bag, "fused_optimizer", None) for name, bag in bags.items()}
    return {name: optimizer for name, optimizer in found.items() if optimizer is not None}


class TTEmbeddingBagCollection(nn.Module):
    """Tables of any mix of sizes, dims, poolings and kinds behind one call.

    Args:
        tables: one or more; their names differ, and so do all their feature names.
        device, dtype, init_std, generator: of the tables of both kinds, as in TTEmbeddingBag.
        kwargs: the rest of TTEmbeddingBag's arguments, for every tt table. padding_idx and
            scale_grad_by_freq are for dense tables too; `optimizer` is not: dense tables stay
            ordinary parameters with dense gradients, for an optimiser of the caller's.

    Attributes:
        tables: the TableConfigs.
        embedding_bags: the modules by table name.
        fused_optimizers: those of the tables that have one, by table name, for schedulers.

    Features of one table are looked up in one call, so their gradients are one sum, and a fused
    optimiser makes one update of it.

    Raises:
        ValueError: no tables, a repeated name, a name that a module cannot have; what
            TTEmbeddingBag raises.
    """

    def __init__(
        self,
        tables: Iterable[TableConfig],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        init_std: float = 1.0,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.tables = tuple(tables)
        if not self.tables:
            raise ValueError("tables must have one or more TableConfigs; got none")
        _check_different("names of tables", [table.name for table in self.tables])
        _check_different("feature names", self._features())
        self.embedding_bags = nn.ModuleDict()
        for table in self.tables:
            if "." in table.name or not table.name or hasattr(self.embedding_bags, table.name):
                raise ValueError(
                    "the name of a table must not be empty, have a dot or be an attribute of "
                    f"nn.ModuleDict; got {table.name!r}"
                )
            if table.kind == "dense":
                bag: nn.Module = _dense_bag(table, device, dtype, init_std, generator, kwargs)
            else:
                bag = TTEmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    tt_ranks=table.rank,
                    spec=table.spec,
                    mode=table.pooling,
                    include_last_offset=True,
                    init_std=init_std,
                    generator=generator,
                    device=device,
                    dtype=dtype,
                    **kwargs,
                )
            self.embedding_bags[table.name] = bag

    @property
    def fused_optimizers(self) -> dict[str, FusedOptimizer]:
        """The optimisers in the backward, by table name; dense tables have none."""
        return fused_optimizers_of(self.embedding_bags)

    def forward(self, features: Any) -> KeyedTensor:
        """Pooled embeddings of B samples, in the order of `tables` and their feature names.

        Args:
            features: a KeyedJaggedTensor, ours or TorchRec's, or anything with its methods keys,
                values, lengths and weights_or_none. Other features than the tables' are ignored.

        Empty bags are zeros; B = 0 and V = 0 are legal.

        Raises:
            ValueError: a feature is missing, or the batch is not a legal KeyedJaggedTensor.
            IndexError: an index outside its table, with table, feature and position in values.
            NotImplementedError: weights, and a table whose pooling is not "sum"; samples whose
                number differs between keys.
            TypeError: weights of another dtype than a table.

        All of this before any table is looked up. Cost: one pass over the indices for the check,
        the calls of the tables, one copy of the output; the features of a shared table are copied
        once more unless they are neighbours in the batch.
        """
        batch = as_batch(features)
        self._check(batch)
        pooled = []
        for table in self.tables:
            values, edges, weights = lookups(batch, table)
            bags = self.embedding_bags[table.name](values, edges, weights)
            pooled += bags.unflatten(0, (len(table.feature_names), batch.stride())).unbind(0)
        dims = [table.embedding_dim for table in self.tables for _ in table.feature_names]
        return KeyedTensor(self._features(), dims, torch.cat(pooled, dim=1))

    def _features(self) -> list[str]:
        return [feature for table in self.tables for feature in table.feature_names]

    def _check(self, batch: KeyedJaggedTensor) -> None:
        for table in self.tables:
            check_tensors(batch, table, next(self.embedding_bags[table.name].parameters()))
        check_features(batch, self.tables)


def check_tensors(batch: KeyedJaggedTensor, table: TableConfig, like: Tensor) -> None:
    """Whether the batch's device, and its weights if any, are those of a table like this tensor.

    Raises:
        ValueError: another device. NotImplementedError: weights, and pooling other than "sum".
        TypeError: weights of another dtype.
    """
    if batch.values().device != like.device:
        raise ValueError(
            f"the batch must be on {like.device} like table {table.name!r}; "
            f"got {batch.values().device}"
        )
    weights = batch.weights_or_none()
    if weights is None:
        return
    if table.pooling != "sum":
        raise NotImplementedError(
            "embedding_bag: per_sample_weights was not None. per_sample_weights is only "
            f"supported for mode='sum' (got mode={table.pooling!r} of table {table.name!r})"
        )
    if weights.dtype != like.dtype:
        raise TypeError(
            f"weights must be {like.dtype} like table {table.name!r}; got {weights.dtype}"
        )


def as_batch(features: Any) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor as it is; of anything else what its methods of the same names give.

    Raises:
        NotImplementedError: the number of samples differs between keys (a TorchRec batch can).
        ValueError, TypeError: as of KeyedJaggedTensor.
    """
    if isinstance(features, KeyedJaggedTensor):
        return features
    if getattr(features, "variable_stride_per_key", lambda: False)():
        raise NotImplementedError("every key must have the same number of samples")
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=features.lengths(),
        weights=features.weights_or_none(),
    )


def lookups(batch: KeyedJaggedTensor, table: TableConfig) -> tuple[Tensor, Tensor, Tensor | None]:
    """What one table is called with: indices [V'], edges of bags [features * B + 1], weights [V'].

    The bags of the table's first feature come first. Nothing is copied when its features are
    neighbours in the batch.
    """
    position = [batch._place[feature] for feature in table.feature_names]
    bounds = batch._bounds
    first, end = position[0], position[-1] + 1
    if position == list(range(first, end)):
        pieces = [slice(bounds[first], bounds[end])]
    else:
        pieces = [slice(bounds[k], bounds[k + 1]) for k in position]

    def of_table(whole: Tensor) -> Tensor:
        return whole[pieces[0]] if len(pieces) == 1 else torch.cat([whole[p] for p in pieces])

    lengths = batch.lengths().view(len(batch.keys()), batch.stride())[position]
    weights = batch.weights_or_none()
    return (
        of_table(batch.values()),
        F.pad(lengths.flatten().cumsum(0), (1, 0)),
        None if weights is None else of_table(weights),
    )


def check_features(batch: KeyedJaggedTensor, tables: Iterable[TableConfig]) -> None:
    """Whether the batch has every feature of the tables, and only indices that are rows of them.

    Raises:
        ValueError: a feature is missing.
        IndexError: an index outside its table, with table, feature and position in values.
    """
    for table in tables:
        for feature in table.feature_names:
            if feature not in batch._place:
                raise ValueError(
                    f"the batch must have feature {feature!r} of table {table.name!r}; "
                    f"its keys are {', '.join(batch.keys())}"
                )
            place = batch._place[feature]
            start, end = batch._bounds[place], batch._bounds[place + 1]
            if start == end:
                continue
            values = batch.values()[start:end]
            least, greatest = values.aminmax()
            if least < 0 or greatest >= table.num_embeddings:
                outside = (values < 0) | (values >= table.num_embeddings)
                wrong = int(outside.nonzero()[0])
                raise IndexError(
                    f"feature {feature!r} must be in [0, {table.num_embeddings}), the rows of "
                    f"table {table.name!r}; got {int(values[wrong])} at position {start + wrong} "
                    "of the batch's values"
                )


def _dense_bag(
    table: TableConfig,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    init_std: float,
    generator: torch.Generator | None,
    kwargs: dict[str, Any],
) -> nn.EmbeddingBag:
    dtype = torch.float32 if dtype is None else dtype
    check_dtype(dtype)
    shape = table.num_embeddings, table.embedding_dim
    weight = torch.empty(shape, device=device, dtype=dtype)
    return nn.EmbeddingBag.from_pretrained(
        weight.normal_(0, init_std, generator=generator),
        freeze=False,
        mode=table.pooling,
        include_last_offset=True,
        **{word: kwargs[word] for word in OF_ANY_BAG if word in kwargs},
    )


def _check_different(what: str, names: Sequence[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"{what} must differ; got {', '.join(map(repr, repeated))} more than once")


def _check_vector(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.ndim != 1:
        raise ValueError(f"{name} must be 1-D; got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like values; got {tensor.device}")


def _check_lengths(lengths: Tensor, values: int) -> None:
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"lengths must be at least 0; got {int(lengths.min())}")
    if int(lengths.sum()) != values:
        raise ValueError(
            f"lengths must add up to the {values} values; got a sum of {int(lengths.sum())}"
        )


def _check_offsets(offsets: Tensor, values: int) -> None:
    if not len(offsets) or offsets[0] != 0:
        raise ValueError(f"offsets must start at 0; got {offsets[:1].tolist()}")
    falls = offsets.diff() < 0
    if falls.any():
        place = int(falls.nonzero()[0]) + 1
        raise ValueError(f"offsets must not decrease; got {int(offsets[place])} at {place}")
    if offsets[-1] != values:
        raise ValueError(f"offsets must end at the {values} values; got {int(offsets[-1])}")
