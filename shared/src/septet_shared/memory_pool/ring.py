"""Rings of buffers that are used again, and the pool of page-locked memory."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from septet_shared.memory_pool.lending import (
    Memory,
    Shape,
    checked_device,
    end,
    lend,
    measured,
    new_memory,
)


class BufferRing:
    """Buffers of one shape that go round: acquired, used, given back, acquired again.

    count: buffers to begin with. shape_or_bytes: their shape, or as an int their size in bytes
    (then one-dimensional). A buffer is lent again once it was released or dropped and no view of it
    lives. grow=True makes a buffer where none is free; otherwise `acquire` waits. Thread-safe.

    Counters: count, in_use, peak_in_use, reuses (times that used memory was lent), reserved_bytes.
    Raises ValueError: count < 1 (< 0 with grow), a bad shape, bytes that dtype does not divide.
    """

    def __init__(
        self,
        count: int,
        shape_or_bytes: Shape,
        dtype: torch.dtype = torch.uint8,
        device: str | torch.device = "cpu",
        *,
        grow: bool = False,
    ) -> None:
        if count < (0 if grow else 1):
            raise ValueError(f"count must be >= {0 if grow else 1}; got {count}")
        if isinstance(shape_or_bytes, int):
            if shape_or_bytes % dtype.itemsize:
                raise ValueError(
                    f"shape_or_bytes must be a multiple of {dtype.itemsize}, the bytes of one "
                    f"{dtype}; got {shape_or_bytes}"
                )
            shape_or_bytes = shape_or_bytes // dtype.itemsize
        self.shape, self._nbytes = measured(shape_or_bytes, dtype)
        self.dtype, self.device, self.grow = dtype, checked_device(device), grow
        self.peak_in_use = self.reuses = 0
        self._lock = threading.RLock()  # a finaliser may release while this thread acquires
        self._slots: list[_Slot] = []
        # A SimpleQueue takes what a weak reference's callback puts, whatever its thread was doing.
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(count):
            self._free.put(self._new_slot())

    def __repr__(self) -> str:
        return f"BufferRing({self.count} of {self.shape} {self.dtype} on {self.device})"

    @property
    def count(self) -> int:
        """Buffers there are."""
        return len(self._slots)

    @property
    def in_use(self) -> int:
        """Buffers lent now."""
        return self.count - self._free.qsize()

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from torch."""
        return sum(len(slot.memory) for slot in self._slots)

    def acquire(self, timeout_s: float = 60.0) -> Tensor:
        """An uninitialised buffer that nobody else can see.

        Raises TimeoutError naming the ring when none came free in timeout_s (never with grow).
        Cost: some 10 us, its release included.
        """
        if not timeout_s >= 0:
            raise ValueError(f"timeout_s must be >= 0; got {timeout_s}")
        return self._lend(self._take(timeout_s), self.shape, self.dtype)

    def _lend(self, slot: _Slot, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            if slot.idle_since is not None:
                torch.cuda.current_stream(self.device).wait_event(slot.idle_since)
            tensor, slot.lease = lend(
                slot.memory, 0, len(slot.memory), shape, dtype, self._returner(slot)
            )
        except BaseException:
            self._free.put(slot)
            raise
        with self._lock:
            self.reuses += slot.used
            self.peak_in_use = max(self.peak_in_use, self.in_use)
            slot.tensor, slot.used = weakref.ref(tensor), True
        return tensor

    def release(self, buffer: Tensor) -> None:
        """Gives back what `acquire` returned, from any thread: `buffer` ends (see the module).

        Raises ValueError for what this ring has not lent: a view, a tensor released before.
        """
        if not self._release(buffer):
            raise ValueError(
                f"buffer must be a tensor that acquire of {self} returned and that was not "
                f"released before; got {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
            )

    @contextlib.contextmanager
    def slot(self, timeout_s: float = 60.0) -> Iterator[Tensor]:
        """A buffer for the length of a `with` block; it may be released inside already."""
        buffer = self.acquire(timeout_s)
        try:
            yield buffer
        finally:
            self._release(buffer)

    def _release(self, buffer: Tensor) -> bool:
        with self._lock:
            for slot in self._slots:
                if slot.tensor is not None and slot.tensor() is buffer:
                    end(slot.tensor)
                    slot.tensor = None
                    return True
        return False

    def _new_slot(self) -> _Slot:
        slot = _Slot(new_memory(max(self._nbytes, 1), self.device))
        self._slots.append(slot)
        return slot

    def _take(self, timeout_s: float) -> _Slot:
        began = time.monotonic()
        with contextlib.suppress(Empty):
            return self._free.get_nowait()
        if self.grow:
            return self._new_slot()
        with contextlib.suppress(Empty):
            return self._free.get(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        raise TimeoutError(
            f"{self} had no buffer free: waited {time.monotonic() - began:.3f} s with all lent, or "
            f"kept by views, NumPy arrays or autograd graphs (timeout_s={timeout_s})"
        )

    def _returner(self, slot: _Slot) -> Callable[[object], None]:
        free, device = self._free, self.device  # not the ring, which a buffer need not keep

        def returned(_: object) -> None:
            if device.type == "cuda":
                slot.idle_since = torch.cuda.Event()  # type: ignore[no-untyped-call]
                slot.idle_since.record(torch.cuda.current_stream(device))
            free.put(slot)

        return returned


@dataclass(eq=False)
class _Slot:
    memory: Memory
    lease: weakref.ref[Any] | None = None
    tensor: weakref.ref[Tensor] | None = None  # what was lent last, unless it was released
    used: bool = False
    idle_since: Any = None  # CUDA event recorded when the slot came back


_staging: dict[int, BufferRing] = {}  # by bytes


def pinned(shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised CPU tensor, page-locked where there is CUDA, whose memory is pooled.

    The memory goes back to the pool with the last view of the tensor, and is not lent again before
    asynchronous copies from or to it have ended (torch's host allocator sees to that). Sizes are
    rounded up to a power of two; the pool keeps what it once had. Raises ValueError: a bad shape.
    """
    shape, nbytes = measured(shape, dtype)
    if torch.cuda.is_available():
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    size = max(4096, 1 << (nbytes - 1).bit_length())
    ring = _staging.get(size) or _staging.setdefault(size, BufferRing(0, size, grow=True))
    return ring._lend(ring._take(0), shape, dtype)
