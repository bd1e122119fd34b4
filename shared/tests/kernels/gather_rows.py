"""Copy rows that other ranks hold, each once its owner has flagged them as written.

    out[i, :] = (x of rank owner[i])[index[i], :]

grid      one program per (row of out, column tile); waits for flags of other ranks only
writes    every element of out; rows of an owner that is late become NaN, and late[owner] = 1
bound by  memory or link: 2*N*D*4 bytes, no arithmetic; at most max_polls reads of a flag
accepts   any N >= 0, D >= 1; x, out float32, row-major; owner, index int64; pointers, flags
          int64[W]: addresses, on each rank, of x and of the int32 epoch that guards it
source    one-sided reads through pointer tables; oracle: indexing, in test_compile_kernels.py
"""

import triton
import triton.language as tl

_ANY = {
    "pointers_ptr": "*i64",
    "flags_ptr": "*i64",
    "owner_ptr": "*i64",
    "index_ptr": "*i64",
    "out_ptr": "*fp32",
    "late_ptr": "*i32",
    "D": "i32",
    "stride_xn": "i64",
    "stride_on": "i64",
    "epoch": "i32",
    "max_polls": "i32",
}
_ALIGNED = {"out_ptr": "*fp32:16", "D": "i32:16", "stride_xn": "i64:16", "stride_on": "i64:16"}
SIGNATURES = {
    "gather_rows_kernel": [
        (_ANY, {"BLOCK_D": 64}),
        (_ANY | _ALIGNED, {"BLOCK_D": 1024}),
    ]
}


@triton.jit
def gather_rows_kernel(
    pointers_ptr,
    flags_ptr,
    owner_ptr,
    index_ptr,
    out_ptr,
    late_ptr,
    D,
    stride_xn,
    stride_on,
    epoch,
    max_polls,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(owner_ptr + row)
    flag_ptr = tl.load(flags_ptr + owner).to(tl.pointer_type(tl.int32))
    # An atomic, not a volatile load: one thread polls, and what it acquires holds for the block.
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    polls = 1
    while (seen < epoch) & (polls < max_polls):
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        polls += 1
    tl.store(late_ptr + owner, 1, mask=seen < epoch)

    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x_ptr = tl.load(pointers_ptr + owner).to(tl.pointer_type(tl.float32))
    # int64: index * stride_xn passes 2**31 at paper scale
    source_ptr = x_ptr + tl.load(index_ptr + row) * stride_xn
    readable = tl.where(seen < epoch, 0, D)
    tile = tl.load(source_ptr + cols, mask=cols < readable, other=float("nan"))  # [BLOCK_D]
    tl.store(out_ptr + row * stride_on + cols, tile, mask=cols < D)
