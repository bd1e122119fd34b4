"""Bags of a tensor-train table in Triton kernels: forward and backward without atomics.

Both products of a row are one kernel, rows times the matrix of their group: G1[i1] times G2[i2] for
the slots of an i2, then G3[i3] times the slot's product for its rows (`triton_batch` says what a
slot is). So are the two gradients of left factors; those of matrices are sums of outer products.
Every sum runs in an order that the batch and the workspace decide: reruns have the same bits.
What bounds a kernel is in its header.
Source: EcoRec, SC 2024.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import Lookups, check_indices
from .shapes import TTSpec
from .triton_batch import Chunk, Groups, SortedBatch, sort_batch

_TILE = 2048  # numbers that a program gathers at once: with more, some spill


class TritonCall:
    """One forward and, maybe, its backward, in Triton kernels.

    Raises:
        IndexError: an index outside [0, N).
        ModuleNotFoundError: Triton is not installed.
        ValueError: the cores are not on a CUDA device (nor are kernels interpreted), or the batch
            does not fit into the workspace.
    """

    def __init__(
        self, spec: TTSpec, lookups: Lookups, needs_graph: bool, max_workspace_bytes: int
    ) -> None:
        device = lookups.flat.device
        _check_device(device)
        check_indices(lookups.flat, spec)
        edges = lookups.edges
        if edges is None:
            edges = torch.arange(lookups.bags + 1, device=device) * lookups.bag_size
        in_bags = int(edges[-1])
        self._kept = None  # the positions that count, None for all of them
        if lookups.padding_idx is not None:
            kept = lookups.flat[:in_bags] != lookups.padding_idx
            edges = F.pad(kept.cumsum(0), (1, 0))[edges]
            self._kept = kept.nonzero()[:, 0]
        elif in_bags < len(lookups.flat):
            self._kept = torch.arange(in_bags, device=device)
        self._spec, self._lookups = spec, lookups
        flat = lookups.flat if self._kept is None else lookups.flat[self._kept]
        self._batch = sort_batch(spec, flat, edges, max_workspace_bytes, needs_graph)
        self.statistics: dict[str, Any] = {
            "backend": "triton",
            "workspace_bytes": self._batch.workspace_bytes,
            "chunks": len(self._batch.chunks),
            "flops": spec.flops(self._batch.rows, self._batch.slots),
        }

    def forward(self, cores: list[Tensor], weights: Tensor | None) -> Tensor:
        """Bags [B, D]; weights [V]."""
        mode, dim = self._lookups.mode, self._spec.embedding_dim
        return forward(self._batch, cores, self._pick(weights), mode, dim)

    def backward(
        self,
        cores: list[Tensor],
        weights: Tensor | None,
        gradient: Tensor,
        wanted: list[bool],
        weights_wanted: bool,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Gradients of the wanted cores, and of the weights [V]."""
        found, of_weights = backward(
            self._batch,
            cores,
            self._pick(weights),
            self._lookups.mode,
            gradient,
            self._lookups.by_frequency,
            wanted,
            weights_wanted,
        )
        if of_weights is not None and self._kept is not None:
            of_kept, of_weights = of_weights, of_weights.new_zeros(len(self._lookups.flat))
            of_weights[self._kept] = of_kept
        return found, of_weights

    def _pick(self, weights: Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        return weights.detach().contiguous() if self._kept is None else weights[self._kept]


def forward(
    batch: SortedBatch, cores: Sequence[Tensor], weights: Tensor | None, mode: str, dim: int
) -> Tensor:
    """Bags [B, D] of the cores' dtype; empty ones are 0.

    Args:
        batch: what to look up.
        cores: two or three [p_k, r_(k-1), q_k, r_k], float32 or float64, of the batch's spec.
        weights: [V] of the cores' dtype, contiguous, by position among the indices; with "sum".
        mode: "sum" or "mean".
        dim: D <= prod q.

    Cost: 2 * R * q1 * q2 * r1 * r2 + 2 * U * prod(q) * r2 FLOPs, V * prod(q) additions.
    """
    g1, g2, g3 = _three(cores)
    output = g2.new_zeros(batch.bags, dim)
    kernels = _Kernels(batch, g2, backward=False)
    with torch.cuda.device(_cuda_index(output)):
        for chunk in batch.chunks:
            kernels.multiply_pairs(chunk, g1, g2)
            kernels.multiply_rows(chunk, g3)
            kernels.add_to_bags(chunk, weights, mode, output)
    return output


def backward(
    batch: SortedBatch,
    cores: Sequence[Tensor],
    weights: Tensor | None,
    mode: str,
    gradient: Tensor,
    by_frequency: bool,
    wanted: Sequence[bool],
    weights_wanted: bool,
) -> tuple[list[Tensor | None], Tensor | None]:
    """(the gradient of each core or None, the gradient [V] of the weights or None).

    Args:
        batch, cores, weights, mode: of the forward.
        gradient: [B, D] of the bags, any strides.
        by_frequency: whether the gradient of a row is divided by how often its index occurs; that
            of the weights is not.
        wanted: of which cores.
        weights_wanted: whether that of the weights too.

    Cost: the products of the forward again and twice their FLOPs for gradients, V * prod(q)
    additions, sorts of U and of R keys.
    """
    g1, g2, g3 = _three(cores)
    want1, want2, want3 = [False] * (3 - len(cores)) + list(wanted)
    into1, into2, into3 = (
        g.new_zeros(g.shape if want else 0)
        for g, want in zip((g1, g2, g3), (want1, want2, want3), strict=True)
    )
    of_weights = g2.new_empty(batch.lookups) if weights_wanted else None
    of_bags = gradient
    if mode == "mean":
        of_bags = gradient / batch.bag_sizes.clamp(min=1)[:, None]
    counts = batch.index_counts() if by_frequency else None
    by_i1 = batch.slots_by_i1() if want1 else None
    by_i3 = batch.rows_by_i3() if want3 else None
    kernels = _Kernels(batch, g2, backward=True)
    with torch.cuda.device(_cuda_index(g2)):
        for chunk in batch.chunks:
            kernels.multiply_pairs(chunk, g1, g2)
            if of_weights is not None:
                kernels.multiply_rows(chunk, g3)
                kernels.dot_rows(chunk, gradient, of_weights)
            if any(wanted):
                kernels.sum_bag_gradients(chunk, of_bags, weights, counts)
            if by_i3 is not None:
                kernels.add_to_last(chunk, *by_i3, into3)
            if want1 or want2:
                kernels.sum_product_gradients(chunk, g3)
            if want2:
                kernels.add_to_middle(chunk, g1, into2)
            if by_i1 is not None:
                kernels.add_to_first(chunk, g2, *by_i1, into1)
    found = zip((into1, into2, into3)[3 - len(cores) :], cores, wanted, strict=True)
    return [into.view(core.shape) if want else None for into, core, want in found], of_weights


def _check_device(device: torch.device) -> None:
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"backend 'triton' needs cores on a CUDA device; they are on {device} (with "
            "TRITON_INTERPRET=1 from the start, kernels are interpreted on the CPU, slowly)"
        )


def _cuda_index(tensor: Tensor) -> int:
    """The device that kernels are launched on; -1 changes nothing."""
    return tensor.device.index if tensor.is_cuda else -1


def _three(cores: Sequence[Tensor]) -> list[Tensor]:
    """G1 [p1, q1, r1], G2 [p2, r1, q2 * r2], G3 [p3, r2, q3], contiguous."""
    found = [core.detach().contiguous() for core in cores]
    if len(found) == 2:
        found.insert(0, found[0].new_ones(1, 1, 1, 1))
    return [found[0].squeeze(1), found[1].flatten(2), found[2].squeeze(3)]


class _Rows(NamedTuple):
    """Operand [items, J, *] of a kernel: item t is tensor[at[t]], or the t-th of the chunk."""

    tensor: Tensor
    at: Tensor | None
    strides: tuple[int, int, int]


class _Span(NamedTuple):
    """Groups of items: [G] the first of each, [G] its end. Of the chunk: first item, how many."""

    begin: Tensor
    end: Tensor
    first_item: int
    items: int


class _Kernels:
    """The kernels of one call, chunk by chunk in the same buffers."""

    def __init__(self, batch: SortedBatch, like: Tensor, backward: bool) -> None:
        s = batch.shape
        self.batch, self.shape = batch, s
        rows = max((len(chunk.rows) for chunk in batch.chunks), default=0)
        slots = max((len(chunk.slots) for chunk in batch.chunks), default=0)
        self.product = like.new_empty(slots, s.q1, s.q2 * s.r2)
        # A row, later its gradient. q3 comes first, so that a slot's rows are one dense tile.
        self.value = like.new_empty(rows, s.q3, s.q1 * s.q2)
        if backward:
            self.product_gradient = like.new_empty(slots, s.q1, s.q2 * s.r2)
            self.first_gradient = like.new_empty(slots, s.q1, s.r1)
            self.last_gradient = like.new_empty(rows, s.q3, s.r2)

    def multiply_pairs(self, chunk: Chunk, g1: Tensor, g2: Tensor) -> None:
        """product[slot] = G1[i1] @ G2[i2]."""
        s = self.shape
        span, i2 = self._slots_of(self.batch.tiles, chunk)
        left = _Rows(g1, self.batch.slot_i1, (s.q1 * s.r1, s.r1, 1))
        strides = (s.r1 * s.q2 * s.r2, s.q2 * s.r2, 1)
        _multiply_groups(left, g2, i2, strides, self.product, span, (s.q1, s.r1, s.q2 * s.r2))

    def multiply_rows(self, chunk: Chunk, g3: Tensor) -> None:
        """value[row] = (product[slot] @ G3[i3])^T."""
        s = self.shape
        left = _Rows(g3, self.batch.row_i3, (s.r2 * s.q3, 1, s.q3))
        strides = (s.q1 * s.q2 * s.r2, 1, s.r2)
        span, sizes = self._rows_of_slots(chunk), (s.q3, s.r2, s.q1 * s.q2)
        _multiply_groups(left, self.product, None, strides, self.value, span, sizes)

    def add_to_bags(self, chunk: Chunk, weights: Tensor | None, mode: str, output: Tensor) -> None:
        """output[bag] += value[row], for each entry of the chunk."""
        s, batch = self.shape, self.batch
        _sum_segments(
            self.value.flatten(1),
            batch.pooled_row,
            *_of_chunk(batch.segments, chunk),
            output,
            length=batch.lookups / len(batch.segments.digit),
            inner=s.q1 * s.q2,
            outer=s.q3,
            scale=None if weights is None else (weights, batch.pooled_position),
            divisor=batch.bag_sizes if mode == "mean" else None,
            accumulate=True,
        )

    def dot_rows(self, chunk: Chunk, gradient: Tensor, out: Tensor) -> None:
        """out[position] = value[row] . gradient[bag], for each entry of the chunk."""
        from .kernels.weight_gradient import dot_rows_kernel

        s, batch, dim = self.shape, self.batch, gradient.shape[1]
        rows = len(chunk.rows)
        block_c = min(64, _power_of_two(dim))
        block_k = _block_for(batch.lookups / batch.rows, (1, 4, 16))
        block_s = max(1, _TILE // (block_c * block_k))
        dot_rows_kernel[(-(-rows // block_s),)](
            self.value,
            gradient,
            batch.entry_bag,
            batch.entry_position,
            batch.row_first[chunk.rows.start : chunk.rows.stop + 1],
            out,
            rows,
            s.q1 * s.q2 * s.q3,
            *gradient.stride(),
            dim,
            INNER=s.q3,
            OUTER=s.q1 * s.q2,
            BLOCK_S=block_s,
            BLOCK_K=block_k,
            BLOCK_C=block_c,
        )

    def sum_bag_gradients(
        self, chunk: Chunk, gradient: Tensor, weights: Tensor | None, counts: Tensor | None
    ) -> None:
        """value[row] = the sum of gradient[bag] over its entries."""
        s, batch = self.shape, self.batch
        _sum_segments(
            gradient,
            batch.entry_bag,
            batch.row_first[chunk.rows.start : chunk.rows.stop + 1],
            None,
            self.value.flatten(1),
            length=batch.lookups / batch.rows,
            inner=s.q3,
            outer=s.q1 * s.q2,
            scale=None if weights is None else (weights, batch.entry_position),
            divisor=None if counts is None else counts[chunk.rows.start : chunk.rows.stop],
        )

    def add_to_last(self, chunk: Chunk, order: Tensor, groups: Groups, into: Tensor) -> None:
        """into[i3] += (value[row] @ product[slot])^T, for each row of the chunk."""
        s = self.shape
        strides = (s.q1 * s.q2 * s.r2, s.r2, 1)
        span, sizes = self._rows_of_slots(chunk), (s.q3, s.q1 * s.q2, s.r2)
        _multiply_groups(
            self._values(), self.product, None, strides, self.last_gradient, span, sizes
        )
        _sum_segments(
            self.last_gradient.flatten(1),
            order - chunk.rows.start,
            *_of_chunk(groups, chunk),
            into.flatten(1),
            length=self.batch.rows / len(groups.digit),
            inner=s.r2,
            outer=s.q3,
            accumulate=True,
        )

    def sum_product_gradients(self, chunk: Chunk, g3: Tensor) -> None:
        """product_gradient[slot] = the sum of value[row]^T @ G3[i3]^T over its rows."""
        s = self.shape
        right = _Rows(g3, self.batch.row_i3, (s.r2 * s.q3, 1, s.q3))
        span, sizes = self._rows_of_slots(chunk), (s.q3, s.q1 * s.q2, s.r2)
        _sum_outer_products(self._values(), right, self.product_gradient, None, span, sizes)

    def add_to_middle(self, chunk: Chunk, g1: Tensor, into: Tensor) -> None:
        """into[i2] += the sum of G1[i1]^T @ product_gradient[slot] over its slots."""
        s = self.shape
        span, i2 = self._slots_of(self.batch.groups, chunk)
        left = _Rows(g1, self.batch.slot_i1, (s.q1 * s.r1, s.r1, 1))
        right, sizes = self._product_gradients(), (s.q1, s.r1, s.q2 * s.r2)
        _sum_outer_products(left, right, into, i2, span, sizes)

    def add_to_first(
        self, chunk: Chunk, g2: Tensor, order: Tensor, groups: Groups, into: Tensor
    ) -> None:
        """into[i1] += product_gradient[slot] @ G2[i2]^T, for each slot of the chunk."""
        s = self.shape
        span, i2 = self._slots_of(self.batch.tiles, chunk)
        strides, sizes = (s.r1 * s.q2 * s.r2, 1, s.q2 * s.r2), (s.q1, s.q2 * s.r2, s.r1)
        _multiply_groups(
            self._product_gradients(), g2, i2, strides, self.first_gradient, span, sizes
        )
        _sum_segments(
            self.first_gradient.flatten(1),
            order - chunk.slots.start,
            *_of_chunk(groups, chunk),
            into.flatten(1),
            length=self.batch.slots / len(groups.digit),
            inner=s.q1 * s.r1,
            outer=1,
            accumulate=True,
        )

    def _values(self) -> _Rows:
        s = self.shape
        return _Rows(self.value, None, (s.q3 * s.q1 * s.q2, s.q1 * s.q2, 1))

    def _product_gradients(self) -> _Rows:
        s = self.shape
        return _Rows(self.product_gradient, None, (s.q1 * s.q2 * s.r2, s.q2 * s.r2, 1))

    def _rows_of_slots(self, chunk: Chunk) -> _Span:
        slots = slice(chunk.slots.start, chunk.slots.stop)
        begin, end = self.batch.slot_begin[slots], self.batch.slot_end[slots]
        return _Span(begin, end, chunk.rows.start, len(chunk.rows))

    def _slots_of(self, groups: Groups, chunk: Chunk) -> tuple[_Span, Tensor]:
        first, i2 = _of_chunk(groups, chunk)
        return _Span(first[:-1], first[1:], chunk.slots.start, len(chunk.slots)), i2


def _multiply_groups(
    left: _Rows,
    matrix: Tensor,
    matrix_index: Tensor | None,
    matrix_strides: tuple[int, int, int],
    out: Tensor,
    span: _Span,
    sizes: tuple[int, int, int],
) -> None:
    """out[t] = left[t] @ matrix[group]; sizes are J, K, C, strides those of group, K, C."""
    from .kernels.grouped_product import multiply_groups_kernel

    j, k, c = sizes
    block_n = _block_for(span.items * j / len(span.begin), (16, 64))
    block_k, block_c = min(32, _dot_block(k)), min(64, _dot_block(c))
    multiply_groups_kernel[(len(span.begin), -(-c // block_c))](
        left.tensor,
        left.at,
        matrix,
        matrix_index,
        out,
        span.begin,
        span.end,
        span.first_item,
        *left.strides,
        *matrix_strides,
        J=j,
        K=k,
        C=c,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_C=block_c,
        num_warps=_warps_for(block_n * block_c),
    )


def _sum_outer_products(
    left: _Rows,
    right: _Rows,
    out: Tensor,
    out_index: Tensor | None,
    span: _Span,
    sizes: tuple[int, int, int],
) -> None:
    """out[group] = sum of left[t]^T @ right[t]; with out_index added there. Sizes are J, A, C."""
    from .kernels.outer_products import sum_outer_products_kernel

    j, a, c = sizes
    block_n = _block_for(span.items * j / len(span.begin), (16, 32))
    block_a, block_c = min(32, _dot_block(a)), min(64, _dot_block(c))
    tiles = -(-a // block_a) * -(-c // block_c)
    sum_outer_products_kernel[(len(span.begin), tiles)](
        left.tensor,
        left.at,
        right.tensor,
        right.at,
        out,
        out_index,
        span.begin,
        span.end,
        span.first_item,
        *left.strides,
        *right.strides,
        J=j,
        A=a,
        C=c,
        BLOCK_N=block_n,
        BLOCK_A=block_a,
        BLOCK_C=block_c,
        num_warps=_warps_for(block_a * block_c),
    )


def _sum_segments(
    source: Tensor,
    index: Tensor,
    first: Tensor,
    target: Tensor | None,
    out: Tensor,
    *,
    length: float,
    inner: int,
    outer: int,
    scale: tuple[Tensor, Tensor] | None = None,
    divisor: Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """out[target[s]] = sum of source[index[k]] over segment s, of `length` on the average."""
    from .kernels.segment_sum import sum_segments_kernel

    columns, segments = inner * outer, len(first) - 1
    block_c = min(128, _power_of_two(columns))
    block_k = _block_for(length, (1, 4, 16))
    block_s = max(1, _TILE // (block_c * block_k))
    sum_segments_kernel[(-(-segments // block_s), -(-columns // block_c))](
        source,
        index,
        *(scale or (None, None)),
        first,
        target,
        divisor,
        out,
        segments,
        *source.stride(),
        out.stride(0),
        source.shape[1],
        out.shape[1],
        INNER=inner,
        OUTER=outer,
        BLOCK_S=block_s,
        BLOCK_K=block_k,
        BLOCK_C=block_c,
        ACCUMULATE=accumulate,
    )


def _of_chunk(groups: Groups, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """[G + 1] the first of each group of a chunk, and the end; [G] their digits."""
    a, b = groups.bounds[chunk.number], groups.bounds[chunk.number + 1]
    return groups.first[a : b + 1], groups.digit[a:b]


def _power_of_two(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


def _dot_block(number: int) -> int:
    """The same, and no less than what a dot wants."""
    return max(16, _power_of_two(number))


def _block_for(length: float, blocks: tuple[int, ...]) -> int:
    """The first block that most groups of this mean length fit; few sizes, as each is compiled."""
    return next((block for block in blocks if length <= 1.5 * block), blocks[-1])


def _warps_for(outputs: int) -> int:
    """Eight results of a dot for each thread (16 in the largest tile): with more, some spill."""
    return max(1, min(8, outputs // 256))
