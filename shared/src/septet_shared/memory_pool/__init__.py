"""Memory that is used again: arenas, rings of buffers, staging memory, peak counters, a spill file.

Ownership is that of storages. Memory is lent through a storage of its own, whose death torch tells
us; until then it is not lent again, whoever keeps it: a view, a NumPy array, an autograd graph. The
tensor that was lent ends with its scope or its release: it becomes a tensor on the `meta` device,
of the same shape, which raises when read. So a variable left over from the last step neither keeps
memory nor reads what somebody else wrote there.

Not seen: raw addresses, and CuPy or Numba arrays made of a lent tensor other than through DLPack.
On CUDA memory is lent again in the order of the streams that are current when it is given back and
when it is lent; work on another stream must be waited for before the last tensor goes.
"""

from septet_shared.memory_pool.arena import Arena, ArenaScope
from septet_shared.memory_pool.peak import Peak, track_peak
from septet_shared.memory_pool.ring import BufferRing, pinned
from septet_shared.memory_pool.spill import SpillFile, SpillHandle

__all__ = [
    "Arena", "ArenaScope", "BufferRing", "Peak", "SpillFile", "SpillHandle", "pinned", "track_peak",
]  # fmt: skip
