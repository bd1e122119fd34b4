"""Peaks: the most memory that a piece of code held at one time."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from septet_shared.memory_pool.lending import checked_device


@dataclass(eq=False)
class Peak:
    """What `track_peak` measures, in bytes; `notes` says where a figure is less than promised."""

    bytes: int = 0
    resident_bytes: int = 0
    notes: str = ""


@contextlib.contextmanager
def track_peak(device: str | torch.device = "cpu") -> Iterator[Peak]:
    """Peak memory of the `with` block; the figures stand when it ends. Blocks may nest.

    bytes, on CPU: the most that storages allocated inside held at one time. Counts what torch
    operators return on this thread, backward included, and sees storages die on any thread. Does
    not count what operators use and free inside, what compiled code allocates inside, other
    threads, memory that is not torch's. On CUDA: growth of the caching allocator's allocated bytes.

    resident_bytes: growth of the process's resident set at its highest over its state on entry,
    where freed heap memory is returned to the system and the high-water mark is reset. Counts all
    threads and libraries, but only pages that were touched, and on kernels up to 6.16 with an error
    of some pages per core. Where the mark cannot be reset, memory freed before entry hides growth:
    `notes` says so.

    Cost on CPU: about 10 us for each torch operator, so measure time in another run.
    Raises ValueError: device is neither a CPU nor a CUDA device that is there.
    """
    gauge = _Gauge(checked_device(device))
    with contextlib.ExitStack() as stack:
        with _gauges_lock:
            for other in _gauges:  # before their marks are reset
                other.sample()
            gauge.start()
            _gauges.append(gauge)
        try:
            if gauge.device.type == "cpu":
                stack.enter_context(_LiveBytes(gauge.peak))
            yield gauge.peak
        finally:
            with _gauges_lock:
                gauge.sample()
                _gauges.remove(gauge)


class _Gauge:
    """The marks of one `track_peak`: read before anybody resets them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, Peak()

    def start(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # only glibc keeps and can trim
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            self.peak.notes = (
                f"the high-water mark was not reset ({type(error).__name__}): memory freed before "
                "entry hides growth of resident_bytes"
            )
        self._resident_bytes = _resident_high_water_bytes()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._allocated_bytes = torch.cuda.memory_allocated(self.device)

    def sample(self) -> None:
        grown = _resident_high_water_bytes() - self._resident_bytes
        self.peak.resident_bytes = max(self.peak.resident_bytes, grown)
        if self.device.type == "cuda":
            grown = torch.cuda.max_memory_allocated(self.device) - self._allocated_bytes
            self.peak.bytes = max(self.peak.bytes, grown)


_gauges: list[_Gauge] = []
_gauges_lock = threading.Lock()


def _resident_high_water_bytes() -> int:
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises peak.bytes to the bytes of live CPU storages that operators made under this mode."""

    def __init__(self, peak: Peak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._peak, self._live_bytes = peak, 0
        self._storages: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}
        self._dead: deque[int] = deque()  # storages may die at any point of any thread

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # measuring must not switch compilation off

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operator would load the compiler: 150 MB of resident memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        while self._dead:
            self._live_bytes -= self._storages.pop(self._dead.popleft())[0]
        given: set[int] | None = None
        for storage in _cpu_storages(out):
            key, size = storage._cdata, storage.nbytes()
            if key in self._storages:
                known, ref = self._storages[key]
            else:
                if given is None:
                    given = {each._cdata for each in _cpu_storages((args, kwargs))}
                # What lift_fresh is given is new, unless it wraps memory that is not torch's.
                new = func is torch.ops.aten.lift_fresh.default and storage.resizable()
                if key in given and not new:
                    continue
                known, ref = 0, weakref.ref(storage, partial(self._died, key))
            self._storages[key] = size, ref
            self._live_bytes += size - known
        self._peak.bytes = max(self._peak.bytes, self._live_bytes)
        return out

    def _died(self, key: int, _: object) -> None:
        self._dead.append(key)


def _cpu_storages(tree: Any) -> Iterator[UntypedStorage]:
    if isinstance(tree, Tensor):
        if tree.layout is torch.strided:
            tree = tree.untyped_storage()
        elif tree.layout is torch.sparse_coo:
            yield from _cpu_storages((tree._indices(), tree._values()))
    if isinstance(tree, UntypedStorage):
        if tree.device.type == "cpu":
            yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _cpu_storages(each)
    elif isinstance(tree, dict):
        yield from _cpu_storages(list(tree.values()))
