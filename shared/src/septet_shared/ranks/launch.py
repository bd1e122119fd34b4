"""`run`: a function on several local processes, one rank each.

The processes are forked by a server that has imported torch and nothing else, so a rank starts in
milliseconds and inherits neither the caller's OpenMP threads nor its locks. They end with the
caller: the kernel kills a rank whose server has gone, and the server goes with the caller.
"""

from __future__ import annotations

import ctypes
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
from septet_shared.ranks.group import Ranks

if TYPE_CHECKING:
    from septet_shared.link import LinkSpec

T = TypeVar("T")

_GRACE_S = 1.0  # after one rank failed, how long the others may still report
_PR_SET_PDEATHSIG = 1


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
        fn: a function at the top level of a module; it and `args` are pickled.
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

    When one rank fails the others get one second to notice, then are killed. No process and no
    shared memory outlives the call, also when it is interrupted.

    Cost: about 2 s for the first call of a process, 50 ms a rank afterwards.
    """
    _check(fn, size, device, timeout_s, threads_per_rank)
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    module, file = _source(fn)
    job = _Job(
        module=module,
        file=file,
        call=_pickle(fn, args, link),
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
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, job, theirs), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours))
        return _collect(ranks, timeout_s)
    finally:
        for r in ranks:
            r.pipe.close()  # a rank that has reported waits for this before it leaves
        for r in ranks:
            if r.outcome is None:
                r.process.kill()
        for r in ranks:
            r.process.join(2.0)
            if r.process.is_alive():
                r.process.kill()
                r.process.join()
            r.process.close()


def _check(
    fn: Callable[..., Any], size: int, device: str, timeout_s: float, threads_per_rank: int
) -> None:
    if not callable(fn):
        raise ValueError(f"fn must be callable; got {fn!r}")
    if size < 1:
        raise ValueError(f"size must be at least 1; got {size}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda'; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch finds no CUDA device")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0; got {timeout_s}")
    if threads_per_rank < 1:
        raise ValueError(f"threads_per_rank must be at least 1; got {threads_per_rank}")


def _source(fn: Callable[..., Any]) -> tuple[str, str | None]:
    module = sys.modules.get(getattr(fn, "__module__", ""))
    return getattr(fn, "__module__", ""), getattr(module, "__file__", None)


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
    failed_at: float | None = None
    failures: list[RankError] = []
    waiting = dict(enumerate(ranks))
    while waiting:
        now = time.monotonic()
        end = deadline if failed_at is None else min(deadline, failed_at + _GRACE_S)
        if now >= end:
            break
        by_pipe = {r.pipe: rank for rank, r in waiting.items()}
        for pipe in wait(list(by_pipe), end - now):
            rank = by_pipe[pipe]  # type: ignore[index]
            outcome = _receive(rank, ranks[rank])
            ranks[rank].outcome = outcome
            del waiting[rank]
            if outcome[0] == "error":
                failures.append(outcome[1])
                failed_at = failed_at or time.monotonic()
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
        kind, value, consequence = pickle.loads(r.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        r.process.join(2.0)
        code = r.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit {code}"
        return "error", PeerLost(f"rank {rank} died: {how}", rank=rank, op="run")
    if kind == "error":
        value.consequence = consequence
    return kind, value


# ---- in the rank ----


def _rank_main(rank: int, job: _Job, pipe: Connection) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and ends the ranks
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
        ranks.session.finish()
        message = pickle.dumps(("result", result, False))
    except BaseException as error:  # noqa: BLE001 - every failure is the caller's to see
        message = _failure(rank, error)
        if ranks is not None and not isinstance(error, RankError):
            ranks.abort(error, "run")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pipe.send_bytes(message)
        # Peers may still read from this rank's connections: leave when the caller has all results.
        pipe.poll(None)
    except (BrokenPipeError, EOFError, ConnectionError):
        return


def _join(rank: int, job: _Job) -> Ranks:
    store = TCPStore("127.0.0.1", job.port, is_master=False)
    wait_s = min(job.timeout_s, 60.0)
    backend = "gloo"
    if job.device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        local = rank % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(local)
        torch.cuda.set_device(local)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=job.size, timeout=timedelta(seconds=wait_s)
    )
    return Ranks.world(job.device, wait_s, job.ranks_per_machine)


def _failure(rank: int, error: BaseException) -> bytes:
    text = io.StringIO()
    traceback.print_exception(error, file=text)
    named = f"rank {rank} raised {type(error).__name__}: {error}\n\n{text.getvalue()}"
    raised = RankError(named, rank=rank, op="run")
    if isinstance(error, RankError):
        who = rank if error.rank is None else error.rank
        raised = type(error)(named, rank=who, op=error.op, waited_s=error.waited_s)
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


def _die_with_parent() -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the server went before the kernel was asked
        os._exit(1)
