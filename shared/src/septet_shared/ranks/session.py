"""One group's meeting place: who takes part, who lives, who has arrived in which operation.

Before data moves, ranks meet: each states the operation, dtype and shape that it is about to run,
and reads what the others state. gloo aborts the process when sizes differ; met ranks raise instead.
Ranks of one host meet in shared pages (microseconds); ranks of several hosts with one small
all-gather.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from septet_shared._shared_pages import SharedPages, share
from septet_shared.ranks.errors import CollectiveMismatch, PeerLost, RankError, RankTimeout
from septet_shared.ranks.liveness import Heartbeats, Identity, identify

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

TICK_S = 0.1  # how often a waiting rank looks whether its peers live
_SPIN_S = 200e-6  # how long a rank yields before it sleeps: a peer is usually just behind
_TEXT = 512
_HEADER = struct.Struct("<qII")  # sequence, checksum, length of the text
_NOTICE = 4096  # bytes of a page for the notice of an abort
_FINISHED, _ABORTED, _SLOTS = 0, 8, _NOTICE


class Session:
    """The state behind a `Ranks`; one per communicator."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        members: Sequence[int],
        store: Store | None,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.members = tuple(members)  # ranks of the world
        self.store = store
        self.timeout_s = timeout_s
        self.identities: list[Identity] = [identify()]
        self.on_one_host = True
        self.cpu_group: ProcessGroup | None = None  # for host-side exchanges
        self._pages: list[SharedPages] = []
        self._heartbeats: Heartbeats | None = None
        self.moves = 0  # exchanges of data so far, the same on every rank
        self._sequence = 0
        self._abort: str | None = None
        self._lock = threading.RLock()
        if store is not None and size > 1:
            self.set_key(f"id/{rank}", json.dumps(astuple(self.identity)).encode())
            found = self.wait_keys([f"id/{r}" for r in range(size)], "rendezvous")
            self.identities = [Identity(*json.loads(f)) for f in found]
            remote = [r for r, i in enumerate(self.identities) if i.host != self.identity.host]
            # Every rank must decide alike: all on one host, or not.
            self.on_one_host = len({i.host for i in self.identities}) == 1
            if self.on_one_host:
                self._pages = share(self, _SLOTS + 2 * self._slot_bytes, "pages")
            else:
                self._heartbeats = Heartbeats(store, rank, remote)

    @property
    def identity(self) -> Identity:
        """This rank's own."""
        return self.identities[self.rank] if len(self.identities) > 1 else self.identities[0]

    @property
    def _slot_bytes(self) -> int:
        return _HEADER.size + _TEXT + 8 * 2 * self.size

    # ---- the store ----

    def set_key(self, key: str, value: bytes) -> None:
        """Set a key of this group."""
        assert self.store is not None
        # An empty value cannot be told from none in some stores.
        self.store.set(key, b"=" + value)  # type: ignore[arg-type]  # bytes are fine

    def wait_keys(self, keys: Sequence[str], op: str) -> list[bytes]:
        """Values of the keys, once all are set; keys[r] is rank r's.

        Raises:
            PeerLost, RankError, RankTimeout: as `check_alive`; the time-out names the missing
            ranks.
        """
        store = self.store
        assert store is not None
        missing = list(range(len(keys)))

        def arrived() -> bool:
            missing[:] = [r for r in missing if not store.check([keys[r]])]
            return not missing

        self.wait_until(arrived, op, lambda: missing)
        return [store.get(key)[1:] for key in keys]

    # ---- waiting ----

    def wait_until(
        self,
        done: Callable[[], bool],
        op: str,
        missing: Callable[[], Sequence[int]],
        timeout_s: float | None = None,
    ) -> None:
        """Return when `done()`; yields, then sleeps; looks after the peers every 100 ms."""
        started = time.monotonic()
        limit = self.timeout_s if timeout_s is None else timeout_s
        looked, pause = started, 20e-6
        while not done():
            now = time.monotonic()
            waited = now - started
            if waited < _SPIN_S:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
                continue
            if now - looked >= TICK_S:
                looked = now
                self.check_alive(op, waited)
                self._check_finished(op, waited, missing())
                if waited > limit:
                    raise self._timed_out(op, waited, list(missing()))
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)

    def wait_work(self, work: Any, op: str, timeout_s: float | None = None) -> None:
        """Wait for a c10d work of the CPU, looking after the peers every 100 ms."""
        started = time.monotonic()
        limit = self.timeout_s if timeout_s is None else timeout_s
        while True:
            try:
                work.wait(timedelta(seconds=TICK_S))
                return
            except RuntimeError as error:
                waited = time.monotonic() - started
                if work.is_completed():
                    raise self.explain(error, op, waited) from error
                self.check_alive(op, waited)
                if waited > limit:
                    raise self._timed_out(op, waited, []) from None

    def _timed_out(self, op: str, waited_s: float, missing: list[int]) -> RankTimeout:
        who = f"rank {', '.join(map(str, missing))} did not come" if missing else "no answer"
        message = f"{op}: {who} within {waited_s:.1f} s (rank {self.rank} waited)"
        # A peer that comes later must not pair this rank's next operation with this one.
        self.abort(message, op)
        return RankTimeout(message, rank=missing[0] if missing else None, op=op, waited_s=waited_s)

    def explain(self, error: Exception, op: str, waited_s: float) -> RankError:
        """The error that names the lost rank; a connection may break before its process is gone."""
        started = time.monotonic()
        while time.monotonic() - started < 2.0:
            try:
                self.check_alive(op, waited_s)
            except RankError as named:
                return named
            time.sleep(0.02)
        return RankError(f"{op}: {error}", op=op, waited_s=waited_s)

    # ---- who lives ----

    def raise_if_aborted(self, op: str, waited_s: float = 0.0) -> None:
        """Raise the error that a rank of this group has aborted with. Costs under a microsecond."""
        if self._abort is None:
            for r, pages in enumerate(self._pages):
                (length,) = struct.unpack_from("<q", pages.buffer, _ABORTED)
                if length:
                    text = pages.buffer[16 : 16 + length].decode(errors="replace")
                    self._abort = f"{r}:{text}"
                    break
            if not self.on_one_host and self.store is not None and self.store.check(["abort"]):
                self._abort = self.store.get("abort").decode()
        if self._abort is not None:
            who, _, text = self._abort.partition(":")
            message = f"{op}: the group was aborted by rank {who}: {text}"
            raise RankError(message, rank=int(who), op=op, waited_s=waited_s)

    def check_alive(self, op: str, waited_s: float = 0.0) -> None:
        """Raise if the group was aborted or a peer's process has ended; about 10 us a peer.

        Raises:
            PeerLost: names the rank, `op` and `waited_s`.
            RankError: the group was aborted; carries the reason.
        """
        self.raise_if_aborted(op, waited_s)
        for r, peer in enumerate(self.identities):
            if r != self.rank and peer.host == self.identity.host and not peer.lives():
                raise self._lost(r, f"process {peer.pid} has ended", op, waited_s)
        silent = self._heartbeats.silent() if self._heartbeats else None
        if silent is not None:
            raise self._lost(silent, "its machine no longer answers", op, waited_s)

    def _lost(self, rank: int, why: str, op: str, waited_s: float) -> PeerLost:
        message = f"{op}: lost rank {rank} ({why}) after rank {self.rank} waited {waited_s:.1f} s"
        return PeerLost(message, rank=rank, op=op, waited_s=waited_s)

    def _check_finished(self, op: str, waited_s: float, missing: Sequence[int]) -> None:
        for r in missing:
            if r < len(self._pages) and self._pages[r].buffer[_FINISHED]:
                raise self._lost(r, "it has returned without taking part", op, waited_s)

    def living(self) -> list[int]:
        """Ranks whose processes live, this one included."""
        silent = self._heartbeats.silent() if self._heartbeats else None
        return [
            r
            for r, peer in enumerate(self.identities)
            if r == self.rank or (peer.host != self.identity.host and r != silent) or peer.lives()
        ]

    def finish(self) -> None:
        """Say that this rank takes part in nothing more."""
        if self._pages:
            self._pages[self.rank].buffer[_FINISHED] = 1

    def abort(self, text: str, op: str) -> None:
        """Make every rank's present and next wait in this group raise an error with this text."""
        data = f"{text} [in {op}]".encode()[: _NOTICE - 64]
        if self._abort is None:
            self._abort = f"{self.rank}:{data.decode(errors='replace')}"
        if self._pages:
            page = self._pages[self.rank].buffer
            page[16 : 16 + len(data)] = data
            struct.pack_into("<q", page, _ABORTED, len(data))  # last: the length publishes the text
        elif self.store is not None:
            self.store.set("abort", f"{self.rank}:{data.decode(errors='replace')}")

    # ---- meeting ----

    def meet(self, op: str, statement: str, numbers: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Each rank's numbers, once all ranks have arrived in the same operation.

        Args:
            op: what errors name.
            statement: operation, dtype and shape; must be equal on all ranks.
            numbers: at most 2 * size integers of this rank.

        Raises:
            CollectiveMismatch: statements differ; names two ranks and both statements. All raise.
            PeerLost, RankTimeout, RankError: a rank is lost, missing, or has aborted.

        Cost: about 5 us for two ranks of a host that arrive together.
        """
        if self.size == 1:
            return [tuple(numbers)]
        with self._lock:
            self.raise_if_aborted(op)
            frame = self._frame(statement, numbers)
            frames = self._meet_in_pages(op, frame) if self._pages else self._gather(op, frame)
        spoken = [_read(f, self.size) for f in frames]
        for r, (other, _) in enumerate(spoken):
            if other != spoken[0][0]:
                message = (
                    f"{op}: rank 0 is in {spoken[0][0]!r}, rank {r} is in {other!r}; "
                    "all ranks must make the same calls in the same order with the same shapes"
                )
                raise CollectiveMismatch(message, rank=r, op=op)
        return [n for _, n in spoken]

    def _frame(self, statement: str, numbers: Sequence[int]) -> bytearray:
        self._sequence += 1
        text = statement.encode()[:_TEXT]
        body = text.ljust(_TEXT, b"\0") + struct.pack(
            f"<{2 * self.size}q", *numbers, *[0] * (2 * self.size - len(numbers))
        )
        return bytearray(_HEADER.pack(self._sequence, zlib.crc32(body), len(text)) + body)

    def _meet_in_pages(self, op: str, frame: bytearray) -> list[bytes]:
        # Two slots in turn: a peer can be one meeting ahead of a rank that still reads, not two.
        start = _SLOTS + (self._sequence % 2) * self._slot_bytes
        end = start + self._slot_bytes
        mine = self._pages[self.rank].buffer
        mine[start + 8 : end] = frame[8:]
        mine[start : start + 8] = frame[:8]  # last: the sequence publishes the frame
        found: dict[int, bytes] = {self.rank: bytes(frame)}
        missing = [r for r in range(self.size) if r != self.rank]

        def arrived() -> bool:
            for r in list(missing):
                seen = self._pages[r].buffer[start:end]
                sequence, checksum, _ = _HEADER.unpack_from(seen)
                # The checksum covers machines that let the sequence overtake the frame.
                if sequence == self._sequence and zlib.crc32(seen[_HEADER.size :]) == checksum:
                    found[r] = seen
                    missing.remove(r)
            return not missing

        self.wait_until(arrived, op, lambda: missing)
        return [found[r] for r in range(self.size)]

    def _gather(self, op: str, frame: bytearray) -> list[bytes]:
        if self.cpu_group is None:
            raise RankError(f"{op}: this group has no CPU backend to meet through", op=op)
        mine = torch.frombuffer(frame, dtype=torch.uint8)
        out = torch.empty(self.size * len(frame), dtype=torch.uint8)
        self.wait_work(self.cpu_group._allgather_base(out, mine), op)
        return [bytes(f.tolist()) for f in out.view(self.size, -1)]


def _read(frame: bytes, size: int) -> tuple[str, tuple[int, ...]]:
    _, _, length = _HEADER.unpack_from(frame)
    text = frame[_HEADER.size : _HEADER.size + length].decode(errors="replace")
    return text, struct.unpack_from(f"<{2 * size}q", frame, _HEADER.size + _TEXT)
