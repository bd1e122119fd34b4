"""What goes wrong between ranks; each error names rank, operation and seconds waited."""

from __future__ import annotations


class RankError(RuntimeError):
    """An operation between ranks failed. `.rank` (None when unknown), `.op`, `.waited_s`."""

    def __init__(
        self, message: str, *, rank: int | None = None, op: str = "", waited_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op
        self.waited_s = waited_s

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.rank, self.op, self.waited_s)


def _rebuild(
    kind: type[RankError], message: str, rank: int | None, op: str, waited_s: float
) -> RankError:
    return kind(message, rank=rank, op=op, waited_s=waited_s)


class PeerLost(RankError):
    """A peer's process ended, or its machine no longer answers."""


class CollectiveMismatch(RankError):
    """Two ranks are in different operations, or in the same one with different shapes."""


class RanksDiverged(RankError):
    """Ranks hold different values of what must be the same on all of them."""


class RankTimeout(RankError):
    """A rank did not come in time."""
