"""Memory of the GPUs of one machine, by torch's symmetric memory.

The logic is tested with a fake of `torch.distributed._symmetric_memory`; not run on a GPU where
this was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from septet_shared.ranks import RankTimeout
from septet_shared.ranks.session import beside
from septet_shared.symmetric_heap.memory import Memory

if TYPE_CHECKING:
    from septet_shared.ranks import Ranks


class TorchMemory(Memory):
    """Device memory that torch maps on every GPU of the group.

    Args:
        ranks: one to a GPU; the GPUs reach each other.
        symmetric_memory: `torch.distributed._symmetric_memory`, or what stands for it in a test.
    """

    backend = "torch"
    on_stream = True

    def __init__(self, ranks: Ranks, symmetric_memory: Any = None) -> None:
        if symmetric_memory is None:
            from torch.distributed import _symmetric_memory as symmetric_memory
        self._torch, self._ranks, self.device = symmetric_memory, ranks, ranks.device
        self._handles: list[Any] = []

    def segment(self, nbytes: int) -> list[Tensor]:
        """As `Memory.segment`."""
        own = self._torch.empty(nbytes, dtype=torch.uint8, device=self.device).zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # zeros before a peer can write
        ranks, op = self._ranks, "symmetric memory's rendezvous"

        def rendezvous() -> Any:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread has its own
            return self._torch.rendezvous(own, ranks.group)

        def look(waited_s: float) -> None:
            ranks.check_alive(op, waited_s)
            if waited_s > ranks.timeout_s:
                message = f"{op}: not every rank came within {waited_s:.1f} s"
                raise RankTimeout(message, op=op, waited_s=waited_s)

        handle = beside(rendezvous, look)  # it is deaf to lost peers
        self._handles.append(handle)  # the peers' views do not keep their mapping alive themselves
        return [
            # Unlike get_buffer, this counts from the tensor, not from the allocation that holds it.
            own if r == self._ranks.rank else handle.get_remote_tensor(r, (nbytes,), torch.uint8)
            for r in range(self._ranks.size)
        ]

    def unmap_peers(self) -> None:
        """As `Memory.unmap_peers`; this rank's own memory goes with its last tensor."""
        self._handles.clear()
