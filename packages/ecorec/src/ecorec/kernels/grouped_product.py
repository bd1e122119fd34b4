"""Multiply the rows of each group by the group's own matrix.

    out[t - item0, j, :] = left[t, j, :] @ matrix[g]    for begin[g] <= t < end[g], 0 <= j < J

grid      one program per (group, column tile); it loops over the rows of its group
writes    out [items, J, C] row-major, the items of these groups, each element once
bound by  L2: left and out once, a matrix once per group (once per tile of rows if K > BLOCK_K);
          2*J*K*C FLOPs an item, fp32 or fp64 multiply-adds, no tf32
accepts   J, K, C >= 1, any strides; int32 begin, end, indices; items of a launch * J < 2**31
source    EcoRec, SC 2024 (each pair is multiplied once); oracle: reference.rows
"""

import triton
import triton.language as tl

_STRIDES = dict.fromkeys(("stride_lt", "stride_lj", "stride_lk", "stride_mg", "stride_mk"), "i32")
_STRIDES |= {"stride_mc": "i32", "item0": "i32"}
_GROUPS = {"begin_ptr": "*i32", "end_ptr": "*i32"}
# Of a table with D = 32, q = (4, 2, 4) and ranks of 32: products of pairs, rows, and the gradients
# of the last core and of the first.
_PAIRS = {"J": 4, "K": 32, "C": 64, "BLOCK_N": 64, "BLOCK_K": 32, "BLOCK_C": 64, "num_warps": 8}
_ROWS = {"J": 4, "K": 32, "C": 8, "BLOCK_N": 64, "BLOCK_K": 32, "BLOCK_C": 16, "num_warps": 4}
_LAST = {"J": 4, "K": 8, "C": 32, "BLOCK_N": 64, "BLOCK_K": 16, "BLOCK_C": 32, "num_warps": 8}
_FIRST = {"J": 4, "K": 64, "C": 32, "BLOCK_N": 64, "BLOCK_K": 32, "BLOCK_C": 32, "num_warps": 8}


def _variants(t: str) -> list[tuple[dict[str, str], dict[str, int | None]]]:
    values = {"left_ptr": t, "matrix_ptr": t, "out_ptr": t, **_GROUPS, **_STRIDES}
    left, matrix = {"left_index_ptr": "*i32"}, {"matrix_index_ptr": "*i32"}
    no_left, no_matrix = {"left_index_ptr": None}, {"matrix_index_ptr": None}
    return [
        ({**values, **left, **matrix}, {**_PAIRS}),
        ({**values, **left}, {**no_matrix, **_ROWS}),
        (values, {**no_left, **no_matrix, **_LAST}),
        ({**values, **matrix}, {**no_left, **_FIRST}),
    ]


SIGNATURES = {"multiply_groups_kernel": [*_variants("*fp32:16"), *_variants("*fp64:16")]}


@triton.jit(
    do_not_specialize=["item0"],
    do_not_specialize_on_alignment=["matrix_index_ptr", "begin_ptr", "end_ptr"],
)
def multiply_groups_kernel(
    left_ptr,
    left_index_ptr,  # the row of left of item t; None: t - item0
    matrix_ptr,
    matrix_index_ptr,  # the matrix of group g; None: g
    out_ptr,
    begin_ptr,
    end_ptr,
    item0,
    stride_lt,
    stride_lj,
    stride_lk,
    stride_mg,
    stride_mk,
    stride_mc,
    J: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    group = tl.program_id(0)
    n_begin = (tl.load(begin_ptr + group) - item0) * J
    n_end = (tl.load(end_ptr + group) - item0) * J
    matrix = group
    if matrix_index_ptr is not None:
        matrix = tl.load(matrix_index_ptr + group)
    k = tl.arange(0, BLOCK_K)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    # int64: a core of many slices passes 2**31 elements
    matrix_ptr += matrix.to(tl.int64) * stride_mg
    tile_ptr = matrix_ptr + k[:, None] * stride_mk + c[None, :] * stride_mc  # [BLOCK_K, BLOCK_C]
    if K <= BLOCK_K:
        tile = tl.load(tile_ptr, mask=(k[:, None] < K) & (c[None, :] < C), other=0.0)
    for n0 in range(n_begin, n_end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        row = n // J
        if left_index_ptr is not None:
            row = tl.load(left_index_ptr + row + item0, mask=n < n_end, other=0)
        row_ptr = left_ptr + row.to(tl.int64) * stride_lt + (n % J) * stride_lj  # [BLOCK_N]
        product = tl.zeros((BLOCK_N, BLOCK_C), dtype=out_ptr.dtype.element_ty)
        for k0 in range(0, K, BLOCK_K):
            if K > BLOCK_K:
                inside = (k[:, None] < K - k0) & (c[None, :] < C)
                tile = tl.load(tile_ptr + k0 * stride_mk, mask=inside, other=0.0)
            left = tl.load(
                row_ptr[:, None] + (k0 + k)[None, :] * stride_lk,
                mask=(n[:, None] < n_end) & (k[None, :] < K - k0),
                other=0.0,
            )
            product = tl.dot(left, tile, product, input_precision="ieee")
        out = out_ptr + n.to(tl.int64)[:, None] * C + c[None, :]
        tl.store(out, product, mask=(n[:, None] < n_end) & (c[None, :] < C))
