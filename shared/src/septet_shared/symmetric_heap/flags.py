"""Signals, waits and barriers on flag words in host memory: in C++, else in Python.

A word is an int32 epoch at the start of a 64-byte line. Both versions work on the same lines, so
ranks that have a compiler and ranks that have none can share a heap.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

from septet_shared import native

LINE_BYTES = 64
DONE, NOT_YET, POISONED, MISMATCH = range(4)  # as in heap.cpp


class Barrier(ctypes.Structure):
    """One rank's side of a channel's barriers, as in heap.cpp; line r is null where r is gone."""

    _fields_ = (
        ("lines", POINTER(c_void_p)),
        ("poison", c_void_p),
        ("size", c_int32),
        ("rank", c_int32),
        ("epoch", c_int32),
        ("arrived", c_int32),
        ("culprit", c_int32),
    )

    def __init__(self, lines: Sequence[int | None], poison: int, rank: int, epoch: int) -> None:
        table = (c_void_p * len(lines))(*lines)
        super().__init__(
            lines=ctypes.cast(table, POINTER(c_void_p)),
            poison=poison,
            size=len(lines),
            rank=rank,
            epoch=epoch,
        )
        self.table = table


def library() -> ctypes.CDLL:
    """heap.cpp, built. Raises native.NativeUnavailable without a compiler."""
    lib = native.build("heap", [Path(__file__).with_name("heap.cpp")], openmp=False)
    signatures = {
        "heap_signal": (None, [c_void_p, c_int32]),
        "heap_wait": (c_int32, [c_void_p, c_int32, c_void_p, c_int64]),
        "heap_barrier": (c_int32, [POINTER(Barrier), c_uint64, c_char_p, c_int64]),
        "heap_stream": (None, [c_void_p, c_void_p, c_int64]),
        "heap_fence": (None, []),
        "heap_claim": (c_int32, [c_void_p, c_int32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def reached(value: int, epoch: int) -> bool:
    """True when `value` is at or less than half the int32 range after `epoch`; epochs wrap."""
    return (value - epoch) % 2**32 < 2**31


class NativeFlags:
    """The C++ version: acquire and release, spin, yield, futex; the interpreter is let go."""

    def __init__(self) -> None:
        lib = library()
        # The library's own functions: a Python frame around them costs as much as they do.
        self.signal, self.wait, self.barrier = lib.heap_signal, lib.heap_wait, lib.heap_barrier
        self.fence, self.claim = lib.heap_fence, lib.heap_claim


class PlainFlags:
    """The Python version: aligned stores and polling, about 50 us a wait.

    Two ranks must not signal the same word at once: raising it takes a load and a store here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def fence(self) -> None:
        """Orders memory: nothing moves across a lock's release followed by another's acquire."""
        for _ in range(2):
            with self._lock:
                pass

    def claim(self, address: int, value: int) -> int:
        """Sets the word when it is 0; the word before."""
        word = c_int32.from_address(address)
        seen = word.value
        if seen == 0:
            word.value = value
            self.fence()
        return seen

    def signal(self, address: int, epoch: int) -> None:
        """Raises the word to the epoch."""
        self.fence()
        word = c_int32.from_address(address)
        if not reached(word.value, epoch):
            word.value = epoch

    def wait(self, address: int, epoch: int, poison: int, slice_ns: int) -> int:
        """DONE, POISONED, or NOT_YET after the slice."""
        word, poisoned = c_int32.from_address(address), c_int32.from_address(poison)
        deadline = time.monotonic_ns() + slice_ns
        pause_s = 0.0
        while not poisoned.value:
            if reached(word.value, epoch):
                self.fence()
                return DONE
            if time.monotonic_ns() >= deadline:
                return NOT_YET
            time.sleep(pause_s)  # 0 yields the core
            pause_s = min(pause_s + 2e-6, 5e-4)
        return POISONED

    def barrier(self, b: Barrier, stamp: int, name: bytes, slice_ns: int) -> int:
        """DONE, POISONED, NOT_YET (b.culprit is missing) or MISMATCH (b.culprit differs)."""
        if c_int32.from_address(b.poison).value:
            return POISONED
        mine = b.table[b.rank]
        assert mine is not None
        if not b.arrived:
            b.epoch = c_int32(b.epoch + 1).value
            parity = b.epoch & 1
            (c_uint64 * 2).from_address(mine + 8)[parity] = stamp
            text = name[: LINE_BYTES - 1].ljust(LINE_BYTES, b"\0")
            ctypes.memmove(mine + LINE_BYTES * (1 + parity), text, LINE_BYTES)
            self.fence()
            c_int32.from_address(mine).value = b.epoch
            b.arrived = 1
        for r, line in enumerate(b.table):
            if line is not None and r != b.rank:
                outcome = self.wait(line, b.epoch, b.poison, slice_ns)
                if outcome != DONE:
                    b.culprit = r
                    return outcome
        b.arrived = 0
        for r, line in enumerate(b.table):
            if line is not None and stamp_at(line, b.epoch) != stamp_at(mine, b.epoch):
                b.culprit = r
                return MISMATCH
        return DONE


def stamp_at(line: int, epoch: int) -> int:
    """The stamp that a rank left in its arrival line for a barrier."""
    return (c_uint64 * 2).from_address(line + 8)[epoch & 1]


def name_at(line: int, epoch: int) -> str:
    """The operation that a rank named for a barrier, up to 63 bytes."""
    text = ctypes.string_at(line + LINE_BYTES * (1 + (epoch & 1)), LINE_BYTES)
    return text.partition(b"\0")[0].decode(errors="replace")


def _plain() -> NativeFlags | PlainFlags:
    return PlainFlags()


@native.fallback(_plain)
def flags() -> NativeFlags | PlainFlags:
    """The C++ version, or where it cannot be built the Python one, with a warning."""
    return NativeFlags()
