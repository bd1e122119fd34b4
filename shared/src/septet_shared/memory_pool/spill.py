"""A temporary file that holds tensors which are not needed for a while."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from bisect import bisect
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from septet_shared.memory_pool.lending import aligned

_PAGE_BYTES = 4096


@dataclass(frozen=True, eq=False)
class SpillHandle:
    """A tensor in a `SpillFile`; its bytes are free again when the handle is dropped."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    _offset: int = field(repr=False)
    _file: weakref.ref[SpillFile] = field(repr=False)


class SpillFile:
    """Tensors kept in a nameless temporary file: memory for disk, at the page cache's speed.

    dir: an existing folder on a disk (None: the system's temporary folder; on a RAM disk spilling
    saves nothing). Nothing is left there, however the process ends. Thread-safe: transfers of
    several threads run at the same time, without the GIL. Freed ranges are written again, joined
    with free neighbours; the file keeps its size until it is closed.

    Counters: used_bytes (in whole pages of 4096), file_bytes. Raises ValueError: dir is no folder.
    """

    def __init__(self, dir: str | os.PathLike[str] | None = None) -> None:
        if dir is not None and not Path(dir).is_dir():
            raise ValueError(f"dir must be an existing folder; got {str(dir)!r}")
        self._file: _OpenFile | None = _OpenFile(dir)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = []  # (offset, bytes), sorted, no two touch
        self._end = self._used_bytes = 0
        self._dropped: deque[tuple[int, int]] = deque()  # handles may be dropped at any point

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that live handles have."""
        with self._lock:
            self._reclaim()
            return self._used_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._opened().descriptor).st_size

    def put(self, t: Tensor) -> SpillHandle:
        """The handle of a copy of t in the file: any shape, strides, dtype and device.

        Raises TypeError or ValueError for what is not a dense tensor with data, OSError when it
        cannot be written (disk full): it then takes no space. Cost: one copy into the page cache,
        and one more when t is not contiguous.
        """
        if not isinstance(t, Tensor):
            raise TypeError(f"t must be a Tensor; got {type(t).__name__}")
        if t.layout is not torch.strided or t.is_meta or t.is_quantized:
            raise ValueError(f"t must be dense, with data; got {t.layout} {t.dtype} on {t.device}")
        file = self._opened()
        data = t.detach().cpu().resolve_conj().resolve_neg().contiguous()
        nbytes = data.numel() * data.element_size()
        offset = self._take(nbytes)
        try:
            file.write(data, offset)
        except BaseException:
            with self._lock:
                self._give(offset, nbytes)
                size = os.fstat(file.descriptor).st_size
                os.ftruncate(file.descriptor, min(size, self._end))
            raise
        handle = SpillHandle(tuple(t.shape), t.dtype, t.device, nbytes, offset, weakref.ref(self))
        weakref.finalize(handle, self._dropped.append, (offset, nbytes)).atexit = False
        return handle

    def get(self, handle: SpillHandle, out: Tensor | None = None) -> Tensor:
        """The tensor that was put: a new one on its device, or `out`, of any strides and device.

        Raises ValueError: a handle of another file; out of another shape or dtype.
        """
        file = self._opened()
        if not isinstance(handle, SpillHandle) or handle._file() is not self:
            raise ValueError(f"handle must come from put of this SpillFile; got {handle!r}")
        if out is None:
            read = torch.empty(handle.shape, dtype=handle.dtype, device="cpu")
            file.read(read, handle._offset)
            return read.to(handle.device)
        if tuple(out.shape) != handle.shape or out.dtype != handle.dtype:
            raise ValueError(
                f"out must be {handle.shape} {handle.dtype} like what was put; "
                f"got {tuple(out.shape)} {out.dtype}"
            )
        if out.is_cpu and out.is_contiguous() and not (out.is_conj() or out.is_neg()):
            file.read(out.detach(), handle._offset)
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)
        else:
            with torch.no_grad():
                out.copy_(self.get(handle))
        return out

    def close(self) -> None:
        """Ends the file once running transfers have; a later put or get raises RuntimeError."""
        self._file = None

    def __enter__(self) -> SpillFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _opened(self) -> _OpenFile:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"SpillFile must be used by the process that made it, {self._process}: a fork "
                f"shares the file; got process {os.getpid()}"
            )
        if (file := self._file) is None:
            raise RuntimeError("SpillFile must be open; it was closed")
        return file

    def _take(self, nbytes: int) -> int:
        """The offset of a free range of whole pages."""
        size = aligned(nbytes, _PAGE_BYTES)
        with self._lock:
            self._reclaim()
            self._used_bytes += size
            for i, (offset, free) in enumerate(self._free):
                if free >= size:
                    self._free[i : i + 1] = [(offset + size, free - size)] if free > size else []
                    return offset
            self._end += size
            return self._end - size

    def _reclaim(self) -> None:
        while self._dropped:
            self._give(*self._dropped.popleft())

    def _give(self, offset: int, nbytes: int) -> None:
        size = aligned(nbytes, _PAGE_BYTES)
        self._used_bytes -= size
        if not size:
            return
        i = bisect(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + size:
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            offset, before = self._free.pop(i - 1)
            size, i = size + before, i - 1
        if offset + size == self._end:
            self._end = offset
        else:
            self._free.insert(i, (offset, size))


class _OpenFile:
    """A file descriptor that closes with its last user, never under one."""

    def __init__(self, dir: str | os.PathLike[str] | None) -> None:
        with tempfile.TemporaryFile(prefix="septet-spill-", dir=dir) as file:
            self.descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def write(self, data: Tensor, offset: int) -> None:
        left = _bytes_of(data)
        while left:
            done = os.pwrite(self.descriptor, left, offset)
            left, offset = left[done:], offset + done

    def read(self, out: Tensor, offset: int) -> None:
        left = _bytes_of(out)
        while left:
            done = os.preadv(self.descriptor, [left], offset)
            if not done:
                raise OSError(f"spill file ends at {offset}, {len(left)} bytes too early")
            left, offset = left[done:], offset + done


def _bytes_of(t: Tensor) -> memoryview:
    return memoryview(t.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
