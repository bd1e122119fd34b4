"""Files that appear whole or not at all, whoever is interrupted or writes at the same time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | Path, data: str | bytes) -> Path:
    """`path`, holding `data` (text as UTF-8): complete, or as it was before. Makes its folder.

    Raises OSError, UnicodeEncodeError.
    """
    path = Path(path)
    content = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).chmod(0o644)  # mkstemp makes it private
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
