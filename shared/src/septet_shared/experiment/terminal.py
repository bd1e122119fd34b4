"""What a command shows on standard error: progress, and one line when the user is mistaken."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, overload

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
USER_ERRORS = (ValueError, OSError, ModuleNotFoundError)
_shown: Progress | None = None  # one display for all nested bars: a terminal has one cursor


@overload
def progress(work: int, description: str) -> Iterator[int]: ...
@overload
def progress(work: Iterable[T], description: str) -> Iterator[T]: ...
def progress(work: int | Iterable[T], description: str) -> Iterator[int] | Iterator[T]:
    """The items of `work` (or `range(work)`), with a bar on standard error while they are consumed.

    Nested bars share one display. Silent when standard error is no terminal, in child processes
    and in every rank of torchrun but the first.
    """
    items: Iterable[int] | Iterable[T] = range(work) if isinstance(work, int) else work
    return _with_bar(items, description) if _is_watched() else iter(items)  # type: ignore[return-value]


def _is_watched() -> bool:
    first = os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None
    return first and sys.stderr.isatty()


def _with_bar(items: Iterable[T], description: str) -> Iterator[T]:
    global _shown
    display, outermost = _shown or _display(), _shown is None
    if outermost:
        _shown = display
        display.start()
    bar = display.add_task(description, total=len(items) if isinstance(items, Sized) else None)
    try:
        for item in items:
            yield item
            display.advance(bar)
    finally:
        display.remove_task(bar)
        if outermost:
            display.stop()
            _shown = None


def _display() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


@contextmanager
def user_errors() -> Iterator[None]:
    """A user's mistake (ValueError, OSError, ModuleNotFoundError) as its red text and exit code 2.

    A context manager and a decorator for the verbs of a command (under `@app.command()`); other
    errors are ours and keep their traceback.
    """
    try:
        yield
    except USER_ERRORS as error:
        say(str(error) or type(error).__name__, style="bold red")
        raise SystemExit(2) from error


def say(text: str, style: str = "") -> None:
    """`text` on standard error, as it is: its last line may be a command to copy."""
    from rich.console import Console

    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)
