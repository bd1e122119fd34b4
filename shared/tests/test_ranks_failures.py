"""A rank that is killed, silent or aborts: the others raise soon, naming it, and can go on."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from septet_shared.ranks import (
    PeerLost,
    RankError,
    Ranks,
    RankTimeout,
    group,
    launch,
    liveness,
    run,
)
from septet_shared.ranks import session as session_module
from septet_shared.ranks.liveness import Heartbeats, Identity, identify
from septet_shared.ranks.session import TICK_S, poll

pytestmark = pytest.mark.ranks


def report(folder, rank, error, started):
    """What a surviving rank saw, kept where the parent finds it."""
    text = f"{type(error).__name__}|{error.rank}|{time.monotonic() - started:.3f}|{error}"
    (Path(folder) / f"report{rank}").write_text(text)


def reports(folder):
    found = {}
    for file in Path(folder).glob("report*"):
        kind, rank, waited_s, text = file.read_text().split("|", 3)
        found[int(file.name[6:])] = kind, rank, float(waited_s), text
    return found


def act(ranks, where, step):
    """One of the places where a rank may be when a peer is killed."""
    if where == "barrier":
        ranks.barrier(f"step {step}")
    elif where == "objects":
        ranks.all_gather_object(step)
    elif where == "reduce":
        ranks.all_reduce(torch.ones(100_000))
    elif where == "gather":
        ranks.all_gather(torch.ones(1000))
    elif where == "rows":
        count = [1000] * ranks.size
        rows = torch.ones(1000 * ranks.size, 16)
        ranks.all_to_all_rows(rows, count, count, async_op=True).wait()
    elif where == "groups":
        ranks.duplicate(f"d{step}").barrier("made")
    else:
        time.sleep(0.003)
        ranks.barrier(f"between {step}")


def until_a_peer_is_killed(ranks, folder, where, victim, after_s):
    act(ranks, where, -1)
    ranks.barrier("ready")
    started = time.monotonic()
    if ranks.rank == victim:
        # From outside its Python, at any moment of what it does.
        subprocess.Popen(["sh", "-c", f"sleep {after_s}; kill -KILL {os.getpid()}"])
    try:
        for step in range(100_000):
            act(ranks, where, step)
    except RankError as error:
        report(folder, ranks.rank, error, started + after_s)
        raise


@pytest.fixture
def patience(monkeypatch):
    """`run` waits for what the survivors report, instead of ending them after a second."""
    monkeypatch.setattr(launch, "_GRACE_S", 6.0)


WHERE = ["barrier", "objects", "reduce", "gather", "rows", "groups", "between"]


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(("victim", "where"), [(i % 3, w) for i, w in enumerate(WHERE)])
def test_a_killed_rank_is_named_by_every_other_rank(tmp_path, victim, where):
    memory = set(Path("/dev/shm").iterdir())
    with pytest.raises(PeerLost, match=f"rank {victim} died: killed by SIGKILL"):
        run(until_a_peer_is_killed, 3, tmp_path, where, victim, 0.1 + 0.01 * victim)
    seen = reports(tmp_path)
    assert set(seen) == {0, 1, 2} - {victim}
    for kind, rank, waited_s, text in seen.values():
        assert (kind, rank) == ("PeerLost", str(victim)), text
        assert waited_s < 5.0
    assert not [p for p in set(Path("/dev/shm").iterdir()) - memory if "septet" in p.name]


def die_while_connecting(ranks, folder):
    if ranks.rank == 1:
        group._connect = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        ranks.duplicate("never made")
    except RankError as error:
        report(folder, ranks.rank, error, started)
        raise


@pytest.mark.usefixtures("patience")
def test_a_rank_killed_while_a_group_connects_is_named(tmp_path):
    with pytest.raises(PeerLost, match="rank 1 died"):
        run(die_while_connecting, 3, tmp_path)
    seen = reports(tmp_path)
    assert set(seen) == {0, 2}
    for kind, rank, waited_s, text in seen.values():
        assert (kind, rank) == ("PeerLost", "1"), text
        assert waited_s < 5.0


# ---- several hosts, played on one ----


def on_hosts_of_their_own(ranks, silent_s=1.0):
    """The same ranks, each believing that the others run elsewhere."""
    Heartbeats.SILENT_S = silent_s
    liveness._host = lambda: f"host {ranks.rank}"
    return Ranks.wrap(ranks.group, timeout_s=ranks.timeout_s)


def far_collectives(ranks):
    far = on_hosts_of_their_own(ranks)
    total = far.all_reduce(torch.full((70_000,), float(ranks.rank)))
    local, across = far.by_machine()
    mismatch = None
    try:
        far.barrier(f"rank {ranks.rank}")
    except RankError as error:
        mismatch = str(error)
    return (
        far.on_one_host,
        far.machines,
        total[0].item(),
        far.all_gather_object(ranks.rank),
        local.size,
        across.all_gather_object(ranks.rank),
        mismatch,
    )


def test_ranks_of_several_hosts_meet_through_the_network():
    for one_host, machines, total, objects, local, across, mismatch in run(far_collectives, 3):
        assert not one_host
        assert machines == (0, 1, 2)
        assert total == 3
        assert objects == across == [0, 1, 2]
        assert local == 1
        assert "rank 0 is in 'barrier rank 0', rank 1 is in 'barrier rank 1'" in mismatch


def far_and_near(ranks):
    liveness._host = lambda: f"host {ranks.rank // 2}"
    far = Ranks.wrap(ranks.group)
    return far.machines, far.on_one_host, far.by_machine()[0].on_one_host


def test_machines_are_found_from_where_ranks_run():
    assert run(far_and_near, 4) == [((0, 0, 1, 1), False, True)] * 4


def far_abort(ranks):
    far = on_hosts_of_their_own(ranks)
    started = time.monotonic()
    if ranks.rank == 1:
        far.abort(ValueError("out of data"), "loader")
    try:
        far.barrier("step")
    except RankError as error:
        seen = error.rank, str(error), time.monotonic() - started
    again = far.recover()
    return *seen, again.all_gather_object(ranks.rank), again.on_one_host


def test_an_abort_reaches_other_hosts_and_the_group_recovers():
    for rank, text, waited_s, gathered, one_host in run(far_abort, 3):
        assert rank == 1
        assert "aborted by rank 1: ValueError: out of data [in loader]" in text
        assert waited_s < 3.0
        assert gathered == [0, 1, 2]
        assert not one_host


def far_missing(ranks):
    far = on_hosts_of_their_own(ranks)
    far.session.timeout_s = 1.0
    if ranks.rank == 1:
        time.sleep(2.5)
    try:
        far.barrier("step")
    except RankError as error:
        return type(error), error.rank, str(error)
    return None


def test_a_rank_of_another_host_that_does_not_come_is_named():
    first, second, third = run(far_missing, 3)
    for kind, rank, text in (first, third):
        assert kind in (RankTimeout, RankError)
        assert "rank 1 did not come" in text, rank
    assert second[0] is RankError


def until_a_far_peer_is_killed(ranks, folder, where, victim):
    far = on_hosts_of_their_own(ranks)
    if where == "subgroup":
        far = far.subgroup([0, 1, 2])
    until_a_peer_is_killed(far, folder, where, victim, 0.2)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(("victim", "where"), [(0, "reduce"), (2, "between"), (1, "groups")])
def test_a_rank_of_another_host_that_is_killed_is_named_by_every_other_rank(
    tmp_path, victim, where
):
    with pytest.raises(PeerLost, match=f"rank {victim} died"):
        run(until_a_far_peer_is_killed, 3, tmp_path, where, victim)
    seen = reports(tmp_path)
    assert set(seen) == {0, 1, 2} - {victim}
    for kind, rank, waited_s, text in seen.values():
        assert (kind, rank) == ("PeerLost", str(victim)), text
        assert waited_s < 5.0


def stop_far_peer(ranks, folder, victim, where):
    far = on_hosts_of_their_own(ranks, Heartbeats.SILENT_S)
    far.barrier("ready")
    if ranks.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)  # as when its machine has lost power
    started = time.monotonic()
    try:
        far.barrier("next") if where == "barrier" else far.session.wait_keys(["never"], "wait")
    except RankError as error:
        report(folder, ranks.rank, error, started)
        raise


@pytest.mark.parametrize("where", ["barrier", "store"])
def test_a_machine_that_falls_silent_is_named_within_five_seconds(where, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_S", 2.0)  # the stopped rank will not report
    with pytest.raises(PeerLost):
        run(stop_far_peer, 3, tmp_path, 1, where, timeout_s=20.0)
    seen = reports(tmp_path)
    assert set(seen) == {0, 2}
    for kind, rank, waited_s, text in seen.values():
        assert (kind, rank) == ("PeerLost", "1"), text
        assert "no longer answers" in text
        assert waited_s < 5.0


STORE = """
import sys, time, torch.distributed as dist
from septet_shared.ranks import RankError, Ranks, liveness
rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
begun = time.monotonic()
liveness._host = lambda: f"host {rank}"
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
ranks = Ranks.wrap(dist.group.WORLD, timeout_s=30)
print("ready", flush=True)
try:
    while True:
        ranks.barrier("step")
        if time.monotonic() > begun + 0.5 and how == "asked":
            ranks.session.wait_keys(["never"], "a key")
except RankError as error:
    print(type(error).__name__, error.rank)
"""


@pytest.mark.parametrize("how", ["killed", "stopped", "asked"])
def test_the_rank_that_keeps_the_store_is_named_when_both_go(how, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(STORE)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    keeper, other = (
        subprocess.Popen(
            [sys.executable, str(script), str(r), str(port), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for r in range(2)
    )
    try:
        for process in (keeper, other):
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        time.sleep(1.0)
        # Stopped, as when its machine has lost power: connections stay, and nothing answers.
        keeper.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        out, err = other.communicate(timeout=30)
        assert out == "PeerLost 0\n", err
        assert other.returncode == 0, err
    finally:
        for process in (keeper, other):
            process.kill()
            process.communicate()


# ---- abort and recover ----


def abort_in_the_middle(ranks):
    if ranks.rank == 2:
        time.sleep(0.3)
        ranks.abort(ValueError("bad batch"), "load")
        ranks.abort("a later reason", "load")
    seen = []
    for op in ("present", "next"):
        try:
            ranks.barrier(op)
        except RankError as error:
            seen.append((error.rank, error.op, str(error)))
    try:
        ranks.all_reduce(torch.ones(2), async_op=True).wait()
    except RankError as error:
        seen.append((error.rank, error.op, str(error)))
    again = ranks.recover()
    again.barrier("sound")
    twice = again.recover()
    return seen, again.all_gather_object(ranks.rank), twice.size


def test_an_abort_reaches_every_present_and_later_wait_and_the_group_recovers():
    for seen, gathered, size in run(abort_in_the_middle, 3):
        assert [s[:2] for s in seen] == [(2, "present"), (2, "next"), (2, "all_reduce sum")]
        for _, op, text in seen:
            assert text == f"{op}: the group was aborted by rank 2: ValueError: bad batch [in load]"
        assert gathered == [0, 1, 2]
        assert size == 3


def test_an_abort_of_a_single_rank_holds_until_it_recovers():
    ranks = Ranks.world("cpu")
    ranks.abort("enough", "here")
    with pytest.raises(RankError, match="aborted by rank 0: enough"):
        ranks.all_reduce(torch.ones(1))
    assert ranks.recover().all_gather_object(1) == [1]


def die_and_recover(ranks, victim, folder):
    if ranks.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.all_reduce(torch.ones(100_000))
    except PeerLost as error:
        lost = error.rank
    again = ranks.recover()
    total = again.all_reduce(torch.full((70_000,), float(ranks.rank)))[0].item()
    pair = again.duplicate("more").by_machine()
    text = f"{lost} {again.rank} {again.size} {total} {again.machines} {pair[1].size}"
    (Path(folder) / f"recovered{ranks.rank}").write_text(text)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_living_recover_from_a_kill(tmp_path, victim):
    with pytest.raises(PeerLost, match=f"rank {victim} died"):
        run(die_and_recover, 3, victim, tmp_path, ranks_per_machine=1)
    left = sorted({0, 1, 2} - {victim})
    for new_rank, rank in enumerate(left):
        text = (tmp_path / f"recovered{rank}").read_text()
        assert text == f"{victim} {new_rank} 2 {float(sum(left))} (0, 1) 2"


# ---- waiting ----


def test_what_came_between_two_looks_is_not_missed():
    came = []

    def look(waited_s):
        came.append(waited_s)
        raise PeerLost("its process has ended", rank=1, op="test")

    poll(lambda: bool(came), look)
    assert came[0] >= TICK_S
    with pytest.raises(PeerLost):
        poll(lambda: False, look)


class PlayedWork:
    """A c10d work that follows a script: what each wait does, and whether it has then ended."""

    def __init__(self, *steps):
        self.steps, self.over = list(steps), False

    def wait(self, limit):
        outcome, self.over = self.steps.pop(0)
        if outcome is not None:
            raise outcome

    def is_completed(self):
        return self.over


def test_a_work_that_ends_while_its_wait_runs_out_is_done():
    late = RuntimeError("Operation timed out!")
    session = Ranks.world("cpu").session
    session.wait_works([PlayedWork((late, False), (late, True), (None, True))], "test")
    assert session.is_idle()


def test_a_broken_exchange_that_nobody_explains_aborts_the_group(monkeypatch):
    monkeypatch.setattr(session_module, "_GONE_S", 0.1)
    session = Ranks.world("cpu").session
    broken = RuntimeError("Connection reset by peer")
    with pytest.raises(RankError, match="test: Connection reset by peer"):
        session.wait_works([PlayedWork((broken, True), (broken, True))], "test")
    with pytest.raises(RankError, match="next: the group was aborted by rank 0: Connection reset"):
        session.meet("next", "next")


def test_the_engines_own_time_out_is_a_rank_time_out(monkeypatch):
    monkeypatch.setattr(session_module, "_GONE_S", 0.1)
    session = Ranks.world("cpu").session
    late = RuntimeError("Timed out waiting 1000ms for recv operation to complete")
    with pytest.raises(RankTimeout, match="test: no answer within"):
        session.wait_works([PlayedWork((late, True), (late, True))], "test")


def test_a_work_that_never_ends_keeps_its_group_from_being_closed():
    session = Ranks.world("cpu", timeout_s=0.2).session
    endless = PlayedWork(*[(RuntimeError("Operation timed out!"), False)] * 100_000)
    with pytest.raises(RankTimeout):
        session.wait_works([endless], "test")
    assert not session.is_idle()
    endless.over = True
    assert session.is_idle()


# ---- judging whether a process lives ----


def test_a_process_number_that_was_used_again_is_another_process():
    me = identify()
    assert me.lives()
    assert not Identity(me.host, me.pid, me.start + 1).lives()


def test_a_process_that_has_ended_lives_no_more_before_it_is_reaped_too():
    process = subprocess.Popen(["sleep", "60"])
    start = liveness._state_and_start(process.pid)[1]
    there = Identity(identify().host, process.pid, start)
    assert there.lives()
    process.kill()
    deadline = time.monotonic() + 5
    while there.lives() and time.monotonic() < deadline:  # a zombie until it is waited for
        time.sleep(0.01)
    assert not there.lives()
    process.wait()
    assert not there.lives()


class Counters:
    """A store in this process."""

    def __init__(self):
        self.values = {}

    def clone(self):
        return self

    def set(self, key, value):
        self.values[key] = value.encode()

    def check(self, keys):
        return all(k in self.values for k in keys)

    def get(self, key):
        return self.values[key]


def test_a_rank_is_silent_once_its_beats_stop(monkeypatch):
    monkeypatch.setattr(Heartbeats, "BEAT_S", 0.02)
    monkeypatch.setattr(Heartbeats, "SILENT_S", 0.3)
    store = Counters()
    one, other = Heartbeats(store, 0, [1]), Heartbeats(store, 1, [0])
    one.meeting = 3
    deadline = time.monotonic() + 0.6
    while time.monotonic() < deadline:
        assert one.silent() == other.silent() == []
        time.sleep(0.01)
    assert other.behind(3) == []
    assert other.behind(4) == [0]
    del one
    time.sleep(0.5)
    other.silent()
    deadline = time.monotonic() + 5
    while not other.silent() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert other.silent() == [0]
    del other
    time.sleep(0.1)
    assert not [t for t in threading.enumerate() if "_keep_beating" in t.name]


def test_of_ranks_that_went_silent_the_first_one_is_named_first(monkeypatch):
    monkeypatch.setattr(Heartbeats, "BEAT_S", 0.02)
    monkeypatch.setattr(Heartbeats, "SILENT_S", 0.4)
    store = Counters()
    beats = {r: Heartbeats(store, r, [x for x in range(3) if x != r]) for r in range(3)}
    time.sleep(0.1)
    del beats[1]
    time.sleep(0.3)
    del beats[0]  # as a rank does that has noticed
    time.sleep(0.3)
    # Nobody has listened so far, so the silence of both counts from here on.
    assert beats[2].silent() == []
    deadline = time.monotonic() + 5
    while len(beats[2].silent()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert beats[2].silent() == [1, 0]
