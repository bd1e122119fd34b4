"""`make kernels`, and the kernel that shows how kernels read other ranks' memory."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gather_rows = load(Path(__file__).parent / "kernels" / "gather_rows.py")

# The kernel: here with tables made by hand, over ranks that live in this process


def gather(x, epochs, owner, index, epoch, max_polls=3, block=64, stride_on=None):
    """out [N, D] and late [W] from x, a list of W tensors [rows, D], and epochs, int32 [W]."""
    N, D = len(owner), x[0].shape[1]
    stride_on = D if stride_on is None else stride_on
    out = torch.full((N, stride_on), torch.nan, device=DEVICE)
    late = torch.zeros(len(x), dtype=torch.int32, device=DEVICE)
    pointers = torch.tensor([t.data_ptr() for t in x], device=DEVICE)
    flags = epochs.data_ptr() + 4 * torch.arange(len(x), device=DEVICE)
    gather_rows.gather_rows_kernel[(N, -(-D // block))](
        *(pointers, flags, owner, index, out, late, D, x[0].stride(0), stride_on),
        *(epoch, max_polls),
        BLOCK_D=block,
    )
    return out, late


def ranks(W, rows, D):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(rows, D, generator=rng).to(DEVICE) for _ in range(W)]


@pytest.mark.parametrize(("N", "D"), [(0, 5), (1, 1), (7, 63), (9, 64), (5, 65), (3, 130)])
def test_each_row_comes_from_its_owner(N, D):
    x = ranks(3, rows=11, D=D)
    rng = torch.Generator().manual_seed(1)
    owner = torch.randint(0, 3, (N,), generator=rng).to(DEVICE)
    index = torch.randint(0, 11, (N,), generator=rng).to(DEVICE)
    epochs = torch.tensor([2, 9, 3], dtype=torch.int32, device=DEVICE)
    out, late = gather(x, epochs, owner, index, epoch=2)
    for i in range(N):
        torch.testing.assert_close(out[i], x[owner[i]][index[i]], rtol=0, atol=0)
    assert out.shape == (N, D)
    assert late.eq(0).all()
    assert epochs.tolist() == [2, 9, 3]  # looking at a flag does not change it


def test_a_late_owner_is_named_and_its_rows_are_nan():
    x = ranks(3, rows=4, D=70)
    owner = torch.tensor([0, 1, 2, 1], device=DEVICE)
    index = torch.tensor([3, 2, 1, 0], device=DEVICE)
    epochs = torch.tensor([5, 4, 5], dtype=torch.int32, device=DEVICE)
    out, late = gather(x, epochs, owner, index, epoch=5)
    assert late.tolist() == [0, 1, 0]
    assert out[[1, 3]].isnan().all()
    torch.testing.assert_close(out[[0, 2]], torch.stack([x[0][3], x[2][1]]), rtol=0, atol=0)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="this thread cannot raise a flag behind a running kernel"
)
def test_a_row_is_waited_for_until_its_owner_raises_the_flag():
    x = [torch.full((1, 3), torch.nan)]
    epochs = torch.zeros(1, dtype=torch.int32)

    def publish():
        x[0].fill_(7.0)
        epochs.fill_(1)

    owner = threading.Timer(0.2, publish)
    owner.start()
    index = torch.zeros(1, dtype=torch.int64)
    out, late = gather(x, epochs, index, index, epoch=1, max_polls=2**30)
    owner.join()
    assert (out.tolist(), late.tolist()) == ([[7.0] * 3], [0])


def test_strided_tables_are_read_and_padding_is_left_alone():
    wide = ranks(2, rows=4, D=20)
    x = [t[:, :6] for t in wide]
    owner, index = torch.tensor([1, 0], device=DEVICE), torch.tensor([2, 3], device=DEVICE)
    epochs = torch.ones(2, dtype=torch.int32, device=DEVICE)
    out, _ = gather(x, epochs, owner, index, epoch=1, stride_on=8)
    torch.testing.assert_close(out[:, :6], torch.stack([x[1][2], x[0][3]]), rtol=0, atol=0)
    assert out[:, 6:].isnan().all()


def test_addresses_beyond_two_to_the_31_elements_are_reached():
    # index * stride is 2**31 + 12; the base is set back by as much, so nothing large exists
    D = 4
    x = torch.arange(8.0, device=DEVICE)
    stride, index = 2**29 + 3, torch.tensor([4], device=DEVICE)
    pointers = torch.tensor([x.data_ptr() + 4 * 2 - 4 * stride * 4], device=DEVICE)
    epochs = torch.ones(1, dtype=torch.int32, device=DEVICE)
    flags = torch.tensor([epochs.data_ptr()], device=DEVICE)
    owner, late = torch.zeros_like(index), torch.zeros_like(epochs)
    out = torch.zeros(1, D, device=DEVICE)
    gather_rows.gather_rows_kernel[(1, 1)](
        *(pointers, flags, owner, index, out, late, D, stride, D, 1, 1), BLOCK_D=16
    )
    assert out.tolist() == [[2.0, 3.0, 4.0, 5.0]]


# The tool, on a checkout of its own

GOOD = """
import triton
import triton.language as tl

SIGNATURES = {"fill_kernel": [({"x_ptr": "*fp32"}, {"N": 16}), ({"x_ptr": "*bf16"}, {"N": 16})]}


@triton.jit
def fill_kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, N), 1.0)
"""
SPILLING = """
import triton
import triton.language as tl

SIGNATURES = {"scale_kernel": [({"x_ptr": "*fp32"}, {"N": 8192, "num_warps": 1})]}


@triton.jit
def scale_kernel(x_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))  # 256 registers per thread, needed again after the sum
    tl.store(x_ptr + tl.arange(0, N), x / tl.sum(x))
"""
PRINTED = """
from printing.kernel import copy_kernel


def ahead():
    yield "copy_4", copy_kernel, {"x_ptr": "*i32", "y_ptr": "*i32"}, {"N": 4}
"""
COPY = """
import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, y_ptr, N: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, N)))
"""


REFUSED_BY_THE_ASSEMBLER = """
import triton
import triton.language as tl

SIGNATURES = {"assembly_kernel": [({"x_ptr": "*i32"}, {"N": 32})]}


@triton.jit
def assembly_kernel(x_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    y = tl.inline_asm_elementwise("no_such.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1)
    tl.store(x_ptr + tl.arange(0, N), y)
"""


@pytest.fixture
def checkout(tmp_path):
    """The tool, a shared package with one test kernel, a package with a kernel that spills."""
    files = {
        "shared/tests/kernels/fill.py": GOOD,
        "packages/spilling/src/spilling/__init__.py": "",
        "packages/spilling/src/spilling/kernels/__init__.py": "",
        "packages/spilling/src/spilling/kernels/scale.py": SPILLING,
        "packages/printing/src/printing/__init__.py": "",
        "packages/printing/src/printing/kernel.py": COPY,
        "packages/printing/src/printing/kernels.py": PRINTED,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "compile_kernels.py", tmp_path / "tools")
    return tmp_path


def compile_kernels(checkout, *options):
    path = os.pathsep.join([str(ROOT / "shared" / "src"), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-W", "error", str(checkout / "tools" / "compile_kernels.py"), *options],
        env={**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(checkout / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_kernel_of_every_package_is_compiled_and_spills_fail(checkout):
    done = compile_kernels(checkout, "--json", "--out", str(checkout / "out" / "kernels.json"))
    rows = json.loads(done.stdout)
    assert sorted({(row["package"], row["name"], row["arch"]) for row in rows}) == sorted(
        (package, name, arch)
        for package, name in [
            ("shared", "fill_kernel"),
            ("printing", "copy_4"),
            ("spilling", "scale_kernel"),
        ]
        for arch in (80, 90, 100)
    )
    assert [row["notes"] for row in rows] == [""] * len(rows)
    assert json.loads((checkout / "out" / "kernels.json").read_text()) == rows
    assert {row["name"] for row in rows if row["spills"]} == {"scale_kernel"}
    assert done.returncode == 1
    assert "scale_kernel (*fp32 N=8192 num_warps=1) for sm_80 spills" in done.stderr
    allowed = compile_kernels(checkout, "--allow-spills")
    assert allowed.returncode == 0, allowed.stderr
    for words in ("fill_kernel", "copy_4", "registers", "shared bytes", f"{len(rows)} binaries"):
        assert words in allowed.stdout


def test_filters_keep_what_they_name(checkout):
    done = compile_kernels(
        *(checkout, "--json", "--kernel", "fill", "--kernel", "copy_4"),
        *("--dtype", "bfloat16", "--arch", "90", "--arch", "80"),
    )
    rows = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert [(row["variant"], row["arch"]) for row in rows] == [
        ("*bf16 N=16", 90),
        ("*bf16 N=16", 80),
    ]
    nothing = compile_kernels(checkout, "--kernel", "fil")
    assert (nothing.returncode, "no kernel matches" in nothing.stderr) == (1, True)


def test_a_failure_is_named_and_does_not_hide_the_other_kernels(checkout):
    wrong = GOOD.replace("1.0)", "no_such_name)").replace("fill_kernel", "wrong_kernel")
    (checkout / "shared/tests/kernels/wrong.py").write_text(wrong)
    (checkout / "shared/tests/kernels/assembly.py").write_text(REFUSED_BY_THE_ASSEMBLER)
    (checkout / "packages/printing/src/printing/kernels.py").write_text("import no_such_module")
    done = compile_kernels(checkout, "--allow-spills", "--arch", "80", "--json")
    rows = json.loads(done.stdout)  # and no word of the compilers, which print what they refuse
    assert done.returncode == 1
    assert [(row["name"], row["registers"] is None) for row in rows] == [
        ("assembly_kernel", True),
        *[("fill_kernel", False)] * 2,
        *[("wrong_kernel", True)] * 2,
        ("scale_kernel", False),
    ]
    assert "wrong_kernel (*fp32 N=16) for sm_80 does not compile: " in done.stderr
    assert "no_such_name" in done.stderr
    assert "kernels.py cannot be imported: No module named 'no_such_module'" in done.stderr
