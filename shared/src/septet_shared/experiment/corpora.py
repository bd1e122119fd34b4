"""Real text that every Python brings along."""

from __future__ import annotations

import sysconfig
import tokenize
from pathlib import Path
from typing import Literal

# Not in every build of Python, or not text that people wrote.
_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "site-packages"}
_LEFT_OUT |= {"dist-packages", "ensurepip", "pydoc_data", "__pycache__"}


def stdlib_text(kind: Literal["sources", "topics"] = "topics") -> list[str]:
    """Text of the standard library of the running Python: the same list for the same version.

    Args:
        kind: "topics": the entries of `pydoc_data.topics` (prose and grammar; Python 3.11: 79
            texts, 465,000 characters), in their own order. "sources": the library's .py files
            without its tests, ordered by path (Python 3.11: 573 files, 10 million characters).

    Raises:
        ValueError: another kind.
        FileNotFoundError: this Python comes without that part of its library.

    Cost: "sources" reads every file, about half a second.
    """
    if kind == "topics":
        try:
            from pydoc_data.topics import topics  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise FileNotFoundError("this Python comes without pydoc_data.topics") from error
        return list(topics.values())
    if kind != "sources":
        raise ValueError(f"kind must be 'sources' or 'topics'; got {kind!r}")
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in library.rglob("*.py")
        if not _LEFT_OUT.intersection(path.relative_to(library).parts)
        and not str(path.relative_to(library)).startswith(("_sysconfigdata", "config-"))  # built
    )
    if not files:
        raise FileNotFoundError(f"the standard library's sources are not in {library}")
    texts = []
    for path in files:
        with tokenize.open(path) as file:  # heeds each file's declared encoding
            texts.append(file.read())
    return texts
