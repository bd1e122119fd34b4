"""Sum the rows that belong to each segment.

    out[o, :] = sum_k scale[scale_index[k]] * source[index[k], :] / divisor[o]    k in segment s

grid      one program per (block of segments, column tile); it loops to its longest segment
writes    out[o], o = target[s] or s, columns < out_columns, column c at place
          (c % INNER) * OUTER + c // INNER; ACCUMULATE: adds to it. One segment per o: no atomics
bound by  memory: V * INNER * OUTER * itemsize bytes of gathered rows (L2 where source is a chunk)
accepts   int32 first [S + 1], indices, divisor; columns of source from source_columns on count as 0
source    EcoRec, SC 2024 (expansion after multiplication); oracle: reference.embedding_bag
"""

import triton
import triton.language as tl

_NUMBERS = ("segments", "stride_sn", "stride_sc", "stride_on", "source_columns", "out_columns")
_POINTERS = {"index_ptr": "*i32", "first_ptr": "*i32", **dict.fromkeys(_NUMBERS, "i32")}
# Of a table with D = 32, q = (4, 2, 4) and ranks of 32: bags from rows, rows from bags' gradients,
# slices of the last core and of the first.
_BAGS = {"INNER": 8, "OUTER": 4, "BLOCK_S": 4, "BLOCK_K": 16, "BLOCK_C": 32, "ACCUMULATE": True}
_ROWS = {"INNER": 4, "OUTER": 8, "BLOCK_S": 16, "BLOCK_K": 4, "BLOCK_C": 32, "ACCUMULATE": False}
_LAST = {"INNER": 32, "OUTER": 4, "BLOCK_S": 1, "BLOCK_K": 16, "BLOCK_C": 128, "ACCUMULATE": True}
_FIRST = {**_LAST, "INNER": 128, "OUTER": 1}


def _variants(t: str) -> list[tuple[dict[str, str], dict[str, int | None]]]:
    values = {"source_ptr": t, "out_ptr": t, **_POINTERS}
    weights, none = {"scale_ptr": t, "scale_index_ptr": "*i32"}, {"scale_ptr": None}
    none["scale_index_ptr"] = None
    target, divisor = {"target_ptr": "*i32"}, {"divisor_ptr": "*i32"}
    everywhere, undivided = {"target_ptr": None}, {"divisor_ptr": None}
    return [
        ({**values, **target}, {**none, **undivided, **_BAGS}),
        ({**values, **target, **divisor}, {**none, **_BAGS}),
        ({**values, **target, **weights}, {**undivided, **_BAGS}),
        (values, {**none, **everywhere, **undivided, **_ROWS}),
        ({**values, **weights}, {**everywhere, **undivided, **_ROWS}),
        ({**values, **target}, {**none, **undivided, **_LAST}),
        ({**values, **target}, {**none, **undivided, **_FIRST}),
    ]


SIGNATURES = {"sum_segments_kernel": [*_variants("*fp32:16"), *_variants("*fp64:16")]}


@triton.jit(
    do_not_specialize=["segments"],
    do_not_specialize_on_alignment=["first_ptr", "target_ptr", "divisor_ptr"],
)
def sum_segments_kernel(
    source_ptr,
    index_ptr,
    scale_ptr,  # None: 1
    scale_index_ptr,
    first_ptr,
    target_ptr,
    divisor_ptr,  # None: 1
    out_ptr,
    segments,
    stride_sn,
    stride_sc,
    stride_on,
    source_columns,
    out_columns,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = s < segments
    begin = tl.load(first_ptr + s, mask=exists, other=0)
    end = tl.load(first_ptr + s + 1, mask=exists, other=0)
    column = (c < INNER * OUTER) & (c < source_columns)
    total = tl.zeros((BLOCK_S, BLOCK_C), dtype=out_ptr.dtype.element_ty)
    for k0 in range(0, tl.max(end - begin, axis=0), BLOCK_K):
        k = begin[:, None] + k0 + tl.arange(0, BLOCK_K)[None, :]
        inside = k < end[:, None]  # [BLOCK_S, BLOCK_K]
        # int64: rows * stride passes 2**31 at large batches
        row = tl.load(index_ptr + k, mask=inside, other=0).to(tl.int64)
        values = tl.load(  # [BLOCK_S, BLOCK_K, BLOCK_C]
            source_ptr + row[:, :, None] * stride_sn + c[None, None, :] * stride_sc,
            mask=inside[:, :, None] & column[None, None, :],
            other=0.0,
        )
        if scale_ptr is not None:
            place = tl.load(scale_index_ptr + k, mask=inside, other=0)
            scale = tl.load(scale_ptr + place, mask=inside, other=0.0)
            values *= scale[:, :, None]
        total += tl.sum(values, axis=1)
    target = s
    if target_ptr is not None:
        target = tl.load(target_ptr + s, mask=exists, other=0)
    if divisor_ptr is not None:
        divisor = tl.load(divisor_ptr + target, mask=exists, other=1)
        total = total / divisor.to(total.dtype)[:, None]
    out_c = (c % INNER) * OUTER + c // INNER
    out = out_ptr + target.to(tl.int64)[:, None] * stride_on + out_c[None, :]
    written = exists[:, None] & ((c < INNER * OUTER) & (out_c < out_columns))[None, :]
    if ACCUMULATE:
        total += tl.load(out, mask=written, other=0.0)
    tl.store(out, total, mask=written)
