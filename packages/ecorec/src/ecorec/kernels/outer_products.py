"""Sum the outer products of the rows of each group.

    out[g, a, c] = sum_{t, j} left[t, j, a] * right[t, j, c]    begin[g] <= t < end[g], 0 <= j < J

grid      one program per (group, tile of A x C); it loops over the rows of its group in order
writes    out[g], or adds to out[out_index[g]], which differ: no atomics
bound by  L2: left once per column tile, right once per row tile, out once; 2*J*A*C FLOPs an item,
          fp32 or fp64 multiply-adds, no tf32
accepts   J, A, C >= 1, any strides; int32 begin, end, indices; items of a launch * J < 2**31
source    the gradient of a group's matrix in grouped_product.py; oracle: autograd of reference.rows
"""

import triton
import triton.language as tl

_STRIDES = dict.fromkeys(("stride_lt", "stride_lj", "stride_la", "stride_rt", "stride_rj"), "i32")
_STRIDES |= {"stride_rc": "i32", "item0": "i32"}
_GROUPS = {"begin_ptr": "*i32", "end_ptr": "*i32"}
# Of a table with D = 32, q = (4, 2, 4) and ranks of 32: gradients of pairs, of the middle core.
_PAIRS = {"J": 4, "A": 8, "C": 32, "BLOCK_N": 32, "BLOCK_A": 16, "BLOCK_C": 32, "num_warps": 2}
_MIDDLE = {"J": 4, "A": 32, "C": 64, "BLOCK_N": 32, "BLOCK_A": 32, "BLOCK_C": 64, "num_warps": 8}


def _variants(t: str) -> list[tuple[dict[str, str], dict[str, int | None]]]:
    values = {"left_ptr": t, "right_ptr": t, "out_ptr": t, **_GROUPS, **_STRIDES}
    right, left = {"right_index_ptr": "*i32"}, {"left_index_ptr": "*i32"}
    return [
        ({**values, **right}, {"left_index_ptr": None, "out_index_ptr": None, **_PAIRS}),
        ({**values, **left, "out_index_ptr": "*i32"}, {"right_index_ptr": None, **_MIDDLE}),
    ]


SIGNATURES = {"sum_outer_products_kernel": [*_variants("*fp32:16"), *_variants("*fp64:16")]}


@triton.jit(
    do_not_specialize=["item0"],
    do_not_specialize_on_alignment=["out_index_ptr", "begin_ptr", "end_ptr"],
)
def sum_outer_products_kernel(
    left_ptr,
    left_index_ptr,  # the row of left of item t; None: t - item0
    right_ptr,
    right_index_ptr,  # the row of right of item t; None: t - item0
    out_ptr,
    out_index_ptr,  # where group g is added; None: it is written at g
    begin_ptr,
    end_ptr,
    item0,
    stride_lt,
    stride_lj,
    stride_la,
    stride_rt,
    stride_rj,
    stride_rc,
    J: tl.constexpr,
    A: tl.constexpr,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    group = tl.program_id(0)
    n_begin = (tl.load(begin_ptr + group) - item0) * J
    n_end = (tl.load(end_ptr + group) - item0) * J
    tiles_c = (C + BLOCK_C - 1) // BLOCK_C
    a = tl.program_id(1) // tiles_c * BLOCK_A + tl.arange(0, BLOCK_A)
    c = tl.program_id(1) % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_A, BLOCK_C), dtype=out_ptr.dtype.element_ty)
    for n0 in range(n_begin, n_end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        left_row = n // J
        right_row = n // J
        if left_index_ptr is not None:
            left_row = tl.load(left_index_ptr + left_row + item0, mask=n < n_end, other=0)
        if right_index_ptr is not None:
            right_row = tl.load(right_index_ptr + right_row + item0, mask=n < n_end, other=0)
        # int64: a core of many slices passes 2**31 elements
        left_row_ptr = left_ptr + left_row.to(tl.int64) * stride_lt + (n % J) * stride_lj
        right_row_ptr = right_ptr + right_row.to(tl.int64) * stride_rt + (n % J) * stride_rj
        left = tl.load(  # [BLOCK_A, BLOCK_N]
            left_row_ptr[None, :] + a[:, None] * stride_la,
            mask=(n[None, :] < n_end) & (a[:, None] < A),
            other=0.0,
        )
        right = tl.load(  # [BLOCK_N, BLOCK_C]
            right_row_ptr[:, None] + c[None, :] * stride_rc,
            mask=(n[:, None] < n_end) & (c[None, :] < C),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (a[:, None] < A) & (c[None, :] < C)
    if out_index_ptr is None:
        out = out_ptr + group.to(tl.int64) * A * C + a[:, None] * C + c[None, :]
    else:
        place = tl.load(out_index_ptr + group).to(tl.int64)
        out = out_ptr + place * A * C + a[:, None] * C + c[None, :]
        total += tl.load(out, mask=inside, other=0.0)
    tl.store(out, total, mask=inside)
