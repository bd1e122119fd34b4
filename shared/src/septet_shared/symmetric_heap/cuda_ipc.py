"""Memory of the GPUs of one machine, by CUDA's inter-process handles through CuPy.

The logic is tested with a fake of `cupy.cuda.runtime`; not run on a GPU where this was written.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from septet_shared.memory_pool.lending import CudaBytes
from septet_shared.symmetric_heap.memory import Memory, together

if TYPE_CHECKING:
    from septet_shared.ranks import Ranks


class CudaIpcMemory(Memory):
    """Device memory, exported by its rank and opened by every other.

    Args:
        ranks: on GPUs that reach each other; two ranks may share one.
        runtime: `cupy.cuda.runtime`, or what stands for it in a test.
        over: (address, nbytes, device) -> uint8 tensor; a test replaces it together with runtime.
    """

    backend = "cuda_ipc"
    on_stream = True

    def __init__(self, ranks: Ranks, runtime: Any = None, over: Any = None) -> None:
        self._cuda = runtime or importlib.import_module("cupy.cuda.runtime")
        self._over, self._ranks = over or _over, ranks
        self.device = ranks.device
        self._own: list[int] = []
        self._opened: list[int] = []

    def segment(self, nbytes: int) -> list[Tensor]:
        """As `Memory.segment`. Raises HeapUnavailable on every rank when CUDA refuses on one."""
        own, handle = together(self._ranks, lambda: self._export(nbytes))
        handles = self._ranks.all_gather_object(handle)

        def open_all() -> list[int]:
            mine = self._ranks.rank
            return [own if r == mine else self._open(h) for r, h in enumerate(handles)]

        return [self._over(a, nbytes, self.device) for a in together(self._ranks, open_all)]

    def unmap_peers(self) -> None:
        """As `Memory.unmap_peers`."""
        while self._opened:
            self._cuda.ipcCloseMemHandle(self._opened.pop())

    def free(self) -> None:
        """As `Memory.free`."""
        while self._own:
            self._cuda.free(self._own.pop())

    def _export(self, nbytes: int) -> tuple[int, bytes]:
        # Not torch's allocator: a handle exports the whole allocation that an address lies in.
        own = self._cuda.malloc(nbytes)
        self._own.append(own)
        self._cuda.memset(own, 0, nbytes)
        self._cuda.deviceSynchronize()  # zeros before a peer can write
        return own, self._cuda.ipcGetMemHandle(own)

    def _open(self, handle: bytes) -> int:
        self._opened.append(self._cuda.ipcOpenMemHandle(handle))
        return self._opened[-1]


def _over(address: int, nbytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(CudaBytes(address, nbytes), device=device)
