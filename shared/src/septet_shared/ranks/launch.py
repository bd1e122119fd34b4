"""`run`: a function on several local processes, one rank each.

The processes are forked by a server that has imported torch and nothing else, so a rank starts in
milliseconds and inherits neither the caller's OpenMP threads nor its locks. They end with the
caller: the kernel kills a rank, and what it has forked, when the caller's end of a pipe closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from septet_shared.ranks.errors import PeerLost, RankError, RankTimeout
from septet_shared.ranks.group import SLACK_S, Ranks, check_options
from septet_shared.ranks.work import OrderedThread

if TYPE_CHECKING:
    from septet_shared.link import LinkSpec

T = TypeVar("T")

_GRACE_S = 1.0  # after one rank failed, how long the others may still report
_LEAVE_S = 5.0  # how long a rank that has returned may take to leave
_WAIT_S = 60.0  # the longest that ranks wait for one another


@dataclass(frozen=True)
class _Job:
    """What a rank needs to start, picklable before the caller's module can be imported."""

    module: str
    file: str | None
    call: bytes  # pickled (fn, args, link)
    environment: dict[str, str]
    port: int
    size: int
    device: str
    timeout_s: float
    threads: int
    ranks_per_machine: int | None


@dataclass
class _Rank:
    process: ForkServerProcess
    pipe: Connection
    outcome: tuple[str, Any] | None = None  # ("result", x) or ("error", RankError)


def run(
    fn: Callable[..., T],
    size: int,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = 120.0,
    threads_per_rank: int = 1,
    ranks_per_machine: int | None = None,
    link: LinkSpec | None = None,
) -> list[T]:
    """[size] what `fn(ranks, *args)` returned on each of `size` new local processes, in rank order.

    Args:
        fn: a function at the top level of a module; it and `args` are pickled. Ranks import the
            module, so a script calls `run` under `if __name__ == "__main__":`.
        size: how many ranks, at least 1.
        device: "cpu" (gloo) or "cuda" (NCCL, rank r on GPU r modulo their number).
        timeout_s: limit of the whole run, seconds; also of each wait between ranks, up to 60 s.
        threads_per_rank: torch's threads in each rank.
        ranks_per_machine: pretend that each consecutive so many ranks are a machine.
        link: emulate this link between (emulated) machines.

    Raises:
        ValueError: an argument is out of range, or fn cannot be pickled.
        PeerLost: a rank's process died; RankTimeout: the run took too long, names who was running.
        RankError: fn raised; the message has rank and traceback. Of several failures the one that
            caused the others is raised.

    When one rank fails the others get one second to notice, then are killed. No rank, nothing that
    a killed rank has started, and no shared memory outlives the call, also when it is interrupted.

    Cost: about 2 s for the first call of a process, which starts the server (it ends with the
    caller); 50 ms a rank afterwards.
    """
    _check(fn, size, device, timeout_s, threads_per_rank, ranks_per_machine, link)
    module, file = _source(fn)
    call = _pickle(fn, args, link)
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = _Job(
        module=module,
        file=file,
        call=call,
        environment=dict(os.environ),
        port=master.port,
        size=size,
        device=device,
        timeout_s=timeout_s,
        threads=threads_per_rank,
        ranks_per_machine=ranks_per_machine,
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "septet_shared.ranks"])
    ranks: list[_Rank] = []
    done = False
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, job, theirs), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours))
        results = _collect(ranks, timeout_s)
        done = True
        return results
    finally:
        for r in ranks:
            r.pipe.close()  # a rank that has reported waits for this before it leaves
        deadline = time.monotonic() + (_LEAVE_S if done else 0.0)
        for r in ranks:
            r.process.join(max(0.0, deadline - time.monotonic()))
            _kill(r.process)
        # Now, not when a traceback that holds this frame is collected: that may happen in a child
        # the caller has forked, where the thread that the store ends by joining does not exist.
        del master


def _kill(process: ForkServerProcess) -> None:
    """End a rank that still lives; also what it has forked, unless it returned."""
    assert process.pid is not None
    if process.exitcode != 0:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # it may not have made its process group yet
    process.join()
    process.close()


def _check(
    fn: Callable[..., Any],
    size: int,
    device: str,
    timeout_s: float,
    threads_per_rank: int,
    ranks_per_machine: int | None,
    link: LinkSpec | None,
) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "run was called while a rank imports the script that called it; put the call under "
            "`if __name__ == '__main__':`"
        )
    if not callable(fn):
        raise ValueError(f"fn must be callable; got {fn!r}")
    for name, count in (("size", size), ("threads_per_rank", threads_per_rank)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1; got {count!r}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda'; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch finds no CUDA device")
    check_options(timeout_s, ranks_per_machine)
    if link is not None:
        from septet_shared.link import LinkSpec

        if not isinstance(link, LinkSpec) or device != "cpu":
            raise ValueError(f"link must be a LinkSpec, and device 'cpu'; got {link!r}, {device!r}")


def _source(fn: Callable[..., Any]) -> tuple[str, str | None]:
    name = getattr(getattr(fn, "func", fn), "__module__", "")  # func: of a partial
    return name, getattr(sys.modules.get(name), "__file__", None)


def _pickle(fn: Callable[..., Any], args: tuple[Any, ...], link: LinkSpec | None) -> bytes:
    try:
        return pickle.dumps((fn, args, link))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"fn and its arguments must pickle, so fn must stand at the top level of a module; "
            f"got {fn!r}: {error}"
        ) from None


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    """Results of all ranks, or the failure that caused the others."""
    deadline = time.monotonic() + timeout_s
    failures: list[RankError] = []
    waiting = dict(enumerate(ranks))
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        # Its process too: what it has forked may hold a dead rank's end of the pipe open.
        ready = wait([x for r in waiting.values() for x in (r.pipe, r.process.sentinel)], left)
        for rank, r in list(waiting.items()):
            if r.pipe in ready or r.process.sentinel in ready:
                del waiting[rank]
                r.outcome = _receive(rank, r)
                if r.outcome[0] == "error":
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                    failures.append(r.outcome[1])
    if failures:
        # A rank that lost its peer, or was told of an abort, is a consequence where another is not.
        primary = [f for f in failures if not getattr(f, "consequence", False)]
        raise (primary or failures)[0]
    if waiting:
        who = ", ".join(map(str, waiting))
        message = f"run: rank {who} still ran after {timeout_s:.1f} s"
        raise RankTimeout(message, rank=next(iter(waiting)), op="run", waited_s=timeout_s)
    return [r.outcome[1] for r in ranks if r.outcome]


def _receive(rank: int, r: _Rank) -> tuple[str, Any]:
    try:
        if not r.pipe.poll(0):
            raise EOFError
        kind, value, consequence = pickle.loads(r.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        r.process.join(2.0)
        code = r.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit {code}"
        message = f"rank {rank} died: {how}; what it wrote to standard error may say why"
        return "error", PeerLost(message, rank=rank, op="run")
    except Exception as error:  # noqa: BLE001 - whatever the result's class raises
        message = f"the result of rank {rank} does not unpickle: {type(error).__name__}: {error}"
        return "error", RankError(message, rank=rank, op="run")
    if kind == "error":
        value.consequence = consequence
    return kind, value


# ---- in the rank ----


def _rank_main(rank: int, job: _Job, pipe: Connection) -> None:
    _end_with_caller()
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    ranks: Ranks | None = None
    try:
        torch.set_num_threads(job.threads)
        _import(job.module, job.file)
        fn, args, link = pickle.loads(job.call)
        ranks = _join(rank, job)
        if link is None:
            result = fn(ranks, *args)
        else:
            from septet_shared.link import emulate

            with emulate(ranks, link):
                result = fn(ranks, *args)
        message = pickle.dumps(("result", result, False))
        OrderedThread.drain_all()
        ranks.session.finish()
    except BaseException as error:  # noqa: BLE001 - every failure is the caller's to see
        message = _failure(rank, error)
        if ranks is not None and not isinstance(error, RankError):
            ranks.abort(error, "run")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, gone, closed
            stream.flush()
    try:
        pipe.send_bytes(message)
        # Peers may still read from this rank's connections: leave when the caller has all results.
        pipe.poll(None)
    except (BrokenPipeError, EOFError, ConnectionError):
        return


def _join(rank: int, job: _Job) -> Ranks:
    store = TCPStore("127.0.0.1", job.port, is_master=False)
    wait_s = min(job.timeout_s, _WAIT_S)
    backend = "gloo"
    if job.device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        local = rank % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(local)
        torch.cuda.set_device(local)
    limit = timedelta(seconds=wait_s + SLACK_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.size, timeout=limit)
    return Ranks.world(job.device, wait_s, job.ranks_per_machine)


def _failure(rank: int, error: BaseException) -> bytes:
    text = io.StringIO()
    traceback.print_exception(error, file=text)
    named = f"rank {rank} raised {type(error).__name__}: {error}\n\n{text.getvalue()}"
    raised = RankError(named, rank=rank, op="run")
    if isinstance(error, RankError):
        who = rank if error.rank is None else error.rank
        kind = next(k for k in type(error).__mro__ if k.__module__ == RankError.__module__)
        raised = kind(named, rank=who, op=error.op, waited_s=error.waited_s)
    consequence = isinstance(error, PeerLost) or type(error) is RankError
    return pickle.dumps(("error", raised, consequence))


def _import(module: str, file: str | None) -> None:
    """Import the module that holds fn, by name or, for a file off the path, from the file."""
    if module in sys.modules:
        return
    try:
        found = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is not None and (file is None or found.origin == file):
        importlib.import_module(module)
        return
    if file is None:
        return
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[module] = made
    spec.loader.exec_module(made)


def _end_with_caller() -> None:
    """Lead a process group, and have the kernel kill it when the caller is gone."""
    os.setpgid(0, 0)  # also: Ctrl-C is the caller's, which then ends the ranks
    multiprocessing.current_process().daemon = False  # a rank may have children, even ranks
    caller = multiprocessing.parent_process()
    assert caller is not None
    if sys.platform == "linux":
        pipe = caller.sentinel
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not caller.is_alive():  # it went before the kernel was asked
        os._exit(1)
