"""A dense table in a file, converted to a tensor train in a file: `ecorec convert`."""

import io
import pickle
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from septet_shared.profiling import bench_row

from .shapes import DTYPES, callers_level
from .tt_svd import decompose


def convert_rows(
    table: str | Path,
    output: str | Path,
    *,
    key: str | None = None,
    rank: int | None = None,
    max_bytes: int | None = None,
    rel_error: float | None = None,
) -> list[dict[str, Any]]:
    """Rows `relative_error`, `bytes`, `dense_bytes`; writes the tensor train, whole or not at all.

    Args:
        table: a .npy file, which is not read into memory at once, or a .pt file of a tensor or of a
            dict that has `key`; [N, D], float32 or float64.
        output: written by torch.save: a dict with `cores.0`, ... as TTEmbeddingBag's state_dict has
            them, and `spec`, the keywords of its TTSpec but for the dtype.
        rank, max_bytes, rel_error: one of them, as in TTEmbeddingBag.from_dense.

    Raises:
        FileNotFoundError: no such file, or no folder for the output. ValueError: a file of another
            kind, no such key, not a table, another dtype; what from_dense raises.

    Warns when the cores are not smaller than the table.
    """
    target = Path(output)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"output must be in a folder that exists; got {target}")
    weight = _read(Path(table), key)
    if weight.dtype not in DTYPES:
        raise ValueError(f"table must be float32 or float64; {Path(table).name} is {weight.dtype}")
    spec, cores, report = decompose(weight, rank=rank, max_bytes=max_bytes, rel_error=rel_error)
    shape = {name: value for name, value in asdict(spec).items() if name != "dtype"}
    content = {f"cores.{k}": core for k, core in enumerate(cores)} | {"spec": shape}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    if report.bytes >= weight.nbytes:
        warnings.warn(
            f"the cores take {report.bytes:,} bytes, the table {weight.nbytes:,}: allow a larger "
            "error, or keep the table",
            stacklevel=callers_level(),
        )
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        unfinished.write_bytes(buffer.getvalue())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    notes = f"p = {spec.p}, q = {spec.q}, ranks = {spec.ranks}"
    lost = ", ".join(f"{value:.3g}" for value in report.per_unfolding)
    variant = "x".join(map(str, weight.shape))
    return [
        bench_row(
            "relative_error", variant, report.relative_error, "", kind="counted",
            notes=f"true; by unfolding {lost}",
        ),
        bench_row("bytes", variant, report.bytes, "B", kind="counted", notes=notes),
        bench_row("dense_bytes", variant, weight.nbytes, "B", kind="counted"),
    ]  # fmt: skip


def _read(path: Path, key: str | None) -> Tensor:
    if not path.is_file():
        raise FileNotFoundError(f"table must be a file; there is none at {path}")
    if path.suffix == ".npy":
        # Copy on write: nothing is written, and torch wants arrays that could be.
        return torch.from_numpy(np.load(path, mmap_mode="c"))
    if path.suffix not in (".pt", ".pth"):
        raise ValueError(f"table must be a .npy, .pt or .pth file; got {path.name}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"table must be what torch.save wrote; {path.name}: {error}") from None
    if isinstance(found, dict):
        if key not in found:
            names = ", ".join(map(str, found))
            raise ValueError(f"key must be one of {names}; got {key}")
        found = found[key]
    if not isinstance(found, Tensor):
        raise ValueError(f"table must be a tensor; {path.name} holds {type(found).__name__}")
    return found
