"""Multiply the row of each segment with the gradients of the bags that it is in.

    out[place[k]] = sum_c rows[s, c'] * gradient[bag[k], c]    first[s] <= k < first[s + 1]

grid      one program per block of segments; it loops to its longest segment and over column tiles
writes    out[place[k]] for each entry k of the segments; places differ, so no atomics
bound by  memory: V * D * itemsize bytes of gathered gradients
accepts   int32 first [S + 1], bag, place; c' = (c % INNER) * OUTER + c // INNER, rows row-major
source    the derivative of a weighted sum; oracle: autograd of reference.rows
"""

import triton
import triton.language as tl

_NUMBERS = ("segments", "stride_rn", "stride_gn", "stride_gc", "D")
_POINTERS = dict.fromkeys(("bag_ptr", "place_ptr", "first_ptr"), "*i32")
_ARGUMENTS = {**_POINTERS, **dict.fromkeys(_NUMBERS, "i32")}
SIGNATURES = {
    "dot_rows_kernel": [
        (
            {"rows_ptr": t, "gradient_ptr": t, "out_ptr": t, **_ARGUMENTS},
            {"INNER": 4, "OUTER": 8, "BLOCK_S": 16, "BLOCK_K": 4, "BLOCK_C": 32},
        )
        for t in ("*fp32:16", "*fp64:16")
    ]
}


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=["first_ptr"])
def dot_rows_kernel(
    rows_ptr,
    gradient_ptr,
    bag_ptr,
    place_ptr,
    first_ptr,
    out_ptr,
    segments,
    stride_rn,
    stride_gn,
    stride_gc,
    D,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    exists = s < segments
    begin = tl.load(first_ptr + s, mask=exists, other=0)
    end = tl.load(first_ptr + s + 1, mask=exists, other=0)
    for k0 in range(0, tl.max(end - begin, axis=0), BLOCK_K):
        k = begin[:, None] + k0 + tl.arange(0, BLOCK_K)[None, :]
        inside = k < end[:, None]  # [BLOCK_S, BLOCK_K]
        # int64: bags * stride passes 2**31 at large batches
        bag = tl.load(bag_ptr + k, mask=inside, other=0).to(tl.int64)
        total = tl.zeros((BLOCK_S, BLOCK_K), dtype=out_ptr.dtype.element_ty)
        for c0 in range(0, D, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            gradient = tl.load(  # [BLOCK_S, BLOCK_K, BLOCK_C]
                gradient_ptr + bag[:, :, None] * stride_gn + c[None, None, :] * stride_gc,
                mask=inside[:, :, None] & (c < D)[None, None, :],
                other=0.0,
            )
            row_c = (c % INNER) * OUTER + c // INNER
            row = tl.load(  # [BLOCK_S, BLOCK_C]
                rows_ptr + s.to(tl.int64)[:, None] * stride_rn + row_c[None, :],
                mask=exists[:, None] & (c < D)[None, :],
                other=0.0,
            )
            total += tl.sum(gradient * row[:, None, :], axis=2)
        place = tl.load(place_ptr + k, mask=inside, other=0)
        tl.store(out_ptr + place, total, mask=inside)
