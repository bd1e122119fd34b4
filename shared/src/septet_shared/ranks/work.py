"""An operation under way, and the thread that carries out a group's operations in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from torch import Tensor

from septet_shared.ranks.errors import RankTimeout

T = TypeVar("T")


class Work(Generic[T]):
    """A collective or transfer under way; `wait()` returns its result."""

    def __init__(self, future: Future[T], op: str, timeout_s: float) -> None:
        self._future = future
        self._op = op
        self._timeout_s = timeout_s

    def is_completed(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> T:
        """The result. On CUDA, makes the current stream wait instead of the host.

        Raises:
            RankTimeout: it did not end within `timeout_s` (default: the group's time-out, which the
                operation itself keeps too, naming who is missing).
            RankError: a peer was lost, diverged or aborted.
        """
        started = time.monotonic()
        # Slack: the operation's own time-out knows who is missing, so it should speak first.
        limit = self._timeout_s + 5.0 if timeout_s is None else timeout_s
        try:
            return self._future.result(limit)
        except TimeoutError:
            waited = time.monotonic() - started
            message = f"{self._op}: not done within {waited:.1f} s"
            raise RankTimeout(message, op=self._op, waited_s=waited) from None


class StreamWork(Work[Tensor]):
    """A collective on a CUDA stream: NCCL's own work, and what to do with its result."""

    def __init__(self, works: list[Any], finish: Callable[[], Tensor], op: str) -> None:
        self._works = works
        self._finish = finish
        self._op = op

    def is_completed(self) -> bool:
        """Whether the stream has passed it."""
        return all(w.is_completed() for w in self._works)

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """The result, ordered on the current stream; with `timeout_s`, the host waits too."""
        if timeout_s is not None:
            started = time.monotonic()
            while not self.is_completed():
                waited = time.monotonic() - started
                if waited > timeout_s:
                    message = f"{self._op}: not done within {waited:.1f} s"
                    raise RankTimeout(message, op=self._op, waited_s=waited)
                time.sleep(1e-4)
        for work in self._works:
            work.wait()
        return self._finish()


class OrderedThread:
    """Runs jobs one after another on a daemon thread, which starts with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None
        self._pending = 0
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a job is queued or running."""
        return self._pending > 0

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its future holds the result or the exception."""
        future: Future[T] = Future()
        with self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._pending += 1
        self._jobs.put((job, future))
        return future

    def _serve(self) -> None:
        assert self._jobs is not None
        while True:
            job, future = self._jobs.get()
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
                self._done()
                future.set_exception(error)
            else:
                self._done()
                future.set_result(result)
                del result
            del job, future

    def _done(self) -> None:
        with self._lock:
            self._pending -= 1
