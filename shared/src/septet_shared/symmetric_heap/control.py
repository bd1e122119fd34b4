"""What the ranks of a heap tell each other besides data: poison, what each has called, recovery.

Each rank owns a control page in host memory that all ranks map; on the CPU its flag words follow in
the same pages. One rank's view of all of them is a `Control`.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64
from typing import NoReturn

from septet_shared._shared_pages import SharedPages
from septet_shared.ranks import (
    CollectiveMismatch,
    PeerLost,
    RankError,
    RanksDiverged,
    RankTimeout,
)
from septet_shared.symmetric_heap.flags import DONE, LINE_BYTES, NOT_YET, POISONED, flags, reached

# A control page: lines, then text, then the ledger, then (on the CPU) flag words.
POISON = 0  # int32; on rank 0's page: 1 + the rank that poisoned the heap, 0 when sound
MEETING = LINE_BYTES  # int32: how often this rank has come to meet the living
FAILED = 2 * LINE_BYTES  # int32: ticket of the first wait that failed on this rank's device
REASON, REASON_BYTES = 4 * LINE_BYTES, 2048
LEDGER, ENTRY_BYTES, ENTRIES = REASON + REASON_BYTES, 256, 32
CONTROL_BYTES = 12288
assert LEDGER + ENTRY_BYTES * ENTRIES <= CONTROL_BYTES

KINDS = {
    k.__name__: k for k in (RankError, PeerLost, RankTimeout, CollectiveMismatch, RanksDiverged)
}
SLICE_S = 0.1  # how often a waiting rank looks after its peers and lets Ctrl-C in


class Control:
    """One rank's view of all control pages.

    Args:
        rank: this rank.
        pages: [size] every rank's pages, mapped here.
        check_alive: raises when the group was aborted, one of its processes ended, or one of the
            ranks waited for has returned.
        lives: whether a rank's process lives.
        timeout_s: limit of a wait that names none.
    """

    def __init__(
        self,
        rank: int,
        pages: list[SharedPages],
        check_alive: Callable[[str, float, Sequence[int]], None],
        lives: Callable[[int], bool],
        timeout_s: float,
    ) -> None:
        self.rank, self.size = rank, len(pages)
        self.check_alive, self.lives, self.timeout_s = check_alive, lives, timeout_s
        self.flags = flags()
        self.living = list(range(self.size))
        self.addresses = [p.address for p in pages]
        self.poison_address = self.addresses[0] + POISON
        # Whoever uses an address holds this list meanwhile: closing lets go of it, in any thread.
        self.pages = pages
        self.digest = b""  # of all recorded calls
        self._calls = 0
        self._turn, self._met = 0, True  # how often this rank came to meet; the last was held
        self._tickets: deque[tuple[int, str, float]] = deque(maxlen=4096)
        self._lock = threading.Lock()

    def hold(self) -> list[SharedPages]:
        """What keeps addresses valid while the caller has it; raises once the heap is closed."""
        pages = self.pages
        if not pages:
            raise RuntimeError("this heap is closed")
        return pages

    # ---- waiting ----

    def wait(
        self,
        attempt: Callable[[int], int],
        op: str,
        timeout_s: float | None,
        missing: Callable[[], tuple[int | None, str]],
    ) -> int:
        """The outcome of `attempt(slice_ns)` once it is not NOT_YET.

        Raises:
            RankError: the heap is poisoned, or the group was aborted.
            PeerLost: a living rank's process ended, or the missing rank has returned.
            RankTimeout: names the rank and the text of `missing()`.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        waited = 0.0
        while True:
            held = self.hold()
            outcome = attempt(int(max(0.0, min(SLICE_S, limit - waited)) * 1e9))
            if outcome not in (NOT_YET, POISONED):
                return outcome
            waited = time.monotonic() - started
            rank, what = missing()
            others = [r for r in self.living if r != self.rank]
            only = others if rank is None and len(others) == 1 else [rank]
            try:
                self.check(op, waited, [r for r in only if r is not None])
            except PeerLost:
                if attempt(0) == DONE:  # it came, and then ended, between two looks
                    return DONE
                raise
            if waited >= limit:
                message = f"{op}: {what} within {waited:.3g} s (rank {self.rank} waited)"
                raise RankTimeout(message, rank=rank, op=op, waited_s=waited)
            del held

    def check(self, op: str, waited_s: float, missing: Sequence[int] = ()) -> None:
        """Raise when the heap is poisoned, a living rank has died, or the group was aborted.

        Also when one of the ranks that a wait is `missing` has returned.
        """
        if c_int32.from_address(self.poison_address).value:
            self._raise_poison(op, waited_s)
        if len(self.living) == self.size:
            self.check_alive(op, waited_s, missing)
        for r in self.living:
            if not self.lives(r):
                message = f"{op}: lost rank {r} after rank {self.rank} waited {waited_s:.3g} s"
                raise PeerLost(message, rank=r, op=op, waited_s=waited_s)

    # ---- poison ----

    def poison(
        self, reason: str, kind: type[RankError] = RankError, rank: int | None = None
    ) -> None:
        """Make every wait of every rank, from now on, raise `kind` naming `rank` (None: this)."""
        held = self.hold()
        with self._lock:
            if c_int32.from_address(self.poison_address).value:
                return  # the first cause stands
            name = kind.__name__ if kind.__name__ in KINDS else RankError.__name__
            text = f"{name}|{self.rank if rank is None else rank}|{reason}".encode(errors="replace")
            text = text[: REASON_BYTES - 1] + b"\0"
            ctypes.memmove(held[self.rank].address + REASON, text, len(text))
            self.flags.fence()
            self.flags.claim(self.poison_address, self.rank + 1)

    def _raise_poison(self, op: str, waited_s: float) -> NoReturn:
        by = c_int32.from_address(self.poison_address).value - 1
        text = ctypes.string_at(self.addresses[by] + REASON).decode(errors="replace")
        kind, rank, reason = text.split("|", 2)
        message = f"{op}: rank {by} poisoned the heap: {reason}"
        raise KINDS[kind](message, rank=int(rank), op=op, waited_s=waited_s)

    # ---- the ledger: calls that every rank must make alike ----

    def record(self, call: str) -> None:
        """Note a call that all ranks must make in the same order, and compare with the peers.

        No rank waits: the last to make its n-th call finds the others' n-th in their pages. On a
        difference it raises and poisons the heap, so that all others raise at their next wait.

        Raises:
            RanksDiverged: names a rank and both calls.
        """
        held = self.hold()
        number = self._calls
        self._calls += 1
        self.digest = hashlib.blake2b(self.digest + call.encode(), digest_size=16).digest()
        offset = LEDGER + ENTRY_BYTES * (number % ENTRIES)
        entry = self.digest + call.encode()[: ENTRY_BYTES - 25] + b"\0"
        count = c_int64.from_address(held[self.rank].address + offset)
        count.value = 0
        self.flags.fence()
        ctypes.memmove(held[self.rank].address + offset + 8, entry, len(entry))
        self.flags.fence()
        count.value = number + 1
        self.flags.fence()
        for r in self.living:
            theirs = c_int64.from_address(self.addresses[r] + offset)
            if r == self.rank or theirs.value != number + 1:
                continue  # not there yet, or so far ahead that a later call will tell
            digest = ctypes.string_at(self.addresses[r] + offset + 8, 16)
            other = ctypes.string_at(self.addresses[r] + offset + 24).decode(errors="replace")
            self.flags.fence()
            if digest != self.digest and theirs.value == number + 1:
                message = (
                    f"call {number} on the heap is {call} on rank {self.rank} "
                    f"and {other} on rank {r}, or an earlier one differed"
                )
                self.poison(message, RanksDiverged, r)
                raise RanksDiverged(message, rank=r, op=call)

    # ---- waits that a device carries out later ----

    def issue_ticket(self, op: str, limit_s: float) -> int:
        """A positive number by which a failed wait is found again."""
        with self._lock:
            ticket = self._tickets[-1][0] % (2**31 - 1) + 1 if self._tickets else 1
            self._tickets.append((ticket, op, limit_s))
            return ticket

    def failed_ticket(self) -> tuple[int, str, float]:
        """(ticket: 0 when no wait failed, negative on a mismatch; operation; limit in seconds)."""
        ticket = c_int32.from_address(self.addresses[self.rank] + FAILED).value
        for number, op, limit_s in list(self._tickets) if ticket else ():
            if number == abs(ticket):
                return ticket, op, limit_s
        return ticket, "a wait on the device", self.timeout_s

    # ---- recovery ----

    def meet(self, op: str) -> None:
        """Return once all living ranks have come, poisoned or not; drops who dies meanwhile."""
        # A meeting that timed out is resumed: whoever comes late still finds this rank there.
        self._turn += self._met
        self._met, turn = False, self._turn
        self.flags.signal(self.addresses[self.rank] + MEETING, turn)
        sound = c_int32(0)
        started = time.monotonic()
        for r in list(self.living):
            theirs = self.addresses[r] + MEETING
            arrived = NOT_YET
            while arrived != DONE and self.lives(r):
                waited = time.monotonic() - started
                if waited > self.timeout_s:
                    message = f"{op}: rank {r} did not come within {waited:.3g} s"
                    raise RankTimeout(message, rank=r, op=op, waited_s=waited)
                slice_ns = int(SLICE_S * 1e9)
                arrived = self.flags.wait(theirs, turn, ctypes.addressof(sound), slice_ns)
            if not reached(c_int32.from_address(theirs).value, turn):
                self.living.remove(r)
        self._met = True

    def clear(self) -> None:
        """Make the heap sound again; called by every living rank while all of them meet."""
        c_int32.from_address(self.addresses[self.rank] + FAILED).value = 0
        c_int32.from_address(self.poison_address).value = 0
        self.flags.fence()
