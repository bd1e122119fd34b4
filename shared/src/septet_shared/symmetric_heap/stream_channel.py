"""Flag words of a heap in device memory: signal, wait and barrier are enqueued on the stream.

The host does not wait. What goes wrong on the device (nobody came in time, two ranks in different
operations) is left in this rank's control page, and raised by the next call or by `check()`. A dead
peer or a poisoned heap ends waiting kernels at once, through the same pages.

Run in Triton's interpreter between processes; not run on a GPU where this was written.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from ctypes import c_int32
from typing import Any

import torch
from torch import Tensor

from septet_shared.ranks import CollectiveMismatch, RankError, RankTimeout
from septet_shared.symmetric_heap.channel import Channel, check_timeout, digest_of, latest
from septet_shared.symmetric_heap.control import CONTROL_BYTES, FAILED, SLICE_S, Control
from septet_shared.symmetric_heap.flags import LINE_BYTES

POLLS_PER_S = 1_000_000  # a poll of own memory at system scope takes about a microsecond


class StreamChannel(Channel):
    """`n` flag words on each rank in device memory, and a barrier, in the order of the stream.

    As `Channel`, but calls return before they are carried out: time-outs (counted in polls of about
    a microsecond) and mismatches are raised by the next call or by `check()`. All barriers of a
    channel must be on one stream, and not in a captured graph: their epochs are arguments.
    """

    def __init__(
        self, control: Control, pages: list[Tensor], name: str, n: int, first_word: int
    ) -> None:
        from septet_shared.symmetric_heap.kernels.exchange_flags import exchange_flags_kernel

        self.name, self.n, self.first_word = name, n, first_word
        self._control = control
        self._kernel: Any = exchange_flags_kernel
        self._pages = pages
        self._table = self._addresses(pages)
        # Rank r's word for me lies in my memory, so that polling never crosses a link.
        first = first_word + n
        lines = [page.view(torch.int32).view(-1, LINE_BYTES // 4) for page in pages]
        self._arrivals = [words[first : first + control.size] for words in lines]
        # Not 0 when the living have recovered before this rank makes the channel.
        self._begin(int(self._arrivals[control.rank][control.rank, 0]))

    def _begin(self, epoch: int) -> None:
        c = self._control
        self._epoch = epoch
        self._peers = self._addresses([self._pages[r] for r in c.living])
        self._from_peers = self._addresses([self._arrivals[c.rank][r] for r in c.living])

    def signal(self, rank: int, i: int, epoch: int) -> None:
        """As `Channel.signal`, after what is on the current stream. Cost: one small launch."""
        self._check(i, epoch, rank)
        self._raise_failure()
        offset = LINE_BYTES * (self.first_word + i)
        self._launch(1, epoch, signal=(self._table[rank:], offset))

    def wait(self, i: int, epoch: int, timeout_s: float | None = None) -> None:
        """Hold the current stream until word i is at `epoch`; returns at once."""
        self._check(i, epoch)
        check_timeout(timeout_s)
        self._raise_failure()
        own = (self._table[self._control.rank :], LINE_BYTES * (self.first_word + i))
        op = f"{self.name}.wait({i}, {epoch})"
        self._launch(1, epoch, wait=own, op=op, timeout_s=timeout_s)

    def barrier(self, op: str = "barrier", timeout_s: float | None = None) -> None:
        """Hold the current stream until all living ranks' streams have come; returns at once."""
        c = self._control
        check_timeout(timeout_s)
        self._raise_failure()
        self._epoch = c_int32(self._epoch + 1).value
        mine = LINE_BYTES * (self.first_word + self.n + c.rank)
        self._launch(
            len(c.living),
            self._epoch,
            signal=(self._peers, mine),
            wait=(self._from_peers, 0),
            op=f"{self.name}.barrier({op!r})",
            stamp=c_int32(digest_of(op)[0]).value,
            timeout_s=timeout_s,
        )

    def check(self) -> None:
        """Wait for the device, then raise what went wrong on it. Cost: a synchronisation."""
        settle(self._table.device)
        self._raise_failure()
        super().check()

    def latest_epoch(self) -> int:
        """The furthest barrier that a living rank has come to."""
        return latest(self._arrivals[self._control.rank][self._control.living, 0].tolist())

    def restart(self, epoch: int) -> None:
        """Continue after barrier `epoch`, also on ranks that have yet to make the channel."""
        for r in self._control.living:
            self._arrivals[r][:, 0] = epoch
        self._begin(epoch)

    def _raise_failure(self) -> None:
        """Raise what is known to have gone wrong on the device, without waiting for it."""
        c = self._control
        held = c.hold()
        ticket, op, limit_s = c.failed_ticket()
        if ticket < 0:
            message = f"{op}: rank {c.rank} met a rank that was in another operation"
            raise CollectiveMismatch(message, op=op)
        if ticket > 0:
            message = f"{op}: nobody came within about {limit_s:g} s (rank {c.rank} waited)"
            raise RankTimeout(message, op=op, waited_s=limit_s)
        if c_int32.from_address(c.poison_address).value:
            c.check(op, 0.0)
        del held

    def _launch(
        self,
        programs: int,
        epoch: int,
        *,
        signal: tuple[Tensor, int] | None = None,
        wait: tuple[Tensor, int] | None = None,
        op: str = "",
        stamp: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        c = self._control
        limit_s = c.timeout_s if timeout_s is None else timeout_s
        self._kernel[(programs,)](
            *(signal or (self._table, 0)),
            *(wait or (self._table, 0)),
            epoch,
            stamp,
            c.poison_address,
            c.addresses[c.rank] + FAILED,
            c.issue_ticket(op, limit_s) if wait else 0,
            min(2**31 - 1, int(limit_s * POLLS_PER_S)),
            SIGNAL=signal is not None,
            WAIT=wait is not None,
            MONOTONE=not (signal and wait),
            num_warps=1,
        )

    def _addresses(self, tensors: list[Tensor]) -> Tensor:
        addresses = [t.data_ptr() for t in tensors]
        return torch.tensor(addresses, dtype=torch.int64).to(self._pages[0].device)


def settle(device: torch.device) -> None:
    """Wait until the device has carried out all that was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def open_to_kernels(control: Control, ranks: set[int]) -> None:
    """Let kernels of this process use the control pages of these ranks, for poison and tickets.

    Raises:
        RuntimeError: CUDA refuses to map them.
    """
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for r in ranks:
        code = int(cuda.cudaHostRegister(control.addresses[r], CONTROL_BYTES, 1))
        if code != 0:
            raise RuntimeError(f"cudaHostRegister of a control page failed with code {code}")


def close_to_kernels(control: Control, ranks: set[int]) -> None:
    """Undo `open_to_kernels`."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for r in ranks:
        cuda.cudaHostUnregister(control.addresses[r])


def watch(control: Control) -> None:
    """Poison the heap when a peer dies or the group is aborted: its waiting kernels then end."""

    def look() -> None:
        while (alive := reference()) is not None and (held := alive.pages):
            try:
                alive.check("heap", 0.0)
            except RankError as error:
                with suppress(RuntimeError):  # closed meanwhile
                    alive.poison(str(error), type(error), error.rank)
            del alive, held
            time.sleep(SLICE_S)

    reference = weakref.ref(control)  # a heap that is dropped unclosed ends the thread
    threading.Thread(target=look, name="heap-watch", daemon=True).start()
