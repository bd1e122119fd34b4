"""What the tests of all systems assert with: poisoned memory, error bounds, ahead-of-time builds.

Ahead-of-time builds need no GPU. A kernel module says what to build beside its kernels:

    SIGNATURES = {
        "gather_rows_kernel": [
            ({"x_ptr": "*fp32", "N": "i32"}, {"BLOCK_D": 64}),
            ({"x_ptr": "*bf16:16", "N": "i32"}, {"BLOCK_D": 128, "num_warps": 8}),
        ]
    }

For each kernel a list of (argument types, constexprs), in Triton's own words: `*` is a pointer and
`:16` promises divisibility by 16, which a launch finds out by itself; without it loads are neither
wide nor pipelined, and the numbers are not those of an aligned launch. An argument among the
constexprs is fixed to that value (None for an absent pointer); launch options such as num_warps
stand there too, as in a launch. Kernel files import only triton.

A package whose kernels are printed by a generator has `ahead()` in its top `kernels` module
instead: an iterator of (name, kernel, argument types, constexprs).
"""

import contextlib
import importlib
import importlib.util
import io
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ARCHS = (80, 90, 100)
COMPILE_TIMEOUT_S = 1800.0

# Most shared memory that one block may ask for, in bytes (CUDA C++ Programming Guide, table of
# compute capabilities). A kernel that asks for more compiles and then fails at launch.
SHARED_BYTES_PER_BLOCK = {
    80: 163 * 1024,
    86: 99 * 1024,
    87: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    120: 99 * 1024,
}
Variant = tuple[str, Any, Mapping[str, str], Mapping[str, Any]]


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """A context in which new uninitialised tensors hold NaN, or the largest integer of their dtype.

    Covers torch.empty, empty_like, empty_strided, empty_permuted and Tensor.new_empty,
    new_empty_strided, in every thread and for every device, so that an output element that a
    kernel forgets to write is seen. As a fixture, in a conftest:

        poisoned = pytest.fixture(testing.poison.__wrapped__)
    """
    from unittest import mock

    def filled(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            t: torch.Tensor = make(*args, **kwargs)
            if t.layout == torch.strided:
                with torch.no_grad():
                    t.fill_(_poison_of(t.dtype))
            return t

        return call

    names = ["empty", "empty_like", "empty_strided", "empty_permuted"]
    methods = ["new_empty", "new_empty_strided"]
    with contextlib.ExitStack() as stack:
        for owner, name in [(torch, n) for n in names] + [(torch.Tensor, n) for n in methods]:
            stack.enter_context(mock.patch.object(owner, name, filled(getattr(owner, name))))
        yield


def _poison_of(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def assert_no_worse_than(
    actual: torch.Tensor,
    plain_same_dtype: torch.Tensor,
    truth_fp64: torch.Tensor,
    slack: float = 2.0,
) -> None:
    """Pass if `actual` is about as near the truth as plain torch operations of its dtype are.

    Per element, the error may be `slack` times the largest error of `plain_same_dtype` plus one
    unit in the last place of the truth; and so in the root mean square. Where the truth is NaN or
    infinite, `actual` must be the same, unless it is what `plain_same_dtype` is there. Elements
    that only the plain version cannot represent (an overflow, say) are not judged.

    Args:
        actual: the result under test, any floating-point or complex dtype, any device.
        plain_same_dtype: the same result by plain torch operations; shape and dtype of `actual`.
        truth_fp64: the same result in float64 (complex128 for complex), shape of `actual`.
        slack: at least 0, without unit.

    Raises:
        AssertionError: the bound does not hold; the message has the worst element and all numbers.
        TypeError, ValueError: the three cannot be compared.
    """
    if actual.dtype != plain_same_dtype.dtype:
        raise TypeError(f"plain_same_dtype must be {actual.dtype}; got {plain_same_dtype.dtype}")
    if truth_fp64.dtype not in (torch.float64, torch.complex128):
        raise TypeError(f"truth_fp64 must be float64 or complex128; got {truth_fp64.dtype}")
    if not (actual.dtype.is_floating_point or actual.dtype.is_complex):
        raise TypeError(f"actual must have rounding errors to bound; got {actual.dtype}")
    for name, t in (("plain_same_dtype", plain_same_dtype), ("truth_fp64", truth_fp64)):
        if t.shape != actual.shape:
            raise ValueError(f"{name} must be {tuple(actual.shape)}; got {tuple(t.shape)}")
    if not 0 <= slack < float("inf"):
        raise ValueError(f"slack must be at least 0 and finite; got {slack}")
    a, p, t = (
        x.detach().cpu().to(truth_fp64.dtype) for x in (actual, plain_same_dtype, truth_fp64)
    )

    odd = ~t.isfinite()
    wrong = odd & ~_same(a, t) & ~_same(a, p)
    if wrong.any():
        raise AssertionError(_worst("not the truth's NaN or infinity", wrong, a, p, t))
    judged = ~odd & p.isfinite()
    # what is not judged counts as exact; NaN or infinity of `actual` elsewhere exceeds any bound
    error = torch.where(judged, (a - t).abs(), 0.0).nan_to_num(nan=torch.inf)
    plain = torch.where(judged, (p - t).abs(), 0.0)
    ulp = torch.where(judged, t.abs(), 0.0) * torch.finfo(actual.dtype).eps
    allowed = slack * plain.amax() + ulp if plain.numel() else plain
    if (error > allowed).any():
        excess = f"error {error.max():.3g} against {plain.max():.3g} of plain torch, slack {slack}"
        raise AssertionError(_worst(excess, error - allowed, a, p, t))
    rms, plain_rms, ulp_rms = ((x.square().mean().sqrt()) for x in (error, plain, ulp))
    if rms > slack * plain_rms + ulp_rms:
        raise AssertionError(
            f"root mean square error {rms:.3g} against {plain_rms:.3g} of plain torch, "
            f"slack {slack}, one unit in the last place {ulp_rms:.3g}"
        )


def _same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def _worst(
    what: str, badness: torch.Tensor, a: torch.Tensor, p: torch.Tensor, t: torch.Tensor
) -> str:
    flat = int(badness.flatten().to(torch.float64).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), badness.shape))
    return f"{what}; at {index}: {a[index]} (plain {p[index]}, truth {t[index]})"


@dataclass(frozen=True)
class KernelReport:
    """What one kernel costs on one architecture.

    Attributes:
        arch: compute capability, 90 for sm_90.
        registers: 32-bit registers per thread.
        spills: 32-bit words per thread on the stack, where registers go that do not fit.
        shared_bytes: shared memory per block that the launch asks for.
        cubin_bytes: size of the binary.
    """

    arch: int
    registers: int
    spills: int
    shared_bytes: int
    cubin_bytes: int


def compile_ahead(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    archs: Sequence[int] = ARCHS,
) -> list[KernelReport]:
    """What `kernel` costs on each of `archs`, compiled without a GPU.

    Where TRITON_INTERPRET is set the work is done in a child process without it, which imports the
    kernel again: it must then be a module-level function of a file.

    Args:
        kernel: a `@triton.jit` function (autotuned or with heuristics: what these wrap).
        signature, constexprs: as in SIGNATURES above; together every parameter of the kernel.
        archs: compute capabilities, 80 for sm_80.

    Raises:
        ValueError: a parameter is missing or unknown.
        RuntimeError: triton is absent, the kernel does not compile, or asks for more shared memory
            than a block can have.

    Cost: 0.1-2 s per architecture, milliseconds from triton's cache; 1 s more for a child process.
    """
    _require_triton()
    from triton.runtime.interpreter import InterpretedFunction

    unwrapped = _unwrapped(kernel)
    _check_signature(unwrapped, signature, constexprs)
    if isinstance(unwrapped, InterpretedFunction):
        path, name = unwrapped.fn.__code__.co_filename, unwrapped.fn.__name__
        arguments = (path, name, dict(signature), dict(constexprs), tuple(archs))
        return list(_in_child("_compile_from_file", *arguments))
    return [_compile(unwrapped, signature, constexprs, arch) for arch in archs]


def compile_package(
    root: str | os.PathLike[str] | ModuleType,
    *,
    kernels: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    archs: Sequence[int] = ARCHS,
) -> list[dict[str, Any]]:
    """One row per kernel, variant and architecture that a package declares (see above).

    Args:
        root: a package's folder, or the imported package. Declarations are read from every Python
            file in a folder called `kernels`, and from `kernels.py`.
        kernels: names to keep, `_kernel` at the end may be left out; empty keeps all.
        dtypes: keep the variants that have an argument of one of these dtypes ("bf16" or
            "bfloat16"); empty keeps all.
        archs: compute capabilities.

    Returns:
        rows with name, variant, arch, registers, spills, value (shared bytes), unit, kind, notes,
        cubin_bytes, seconds; a kernel that does not compile has None for its numbers and the
        reason in notes.

    Raises:
        RuntimeError: triton is absent, or a kernel module cannot be imported.

    Cost: as `compile_ahead` for each row.
    """
    _require_triton()
    import triton

    folder = root
    if isinstance(root, ModuleType):
        if root.__file__ is None:
            raise ValueError(f"root must be a package with a file; got {root}")
        folder = Path(root.__file__).parent
    folder = Path(folder).resolve()
    if not folder.is_dir():
        raise ValueError(f"root must be a folder or a package; got {root}")
    arguments = (str(folder), tuple(kernels), tuple(dtypes), tuple(archs))
    if triton.knobs.runtime.interpret:
        return list(_in_child("_compile_folder", *arguments))
    return _compile_folder(*arguments)


def _compile_folder(
    folder: str, kernels: Sequence[str], dtypes: Sequence[str], archs: Sequence[int]
) -> list[dict[str, Any]]:
    wanted_dtypes = {_short(dtype) for dtype in dtypes}
    rows = []
    for name, kernel, signature, constexprs in _declared(Path(folder)):
        if kernels and not {name, name.removesuffix("_kernel")} & set(kernels):
            continue
        if dtypes and not wanted_dtypes & _dtypes_of(signature, constexprs):
            continue
        for arch in archs:
            variant = " ".join([*signature.values(), *_assignments(constexprs)])
            row: dict[str, Any] = {"name": name, "variant": variant, "arch": arch}
            row |= dict.fromkeys(("registers", "spills", "value", "cubin_bytes"))
            row |= {"unit": "bytes", "kind": "counted", "notes": ""}
            start = time.perf_counter()
            try:
                report = _compile(_unwrapped(kernel), signature, constexprs, arch)
            except (RuntimeError, ValueError) as error:
                row["notes"] = str(error)[:2000]
            else:
                row |= {"registers": report.registers, "spills": report.spills}
                row |= {"value": report.shared_bytes, "cubin_bytes": report.cubin_bytes}
            rows.append(row | {"seconds": round(time.perf_counter() - start, 3)})
    return rows


def _declared(folder: Path) -> Iterator[Variant]:
    """Every (name, kernel, argument types, constexprs) that the kernel modules below declare."""
    for path in sorted(folder.rglob("*.py")):
        *folders, file = path.relative_to(folder).parts
        if "kernels" not in folders and file != "kernels.py":
            continue
        if any(name.startswith(".") for name in folders):  # an environment or a cache
            continue
        try:
            module = _import_file(path)
        except Exception as error:
            raise RuntimeError(f"{path} cannot be imported: {error}") from error
        for name, variants in getattr(module, "SIGNATURES", {}).items():
            for signature, constexprs in variants:
                yield name, getattr(module, name), signature, constexprs
        if hasattr(module, "ahead"):
            yield from module.ahead()


def _import_file(path: Path) -> ModuleType:
    """The module of a file: by its dotted name where it lies in a package, else from the file."""
    names = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    if folder != path.parent:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        return importlib.import_module(".".join(names))
    spec = importlib.util.spec_from_file_location(f"kernels_of_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile_from_file(
    path: str,
    name: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    archs: Sequence[int],
) -> list[KernelReport]:
    kernel = getattr(_import_file(Path(path)), name, None)
    if kernel is None:
        raise ValueError(f"kernel must be a module-level function of a file; got {name} in {path}")
    return compile_ahead(kernel, signature, constexprs, archs)


def _compile(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], arch: int
) -> KernelReport:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _check_signature(kernel, signature, constexprs)
    names = kernel.arg_names
    constants = {n: constexprs[n] for n in names if n in constexprs}
    options = {n: value for n, value in constexprs.items() if n not in names}
    # fused multiply-add is triton's default today; said, because the default is announced to change
    options = {"enable_fp_fusion": True, **options}
    types = {n: "constexpr" if n in constants else signature[n].split(":")[0] for n in names}
    aligned = [i for i, n in enumerate(names) if signature.get(n, "").endswith(":16")]
    source = ASTSource(kernel, types, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # triton prints all PTX when ptxas fails
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        kind = type(error).__name__
        raise RuntimeError(f"{kernel.__name__} fails for sm_{arch}: {kind}: {error}") from error
    shared = compiled.metadata.shared
    if shared > SHARED_BYTES_PER_BLOCK.get(arch, shared):
        raise RuntimeError(
            f"{kernel.__name__} asks for {shared} bytes of shared memory; "
            f"a block of sm_{arch} has at most {SHARED_BYTES_PER_BLOCK[arch]}"
        )
    cubin = compiled.asm["cubin"]
    usage = _resource_usage(cubin)
    spills = (usage["STACK"] + usage["LOCAL"]) // 4
    return KernelReport(arch, usage["REG"], spills, shared, len(cubin))


def _check_signature(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any]
) -> None:
    names = kernel.arg_names
    if missing := [n for n in names if n not in signature and n not in constexprs]:
        raise ValueError(
            f"{kernel.fn.__name__}: signature must type every argument; got no {missing}"
        )
    if unknown := [n for n in signature if n not in names]:
        raise ValueError(f"{kernel.fn.__name__}: signature must name arguments only; got {unknown}")


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, ... of a binary with one kernel, by the disassembler that triton ships."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", done.stdout)}


def _in_child(function: str, *arguments: Any) -> Any:
    """The result of a function of this module in a process that has no TRITON_INTERPRET."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", "from septet_shared import testing; testing._child()"],
        input=pickle.dumps((function, arguments)),
        env=environment,
        capture_output=True,
        timeout=COMPILE_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"compilation ended early: {done.stderr.decode(errors='replace')[-4000:]}"
        )
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    return result


def _child() -> None:
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    function, arguments = pickle.load(sys.stdin.buffer)
    try:
        answer: tuple[Any, Exception | None] = (globals()[function](*arguments), None)
    except (RuntimeError, ValueError) as error:
        answer = (None, error)
    answers.write(pickle.dumps(answer))


def _unwrapped(kernel: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    inner = kernel
    while not isinstance(inner, JITFunction | InterpretedFunction):
        if not hasattr(inner, "fn"):
            raise ValueError(f"kernel must be a @triton.jit function; got {kernel!r}")
        inner = inner.fn
    return inner


def _dtypes_of(signature: Mapping[str, str], constexprs: Mapping[str, Any]) -> set[str]:
    values = [*signature.values(), *(getattr(v, "name", "") for v in constexprs.values())]
    return {value.lstrip("*").split(":")[0] for value in values}


def _short(dtype: str) -> str:
    """Triton's name of a dtype: fp32 for float32, bf16 for bfloat16, i64 for int64."""
    return dtype.replace("float", "fp").replace("bfp", "bf").replace("int", "i").replace("ui", "u")


def _assignments(constexprs: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in constexprs.items()]


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("kernels need triton, which is not installed: pip install triton")
