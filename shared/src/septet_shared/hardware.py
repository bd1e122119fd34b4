"""What a machine can do, in numbers: profiles of clusters and GPUs, shipped, loaded or measured.

A profile holds rates per device (one rank drives one device), each with its source. The simulator
(`streams`) and the systems' planners ask it how long work takes. Amounts of work are FLOP for
`gemm:<dtype>` and bytes for `link:<class>`, `copy` and `memory`.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from septet_shared._whole_files import write_whole

if TYPE_CHECKING:
    import torch

    from septet_shared.ranks import Ranks

    Rate = float | tuple[tuple[float, float], ...]

SHIPPED = ("dgx-a100-8x8", "v100-4x4", "pcie-4x8", "rtx3080", "h100", "h200", "cpu-2core")
_FOLDER = Path(__file__).with_name("hardware_profiles")


@dataclass(frozen=True)
class Link:
    """One class of link: latency and rate of one device's end of it.

    latency_s: seconds before the first byte, >= 0. bytes_s: bytes/s, a number or piecewise
    [(bytes, bytes/s), ...]. low, high: the band in which the true rate lies, or None where the
    rate is known. Raises ValueError naming field, rule and value.
    """

    latency_s: float
    bytes_s: Rate
    low: Rate | None = None
    high: Rate | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency_s", _seconds("latency_s", self.latency_s))
        for name in ("bytes_s", "low", "high"):
            value = getattr(self, name)
            if name == "bytes_s" or value is not None:
                object.__setattr__(self, name, _rate(name, value))
        rates = [r for r in (self.low, self.bytes_s, self.high) if r is not None]
        works = [w for r in rates if not isinstance(r, float) for w, _ in r] or [0.0]
        for work in works:
            at = [rate_at(r, work) for r in rates]
            if at != sorted(at):
                raise ValueError(f"low <= bytes_s <= high must hold; got {at} at {work:g} bytes")


@dataclass(frozen=True)
class HardwareProfile:
    """The rates of one device of a machine or cluster, and how many of them there are.

    gemm_flops: FLOP/s by dtype ("float32", "tf32", "bfloat16", ...). copy_bytes_s: bytes/s of an
    offload copy (device to host). memory_bytes_s: bytes/s read plus written in device memory.
    link: `Link` by class: "nvlink", "nvlink_small" (32-byte random reads), "hbm_small", "pcie",
    "nic". interference: {(kind, frozenset of other kinds): factor in (0, 1]} or None. source: where
    each constant comes from, by dotted field name. launch_s, host_sync_s: seconds of a kernel
    launch and of a host synchronisation.

    Every rate is a number or piecewise [(work, rate), ...], linear between the points and constant
    outside. A number in place of gemm_flops holds for all dtypes, a number in place of a link or of
    all links has no latency. Raises ValueError naming field, rule and value.
    """

    name: str
    gemm_flops: dict[str, Rate]
    copy_bytes_s: Rate
    memory_bytes_s: Rate
    link: dict[str, Link]
    interference: dict[tuple[str, frozenset[str]], float] | None = None
    source: dict[str, str] = field(default_factory=dict)
    sm_count: int | None = None
    shared_bytes_per_block: int | None = None
    l2_bytes: int | None = None
    machines: int = 1
    gpus_per_machine: int = 1
    launch_s: float = 0.0
    host_sync_s: float = 0.0

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a non-empty string; got {self.name!r}")
        gemm = self.gemm_flops if isinstance(self.gemm_flops, Mapping) else {"any": self.gemm_flops}
        put("gemm_flops", {k: _rate(f"gemm_flops[{k!r}]", v) for k, v in gemm.items()})
        for name in ("copy_bytes_s", "memory_bytes_s"):
            put(name, _rate(name, getattr(self, name)))
        link = self.link if isinstance(self.link, Mapping) else {"any": self.link}
        put("link", {k: _link(f"link[{k!r}]", v) for k, v in link.items()})
        if self.interference is not None:
            put("interference", _interference(self.interference))
        for name in ("launch_s", "host_sync_s"):
            put(name, _seconds(name, getattr(self, name)))
        for name in ("machines", "gpus_per_machine", "sm_count", "shared_bytes_per_block"):
            _count(name, getattr(self, name), optional=not name.endswith(("machines", "machine")))
        _count("l2_bytes", self.l2_bytes, optional=True)
        if not isinstance(self.source, Mapping):
            raise ValueError(f"source must map field names to text; got {self.source!r}")

    def _lookup(self, table: Mapping[str, Any], kind: str, word: str) -> Any:
        key = kind.partition(":")[2]
        found = table.get(key, table.get("any"))
        if found is None:
            known = ", ".join(sorted(table)) or "none"
            raise ValueError(f"profile {self.name!r} has no {word} {key!r} (it has: {known})")
        return found

    def rate(self, kind: str, work: float) -> float:
        """FLOP/s or bytes/s at which one op of this kind and amount of work runs alone.

        Raises ValueError for a kind that is not link:<class>, gemm:<dtype>, copy or memory, or
        that this profile has no rate for.
        """
        if kind.startswith("link:"):
            return rate_at(self._lookup(self.link, kind, "link").bytes_s, work)
        if kind.startswith("gemm:"):
            return rate_at(self._lookup(self.gemm_flops, kind, "gemm rate for"), work)
        check_kind(kind)
        return rate_at(self.copy_bytes_s if kind == "copy" else self.memory_bytes_s, work)

    def latency_s(self, kind: str) -> float:
        """Seconds before the first byte of a link; 0 for the other kinds. Raises as `rate`."""
        if kind.startswith("link:"):
            latency: float = self._lookup(self.link, kind, "link").latency_s
            return latency
        self.rate(kind, 0.0)
        return 0.0

    def seconds(self, kind: str, work: float) -> float:
        """Seconds that one op of this kind and amount of work takes alone. Raises as `rate`."""
        return self.latency_s(kind) + work / self.rate(kind, work)

    def factor(self, kind: str, others: Iterable[str]) -> float:
        """Share of its rate, in (0, 1], that `kind` keeps while the other kinds run beside it.

        An entry of the table applies when its own kind is `kind` and each of its others runs; both
        may be a whole kind ("gemm:tf32") or a family ("gemm"). Entries that name all that runs win
        over entries that name a part of it; among equals the smallest counts; without one it is 1.
        """
        running = frozenset(others)
        partial, complete = 1.0, math.inf
        for (who, beside), share in (self.interference or {}).items():
            applies = _names(who, kind) and all(any(_names(b, o) for o in running) for b in beside)
            if applies and all(any(_names(b, o) for b in beside) for o in running):
                complete = min(complete, share)
            elif applies:
                partial = min(partial, share)
        return complete if complete < math.inf else partial

    def bound(self, end: Literal["low", "high"]) -> HardwareProfile:
        """This profile with every link that has a band at the low or high end of it."""
        if end not in ("low", "high"):
            raise ValueError(f"end must be 'low' or 'high'; got {end!r}")
        links = {k: replace(v, bytes_s=getattr(v, end) or v.bytes_s) for k, v in self.link.items()}
        links = {k: replace(v, low=None, high=None) for k, v in links.items()}
        return replace(self, link=links)

    @classmethod
    def load(cls, name_or_path: str | Path) -> HardwareProfile:
        """The shipped profile of that name, or the one saved at that path (a .json file).

        Raises ValueError naming file, field, rule and value; FileNotFoundError when neither exists.
        """
        shipped = str(name_or_path) in SHIPPED
        path = _FOLDER / f"{name_or_path}.json" if shipped else Path(name_or_path)
        if not path.is_file():
            raise FileNotFoundError(
                f"name_or_path must be one of {', '.join(SHIPPED)} or a profile file; "
                f"got {str(name_or_path)!r}"
            )
        try:
            data = json.loads(path.read_text("utf-8"))
            return cls(**_checked_fields(data))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON, whole or not at all. Raises OSError."""
        data = asdict(self)
        if self.interference is not None:
            data["interference"] = [
                {"kind": kind, "with": sorted(others), "factor": factor}
                for (kind, others), factor in self.interference.items()
            ]
        write_whole(path, json.dumps(data, indent=2) + "\n")


def check_kind(kind: str) -> None:
    """Raises ValueError unless kind is link:<class>, gemm:<dtype>, copy or memory."""
    family, _, detail = kind.partition(":")
    if not (kind in ("copy", "memory") or (family in ("link", "gemm") and detail)):
        raise ValueError(f"kind must be link:<class>, gemm:<dtype>, copy or memory; got {kind!r}")


def rate_at(rate: Rate, work: float) -> float:
    """The rate for this amount of work: the number, or linear between the points around it."""
    if isinstance(rate, float):
        return rate
    i = bisect_left(rate, (work,))
    if i == 0 or i == len(rate):
        return rate[min(i, len(rate) - 1)][1]
    (w0, r0), (w1, r1) = rate[i - 1], rate[i]
    return r0 + (r1 - r0) * (work - w0) / (w1 - w0)


def _number(name: str, value: object, rule: str, ok: Callable[[float], bool]) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number {rule}; got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and ok(number)):
        raise ValueError(f"{name} must be finite and {rule}; got {value!r}")
    return number


def _seconds(name: str, value: object) -> float:
    return _number(name, value, ">= 0", lambda v: v >= 0)


def _count(name: str, value: object, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1; got {value!r}")


def _rate(name: str, value: Any) -> Rate:
    if isinstance(value, Real):
        return _number(name, value, "> 0", lambda v: v > 0)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a number > 0 or [(work, rate), ...]; got {value!r}")
    points = [tuple(p) if isinstance(p, Iterable) and not isinstance(p, str) else () for p in value]
    if not points or any(len(p) != 2 for p in points):
        raise ValueError(f"{name} must hold one or more (work, rate) pairs; got {value!r}")
    checked = tuple(
        (
            _seconds(f"work of {name}", work),
            _number(f"rate of {name}", rate, "> 0", lambda v: v > 0),
        )
        for work, rate in points
    )
    if any(a >= b for (a, _), (b, _) in itertools.pairwise(checked)):
        raise ValueError(f"{name} must have points of increasing work; got {value!r}")
    return checked


def _link(name: str, value: Any) -> Link:
    if isinstance(value, Link):
        return value
    if isinstance(value, Real):
        return Link(0.0, _rate(name, value))
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a Link or a number > 0; got {value!r}")
    try:
        return Link(**value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def _interference(table: Any) -> dict[tuple[str, frozenset[str]], float]:
    if not isinstance(table, Mapping):  # as saved
        try:
            table = {(entry["kind"], frozenset(entry["with"])): entry["factor"] for entry in table}
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"interference must map (kind, frozenset of other kinds) to a factor; got {table!r}"
            ) from error
    checked = {}
    for key, factor in table.items():
        if not (
            isinstance(key, tuple) and len(key) == 2 and key[1] and not isinstance(key[1], str)
        ):
            raise ValueError(
                f"interference must be keyed by (kind, frozenset of other kinds); got {key!r}"
            )
        kind, others = key[0], frozenset(key[1])
        for each in (kind, *others):
            if each not in ("link", "gemm"):
                check_kind(each)
        share = _number(f"interference[{key!r}]", factor, "in (0, 1]", lambda v: 0 < v <= 1)
        checked[kind, others] = share
    return checked


def _names(pattern: str, kind: str) -> bool:
    return pattern in (kind, kind.partition(":")[0])


def _checked_fields(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"a profile is a JSON object; got {type(data).__name__}")
    known = [f.name for f in fields(HardwareProfile)]
    for name in data:
        if name not in known:
            raise ValueError(f"field {name!r} is unknown; the fields are {', '.join(known)}")
    return data


def calibrate(ranks: Ranks, *, seconds: float = 20) -> HardwareProfile:
    """A profile measured on the devices of these ranks, the same on every rank. Collective.

    All ranks measure at the same time, so what they share (memory, links) is shared in the
    figures too; they are medians over rounds and then over ranks. gemm_flops: square products of
    rising size, piecewise, for float32 and bfloat16 (on CUDA also tf32 and float16). link: the
    uneven all-to-all within machines ("nvlink") and across them ("nic"), least squares of time
    against the bytes that a rank sends to others; a class nobody can measure is absent. The
    interference table is None. Raises ValueError when seconds is not > 0, and what `ranks` raises.

    Cost: about `seconds` at most, 256 MiB a rank. The CUDA branches are not run here; what they
    read from the driver is tested with a fake one.
    """
    limit = _number("seconds", seconds, "> 0", lambda v: v > 0)
    import torch

    device = ranks.device
    bench = _Bench(ranks)
    gemm: dict[str, Rate] = {}
    names = ("float32", "bfloat16") + (("tf32", "float16") if device.type == "cuda" else ())
    sizes = (64, 128, 256, 512, 1024) + ((2048, 4096, 8192) if device.type == "cuda" else ())
    for name in names:
        gemm[name] = _gemm_rate(bench, name, sizes, limit * 0.5 / len(names))
    rows = torch.ones(2**25, device=device)  # 128 MiB: beyond the caches
    other = torch.empty_like(rows)
    memory = 2 * rows.nbytes / bench.median_s(lambda: other.copy_(rows), limit * 0.05)
    copy = memory / 2
    if device.type == "cuda":
        host = torch.empty(rows.shape, pin_memory=True)
        seconds_a_copy = bench.median_s(lambda: host.copy_(rows, non_blocking=True), limit * 0.05)
        copy = rows.nbytes / seconds_a_copy
    inside, across = ranks.by_machine()
    link = {}
    for name, group in (("nvlink", inside), ("nic", across)):
        own = _link_points(group, limit * 0.18) if group.size > 1 else None
        found = [points for points in ranks.all_gather_object(own) if points]
        if found:
            link[name] = _fit_link([point for points in found for point in points])
    how = f"measured by calibrate() on {ranks.size} rank(s), {torch.get_num_threads()} thread(s)"
    how += f", {device.type}, torch {torch.__version__}"
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        facts = _cuda_facts(bench, device, rows)
    profile = HardwareProfile(
        name=f"calibrated-{device.type}",
        gemm_flops=gemm,
        copy_bytes_s=bench.agreed(copy),
        memory_bytes_s=bench.agreed(memory),
        link=link,
        source=dict.fromkeys(["gemm_flops", "copy_bytes_s", "memory_bytes_s", "link", *facts], how),
        machines=across.size,
        gpus_per_machine=inside.size,
        **facts,
    )
    shared: HardwareProfile = ranks.all_gather_object(profile)[0]
    return shared


class _Bench:
    """Timing loops that all ranks run in step: same rounds everywhere, figures by agreement."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def settle(self) -> None:
        if self.ranks.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.ranks.device)

    def agreed(self, value: float) -> float:
        """The median of the ranks' values."""
        values: list[float] = self.ranks.all_gather_object(value)
        return statistics.median(values)

    def median_s(self, fn: Callable[[], object], limit_s: float, rounds: int = 5) -> float:
        """Median seconds of one call, from rounds of so many calls that the time limit is kept."""
        fn()
        self.settle()
        self.ranks.barrier("calibrate")
        began = time.perf_counter()
        fn()
        self.settle()
        once = max(time.perf_counter() - began, 1e-7)
        calls = max(1, int(min(limit_s, 0.05 * rounds) / rounds / once))
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(calls):
                fn()
            self.settle()
            took.append((time.perf_counter() - began) / calls)
        return statistics.median(took)


def _gemm_rate(bench: _Bench, name: str, sizes: tuple[int, ...], limit_s: float) -> Rate:
    import torch

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    points: list[tuple[float, float]] = []
    began = time.perf_counter()
    try:
        if bench.ranks.device.type == "cuda":
            matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
        for n in sizes:
            a = torch.randn(n, n, device=bench.ranks.device).to(dtype)
            b, out = a.clone(), torch.empty_like(a)
            took = bench.median_s(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), limit_s / 5)  # type: ignore[misc]
            points.append((2.0 * n**3, bench.agreed(2.0 * n**3 / took)))
            # the next size costs about 8 * 7 calls; every rank must stop at the same one
            spent = max(bench.ranks.all_gather_object(time.perf_counter() - began + 56 * took))
            if spent > limit_s:
                break
    finally:
        if bench.ranks.device.type == "cuda":
            matmul.fp32_precision = before
    return tuple(points)


def _link_points(group: Ranks, limit_s: float) -> list[tuple[float, float]]:
    """(bytes sent to other ranks, seconds) of all-to-alls of rising size in this group."""
    import torch

    bench = _Bench(group)
    points: list[tuple[float, float]] = []
    began = time.perf_counter()
    for exponent in range(0, 19, 2):  # rows of 64 bytes, to all peers together: 64 B to 16 MiB
        counts = [-(-(2**exponent) // (group.size - 1))] * group.size
        counts[group.rank] = 0
        rows = torch.ones(sum(counts), 16, device=group.device)
        took = []
        for _ in range(6):
            group.barrier("calibrate")
            bench.settle()
            start = time.perf_counter()
            group.all_to_all_rows(rows, counts, counts)
            bench.settle()
            took.append(time.perf_counter() - start)
        # the exchange ends when its slowest rank has ended; the first round is warm-up
        slowest = max(group.all_gather_object(statistics.median(took[1:])))
        points.append((float(rows.nbytes), slowest))
        spent = max(group.all_gather_object(time.perf_counter() - began))
        if spent + 7 * 4 * slowest > limit_s:
            break
    return points


def _fit_link(points: list[tuple[float, float]]) -> Link:
    """Latency and rate from least squares of relative error of time against bytes, both >= 0."""
    import numpy as np

    size, took = np.array(points).T
    basis = np.stack([1 / took, size / took], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(basis, np.ones(len(took)), rcond=None)
    if latency < 0:
        latency, per_byte = 0.0, float((basis[:, 1].sum()) / (basis[:, 1] ** 2).sum())
    if per_byte <= 0:  # nothing but latency was seen: the largest exchange bounds the rate
        latency, per_byte = float(took.min()), float(took[size.argmax()] / size.max())
    return Link(float(latency), float(1 / per_byte))


def _cuda_facts(bench: _Bench, device: torch.device, x: torch.Tensor) -> dict[str, Any]:
    import torch

    props = torch.cuda.get_device_properties(device)
    one = x[:1]

    def launches() -> None:
        for _ in range(100):
            one.add_(1)

    def synchronised() -> None:
        one.add_(1)
        torch.cuda.synchronize(device)

    launch = bench.median_s(launches, 0.2) / 100
    block = getattr(props, "shared_memory_per_block_optin", props.shared_memory_per_block)
    return {
        "sm_count": props.multi_processor_count,
        "l2_bytes": props.L2_cache_size,
        "shared_bytes_per_block": block,
        "launch_s": bench.agreed(launch),
        "host_sync_s": max(0.0, bench.agreed(bench.median_s(synchronised, 0.2)) - launch),
    }
