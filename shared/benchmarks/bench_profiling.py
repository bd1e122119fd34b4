"""profiling: cost of a span, honesty of `compare`'s interval, import times of septet_shared.

Span: nanoseconds of `with span(...)` beyond an empty loop, nothing recording and inside a trace.
Interval: how many of 100 comparisons of a function with itself hold 1.0 in their 99 % interval.
Import: seconds that a fresh process needs for one module after `import torch`.
"""

import json
import math
import pkgutil
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import torch

import septet_shared
from septet_shared.profiling import bench_row, compare, span, trace

# One process imports torch; its forks, each with nothing of ours loaded, import one module each.
IMPORTS = """
import importlib, json, os, sys, time, torch

def seconds(module):
    read, write = os.pipe()
    if not os.fork():
        began = time.perf_counter()
        try:
            importlib.import_module(module)
            os.write(write, str(time.perf_counter() - began).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return float(pipe.read() or "nan")

print(json.dumps({m: [seconds(m) for _ in range(7)] for m in sys.argv[1:]}))
"""


def row(
    name: str, variant: str, value: float, unit: str, notes: str, must: str | None
) -> dict[str, Any]:
    """A row of `bench --json`, without a peer."""
    return bench_row(name, variant, value, unit, must=must, notes=notes)


def span_ns() -> float:
    """Nanoseconds of one span: the least of 30 loops, less the least of an empty loop."""

    def spans() -> None:
        for _ in range(5000):
            with span("moe.dispatch", bytes=1, stream="comm"):
                pass

    def empty() -> None:
        for _ in range(5000):
            pass

    least = [min(timeit.repeat(loop, number=1, repeat=30)) for loop in (spans, empty)]
    return (least[0] - least[1]) / 5000 * 1e9


def held(fn: Callable[[], object]) -> int:
    """How many of 100 comparisons of fn with itself hold 1.0."""
    found = (compare({"a": fn, "b": fn}).ratio("b", "a") for _ in range(100))
    return sum(ratio.low <= 1 <= ratio.high for ratio in found)


def import_s(modules: list[str]) -> dict[str, float]:
    """Median seconds to import each module after torch, of 7 processes; NaN where it fails."""
    command = [sys.executable, "-c", IMPORTS, *modules]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=300)
    return {m: statistics.median(times) for m, times in json.loads(done.stdout).items()}


def run() -> Iterator[dict[str, Any]]:
    """Rows of span cost, of interval honesty for three workloads, of each module's import."""
    yield row("span", "nothing recording", span_ns(), "ns", "least of 30 loops of 5,000", None)
    with trace():
        recorded = span_ns()
    yield row("span", "inside a trace", recorded, "ns", "least of 30 loops of 5,000", None)

    x = torch.randn(256, 256)
    workloads: dict[str, Callable[[], object]] = {
        "matrix product, 256": lambda: torch.mm(x, x),
        "sort of 20,000": lambda: torch.sort(x.flatten()[:20_000]).values,
        "Python loop": lambda: sum(i * i for i in range(2000)),
    }
    for variant, fn in workloads.items():
        notes = "comparisons of a function with itself, 7 rounds each, 99 % interval"
        yield row("self-comparison holds 1.0", variant, held(fn), "of 100", notes, ">= 90")

    shared = sorted(m.name for m in pkgutil.iter_modules(septet_shared.__path__))
    modules = [f"septet_shared.{name}" for name in shared if not name.startswith("_")]
    for module, seconds in import_s(modules).items():
        value, notes = seconds, "beyond torch, median of 7 processes"
        if math.isnan(seconds):
            value, notes = None, "the import fails"
        yield row("import", module, value, "s", notes, "<= 0.1")
