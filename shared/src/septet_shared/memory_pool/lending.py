"""How memory is lent: through a storage whose death is seen, in a tensor that can be ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Shape = int | Sequence[int]


Memory = Tensor | np.ndarray[Any, Any]  # uint8, one dimension: on CUDA a tensor, on CPU its array


def new_memory(nbytes: int, device: torch.device) -> Memory:
    """Uninitialised memory of one's own."""
    with torch.inference_mode(False):
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return memory if memory.is_cuda else memory.numpy()


def lend(
    memory: Memory,
    start: int,
    end: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    returned: Callable[[Any], None] | None = None,
) -> tuple[Tensor, weakref.ref[Any]]:
    """A tensor with a storage of its own over memory[start:end], and a weak reference that dies,
    calling `returned`, when that storage does: torch keeps the object whose memory it wraps alive
    for exactly as long.
    """
    if torch.is_inference_mode_enabled():  # what is lent should work outside of it, too
        with torch.inference_mode(False):
            return lend(memory, start, end, shape, dtype, returned)
    lease: Any
    if isinstance(memory, np.ndarray):
        lease = memory[start:end]
        wrapped = torch.from_numpy(lease)
    else:
        part = memory[start:end]
        lease = CudaBytes(part.data_ptr(), len(part), part)
        wrapped = torch.as_tensor(lease, device=memory.device)
    # A view of `wrapped` would keep it, and be held by whatever asks for its base.
    tensor = torch.empty(0, dtype=dtype, device=wrapped.device)
    tensor.set_(wrapped.untyped_storage(), 0, shape)  # type: ignore[call-overload]
    return tensor, weakref.ref(lease, returned)


class CudaBytes:
    """Device memory as torch takes it from others, holding this object for as long as it does."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def end(ref: weakref.ref[Tensor]) -> None:
    """Makes the tensor, if it is still there, a `meta` tensor of its shape.

    Only the Python object changes. What a view, a graph or a DLPack capsule holds is the tensor
    under it, which keeps its storage.
    """
    if (tensor := ref()) is not None and not tensor.is_meta:
        gone = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        torch._C._swap_tensor_impl(tensor, gone)


def aligned(nbytes: int, to: int = 64) -> int:
    """The least multiple of `to` that holds nbytes."""
    return -(-nbytes // to) * to


def measured(shape: Shape, dtype: torch.dtype) -> tuple[tuple[int, ...], int]:
    """The shape as a tuple, and its bytes; ValueError and TypeError for what is none."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype; got {dtype!r}")
    nbytes = dtype.itemsize
    for size in sizes:
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"shape must hold integers >= 0; got {sizes}")
        nbytes *= size
    return sizes, nbytes


def checked_device(device: str | torch.device) -> torch.device:
    """The device, a CUDA one with its index; ValueError unless it is there."""
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    if (found.index or 0) >= count:
        raise ValueError(f"device must be cpu, or one of {count} CUDA devices; got {str(device)!r}")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
