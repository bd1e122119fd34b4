"""Everything that wants a GPU, in under ten minutes, as JSON (`make gpu`).

    python tools/gpu_check.py --out out/gpu.json

Runs the tests marked `gpu`, compiles every kernel, and runs every benchmark that the time left
allows. It works straight from the checkout: nothing of ours needs to be installed, and nothing is
fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 570.0


@dataclass
class Outcome:
    """What one step left: `state` is "passed", "failed", "out of time" or "nothing to run"."""

    step: str
    state: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    tail: str = ""  # the end of what it printed, unless it passed


def run_step(step: str, command: list[str], limit_s: float, rows: bool = False) -> Outcome:
    """Run one command from the root for at most `limit_s`; with `rows` it prints a JSON list."""
    if limit_s <= 0:
        return Outcome(step, "out of time")
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=limit_s
        )
        state, output, errors = "passed", done.stdout, done.stderr
        if done.returncode:
            state = "failed"
    except subprocess.TimeoutExpired as stopped:
        state = "out of time"
        output, errors = _text(stopped.stdout), _text(stopped.stderr)
    outcome = Outcome(step, state, time.monotonic() - started)
    if rows:
        try:
            outcome.rows = json.loads(output)
        except json.JSONDecodeError:
            outcome.state = state if state != "passed" else "failed"
    if outcome.state != "passed":
        outcome.tail = (output + errors)[-3000:]
    return outcome


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def environment() -> dict[str, str]:
    """The caller's, with our sources first on the path and no interpreter for kernels."""
    sources = [str(ROOT / "shared" / "src"), *map(str, sorted(ROOT.glob("packages/*/src")))]
    found = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    before = [p for p in found.get("PYTHONPATH", "").split(os.pathsep) if p]
    found["PYTHONPATH"] = os.pathsep.join([*sources, *before])
    found.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns at each launch
    return found


def gpu_test_files() -> list[str]:
    """Test files that hold a test marked `gpu`; others may import what this machine lacks."""
    files = [*ROOT.glob("shared/tests/test_*.py"), *ROOT.glob("packages/*/tests/test_*.py")]
    return [str(f.relative_to(ROOT)) for f in sorted(files) if "mark.gpu" in f.read_text()]


def steps(limit_s: float) -> Iterator[Outcome]:
    """All steps in order of worth, within `limit_s` seconds together."""
    end = time.monotonic() + limit_s

    def left(most_s: float) -> float:
        return min(most_s, end - time.monotonic())

    python = sys.executable
    files = gpu_test_files()
    if files:
        command = [python, "-m", "pytest", "-q", "-m", "gpu", *files]
        yield run_step("tests", command, left(240))
    else:
        yield Outcome("tests", "nothing to run")
    command = [python, "tools/compile_kernels.py", "--json"]
    yield run_step("kernels", command, left(120), rows=True)
    packages = ["shared", *sorted(p.parent.name for p in ROOT.glob("packages/*/benchmarks"))]
    for package in packages:
        command = [python, "tools/bench.py", package, "--json"]
        yield run_step(f"bench {package}", command, left(180), rows=True)


def machine() -> dict[str, Any]:
    """The device, this machine, and the versions that matter to it."""
    import torch

    sys.path[:0] = environment()["PYTHONPATH"].split(os.pathsep)
    from septet_shared import experiment

    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "memory_bytes": device.total_memory,
        "multiprocessors": device.multi_processor_count,
        "cuda": torch.version.cuda,
        **experiment.machine(),
        **experiment.versions(),
    }


def main() -> int:
    """Exit code: 0; 1 when a step failed; 2 when there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu.json")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for everything together")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: `make test` checks what a CPU can check", file=sys.stderr)
        return 2
    record: dict[str, Any] = {"date": time.time(), "machine": machine(), "steps": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for outcome in steps(options.limit_s):
        record["steps"].append(asdict(outcome))
        print(f"{outcome.step}: {outcome.state}, {outcome.seconds:.0f} s, {len(outcome.rows)} rows")
        if outcome.tail:
            print(outcome.tail)
        # After each step: a machine that is taken away leaves what was found until then.
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1))
        partial.replace(options.out)
    return 1 if any(step["state"] == "failed" for step in record["steps"]) else 0


if __name__ == "__main__":
    sys.exit(main())
