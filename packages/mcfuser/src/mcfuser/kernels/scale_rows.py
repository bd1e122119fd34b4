"""Scale each row of a matrix.

    out[i, :] = weight[i] * x[i, :]

grid      one program per (row, column tile)
writes    every element of out (callers allocate with torch.empty)
bound by  memory: 2*N*D*itemsize bytes, one multiplication an element
accepts   any N, D >= 0; x strided, out row-major, weight contiguous
source    <section, equation>; oracle: reference.scale_rows
"""

import triton
import triton.language as tl

_ARGUMENTS = {"D": "i32", "stride_xn": "i64", "stride_xd": "i64", "stride_on": "i64"}
SIGNATURES = {
    "scale_rows_kernel": [
        ({"x_ptr": t, "weight_ptr": t, "out_ptr": t, **_ARGUMENTS}, {"BLOCK_D": 64})
        for t in ("*fp32", "*bf16")
    ]
}


@triton.jit
def scale_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    D,
    stride_xn,
    stride_xd,
    stride_on,
    BLOCK_D: tl.constexpr,
):
    # int64: N * D passes 2**31 at paper scale
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = cols < D
    tile = tl.load(x_ptr + row * stride_xn + cols * stride_xd, mask=mask)  # [BLOCK_D]
    scaled = tile.to(tl.float32) * tl.load(weight_ptr + row).to(tl.float32)
    tl.store(out_ptr + row * stride_on + cols, scaled.to(tile.dtype), mask=mask)
