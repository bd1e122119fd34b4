"""Whether a peer's process still lives."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Identity:
    """A process: where it runs (host), its number there, and when it started (clock ticks)."""

    host: str
    pid: int
    start: int

    def lives(self) -> bool:
        """False once the process has ended; only asked of processes of this host. About 10 us."""
        if sys.platform != "linux":
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:  # another user's: it lives
                return True
            return True
        try:
            state, start = _state_and_start(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        # A process number is used again; the pair (number, start) is not. Z and X have ended.
        return start == self.start and state not in "ZX"


def _state_and_start(pid: int) -> tuple[str, int]:
    # The name in the second field may hold spaces and brackets: count from the last bracket.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


@cache
def _host() -> str:
    """A name that two processes share exactly when they can see each other's process numbers."""
    if sys.platform != "linux":
        return f"{uuid.getnode():x}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def identify() -> Identity:
    """The identity of the calling process."""
    start = _state_and_start(os.getpid())[1] if sys.platform == "linux" else 0
    return Identity(_host(), os.getpid(), start)


class Heartbeats:
    """Tells which ranks of other hosts have gone silent, by counters in the store.

    A thread raises this rank's counter every `BEAT_S` and reads the others'; a rank whose counter
    has not moved for `SILENT_S` counts as lost, also one that lives but holds Python's global lock
    all that time. Only that thread talks to the store, which may never answer: then its keeper
    counts as lost. Processes of one host are asked of the kernel instead (`lives`).
    """

    BEAT_S = 0.5
    SILENT_S = 3.5

    def __init__(self, store: Store, rank: int, remote: list[int]) -> None:
        # A connection of its own: a blocked one must not delay beats.
        self._store = store.clone()  # type: ignore[attr-defined]
        self._rank = rank
        self._seen = {r: (b"", time.monotonic()) for r in remote}
        self._count = 0
        self._answered = time.monotonic()  # when the store last did
        self._asked, self._since = 0.0, 0.0  # the last call of `silent`, the first of this wait
        self._announcements: list[str] = []  # to be set in the store
        self._wake = threading.Event()
        self.meeting = 0  # which meeting this rank has come to; beats tell the others
        self.notice = b""  # of a rank that aborted the group
        self._beat()
        # The thread must not keep the counters alive: they stop with their owner.
        ended, beat = threading.Event(), weakref.WeakMethod(self._beat)
        arguments = (beat, self._store, self._announcements, ended, self._wake)
        thread = threading.Thread(target=_keep_beating, args=arguments, daemon=True)
        thread.start()
        wake = self._wake

        def stop() -> None:
            ended.set()
            wake.set()

        end_with(self, stop, thread)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self._rank}", f"{self._count} {self.meeting}")
        if self._store.check(["abort"]):
            self.notice = self._store.get("abort")
        for r, (beat, _) in self._seen.items():
            if beat or self._store.check([f"beat/{r}"]):
                latest = self._store.get(f"beat/{r}")
                if latest != beat:
                    self._seen[r] = (latest, time.monotonic())
        self._answered = time.monotonic()

    def announce(self, text: str) -> None:
        """Give all ranks a `notice`; returns at once."""
        self._announcements.append(text)
        self._wake.set()

    def silent(self) -> list[int]:
        """Remote ranks that have gone silent, the first one first: others end because of it. Costs
        nothing: what the thread has seen.

        Raises:
            RuntimeError: the store itself does not answer.
        """
        now = time.monotonic()
        # Silence counts while somebody listens: this process may have been stopped itself.
        if now - self._asked > 2 * self.BEAT_S:
            self._since = now
        self._asked = now
        if now - max(self._answered, self._since) > self.SILENT_S:
            raise RuntimeError(f"it has not answered for {now - self._answered:.1f} s")
        heard = {r: at for r, (_, at) in self._seen.items()}
        lost = [r for r, at in heard.items() if now - max(at, self._since) > self.SILENT_S]
        return sorted(lost, key=heard.__getitem__)

    def behind(self, meeting: int) -> list[int]:
        """Remote ranks whose latest beat says that they have not come to this meeting."""
        at = {r: int((beat.split() or [b"0"])[-1]) for r, (beat, _) in self._seen.items()}
        return [r for r, reached in at.items() if reached < meeting]


def _keep_beating(
    beat: weakref.WeakMethod[Callable[[], None]],
    store: Store,
    announcements: list[str],
    ended: threading.Event,
    wake: threading.Event,
) -> None:
    call: Callable[[], None] | None = None
    try:
        while not ended.is_set():
            wake.wait(Heartbeats.BEAT_S)
            wake.clear()
            while announcements:  # also those of an owner that is gone
                store.set("abort", announcements.pop(0))
            if (call := beat()) is not None:
                call()
            del call
    except RuntimeError:  # the store ended with the job
        return


def end_with(
    owner: object, stop: Callable[[], object], thread: threading.Thread
) -> weakref.finalize[..., object]:
    """Stop the thread and wait for it when its owner is let go of, at the latest at exit.

    A thread that comes back from C++ while Python ends would abort the process.
    """

    def end(pid: int) -> None:
        if os.getpid() == pid:  # a forked child has no such thread
            stop()
            if thread is not threading.current_thread():
                thread.join(1.0)

    return weakref.finalize(owner, end, os.getpid())
