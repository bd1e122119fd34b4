"""One group's meeting place: who takes part, who lives, who has arrived in which operation.

Before data moves, ranks meet: each states the operation, dtype and shape that it is about to run,
and reads what the others state. gloo aborts the process when sizes differ; met ranks raise instead.
Ranks of one host meet in shared pages (microseconds); ranks of several hosts with one small
all-gather.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import astuple
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from septet_shared._shared_pages import SharedPages, share
from septet_shared.ranks.errors import CollectiveMismatch, PeerLost, RankError, RankTimeout
from septet_shared.ranks.liveness import Heartbeats, Identity, identify

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")

TICK_S = 0.1  # how often a waiting rank looks whether its peers live
_SPIN_S = 200e-6  # how long a rank yields before it sleeps: a peer is usually just behind
_LAST_WORDS_S = 0.5  # how long what a rank sent before it ended may still be under way
_GONE_S = 2.0  # how long after its connections a process may end
_PAYLOAD = 1 << 16  # bytes that each rank can hand the others of its host in a meeting
_TEXT = 512
_HEADER = struct.Struct("<qII")  # sequence, checksum, length of the text
_LENGTH = struct.Struct("=q")
_NOTICE = 4096  # bytes of a page for the notice of an abort
_FINISHED, _ABORTED, _REASON, _SLOTS = 0, 8, 16, _NOTICE


# Through ctypes, which lets go of Python's lock: another thread of this rank may compute.
_yield = ctypes.CDLL(None).sched_yield if sys.platform == "linux" else partial(time.sleep, 0)


leaving = threading.Event()  # set when this process ends: no thread may wait any longer


class Session:
    """The state behind a `Ranks`; one per communicator."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        members: Sequence[int],
        store: Store,
        timeout_s: float,
        parent: Session | None = None,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.members = tuple(members)  # ranks of the world
        self.store = store
        self.timeout_s = timeout_s
        self._parent = parent  # that of the group from which this one was made
        self._host = identify().host
        self.identities: list[Identity] = []
        self.on_one_host = True
        self.cpu_group: ProcessGroup | None = None  # for host-side exchanges
        self._pages: list[SharedPages] = []
        self._heartbeats: Heartbeats | None = None
        self._sequence = 0
        self._moves = 0  # exchanges of data since the latest meeting
        self._met_at = 0.0  # when the last rank came to it, on this host's monotonic clock
        self._spin_s = _SPIN_S  # how long the next wait yields before it sleeps
        self._missing: list[int] = []
        self._abort: str | None = None
        self._unfinished: list[Any] = []  # works that this rank waits for no more
        self._lock = threading.RLock()
        if parent is not None:
            self.identities = [parent.identities[parent.members.index(m)] for m in members]
        else:
            self.set_key(f"id/{rank}", json.dumps(astuple(identify())).encode())
            found = self.wait_keys([f"id/{r}" for r in range(size)], "rendezvous")
            self.identities = [Identity(*json.loads(f)) for f in found]
        # Every rank must decide alike: all on one host, or not.
        self.on_one_host = len({i.host for i in self.identities}) == 1
        if not self.on_one_host:
            remote = [r for r, i in enumerate(self.identities) if i.host != self._host]
            self._heartbeats = Heartbeats(store, rank, remote)
        elif size > 1:
            self._pages = share(self, self._payload_at(0) + 2 * _PAYLOAD, "pages")

    @property
    def _slot_bytes(self) -> int:
        return _HEADER.size + _TEXT + 8 * (1 + 2 * self.size)

    def _payload_at(self, sequence: int) -> int:
        return -(-(_SLOTS + 2 * self._slot_bytes) // 64) * 64 + sequence % 2 * _PAYLOAD

    # ---- the store ----

    def set_key(self, key: str, value: bytes) -> None:
        """Set a key of this group."""
        # An empty value cannot be told from none in some stores.
        stored: Any = b"=" + value  # bytes are fine, whatever the stub says
        self.ask(lambda: self.store.set(key, stored), f"set {key}")

    def ask(self, question: Callable[[], T], op: str) -> T:
        """What the store answers; it lives in another process, and may not answer any more.

        On one host the kernel tells when that process ends. Of another host nobody does: then a
        thread asks, while this one looks after the peers.

        Raises:
            RankError: the store's keeper is lost.
        """
        if self._heartbeats is None:
            return question()

        def look(waited_s: float) -> None:
            self.check_peers(op, waited_s)
            if waited_s > self.timeout_s:
                message = f"{op}: the store did not answer within {waited_s:.1f} s"
                raise RankTimeout(message, op=op, waited_s=waited_s)

        return beside(question, look)

    def wait_keys(self, keys: Sequence[str], op: str) -> list[bytes]:
        """Values of the keys, once all are set; keys[r] is rank r's.

        Raises:
            PeerLost, RankError, RankTimeout: as `check_alive`; the time-out names the missing
            ranks.
        """
        store, started = self.store, time.monotonic()
        missing = list(range(len(keys)))

        def arrived() -> bool:
            asked = [keys[r] for r in missing]
            return not missing or self.ask(lambda: bool(store.check(asked)), op)

        def absent() -> list[int]:
            missing[:] = self.ask(lambda: [r for r in missing if not store.check([keys[r]])], op)
            return missing

        try:
            self.wait_until(arrived, op, absent)
            return self.ask(lambda: [store.get(key)[1:] for key in keys], op)
        except RankError:
            raise
        except RuntimeError as error:  # the store's host has gone
            raise self.explain(error, op, time.monotonic() - started) from error

    # ---- waiting ----

    def wait_until(
        self,
        done: Callable[[], bool],
        op: str,
        missing: Callable[[], Sequence[int]],
    ) -> None:
        """Return when `done()`; yields, then sleeps; looks after the peers every 100 ms."""

        def look(waited_s: float) -> None:
            self.check_alive(op, waited_s)
            self.check_finished(op, waited_s, missing())
            if waited_s > self.timeout_s:
                raise self._timed_out(op, waited_s, missing())

        spin_s, self._spin_s = self._spin_s, _SPIN_S
        poll(done, look, spin_s)

    def wait_works(self, works: Sequence[Any], op: str) -> None:
        """Wait for c10d works of the CPU, looking after the peers every 100 ms."""
        if works:  # gloo's threads of a peer that is just behind may need this core
            self._spin_s = 0.0
        try:
            for work in works:
                self._wait_work(work, op)
        finally:
            self._unfinished += [work for work in works if not work.is_completed()]

    def _wait_work(self, work: Any, op: str) -> None:
        started = time.monotonic()
        loss: RankError | None = None
        while True:
            over = work.is_completed()
            try:
                work.wait(timedelta(seconds=TICK_S))
                return
            except RuntimeError as error:
                waited = time.monotonic() - started
                if over:
                    raise self.explain(error, op, waited) from error
            if loss is not None and waited > loss.waited_s + _LAST_WORDS_S:
                raise loss
            try:
                self.check_alive(op, waited)
            except PeerLost as found:  # what it sent before may still come through
                loss = loss or found
            if waited > self.timeout_s and loss is None:
                raise self._timed_out(op, waited, self.absent())

    def is_idle(self) -> bool:
        """Whether no exchange is left that a peer has not finished."""
        return all(work.is_completed() for work in self._unfinished)

    def absent(self) -> list[int]:
        """Ranks that are known not to have come to the meeting that this rank is in."""
        if self._heartbeats:
            return self._heartbeats.behind(self._sequence)
        return list(self._missing)

    def _timed_out(self, op: str, waited_s: float, missing: Sequence[int]) -> RankTimeout:
        who = f"rank {', '.join(map(str, missing))} did not come" if missing else "no answer"
        message = f"{op}: {who} within {waited_s:.1f} s (rank {self.rank} waited)"
        # A peer that comes later must not pair this rank's next operation with this one.
        self.abort(message, op)
        return RankTimeout(message, rank=missing[0] if missing else None, op=op, waited_s=waited_s)

    def explain(self, error: Exception, op: str, waited_s: float) -> RankError:
        """The error that names the lost rank; a connection may break before its process is gone."""
        started = time.monotonic()
        patience_s = _GONE_S if self._heartbeats is None else Heartbeats.SILENT_S + 1.0
        while time.monotonic() - started < patience_s:
            try:
                self.check_alive(op, waited_s)
            except RankError as named:
                return named
            time.sleep(0.02)
        if "timed out" in str(error).lower():
            return self._timed_out(op, waited_s, self.absent())
        self.abort(str(error), op)  # the others wait for what this rank will not send any more
        return RankError(f"{op}: {error}", rank=self.rank, op=op, waited_s=waited_s)

    # ---- who lives ----

    def raise_if_aborted(self, op: str, waited_s: float = 0.0) -> None:
        """Raise the error that a rank of this group has aborted with. Costs about a microsecond.

        A rank of another host hears of it with the next beat.
        """
        if leaving.is_set():
            raise RankError(f"{op}: this process ends", rank=self.rank, op=op, waited_s=waited_s)
        if self._abort is None:
            for r, pages in enumerate(self._pages):
                (length,) = _LENGTH.unpack_from(pages.buffer, _ABORTED)
                if length:
                    text = pages.buffer[_REASON : _REASON + length].decode(errors="replace")
                    self._abort = f"{r}:{text}"
                    break
            if self._heartbeats and self._heartbeats.notice:
                self._abort = self._heartbeats.notice.decode(errors="replace")
        if self._abort is not None:
            who, _, text = self._abort.partition(":")
            message = f"{op}: the group was aborted by rank {who}: {text}"
            raise RankError(message, rank=int(who), op=op, waited_s=waited_s)

    def check_alive(
        self, op: str, waited_s: float = 0.0, among: Iterable[int] | None = None
    ) -> None:
        """Raise if the group was aborted or a peer's process has ended; about 10 us a peer.

        Args:
            op, waited_s: what the error says.
            among: the ranks to look at; all when None.

        Raises:
            PeerLost: names the rank, `op` and `waited_s`.
            RankError: the group was aborted; carries the reason.
        """
        self.raise_if_aborted(op, waited_s)
        self.check_peers(op, waited_s, among)

    def check_peers(
        self, op: str, waited_s: float = 0.0, among: Iterable[int] | None = None
    ) -> None:
        """As `check_alive`, also in a group that was aborted."""
        try:
            lost = self._lost_ranks(range(self.size) if among is None else among)
        except RuntimeError as error:
            raise self._store_lost(error, op, waited_s) from error
        for r, why in lost:
            raise self._lost(r, why, op, waited_s)

    def _lost_ranks(self, among: Iterable[int]) -> list[tuple[int, str]]:
        """Ranks and why; those of this host first, then others as they went silent."""
        silent = self._heartbeats.silent() if self._heartbeats else []
        found = []
        for r in among:
            peer = self.identities[r] if self.identities else None
            if peer is None or r == self.rank:
                continue
            if peer.host == self._host and not peer.lives():
                found.append((r, f"process {peer.pid} has ended"))
            elif r in silent:
                found.append((r, "its process no longer answers"))
        return sorted(found, key=lambda one: silent.index(one[0]) if one[0] in silent else -1)

    def _lost(self, rank: int, why: str, op: str, waited_s: float) -> PeerLost:
        message = f"{op}: lost rank {rank} ({why}) after rank {self.rank} waited {waited_s:.1f} s"
        return PeerLost(message, rank=rank, op=op, waited_s=waited_s)

    def _store_lost(self, error: Exception, op: str, waited_s: float) -> RankError:
        # Without a launcher that keeps it, the store lives in rank 0 of the world.
        kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if kept or 0 not in self.members or self.members[self.rank] == 0:
            return RankError(f"{op}: the store is lost: {error}", op=op, waited_s=waited_s)
        why = f"the store that it keeps no longer answers: {error}"
        return self._lost(self.members.index(0), why, op, waited_s)

    def check_finished(self, op: str, waited_s: float, missing: Sequence[int]) -> None:
        """Raise PeerLost when a rank that is waited for has said that it takes part no more."""
        for r in missing:
            if self._has_finished(r):
                raise self._lost(r, "it has returned without taking part", op, waited_s)

    def _has_finished(self, rank: int) -> bool:
        if self._parent is not None:
            return self._parent._has_finished(self._parent.members.index(self.members[rank]))
        return rank < len(self._pages) and bool(self._pages[rank].buffer[_FINISHED])

    def living(self) -> list[int]:
        """Ranks that can still take part, this one included."""
        lost = {r for r, _ in self._lost_ranks(range(self.size))}
        return [r for r in range(self.size) if r not in lost and not self._has_finished(r)]

    def finish(self) -> None:
        """Say that this rank takes part in nothing more, in groups made from this one neither."""
        if self._pages:
            self._pages[self.rank].buffer[_FINISHED] = 1

    def abort(self, text: str, op: str) -> None:
        """Make every rank's present and next wait in this group raise an error with this text."""
        if self._abort is not None:
            return
        data = f"{text} [in {op}]".encode()[: _NOTICE - 64]
        self._abort = f"{self.rank}:{data.decode(errors='replace')}"
        if self._pages:
            page = self._pages[self.rank].buffer
            page[_REASON : _REASON + len(data)] = data
            _LENGTH.pack_into(page, _ABORTED, len(data))  # last: the length publishes the text
        elif self._heartbeats:
            self._heartbeats.announce(self._abort)

    # ---- meeting ----

    def meet(self, op: str, statement: str, numbers: Sequence[int] = ()) -> list[Sequence[int]]:
        """Each rank's numbers, once all ranks have arrived in the same operation.

        Args:
            op: what errors name.
            statement: operation, dtype and shape; must be equal on all ranks.
            numbers: at most 2 * size integers of this rank.

        Raises:
            CollectiveMismatch: statements differ; names two ranks and both statements. All raise.
            PeerLost, RankTimeout, RankError: a rank is lost, missing, or has aborted.

        Cost: about 15 us for two ranks of a host that arrive together.
        """
        self.raise_if_aborted(op)
        if self.size == 1:
            return [numbers]
        with self._lock:
            frame = self._frame(statement, numbers)
            frames = self._meet_in_pages(op, frame) if self._pages else self._gather(op, frame)
        spoken = [_read(f, self.size) for f in frames]
        self._met_at = max(came for _, (came, *_) in spoken) * 1e-9
        for r, (other, _) in enumerate(spoken):
            if other != spoken[0][0]:
                message = (
                    f"{op}: rank 0 is in {spoken[0][0]!r}, rank {r} is in {other!r}; "
                    "all ranks must make the same calls in the same order with the same shapes"
                )
                raise CollectiveMismatch(message, rank=r, op=op)
        return [numbers for _, (_, *numbers) in spoken]

    def can_hand_out(self, nbytes: int) -> bool:
        """Whether `hand_out` takes so many bytes: they fit, and the ranks share pages."""
        return bool(self._pages) and nbytes <= _PAYLOAD

    def hand_out(self, op: str, mine: Tensor) -> list[Tensor]:
        """[size] each rank's bytes (uint8, lengths may differ), in shared pages; collective.

        To be copied before this rank's next meeting, after which a peer may write there.

        Cost: a meeting and two passes over the bytes: gloo takes about 300 us more, which is what
        waking its threads costs.
        """
        with self._lock:
            start = self._payload_at(self._sequence + 1)
            data = mine.numpy().data
            self._pages[self.rank].buffer[start : start + len(data)] = data
            stated = self.meet(op, f"bytes of {op}", [len(data), zlib.crc32(data)])
            parts = [
                torch.frombuffer(p.buffer, dtype=torch.uint8, offset=start, count=n)
                if n
                else mine.new_empty(0)
                for p, (n, *_) in zip(self._pages, stated, strict=True)
            ]

            def whole() -> bool:  # machines may let the meeting overtake the bytes
                return all(
                    zlib.crc32(part.numpy().data) == check
                    for part, (_, check, *_) in zip(parts, stated, strict=True)
                )

            self.wait_until(whole, op, tuple)
            return parts

    def _frame(self, statement: str, numbers: Sequence[int]) -> bytearray:
        self._sequence += 1
        self._moves = 0
        text = statement.encode()
        if len(text) > _TEXT:  # what differs may come after what fits
            digest = hashlib.blake2b(text, digest_size=8).hexdigest().encode()
            text = text[: _TEXT - len(digest) - 4] + b"... " + digest
        body = text.ljust(_TEXT, b"\0") + struct.pack(
            f"<{1 + 2 * self.size}q",
            time.monotonic_ns(),
            *numbers,
            *[0] * (2 * self.size - len(numbers)),
        )
        return bytearray(_HEADER.pack(self._sequence, zlib.crc32(body), len(text)) + body)

    def next_move(self) -> tuple[int, float]:
        """A number for an exchange of data, the same on every rank, and when it starts.

        The first one after a meeting starts when the last rank has come, the same on every rank.
        """
        self._moves += 1
        starts = self._met_at if self._moves == 1 else time.monotonic()
        return self._sequence * 8 + self._moves, starts

    def _meet_in_pages(self, op: str, frame: bytearray) -> list[bytes]:
        # Two slots in turn: a peer can be one meeting ahead of a rank that still reads, not two.
        start = _SLOTS + (self._sequence % 2) * self._slot_bytes
        end = start + self._slot_bytes
        mine = self._pages[self.rank].buffer
        mine[start + 8 : end] = frame[8:]
        mine[start : start + 8] = frame[:8]  # last: the sequence publishes the frame
        found: dict[int, bytes] = {self.rank: bytes(frame)}
        missing = self._missing = [r for r in range(self.size) if r != self.rank]

        def arrived() -> bool:
            for r in list(missing):
                buffer = self._pages[r].buffer
                if _HEADER.unpack_from(buffer, start)[0] != self._sequence:
                    continue
                seen = buffer[start:end]
                # The checksum covers machines that let the sequence overtake the frame.
                if zlib.crc32(seen[_HEADER.size :]) == _HEADER.unpack_from(seen)[1]:
                    found[r] = seen
                    missing.remove(r)
            return not missing

        self.wait_until(arrived, op, lambda: missing)
        return [found[r] for r in range(self.size)]

    def _gather(self, op: str, frame: bytearray) -> list[bytes]:
        if self.cpu_group is None:
            raise RankError(f"{op}: this group has no CPU backend to meet through", op=op)
        assert self._heartbeats is not None
        self._heartbeats.meeting = self._sequence
        mine = torch.frombuffer(frame, dtype=torch.uint8)
        out = torch.empty(self.size * len(frame), dtype=torch.uint8)
        self.wait_works([self.cpu_group._allgather_base(out, mine)], op)
        return [f.numpy().tobytes() for f in out.view(self.size, -1)]


def beside(call: Callable[[], T], look: Callable[[float], None]) -> T:
    """What `call` gives or raises, made by a thread; as `poll`, this one looks meanwhile.

    When `look` raises, the thread is left behind: for calls that are deaf to lost peers.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by result()
            made.set_exception(error)

    threading.Thread(target=run, name="beside", daemon=True).start()
    poll(made.done, look)
    return made.result()


def poll(done: Callable[[], bool], look: Callable[[float], None], spin_s: float = _SPIN_S) -> None:
    """Return when `done()`: yields, then sleeps; calls `look(seconds waited)` every 100 ms.

    What `look` raises ends the wait, unless `done()` became true just before.
    """
    started = time.monotonic()
    looked = started
    while not done():
        now = time.monotonic()
        if now - started < spin_s:
            _yield()
            continue
        if now - looked >= TICK_S:
            looked = now
            try:
                look(now - started)
            except RankError:
                if done():  # a peer may come, and then end, between two looks
                    return
                raise
        time.sleep(min(max(20e-6, (now - started) / 5), 4e-3))


def _read(frame: bytes, size: int) -> tuple[str, tuple[int, ...]]:
    _, _, length = _HEADER.unpack_from(frame)
    text = frame[_HEADER.size : _HEADER.size + length].decode(errors="replace")
    return text, struct.unpack_from(f"<{1 + 2 * size}q", frame, _HEADER.size + _TEXT)
