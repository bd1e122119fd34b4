"""What this machine and this installation offer, and what to install for more."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from septet_shared.ranks import Ranks


def machine() -> dict[str, Any]:
    """Processor, cores, memory in GB (1e9 bytes), operating system and GPUs of this machine."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
        model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    except OSError:
        model = None
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": _cores(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": [device["model"] for device in _gpus()],
    }


def versions(package: str | None = None) -> dict[str, str]:
    """Versions of Python, torch, triton, numpy, septet-shared and of the system `package`.

    "absent" for what is not installed.
    """
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy", "septet-shared"):
        found[name] = _version(name, name.replace("-", "_"))
    if package:
        found[package] = _version(distribution_name(package), package)
    return found


def distribution_name(package: str) -> str:
    """Name of the distribution whose command is `package`'s (they may differ: `sven-tgnn`, `sven`).

    `package` itself when none is installed.
    """
    for point in metadata.entry_points(group="console_scripts"):
        if point.module.partition(".")[0] == package and point.dist:
            return point.dist.name
    return package


def doctor(package: str) -> dict[str, Any]:
    """Versions, compiler, devices, backends and advice of the system `package`.

    `backends` maps a name to "available" or to why it is not. A system that has others than
    these three offers `backends() -> dict[str, str]` in its package. The rates are measured now,
    on the device that the system would use, as busy as it is. Cost: about 3 s and 256 MiB.
    """
    from septet_shared import native
    from septet_shared.ranks import Ranks

    here = Ranks.world()
    compiler = native.available()
    offered = getattr(importlib.import_module(package), "backends", None)
    advice = []
    if not compiler and os.environ.get("SEPTET_CXX"):
        advice.append(f"SEPTET_CXX must name a C++ compiler; got {os.environ['SEPTET_CXX']!r}")
    elif not compiler:
        advice.append("a C++ compiler (Debian: apt install g++), for kernels on the CPU")
    if not find_spec("triton") and sys.platform == "linux":
        advice.append("pip install triton, to run kernels on a GPU and to compile them ahead")
    if Path("/proc/driver/nvidia/version").exists() and not _gpus():
        advice.append("a CUDA build of torch: this machine has an NVIDIA driver that torch ignores")
    facts = machine()
    cpu = {"name": "cpu", "model": facts["cpu"], "cores": facts["cores"]}
    devices = [{**cpu, "memory_gb": facts["memory_gb"]}, *_gpus()]
    devices[1 if here.device.type == "cuda" else 0] |= _rates(here)
    return {
        "versions": versions(package),
        "compiler": compiler,
        "devices": devices,
        "backends": offered() if offered else _backends(compiler),
        "advice": advice + _missing_extras(distribution_name(package)),
    }


def _rates(here: Ranks) -> dict[str, float]:
    from septet_shared.profiling import calibrate

    profile = calibrate(here, seconds=2)
    return {
        "gemm_float32_gflop_s": round(profile.rate("gemm:float32", 2e9) / 1e9, 1),
        "memory_gb_s": round(profile.rate("memory", 2e8) / 1e9, 1),
    }


def _backends(compiler: str | None) -> dict[str, str]:
    if not find_spec("triton"):
        triton = "triton is not installed"
    elif not _gpus():
        triton = "no CUDA device (kernels run in Triton's interpreter and compile ahead of time)"
    else:
        triton = "available"
    cpu = "available" if compiler else "no C++ compiler; torch operators are used instead"
    return {"reference": "available", "cpu": cpu, "gpu": triton}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": f"cuda:{index}",
                "model": device.name,
                "memory_gb": round(device.total_memory / 1e9, 1),
                "capability": f"{device.major}.{device.minor}",
            }
        )
    return found


def _version(distribution: str, module: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # run from a checkout that is on the path, say
        if not find_spec(module):
            return "absent"
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))


def _missing_extras(distribution: str) -> list[str]:
    """For each extra of a distribution that lacks something here, the command that brings it."""
    try:
        requires = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    lacking: dict[str, list[str]] = {}
    useless = {"test"} if _gpus() else {"test", "cuda"}
    for requirement in requires:
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if extra and extra[1] not in useless and name and not _is_installed(name[0]):
            lacking.setdefault(extra[1], []).append(name[0])
    return [
        f"pip install '{distribution}[{extra}]' brings {', '.join(names)}"
        for extra, names in lacking.items()
    ]


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
