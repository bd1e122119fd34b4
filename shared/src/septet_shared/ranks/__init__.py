"""Who takes part in a job, and what they do together.

    Ranks           process groups and collectives that name who is missing, dead or elsewhere
    run             a function on several local processes
    Work            an operation under way
    RankError       and its kinds: PeerLost, CollectiveMismatch, RanksDiverged, RankTimeout

NCCL on CUDA, gloo on the CPU; torch.distributed is the engine. NCCL has not been run where this was
written.
"""

from septet_shared.ranks.errors import (
    CollectiveMismatch,
    PeerLost,
    RankError,
    RanksDiverged,
    RankTimeout,
)
from septet_shared.ranks.group import Ranks
from septet_shared.ranks.launch import run
from septet_shared.ranks.liveness import Identity
from septet_shared.ranks.work import Work

__all__ = [
    "CollectiveMismatch",
    "Identity",
    "PeerLost",
    "RankError",
    "RankTimeout",
    "Ranks",
    "RanksDiverged",
    "Work",
    "run",
]
