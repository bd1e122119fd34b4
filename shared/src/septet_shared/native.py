"""C++ for the CPU path: a source file becomes a loaded library, built once and cached.

    lib = native.build("ecorec_tt", [Path(__file__).parent / "native/tt.cpp"])
    code = lib.tt_forward(native.pointer(x, torch.float32, ndim=2), len(x), torch.get_num_threads())

The C++ side is a plain C ABI: `extern "C"`, int64 sizes, explicit strides and thread count, an int
code as result. No torch headers, so a build takes about a second; ctypes releases the GIL.

A cache entry is `<cache>/native/<name>-<key>/<sha256 of the library>.so`. The key covers sources,
headers beside them, flags, compiler, OpenMP runtime and CPU; the file name proves the content, so
what is truncated or foreign is rebuilt, never loaded. Builds happen in a temporary folder and enter
the cache by rename, under a lock that dies with its holder. The cache is `$SEPTET_CACHE_DIR`, else
`$XDG_CACHE_HOME/septet`, else `~/.cache/septet`; the compiler is `$SEPTET_CXX`, else the first of
g++, c++, clang++ on the path.

OpenMP threads are torch's own: libraries link against the runtime that torch has loaded (with g++;
clang brings its own runtime, hence a second pool). Before a fork the pool of the forking thread is
released, so that OpenMP works in the child too. The flags are those of Linux compilers; where they
are refused, `fallback` takes the torch path and says why.
"""

import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
StrPath = str | os.PathLike[str]

COMPILE_TIMEOUT_S = 300.0
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")

builds = 0
"""Libraries compiled by this process; 0 when all came from the cache."""

_loaded: dict[str, ctypes.CDLL] = {}
_failed: dict[str, str] = {}
_warned: set[str] = set()


class NativeUnavailable(RuntimeError):
    """There is no compiler to build with; the message says what to install."""


class BuildFailed(NativeUnavailable):
    """The compiler failed or ran out of time; the message ends with its last words."""


def available() -> str | None:
    """Path of the C++ compiler that `build` would use, or None.

    `SEPTET_CXX` (a name or a path) is taken or nothing; it is never replaced by another compiler.
    Cost: a search of the path, about 0.1 ms.
    """
    chosen = os.environ.get("SEPTET_CXX")
    for name in [chosen] if chosen else ["g++", "c++", "clang++"]:
        if found := shutil.which(name):
            return found
    return None


def build(
    name: str, sources: Sequence[StrPath], *, flags: Sequence[str] = (), openmp: bool = True
) -> ctypes.CDLL:
    """The library made of `sources`, loaded.

    Args:
        name: what to call it, of letters, digits, `_`, `.` and `-`.
        sources: C++ files; the headers (*.h, *.hpp) below their folders count as part of them.
        flags: compiler flags after `FLAGS`; value-changing ones (-ffast-math, -Ofast) are refused.
        openmp: compile with -fopenmp and share torch's threads.

    Raises:
        ValueError: a name, a source or a flag is not as above.
        NativeUnavailable: no compiler.
        BuildFailed: the compiler failed, exceeded `COMPILE_TIMEOUT_S`, or its output does not load.

    Cost: about 1 s per small source the first time, about 4 ms from the cache, a quarter
    of a millisecond when this process has it already.
    Processes that ask for the same library at once build it once.
    """
    paths = [Path(source).absolute() for source in sources]
    if not paths:
        raise ValueError("sources must name at least one C++ file; got none")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"sources must be existing files; got {path}")
    folders = sorted({path.parent for path in paths})
    return _library(name, [_content(path) for path in paths], paths, folders, flags, openmp)


def build_text(
    name: str,
    text: str,
    *,
    include: Sequence[StrPath] = (),
    flags: Sequence[str] = (),
    openmp: bool = True,
) -> ctypes.CDLL:
    """As `build`, for one source given as text; `include` are the folders of its headers."""
    folders = [Path(folder).absolute() for folder in include]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"include must name existing folders; got {folder}")
    return _library(name, [text], [], folders, flags, openmp)


def fallback(slow: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function it decorates, or `slow` where no library can be built.

    Each reason (no compiler, this build failed) is given once a process, as a RuntimeWarning.
    The decorated function must call `build` before it changes anything: `slow` starts afresh.
    """

    def decorate(fast: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fast)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return fast(*args, **kwargs)
            except NativeUnavailable as error:
                _warn_once(f"running on slower torch operations: {error}", reason=str(error))
            return slow(*args, **kwargs)

        return call

    return decorate


def pointer(
    t: torch.Tensor, dtype: torch.dtype, ndim: int | None = None, contiguous: bool = True
) -> ctypes.c_void_p:
    """Address of the first element of `t`, checked; the caller keeps `t` alive while it is in use.

    Raises:
        TypeError: t is not a tensor of `dtype`.
        ValueError: t is not a plain strided CPU tensor, has not `ndim` dimensions (None: any), or
            is not row-major while `contiguous`.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"t must be a tensor; got {type(t).__name__}")
    if t.dtype != dtype:
        raise TypeError(f"t must be {dtype}; got {t.dtype}")
    if t.device.type != "cpu" or t.layout != torch.strided or t.is_conj() or t.is_neg():
        kind = "a lazy conjugate or negative" if t.is_conj() or t.is_neg() else t.layout
        raise ValueError(f"t must be a plain strided CPU tensor; got {kind} on {t.device}")
    if ndim is not None and t.ndim != ndim:
        raise ValueError(f"t must have {ndim} dimensions; got shape {tuple(t.shape)}")
    if contiguous and not t.is_contiguous():
        raise ValueError(f"t must be row-major; got shape {tuple(t.shape)}, strides {t.stride()}")
    return ctypes.c_void_p(t.data_ptr())


@functools.cache
def blas_gemm(dtype: torch.dtype) -> ctypes.c_void_p | None:
    """Address of a Fortran `sgemm_` or `dgemm_` (column-major, 32-bit sizes by address), or None.

    torch's own when it exports one, else scipy's; None for other dtypes than float32, float64.
    Called inside an OpenMP region, torch's MKL runs on the calling thread alone.
    """
    letter = {torch.float32: "s", torch.float64: "d"}.get(dtype)
    if letter is None:
        return None
    return _torch_gemm(letter) or _scipy_gemm(letter)


def _torch_gemm(letter: str) -> ctypes.c_void_p | None:
    exported = getattr(ctypes.CDLL(torch._C.__file__), f"{letter}gemm_", None)
    return exported and ctypes.cast(exported, ctypes.c_void_p)


def _scipy_gemm(letter: str) -> ctypes.c_void_p | None:
    try:
        from scipy.linalg import cython_blas
    except ImportError:
        return None
    capsule = cython_blas.__pyx_capi__[f"{letter}gemm"]
    name_of, address_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    address_of.restype, address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(address_of(capsule, name_of(capsule)))


def _library(
    name: str,
    texts: list[str],
    paths: list[Path],
    folders: list[Path],
    flags: Sequence[str],
    openmp: bool,
) -> ctypes.CDLL:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"name must be letters, digits, `_`, `.`, `-`; got {name!r}")
    if inexact := {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & set(flags):
        raise ValueError(f"flags must not change values; got {sorted(inexact)}")
    compiler = available()
    if compiler is None:
        raise NativeUnavailable(_what_to_install())
    runtime = _openmp_runtime() if openmp else None
    headers = [
        (path.relative_to(folder).as_posix(), _content(path))
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".h", ".hpp") and path.is_file()
    ]
    parts = [
        *(texts, headers, [*FLAGS, *flags], openmp, runtime and Path(runtime).name),
        *(_compiler_identity(compiler), _cpu_identity()),
    ]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    if key in _loaded:
        return _loaded[key]
    if key in _failed:
        raise BuildFailed(_failed[key])
    command = [compiler, *FLAGS, *flags, *(f"-I{folder}" for folder in folders)]
    if openmp:
        command.append("-fopenmp")
    if runtime:  # named before -lgomp, so that the linker needs no other
        command += ["-Wl,--as-needed", runtime]
    try:
        library = _cached_or_built(f"{name}-{key}", command, texts, paths)
    except BuildFailed as error:
        _failed[key] = str(error)
        raise
    if openmp:
        _release_threads_before_fork(runtime)
    return _loaded.setdefault(key, library)


def _cached_or_built(
    entry_name: str, command: list[str], texts: list[str], paths: list[Path]
) -> ctypes.CDLL:
    entry: Path | None = None
    library: ctypes.CDLL | None = None
    with ExitStack() as held:
        try:
            entry = _cache_folder() / "native" / entry_name
            library = _load_verified(entry)
            if library is None:
                entry.mkdir(parents=True, exist_ok=True)
                held.enter_context(_lock(entry))
                library = _load_verified(entry)
        except OSError as error:
            entry = None
            _warn_of_cache(error)
        return library or _build_into(entry, command, texts, paths)


def _build_into(
    entry: Path | None, command: list[str], texts: list[str], paths: list[Path]
) -> ctypes.CDLL:
    """Compile in a temporary folder, load, and leave a copy in `entry` if it can be written."""
    global builds
    with tempfile.TemporaryDirectory(prefix="septet-") as work:
        if not paths:
            paths = [Path(work) / "text.cpp"]
            paths[0].write_text(texts[0])
        built = Path(work) / "built.so"
        _compile([*command[:1], *map(str, paths), *command[1:], "-o", str(built)])
        builds += 1
        kept = built
        if entry is not None:
            kept = _store(built, entry)
        try:
            return ctypes.CDLL(str(kept))
        except OSError as error:
            raise BuildFailed(f"{command[0]} made a library that does not load: {error}") from None


def _store(built: Path, entry: Path) -> Path:
    """The path under which `built` is now in the cache, or `built` itself where that failed."""
    part = entry / f"part.{os.getpid()}"
    kept = entry / f"{hashlib.sha256(built.read_bytes()).hexdigest()}.so"
    try:
        for stale in entry.iterdir():
            if stale.name != "lock":
                stale.unlink()
        shutil.copyfile(built, part)
        part.replace(kept)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        _warn_of_cache(error)
        return built
    return kept


def _load_verified(entry: Path) -> ctypes.CDLL | None:
    for path in entry.glob("*.so"):
        with suppress(OSError):
            if hashlib.sha256(path.read_bytes()).hexdigest() == path.stem:
                return ctypes.CDLL(str(path))
    return None


@contextmanager
def _lock(entry: Path) -> Iterator[None]:
    """Held by one builder at a time. It saves work only: renames are atomic without it, so whoever
    has waited for the longest possible build goes ahead."""
    descriptor = os.open(entry / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + COMPILE_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        with suppress(OSError):  # a child forked meanwhile shares the lock: let go for it as well
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _compile(command: list[str]) -> None:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,  # a group of its own: the driver's children end with it
    )
    try:
        _, stderr = process.communicate(timeout=COMPILE_TIMEOUT_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BuildFailed(
                f"{command[0]} did not finish within {COMPILE_TIMEOUT_S:g} s: {' '.join(command)}"
            ) from None
        raise
    if process.returncode != 0:
        words = stderr.decode(errors="replace").strip()
        raise BuildFailed(
            f"{' '.join(command)}\nexited with {process.returncode}; its last words:\n"
            f"{words[-4000:] or '(none)'}"
        )


def _cache_folder() -> Path:
    if chosen := os.environ.get("SEPTET_CACHE_DIR"):
        return Path(chosen).absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).absolute() / "septet"
    try:
        return Path.home() / ".cache" / "septet"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, f"no home folder: {error}") from None


def _content(path: Path) -> str:
    return path.read_bytes().decode(errors="surrogateescape")


@functools.cache
def _compiler_identity(compiler: str) -> list[str]:
    """Where the compiler is and the version that it states."""
    try:
        version = subprocess.run(
            [compiler, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{compiler} --version does not run: {error}") from None
    return [os.path.realpath(compiler), version.stdout.decode(errors="replace")]


@functools.cache
def _cpu_identity() -> list[str]:
    """What decides the code that -march=native makes: model and instruction sets."""
    identity = [platform.system(), platform.machine()]
    try:
        with Path("/proc/cpuinfo").open() as file:
            for line in file:
                if not line.strip():
                    break  # the first processor says it all, and the file is slow to read whole
                if re.match(r"vendor_id|cpu family|model|stepping|flags|Features|CPU |isa", line):
                    identity.append(" ".join(line.split()))
    except OSError:
        identity.append(platform.processor())
    return identity


class _SymbolInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@functools.cache
def _openmp_runtime() -> str | None:
    """File of the OpenMP runtime that torch uses, whatever name its wheel gave it; or None."""
    info = _SymbolInfo()
    try:
        symbol = ctypes.CDLL(torch._C.__file__).omp_get_max_threads
        found = ctypes.CDLL(None).dladdr(symbol, ctypes.byref(info))
    except AttributeError:
        return None
    return os.fsdecode(info.file) if found and info.file else None


@functools.cache
def _release_threads_before_fork(runtime: str | None) -> None:
    """A forked child has none of its parent's threads, and libgomp would wait for them for ever:
    give them back before each fork, or else let the child ask for no more than one."""
    pause = getattr(ctypes.CDLL(runtime), "omp_pause_resource_all", None) if runtime else None
    if pause is None:
        os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
    else:
        soft = 1  # keeps the settings, such as the number of threads
        os.register_at_fork(before=lambda: pause(soft))


def _what_to_install() -> str:
    if chosen := os.environ.get("SEPTET_CXX"):
        return f"SEPTET_CXX must name a C++ compiler; got {chosen!r}, which is not an executable"
    return (
        "no C++ compiler found (g++, c++, clang++): install one, "
        "for example with `apt install g++` or `conda install cxx-compiler`"
    )


def _warn_of_cache(error: OSError) -> None:
    _warn_once(
        f"the cache of native libraries cannot be written ({error}): builds are kept for this "
        "process only; SEPTET_CACHE_DIR names another folder",
        reason=f"cache: {error.strerror}",
    )


def _warn_once(message: str, reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
