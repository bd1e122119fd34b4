"""`SymmetricHeap`: segments of memory that all ranks map, and what is allocated in them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from septet_shared.ranks import RankError, RanksDiverged
from septet_shared.symmetric_heap.arena import Arena, layout
from septet_shared.symmetric_heap.blocks import UNIT_BYTES, Block, Blocks, HeapStatistics
from septet_shared.symmetric_heap.channel import BARRIER_LINES, Channel
from septet_shared.symmetric_heap.control import CONTROL_BYTES, Control
from septet_shared.symmetric_heap.flags import LINE_BYTES
from septet_shared.symmetric_heap.memory import HeapUnavailable, Memory, together
from septet_shared.symmetric_heap.selftest import SCRATCH_BYTES, TEST_CHANNEL, selftest
from septet_shared.symmetric_heap.stream_channel import (
    StreamChannel,
    close_to_kernels,
    open_to_kernels,
    settle,
    watch,
)

if TYPE_CHECKING:
    from septet_shared.ranks import Ranks


class SymmetricHeap:
    """One rank's view of a heap; made by `create` or `local`.

    `empty`, `arena`, `channel` and `grow` are collective: every rank makes the same calls in the
    same order. Only `grow` waits for the others. A difference is found by the last rank to call and
    then raised on every rank. `with heap:` closes it; an exception inside poisons it first.

    Attributes:
        rank, size: this rank, and how many share the heap.
        device: where its tensors live.
        backend: "posix", "torch", "cuda_ipc" or "local".
    """

    def __init__(
        self, memory: Memory, control: Control, slots: int, ranks: Ranks | None = None
    ) -> None:
        """For `create` and `local`; ranks is None for a virtual rank."""
        self.rank, self.size = control.rank, control.size
        self.device, self.backend = memory.device, memory.backend
        self._memory, self._control, self._ranks = memory, control, ranks
        self._slots, self._words = slots, 0  # flag words in all, and taken by channels
        self._channels: dict[str, Channel] = {}
        self.blocks = Blocks()
        self._segments: list[list[Tensor]] = []  # [segment][rank] uint8
        self._views = [self]  # of a local heap: all, by rank
        self._flag_tensors: list[Tensor] = []
        self._flag_addresses = [address + CONTROL_BYTES for address in control.addresses]
        if memory.on_stream:
            self._flag_tensors = memory.segment(slots * LINE_BYTES)
            self._flag_addresses = [t.data_ptr() for t in self._flag_tensors]
            # Views of a local heap are in one process: each page is opened once.
            self._opened = {self.rank} if ranks is None else {0, self.rank}
            if memory.device.type == "cuda":
                open_to_kernels(control, self._opened)
            watch(control)
        self.channel(TEST_CHANNEL, self.size)

    @staticmethod
    def create(
        ranks: Ranks,
        nbytes: int,
        *,
        backend: str = "auto",
        timeout_s: float = 60.0,
        slots: int = 1024,
    ) -> SymmetricHeap:
        """A heap of `nbytes` on each rank, tested by reading and writing between all pairs.

        Args:
            ranks: who shares it, all on one host; emulated machines do not matter. Collective.
            nbytes: bytes on each rank, at least 1; taken from the machine as they are touched.
            backend: "auto" is "posix" for ranks on CPUs, else "torch", else "cuda_ipc". "posix"
                gives host memory to ranks on GPUs too. A single rank gets "local".
            timeout_s: limit of a wait that names none.
            slots: flag words on each rank; a channel takes n and a few more.

        Raises:
            ValueError: an argument is out of range.
            RanksDiverged: arguments differ between ranks.
            MemoryError: the ranks together ask for more than the machine has left.
            HeapUnavailable: ranks of several hosts, or no backend works; says why.
            PeerLost, RankTimeout: a rank is lost or missing.

        Cost: about 10 ms. When one rank raises, all do.
        """
        from septet_shared.symmetric_heap.opening import create

        return create(ranks, nbytes, backend, timeout_s, slots)

    @staticmethod
    def local(
        size: int,
        nbytes: int,
        device: str | torch.device = "cpu",
        *,
        timeout_s: float = 60.0,
        slots: int = 1024,
    ) -> SymmetricHeap:
        """Rank 0's view of a heap of `size` virtual ranks in this process; `on(rank)`: the others'.

        Ranks may run in threads of their own. In one thread they may take turns as long as what is
        waited for has been signalled; a barrier needs a thread (on a GPU: a stream) for each rank.

        Raises:
            ValueError: an argument is out of range.
            MemoryError: size * nbytes is more than the device has left.
        """
        from septet_shared.symmetric_heap.opening import local

        return local(size, nbytes, torch.device(device), timeout_s, slots)

    def on(self, rank: int) -> SymmetricHeap:
        """The view of a virtual rank of a local heap; of another heap, only one's own.

        Raises:
            ValueError: rank is out of range, or another process's.
        """
        _check_rank(rank, self.size)
        if rank not in [v.rank for v in self._views]:
            raise ValueError(f"rank must be {self.rank}, this process's own; got {rank}")
        return next(v for v in self._views if v.rank == rank)

    # ---- memory ----

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype, align: int = 64) -> Tensor:
        """An uninitialised tensor at the same place on every rank; collective, does not wait.

        Args:
            shape: sizes, each at least 0.
            dtype: any torch dtype.
            align: a power of two up to 4096: bytes that the address is a multiple of (at least 64).

        Raises:
            ValueError, TypeError: an argument is not as above.
            MemoryError: no segment has room; `grow` adds one.
            RanksDiverged: this rank's call differs from a peer's.

        Memory is given back by `close`; for buffers that come and go, use `arena`. The tensor keeps
        its mapping alive: on "posix" and "local" it may outlive the heap.

        Cost: about 20 us.
        """
        sizes, nbytes = layout(shape, dtype, align)
        self._control.record(f"empty({list(sizes)}, {dtype}, align={align})")
        return self.tensor(self.blocks.take(nbytes, align), sizes, dtype)

    def arena(self, nbytes: int) -> Arena:
        """`with heap.arena(nbytes) as a: x = a.empty(shape, dtype)`: memory released as a block.

        Collective like `empty`. A barrier must separate the peers' last use of the arena's tensors
        from what is next allocated there.

        Raises:
            ValueError: nbytes is below 1. MemoryError: no segment has room (on entry).
        """
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1; got {nbytes}")
        return Arena(self, nbytes)

    def peer(self, t: Tensor, rank: int) -> Tensor:
        """`t` as it lies in the memory of `rank`: same shape, strides and dtype, no copy.

        Args:
            t: this rank's tensor of this heap, or any view of one.
            rank: in [0, size); this rank gives `t`'s own memory.

        Raises:
            ValueError: rank is out of range, or `t` is not in this rank's part of the heap.

        Cost: about 5 us.
        """
        _check_rank(rank, self.size)
        base = self._segment_of(t)[rank]
        return base.view(t.dtype).as_strided(t.size(), t.stride(), t.storage_offset())

    def pointers(self, t: Tensor) -> Tensor:
        """int64 [size] on the heap's device: address of `t`'s first element on each rank.

        Addresses are this process's. They stay valid until `close`, whatever grows meanwhile.

        Raises:
            ValueError: `t` is not in this rank's part of the heap.
        """
        offset = t.storage_offset() * t.element_size()
        addresses = [base.data_ptr() + offset for base in self._segment_of(t)]
        return torch.tensor(addresses, dtype=torch.int64).to(self.device)

    def grow(self, nbytes: int) -> None:
        """Add a segment of `nbytes` on each rank; tensors, views and pointers stay valid.

        Collective: waits for all ranks.

        Raises:
            ValueError: nbytes is below 1. RanksDiverged: it differs between ranks.
            MemoryError: the ranks together ask for more than the machine has left.
            HeapUnavailable: a rank was lost; make a new heap of the living ones.
            PeerLost, RankTimeout: a rank is lost or missing.
        """
        self._control.hold()
        if len(self._control.living) < self.size:
            raise HeapUnavailable(f"of {self.size} ranks only {self._control.living} live")
        if self._ranks is None:
            check_whole("nbytes", nbytes)
            self._control.record(f"grow({nbytes})")
        self.add_segment(nbytes)

    def statistics(self) -> HeapStatistics:
        """What this rank's part holds: bytes asked for, in use, most in use so far; segments."""
        return self.blocks.statistics()

    # ---- flags ----

    def channel(self, name: str, n: int = 1) -> Channel:
        """`n` flag words on each rank under this name, and a barrier; collective, does not wait.

        The same name and n give the same channel again.

        Raises:
            ValueError: n is below 0, the name is in use with another n, or the slots are used up.
            RanksDiverged: this rank's call differs from a peer's.
        """
        self._control.hold()
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"n must be at least 0; got {n}")
        made = self._channels.get(name)
        if made is not None and made.n != n:
            raise ValueError(f"channel {name!r} has n={made.n}; got n={n}")
        if made is not None:
            return made
        taken, left = n + max(BARRIER_LINES, self.size), self._slots - self._words
        if taken > left:
            raise ValueError(f"channel {name!r} needs {taken} of the heap's slots, {left} are left")
        self._control.record(f"channel({name!r}, n={n})")
        arguments = (name, n, self._words)
        self._channels[name] = (
            StreamChannel(self._control, self._flag_tensors, *arguments)
            if self._memory.on_stream
            else Channel(self._control, self._flag_addresses, *arguments)
        )
        self._words += taken
        return self._channels[name]

    def flag_pointers(self) -> Tensor:
        """int64 [size] on the heap's device: address of each rank's flag words.

        Word i of a channel is the int32 `64 * (channel.first_word + i)` bytes further.
        """
        self._control.hold()
        return torch.tensor(self._flag_addresses, dtype=torch.int64).to(self.device)

    def recover(self, ranks: Ranks | None = None) -> list[int]:
        """The living ranks, whose channels are usable again; collective over them.

        Lifts the poison. Barriers continue among the living; flag words keep their epochs. Memory
        of a lost rank stays readable on "posix". Legal on a sound heap.

        Args:
            ranks: what `Ranks.recover()` gave when the group was aborted and nobody was lost.
                `grow` needs it then; without it waits heed no further aborts, only deaths.

        Raises:
            RankTimeout: a living rank did not come; may be called again.
        """
        c = self._control
        c.hold()
        if self._memory.on_stream:
            c.poison("recovery")  # ends the kernels that wait
            settle(self.device)
        c.meet("recover")
        channels = list(self._channels.values())
        epochs = [channel.latest_epoch() for channel in channels]
        c.meet("recover")  # nobody restarts before all have looked
        if ranks is not None and ranks.size == self.size:
            self._ranks, c.check_alive = ranks, ranks.check_alive
        try:
            c.check_alive("recover", 0.0, ())
        except RankError:  # what the old group ended with is over; from now on only deaths count
            c.check_alive = lambda op, waited_s, missing: None
        c.clear()
        for channel, epoch in zip(channels, epochs, strict=True):
            channel.restart(epoch)
        settle(self.device)
        c.meet("recover")
        return list(c.living)

    def selftest(self) -> None:
        """Return when every pair of ranks reads, writes and signals in order through this heap.

        Collective; on a local heap it runs all ranks, in threads. Takes a few ms.

        Raises:
            HeapUnavailable: names what failed. RankError: a rank did not answer.
        """
        self._control.hold()
        selftest([self] if self._ranks is not None else self._views)

    # ---- the end ----

    def close(self) -> None:
        """Let go of the memory; further calls raise RuntimeError, further closes do nothing.

        Host memory goes when the last process and the last tensor let go of it, so no rank waits.
        GPU memory is unmapped by all, then freed: collective, and tensors must not be used
        afterwards; unclosed it stays until the process ends. On a local heap closes all views.
        """
        for view in self._views:
            view._close()

    def _close(self) -> None:
        c = self._control
        held = c.pages
        if not held:
            return
        settle(self.device)
        c.pages = []
        if self._memory.on_stream:
            if self.device.type == "cuda":
                close_to_kernels(c, self._opened)
            self._memory.unmap_peers()
            # A peer that does not come may still read: then the memory goes with the process.
            with suppress(RankError):
                if self._ranks is not None:
                    c.meet("close")
                self._memory.free()
        self._segments = []
        self._flag_tensors = []
        self._channels = {}
        del held

    def __enter__(self) -> SymmetricHeap:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self.closed:
            self._control.poison(f"{type(error).__name__}: {error}")
        self.close()

    # ---- for the other modules of this package ----

    def add_segment(self, nbytes: int) -> None:
        """What `create` and `grow` do, once their arguments are checked; collective."""
        available = self._memory.available_bytes()
        if self._ranks is not None:
            asked = self._ranks.all_gather_object((nbytes, self._control.digest, available))
            for r, (theirs, digest, _) in enumerate(asked):
                if (theirs, digest) != asked[0][:2]:
                    message = f"rank 0 adds {asked[0][0]} bytes and rank {r} {theirs}"
                    message += ", or their earlier calls on the heap differ"
                    raise RanksDiverged(message, rank=r, op="SymmetricHeap.grow")
            available = min(a for _, _, a in asked)
        check_whole("nbytes", nbytes)  # on every rank, or on none
        wanted = nbytes * self._memory.shares
        if wanted > available:
            message = f"{nbytes} bytes a rank are {wanted} in all, but {available} are available"
            raise MemoryError(message)
        scratch_bytes = 0 if self._segments else SCRATCH_BYTES * self.size
        # A multiple of any item's size, so that a segment can be viewed as any dtype.
        whole = -(-(scratch_bytes + nbytes) // UNIT_BYTES) * UNIT_BYTES

        def segment() -> list[Tensor]:
            return self._memory.segment(whole)

        ranks = self._ranks
        self._segments.append(segment() if ranks is None else together(ranks, segment))
        self.blocks.add_segment(scratch_bytes, nbytes)

    def tensor(self, block: Block, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's bytes of the block."""
        own = self._segments[block.segment][self.rank].view(dtype)
        return own[block.start // dtype.itemsize :][: math.prod(sizes)].view(sizes)

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return not self._control.pages

    def _segment_of(self, t: Tensor) -> list[Tensor]:
        self._control.hold()
        storage = t.untyped_storage().data_ptr()
        for segment in self._segments:
            if segment[self.rank].data_ptr() == storage:
                return segment
        raise ValueError(
            f"t must be a tensor of rank {self.rank} in this heap, or a view of one; got a "
            f"{t.dtype} tensor of shape {list(t.shape)} that lies elsewhere"
        )


def check_whole(name: str, value: int) -> None:
    """Raise ValueError unless a whole number of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in [0, {size}); got {rank}")
