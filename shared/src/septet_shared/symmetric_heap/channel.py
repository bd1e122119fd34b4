"""Flag words of a heap in host memory: signal, wait, barrier."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from functools import lru_cache, reduce

from septet_shared.ranks import CollectiveMismatch
from septet_shared.symmetric_heap.control import SLICE_S, Control
from septet_shared.symmetric_heap.flags import (
    DONE,
    LINE_BYTES,
    MISMATCH,
    NOT_YET,
    Barrier,
    name_at,
    reached,
)

BARRIER_LINES = 3  # a rank's arrival line and the names of its two latest operations
EPOCH_LIMIT = 2**31


class Channel:
    """`n` flag words on each rank, and a barrier. One thread of a rank at a time may use a channel.

    Attributes:
        name, n: as given to `heap.channel`.
        first_word: word i lies `64 * (first_word + i)` bytes after each of `heap.flag_pointers()`.
    """

    def __init__(
        self, control: Control, pages: list[int], name: str, n: int, first_word: int
    ) -> None:
        self.name, self.n, self.first_word = name, n, first_word
        self._control = control
        self._words = [page + LINE_BYTES * first_word for page in pages]
        self._lines = [w + LINE_BYTES * n for w in self._words]
        # Not 0 when the living have recovered before this rank makes the channel.
        self._begin(_value(self._lines[control.rank]))

    def _begin(self, epoch: int) -> None:
        c = self._control
        lines = [a if r in c.living else None for r, a in enumerate(self._lines)]
        self._barrier = Barrier(lines, c.poison_address, c.rank, epoch)

    def signal(self, rank: int, i: int, epoch: int) -> None:
        """Raise word i of `rank` to `epoch`; who waits for it sees all that this rank wrote before.

        Words never fall: an epoch at or below the present one changes nothing.

        Raises:
            ValueError: rank, i or epoch (1 to 2^31 - 1) is out of range.

        Cost: about 1 us.
        """
        held = self._check(i, epoch, rank)
        self._control.flags.signal(self._words[rank] + LINE_BYTES * i, epoch)
        del held

    def wait(self, i: int, epoch: int, timeout_s: float | None = None) -> None:
        """Return once word i of this rank is at `epoch` or above.

        Args:
            i: in [0, n).
            epoch: 1 to 2^31 - 1.
            timeout_s: limit in seconds; 0 looks once; None means the heap's.

        Raises:
            ValueError: an argument is out of range.
            RankTimeout: nobody signalled in time; says which epoch the word has.
            PeerLost, RankError: a peer died; the heap is poisoned or the group aborted.

        Cost: about 1 us when the word is there; else spins, yields for 50 us, sleeps.
        """
        self._check(i, epoch)
        check_timeout(timeout_s)
        c = self._control
        word = self._words[c.rank] + LINE_BYTES * i
        c.wait(
            lambda slice_ns: c.flags.wait(word, epoch, c.poison_address, slice_ns),
            f"{self.name}.wait({i}, {epoch})",
            timeout_s,
            lambda: (None, f"word {i} is at {_value(word)}, nobody raised it to {epoch}"),
        )

    def barrier(self, op: str = "barrier", timeout_s: float | None = None) -> None:
        """Return once every living rank has come; what was written before is visible after.

        Args:
            op: what this barrier is for; must be the same on all ranks.
            timeout_s: limit in seconds; None means the heap's. After a time-out the next call
                resumes the same barrier.

        Raises:
            CollectiveMismatch: on every rank, when two came with different `op`; names both.
            RankTimeout: names a rank that did not come.
            PeerLost, RankError: a peer died; the heap is poisoned or the group aborted.

        Cost: about 1 us between two ranks that run on cores of their own.
        """
        c, b = self._control, self._barrier
        held = c.pages or c.hold()
        digest, name = digest_of(op)
        outcome = NOT_YET
        if timeout_s is None:
            # Most barriers end within the first slice: no closures, no clock.
            outcome = c.flags.barrier(b, digest, name, int(min(SLICE_S, c.timeout_s) * 1e9))
            if outcome == DONE:
                return
        check_timeout(timeout_s)

        def missing() -> tuple[int, str]:
            line = self._lines[b.culprit]
            last = name_at(line, _value(line))
            seen = f", last seen in {last!r}" if last else ""
            return b.culprit, f"rank {b.culprit} did not come{seen}"

        where = f"{self.name}.barrier({op!r})"
        if outcome != MISMATCH:
            outcome = c.wait(
                lambda ns: c.flags.barrier(b, digest, name, ns), where, timeout_s, missing
            )
        if outcome == MISMATCH:
            other = name_at(self._lines[b.culprit], b.epoch)
            message = f"{where}: rank {c.rank} is in {op!r}, rank {b.culprit} is in {other!r}"
            raise CollectiveMismatch(message, rank=b.culprit, op=op)
        del held

    def poison(self, reason: str | BaseException) -> None:
        """Make every present and later wait of every rank of this heap raise with this reason.

        The first reason stands, until `heap.recover()`. Waits under way notice within 100 ms.
        """
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        self._control.poison(text)

    def check(self) -> None:
        """Raise what is known to have gone wrong: poison, an abort, a dead peer, a failed wait.

        Waits on the host raise by themselves; on a GPU this is where results become trustworthy.
        """
        held = self._control.hold()
        self._control.check(self.name, 0.0)
        del held

    # ---- recovery ----

    def latest_epoch(self) -> int:
        """The furthest barrier that a living rank has come to."""
        return latest([_value(self._lines[r]) for r in self._control.living])

    def restart(self, epoch: int) -> None:
        """Continue after barrier `epoch`, also on ranks that have yet to make the channel."""
        for r in self._control.living:
            ctypes.c_int32.from_address(self._lines[r]).value = epoch
        self._begin(epoch)

    def _check(self, i: int, epoch: int, rank: int = 0) -> object:
        held = self._control.hold()
        if not 0 <= rank < self._control.size:
            raise ValueError(f"rank must be in [0, {self._control.size}); got {rank}")
        if not 0 <= i < self.n:
            raise ValueError(f"i must be in [0, {self.n}); got {i}")
        if not 1 <= epoch < EPOCH_LIMIT:
            raise ValueError(f"epoch must be in [1, 2**31); got {epoch}")
        return held


@lru_cache(maxsize=4096)
def digest_of(op: str) -> tuple[int, bytes]:
    """(64-bit digest, encoded name) of an operation."""
    data = op.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"), data


def latest(epochs: Sequence[int]) -> int:
    """The furthest of epochs that wrap round."""
    return reduce(lambda a, b: b if reached(b, a) else a, epochs)


def check_timeout(timeout_s: float | None) -> None:
    """Raise ValueError unless None or a number of seconds."""
    if timeout_s is not None and not timeout_s >= 0:
        raise ValueError(f"timeout_s must be at least 0 or None; got {timeout_s}")


def _value(address: int) -> int:
    return ctypes.c_int32.from_address(address).value
