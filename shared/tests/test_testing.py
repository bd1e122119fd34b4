import contextlib
import importlib.util
import sys
import textwrap
import threading

import pytest
import torch

from septet_shared import testing

poisoned = pytest.fixture(testing.poison.__wrapped__)

# Poisoned memory

MAKERS = {
    "empty": lambda dtype: torch.empty(2, 3, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(2, 3, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((2, 3), (1, 2), dtype=dtype),
    "empty_permuted": lambda dtype: torch.empty_permuted((2, 3), (1, 0), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(2, 3),
    "new_empty_strided": lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided(
        (2, 3), (3, 1)
    ),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.cfloat]
)
def test_uninitialised_floats_are_nan(maker, dtype, poisoned):
    t = MAKERS[maker](dtype)
    assert (t.shape, t.dtype) == ((2, 3), dtype)
    assert t.to(torch.complex64).isnan().all()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool])
def test_uninitialised_integers_are_the_largest(maker, dtype, poisoned):
    largest = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    assert MAKERS[maker](dtype).to(torch.int64).eq(largest).all()


def test_other_threads_get_poison_too(poisoned):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.empty(4)))
    thread.start()
    thread.join()
    assert seen[0].isnan().all()


def test_poison_leaves_gradients_and_other_kinds_of_tensors_alone(poisoned):
    assert torch.empty(2, requires_grad=True).requires_grad
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.empty(2, layout=torch.sparse_coo).layout == torch.sparse_coo
    assert torch.zeros(3).eq(0).all()
    assert torch.empty(0).numel() == 0


def test_poison_ends_with_its_context_even_by_an_error():
    before = torch.empty, torch.Tensor.new_empty
    with contextlib.suppress(KeyError), testing.poison():
        assert torch.empty is not before[0]
        raise KeyError
    assert (torch.empty, torch.Tensor.new_empty) == before
    assert "new_empty" not in vars(torch.Tensor)


# Error bounds

TRUTH = torch.tensor([1.0, -100.0, 0.0], dtype=torch.float64)


def off_by(*errors, dtype=torch.float32):
    return (TRUTH + torch.tensor(errors, dtype=torch.float64)).to(dtype)


def test_a_result_as_exact_as_plain_torch_passes():
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(33, 65, generator=rng).bfloat16() for _ in range(2))
    plain = a @ b.t()
    testing.assert_no_worse_than(plain, plain, a.double() @ b.double().t(), slack=1.0)
    blocked = sum(a[:, i : i + 13].float() @ b[:, i : i + 13].float().t() for i in range(0, 65, 13))
    testing.assert_no_worse_than(blocked.bfloat16(), plain, a.double() @ b.double().t())


@pytest.mark.parametrize(
    ("actual", "plain"),
    [
        (off_by(0, 0, 2**-9), off_by(0, 2**-10, 0)),  # twice the error, at another place
        (off_by(0, 7e-6, 0), off_by(0, 0, 0)),  # one unit in the last place of 100
        (off_by(0, 0, 0), off_by(0, 0, 0)),
    ],
)
def test_an_error_within_the_bound_passes(actual, plain):
    testing.assert_no_worse_than(actual, plain, TRUTH)


@pytest.mark.parametrize(
    ("actual", "plain", "message"),
    [
        (off_by(0, 0, 3e-3), off_by(0, 2**-10, 0), r"0\.003 against 0\.000977 .*at \(2,\): 0\.003"),
        (off_by(0, 2e-5, 0), off_by(0, 0, 0), r"at \(1,\): -99\.9999"),  # two units
        (off_by(3e-7, 0, 0), off_by(0, 0, 0), r"at \(0,\)"),  # its own units, not those of 100
        (off_by(0, 0, float("nan")), off_by(0, 1e-3, 0), r"at \(2,\): nan"),
        (off_by(0, float("inf"), 0), off_by(0, 1e-3, 0), r"at \(1,\): inf"),
        (off_by(2e-3, 2e-3, 2e-3), off_by(1e-3, 0, 0), "root mean square error"),
    ],
)
def test_an_error_beyond_the_bound_names_the_worst_element(actual, plain, message):
    with pytest.raises(AssertionError, match=message):
        testing.assert_no_worse_than(actual, plain, TRUTH)


def test_infinities_and_nans_of_the_truth_must_be_met():
    truth = torch.tensor([float("inf"), float("nan"), 1.0], dtype=torch.float64)
    testing.assert_no_worse_than(truth.half(), truth.half(), truth)
    for wrong in ([float("-inf"), float("nan"), 1.0], [float("inf"), 0.0, 1.0]):
        with pytest.raises(AssertionError, match="NaN or infinity"):
            testing.assert_no_worse_than(torch.tensor(wrong).half(), truth.half(), truth)


def test_an_infinity_that_plain_torch_saturates_may_be_saturated_too():
    truth = torch.tensor([float("inf"), 1.0], dtype=torch.float64)
    saturated = truth.clamp(max=65504).half()
    testing.assert_no_worse_than(saturated, saturated, truth)
    with pytest.raises(AssertionError, match="NaN or infinity"):
        testing.assert_no_worse_than(saturated, truth.half(), truth)


def test_an_overflow_of_the_plain_version_does_not_excuse_other_elements():
    truth = torch.tensor([1e5, 1.0], dtype=torch.float64)
    plain = truth.half()
    assert plain[0].isinf()
    testing.assert_no_worse_than(plain, plain, truth)
    with pytest.raises(AssertionError, match=r"at \(1,\)"):
        testing.assert_no_worse_than(torch.tensor([6e4, 1.5]).half(), plain, truth)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.cfloat])
def test_any_shape_is_judged(shape, dtype):
    wide = torch.cdouble if dtype.is_complex else torch.float64
    truth = torch.ones(shape, dtype=wide)
    testing.assert_no_worse_than(truth.to(dtype), truth.to(dtype), truth)
    if truth.numel():
        with pytest.raises(AssertionError, match=r"at \("):
            testing.assert_no_worse_than(truth.to(dtype) + 1e-3, truth.to(dtype), truth)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TRUTH, TRUTH.float(), TRUTH), TypeError, "plain_same_dtype must be torch.float64; got"),
        ((TRUTH, TRUTH, TRUTH.float()), TypeError, "truth_fp64 must be .*; got torch.float32"),
        ((TRUTH.int(), TRUTH.int(), TRUTH), TypeError, "actual must .*; got torch.int32"),
        ((TRUTH, TRUTH[:2], TRUTH), ValueError, r"plain_same_dtype must be \(3,\); got \(2,\)"),
        ((TRUTH, TRUTH, TRUTH[None]), ValueError, r"truth_fp64 must be \(3,\); got \(1, 3\)"),
        ((TRUTH, TRUTH, TRUTH, float("nan")), ValueError, "slack must be .*; got nan"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        testing.assert_no_worse_than(*arguments)


# Ahead-of-time builds

KERNELS = """
import triton
import triton.language as tl

SIGNATURES = {
    "double_kernel": [
        ({"x_ptr": "*fp32", "bias_ptr": "*fp32"}, {"BLOCK": 256}),
        ({"x_ptr": "*bf16:16"}, {"bias_ptr": None, "BLOCK": 256, "num_warps": 1}),
    ],
    "tuned_kernel": [({"x_ptr": "*fp16"}, {"BLOCK": 64})],
    "power_kernel": [
        ({"x_ptr": "*fp16"}, {"BLOCK": 32}),
        ({"x_ptr": "*fp16"}, {"BLOCK": 64, "maxnreg": 32}),
    ],
    "pipelined_kernel": [({"x_ptr": "*fp16:16", "K": "i32:16"}, {"num_stages": 12})],
    "wrong_kernel": [({"x_ptr": "*fp32"}, {})],
    "incomplete_kernel": [
        ({"x_ptr": "*fp32"}, {}),
        ({"x_ptr": "*fp32", "N": "i32", "M": "i32"}, {}),
    ],
}


@triton.jit
def twice(x):
    return x + x


@triton.jit
def double_kernel(x_ptr, bias_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = twice(tl.load(x_ptr + cols))
    if bias_ptr is not None:
        x += tl.load(bias_ptr + cols)
    tl.store(x_ptr + cols, x)


@triton.autotune([triton.Config({}, num_warps=2)], key=[])
@triton.jit
def tuned_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


@triton.jit
def power_kernel(x_ptr, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    tiles_ptr = x_ptr + rows[:, None] * BLOCK + rows[None, :]
    x = tl.load(tiles_ptr)
    y = tl.dot(x, x)
    for _ in range(3):
        y += tl.dot(y.to(tl.float16), x)
    tl.store(tiles_ptr, y.to(tl.float16))


@triton.jit
def pipelined_kernel(x_ptr, K):
    rows = tl.arange(0, 64)
    y = tl.zeros([64, 64], tl.float32)
    for k in range(0, K, 64):
        x = tl.load(x_ptr + rows[:, None] * 64 + k + rows[None, :])
        y += tl.dot(x, tl.load(x_ptr + K + rows[:, None] * 64 + k + rows[None, :]))
    tl.store(x_ptr + rows[:, None] * 64 + rows[None, :], y.to(tl.float16))


@triton.jit
def wrong_kernel(x_ptr):
    tl.store(x_ptr, no_such_name)


@triton.jit
def incomplete_kernel(x_ptr, N):
    tl.store(x_ptr, N)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout") / "system_of_test"
    (folder / "kernels").mkdir(parents=True)
    for init in (folder, folder / "kernels"):
        (init / "__init__.py").write_text("")
    (folder / "kernels" / "all.py").write_text(KERNELS)
    (folder / "not_a_kernel.py").write_text("raise SystemExit('is not to be imported')")
    (folder / ".venv" / "kernels").mkdir(parents=True)
    (folder / ".venv" / "kernels" / "other.py").write_text("raise SystemExit('nor is this')")
    return folder


@pytest.fixture(scope="module")
def rows(package, tmp_path_factory):
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        return testing.compile_package(package, archs=[80])


def variants(rows, name):
    return [row for row in rows if row["name"] == name]


def test_every_variant_of_every_kernel_has_a_row(rows):
    assert [row["name"] for row in rows] == (
        ["double_kernel"] * 2
        + ["tuned_kernel"]
        + ["power_kernel"] * 2
        + ["pipelined_kernel", "wrong_kernel"]
        + ["incomplete_kernel"] * 2
    )
    assert {(row["arch"], row["unit"], row["kind"]) for row in rows} == {(80, "bytes", "counted")}
    assert all(row["seconds"] >= 0 for row in rows)


def test_a_kernel_that_compiles_reports_what_it_costs(rows):
    for row in [*variants(rows, "double_kernel"), *variants(rows, "tuned_kernel")]:
        assert row["notes"] == ""
        assert (row["spills"], row["value"]) == (0, 0)
        assert 4 <= row["registers"] <= 64
        assert row["cubin_bytes"] > 1000


def test_the_variant_spells_types_constexprs_and_options(rows):
    assert [row["variant"] for row in variants(rows, "double_kernel")] == [
        "*fp32 *fp32 BLOCK=256",
        "*bf16:16 bias_ptr=None BLOCK=256 num_warps=1",
    ]


def test_shared_memory_is_counted_in_bytes(rows):
    fits = variants(rows, "power_kernel")[0]
    assert fits["value"] >= 32 * 32 * 2  # at least one tile of float16
    assert fits["value"] % 1024 == 0


def test_registers_that_do_not_fit_are_counted_as_spills(rows):
    spilling = variants(rows, "power_kernel")[1]
    assert spilling["registers"] == 32
    assert spilling["spills"] > 100


def test_a_kernel_that_no_block_can_run_is_a_failure(rows):
    (too_large,) = variants(rows, "pipelined_kernel")
    assert too_large["registers"] is too_large["value"] is too_large["cubin_bytes"] is None
    assert "a block of sm_80 has at most 166912" in too_large["notes"]


def test_a_kernel_that_does_not_compile_says_why(rows):
    (wrong,) = variants(rows, "wrong_kernel")
    assert wrong["registers"] is None
    assert "wrong_kernel fails for sm_80: CompilationError" in wrong["notes"]
    assert "no_such_name" in wrong["notes"]


def test_a_signature_must_fit_the_kernel(rows):
    missing, unknown = variants(rows, "incomplete_kernel")
    assert "incomplete_kernel: signature must type every argument; got no ['N']" in missing["notes"]
    assert "incomplete_kernel: signature must name arguments only; got ['M']" in unknown["notes"]


def test_kernels_dtypes_and_architectures_can_be_chosen(package):
    pytest.importorskip("triton")
    chosen = testing.compile_package(
        package, kernels=["double", "tuned_kernel"], dtypes=["bfloat16", "fp16"], archs=[90, 100]
    )
    assert [(row["name"], row["arch"], row["notes"]) for row in chosen] == [
        ("double_kernel", 90, ""),
        ("double_kernel", 100, ""),
        ("tuned_kernel", 90, ""),
        ("tuned_kernel", 100, ""),
    ]


def test_a_package_may_be_given_as_module(package, rows, monkeypatch):
    monkeypatch.syspath_prepend(str(package.parent))
    module = importlib.import_module(package.name)
    (row,) = testing.compile_package(module, kernels=["tuned"], archs=[80])
    (same,) = variants(rows, "tuned_kernel")
    assert row | {"seconds": 0} == same | {"seconds": 0}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_compiles_for_every_architecture_whether_interpreted_here_or_not(package):
    pytest.importorskip("triton")
    kernel = load(package / "kernels" / "all.py").double_kernel
    signature = {"x_ptr": "*fp32", "bias_ptr": "*fp32"}
    reports = testing.compile_ahead(kernel, signature, {"BLOCK": 256})
    assert [report.arch for report in reports] == [80, 90, 100]
    assert all(report.registers > 0 and report.spills == 0 for report in reports)
    with pytest.raises(ValueError, match=r"must type every argument; got no \['bias_ptr'\]"):
        testing.compile_ahead(kernel, {"x_ptr": "*fp32"}, {"BLOCK": 256}, archs=[80])


def test_only_a_triton_function_can_be_compiled():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"kernel must be a @triton.jit function; got <function"):
        testing.compile_ahead(load, {}, {})


def test_a_generator_of_kernels_is_compiled(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "kernels.py").write_text(
        textwrap.dedent("""
        from pathlib import Path
        import importlib.util

        def ahead():
            for step in (1, 2):
                path = Path(__file__).parent / f"printed_{step}.py"
                path.write_text(
                    "import triton, triton.language as tl\\n@triton.jit\\n"
                    f"def add_kernel(x_ptr):\\n    tl.store(x_ptr, tl.load(x_ptr) + {step})\\n"
                )
                spec = importlib.util.spec_from_file_location(path.stem, path)
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                yield f"add_{step}", module.add_kernel, {"x_ptr": "*fp32"}, {}
        """)
    )
    rows = testing.compile_package(tmp_path, archs=[90])
    assert [(row["name"], row["notes"]) for row in rows] == [("add_1", ""), ("add_2", "")]


def test_a_kernel_module_that_cannot_be_imported_is_named(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "broken.py").write_text("import no_such_module")
    with pytest.raises(RuntimeError, match=r"broken\.py cannot be imported: .*no_such_module"):
        testing.compile_package(tmp_path)


def test_a_root_that_is_no_folder_is_refused(tmp_path):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"root must be a folder or a package; got .*absent"):
        testing.compile_package(tmp_path / "absent")


def test_without_triton_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match="pip install triton"):
        testing.compile_package(".")
