"""The collectives of `Ranks`: meet, move bytes through the process group, pay for the link."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from septet_shared.ranks.errors import CollectiveMismatch
from septet_shared.ranks.session import Session
from septet_shared.ranks.work import OrderedThread, StreamWork, Work

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from septet_shared.link import EmulatedLink

T = TypeVar("T")
Numbers = list[Sequence[int]]  # what each rank stated

_SMALL_BYTES = 1 << 16  # up to here fewer rounds count for more than fewer bytes
_LARGEST_COUNT = 2**62


@dataclass
class Family:
    """What a group shares with the groups made from it."""

    parent: Family | None = None
    link: EmulatedLink | None = None
    machines: dict[int, int] | None = None  # emulated: rank of the world -> its machine

    def find_link(self) -> EmulatedLink | None:
        """The link that is emulated between these ranks, if any."""
        family: Family | None = self
        while family is not None:
            if family.link is not None:
                return family.link
            family = family.parent
        return None


class Collectives:
    """The part of `Ranks` that moves tensors."""

    rank: int
    size: int
    device: torch.device
    group: ProcessGroup | None
    session: Session
    family: Family
    _thread: OrderedThread
    _cache: dict[str, Any]

    @overload
    def all_reduce(
        self, t: Tensor, op: str = "sum", *, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self, t: Tensor, op: str = "sum", *, async_op: Literal[True]
    ) -> Work[Tensor]: ...
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
            ValueError: an unknown op, or t cannot be reduced in place; the other ranks raise
                CollectiveMismatch.
            CollectiveMismatch: shapes, dtypes or ops differ.

        Cost: 2 (W-1)/W of the tensor sent by each rank, W-1 adds; small ones take one round.
        """
        problem = self._target_problem(t)
        if op not in ("sum", "max"):
            problem = f"op must be 'sum' or 'max'; got {op!r}"
        elif not problem and op == "max" and t.is_complex():
            problem = f"t must be of an ordered dtype for op 'max'; got {t.dtype}"
        name = f"all_reduce {op}"

        def reduce(_: Numbers) -> Tensor:
            if self.size == 1 or t.numel() == 0:
                return t
            flat = _flat(t)
            n, w = flat.numel(), self.size
            if self._is_small(flat.nbytes):
                gathered = flat.new_empty(w * n)
                self._gather_into(name, gathered, flat)
                total = _combine(gathered.view(w, n), op)
            else:
                chunk = -(-n // w)
                sent = torch.cat([flat, flat.new_zeros(chunk * w - n)]) if chunk * w > n else flat
                got = torch.empty_like(sent)
                share = self._each(chunk * flat.element_size())
                self._move(name, share, lambda: self._exchange(got, sent, [], []))
                # All that was in `sent`, which may be t itself, has arrived where it is wanted.
                self._gather_into(name, sent, _combine(got.view(w, chunk), op))
                total = sent[:n]
            return _written(t, total)

        return self._collective(name, problem, f"{name} {shape_text(t)}", (), reduce, async_op, t)

    @overload
    def all_gather(self, t: Tensor, *, async_op: Literal[False] = False) -> Tensor: ...
    @overload
    def all_gather(self, t: Tensor, *, async_op: Literal[True]) -> Work[Tensor]: ...
    def all_gather(self, t: Tensor, *, async_op: bool = False) -> Tensor | Work[Tensor]:
        """[size, *t.shape] every rank's tensor, in rank order.

        Raises:
            ValueError: t is not a dense tensor of this device; the other ranks raise
                CollectiveMismatch.
            CollectiveMismatch: shapes or dtypes differ.

        Cost: t.nbytes sent to each other rank.
        """

        def gather(_: Numbers) -> Tensor:
            out = t.new_empty((self.size, *t.shape))
            if self.size == 1:
                out.copy_(t[None])
            elif t.numel():
                self._gather_into("all_gather", out, _flat(t))
            return out

        problem = self._tensor_problem(t, "t")
        statement = f"all_gather {shape_text(t)}"
        return self._collective("all_gather", problem, statement, (), gather, async_op, t)

    def broadcast(self, t: Tensor, src: int = 0) -> Tensor:
        """`t`, overwritten in place by rank `src`'s.

        Raises:
            ValueError: src is not a rank, or t cannot be written in place; the other ranks raise
                CollectiveMismatch.
            CollectiveMismatch: shapes, dtypes or src differ.
        """
        problem = self._target_problem(t)
        if not 0 <= src < self.size:
            problem = f"src must be in [0, {self.size}); got {src}"

        def send(_: Numbers) -> Tensor:
            if self.size == 1 or not t.numel():
                return t
            flat = _flat(t)
            bytes_out = self._each(flat.nbytes if self.rank == src else 0)
            bytes_in = [flat.nbytes if r == src else 0 for r in range(self.size)]
            whole = _bytes(flat)

            def start() -> list[Any]:
                if self.device.type == "cuda" or not self.session.can_hand_out(len(whole)):
                    return [broadcast(self._pg, whole, src)]
                mine = whole if self.rank == src else whole[:0]
                whole.copy_(self.session.hand_out("broadcast", mine)[src])
                return []

            self._move("broadcast", bytes_out, start, bytes_in)
            return _written(t, flat)

        statement = f"broadcast from {src} {shape_text(t)}"
        result = self._collective("broadcast", problem, statement, (), send, False, t)
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
                here.
            async_op: return a Work at once; leave `rows` and `out` alone until it is done.
            out: [sum(recv_counts), ...] contiguous, where the rows go; else a new tensor.

        Raises:
            ValueError: counts do not fit rows or out; the other ranks raise CollectiveMismatch.
            CollectiveMismatch: row shapes or dtypes differ, or two ranks count differently.
            PeerLost, RankTimeout, RankError: a rank is lost, missing, or has aborted.

        Cost: one exchange; copies `rows` only when it is not contiguous, or shares memory with out.
        """
        name = "all_to_all_rows"
        problem = self._tensor_problem(rows, "rows")
        send, receive = integers(send_counts), integers(recv_counts)
        for label, given, counts in (
            ("send_counts", send_counts, send),
            ("recv_counts", recv_counts, receive),
        ):
            if len(counts) != self.size or not 0 <= min(counts) <= max(counts) < _LARGEST_COUNT:
                problem = f"{label} must be {self.size} counts of at least 0; got {given!r}"
        problem = problem or self._row_problem(rows, send, receive, out)

        def exchange(numbers: Numbers) -> Tensor:
            for s, says in enumerate(numbers):
                for r, hears in enumerate(numbers):
                    if says[r] != hears[self.size + s]:
                        message = (
                            f"{name}: rank {s} sends {says[r]} rows to rank {r}, which expects "
                            f"{hears[self.size + s]}"
                        )
                        raise CollectiveMismatch(message, rank=r, op=name)
            got = rows.new_empty((sum(receive), *rows.shape[1:])) if out is None else out
            if self.size == 1:
                return got.copy_(rows)
            width = math.prod(rows.shape[1:]) * rows.element_size()
            source = _flat(rows)
            if out is not None and _storage(out) == _storage(source):
                source = source.clone()
            sent, received = [c * width for c in send], [c * width for c in receive]

            def start() -> list[Any]:
                if self.device.type == "cuda" or not self.session.can_hand_out(
                    max(sum(says[: self.size]) for says in numbers) * width
                ):
                    return self._exchange(got, source, received, sent)
                parts = self.session.hand_out(name, _bytes(source))
                targets: Sequence[Tensor] = torch.split(_bytes(got), received)
                for r, target in enumerate(targets):
                    first = sum(numbers[r][: self.rank]) * width
                    target.copy_(parts[r][first : first + received[r]])
                return []

            if width:
                self._move(name, sent, start, received)
            return got if out is None else _written(out, got)

        uses = (rows,) if out is None else (rows, out)
        statement = f"{name} of rows {shape_text(rows, skip=1)}"
        numbers = [*send, *receive] if not problem else ()
        return self._collective(name, problem, statement, numbers, exchange, async_op, *uses)

    # ---- what may not be asked ----

    def _tensor_problem(self, t: Tensor, name: str) -> str | None:
        if not isinstance(t, Tensor) or t.layout != torch.strided:
            return f"{name} must be a dense tensor; got {getattr(t, 'layout', t)!r}"
        if t.device.type != self.device.type:
            return f"{name} must be on {self.device.type}; got {t.device}"
        return None

    def _target_problem(self, t: Tensor) -> str | None:
        problem = self._tensor_problem(t, "t")
        if problem is None and any(
            n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True)
        ):
            return (
                "t is written in place, so its elements must not share memory; got "
                f"{tuple(t.shape)} with strides {t.stride()}"
            )
        return problem

    def _row_problem(
        self, rows: Tensor, send: list[int], receive: list[int], out: Tensor | None
    ) -> str | None:
        if rows.dim() < 1 or sum(send) != len(rows):
            return f"send_counts must sum to the rows of {tuple(rows.shape)}; got {send}"
        shape = (sum(receive), *rows.shape[1:])
        if out is not None and (
            self._tensor_problem(out, "out")
            or out.shape != shape
            or out.dtype != rows.dtype
            or not out.is_contiguous()
        ):
            return f"out must be a contiguous {rows.dtype} {shape}; got {shape_text(out)}"
        return None

    # ---- how an operation runs ----

    @property
    def _pg(self) -> ProcessGroup:
        group = self.group if self.device.type == "cuda" else self.session.cpu_group
        assert group is not None
        return group

    def _is_small(self, nbytes: int) -> bool:
        """Whether all ranks had better get all of so many bytes of each, in one round."""
        if self.device.type != "cuda" and self.session.can_hand_out(nbytes):
            return True
        return nbytes * self.size <= _SMALL_BYTES

    def _each(self, nbytes: int) -> list[int]:
        return [0 if r == self.rank else nbytes for r in range(self.size)]

    # As bytes, because gloo and NCCL know few dtypes.

    def _gather_into(self, op: str, out: Tensor, mine: Tensor) -> None:
        to, of = _bytes(out), _bytes(mine)

        def start() -> list[Any]:
            if self.device.type == "cuda":
                return [self._pg._allgather_base(to, of)]
            return gather_bytes(self.session, self._pg, op, to, of)

        self._move(op, self._each(mine.nbytes), start)

    def _exchange(
        self, got: Tensor, sent: Tensor, receive: list[int], send: list[int]
    ) -> list[Any]:
        return [self._pg.alltoall_base(_bytes(got), _bytes(sent), receive, send)]

    def _collective(
        self,
        op: str,
        problem: str | None,
        statement: str,
        numbers: Sequence[int],
        body: Callable[[Numbers], Tensor],
        async_op: bool,
        *uses: Tensor,
    ) -> Tensor | Work[Tensor]:
        """Meet, then run `body` with every rank's numbers; here, or on the group's thread."""
        if self.device.type == "cuda":
            return self._on_stream(op, problem, numbers, body, async_op, *uses)

        def whole() -> Tensor:
            stated = self._meet(op, problem, statement, numbers)
            with torch.no_grad():
                return body(stated)

        if async_op:
            return Work(self._thread.submit(self._linked(whole)), op, self.session.absent)
        return self._carry(op, whole)

    def _meet(
        self, op: str, problem: str | None, statement: str, numbers: Sequence[int] = ()
    ) -> Numbers:
        """What each rank states; ValueError with this rank's problem, if it has one.

        A rank with a problem meets too, so that its peers raise instead of waiting for it.
        """
        try:
            stated = self.session.meet(op, problem or statement, numbers)
        except CollectiveMismatch:
            if not problem:
                raise
        if problem:
            raise ValueError(problem)
        return stated

    def _carry(self, op: str, job: Callable[[], T]) -> T:
        """Run a job here, or behind the asynchronous ones that were asked for before it."""
        job = self._linked(job)
        if self._thread.busy:
            return Work(self._thread.submit(job), op, self.session.absent).wait()
        return job()

    def _linked(self, job: Callable[[], T]) -> Callable[[], T]:
        """The job under the link of now: it may run after the link has ended, on some ranks."""
        link = self.family.find_link()

        def linked() -> T:
            self._cache["link"] = link
            return job()

        return linked

    def _on_stream(
        self,
        op: str,
        problem: str | None,
        numbers: Sequence[int],
        body: Callable[[Numbers], Tensor],
        async_op: bool,
        *uses: Tensor,
    ) -> Tensor | Work[Tensor]:
        # No meeting: it would make the host wait for its peers at each launch. NCCL's own time-out
        # and the check at entry stand in. Not run where this was written (no GPU).
        if problem:
            raise ValueError(problem)
        self.session.raise_if_aborted(op)
        if "stream" not in self._cache:
            self._cache["stream"] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._cache["stream"]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            result = body([numbers] if self.size == 1 else [])
            event = stream.record_event()
        for t in uses:  # the caller may let go of them before the stream has passed
            t.record_stream(stream)
        work = StreamWork(event, result, op, self.session)
        return work if async_op else work.wait()

    def _move(
        self,
        op: str,
        bytes_out: Sequence[int],
        start: Callable[[], list[Any]] | None = None,
        bytes_in: Sequence[int] | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        """Carry data, and pay for the emulated link where there is one."""
        link: EmulatedLink | None = self._cache.get("link")
        hold = None
        if link is not None:
            hold = link.depart(self.session, bytes_out, bytes_in or bytes_out)
        works = start() if start is not None else []
        if self.device.type == "cuda" and not on_host:
            for work in works:
                work.wait()
        else:
            self.session.wait_works(works, op)
        if hold is not None:
            hold(op)


def broadcast(group: ProcessGroup, whole: Tensor, src: int) -> Any:
    """The work of giving every rank the bytes of `src`."""
    options = dist.BroadcastOptions()
    options.rootRank = src
    return group.broadcast([whole], options)


def gather_bytes(
    session: Session, group: ProcessGroup, op: str, out: Tensor, mine: Tensor
) -> list[Any]:
    """The works (none: it is done) of giving every rank the bytes [n] of all, as [size * n].

    gloo's own all-gather goes round a ring, which takes three to four times as long on one host.
    """
    if session.can_hand_out(len(mine)):
        for row, part in zip(out.view(session.size, -1), session.hand_out(op, mine), strict=True):
            row.copy_(part)
        return []
    if len(mine) <= _SMALL_BYTES:
        return [group.alltoall_base(out, mine.repeat(group.size()), [], [])]
    rows, rank = out.view(group.size(), -1), group.rank()
    works = [broadcast(group, mine if r == rank else row, r) for r, row in enumerate(rows)]
    rows[rank].copy_(mine)
    return works


def shape_text(t: Tensor, skip: int = 0) -> str:
    """How errors write a tensor's dtype and shape, without its first `skip` dims."""
    if not isinstance(t, Tensor):
        return repr(t)
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape[skip:])}"


def _flat(t: Tensor) -> Tensor:
    """The elements in order, contiguous: a copy where t is not."""
    return t.resolve_conj().resolve_neg().contiguous().view(-1)


def _written(t: Tensor, flat: Tensor) -> Tensor:
    """`t` with the elements of `flat`, which may be its own memory."""
    if _storage(flat) != _storage(t):
        return t.copy_(flat.view(t.shape))
    torch.autograd.graph.increment_version(t)  # autograd did not see the bytes arrive
    return t


def _bytes(t: Tensor) -> Tensor:
    # Not `view`: that leaves a single element whatever stride it had.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def integers(values: Sequence[int] | Tensor) -> list[int]:
    """The values as integers; none, which nothing accepts, where one is not."""
    try:
        return [operator.index(v) for v in values]
    except TypeError:
        return []


def _combine(rows: Tensor, op: str) -> Tensor:
    """[n] the rows [W, n] combined one after another, in rank order; overwrites `rows`."""
    half = rows.is_floating_point() and rows.element_size() <= 2
    total = rows[0].float() if half else rows[0]
    for row in rows[1:]:
        row = row.to(total.dtype)
        total = total.add_(row) if op == "sum" else torch.maximum(total, row, out=total)
    return total.to(rows.dtype)
