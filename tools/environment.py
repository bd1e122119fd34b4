"""The Python environment of this checkout: `.venv`, made when it is missing or stale.

    python3 tools/environment.py                    set up, print the interpreter
    python3 tools/environment.py run SCRIPT ARGS    set up, then run a script (or -m MODULE) in it
    python3 tools/environment.py install SYSTEM     one system into the active environment

Chosen in this order: the interpreter that PYTHON names; the active python3 when it has a CUDA
build of torch that sees a GPU; `.venv`, with the versions of ci/constraints-cpu.txt. In the first
two nothing is installed: the source folders are put on PYTHONPATH.
Standard library only, and readable by old Pythons up to the check of the version.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "Septet needs Python 3.11 or newer; python3 is {}.{} ({}). Install a newer one and put it "
        "first on PATH, or name it: make test PYTHON=/path/to/python".format(
            sys.version_info[0], sys.version_info[1], sys.executable
        )
    )

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "ci" / "constraints-cpu.txt"
NO_DEPS = ROOT / "ci" / "no-deps.txt"
PHASE_TIMEOUT_S = 45 * 60.0
CPU_TORCH_ADVICE = """\
pip found only a CUDA build of torch (several GB), which is refused on a machine without a GPU.
Let pip see PyTorch's CPU wheels as well: pytorch.org, "Get started", compute platform "CPU" names
their index. Put it into your pip configuration or into PIP_EXTRA_INDEX_URL (a folder of wheels:
PIP_FIND_LINKS) and run the same command again. With a GPU, do not build .venv: activate an
environment whose torch sees the GPU, or name its interpreter with PYTHON=."""


def members(root: Path = ROOT) -> list[Path]:
    """Folders of the distributions: shared first, then the systems by name."""
    return [root / "shared", *sorted(p.parent for p in root.glob("packages/[!.]*/pyproject.toml"))]


def source_path(root: Path = ROOT) -> str:
    """A PYTHONPATH on which every distribution of the checkout is importable."""
    return os.pathsep.join(str(member / "src") for member in members(root))


def interpreter() -> tuple[str, dict[str, str]]:
    """The interpreter that runs this checkout and its environment variables; sets `.venv` up.

    Raises:
        SystemExit: PYTHON names no program, or the set-up failed (with the reason and advice).

    Cost: milliseconds when `.venv` is up to date; one import of torch where there is a GPU.
    """
    variables = dict(os.environ)
    asked = os.environ.get("PYTHON")
    python = shutil.which(asked) if asked else _python_with_cuda()
    if asked and python is None:
        sys.exit(f"PYTHON must name a Python interpreter; got {asked!r}, which is no program")
    if python is not None:
        paths = [source_path(), os.environ.get("PYTHONPATH")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return python, variables
    ensure_venv()
    variables |= pip_variables() | {"VIRTUAL_ENV": str(VENV)}
    variables["PATH"] = os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", os.defpath)])
    return str(_python()), variables


def pip_variables() -> dict[str, str]:
    """Variables under which pip holds to the constraints, in isolated builds too."""
    uri = CONSTRAINTS.as_uri()  # pip splits the value at spaces, which a URI does not have
    return {
        "PIP_CONSTRAINT": uri,
        "PIP_BUILD_CONSTRAINT": uri,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }


def _python_with_cuda() -> str | None:
    """The active python3 when its torch sees a GPU; None at once on a machine without a driver."""
    if not (Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi")):
        return None
    python = shutil.which("python3")
    if python is None:
        return None
    probe = (
        "import importlib.util as u, sys\n"
        "sys.exit(1) if sys.version_info < (3, 11) or u.find_spec('torch') is None else None\n"
        "import torch\n"
        "sys.exit(not torch.cuda.is_available())"
    )
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        found = subprocess.run([python, "-c", probe], capture_output=True, timeout=120, check=False)
        return python if found.returncode == 0 else None
    return None


# --- .venv: a key file says what it was made from, written only when everything is in ----------


def _digest(*parts: str | Path) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _wanted_keys() -> list[str]:
    """[what asks for a new environment, what asks for an update, then the members' names]."""
    version = f"{sys.implementation.cache_tag} {os.uname().machine}"
    projects = [folder / "pyproject.toml" for folder in [ROOT, *members()]]
    anew = _digest(version, str(ROOT), CONSTRAINTS, NO_DEPS)
    return [anew, _digest(*projects), *(folder.name for folder in members())]


def _python() -> Path:
    return VENV / "bin" / "python"


def _keys() -> list[str]:
    try:
        return (VENV / "septet-key").read_text().split()
    except OSError:
        return []


def _is_current() -> bool:
    return _keys() == _wanted_keys() and _python().exists()


def ensure_venv() -> None:
    """Makes `.venv` hold what the constraints and all pyproject files ask for.

    Made anew when the constraints, the Python version or the checkout's place changed, a system was
    removed, or an earlier set-up did not finish; updated in place when a pyproject.toml changed.

    Raises:
        SystemExit: a phase failed, or another set-up held the lock for too long.
    """
    if _is_current():
        return
    with _only_set_up():
        if _is_current():  # made by the one that held the lock
            return
        begun = time.monotonic()
        wanted = _wanted_keys()
        old = _keys()
        if old[:1] == wanted[:1] and set(old[2:]) <= set(wanted[2:]) and _python().exists():
            (VENV / "septet-key").unlink()
            (VENV / "setup.log").unlink(missing_ok=True)
            _say("[1/3] .venv is there; a pyproject.toml changed")
        else:
            _create_venv()
        _install_members()
        left_out = _install_without_dependencies()
        partial = VENV / "septet-key.partial"
        partial.write_text("\n".join(wanted))
        partial.replace(VENV / "septet-key")
        _say(f"ready after {time.monotonic() - begun:.0f} s (log: .venv/setup.log)")
        for line in left_out:
            _say(f"without {line}: what needs it will say so. Try later: {pip_hint(line)}")


def pip_hint(requirement: str) -> str:
    """The command that brings a line of ci/no-deps.txt into `.venv`."""
    return f".venv/bin/python -m pip install --no-deps {requirement}"


def _create_venv() -> None:
    why = "is not finished or is out of date" if VENV.exists() else "is missing"
    version = ".".join(map(str, sys.version_info[:3]))
    _say(f"[1/3] .venv {why}: a new one with Python {version}")
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(VENV)
    # Not sys.executable: that may lie inside the folder that was just removed.
    base = getattr(sys, "_base_executable", None) or sys.executable
    log = _run([base, "-m", "venv", str(VENV)], "creating .venv")
    if log is not None:
        shutil.rmtree(VENV, ignore_errors=True)
        advice = "On Debian and Ubuntu `apt install python3-venv` brings what is missing."
        sys.exit(f"{_tail(log)}\nPython could not create .venv. {advice}")


def _pip(*arguments: str) -> list[str]:
    # -I: neither PYTHONPATH nor the user's own packages count as installed
    return [str(_python()), "-I", "-m", "pip", *arguments, "--progress-bar=off"]


def _install_members() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        tools = tomllib.load(file)["dependency-groups"]["dev"]
    folders = members()
    names = ", ".join(folder.name for folder in folders)
    _say(f"[2/3] installing {names}, their third parties and the tools: minutes, the first time")
    editable = [word for folder in folders for word in ("--editable", f"{folder}[test]")]
    log = _run(_pip("install", *editable, *tools), "installing")
    if log is not None:
        refused = "(constraint) torch" in log or "cuda-toolkit" in log
        advice = CPU_TORCH_ADVICE if refused else "The full log is .venv/setup.log."
        sys.exit(f"{_tail(log)}\nThe set-up failed.\n{advice}")


def _install_without_dependencies() -> list[str]:
    """Lines of ci/no-deps.txt that could not be installed."""
    wanted = requirement_lines(NO_DEPS)
    _say(f"[3/3] installing without their dependencies: {', '.join(wanted)}")
    return [line for line in wanted if _run(_pip("install", "--no-deps", line), line) is not None]


def requirement_lines(path: Path) -> list[str]:
    """The requirements of a pip file, without comments."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def _run(command: Sequence[str], what: str) -> str | None:
    """None when the command succeeded, else what it printed; all of it goes to .venv/setup.log."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    printed: list[str] = []
    with subprocess.Popen(
        command,
        env=variables | pip_variables(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(PHASE_TIMEOUT_S, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                printed.append(line)
                _show_progress(line)
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
            _show_progress("")
    if VENV.is_dir():
        with (VENV / "setup.log").open("a") as file:
            file.writelines([f"$ {' '.join(command)}\n", *printed])
    if process.returncode == 0:
        return None
    return "".join(printed) or f"{what}: ended with status {process.returncode}"


def _show_progress(line: str) -> None:
    """On a terminal, the last line of pip in place of the one before; elsewhere nothing."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 5
        print(f"\r\033[K{line.strip()[:width]}", end="", file=sys.stderr, flush=True)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _tail(log: str, lines: int = 15) -> str:
    return "\n".join(log.rstrip().splitlines()[-lines:])


@contextlib.contextmanager
def _only_set_up() -> Iterator[None]:
    """Holds the lock that lets one process at a time change `.venv`; gone with the process."""
    with Path(__file__).open("r+b") as file:
        deadline = time.monotonic() + PHASE_TIMEOUT_S
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    sys.exit("another set-up of .venv has not ended in 45 minutes: is it stuck?")
                if not told:
                    _say("waiting for another set-up of .venv to end")
                    told = True
                time.sleep(0.2)
        yield


# --- commands ---------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> None:
    """Becomes the interpreter running these arguments; does not return."""
    python, variables = interpreter()
    os.execve(python, [python, *arguments], variables)


def install(system: str) -> int:
    """pip's exit status of installing shared and one system into the active environment.

    The constraints hold unless the machine has a GPU, where torch's own choice is right.
    """
    names = [member.name for member in members()[1:]]
    if system not in names:
        sys.exit(f"SYSTEM must be one of {', '.join(names)}; got {system!r}")
    python = shutil.which(os.environ.get("PYTHON", "python3"))
    if python is None:
        sys.exit("no python3 on PATH: activate an environment, or name one with PYTHON=")
    gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    variables: Mapping[str, str] = os.environ if gpu else os.environ | pip_variables()
    folders = [str(ROOT / "shared"), str(ROOT / "packages" / system)]
    status = subprocess.run([python, "-m", "pip", "install", *folders], env=variables, check=False)
    if status.returncode and not gpu:
        _say(f"If the conflict above is about torch: {CPU_TORCH_ADVICE}")
    return status.returncode


def main(arguments: Sequence[str]) -> int:
    """Exit status of the command line."""
    match list(arguments):
        case []:
            print(interpreter()[0])
        case ["run", _, *_]:
            run(arguments[1:])
        case ["install", system]:
            return install(system)
        case _:
            _say(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # an unfinished .venv has no key, so that the next start makes it anew
