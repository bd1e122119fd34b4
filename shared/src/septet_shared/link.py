"""Emulated network links between ranks of one host, so that overlap can be measured on one machine.

On loopback a transfer is compute: it takes the processor from whatever it should hide behind. Here
the data moves at once and its *completion* is held, asleep, until the buckets of sender and
receiver would have let the bytes through. A waiting link costs no processor, so overlap is real
wall-clock time.

    egress(s)  = max(now, egress(s))  + bytes out / rate
    ingress(r) = max(now, ingress(r)) + bytes in / rate
    done       = max(own egress, own ingress, egress of each sender) + latency

A collective starts when all ranks have arrived. A broadcast pays at its source for each receiver;
no tree is emulated.
"""

from __future__ import annotations

import fcntl
import math
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from septet_shared._shared_pages import SharedPages, share
from septet_shared.ranks import Ranks, RankTimeout, Work
from septet_shared.ranks.session import TICK_S, poll
from septet_shared.ranks.work import OrderedThread

if TYPE_CHECKING:
    from septet_shared.ranks.session import Session
    from septet_shared.symmetric_heap import SymmetricHeap

_UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "tbit": 1e12 / 8}

# A rank's page: its buckets, its counters, the link's present specification (on rank 0's page), and
# where its latest departures end: a receiver looks up the sender's.
_BUCKETS = struct.Struct("<2d")  # egress, ingress: when each is free, monotonic clock
_COUNTERS = struct.Struct("<2q2d")  # bytes sent, bytes received, egress busy, ingress busy
_SPEC = struct.Struct("<2d?")  # bytes per second, latency, duplex
_DEPARTURE = struct.Struct("<Qd")  # key, when the last byte leaves
_COUNTERS_AT, _SPEC_AT, _RING_AT, _RING = 64, 128, 256, 2**13
_PAGE_BYTES = _RING_AT + _RING * _DEPARTURE.size


@dataclass(frozen=True)
class LinkSpec:
    """What a machine's link carries.

    Args:
        rate: "100mbit", "1gbit", ... (bits per second), or a number of bytes per second.
        latency_s: seconds that a transfer takes beyond its bytes.
        duplex: sending and receiving have a bucket each; else they share one.

    Raises:
        ValueError: the rate is not positive or not understood, or the latency is negative.
    """

    rate: str | float
    latency_s: float = 100e-6
    duplex: bool = True

    def __post_init__(self) -> None:
        try:
            positive = self.bytes_per_s > 0
        except TypeError:
            positive = False
        if not positive:
            raise ValueError(f"rate must be above 0; got {self.rate!r}")
        if not 0 <= self.latency_s < 60:
            raise ValueError(f"latency_s must be in [0, 60); got {self.latency_s}")

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes per second."""
        if not isinstance(self.rate, str):
            return float(self.rate)
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]bit)\s*(?:/s)?\s*", self.rate.lower())
        if not found:
            raise ValueError(f"rate must be like '100mbit' or bytes per second; got {self.rate!r}")
        return float(found[1]) * _UNITS[found[2]]


class EmulatedLink:
    """One pair of buckets a rank; made by `emulate`.

    Attributes:
        bytes_sent, bytes_received: what this rank's link has carried to and from other machines,
            one-sided copies by peers included.
        busy_s: seconds this rank's link was occupied (the busier direction when duplex).
    """

    def __init__(self, ranks: Ranks, spec: LinkSpec, pages: list[SharedPages]) -> None:
        self._ranks = ranks
        self._pages = pages
        self._index = {world: rank for rank, world in enumerate(ranks.session.members)}
        alone = ranks.family.machines is None
        self._machines = range(ranks.size) if alone else ranks.machines
        self._locks = [threading.Lock() for _ in pages]
        self._thread = OrderedThread(f"link-{ranks.rank}")
        if ranks.rank == 0:
            self.change(spec)

    # ---- what users ask ----

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank's link has sent."""
        return self._counters()[0]

    @property
    def bytes_received(self) -> int:
        """Bytes this rank's link has received."""
        return self._counters()[1]

    @property
    def busy_s(self) -> float:
        """Seconds this rank's link was occupied."""
        _, _, egress, ingress = self._counters()
        return max(egress, ingress) if self._spec()[2] else egress + ingress

    def change(self, spec: LinkSpec) -> None:
        """Give the link of every rank a new rate and latency; any rank may call it, at any time."""
        with self._locked(0):
            _SPEC.pack_into(
                self._pages[0].buffer, _SPEC_AT, spec.bytes_per_s, spec.latency_s, spec.duplex
            )

    @overload
    def get_rows(
        self,
        heap: SymmetricHeap,
        t: Tensor,
        rank: int,
        index: Tensor,
        out: Tensor,
        *,
        async_op: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def get_rows(
        self,
        heap: SymmetricHeap,
        t: Tensor,
        rank: int,
        index: Tensor,
        out: Tensor,
        *,
        async_op: Literal[True],
    ) -> Work[Tensor]: ...
    def get_rows(
        self,
        heap: SymmetricHeap,
        t: Tensor,
        rank: int,
        index: Tensor,
        out: Tensor,
        *,
        async_op: bool = False,
    ) -> Tensor | Work[Tensor]:
        """`out`, filled with rows `index` of rank `rank`'s copy of `t`, one-sided.

        Args:
            heap: the heap that `t` stands on; rank counts in the ranks of `emulate`.
            t: [N, ...]; index: [n] int64 in [0, N); out: [n, ...] like t.
            async_op: return a Work at once.

        Raises:
            ValueError: shapes or dtypes do not fit, or the heap is of other ranks.
            PeerLost: `rank` ended before its rows had come.

        Cost: one gather; n rows on the link when `rank` is on another emulated machine.
        """
        source = self._peer(heap, t, rank)
        _check_rows(t, index, out, "out")
        return self._one_sided(
            lambda: _gather(source, index, out), rank, self._ranks.rank, out.nbytes, async_op
        )

    @overload
    def put_rows(
        self,
        heap: SymmetricHeap,
        t: Tensor,
        rank: int,
        index: Tensor,
        rows: Tensor,
        *,
        async_op: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def put_rows(
        self,
        heap: SymmetricHeap,
        t: Tensor,
        rank: int,
        index: Tensor,
        rows: Tensor,
        *,
        async_op: Literal[True],
    ) -> Work[Tensor]: ...
    def put_rows(
        self,
        heap: SymmetricHeap,
        t: Tensor,
        rank: int,
        index: Tensor,
        rows: Tensor,
        *,
        async_op: bool = False,
    ) -> Tensor | Work[Tensor]:
        """Rank `rank`'s copy of `t`, whose rows `index` become `rows`; arguments as `get_rows`.

        The owner learns of it through a channel's signal, sent after this has completed.
        """
        target = self._peer(heap, t, rank)
        _check_rows(t, index, rows, "rows")
        return self._one_sided(
            lambda: _scatter(target, index, rows),
            self._ranks.rank,
            rank,
            rows.nbytes,
            async_op,
        )

    # ---- what collectives ask ----

    def depart(
        self, session: Session, bytes_out: Sequence[int], bytes_in: Sequence[int]
    ) -> Callable[[str], None] | None:
        """Reserve the link for an exchange that starts; call what is returned once data moved.

        It returns when the exchange is over (its argument is the name in errors).

        Args:
            session: the group that exchanges; its members must be members of `emulate`'s ranks.
            bytes_out, bytes_in: bytes to and from each of its ranks.
        """
        peers = [self._index[world] for world in session.members]
        me = peers[session.rank]
        remote = [self._machines[p] != self._machines[me] for p in peers]
        if not any(remote):
            return None
        number, starts = session.next_move()
        key = zlib.crc32(session.name.encode()) << 32 | number & 0xFFFFFFFF
        out = sum(n for n, r in zip(bytes_out, remote, strict=True) if r)
        into = sum(n for n, r in zip(bytes_in, remote, strict=True) if r)
        leaves, arrives = self._reserve(me, out, into, starts)
        page = self._pages[me].buffer
        with self._locks[me]:
            _DEPARTURE.pack_into(page, _place(key), key, leaves)
        senders = [i for i, (r, n) in enumerate(zip(remote, bytes_in, strict=True)) if r and n]

        def hold(op: str) -> None:
            latency_s = self._spec()[1]
            sent = {i: self._departure(peers[i], key) + latency_s for i in senders}
            _sleep_until(
                max(leaves + latency_s, arrives + latency_s, *sent.values()), session, op, sent
            )

        return hold

    # ---- buckets ----

    def _spec(self) -> tuple[float, float, bool]:
        rate, latency_s, duplex = _SPEC.unpack_from(self._pages[0].buffer, _SPEC_AT)
        return rate, latency_s, duplex

    def _counters(self) -> tuple[int, int, float, float]:
        sent, received, out_s, in_s = _COUNTERS.unpack_from(
            self._pages[self._ranks.rank].buffer, _COUNTERS_AT
        )
        return sent, received, out_s, in_s

    @contextmanager
    def _locked(self, rank: int) -> Iterator[None]:
        # Between threads by a lock, between processes by the file: the kernel frees a dead one's.
        with self._locks[rank]:
            descriptor = self._pages[rank].descriptor
            assert descriptor is not None

            def taken() -> bool:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True

            def look(waited_s: float) -> None:
                op = f"the emulated link of rank {rank}"
                self._ranks.check_alive(op, waited_s)
                if waited_s > self._ranks.timeout_s:
                    message = f"{op}: in use by another rank for {waited_s:.1f} s"
                    raise RankTimeout(message, op=op, waited_s=waited_s)

            poll(taken, look)  # a holder may have been stopped
            try:
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _reserve(self, rank: int, out: int, into: int, starts: float) -> tuple[float, float]:
        """When the last byte has left, and the last has come in, of a transfer that starts then."""
        rate, _, duplex = self._spec()
        page = self._pages[rank].buffer
        with self._locked(rank):
            egress, ingress = _BUCKETS.unpack_from(page, 0)
            if duplex:
                egress = max(starts, egress) + out / rate if out else egress
                ingress = max(starts, ingress) + into / rate if into else ingress
            elif out or into:
                egress = ingress = max(starts, egress) + (out + into) / rate
            _BUCKETS.pack_into(page, 0, egress, ingress)
            sent, received, out_s, in_s = _COUNTERS.unpack_from(page, _COUNTERS_AT)
            _COUNTERS.pack_into(
                page,
                _COUNTERS_AT,
                sent + out,
                received + into,
                out_s + out / rate,
                in_s + into / rate,
            )
        return (egress if out else starts), (ingress if into else starts)

    def _departure(self, sender: int, key: int) -> float:
        found, end = _DEPARTURE.unpack_from(self._pages[sender].buffer, _place(key))
        return float(end) if found == key else 0.0  # overwritten, by one of a later moment

    def _peer(self, heap: SymmetricHeap, t: Tensor, rank: int) -> Tensor:
        if (heap.rank, heap.size) != (self._ranks.rank, self._ranks.size):
            raise ValueError(
                f"heap must be of the ranks of this link (rank {self._ranks.rank} of "
                f"{self._ranks.size}); got rank {heap.rank} of {heap.size}"
            )
        return heap.peer(t, rank)

    def _one_sided(
        self, copy: Callable[[], Tensor], sender: int, receiver: int, nbytes: int, async_op: bool
    ) -> Tensor | Work[Tensor]:
        until, other = 0.0, sender if receiver == self._ranks.rank else receiver
        if self._machines[sender] != self._machines[receiver]:
            starts = time.monotonic()
            leaves, _ = self._reserve(sender, nbytes, 0, starts)
            _, arrives = self._reserve(receiver, 0, nbytes, starts)
            until = max(leaves, arrives) + self._spec()[1]

        def transfer() -> Tensor:
            with torch.no_grad():
                result = copy()
            _sleep_until(until, self._ranks.session, "one-sided copy", {other: until})
            return result

        if async_op or self._thread.busy:
            future: Future[Tensor] = self._thread.submit(transfer)
            work = Work(future, "one-sided copy")
            return work if async_op else work.wait()
        return transfer()


@contextmanager
def emulate(ranks: Ranks, spec: LinkSpec) -> Iterator[EmulatedLink]:
    """A link between the (emulated) machines of `ranks`; collective, on entry and exit.

    It holds for the collectives of `ranks` and of every group made from it, before or later.
    Traffic inside a machine is free; without `ranks_per_machine` each rank is a machine.

    Raises:
        ValueError: the ranks are on several hosts, on CUDA, or have a link already.
        RanksDiverged: ranks ask for different links.

    Cost: two flock calls and a sleep an exchange, below 20 us.
    """
    if ranks.device.type != "cpu":
        raise ValueError(f"a link is emulated between CPU ranks; got {ranks.device}")
    if not ranks.on_one_host:
        raise ValueError("a link is emulated between ranks of one host; these are on several")
    if ranks.family.find_link() is not None:
        raise ValueError("these ranks have an emulated link already; use its change()")
    ranks.agree(spec, "the emulated link")
    turn = ranks._cache["links"] = ranks._cache.get("links", 0) + 1
    pages = share(ranks, _PAGE_BYTES, f"link{turn}", keep_descriptors=True)
    link = EmulatedLink(ranks, spec, pages)
    ranks.barrier("emulate a link")
    ranks.family.link = link
    try:
        yield link
    finally:
        ranks.family.link = None  # its pages go with the last Work and the last who asks for bytes


def _gather(source: Tensor, index: Tensor, out: Tensor) -> Tensor:
    if out.is_contiguous():
        return torch.index_select(source, 0, index, out=out)
    return out.copy_(source.index_select(0, index))


def _scatter(target: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    # Torch copies a row element by element: as words, bytes take an eighth of the time.
    width = math.prod(target.shape[1:])
    row_bytes, starts = (
        width * target.element_size(),
        target.storage_offset() * target.element_size(),
    )
    if target.is_contiguous() and row_bytes and row_bytes % 8 == 0 and starts % 8 == 0:
        source = rows.contiguous()
        if source.storage_offset() * source.element_size() % 8:
            source = source.clone()
        words = [x.view(len(x), width).view(torch.int64) for x in (target, source)]
        words[0].index_copy_(0, index, words[1])
        return target
    return target.index_copy_(0, index, rows)


def _place(key: int) -> int:
    # Mixed well: groups that keep step must not meet in one place again and again.
    return _RING_AT + (key * 0x9E3779B97F4A7C15 % 2**64 >> 51) * _DEPARTURE.size


def _check_rows(t: Tensor, index: Tensor, rows: Tensor, name: str) -> None:
    if index.dtype != torch.int64 or index.dim() != 1:
        raise ValueError(f"index must be [n] int64; got {index.dtype} {tuple(index.shape)}")
    shape = (len(index), *t.shape[1:])
    if rows.shape != shape or rows.dtype != t.dtype:
        raise ValueError(f"{name} must be {t.dtype} {shape}; got {rows.dtype} {tuple(rows.shape)}")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(t):
        raise ValueError(
            f"index must be in [0, {len(t)}); got {int(index.min())}..{int(index.max())}"
        )


def _sleep_until(moment_s: float, session: Session, op: str, sent: dict[int, float]) -> None:
    """Sleep; raise PeerLost when a peer ends before `sent[peer]`, when its last byte is here."""
    started = time.monotonic()
    if moment_s - started > session.timeout_s:
        message = (
            f"{op}: the emulated link needs {moment_s - started:.1f} s for it, more than the "
            f"time-out of {session.timeout_s:.1f} s"
        )
        raise RankTimeout(message, op=op)
    while (left := moment_s - time.monotonic()) > 0:
        time.sleep(min(left, TICK_S))
        now = time.monotonic()
        session.check_alive(op, now - started, [r for r, at in sent.items() if now < at])
