"""One allocation that every rank of a machine can read and write.

    heap = SymmetricHeap.create(ranks, 64 << 20)
    x = heap.empty((1024, 64), torch.float32)        # the same place on every rank
    channel = heap.channel("exchange")
    x.fill_(ranks.rank)
    channel.barrier("filled")                        # own writes -> barrier -> peers read
    row = heap.peer(x, 1)[0]                         # another rank's memory, no copy
    channel.barrier("read")                          # peers' reads -> barrier -> owner overwrites

Backends: "posix" (processes, host memory), "torch" and "cuda_ipc" (processes, GPU memory; not run
on a GPU where this was written), "local" (virtual ranks in one process, host or GPU memory).

Kernels find memory by `heap.pointers(t)` and flags by `heap.flag_pointers()`. A kernel must end
when the program ids of one rank run one after another in increasing order: no program may wait for
a flag that a later program of the same rank sets.
"""

from septet_shared.symmetric_heap.arena import Arena
from septet_shared.symmetric_heap.blocks import HeapStatistics
from septet_shared.symmetric_heap.channel import Channel
from septet_shared.symmetric_heap.copying import copy_
from septet_shared.symmetric_heap.heap import SymmetricHeap
from septet_shared.symmetric_heap.memory import HeapUnavailable

__all__ = ["Arena", "Channel", "HeapStatistics", "HeapUnavailable", "SymmetricHeap", "copy_"]
