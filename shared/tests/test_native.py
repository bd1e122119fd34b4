import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from septet_shared import native

if native.available() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

# One function for each promise: a value to recognise a build by, threads, a sum over a tensor.
SOURCE = """
#include <cstdint>
#include <omp.h>
extern "C" int64_t answer() { return ANSWER; }
extern "C" int threads_of_team(int threads) {
  int n = 0;
#pragma omp parallel num_threads(threads)
#pragma omp single
  n = omp_get_num_threads();
  return n;
}
extern "C" int most_threads() { return omp_get_max_threads(); }
extern "C" int sum(const double* x, int64_t n, int threads, double* out) {
  double s = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : s)
  for (int64_t i = 0; i < n; ++i) s += x[i];
  *out = s;
  return 0;
}
"""


def answering(number):
    return SOURCE.replace("ANSWER", str(number))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and a process that has built nothing and warned of nothing."""
    monkeypatch.setenv("SEPTET_CACHE_DIR", str(tmp_path / "cache"))
    forget(monkeypatch)
    monkeypatch.setattr(native, "_warned", set())
    return tmp_path / "cache" / "native"


def forget(monkeypatch):
    monkeypatch.setattr(native, "builds", 0)
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_failed", {})


def compiler_script(path, body):
    """A compiler that states a version, then does `body`."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\n{body}\n')
    path.chmod(0o755)
    return str(path)


def only_library(cache):
    (library,) = cache.glob("*/*.so")
    return library


def python(script, **environment):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


# Building and the cache


def test_a_library_computes_what_its_source_says(tmp_path):
    source = tmp_path / "answer.cpp"
    source.write_text(answering(41))
    lib = native.build("answer", [source])
    x, out = torch.arange(1001, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    status = lib.sum(
        native.pointer(x, torch.float64), ctypes.c_int64(1001), 2, native.pointer(out, out.dtype)
    )
    assert (lib.answer(), status, out.item()) == (41, 0, 1000 * 1001 / 2)


def test_a_second_process_takes_the_library_from_the_cache(monkeypatch):
    native.build_text("answer", answering(42))
    assert native.builds == 1
    forget(monkeypatch)
    assert native.build_text("answer", answering(42)).answer() == 42
    assert native.builds == 0


def test_several_sources_make_one_library(tmp_path):
    (tmp_path / "a.cpp").write_text('extern "C" int b(); extern "C" int a() { return b() + 1; }')
    (tmp_path / "b.cpp").write_text('extern "C" int b() { return 6; }')
    assert native.build("ab", [tmp_path / "a.cpp", str(tmp_path / "b.cpp")]).a() == 7


def test_a_changed_header_makes_a_new_library(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/value.h").write_text("#define VALUE 1")
    text = '#include "sub/value.h"\nextern "C" int value() { return VALUE; }'
    (tmp_path / "value.cpp").write_text(text)
    assert native.build("value", [tmp_path / "value.cpp"]).value() == 1
    assert native.build_text("value", text, include=[tmp_path]).value() == 1
    (tmp_path / "sub/value.h").write_text("#define VALUE 2")
    assert native.build("value", [tmp_path / "value.cpp"]).value() == 2
    assert native.build_text("value", text, include=[tmp_path]).value() == 2


@pytest.mark.parametrize("changed", ["flags", "openmp", "compiler", "cpu"])
def test_a_change_of_what_the_code_depends_on_makes_a_new_library(changed, tmp_path, monkeypatch):
    text = 'extern "C" int f() { return 0; }'
    native.build_text("f", text)
    forget(monkeypatch)
    if changed == "compiler":
        compiler = compiler_script(tmp_path / "cxx", f'exec {native.available()} "$@"')
        monkeypatch.setenv("SEPTET_CXX", compiler)
    if changed == "cpu":
        monkeypatch.setattr(native, "_cpu_identity", lambda: ["another"])
    flags = ["-DX=1"] if changed == "flags" else []
    native.build_text("f", text, flags=flags, openmp=changed != "openmp")
    assert native.builds == 1


def cut_in_half(library):
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])


def replace_by_another_library(library):
    native.build_text("other", answering(-1), openmp=False)
    (other,) = library.parent.parent.glob("other-*/*.so")
    library.write_bytes(other.read_bytes())


def replace_by_no_library_with_its_own_checksum(library):
    content = b"not a library"
    (library.parent / f"{hashlib.sha256(content).hexdigest()}.so").write_bytes(content)
    library.unlink()


DAMAGES = [
    cut_in_half,
    replace_by_another_library,
    replace_by_no_library_with_its_own_checksum,
    Path.unlink,
]


@pytest.fixture(scope="module")
def built_elsewhere(tmp_path_factory):
    """A cache that another process filled: this one must not have loaded what gets damaged."""
    folder = tmp_path_factory.mktemp("elsewhere")
    texts = [answering(100 + i) for i in range(len(DAMAGES))]
    script = (
        "from septet_shared import native\n"
        f"for text in {texts!r}: native.build_text('damaged', text)"
    )
    finish(python(script, SEPTET_CACHE_DIR=str(folder)))
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt_and_replaced(damage, built_elsewhere, cache, monkeypatch):
    number = 100 + DAMAGES.index(damage)
    for entry in (built_elsewhere / "native").iterdir():
        shutil.copytree(entry, cache / entry.name)
    libraries = list(cache.glob("damaged-*/*.so"))
    assert len(libraries) == len(DAMAGES)
    for library in libraries:
        damage(library)
    monkeypatch.setattr(native, "builds", 0)
    assert native.build_text("damaged", answering(number)).answer() == number
    assert native.builds == 1
    forget(monkeypatch)
    assert native.build_text("damaged", answering(number)).answer() == number
    assert native.builds == 0


@pytest.mark.ranks
def test_processes_that_ask_at_once_build_once(tmp_path):
    slow = compiler_script(tmp_path / "cxx", f'sleep 1; exec {native.available()} "$@"')
    script = (
        "from septet_shared import native\n"
        f"assert native.build_text('both', {answering(5)!r}).answer() == 5\n"
        "print(native.builds)"
    )
    both = [python(script, SEPTET_CXX=slow) for _ in range(2)]
    assert sorted(int(finish(process)) for process in both) == [0, 1]


@pytest.mark.ranks
def test_a_killed_builder_does_not_hold_up_the_next(tmp_path, cache):
    started = tmp_path / "started"
    slow = compiler_script(tmp_path / "cxx", f"echo $$ >{started}; exec sleep 30")
    script = f"from septet_shared import native; native.build_text('killed', {answering(6)!r})"
    killed = python(script, SEPTET_CXX=slow, TMPDIR=str(tmp_path))
    while not started.exists() or not started.read_text():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    os.kill(int(started.read_text()), signal.SIGKILL)  # its compiler would end by itself
    (entry,) = cache.iterdir()
    (entry / "part.1").write_text("half a library")
    compiler_script(tmp_path / "cxx", f'exec {native.available()} "$@"')
    second = python(script, SEPTET_CXX=slow)
    finish(second)
    assert {path.suffix for path in entry.iterdir()} == {".so", ""}  # the library and the lock


# A cache that cannot be used


def test_a_cache_that_cannot_be_made_costs_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEPTET_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(native.tempfile, "tempdir", None)
    with pytest.warns(RuntimeWarning, match=r"cannot be written .*SEPTET_CACHE_DIR"):
        assert native.build_text("one", answering(1)).answer() == 1
    assert native.build_text("two", answering(2)).answer() == 2
    assert native.builds == 2
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_copy_that_fails_halfway_leaves_nothing(cache, monkeypatch):
    def half(source, target):
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(native.shutil, "copyfile", half)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert native.build_text("one", answering(3)).answer() == 3
    assert [path.name for path in cache.glob("*/*")] == ["lock"]


@pytest.mark.ranks
@pytest.mark.parametrize(("option", "reason"), [("size=12k", "No space"), ("ro", "Read-only")])
def test_a_full_or_read_only_cache_still_gives_a_library(option, reason, tmp_path):
    folder = tmp_path / "mounted"
    folder.mkdir()
    script = (
        "import os, sys, warnings; from septet_shared import native\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        f"    assert native.build_text('x', {answering(8)!r}).answer() == 8\n"
        f"assert [{reason!r} in str(w.message) for w in seen] == [True], seen\n"
        f"assert not [f for _, _, fs in os.walk({str(folder)!r}) for f in fs if f != 'lock']\n"
    )
    mount = f'mount -t tmpfs -o {option} none {folder} || exit 77; exec "$0" -c "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, script]
    environment = {**os.environ, "SEPTET_CACHE_DIR": str(folder)}
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"may not mount here: {done.stderr}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("xdg", [True, False])
def test_the_cache_follows_the_desktop_convention(xdg, tmp_path, monkeypatch):
    monkeypatch.delenv("SEPTET_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    native.build_text("f", 'extern "C" int f() { return 0; }')
    expected = tmp_path / ("xdg/septet" if xdg else "home/.cache/septet")
    assert only_library(expected / "native").exists()


# A compiler that is absent or fails


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert native.available() is None
    with pytest.raises(native.NativeUnavailable, match=r"g\+\+.*install"):
        native.build_text("f", answering(1))


def test_a_chosen_compiler_is_never_replaced_by_another(monkeypatch):
    monkeypatch.setenv("SEPTET_CXX", "no-such-compiler")
    assert native.available() is None
    with pytest.raises(native.NativeUnavailable, match=r"SEPTET_CXX.*'no-such-compiler'"):
        native.build_text("f", answering(1))


def test_the_slow_path_gives_its_result_and_its_reason_once(monkeypatch):
    @native.fallback(lambda x: x + 1)
    def add_one(x):
        """Doc."""
        return native.build_text("add", answering(1)).answer() + x

    assert (add_one(2), add_one.__doc__) == (3, "Doc.")
    monkeypatch.setenv("SEPTET_CXX", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match=r"slower torch operations: .*no-such-compiler") as seen:
        assert [add_one(2), add_one(x=3)] == [3, 4]
    assert len(seen) == 1


def test_an_error_of_the_fast_path_itself_is_not_hidden():
    @native.fallback(lambda: 0)
    def fails():
        raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        fails()


def test_a_failing_compiler_is_quoted_run_once_and_leaves_nothing(cache, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv(
        "SEPTET_CXX",
        compiler_script(tmp_path / "cxx", f'echo >>{log}; exec {native.available()} "$@"'),
    )
    for _ in range(2):
        with pytest.raises(native.BuildFailed, match=r"no_such_name.* was not declared"):
            native.build_text("f", 'extern "C" int f() { return no_such_name; }')
    assert log.read_text() == "\n"
    assert native.builds == 0
    assert [path.name for path in cache.glob("*/*")] == ["lock"]


def test_a_library_that_does_not_load_is_a_failed_build():
    text = 'extern "C" int elsewhere(); extern "C" int f() { return elsewhere(); }'
    with pytest.raises(native.BuildFailed, match="does not load"):
        native.build_text("f", text, flags=["-Wl,-z,now"])


def still_runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("ended_by", ["time-out", "Ctrl-C"])
def test_an_endless_compiler_is_stopped_with_its_children(ended_by, tmp_path, cache, monkeypatch):
    pid_file = tmp_path / "pid"
    body = f"sleep 60 & echo $! >{pid_file}.part; mv {pid_file}.part {pid_file}; wait"
    monkeypatch.setenv("SEPTET_CXX", compiler_script(tmp_path / "cxx", body))
    if ended_by == "time-out":
        monkeypatch.setattr(native, "COMPILE_TIMEOUT_S", 1.0)
        expected = pytest.raises(native.BuildFailed, match="did not finish within 1 s")
    else:
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        expected = pytest.raises(KeyboardInterrupt)
    began = time.monotonic()
    try:
        with expected:
            native.build_text("f", answering(1))
    finally:
        if ended_by == "Ctrl-C":
            signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - began < 20  # the child alone would go on for 60 s
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 5
    while still_runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not still_runs(pid)
    assert [path.name for path in cache.glob("*/*")] == ["lock"]


# Threads


def test_the_library_runs_on_torchs_own_threads():
    lib = native.build_text("threads", answering(1))
    torchs = ctypes.CDLL(torch._C.__file__)
    address = ctypes.cast(lib.omp_get_max_threads, ctypes.c_void_p).value
    assert address == ctypes.cast(torchs.omp_get_max_threads, ctypes.c_void_p).value
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert lib.most_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(native._openmp_runtime() is None, reason="torch has no OpenMP")
def test_torchs_runtime_is_shared_under_any_name_its_wheel_gives_it(tmp_path, monkeypatch):
    renamed = tmp_path / "runtime.so"
    content = Path(native._openmp_runtime()).read_bytes()
    assert b"\0libgomp.so.1\0" in content
    renamed.write_bytes(content.replace(b"\0libgomp.so.1\0", b"\0libg0mp.so.1\0"))
    runtime = ctypes.CDLL(str(renamed))
    monkeypatch.setattr(native, "_openmp_runtime", lambda: str(renamed))
    monkeypatch.setattr(native, "_release_threads_before_fork", lambda runtime: None)
    lib = native.build_text("renamed", answering(1))
    address = ctypes.cast(lib.omp_get_max_threads, ctypes.c_void_p).value
    assert address == ctypes.cast(runtime.omp_get_max_threads, ctypes.c_void_p).value


@pytest.mark.ranks
def test_a_child_forked_after_openmp_ran_has_its_own_threads():
    script = (
        "import os, time, torch, warnings; from septet_shared import native\n"
        f"lib = native.build_text('fork', {answering(1)!r})\n"
        "torch.set_num_threads(2)\n"
        "assert lib.threads_of_team(2) == 2 and torch.ones(10**6).sum() == 10**6\n"
        "warnings.simplefilter('ignore', DeprecationWarning)  # Python's own, about threads\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    same = lib.threads_of_team(2) == 2 and torch.ones(10**6).sum() == 10**6\n"
        "    os._exit(0 if same else 1)\n"
        "deadline = time.monotonic() + 20\n"
        "while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):\n"
        "    if time.monotonic() > deadline:\n"
        "        os.kill(child, 9)\n"
        "        raise SystemExit('the child hangs')\n"
        "    time.sleep(0.01)\n"
        "assert ended[1] == 0 and lib.threads_of_team(2) == 2\n"
    )
    finish(python(script))


# BLAS

GEMM_ON_TILES = """
#include <algorithm>
#include <cstdint>
typedef void (*gemm_t)(const char*, const char*, const int*, const int*, const int*, const T*,
                       const T*, const int*, const T*, const int*, const T*, T*, const int*);
// c[M, N] = a[M, K] b[K, N], all row-major: column-major BLAS sees the transposes
extern "C" int multiply(void* gemm, const T* a, const T* b, T* c, int64_t M, int64_t N, int64_t K,
                        int threads) {
  const T one = 1, zero = 0;
  const int n = N, k = K;
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < M; row += 8) {
    const int rows = std::min<int64_t>(8, M - row);
    ((gemm_t)gemm)("N", "N", &n, &rows, &k, &one, b, &n, a + row * K, &k, &zero, c + row * N, &n);
  }
  return 0;
}
"""


@pytest.mark.parametrize("origin", [native._torch_gemm, native._scipy_gemm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_multiplies_tiles_with_the_blas_it_is_given(origin, dtype):
    letter, name = {torch.float32: ("s", "float"), torch.float64: ("d", "double")}[dtype]
    address = origin(letter)
    if address is None:
        pytest.skip("not exported here")
    lib = native.build_text("tiles", GEMM_ON_TILES, flags=[f"-DT={name}"])
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, shape, generator=rng).to(dtype) for shape in [(21, 5), (5, 13)])
    c = torch.full((21, 13), torch.nan, dtype=dtype)
    sizes = [ctypes.c_int64(size) for size in (21, 13, 5)]
    assert lib.multiply(address, *(native.pointer(t, dtype, 2) for t in (a, b, c)), *sizes, 2) == 0
    torch.testing.assert_close(c, (a[:, :, None] * b).sum(1), rtol=0, atol=0)  # small integers


def test_there_is_a_blas_for_floats_and_doubles_only():
    assert native.blas_gemm(torch.float32).value != native.blas_gemm(torch.float64).value
    assert native.blas_gemm(torch.bfloat16) is None


# Checks of arguments


def test_a_pointer_is_the_address_of_the_first_element():
    t = torch.arange(6.0).view(2, 3)
    assert native.pointer(t[1], torch.float32, ndim=1).value == t.data_ptr() + 12
    assert native.pointer(t.t(), torch.float32, contiguous=False).value == t.data_ptr()
    assert native.pointer(torch.empty(0), torch.float32).value is None


@pytest.mark.parametrize(
    ("t", "error", "message"),
    [
        ([1.0], TypeError, "must be a tensor; got list"),
        (torch.zeros(2, dtype=torch.float64), TypeError, "float32; got torch.float64"),
        (torch.zeros(2), ValueError, r"2 dimensions; got shape \(2,\)"),
        (torch.zeros(2, 3).t(), ValueError, r"row-major; got shape \(3, 2\), strides \(1, 3\)"),
        (torch.zeros(2, 3, device="meta"), ValueError, "CPU tensor; got .* on meta"),
        (torch.zeros(2, 3).to_sparse(), ValueError, "strided CPU tensor; got torch.sparse_coo"),
        (torch.zeros(2, 3, dtype=torch.cfloat).conj().imag, ValueError, "lazy conjugate or neg"),
    ],
)
def test_a_pointer_to_anything_else_is_refused(t, error, message):
    with pytest.raises(error, match=message):
        native.pointer(t, torch.float32, ndim=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a/b"}, "name must .* got 'a/b'"),
        ({"name": ""}, "name must .* got ''"),
        ({"flags": ["-ffast-math"]}, r"flags must not change values; got \['-ffast-math'\]"),
        ({"include": ["/no/such/folder"]}, "include must .* got /no/such/folder"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        native.build_text(**{"name": "f", "text": answering(1), **arguments})


@pytest.mark.parametrize(("sources", "got"), [([], "none"), (["/no/file.cpp"], "/no/file.cpp")])
def test_sources_must_exist(sources, got):
    with pytest.raises(ValueError, match=f"sources must .* got {got}"):
        native.build("f", sources)


def test_nothing_warns_when_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.build_text("fine", answering(9)).answer() == 9
