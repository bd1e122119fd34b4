"""`Ranks`: who takes part, the groups made from it, and its host-side operations."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from septet_shared.ranks.collectives import Collectives, Family, gather_bytes, integers
from septet_shared.ranks.errors import PeerLost, RankError, RanksDiverged, RankTimeout
from septet_shared.ranks.liveness import Identity
from septet_shared.ranks.session import Session, beside, poll
from septet_shared.ranks.work import OrderedThread

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

_Check = Callable[[str, float, Sequence[int]], None]

# gloo's and NCCL's own limits do not know who is missing: those of this module must come first.
SLACK_S = 30.0
_sessions_of_group: dict[str, int] = {}  # sessions opened so far on a process group, by its name


@dataclass(frozen=True, eq=False)
class Ranks(Collectives):
    """Who takes part: a `torch.distributed` process group, or one process without any.

    One thread at a time may use it; `duplicate` gives another thread its own.

    Attributes:
        rank, size: this rank and how many there are.
        device: where this rank's tensors live.
        group: the process group; None for a single process. One that `subgroup`, `duplicate`,
            `by_machine` or `recover` made lives as long as its Ranks (with NCCL: as the process).
        machine, machine_size: index of this rank's machine, and how many ranks of the group it
            holds.
        machines: [size] machine index of each rank.
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
    family: Family = field(repr=False)
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
            RankError: not all ranks came.
        """
        where = _device(device)
        check_options(timeout_s, ranks_per_machine)
        if not dist.is_initialized():
            if "RANK" not in os.environ:
                return _open(None, where, timeout_s, Family(), ranks_per_machine)
            needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            missing = [name for name in needed if name not in os.environ]
            if missing:
                raise ValueError(
                    f"the environment has RANK but not {', '.join(missing)}: start with torchrun"
                )
            _join_world(where, timeout_s)
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
        check_options(timeout_s, ranks_per_machine)
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group must be a ProcessGroup this process is in; got {group!r}")
        if device == "auto" and "nccl" not in str(dist.get_backend_config(group)):
            device = "cpu"
        return _open(group, _device(device), timeout_s, Family(), ranks_per_machine)

    def subgroup(self, ranks: Sequence[int]) -> Ranks | None:
        """The named ranks with a communicator of their own; None on a rank that is not named.

        Args:
            ranks: ascending ranks of this group, the same on every rank.

        Raises:
            ValueError: not ascending, or not in [0, size).
            CollectiveMismatch: ranks named different members.

        Cost: collective over this group; about 10 ms. Reuse what you get.
        """
        chosen, problem = integers(ranks), None
        if not chosen or chosen != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= self.size:
            problem = f"ranks must ascend within [0, {self.size}); got {ranks!r}"
        label = self._meet_to_split(f"subgroup {chosen}", problem)
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
            RankTimeout: a living rank did not come.
        """
        session, store = self.session, self.session.store
        turn = self._cache.get("recoveries", 0)
        prefix = f"recover/{turn}"
        living: list[int] = []
        absent: list[int] = []

        def came(r: int) -> bool:
            return session.ask(lambda: bool(store.check([f"{prefix}/{r}"])), "recover")

        def gathered() -> bool:
            living[:] = session.living()
            absent[:] = [r for r in living if not came(r)]
            return not absent

        def look(waited_s: float) -> None:
            if waited_s > self.timeout_s:
                message = f"recover: rank {absent} did not come within {waited_s:.1f} s"
                raise RankTimeout(message, rank=absent[0], op="recover", waited_s=waited_s)

        try:
            session.set_key(f"{prefix}/{self.rank}", b"")
            poll(gathered, look)
            # Two may see different ranks alive: what the first says holds for all.
            mine = json.dumps(living)
            said = session.ask(lambda: store.compare_set(f"{prefix}/members", "", mine), "recover")
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(f"recover: the store is lost: {error}", op="recover") from error
        members: list[int] = json.loads(said)
        if self.rank not in members:
            raise PeerLost("recover: this rank was taken for dead", rank=self.rank, op="recover")
        made = self._split(members, prefix, session.check_peers)
        self._cache["recoveries"] = turn + 1  # one that failed may be tried again, and joined
        return made

    def _meet_to_split(self, what: str, problem: str | None = None) -> str:
        """A label that is new, and the same on all ranks."""
        self._carry(what, lambda: self._meet(what, problem, what))
        turn = self._cache["splits"] = self._cache.get("splits", 0) + 1
        return f"{turn} {what}"

    def _split(self, chosen: list[int], label: str, check: _Check | None = None) -> Ranks:
        """Ranks over `chosen` of this group; called by exactly those, with an equal label.

        While they connect, `check` looks after them.
        """
        family = Family(self.family, None, self.family.machines)
        if self.group is None:
            return _open(None, self.device, self.timeout_s, family)
        members = [self.session.members[r] for r in chosen]
        name = f"{self.session.name}/{label}"  # the session's: a group may have several Ranks
        check = check or self.session.check_alive

        def look(waited_s: float) -> None:
            check(f"connect {label}", waited_s, chosen)

        group = _new_group(name, members, self.device, _backend(self.device), self.timeout_s, look)
        made = _open(group, self.device, self.timeout_s, family, parent=self.session)
        if self.device.type == "cpu":  # ending an NCCL communicator needs all its ranks
            weakref.finalize(made, _end_group, group, made.session, os.getpid()).atexit = False
        return made

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
    def store(self) -> Store:
        """The group's own key-value store."""
        return self.session.store

    def set_key(self, key: str, value: bytes) -> None:
        """Set a key that all ranks of the group can read."""
        self.session.set_key(key, value)

    def wait_keys(self, keys: Sequence[str], op: str) -> list[bytes]:
        """Values of the keys (keys[r] is rank r's), once all are set; errors as `check_alive`."""
        return self.session.wait_keys(keys, op)

    def check_alive(self, op: str, waited_s: float = 0.0, missing: Sequence[int] = ()) -> None:
        """Raise PeerLost when a peer's process has ended, RankError when the group was aborted.

        Args:
            op, waited_s: what the error says.
            missing: ranks that the caller waits for: PeerLost too when one of them has returned
                from the function of `run`, and so takes part in nothing more.
        """
        self.session.check_alive(op, waited_s)
        self.session.check_finished(op, waited_s, missing)

    def abort(self, error: BaseException | str, op: str) -> None:
        """Make every rank's present and next wait in this group raise a RankError with `error`.

        The first reason stands; `recover()` gives a fresh group. Ranks of other hosts hear of it
        within a second.
        """
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.session.abort(text, op)

    # ---- host-side operations ----

    def barrier(self, op: str) -> None:
        """Return once all ranks have called it.

        Raises:
            CollectiveMismatch: ranks are in different operations; names both.
            PeerLost, RankTimeout, RankError: a rank is lost, missing, or has aborted.

        Cost: about 15 us between two ranks of a host that have a core each.
        """

        def meet() -> None:
            self.session.meet(op, f"barrier {op}")
            self._move(op, [0] * self.size)

        self._carry(op, meet)

    def all_gather_object(self, x: object) -> list[Any]:
        """[size] every rank's object, in rank order.

        Raises:
            ValueError: it does not pickle; the other ranks raise CollectiveMismatch.
            PeerLost, RankTimeout, RankError: a rank is lost, missing, or has aborted.
        """
        return self._gather_objects(x, "all_gather_object")

    def _gather_objects(self, x: object, op: str) -> list[Any]:
        data, problem = b"", None
        try:
            data = pickle.dumps(x)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            problem = f"what {op} is given must pickle; got {_short(x)}: {error}"

        def gather() -> list[Any]:
            sizes = [n[0] for n in self._meet(op, problem, op, [len(data)])]
            if self.size == 1:
                return [pickle.loads(data)]
            mine = torch.zeros(max(sizes), dtype=torch.uint8)
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            out = torch.empty(self.size * len(mine), dtype=torch.uint8)
            group = self.session.cpu_group
            assert group is not None
            self._move(
                op,
                [len(data)] * self.size,
                lambda: gather_bytes(self.session, group, op, out, mine),
                sizes,
                on_host=True,
            )
            rows = out.view(self.size, -1)
            return [pickle.loads(rows[r, :n].numpy().tobytes()) for r, n in enumerate(sizes)]

        return self._carry(op, gather)

    def agree(self, x: object, what: str) -> None:
        """Return when all ranks hold an equal `x`; NaN equals NaN.

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


# ---- how groups come about ----


def _join_world(device: torch.device, timeout_s: float) -> None:
    started = time.monotonic()
    try:
        dist.init_process_group(_backend(device), timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        waited = time.monotonic() - started
        message = f"world: the ranks did not meet within {waited:.1f} s: {error}"
        raise RankError(message, op="world", waited_s=waited) from error
    limit = timedelta(seconds=timeout_s + SLACK_S)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)


def _new_group(
    name: str,
    members: list[int],
    device: torch.device,
    backend: str,
    timeout_s: float,
    look: Callable[[float], None],
) -> ProcessGroup:
    """A process group over ranks of the world, made by its members alone.

    What `dist.new_group` does, but named by the caller: its own names count the groups that a
    process has made so far, so two ranks that have been in different numbers of groups never meet.
    Connecting is deaf to lost peers, so a thread does it while this one calls `look`.
    """

    def connect() -> ProcessGroup:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread has its own
        return _connect(name, members, backend, timeout_s)

    def look_and_count(waited_s: float) -> None:
        look(waited_s)
        if waited_s > timeout_s:
            message = f"{name}: ranks {members} did not connect within {waited_s:.1f} s"
            raise RankTimeout(message, op=name, waited_s=waited_s)

    started = time.monotonic()
    try:
        return beside(connect, look_and_count)
    except RankError:
        raise
    except RuntimeError as error:
        waited = time.monotonic() - started
        look(waited)  # names who was lost
        message = f"{name}: ranks {members} did not connect: {error}"
        raise RankError(message, op=name, waited_s=waited) from error


def _connect(name: str, members: list[int], backend: str, timeout_s: float) -> ProcessGroup:
    c10d = dist.distributed_c10d
    world = dist.group.WORLD
    assert world is not None
    # A world bound to a device would have NCCL split its communicator, which all its ranks must do.
    bound = world.bound_device_id
    if bound is not None:
        world.bound_device_id = None
    group: ProcessGroup
    try:
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            members,
            dist.Backend(backend),
            c10d._get_default_store(),
            name,  # type: ignore[arg-type]  # a str by another name
            timeout=timedelta(seconds=timeout_s + SLACK_S),
        )
    finally:
        if bound is not None:
            world.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {m: rank for rank, m in enumerate(members)}
    return group


def _end_group(group: ProcessGroup, session: Session, pid: int) -> None:
    # Not in a forked child, which has the group's threads no more; and not while an exchange is
    # unfinished, for which this would wait: such a group stays until the process ends.
    if os.getpid() == pid and session.is_idle() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def _open(
    group: ProcessGroup | None,
    device: torch.device,
    timeout_s: float,
    family: Family,
    ranks_per_machine: int | None = None,
    parent: Session | None = None,
) -> Ranks:
    rank, size, members, name = 0, 1, [0], "alone"
    store: Store = HashStore()
    if group is not None:
        rank, size, name = group.rank(), group.size(), group.group_name
        members = dist.get_process_group_ranks(group)
        if not _sessions_of_group:
            # gloo's threads let go of a tensor a moment after its exchange; when that was Python's
            # last hold on it and Python has ended meanwhile, they abort the process.
            atexit.register(time.sleep, 0.1)
        turn = _sessions_of_group.get(name, 0)
        _sessions_of_group[name] = turn + 1
        store = PrefixStore(f"septet/{turn}", dist.distributed_c10d._get_process_group_store(group))
        name = f"{name}#{turn}"
    session = Session(name, rank, size, members, store, timeout_s, parent)
    if group is not None:
        session.cpu_group = group
        if "gloo" not in str(dist.get_backend_config(group)):
            cpu = torch.device("cpu")
            own_name = f"{name}/cpu"

            def look(waited_s: float) -> None:
                session.check_alive(own_name, waited_s)

            session.cpu_group = _new_group(own_name, members, cpu, "gloo", timeout_s, look)
    if ranks_per_machine is not None:
        family.machines = {world: r // ranks_per_machine for r, world in enumerate(members)}
    if family.machines is not None:
        found = [family.machines[world] for world in members]
        machines = [sorted(set(found)).index(m) for m in found]
    else:
        hosts = list(dict.fromkeys(i.host for i in session.identities))
        machines = [hosts.index(i.host) for i in session.identities]
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
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda'; got {device!r}") from None
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda'; got {device!r}")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {device!r} was asked for, but torch finds no CUDA device")
        if where.index is None:
            where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    return where


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def check_options(timeout_s: float, ranks_per_machine: int | None) -> None:
    """Raise ValueError unless the time-out is sane and machines have at least a rank."""
    if not 0 < timeout_s <= 1e6:
        raise ValueError(f"timeout_s must be in (0, 1e6]; got {timeout_s}")
    if ranks_per_machine is not None and not (
        isinstance(ranks_per_machine, int) and ranks_per_machine >= 1
    ):
        raise ValueError(f"ranks_per_machine must be at least 1; got {ranks_per_machine!r}")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    if any(isinstance(x, (Tensor, np.ndarray)) for x in (a, b)):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    try:
        if bool(a == b):
            return True
    except (RuntimeError, ValueError, TypeError):  # compared element by element
        pass
    return pickle.dumps(a) == pickle.dumps(b)  # NaN, or a class without equality


def _short(x: object, limit: int = 200) -> str:
    text = repr(x)
    return text if len(text) <= limit else text[:limit] + "..."
