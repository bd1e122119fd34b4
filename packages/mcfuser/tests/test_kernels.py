from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mcfuser import scale_rows
from septet_shared.testing import compile_package, poison


def test_the_kernel_writes_every_element():
    with poison():
        out = scale_rows(torch.ones(3, 65), torch.ones(3), backend="triton")
    assert out.eq(1).all()


def test_every_kernel_compiles_without_spills():
    found = find_spec("mcfuser")
    rows = compile_package(Path(found.submodule_search_locations[0]), archs=(90,))
    assert {row["name"] for row in rows} == {"scale_rows_kernel"}
    assert all(row["spills"] == 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_the_cpu_gives():
    x, weight = torch.randn(33, 257), torch.randn(33)
    out = scale_rows(x.cuda(), weight.cuda(), backend="triton").cpu()
    torch.testing.assert_close(out, weight[:, None] * x)
