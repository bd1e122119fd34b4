"""TTEmbeddingBag and TTEmbedding: torch's calls over a table that is held as tensor-train cores."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import backend
from .backend import Call, Lookups
from .contraction import BatchPlan
from .fused_optimizer import FusedOptimizer, Ticket
from .initialisers import INITIALISERS, Initialiser
from .shape_search import suggest
from .shapes import TTSpec, callers_level, check_dtype
from .tt_svd import ErrorReport, decompose

MODES = ("sum", "mean", "max")


class TTTable(nn.Module):
    """What TTEmbeddingBag and TTEmbedding share: cores, their optimiser, which backend computes.

    Attributes:
        cores: d parameters [p_k, r_(k-1), q_k, r_k].
        spec: the TTSpec.
        fused_optimizer: the torch Optimizer that steps at the end of backward, or None.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tt_ranks: int | Sequence[int] | None = None,
        spec: TTSpec | None = None,
        padding_idx: int | None = None,
        scale_grad_by_freq: bool = False,
        optimizer: str | None = None,
        lr: float = 0.01,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        init: str | Initialiser = "match-normal",
        init_std: float = 1.0,
        generator: torch.Generator | None = None,
        max_norm: float | None = None,
        max_workspace_bytes: int = 64 << 20,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise NotImplementedError(
                "max_norm would rewrite single rows, and a row of a tensor-train table shares its "
                f"cores with other rows; got max_norm={max_norm}"
            )
        if dtype is not None:
            check_dtype(dtype)
        spec = _spec_of(num_embeddings, embedding_dim, tt_ranks, spec, dtype)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ValueError(
                    f"padding_idx must be in [-{num_embeddings}, {num_embeddings}); "
                    f"got {padding_idx}"
                )
            padding_idx %= num_embeddings
        if isinstance(init, str) and init not in INITIALISERS:
            raise ValueError(
                f"init must be one of {', '.join(INITIALISERS)}, or a function; got {init!r}"
            )
        if spec.bytes >= spec.dense_bytes:
            warnings.warn(
                f"the cores take {spec.bytes:,} bytes, the dense table would take "
                f"{spec.dense_bytes:,}: lower the ranks, or use nn.EmbeddingBag",
                stacklevel=callers_level(),
            )
        self.spec = spec
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.scale_grad_by_freq = scale_grad_by_freq
        self.max_workspace_bytes = max_workspace_bytes
        self.backend = backend
        self._check_backend()
        make = INITIALISERS[init] if isinstance(init, str) else init
        cores = make(spec, init_std, generator=generator, device=device)
        _check_cores(cores, spec)
        self.cores = nn.ParameterList(cores)
        self.fused_optimizer: FusedOptimizer | None = None
        if optimizer is not None:
            self.fused_optimizer = FusedOptimizer(
                self.cores, optimizer, lr=lr, eps=eps, betas=betas, weight_decay=weight_decay
            )
        self._statistics: dict[str, Any] = {}

    def _check_backend(self) -> None:
        backend.check(self.backend, self.spec, "sum", self.max_workspace_bytes)

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        *,
        spec: TTSpec | None = None,
        rank: int | None = None,
        max_bytes: int | None = None,
        rel_error: float | None = None,
        **kwargs: Any,
    ) -> tuple[Self, ErrorReport]:
        """A table near a dense one, and how near: TT-SVD.

        Args:
            weight: [N, D]; never copied whole.
            spec, rank, max_bytes, rel_error: one of them, as in `tt_svd.decompose`.
            kwargs: of the constructor.

        Raises:
            ValueError: none or several of the four are given, or one is out of range.

        Cost: of `tt_svd.decompose`.
        """
        found, cores, report = decompose(
            weight, spec=spec, rank=rank, max_bytes=max_bytes, rel_error=rel_error
        )
        kwargs.setdefault("device", weight.device)

        def given(*_: Any, device: torch.device | str | None, **__: Any) -> list[Tensor]:
            return [core.to(device) for core in cores]

        return cls(*weight.shape, spec=found, init=given, **kwargs), report

    def lookup(self, indices: Tensor) -> Tensor:
        """Rows [*, D] of the table for `indices` of any shape, int32 or int64 in [0, N).

        Padding is a row like any other here.

        Raises:
            IndexError, TypeError, ValueError: as in `TTEmbeddingBag.forward`.

        Cost: each different row is computed once.
        """
        self._check_integers("indices", indices)
        rows = self._compute(indices, None, None, "sum", bag_size=1, padding_idx=None)
        return rows.view(*indices.shape, self.embedding_dim)

    def to_dense(self) -> Tensor:
        """The whole table [N, D], differentiable with respect to the cores.

        Its gradient goes to the cores' `.grad`, past a fused optimiser.

        Cost: prod(p) * prod(q) numbers and as many again for the step before the last.
        """
        if self.fused_optimizer is not None:
            self.fused_optimizer.step()
        table: Tensor = self.cores[0].squeeze(1)  # [p_1 ... p_k, q_1 ... q_k, r_k]
        for core in self.cores[1:]:
            table = torch.einsum("aqr,brjs->abqjs", table, core).flatten(2, 3).flatten(0, 1)
        return table[: self.num_embeddings, : self.embedding_dim, 0]

    def statistics(self) -> dict[str, Any]:
        """Of the last forward and its backward: what they took.

        Keys: backend; flops (of the forward's products, those of cut pairs included); chunks (of
        the forward); workspace_bytes (most at one time, beside output, saved inputs and gradients
        of cores). flops and workspace_bytes are counted on "cpu" and "triton", and None elsewhere.
        """
        return dict(self._statistics)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """One update of the fused optimiser, at the end, for all backward passes inside.

        Raises:
            RuntimeError: there is no fused optimiser.
        """
        if self.fused_optimizer is None:
            raise RuntimeError("accumulate needs a fused optimiser: give optimizer= at the start")
        with self.fused_optimizer.accumulate():
            yield

    def extra_repr(self) -> str:
        """What nn.Module prints: sizes, shape, padding."""
        spec = self.spec
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, p={spec.p}, q={spec.q}, "
            f"ranks={spec.ranks}, padding_idx={self.padding_idx}"
        )

    # ---- how a batch is computed ----

    def _compute(
        self,
        input: Tensor,
        edges: Tensor | None,
        weights: Tensor | None,
        mode: str,
        *,
        bag_size: int,
        padding_idx: int | None,
    ) -> Tensor:
        """Bags [B, D]; edges [B + 1] int64, or None for bags of `bag_size`."""
        flat = input.reshape(-1)
        bags = len(edges) - 1 if edges is not None else len(flat) // max(bag_size, 1)
        if edges is None and bag_size == 0:
            bags = len(input)
        lookups = Lookups(flat, edges, bags, bag_size, padding_idx, mode, self.scale_grad_by_freq)
        cores = list(self.cores)
        spec = self._spec_now(cores[0].dtype)
        fused = self.fused_optimizer
        learns = torch.is_grad_enabled() and any(core.requires_grad for core in cores)
        ticket = None
        if fused is not None:
            if learns:
                ticket = fused.begin()
            else:
                fused.step_if_due()
        needs_graph = torch.is_grad_enabled() and (
            learns or (weights is not None and weights.requires_grad)
        )
        call = backend.start(
            self.backend, spec, cores, lookups, weights, needs_graph, self.max_workspace_bytes
        )
        self._statistics = call.statistics
        if not needs_graph:
            return call.forward([core.detach() for core in cores], weights)
        return _apply(call, ticket, weights, *cores)

    def _spec_now(self, dtype: torch.dtype) -> TTSpec:
        """The spec with the cores' dtype, which `double()` and `load_state_dict` may change.

        Raises TypeError when it has become one that cores cannot have.
        """
        if dtype is not self.spec.dtype:
            self.spec = replace(self.spec, dtype=dtype)
        return self.spec

    def _check_integers(self, name: str, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64; got {tensor.dtype}")
        self._check_device(name, tensor)

    def _check_device(self, name: str, tensor: Tensor) -> None:
        device = self.cores[0].device
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device} like the cores; got {tensor.device}")

    # ---- state ----

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if self.fused_optimizer is not None:
            self.fused_optimizer.step()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.fused_optimizer is not None:
            for name, tensor in self.fused_optimizer.state_for_module().items():
                destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest, own = dict(state_dict), prefix + "optimizer."
        found = {k.removeprefix(prefix): rest.pop(k) for k in state_dict if k.startswith(own)}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if self.fused_optimizer is None:
            unexpected_keys += [prefix + name for name in found] if strict else []
        elif not found:
            missing_keys += [prefix + n for n in self.fused_optimizer.state_for_module()]
        else:
            try:
                self.fused_optimizer.load_from_module(found)
            except ValueError as error:
                error_msgs.append(str(error))


class TTEmbeddingBag(TTTable):
    """Sums, means or maxima of rows of an [N, D] table that exists only as d small cores.

    Called like torch.nn.EmbeddingBag. Without `optimizer` the cores are ordinary parameters with
    dense gradients, so every torch optimiser works on them.

    Args:
        num_embeddings: N, rows of the table.
        embedding_dim: D, its columns.
        tt_ranks: one rank (three cores; 32 when neither this nor `spec` is given), or the d - 1
            ranks of d = 2, 3 or 4 cores; row and column factors are chosen for speed.
        spec: the whole shape instead of `tt_ranks`.
        mode: "mean" (as in torch), "sum" or "max".
        padding_idx: lookups of this row add nothing to a bag, do not count in its mean, and get no
            gradient.
        include_last_offset: offsets are [B + 1], the last one ends the last bag. Indices after it
            belong to no bag.
        scale_grad_by_freq: divide the gradient of a row by how often the batch asks for it.
        optimizer: "sgd", "adagrad", "slice_adagrad" or "adam": the cores are updated at the end of
            backward (`FusedOptimizer`); their `.grad` stays None. None: by an optimiser of yours.
        lr, eps, betas, weight_decay: of `optimizer`.
        init: "match-normal", "match-uniform", or a function like `initialisers.match_normal`.
        init_std: standard deviation of the table's entries at the start.
        generator: source of the initial numbers.
        max_norm: accepted to say that it cannot be had.
        max_workspace_bytes: what forward and backward may allocate besides output, saved inputs
            and gradients of cores; on "cpu" and "triton".
        backend: "auto", "reference" (float64, slow), "torch", "cpu" (C++; d = 2, 3) or "triton"
            (d = 2, 3; no max). auto is triton for cores on a GPU and cpu else, or torch where
            that cannot be had.
        device, dtype: of the cores; float32 (default) or float64.

    Raises:
        ValueError: a number is out of its range, a word is unknown, `spec` is for another table,
            or both tt_ranks and spec are given.
        TypeError: half precision.
        NotImplementedError: max_norm is given, or the backend has no such mode or d.

    Warns when the cores are not smaller than the dense table would be.
    Source: EcoRec, SC 2024; TT-Rec, MLSys 2021.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **kwargs: Any,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset
        super().__init__(num_embeddings, embedding_dim, **kwargs)

    def _check_backend(self) -> None:
        backend.check(self.backend, self.spec, self.mode, self.max_workspace_bytes)

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
                shape that does not fit; tensors on another device than the cores; a batch that
                does not fit into max_workspace_bytes.
            NotImplementedError: per_sample_weights with another mode than "sum".
            RuntimeError: in backward, when a core was written since the forward.

        Cost: one sort of V indices, 2 q1 q2 r1 r2 FLOPs a front pair, 2 D r2 a different row, V * D
        additions; three times that in the backward. On a GPU the checks wait for the indices.
        """
        self._check_integers("input", input)
        weights = self._checked_weights(input, per_sample_weights)
        edges = self._checked_edges(input, offsets)
        bag_size = input.shape[1] if input.ndim == 2 else 0
        return self._compute(
            input, edges, weights, self.mode, bag_size=bag_size, padding_idx=self.padding_idx
        )

    def plan(
        self, input: Tensor, offsets: Tensor | None = None, *, exact: bool = False
    ) -> BatchPlan:
        """How this batch would be computed: counts, FLOPs, direction, chunks, workspace.

        Args:
            input, offsets: as in `forward`.
            exact: also the least FLOPs that any choice of directions could have (a minimum cut).

        Raises:
            IndexError, TypeError, ValueError: as in `forward`.
        """
        self._check_integers("input", input)
        edges = self._checked_edges(input, offsets)
        bag_size = input.shape[1] if input.ndim == 2 else 0
        flat = input.reshape(-1)
        bags = len(edges) - 1 if edges is not None else len(input)
        lookups = Lookups(flat, edges, bags, bag_size, self.padding_idx, self.mode, False)
        cores = list(self.cores)
        spec = self._spec_now(cores[0].dtype)
        return backend.plan(self.backend, spec, cores, lookups, self.max_workspace_bytes, exact)

    def extra_repr(self) -> str:
        """What nn.Module prints: sizes, shape, padding, mode."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def _checked_edges(self, input: Tensor, offsets: Tensor | None) -> Tensor | None:
        """The [B + 1] edges of the bags; None for a 2-D input."""
        if input.ndim == 2:
            if offsets is not None:
                raise ValueError(
                    f"offsets must be None with a 2-D input; got shape {tuple(offsets.shape)}"
                )
            return None
        if offsets is None:
            raise ValueError("offsets must be given with a 1-D input; got None")
        self._check_integers("offsets", offsets)
        if offsets.ndim != 1:
            raise ValueError(f"offsets must be 1-D; got shape {tuple(offsets.shape)}")
        if self.include_last_offset and len(offsets) == 0:
            raise ValueError("offsets must have B + 1 >= 1 numbers with include_last_offset; got 0")
        edges, lookups = offsets.long(), len(input)
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


class TTEmbedding(TTTable):
    """Rows of an [N, D] table that exists only as d small cores; called like torch.nn.Embedding.

    Args:
        num_embeddings: N. embedding_dim: D.
        padding_idx: its row is zeros and gets no gradient.
        others: as in TTEmbeddingBag.

    Raises:
        ValueError, TypeError, NotImplementedError: as TTEmbeddingBag.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx=padding_idx, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """Rows [*, D] for `input` of any shape, int32 or int64 in [0, N).

        Raises:
            IndexError, TypeError, ValueError, RuntimeError: as in `TTEmbeddingBag.forward`.
        """
        self._check_integers("input", input)
        rows = self._compute(input, None, None, "sum", bag_size=1, padding_idx=self.padding_idx)
        return rows.view(*input.shape, self.embedding_dim)


class _Bags(torch.autograd.Function):
    """The bags of a Call; gradients go to the cores, or to the fused optimiser by its ticket."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, ticket: Ticket | None, weights: Tensor | None, *cores: Tensor
    ) -> Tensor:
        output = call.forward([core.detach() for core in cores], weights)
        ctx.call, ctx.ticket, ctx.cores = call, ticket, cores
        ctx.versions = [core._version for core in cores]
        ctx.save_for_backward(weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        for k, (core, version) in enumerate(zip(ctx.cores, ctx.versions, strict=True)):
            if core._version != version:
                raise RuntimeError(
                    f"core {k} was written between this forward and its backward (version "
                    f"{core._version}, then {version}): the gradient would be of neither"
                )
        (weights,) = ctx.saved_tensors
        _, _, of_weights, *wanted = ctx.needs_input_grad
        detached = [core.detach() for core in ctx.cores]
        gradients, weight_gradient = ctx.call.backward(
            detached, weights, gradient, list(wanted), of_weights
        )
        if ctx.ticket is not None:
            ctx.ticket.finish(gradients)
            gradients = [None] * len(gradients)
        return None, None, weight_gradient, *gradients


# Untyped in torch.
_apply: Callable[..., Tensor] = cast(Any, _Bags).apply


def _spec_of(
    num_embeddings: int,
    embedding_dim: int,
    tt_ranks: int | Sequence[int] | None,
    spec: TTSpec | None,
    dtype: torch.dtype | None,
) -> TTSpec:
    if spec is None:
        ranks = 32 if tt_ranks is None else tt_ranks
        found = suggest(
            num_embeddings,
            embedding_dim,
            rank=ranks,
            ndim=len(ranks) + 1 if isinstance(ranks, Sequence) else 3,
        )
        return replace(found, dtype=dtype or torch.float32)
    if tt_ranks is not None:
        raise ValueError(f"tt_ranks and spec exclude each other; got {tt_ranks} and {spec}")
    for name, given, of_spec in (
        ("num_embeddings", num_embeddings, spec.num_embeddings),
        ("embedding_dim", embedding_dim, spec.embedding_dim),
        ("dtype", dtype or spec.dtype, spec.dtype),
    ):
        if given != of_spec:
            raise ValueError(f"{name} must be that of spec, {of_spec}; got {given}")
    return spec


def _check_cores(cores: Sequence[Tensor], spec: TTSpec) -> None:
    found = [tuple(core.shape) for core in cores]
    if found != list(spec.core_shapes) or any(core.dtype != spec.dtype for core in cores):
        raise ValueError(
            f"init must return {spec.dtype} cores of shapes {list(spec.core_shapes)}; got {found}"
        )
