"""`Ranks`: who takes part, and the collectives between them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from septet_shared.ranks.errors import CollectiveMismatch, PeerLost, RankError, RanksDiverged
from septet_shared.ranks.liveness import Identity
from septet_shared.ranks.session import Session
from septet_shared.ranks.work import OrderedThread, StreamWork, Work

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from septet_shared.link import EmulatedLink

T = TypeVar("T")

_SMALL_BYTES = 1 << 16  # up to here an all-reduce gathers everything: one round instead of two
_sessions_of_group: dict[str, int] = {}  # sessions opened so far on a process group, by its name


@dataclass
class _Family:
    """What a group shares with the groups made from it."""

    parent: _Family | None = None
    link: EmulatedLink | None = None
    ranks_per_machine: int | None = None

    def find_link(self) -> EmulatedLink | None:
        family: _Family | None = self
        while family is not None:
            if family.link is not None:
                return family.link
            family = family.parent
        return None


@dataclass(frozen=True, eq=False)
class Ranks:
    """Who takes part: a `torch.distributed` process group, or one process without any.

    Attributes:
        rank, size: this rank and how many there are.
        device: where this rank's tensors live.
        group: the process group; None for a single process.
        machine, machine_size: index of this rank's machine, and how many ranks of the group it
        holds. machines: [size] machine index of each rank.
        timeout_s: how long any wait of this group may take.
    """

    rank: int
    size: int
    device: torch.device
    group: ProcessGroup | None
    machine: int
    machine_size: int
    machines: tuple[int, ...]
    timeout_s: float
    session: Session = field(repr=False)
    family: _Family = field(repr=False)
    _thread: OrderedThread = field(repr=False)
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    # ---- making groups ----

    @staticmethod
    def world(
        device: str | torch.device = "auto",
        timeout_s: float = 60.0,
        ranks_per_machine: int | None = None,
    ) -> Ranks:
        """All ranks: the existing default group, else torchrun's environment, else one rank.

        Args:
            device: "auto" (this rank's GPU when there is one, else the CPU), "cpu" or "cuda".
            timeout_s: limit of every wait of this group, seconds.
            ranks_per_machine: pretend that each consecutive so many ranks are a machine.

        Raises:
            ValueError: an argument is out of range, or torchrun's environment is incomplete.
        """
        where = _device(device)
        _check_options(timeout_s, ranks_per_machine)
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                return _open(None, where, timeout_s, _Family(None, None, ranks_per_machine))
            needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            missing = [name for name in needed if name not in os.environ]
            if missing:
                message = (
                    f"the environment has RANK but not {', '.join(missing)}: start with torchrun"
                )
                raise ValueError(message)
            dist.init_process_group(_backend(where), timeout=timedelta(seconds=timeout_s))
        world = dist.group.WORLD
        assert world is not None
        return Ranks.wrap(world, timeout_s, ranks_per_machine, device=where)

    @staticmethod
    def wrap(
        group: ProcessGroup,
        timeout_s: float = 60.0,
        ranks_per_machine: int | None = None,
        *,
        device: str | torch.device = "auto",
    ) -> Ranks:
        """The ranks of a caller's own group; collective over it.

        Raises:
            ValueError: an argument is out of range, or this process is not in the group.
            RankError: a member is lost or missing.
        """
        _check_options(timeout_s, ranks_per_machine)
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group must be a ProcessGroup this process is in; got {group!r}")
        where = _device(device)
        if "nccl" not in dist.get_backend(group) and where.type == "cuda" and device == "auto":
            where = torch.device("cpu")
        return _open(group, where, timeout_s, _Family(None, None, ranks_per_machine))

    def subgroup(self, ranks: Sequence[int]) -> Ranks | None:
        """The named ranks with a communicator of their own; None on a rank that is not named.

        Args:
            ranks: ascending ranks of this group, the same on every rank.

        Raises:
            ValueError: not ascending, or not in [0, size).
            CollectiveMismatch: ranks named different members.

        Cost: collective over this group; about 10 ms. Reuse what you get.
        """
        chosen = [int(r) for r in ranks]
        if not chosen or chosen != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= self.size:
            raise ValueError(f"ranks must ascend within [0, {self.size}); got {chosen}")
        label = self._meet_to_split(f"subgroup {chosen}")
        return self._split(chosen, label) if self.rank in chosen else None

    def duplicate(self, name: str) -> Ranks:
        """The same ranks with a communicator of their own, for another thread or stream."""
        return self._split(list(range(self.size)), self._meet_to_split(f"duplicate {name}"))

    def by_machine(self) -> tuple[Ranks, Ranks]:
        """(ranks of my machine, ranks with my index on each machine); made once, then kept."""
        if "by_machine" not in self._cache:
            label = self._meet_to_split("by_machine")
            index = [self.machines[:r].count(m) for r, m in enumerate(self.machines)]
            local = [r for r in range(self.size) if self.machines[r] == self.machine]
            across = [r for r in range(self.size) if index[r] == index[self.rank]]
            self._cache["by_machine"] = (
                self._split(local, f"{label} local {self.machine}"),
                self._split(across, f"{label} across {index[self.rank]}"),
            )
        made: tuple[Ranks, Ranks] = self._cache["by_machine"]
        return made

    def recover(self) -> Ranks:
        """The living ranks, after a loss or an abort; collective over the living.

        Raises:
            RankError: the store went with the lost rank, or another rank was lost meanwhile.
        """
        session, turn = self.session, self._cache.get("recoveries", 0)
        self._cache["recoveries"] = turn + 1
        living = session.living()
        leader = living[0]
        prefix = f"recover/{turn}"
        fresh = Session(
            "recover", 0, 1, [0], None, self.timeout_s
        )  # waits without this group's abort
        fresh.store = session.store
        try:
            if session.store is not None:
                session.set_key(f"{prefix}/{self.rank}", b"")
                fresh.wait_keys([f"{prefix}/{r}" for r in living], "recover")
                if self.rank == leader:
                    session.set_key(f"{prefix}/members", pickle.dumps(living))
                living = pickle.loads(fresh.wait_keys([f"{prefix}/members"], "recover")[0])
        except (RuntimeError, dist.DistStoreError) as error:
            raise RankError(f"recover: the store is lost: {error}", op="recover") from error
        if self.rank not in living:
            raise PeerLost("recover: this rank was taken for dead", rank=self.rank, op="recover")
        return self._split(living, prefix)

    def _meet_to_split(self, what: str) -> str:
        """A label that is new, and the same on all ranks."""
        self.session.meet(what, what)
        turn = self._cache["splits"] = self._cache.get("splits", 0) + 1
        return f"{turn} {what}"

    def _split(self, chosen: list[int], label: str) -> Ranks:
        """Ranks over `chosen` of this group; called by exactly those, with an equal label."""
        family = _Family(self.family, None, self.family.ranks_per_machine)
        if self.group is None:
            return _open(None, self.device, self.timeout_s, family)
        members = [self.session.members[r] for r in chosen]
        name = f"{self.group.group_name}/{label}"
        group = _new_group(name, members, _backend(self.device), self.timeout_s)
        return _open(group, self.device, self.timeout_s, family)

    # ---- what callers and the heap ask ----

    @property
    def identities(self) -> list[Identity]:
        """[size] process behind each rank."""
        return self.session.identities

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks can share memory (emulated machines are one host in truth)."""
        return self.session.on_one_host

    @property
    def store(self) -> Store | None:
        """The group's own key-value store; None for a single process."""
        return self.session.store

    def set_key(self, key: str, value: bytes) -> None:
        """Set a key that all ranks of the group can read."""
        self.session.set_key(key, value)

    def wait_keys(self, keys: Sequence[str], op: str) -> list[bytes]:
        """Values of the keys (keys[r] is rank r's), once all are set; errors as `check_alive`."""
        return self.session.wait_keys(keys, op)

    def check_alive(self, op: str, waited_s: float = 0.0) -> None:
        """Raise PeerLost when a peer's process has ended, RankError when the group was aborted."""
        self.session.check_alive(op, waited_s)

    def abort(self, error: BaseException | str, op: str) -> None:
        """Make every rank's present and next wait in this group raise a RankError with `error`.

        The group stays aborted; `recover()` gives a fresh one.
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.session.abort(text, op)

    # ---- host-side operations ----

    def barrier(self, op: str) -> None:
        """Return once all ranks have called it.

        Raises:
            CollectiveMismatch: ranks are in different operations; names both.
            PeerLost, RankTimeout, RankError: a rank is lost, missing, or has aborted.

        Cost: about 5 us between two ranks of a host.
        """

        def meet() -> None:
            self.session.meet(op, f"barrier {op}")
            self._move(op, [0] * self.size)

        self._carry(op, meet)

    def all_gather_object(self, x: object) -> list[Any]:
        """[size] every rank's picklable object, in rank order."""
        return self._gather_objects(x, "all_gather_object")

    def _gather_objects(self, x: object, op: str) -> list[Any]:
        data = pickle.dumps(x)
        if self.size == 1:
            return [pickle.loads(data)]

        def gather() -> list[Any]:
            sizes = [n[0] for n in self.session.meet(op, op, [len(data)])]
            mine = torch.zeros(max(sizes), dtype=torch.uint8)
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            out = torch.empty(self.size * len(mine), dtype=torch.uint8)
            group = self.session.cpu_group
            assert group is not None
            self._move(op, [len(data)] * self.size, lambda: [group._allgather_base(out, mine)])
            rows = out.view(self.size, -1)
            return [pickle.loads(bytes(rows[r, :n].numpy())) for r, n in enumerate(sizes)]

        return self._carry(op, gather)

    def agree(self, x: object, what: str) -> None:
        """Return when all ranks hold an equal `x`.

        Raises:
            RanksDiverged: names `what`, the ranks that differ from rank 0, and two values.
        """
        values = self._gather_objects(x, f"agree on {what}")
        apart = [r for r, v in enumerate(values) if not _same(v, values[0])]
        if apart:
            message = (
                f"{what} differs between ranks: rank 0 has {_short(values[0])}, "
                f"rank {apart[0]} has {_short(values[apart[0]])}; apart from rank 0: {apart}"
            )
            raise RanksDiverged(message, rank=apart[0], op=what)

    # ---- collectives ----

    @overload
    def all_reduce(
        self, t: Tensor, op: str = "sum", *, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self, t: Tensor, op: str = "sum", *, async_op: Literal[True]
    ) -> Work[Tensor]: ...
    @overload
    def all_reduce(
        self, t: Tensor, op: str = "sum", *, async_op: bool
    ) -> Tensor | Work[Tensor]: ...
    def all_reduce(
        self, t: Tensor, op: str = "sum", *, async_op: bool = False
    ) -> Tensor | Work[Tensor]:
        """`t`, reduced over all ranks in place; combined in rank order.

        The same bits come out on every rank, in every run, and for any way of cutting the tensor:
        element i is ((t0[i] + t1[i]) + t2[i]) + ..., in float32 for half types.

        Args:
            t: any shape and dtype, the same on every rank; may be non-contiguous.
            op: "sum" or "max".
            async_op: return a Work at once; leave `t` alone until it is done.

        Raises:
            ValueError: an unknown op. CollectiveMismatch: shapes, dtypes or ops differ.

        Cost: 2 (W-1)/W of the tensor sent by each rank, W-1 adds; up to 64 KiB in all, one round.
        """
        if op not in ("sum", "max"):
            raise ValueError(f"op must be 'sum' or 'max'; got {op!r}")
        self._check_device(t, "t")
        name = f"all_reduce {op}"
        if self.size == 1 or t.numel() == 0:
            return self._collective(name, f"{name} {_shape(t)}", (), lambda _: t, async_op)
        flat = t.reshape(-1)  # a copy when t is not contiguous
        n, w = flat.numel(), self.size
        small = n * flat.element_size() * w <= _SMALL_BYTES

        def reduce(_: list[tuple[int, ...]]) -> Tensor:
            if small:
                gathered = flat.new_empty(w * n)
                self._move(name, self._each(flat.nbytes), self._start_all_gather(gathered, flat))
                total = _combine(gathered.view(w, n), op)
            else:
                chunk = -(-n // w)
                sent = torch.cat([flat, flat.new_zeros(chunk * w - n)]) if chunk * w > n else flat
                got, total = torch.empty_like(sent), torch.empty_like(sent)
                share = self._each(chunk * flat.element_size())
                self._move(name, share, lambda: [self._pg.alltoall_base(got, sent, [], [])])
                mine = _combine(got.view(w, chunk), op)
                self._move(name, share, self._start_all_gather(total, mine))
                total = total[:n]
            return t.copy_(total.view(t.shape))

        return self._collective(name, f"{name} {_shape(t)}", (), reduce, async_op)

    @overload
    def all_gather(self, t: Tensor, *, async_op: Literal[False] = False) -> Tensor: ...
    @overload
    def all_gather(self, t: Tensor, *, async_op: Literal[True]) -> Work[Tensor]: ...
    @overload
    def all_gather(self, t: Tensor, *, async_op: bool) -> Tensor | Work[Tensor]: ...
    def all_gather(self, t: Tensor, *, async_op: bool = False) -> Tensor | Work[Tensor]:
        """[size, *t.shape] every rank's tensor, in rank order.

        Raises:
            CollectiveMismatch: shapes or dtypes differ.

        Cost: t.nbytes sent to each other rank.
        """
        self._check_device(t, "t")

        def gather(_: list[tuple[int, ...]]) -> Tensor:
            out = t.new_empty((self.size, *t.shape))
            if self.size == 1:
                return out.copy_(t[None])
            if t.numel():
                start = self._start_all_gather(out.view(-1), t.contiguous().view(-1))
                self._move("all_gather", self._each(t.nbytes), start)
            return out

        return self._collective("all_gather", f"all_gather {_shape(t)}", (), gather, async_op)

    def broadcast(self, t: Tensor, src: int = 0) -> Tensor:
        """`t`, overwritten in place by rank `src`'s.

        Raises:
            ValueError: src is not a rank. CollectiveMismatch: shapes, dtypes or src differ.
        """
        if not 0 <= src < self.size:
            raise ValueError(f"src must be in [0, {self.size}); got {src}")
        self._check_device(t, "t")

        def send(_: list[tuple[int, ...]]) -> Tensor:
            if self.size == 1 or not t.numel():
                return t
            flat = t.contiguous()
            options = dist.BroadcastOptions()
            options.rootRank = src
            bytes_out = self._each(flat.nbytes if self.rank == src else 0)
            bytes_in = [flat.nbytes if r == src else 0 for r in range(self.size)]
            self._move(
                "broadcast", bytes_out, lambda: [self._pg.broadcast([flat], options)], bytes_in
            )
            return t if flat is t else t.copy_(flat)

        result = self._collective("broadcast", f"broadcast from {src} {_shape(t)}", (), send, False)
        assert isinstance(result, Tensor)
        return result

    @overload
    def all_to_all_rows(
        self,
        rows: Tensor,
        send_counts: Sequence[int] | Tensor,
        recv_counts: Sequence[int] | Tensor,
        *,
        async_op: Literal[False] = False,
        out: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def all_to_all_rows(
        self,
        rows: Tensor,
        send_counts: Sequence[int] | Tensor,
        recv_counts: Sequence[int] | Tensor,
        *,
        async_op: Literal[True],
        out: Tensor | None = None,
    ) -> Work[Tensor]: ...
    @overload
    def all_to_all_rows(
        self,
        rows: Tensor,
        send_counts: Sequence[int] | Tensor,
        recv_counts: Sequence[int] | Tensor,
        *,
        async_op: bool,
        out: Tensor | None = None,
    ) -> Tensor | Work[Tensor]: ...
    def all_to_all_rows(
        self,
        rows: Tensor,
        send_counts: Sequence[int] | Tensor,
        recv_counts: Sequence[int] | Tensor,
        *,
        async_op: bool = False,
        out: Tensor | None = None,
    ) -> Tensor | Work[Tensor]:
        """[sum(recv_counts), ...] rows from every rank, in rank order.

        Args:
            rows: [n, ...]; the first send_counts[0] rows go to rank 0, the next to rank 1, ...
            send_counts: [W] rows for each rank, sum n; zeros are legal.
            recv_counts: [W] rows from each rank; recv_counts[s] here must be what rank s sends
            here. async_op: return a Work at once; leave `rows` and `out` alone until it is done.
            out: [sum(recv_counts), ...] contiguous, where the rows go; else a new tensor.

        Raises:
            ValueError: counts do not fit rows or out; the other ranks raise CollectiveMismatch.
            CollectiveMismatch: row shapes or dtypes differ, or two ranks count differently.
            PeerLost, RankTimeout, RankError: a rank is lost, missing, or has aborted.

        Cost: one exchange; copies `rows` only when it is not contiguous.
        """
        name = "all_to_all_rows"
        self._check_device(rows, "rows")
        send = [int(c) for c in send_counts]
        receive = [int(c) for c in recv_counts]
        problem = self._row_problem(rows, send, receive, out)
        statement = problem or f"{name} of rows {_shape(rows, skip=1)}"

        def exchange(numbers: list[tuple[int, ...]]) -> Tensor:
            for s, says in enumerate(numbers):
                for r, hears in enumerate(numbers):
                    if says[r] != hears[self.size + s]:
                        message = (
                            f"{name}: rank {s} sends {says[r]} rows to rank {r}, which expects "
                            f"{hears[self.size + s]}"
                        )
                        raise CollectiveMismatch(message, rank=r, op=name)
            source = rows.contiguous()
            got = rows.new_empty((sum(receive), *rows.shape[1:])) if out is None else out
            if self.size == 1:
                return got.copy_(source)
            width = source[0].nbytes if len(source) else got[0].nbytes if len(got) else 0
            self._move(
                name,
                [c * width for c in send],
                lambda: [self._pg.alltoall_base(got, source, receive, send)],
                [c * width for c in receive],
            )
            return got

        try:
            return self._collective(name, statement, [*send, *receive], exchange, async_op)
        except CollectiveMismatch:
            if problem:
                raise ValueError(problem) from None
            raise

    def _row_problem(
        self, rows: Tensor, send: list[int], receive: list[int], out: Tensor | None
    ) -> str | None:
        for label, counts in (("send_counts", send), ("recv_counts", receive)):
            if len(counts) != self.size or min(counts) < 0:
                return f"{label} must be {self.size} counts of at least 0; got {counts}"
        if rows.dim() < 1 or sum(send) != len(rows):
            return f"send_counts must sum to the rows of {tuple(rows.shape)}; got {send}"
        shape = (sum(receive), *rows.shape[1:])
        if out is not None and (
            out.shape != shape or out.dtype != rows.dtype or not out.is_contiguous()
        ):
            return f"out must be a contiguous {rows.dtype} {shape}; got {_shape(out)}"
        return None

    # ---- how an operation runs ----

    @property
    def _pg(self) -> ProcessGroup:
        assert self.group is not None
        return self.group

    def _each(self, nbytes: int) -> list[int]:
        return [0 if r == self.rank else nbytes for r in range(self.size)]

    def _start_all_gather(self, out: Tensor, mine: Tensor) -> Callable[[], list[Any]]:
        return lambda: [self._pg._allgather_base(out, mine)]

    def _check_device(self, t: Tensor, name: str) -> None:
        if t.device.type != self.device.type:
            raise ValueError(f"{name} must be on {self.device.type}; got {t.device}")

    def _collective(
        self,
        op: str,
        statement: str,
        numbers: Sequence[int],
        body: Callable[[list[tuple[int, ...]]], Tensor],
        async_op: bool,
    ) -> Tensor | Work[Tensor]:
        """Meet, then run `body` with every rank's numbers; here, or on the group's thread."""
        if self.device.type == "cuda":
            return self._on_stream(op, numbers, body, async_op)

        def whole() -> Tensor:
            return body(self.session.meet(op, statement, numbers))

        if async_op:
            return Work(self._thread.submit(whole), op, self.timeout_s)
        return self._carry(op, whole)

    def _carry(self, op: str, job: Callable[[], T]) -> T:
        """Run a job here, or behind the asynchronous ones that were asked for before it."""
        if self._thread.busy:
            return Work(self._thread.submit(job), op, self.timeout_s).wait()
        return job()

    def _on_stream(
        self,
        op: str,
        numbers: Sequence[int],
        body: Callable[[list[tuple[int, ...]]], Tensor],
        async_op: bool,
    ) -> Tensor | Work[Tensor]:
        # No meeting: it would make the host wait for its peers at each launch. NCCL's own time-out
        # and the check at entry stand in. Not run where this was written (no GPU).
        self.session.raise_if_aborted(op)
        stream = self._cache.setdefault("stream", torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        caller = torch.cuda.current_stream(self.device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            result = body([tuple(numbers)] if self.size == 1 else [])
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        result.record_stream(stream)
        work = StreamWork([_EventWork(event, self.device)], lambda: result, op)
        return work if async_op else work.wait()

    def _move(
        self,
        op: str,
        bytes_out: Sequence[int],
        start: Callable[[], list[Any]] | None = None,
        bytes_in: Sequence[int] | None = None,
    ) -> None:
        """Carry data, and pay for the emulated link where there is one."""
        link = self.family.find_link()
        hold = None
        if link is not None:
            hold = link.depart(self.session, bytes_out, bytes_in or bytes_out)
        if start is not None:
            for work in start():
                if self.device.type == "cuda":
                    work.wait()
                else:
                    self.session.wait_work(work, op)
        if hold is not None:
            hold()


@dataclass
class _EventWork:
    event: Any
    device: torch.device

    def is_completed(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


def _new_group(name: str, members: list[int], backend: str, timeout_s: float) -> ProcessGroup:
    """A process group over ranks of the world, made by its members alone.

    What `dist.new_group` does, but named by the caller: its own names count the groups that a
    process has made so far, so two ranks that have been in different numbers of groups never meet.
    """
    group: ProcessGroup
    group, _ = dist.distributed_c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        dist.Backend(backend),
        dist.distributed_c10d._get_default_store(),
        name,  # type: ignore[arg-type]  # a str by another name
        timeout=timedelta(seconds=timeout_s),
    )
    ranks = {world: rank for rank, world in enumerate(members)}
    dist.distributed_c10d._world.pg_group_ranks[group] = ranks
    return group


def _open(
    group: ProcessGroup | None, device: torch.device, timeout_s: float, family: _Family
) -> Ranks:
    if group is None:
        name, rank, size, members, store = "alone", 0, 1, [0], None
    else:
        rank, size = group.rank(), group.size()
        members = dist.get_process_group_ranks(group)
        name = group.group_name
        turn = _sessions_of_group.get(name, 0)
        _sessions_of_group[name] = turn + 1
        own = dist.distributed_c10d._get_process_group_store(group)
        store = PrefixStore(f"septet/{turn}", own)
        name = f"{name}#{turn}"
    session = Session(name, rank, size, members, store, timeout_s)
    if group is not None:
        session.cpu_group = group
        if "gloo" not in str(dist.get_backend_config(group)):
            session.cpu_group = _new_group(f"{name}/cpu", members, "gloo", timeout_s)
    if family.ranks_per_machine is not None:
        machines = [m // family.ranks_per_machine for m in members]
    else:
        hosts = [i.host for i in session.identities]
        machines = [hosts.index(h) for h in hosts]
    index = sorted(set(machines))
    machines = [index.index(m) for m in machines]
    return Ranks(
        rank=rank,
        size=size,
        device=device,
        group=group,
        machine=machines[rank],
        machine_size=machines.count(machines[rank]),
        machines=tuple(machines),
        timeout_s=timeout_s,
        session=session,
        family=family,
        _thread=OrderedThread(f"collectives-{rank}"),
    )


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda'; got {device!r}") from None
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda'; got {device!r}")
    if where.type == "cuda" and where.index is None:
        if not torch.cuda.is_available():
            raise ValueError(f"device {device!r} was asked for, but torch finds no CUDA device")
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    return where


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _check_options(timeout_s: float, ranks_per_machine: int | None) -> None:
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0; got {timeout_s}")
    if ranks_per_machine is not None and ranks_per_machine < 1:
        raise ValueError(f"ranks_per_machine must be at least 1; got {ranks_per_machine}")


def _combine(rows: Tensor, op: str) -> Tensor:
    """[n] the rows [W, n] combined one after another, in rank order."""
    half = rows.dtype in (torch.float16, torch.bfloat16)
    total = rows[0].float() if half else rows[0].clone()
    for row in rows[1:]:
        total = total.add_(row) if op == "sum" else torch.maximum(total, row.to(total.dtype))
    return total.to(rows.dtype)


def _shape(t: Tensor, skip: int = 0) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape[skip:])}"


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def _short(x: object, limit: int = 200) -> str:
    text = repr(x)
    return text if len(text) <= limit else text[:limit] + "..."
