"""Rows scaled by their weights: input checks, backends, gradients."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "triton")
_BLOCK_D = 64


def backends() -> dict[str, str]:
    """What each backend is here: "available", or why it is not."""
    return {
        "torch": "available",
        "triton": "available" if find_spec("triton") else "not installed: pip install triton",
    }


def scale_rows(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """[N, D] rows of x, row i times weight[i].

    Args:
        x: [N, D], any float dtype; N and D may be 0.
        weight: [N], dtype and device of x.
        backend: "auto" (triton on CUDA, else torch), "torch" or "triton".

    Raises:
        ValueError: a shape, dtype or device differs from the above, or an unknown backend.

    Cost: 2 * N * D * itemsize bytes moved. Differentiable in x and weight.
    Source: <section, equation>; `reference.scale_rows` is the same thing in one line.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if x.dim() != 2:
        raise ValueError(f"x must be [N, D]; got {tuple(x.shape)}")
    if weight.shape != x.shape[:1]:
        raise ValueError(f"weight must be [{len(x)}] like x; got {tuple(weight.shape)}")
    if weight.dtype != x.dtype or weight.device != x.device:
        ours, theirs = f"{x.dtype} on {x.device}", f"{weight.dtype} on {weight.device}"
        raise ValueError(f"weight must be {ours} like x; got {theirs}")
    if backend == "auto":
        backend = "triton" if x.device.type == "cuda" else "torch"
    if backend == "torch":
        return weight[:, None] * x
    result: Tensor = _ScaleRows.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _launch(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return _launch(gradient, weight), (gradient * x).sum(1)


def _launch(x: Tensor, weight: Tensor) -> Tensor:
    import triton

    from mcfuser.kernels.scale_rows import scale_rows_kernel

    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (rows, triton.cdiv(columns, _BLOCK_D))
        scale_rows_kernel[grid](
            x, weight.contiguous(), out, columns, *x.stride(), out.stride(0), BLOCK_D=_BLOCK_D
        )
    return out
