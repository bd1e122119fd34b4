import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from septet_shared.memory_pool import Arena, track_peak

MIB = 2**20


def test_the_peak_counts_what_lives_at_one_time():
    with track_peak() as peak:
        a = torch.empty(1000)
        b = torch.empty(2000)
        del a
        torch.empty(500)
        c = b + 1
        assert peak.bytes == 16_000
    del c
    assert peak.bytes == 16_000


def test_views_in_place_and_foreign_memory_are_no_allocation():
    x = torch.ones(1000)
    held = np.ones(1000)
    arena = Arena(8192)
    with track_peak() as peak, arena.scope() as scope:
        x[10:].add_(1).view(-1, 2).t().squeeze_()
        x.detach().numpy()
        torch.from_numpy(held).mul_(2)
        torch.add(x, 1, out=scope.empty(1000))
    assert peak.bytes == 0


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda: torch.tensor([1.0, 2.0]), 8),
        (lambda: torch.eye(4).to_sparse(), 64 + 2 * 8 * 4 + 16),
        (lambda: torch.split(torch.ones(10), 5), 40),
        (lambda: torch.empty(0).resize_(100), 400),
        (lambda: torch.add(torch.ones(50), 1, out=torch.empty(0)), 200 + 200),
        (lambda: torch.topk(torch.ones(6), 2), 24 + 8 + 16),
        (lambda: Arena(6400), 6400),
    ],
)
def test_every_way_to_make_a_tensor_counts_once(make, nbytes):
    with track_peak() as peak:
        make()
    # scalars that operators wrap, such as the 1 above, may add a few bytes
    assert nbytes <= peak.bytes <= nbytes + 16


def test_what_backward_allocates_and_frees_is_seen():
    x = torch.ones(1000, requires_grad=True)
    with track_peak() as forward:
        y = x.exp().exp().exp().sum()  # saves three results
    assert forward.bytes == 3 * 4000 + 4
    with track_peak() as backward:
        y.backward()
    assert x.grad is not None
    assert 2 * 4000 <= backward.bytes <= 3 * 4000 + 8


def test_a_tensor_freed_by_another_thread_no_longer_counts():
    with track_peak() as peak:
        held = [torch.empty(1000)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join(10)
        torch.empty(1000)
    assert peak.bytes == 4000


def test_a_tensor_freed_inside_that_was_made_before_hides_nothing():
    before = torch.empty(10_000)
    with track_peak() as peak:
        del before
        torch.empty(1000)
    assert peak.bytes == 4000


def test_peaks_nest():
    with track_peak() as outer:
        a = torch.ones(8 * MIB, dtype=torch.uint8)
        del a
        with track_peak() as inner:
            torch.ones(2 * MIB, dtype=torch.uint8)
        torch.ones(MIB, dtype=torch.uint8)
    assert (outer.bytes, inner.bytes) == (8 * MIB, 2 * MIB)
    assert outer.resident_bytes >= 7 * MIB
    assert inner.resident_bytes <= 5 * MIB


def test_measuring_does_not_switch_compilation_off():
    runs = []

    def backend(graph, _):
        return lambda *inputs: runs.append(1) or graph(*inputs)

    @torch.compile(backend=backend)
    def compiled(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    with track_peak() as peak:
        assert compiled(torch.zeros(1000)).tolist() == [2.0] * 1000
    assert runs == [1, 1]
    assert peak.bytes >= 8000


def test_the_first_measurement_of_a_process_does_not_measure_imports():
    program = (
        "import sys, torch; from septet_shared.memory_pool import track_peak\n"
        "with track_peak() as peak: torch.ones(1000) + 1\n"
        "print(peak.bytes, peak.resident_bytes < 30e6, 'torch._dynamo' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.split() == ["8000", "True", "False"], ran.stderr


def test_an_error_inside_ends_the_measurement():
    peaks = []

    def fail():
        with track_peak() as peak:
            peaks.append(peak)
            torch.empty(1000)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    torch.empty(5000)
    assert peaks[0].bytes == 4000


linux = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the high-water mark cannot be reset"
)


@linux
def test_resident_memory_counts_touched_pages_only():
    with track_peak() as peak:
        untouched = torch.empty(200 * MIB, dtype=torch.uint8)
        touched = torch.ones(64 * MIB, dtype=torch.uint8)
    del untouched, touched
    assert 60 * MIB <= peak.resident_bytes <= 72 * MIB
    assert peak.bytes == 264 * MIB
    assert peak.notes == ""


@linux
@pytest.mark.parametrize("piece", [MIB // 32, MIB, 32 * MIB])
def test_memory_freed_before_entry_does_not_hide_growth(piece):
    before = [torch.ones(piece, dtype=torch.uint8) for _ in range(32 * MIB // piece)]
    before.clear()
    with track_peak() as peak:
        inside = [torch.ones(piece, dtype=torch.uint8) for _ in range(32 * MIB // piece)]
        inside.clear()
    assert 28 * MIB <= peak.resident_bytes <= 40 * MIB


@linux
def test_memory_of_other_threads_is_resident_memory():
    with track_peak() as peak:
        thread = threading.Thread(target=torch.ones, args=(64 * MIB,), kwargs={"dtype": torch.int8})
        thread.start()
        thread.join(60)
    assert peak.resident_bytes >= 60 * MIB


def test_a_mark_that_cannot_be_reset_is_noted(monkeypatch):
    def refuse(self, text):
        raise PermissionError(str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    with track_peak() as peak:
        pass
    assert "PermissionError" in peak.notes
    assert "hides growth" in peak.notes


def test_without_proc_the_systems_own_high_water_mark_is_read(monkeypatch):
    def absent(self, *arguments, **options):
        raise FileNotFoundError(str(self))

    marks = iter([1000, 6000])
    monkeypatch.setattr(Path, "write_text", absent)
    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=next(marks)))
    monkeypatch.setattr("sys.platform", "linux")
    with track_peak() as peak:
        pass
    assert peak.resident_bytes == 5000 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_cuda_device_is_that_of_its_allocator():
    with track_peak("cuda") as peak:
        a = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        del a
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert peak.bytes == 8 * MIB


@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=f"device must be .*got '{device}'"), track_peak(device):
        pass
