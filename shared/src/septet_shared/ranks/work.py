"""An operation under way, and the thread that carries out a group's operations in order."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from septet_shared.ranks.errors import RankTimeout
from septet_shared.ranks.liveness import end_with
from septet_shared.ranks.session import leaving, poll

if TYPE_CHECKING:
    from septet_shared.ranks.session import Session

T = TypeVar("T")
_Job = tuple[Callable[[], Any], Future[Any]]


class Work(Generic[T]):
    """A collective or transfer under way; `wait()` returns its result."""

    def __init__(
        self, future: Future[T], op: str, absent: Callable[[], Sequence[int]] = tuple
    ) -> None:
        self._future = future
        self._op = op
        self._absent = absent

    def is_completed(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> T:
        """The result. On CUDA, makes the current stream wait instead of the host.

        Args:
            timeout_s: None for the group's time-out, which counts from when the operation's turn
                comes. After a shorter one of this call the operation is still under way.

        Raises:
            RankTimeout: it did not end in time; names a rank that has not come.
            RankError: a peer was lost, diverged or aborted.
        """
        started = time.monotonic()
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            waited = time.monotonic() - started
            absent = self._absent()
            who = f"; rank {', '.join(map(str, absent))} has not come" if absent else ""
            message = f"{self._op}: not done within {waited:.1f} s{who}"
            rank = absent[0] if absent else None
            raise RankTimeout(message, rank=rank, op=self._op, waited_s=waited) from None


class StreamWork(Work[Tensor]):
    """A collective on a CUDA stream: the event that follows it there, and its result."""

    def __init__(self, event: torch.cuda.Event, result: Tensor, op: str, session: Session) -> None:
        self._event = event
        self._result = result
        self._op = op
        self._session = session

    def is_completed(self) -> bool:
        """Whether the stream has passed it."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """The result, ordered on the current stream; with `timeout_s`, the host waits too."""
        if timeout_s is not None:

            def look(waited_s: float) -> None:
                self._session.check_alive(self._op, waited_s)
                if waited_s > timeout_s:
                    message = f"{self._op}: not done within {waited_s:.1f} s"
                    raise RankTimeout(message, op=self._op, waited_s=waited_s)

            poll(self.is_completed, look)
        stream = torch.cuda.current_stream(self._result.device)
        stream.wait_event(self._event)
        # It may come from the other stream's memory, which must not be used again too early.
        self._result.record_stream(stream)
        return self._result


class OrderedThread:
    """Runs jobs one after another on a daemon thread, which starts with the first job."""

    _all: ClassVar[weakref.WeakKeyDictionary[OrderedThread, threading.Thread]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._submitted = 0
        self._ended = [0]  # the thread's own: it must not keep this object alive
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a job is queued or running."""
        return self._submitted > self._ended[0]

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its future holds the result or the exception."""
        future: Future[T] = Future()
        with self._lock:
            if not self._submitted:
                if not OrderedThread._all:
                    atexit.register(OrderedThread.leave)
                jobs, args = self._jobs, (self._jobs, self._ended)
                thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
                thread.start()
                OrderedThread._all[self] = thread
                end_with(self, lambda: jobs.put(None), thread).atexit = False
            self._submitted += 1
            self._jobs.put((job, future))
        return future

    @staticmethod
    def drain_all() -> None:
        """Return when all jobs of all threads of this process have ended, well or badly."""
        for thread in list(OrderedThread._all):
            wait([thread.submit(lambda: None)])

    @staticmethod
    def leave() -> None:
        """Give what is under way a second, then have it raise; return when all threads are idle."""
        threads = dict(OrderedThread._all)
        for thread in threads:
            thread._jobs.put(None)
        for _ in range(2):
            deadline = time.monotonic() + 1.0
            for running in threads.values():
                running.join(max(0.0, deadline - time.monotonic()))
            leaving.set()


def _serve(jobs: queue.SimpleQueue[_Job | None], ended: list[int]) -> None:
    while (item := jobs.get()) is not None:
        job, future = item
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
            ended[0] += 1
            future.set_exception(error)
        else:
            ended[0] += 1
            future.set_result(result)
            del result
        del job, future, item
