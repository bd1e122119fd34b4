"""Memory that the processes of one machine share, with no name left behind when one of them dies.

Each rank creates an anonymous file (memfd), maps it, and tells its peers through the store which
process holds it under which descriptor; a peer opens it through procfs. Where procfs refuses
(other user namespaces, no memfd) every rank falls back to a named file that is unlinked as soon as
all have opened it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class Participants(Protocol):
    """What sharing needs to know of the ranks that take part."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many take part."""

    def wait_keys(self, keys: Sequence[str], op: str) -> list[bytes]:
        """Values of the keys, once all are set; raises a RankError when a rank is lost."""

    def set_key(self, key: str, value: bytes) -> None:
        """Set a key that all ranks of the group can read."""


@dataclass
class SharedPages:
    """One rank's pages, mapped here: `.buffer` (bytes), `.address`, `.nbytes`.

    `.descriptor` is open only when it was asked for (a file lock needs one), as long as this lives.
    """

    buffer: mmap.mmap
    nbytes: int
    descriptor: int | None = None
    address: int = field(init=False)
    _export: object = field(init=False, repr=False)
    _let_go: Callable[[], object] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.descriptor is not None:
            self._let_go = weakref.finalize(self, os.close, self.descriptor)
        # Exporting the buffer pins the mapping: it cannot be unmapped under a live address.
        self._export = ctypes.c_char.from_buffer(self.buffer)
        self.address = ctypes.addressof(self._export)

    def close(self) -> None:
        """Unmap. Pages that a tensor still looks at are unmapped when the last tensor dies."""
        self._export = None
        self.descriptor = None
        if self._let_go is not None:
            self._let_go()
        with contextlib.suppress(BufferError):
            self.buffer.close()


def _map(fd: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def _anonymous(nbytes: int) -> tuple[int, bytes]:
    fd = os.memfd_create("septet", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd, f"{os.getpid()}:{fd}:{os.fstat(fd).st_ino}".encode()


def _open_anonymous(token: bytes) -> int:
    pid, fd, inode = token.decode().split(":")
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(opened).st_ino != int(inode):  # the process is gone and its number was used again
        os.close(opened)
        raise OSError(f"descriptor {fd} of process {pid} is no longer the page it was")
    return opened


def _named(nbytes: int) -> tuple[int, bytes]:
    folder = Path("/dev/shm")
    folder = folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
    path = folder / f"septet-{os.getpid()}-{uuid.uuid4().hex}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Takes the memory now: a write beyond a full folder would end the process with SIGBUS.
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        path.unlink()
        raise
    return fd, str(path).encode()


def _open_named(token: bytes) -> int:
    return os.open(token, os.O_RDWR | os.O_CLOEXEC)


def share(
    ranks: Participants, nbytes: int, name: str, *, keep_descriptors: bool = False
) -> list[SharedPages]:
    """Every rank's pages of `nbytes` zeros, indexed by rank; collective over ranks of one host.

    Args:
        ranks: who takes part.
        nbytes: size of each rank's pages, at least 1, the same on every rank.
        name: a name that is new to the group.
        keep_descriptors: leave `SharedPages.descriptor` open, until close.

    Raises:
        ValueError: nbytes is below 1.
        OSError: neither way of sharing works here.
        RankError: a rank was lost meanwhile.

    Cost: one mapping a rank and the descriptor that Python keeps with it.
    """
    if nbytes < 1:
        raise ValueError(f"nbytes must be at least 1; got {nbytes}")
    ways: list[tuple[str, Callable[[int], tuple[int, bytes]], Callable[[bytes], int]]] = [
        ("named", _named, _open_named)
    ]
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").exists():
        ways.insert(0, ("anonymous", _anonymous, _open_anonymous))
    failures: list[str] = []
    for way, create, open_token in ways:
        descriptors: list[int] = []
        pages: list[SharedPages] = []
        tokens: list[bytes] = []
        # Whatever goes wrong on one rank is told to all: none may wait for it.
        problem = token = b""
        try:
            try:
                fd, token = create(nbytes)
                descriptors.append(fd)
            except (OSError, OverflowError) as error:
                problem = f"rank {ranks.rank}: {error}".encode()
            ranks.set_key(f"{name}/{way}/{ranks.rank}", token)
            keys = [f"{name}/{way}/{r}" for r in range(ranks.size)]
            tokens = ranks.wait_keys(keys, f"share {name}")
            try:
                for r, peer_token in enumerate(tokens if all(tokens) else []):
                    own = r == ranks.rank
                    descriptors.append(os.dup(descriptors[0]) if own else open_token(peer_token))
                    mapped = _map(descriptors[-1], nbytes)
                    kept = os.dup(descriptors[-1]) if keep_descriptors else None
                    pages.append(SharedPages(mapped, nbytes, kept))
            except (OSError, ValueError) as error:  # ValueError: a peer's pages are smaller
                problem = f"rank {ranks.rank}: {error}".encode()
            # Nobody lets go of the descriptor that others open before all have opened it.
            ranks.set_key(f"{name}/{way}/opened/{ranks.rank}", problem)
            keys = [f"{name}/{way}/opened/{r}" for r in range(ranks.size)]
            problems = [p.decode() for p in ranks.wait_keys(keys, f"share {name}") if p]
            if not problems:
                return pages
            failures += problems
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            if way == "named":
                for path in filter(None, [token, *tokens]):  # also that of a rank that was killed
                    with contextlib.suppress(OSError):
                        Path(path.decode()).unlink()
    raise OSError("these ranks cannot share memory: " + "; ".join(failures))
