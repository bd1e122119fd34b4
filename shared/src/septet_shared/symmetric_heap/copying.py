"""Copies between ranks' memory that are larger than the caches."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from septet_shared import native
from septet_shared.symmetric_heap.flags import library

STREAM_BYTES = 2 << 20  # from here on, going past the caches is faster on the machines seen


def copy_(target: Tensor, source: Tensor) -> Tensor:
    """`target`, after `target.copy_(source)`; large copies go past the caches.

    `copy_(heap.peer(t, rank), rows)` puts, `copy_(rows, heap.peer(t, rank))` gets. Contiguous
    tensors of one dtype and shape in host memory are streamed from 2 MiB on where torch has one
    thread; all else is left to torch. They must not overlap.

    Raises:
        RuntimeError: the shapes do not fit, as torch says.

    Cost: 1.4 times less than torch's copy for 8 MiB on each of 2 cores; the same below 2 MiB.
    """
    if (
        target.nbytes >= STREAM_BYTES
        and torch.get_num_threads() == 1
        and target.device.type == source.device.type == "cpu"
        and (target.dtype, target.shape) == (source.dtype, source.shape)
        and target.is_contiguous()
        and source.is_contiguous()
        and not (target.requires_grad or source.requires_grad)
        and not (target.is_conj() or source.is_conj() or target.is_neg() or source.is_neg())
        and (stream := _stream()) is not None
    ):
        torch.autograd.graph.increment_version(target)
        stream(target.data_ptr(), source.data_ptr(), target.nbytes)
        return target
    return target.copy_(source)


@functools.cache
def _stream() -> Callable[[int, int, int], None] | None:
    try:
        function: Callable[[int, int, int], None] = library().heap_stream
    except native.NativeUnavailable:
        return None
    return function
