"""Which code computes a batch: the reference, torch operations, C++ or Triton; one call of it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from septet_shared import native

from . import reference
from .contraction import BatchPlan
from .shapes import TTSpec
from .torch_backend import unique_rows

BACKENDS = ("auto", "reference", "torch", "cpu", "triton")


class Lookups(NamedTuple):
    """What a batch asks for; arguments are checked, indices are not yet.

    flat: [V] int32 or int64. edges: [B + 1] int64 on the same device, or None for bags of
    `bag_size` each. bags: B. by_frequency: divide a row's gradient by how often it is asked for.
    """

    flat: Tensor
    edges: Tensor | None
    bags: int
    bag_size: int
    padding_idx: int | None
    mode: str
    by_frequency: bool


class Call(Protocol):
    """One forward and, maybe, its backward."""

    statistics: dict[str, Any]

    def forward(self, cores: list[Tensor], weights: Tensor | None) -> Tensor:
        """Bags [B, D]; weights [V]."""

    def backward(
        self,
        cores: list[Tensor],
        weights: Tensor | None,
        gradient: Tensor,
        wanted: list[bool],
        weights_wanted: bool,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Gradients of the wanted cores, and of the weights [V]."""


def check(name: str, spec: TTSpec, mode: str, max_workspace_bytes: int) -> None:
    """Raise for what no batch could make right.

    Raises:
        ValueError: an unknown backend, or a workspace below 1 byte.
        NotImplementedError: the backend named has no such d or mode; names one that has.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    if max_workspace_bytes < 1:
        raise ValueError(f"max_workspace_bytes must be at least 1; got {max_workspace_bytes}")
    if name in ("cpu", "triton") and len(spec.p) > 3:
        raise NotImplementedError(
            f"backend {name!r} has 2 or 3 cores, this table {len(spec.p)}; backend 'torch' has them"
        )
    if name == "triton" and mode == "max":
        raise NotImplementedError("backend 'triton' has no max; backends 'cpu' and 'torch' have it")


def start(
    name: str,
    spec: TTSpec,
    cores: Sequence[Tensor],
    lookups: Lookups,
    weights: Tensor | None,
    needs_graph: bool,
    max_workspace_bytes: int,
) -> Call:
    """A call of the backend, its indices checked and, on "cpu" and "triton", sorted.

    Raises:
        IndexError: an index outside [0, N), with its position.
        ValueError: the batch does not fit into the workspace, or the backend is for other devices.
        NotImplementedError: a batch of 2^31 or more lookups on "cpu".
    """
    chosen = _chosen(name, spec, cores[0].device, lookups)
    if chosen == "cpu":
        from .cpu_backend import CpuCall

        return CpuCall(spec, lookups, weights, needs_graph, max_workspace_bytes)
    if chosen == "triton":
        from .triton_backend import TritonCall

        return TritonCall(spec, lookups, needs_graph, max_workspace_bytes)
    return TorchCall(chosen, spec, lookups)


def _chosen(name: str, spec: TTSpec, device: torch.device, lookups: Lookups) -> str:
    small = len(lookups.flat) < 2**31 and spec.num_embeddings < 2**32
    if name == "auto":
        if len(spec.p) > 3:
            return "torch"
        if device.type == "cuda":
            return "triton" if lookups.mode != "max" and _has_triton() else "torch"
        return "cpu" if device.type == "cpu" and small and _builds() else "torch"
    if name == "cpu":
        if device.type != "cpu":
            raise ValueError(f"backend 'cpu' needs cores on the CPU; they are on {device}")
        if not small:
            raise NotImplementedError(
                f"backend 'cpu' takes less than 2^31 lookups of less than 2^32 rows; got "
                f"{len(lookups.flat)} of {spec.num_embeddings}; backend 'torch' takes them"
            )
        if not _builds():
            return "torch"
    return name


@native.fallback(lambda: False)
def _builds() -> bool:
    from .cpu_backend import library

    library()
    return True


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def available() -> dict[str, str]:
    """Each backend: "available", or why not."""
    found = {"reference": "available", "torch": "available", "cpu": "available"}
    if native.available() is None:
        found["cpu"] = "no C++ compiler: install g++"
    if not _has_triton():
        found["triton"] = "triton is not installed"
    elif torch.cuda.is_available():
        found["triton"] = "available"
    else:
        found["triton"] = "no GPU; kernels run in the interpreter, for tests"
    return found


def check_indices(flat: Tensor, spec: TTSpec) -> None:
    """Raise IndexError with the first index outside [0, N)."""
    outside = (flat < 0) | (flat >= spec.num_embeddings)
    if outside.any():
        position = int(outside.nonzero()[0])
        raise index_error(spec, position, int(flat[position]))


def index_error(spec: TTSpec, position: int, value: int) -> IndexError:
    """What an index outside [0, N) raises."""
    return IndexError(
        f"input must be in [0, {spec.num_embeddings}), the rows of this table of "
        f"{spec.num_embeddings} x {spec.embedding_dim}; got {value} at position {position} of the "
        f"flattened input"
    )


class TorchCall:
    """Plain torch operations (or, slow, the reference), gradients by autograd inside."""

    def __init__(self, name: str, spec: TTSpec, lookups: Lookups) -> None:
        check_indices(lookups.flat, spec)
        self.name, self.spec = name, spec
        self.mode, self.by_frequency = lookups.mode, lookups.by_frequency
        flat = lookups.flat.long()
        edges = lookups.edges
        if edges is None:
            edges = torch.arange(lookups.bags + 1, device=flat.device) * lookups.bag_size
        self.kept = torch.arange(int(edges[-1]), device=flat.device)
        if lookups.padding_idx is not None:
            in_bags = flat[self.kept] != lookups.padding_idx
            edges = F.pad(in_bags.cumsum(0), (1, 0))[edges]
            self.kept = self.kept[in_bags]
        self.indices, self.edges, self.positions = flat[self.kept], edges, len(flat)
        self.statistics: dict[str, Any] = {
            "backend": name,
            "workspace_bytes": None,
            "chunks": 1,
            "flops": None,
        }
        self._graph: tuple[list[Tensor], Tensor | None, Tensor] | None = None

    def forward(self, cores: list[Tensor], weights: Tensor | None) -> Tensor:
        """Bags [B, D]."""
        with torch.enable_grad():
            leaves = [core.requires_grad_() for core in cores]
            leaf = None if weights is None else weights.detach().requires_grad_()
            output = self._bags(leaves, leaf)
        self._graph = (leaves, leaf, output)
        return output.detach()

    def backward(
        self,
        cores: list[Tensor],
        weights: Tensor | None,
        gradient: Tensor,
        wanted: list[bool],
        weights_wanted: bool,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Gradients of the wanted cores, and of the weights [V]."""
        assert self._graph is not None
        leaves, leaf, output = self._graph
        asked = [x for x, want in zip(leaves, wanted, strict=True) if want]
        asked += [leaf] if weights_wanted and leaf is not None else []
        if output.requires_grad:
            found = list(
                torch.autograd.grad(
                    output, asked, gradient, retain_graph=True, materialize_grads=True
                )
            )
        else:
            found = [torch.zeros_like(x) for x in asked]
        of_weights = found.pop() if weights_wanted and leaf is not None else None
        rest = iter(found)
        return [next(rest) if want else None for want in wanted], of_weights

    def _bags(self, cores: list[Tensor], weights: Tensor | None) -> Tensor:
        kept = None if weights is None else weights[self.kept]
        dim = self.spec.embedding_dim
        uniques, place, counts = torch.unique(self.indices, return_inverse=True, return_counts=True)
        if self.name == "reference":
            rows = reference.rows(cores, uniques.cpu(), dim)
        else:
            rows = unique_rows(cores, uniques)[:, :dim]
        if self.by_frequency:  # the same numbers; their gradients are divided
            still = rows.detach()
            rows = still + (rows - still) / counts[:, None].to(rows)
        if len(self.edges) == 1:
            return rows.sum() * rows.new_zeros(0, dim)
        # Without the last offset, which torch counts wrong in some modes; all indices are in bags.
        bags = F.embedding_bag(
            place,
            rows,
            self.edges[:-1],
            mode=self.mode,
            per_sample_weights=None if kept is None else kept.to(rows),
        )
        return bags.to(cores[0].dtype)


def plan(
    name: str,
    spec: TTSpec,
    cores: Sequence[Tensor],
    lookups: Lookups,
    max_workspace_bytes: int,
    exact: bool,
) -> BatchPlan:
    """The BatchPlan of a batch, as `start` would run it."""
    chosen = _chosen(name, spec, cores[0].device, lookups)
    call = TorchCall("torch", spec, lookups)
    chunks, workspace_bytes = 1, 0
    if chosen == "cpu":
        from .cpu_backend import CpuCall

        planned = CpuCall(spec, lookups, None, True, max_workspace_bytes)
        chunks, workspace_bytes = planned.foreseen()
    return BatchPlan.of(
        torch.unique(call.indices),
        spec,
        lookups=len(call.indices),
        chunks=chunks,
        workspace_bytes=workspace_bytes,
        exact=exact,
    )
