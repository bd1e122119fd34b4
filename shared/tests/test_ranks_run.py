"""`ranks.run`: results come back, the first failure is raised, and nothing lives on."""

import contextlib
import functools
import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from septet_shared.link import LinkSpec
from septet_shared.ranks import PeerLost, RankError, RankTimeout, run

pytestmark = pytest.mark.ranks


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids, within_s=5.0):
    """Whether all these processes end in time."""
    deadline = time.monotonic() + within_s
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(lives, pids))


def note_pid(folder, rank, pid=None):
    path = Path(folder) / f"{rank}.tmp"
    path.write_text(str(pid or os.getpid()))
    path.rename(Path(folder) / f"{rank}.pid")


def pids_in(folder, count, within_s=60.0):
    deadline = time.monotonic() + within_s
    while len(found := list(Path(folder).glob("*.pid"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(found) == count
    return [int(f.read_text()) for f in found]


@pytest.fixture
def shared_memory_is_left_clean():
    folder = Path("/dev/shm")
    before = set(folder.iterdir()) if folder.exists() else set()
    yield
    after = set(folder.iterdir()) if folder.exists() else set()
    assert not [p for p in after - before if p.name.startswith("septet")]


# ---- results ----


def describe(ranks, a, b):
    return ranks.rank, ranks.size, a, b, torch.get_num_threads(), os.getpid()


def test_results_come_in_rank_order_from_processes_with_the_threads_asked_for():
    got = run(describe, 3, "x", [1], threads_per_rank=2)
    assert [g[:5] for g in got] == [(r, 3, "x", [1], 2) for r in range(3)]
    assert len({g[5] for g in got} | {os.getpid()}) == 4
    assert gone([g[5] for g in got])


def large_result(ranks):
    return torch.full((8_000_001,), float(ranks.rank)), b"x" * 1_000_000


def test_results_of_many_megabytes_come_back():
    for rank, (tensor, data) in enumerate(run(large_result, 2)):
        assert tensor.shape == (8_000_001,)
        assert (tensor == rank).all()
        assert len(data) == 1_000_000


def report_environment(ranks):
    return os.environ.get("SEPTET_TEST_SET"), os.environ.get("SEPTET_TEST_UNSET"), str(Path.cwd())


def test_ranks_see_the_callers_present_environment_and_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SEPTET_TEST_UNSET", "old")
    run(report_environment, 1)
    monkeypatch.setenv("SEPTET_TEST_SET", "new")
    monkeypatch.delenv("SEPTET_TEST_UNSET")
    monkeypatch.chdir(tmp_path)
    assert run(report_environment, 1) == [("new", None, str(tmp_path))]


def test_functions_of_a_module_off_the_path_run_also_bound_to_arguments(tmp_path, monkeypatch):
    file = tmp_path / "off_the_path.py"
    file.write_text("def double(ranks, x):\n    return 2 * x + ranks.rank\n")
    spec = importlib.util.spec_from_file_location("off_the_path", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "off_the_path", module)
    spec.loader.exec_module(module)
    assert run(module.double, 2, 3) == [6, 7]
    assert run(functools.partial(module.double, x=4), 2) == [8, 9]


def nested(ranks):
    return run(describe, 2, ranks.rank, None), ranks.all_gather_object(ranks.rank)


def test_a_rank_may_run_ranks_of_its_own():
    for rank, (inner, outer) in enumerate(run(nested, 2)):
        assert [i[:3] for i in inner] == [(0, 2, rank), (1, 2, rank)]
        assert outer == [0, 1]


def test_threads_may_run_ranks_at_the_same_time():
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: run(describe, 2, i, None)}))
        for i in range(3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {i: [g[:3] for g in r] for i, r in results.items()} == {
        i: [(0, 2, i), (1, 2, i)] for i in range(3)
    }


def multiply(ranks):
    torch.set_num_threads(2)
    return (torch.ones(300, 300) @ torch.ones(300, 300))[0, 0].item()


def test_ranks_start_after_openmp_has_run_in_the_caller():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    multiply(None)
    torch.set_num_threads(before)
    assert run(multiply, 2) == [300.0] * 2


def fork_children(ranks):
    ranks.all_reduce(torch.ones(100_000))
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        children.append(os.waitpid(child, 0)[1])
    return children, ranks.all_reduce(torch.ones(2)).tolist()


def test_a_rank_that_forks_keeps_its_group():
    assert run(fork_children, 2) == [([0, 0], [2.0, 2.0])] * 2


# ---- failures ----


def fail_on_rank_1(ranks, how, folder):
    note_pid(folder, ranks.rank)
    if ranks.rank == 1:
        if how == "raise":
            raise KeyError("what went wrong")
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "unpicklable":
            return lambda: None
    if how == "unpicklable":
        return None
    if how == "raise" and ranks.rank == 2:
        time.sleep(60)  # deaf
    return ranks.barrier("never")


@pytest.mark.usefixtures("shared_memory_is_left_clean")
@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", RankError, "rank 1 raised KeyError: 'what went wrong'"),
        ("exit", RankError, "rank 1 raised SystemExit: 3"),
        ("_exit", PeerLost, "rank 1 died: exit 7"),
        ("kill", PeerLost, "rank 1 died: killed by SIGKILL"),
        ("unpicklable", RankError, "rank 1 raised AttributeError"),
    ],
)
def test_a_failing_rank_is_named_soon_and_the_others_end(how, kind, text, tmp_path):
    run(describe, 1, None, None)  # the server is there: what follows is timed
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        run(fail_on_rank_1, 3, how, tmp_path)
    assert time.monotonic() - started < 5.0  # 2 s on a machine that does nothing else
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert caught.value.rank == 1
    if how == "raise":
        assert "in fail_on_rank_1" in str(caught.value)  # its traceback
    assert gone(pids_in(tmp_path, 3))


def test_the_traceback_of_a_failed_run_holds_no_store(tmp_path):
    # It would end with a thread, in whichever process collects the traceback: a forked child too.
    with pytest.raises(RankError) as caught:
        run(fail_on_rank_1, 2, "raise", tmp_path)
    frames, step = [], caught.value.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    held = [type(value).__name__ for frame in frames for value in frame.f_locals.values()]
    assert "_Job" in held
    assert "TCPStore" not in held


def leave_children(ranks, folder):
    if ranks.rank == 0:
        note_pid(folder, "command", subprocess.Popen(["sleep", "60"]).pid)
    else:
        child = os.fork()
        if child == 0:  # holds all that this rank had open
            time.sleep(60)
            os._exit(0)
        note_pid(folder, "child", child)
    ranks.barrier("started")
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_what_killed_ranks_have_started_neither_hides_their_death_nor_outlives_it(tmp_path):
    started = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 died: killed by SIGKILL"):
        run(leave_children, 2, tmp_path)
    assert time.monotonic() - started < 20.0
    assert gone(pids_in(tmp_path, 2))


def return_while_others_wait(ranks, where):
    group = ranks.subgroup([0, 1]) if where == "subgroup" else ranks
    if ranks.rank == 1 or group is None:
        return
    group.barrier("with the one that left")


@pytest.mark.parametrize("where", ["world", "subgroup"])
def test_a_rank_that_returns_while_others_wait_is_named(where):
    with pytest.raises(PeerLost, match=r"lost rank 1 \(it has returned without taking part\)"):
        run(return_while_others_wait, 3, where)


def return_with_work_in_flight(ranks):
    other = ranks.duplicate("other")
    if ranks.rank == 0:
        for group in (ranks, other):
            group._thread.submit(lambda: time.sleep(0.5))  # long enough to be missed
            group.all_reduce(torch.ones(3), async_op=True)
            group.all_reduce(torch.ones(3), async_op=True)
        return None
    return [g.all_reduce(torch.ones(3)).tolist() for g in (ranks, ranks, other, other)]


def test_a_rank_that_returns_still_takes_part_in_what_it_has_begun():
    assert run(return_with_work_in_flight, 2) == [None, [[2.0] * 3] * 4]


def fail_within(ranks):
    if ranks.rank == 0:
        ranks.barrier("lost")
    run(raise_a_subclass, 1)


def test_the_failure_of_ranks_that_a_rank_has_run_is_raised():
    with pytest.raises(RankError, match="rank 1 raised RankError: rank 0 raised CustomError: mine"):
        run(fail_within, 2)


def never_come(ranks):
    if ranks.rank == 1:
        time.sleep(60)
    ranks.barrier("lonely")


def test_a_rank_that_never_comes_is_named_by_the_time_out():
    with pytest.raises(RankTimeout, match=r"run: rank 0, 1 still ran after 1\.0 s") as caught:
        run(never_come, 2, timeout_s=1.0)
    assert caught.value.waited_s == 1.0


def wait_shortly(ranks):
    mine = ranks.duplicate("short")
    object.__setattr__(mine.session, "timeout_s", 0.5)
    if ranks.rank == 1:
        time.sleep(60)
    mine.barrier("lonely")


def test_a_wait_that_times_out_names_who_did_not_come():
    with pytest.raises(RankTimeout, match="lonely: rank 1 did not come within") as caught:
        run(wait_shortly, 2)
    assert caught.value.rank == 1
    assert caught.value.op == "lonely"
    assert caught.value.waited_s >= 0.5


class CustomError(RankError):
    """Known to this module alone."""


def raise_a_subclass(ranks):
    raise CustomError("mine", rank=ranks.rank, op="custom", waited_s=0.5)


def test_a_subclass_of_rank_error_arrives_as_its_kind():
    with pytest.raises(RankError, match="rank 0 raised CustomError: mine") as caught:
        run(raise_a_subclass, 1)
    assert type(caught.value) is RankError
    assert (caught.value.op, caught.value.waited_s) == ("custom", 0.5)


# ---- bad input ----


def test_arguments_out_of_range_are_refused_before_anything_starts():
    for size in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="size must be an integer of at least 1; got"):
            run(describe, size)
    with pytest.raises(ValueError, match="threads_per_rank must be an integer of at least 1"):
        run(describe, 1, threads_per_rank=0)
    with pytest.raises(ValueError, match="device must be 'cpu' or 'cuda'; got 'tpu'"):
        run(describe, 1, device="tpu")
    with pytest.raises(ValueError, match=r"timeout_s must be in \(0, 1e6\]; got 0"):
        run(describe, 1, timeout_s=0)
    with pytest.raises(ValueError, match="ranks_per_machine must be at least 1; got 0"):
        run(describe, 1, ranks_per_machine=0)
    with pytest.raises(ValueError, match="link must be a LinkSpec"):
        run(describe, 1, link="1gbit")
    with pytest.raises(ValueError, match="fn must be callable; got 3"):
        run(3, 1)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no CUDA device"):
            run(describe, 1, device="cuda")


@pytest.mark.parametrize("argument", [lambda: None, threading.Lock()])
def test_what_cannot_be_pickled_is_refused(argument):
    with pytest.raises(ValueError, match="must pickle"):
        run(describe, 1, argument, None)
    with pytest.raises(ValueError, match="must pickle"):
        run(lambda ranks: None, 1)


class OnlyInRanks:
    def __reduce__(self):
        return _fail_in, (os.getpid(),)


def _fail_in(pid):
    if os.getpid() != pid:
        raise OverflowError("not here")


def return_what_fails_to_unpickle(ranks):
    return OnlyInRanks()


def test_a_result_that_does_not_unpickle_names_its_rank():
    with pytest.raises(RankError, match="result of rank 0 does not unpickle: OverflowError"):
        run(return_what_fails_to_unpickle, 1)


def link_is_there(ranks):
    return ranks.family.find_link() is not None


def test_a_link_is_emulated_when_asked_for():
    assert run(link_is_there, 2, link=LinkSpec("1gbit")) == [True, True]
    assert run(link_is_there, 2) == [False, False]


# ---- scripts ----

SCRIPT = """
import os, sys, time
from pathlib import Path
from septet_shared.ranks import run

def note(folder, name, pid):
    path = Path(folder) / f"{name}.tmp"
    path.write_text(str(pid))
    path.rename(Path(folder) / f"{name}.pid")

def rank_main(ranks, folder):
    note(folder, ranks.rank, os.getpid())
    ranks.barrier("start")
    if folder != sys.argv[1]:
        raise AssertionError("arguments differ")
    if len(sys.argv) > 2:
        child = os.fork()
        if child == 0:
            time.sleep(100)
        note(folder, f"child{ranks.rank}", child)
        ranks.barrier("never") if ranks.rank == 0 else time.sleep(100)
    return ranks.rank

"""
GUARDED = SCRIPT + "if __name__ == '__main__':\n    print(run(rank_main, 2, sys.argv[1]))\n"


@pytest.fixture
def start(tmp_path):
    """Starts the script; ends it, and what it left, after the test."""
    script = tmp_path / "script.py"
    begun = []

    def start(text, *args, folder=tmp_path, **options):
        script.write_text(text)
        command = [sys.executable, str(script), str(folder), *args]
        pipe = subprocess.PIPE
        # A group of its own: what it leaves is killed below.
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    for file in tmp_path.rglob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_script_with_closed_standard_streams_runs(start, tmp_path):
    text = GUARDED.replace("print(", "Path(sys.argv[1], 'out').write_text(str(") + ")"
    text = text.replace("sys.argv[1]))\n)", "sys.argv[1])))\n")

    def close():
        for descriptor in (0, 1, 2):
            os.close(descriptor)

    assert start(text, preexec_fn=close).wait(60) == 0
    assert (tmp_path / "out").read_text() == "[0, 1]"


def test_a_script_without_a_guard_is_told_to_have_one(start):
    _, err = start(SCRIPT + "run(rank_main, 2, sys.argv[1])\n").communicate(timeout=60)
    assert "put the call under `if __name__ == '__main__':`" in err
    # Which of the two is found dead first is chance.
    assert re.search(r"PeerLost: rank [01] died: exit 1; what it wrote to standard error", err)


@pytest.mark.usefixtures("shared_memory_is_left_clean")
def test_ranks_do_not_outlive_a_caller_that_is_ended(start, tmp_path):
    signals = ("SIGINT", "SIGTERM", "SIGKILL")
    folders = {how: tmp_path / how for how in signals}
    for folder in folders.values():
        folder.mkdir()
    begun = {how: start(GUARDED, "stay", folder=folders[how]) for how in signals}
    for how, process in begun.items():
        pids = pids_in(folders[how], 4)  # of two ranks, and of what they have forked
        time.sleep(0.2)
        os.kill(process.pid, getattr(signal, how))
        assert gone(pids), how
        _, err = process.communicate(timeout=10)
        assert ("KeyboardInterrupt" in err) == (how == "SIGINT")
        assert process.returncode == -getattr(signal, how)
        # The server and the tracker of multiprocessing went too: all that the script has started.
        numbers = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
        assert gone([n for n in numbers if group_of(n) == process.pid]), how


def group_of(pid):
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None
