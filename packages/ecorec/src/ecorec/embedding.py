"""TTEmbeddingBag: nn.EmbeddingBag's call over a table that is held as tensor-train cores."""

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .initialisers import match_normal
from .shapes import TTSpec, check_dtype, default_spec
from .torch_backend import unique_rows

MODES = ("sum", "mean")


class TTEmbeddingBag(nn.Module):
    """Sums or means of rows of an [N, D] table that exists only as d small cores.

    Called like torch.nn.EmbeddingBag. The cores are ordinary parameters with dense gradients, so
    every torch optimiser works on them.

    Args:
        num_embeddings: N, rows of the table.
        embedding_dim: D, its columns.
        tt_ranks: one rank (three cores; 32 when neither this nor `spec` is given), or the d - 1
            ranks of d = 2, 3 or 4 cores. The row and column factors are chosen by
            `shapes.default_spec`.
        spec: the whole shape instead of `tt_ranks`.
        mode: "mean" (as in torch) or "sum".
        padding_idx: rows of this index add nothing to a bag, do not count in its mean, and get no
            gradient through it.
        include_last_offset: offsets are [B + 1], the last one ends the last bag. Indices after it
            belong to no bag.
        init_std: standard deviation of the table's entries at the start (`initialisers`).
        generator: source of the initial numbers.
        max_norm: accepted to say that it cannot be had.
        device, dtype: of the cores; float32 (default) or float64.

    Attributes:
        cores: d parameters [p_k, r_(k-1), q_k, r_k].
        spec: the TTSpec.

    Raises:
        ValueError: a number is out of its range, the mode is unknown, `spec` is for another table,
            or both tt_ranks and spec are given.
        TypeError: half precision.
        NotImplementedError: max_norm is given.

    Warns when the cores are not smaller than the dense table would be.
    Source: EcoRec, SC 2024; TT-Rec, MLSys 2021.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tt_ranks: int | Sequence[int] | None = None,
        spec: TTSpec | None = None,
        mode: str = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        init_std: float = 1.0,
        generator: torch.Generator | None = None,
        max_norm: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
        if max_norm is not None:
            raise NotImplementedError(
                "max_norm would rewrite single rows, and a row of a tensor-train table shares its "
                f"cores with other rows; got max_norm={max_norm}"
            )
        if dtype is not None:
            check_dtype(dtype)
        if spec is None:
            spec = default_spec(
                num_embeddings,
                embedding_dim,
                32 if tt_ranks is None else tt_ranks,
                torch.float32 if dtype is None else dtype,
            )
        elif tt_ranks is not None:
            raise ValueError(f"tt_ranks and spec exclude each other; got {tt_ranks} and {spec}")
        for name, given, of_spec in (
            ("num_embeddings", num_embeddings, spec.num_embeddings),
            ("embedding_dim", embedding_dim, spec.embedding_dim),
            ("dtype", dtype or spec.dtype, spec.dtype),
        ):
            if given != of_spec:
                raise ValueError(f"{name} must be that of spec, {of_spec}; got {given}")
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx must be in [-{num_embeddings}, {num_embeddings}); "
                    f"got {padding_idx}"
                )
            padding_idx %= num_embeddings
        if spec.bytes >= spec.dense_bytes:
            warnings.warn(
                f"the cores take {spec.bytes:,} bytes, the dense table would take "
                f"{spec.dense_bytes:,}: lower the ranks, or use nn.EmbeddingBag",
                stacklevel=2,
            )
        self.spec = spec
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.mode = mode
        self.padding_idx = padding_idx
        self.include_last_offset = include_last_offset
        self.cores = nn.ParameterList(
            match_normal(spec, init_std, generator=generator, device=device)
        )

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Bags [B, D] of the cores' dtype.

        Args:
            input: [V] indices with `offsets`, or [B, L] without; int32 or int64, in [0, N).
            offsets: [B] (or [B + 1] with include_last_offset) starts of the bags, ascending from
                0; int32 or int64.
            per_sample_weights: like `input`, of the cores' dtype; only with mode "sum".

        Empty bags are zeros. V = 0 and B = 0 are legal.

        Raises:
            IndexError: an index outside [0, N), with its position in the flattened input.
            TypeError: indices or offsets that are not integers, weights of another dtype.
            ValueError: offsets that do not start at 0, fall, pass V, or come with a 2-D input; a
                shape that does not fit; tensors on another device than the cores.
            NotImplementedError: per_sample_weights with another mode than "sum".

        Cost: one sort of V indices, the products of `torch_backend.unique_rows`, V * D additions.
        The checks read the indices, which on a GPU waits for it.
        """
        weights = self._checked_weights(input, per_sample_weights)
        indices = self._checked_indices(input)
        if input.ndim == 2:
            if offsets is not None:
                raise ValueError(
                    f"offsets must be None with a 2-D input; got shape {tuple(offsets.shape)}"
                )
            edges = torch.arange(len(input) + 1, device=indices.device) * input.shape[1]
        else:
            edges = self._checked_edges(offsets, len(indices))
            # torch counts these in for some modes; here they belong to no bag in any mode.
            in_bags = int(edges[-1])
            indices = indices[:in_bags]
            weights = None if weights is None else weights[:in_bags]
        if self.padding_idx is not None:
            kept = indices != self.padding_idx
            edges = F.pad(kept.cumsum(0), (1, 0))[edges]
            indices = indices[kept]
            weights = None if weights is None else weights[kept]
        uniques, position = torch.unique(indices, return_inverse=True)
        return F.embedding_bag(
            position,
            self._table_rows(uniques),
            edges,
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=True,
        )

    def lookup(self, indices: Tensor) -> Tensor:
        """Rows [*, D] of the table for `indices` of any shape, int32 or int64 in [0, N).

        Raises:
            IndexError, TypeError, ValueError: as in `forward`.

        Cost: each different row is computed once.
        """
        uniques, position = torch.unique(self._checked_indices(indices), return_inverse=True)
        return self._table_rows(uniques)[position].view(*indices.shape, self.embedding_dim)

    def to_dense(self) -> Tensor:
        """The whole table [N, D], differentiable with respect to the cores.

        Cost: prod(p) * prod(q) numbers and as many again for the step before the last.
        """
        table: Tensor = self.cores[0].squeeze(1)  # [p_1 ... p_k, q_1 ... q_k, r_k]
        for core in self.cores[1:]:
            table = torch.einsum("aqr,brjs->abqjs", table, core).flatten(2, 3).flatten(0, 1)
        return table[: self.num_embeddings, : self.embedding_dim, 0]

    def extra_repr(self) -> str:
        """What nn.Module prints: sizes, shape, mode."""
        spec = self.spec
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, p={spec.p}, q={spec.q}, "
            f"ranks={spec.ranks}, mode={self.mode!r}, padding_idx={self.padding_idx}"
        )

    def _table_rows(self, uniques: Tensor) -> Tensor:
        return unique_rows(list(self.cores), uniques)[:, : self.embedding_dim]

    def _checked_indices(self, indices: Tensor) -> Tensor:
        self._check_integers("input", indices)
        flat = indices.reshape(-1).long()
        outside = (flat < 0) | (flat >= self.num_embeddings)
        if outside.any():
            position = int(outside.nonzero()[0])
            raise IndexError(
                f"input must be in [0, {self.num_embeddings}), the rows of this table of "
                f"{self.num_embeddings} x {self.embedding_dim}; got {int(flat[position])} at "
                f"position {position} of the flattened input"
            )
        return flat

    def _checked_edges(self, offsets: Tensor | None, lookups: int) -> Tensor:
        """The [B + 1] edges of the bags."""
        if offsets is None:
            raise ValueError("offsets must be given with a 1-D input; got None")
        self._check_integers("offsets", offsets)
        if offsets.ndim != 1:
            raise ValueError(f"offsets must be 1-D; got shape {tuple(offsets.shape)}")
        if self.include_last_offset and len(offsets) == 0:
            raise ValueError("offsets must have B + 1 >= 1 numbers with include_last_offset; got 0")
        edges = offsets.long()
        if len(edges) and edges[0] != 0:
            raise ValueError(f"offsets must start at 0; got {int(edges[0])}")
        falls = edges[1:] < edges[:-1]
        if falls.any():
            bag = int(falls.nonzero()[0])
            raise ValueError(
                f"offsets must not decrease; got {int(edges[bag + 1])} after {int(edges[bag])} "
                f"at position {bag + 1}"
            )
        if len(edges) and edges[-1] > lookups:
            raise ValueError(f"offsets must not pass the input's {lookups}; got {int(edges[-1])}")
        if self.include_last_offset:
            return edges
        # Without a bag there is none that the indices could belong to.
        return torch.cat([edges, edges.new_tensor([lookups if len(edges) else 0])])

    def _checked_weights(self, input: Tensor, weights: Tensor | None) -> Tensor | None:
        if input.ndim not in (1, 2):
            raise ValueError(f"input must be 1-D or 2-D; got shape {tuple(input.shape)}")
        if weights is None:
            return None
        if self.mode != "sum":
            raise NotImplementedError(
                "embedding_bag: per_sample_weights was not None. per_sample_weights is only "
                f"supported for mode='sum' (got mode={self.mode!r})"
            )
        if weights.shape != input.shape:
            raise ValueError(
                f"per_sample_weights must have the shape of input, {tuple(input.shape)}; "
                f"got {tuple(weights.shape)}"
            )
        if weights.dtype != self.cores[0].dtype:
            raise TypeError(
                f"per_sample_weights must be {self.cores[0].dtype} like the cores; "
                f"got {weights.dtype}"
            )
        self._check_device("per_sample_weights", weights)
        return weights.reshape(-1)

    def _check_integers(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64; got {tensor.dtype}")
        self._check_device(name, tensor)

    def _check_device(self, name: str, tensor: Tensor) -> None:
        device = self.cores[0].device
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device} like the cores; got {tensor.device}")
