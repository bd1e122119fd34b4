"""When `.venv` is made, updated or left alone; pip and venv are stood in for by a recorder."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import environment

REFUSAL = "The user requested (constraint) torch==2.13.0,==2.13.0+cpu"


class Recorder:
    """Stands in for running a command: makes what venv would, says what was asked to fail."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.failing: dict[str, str] = {}

    def __call__(self, command: Sequence[str], what: str) -> str | None:
        self.phases.append(what)
        if "venv" in command:
            (environment.VENV / "bin").mkdir(parents=True)
            (environment.VENV / "bin" / "python").touch()
        if what in self.failing and self.failing[what] == "interrupt":
            raise KeyboardInterrupt
        return self.failing.get(what)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A small checkout with two systems, and no environment yet."""
    for name in ("shared", "packages/left", "packages/right"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "pyproject.toml").write_text("[dependency-groups]\ndev = ['ruff']\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    (tmp_path / "no-deps.txt").write_text("# why\nrecbole==1  # data\ntnetwork==2\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(environment, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(environment, "NO_DEPS", tmp_path / "no-deps.txt")
    monkeypatch.setattr(environment, "members", lambda: members_of(tmp_path))
    recorder = Recorder()
    monkeypatch.setattr(environment, "_run", recorder)
    return recorder


members_of = environment.members
ANEW = ["creating .venv", "installing", "recbole==1", "tnetwork==2"]
IN_PLACE = ANEW[1:]


def phases_of_a_start(recorder: Recorder) -> list[str]:
    recorder.phases.clear()
    environment.ensure_venv()
    return list(recorder.phases)


def test_the_second_start_runs_nothing(recorder: Recorder) -> None:
    assert phases_of_a_start(recorder) == ANEW
    assert phases_of_a_start(recorder) == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("constraints.txt", ANEW),
        ("no-deps.txt", ANEW),
        ("pyproject.toml", IN_PLACE),
        ("shared/pyproject.toml", IN_PLACE),
        ("packages/right/pyproject.toml", IN_PLACE),
    ],
)
def test_a_changed_file_makes_the_environment_stale(
    recorder: Recorder, path: str, expected: list[str]
) -> None:
    environment.ensure_venv()
    with (environment.ROOT / path).open("a") as file:
        file.write("# changed\n")
    assert phases_of_a_start(recorder) == expected


def test_an_added_system_is_installed_and_a_removed_one_leaves_nothing(recorder: Recorder) -> None:
    environment.ensure_venv()
    more = environment.ROOT / "packages" / "more"
    more.mkdir()
    (more / "pyproject.toml").write_text("[project]\n")
    assert phases_of_a_start(recorder) == IN_PLACE
    (more / "pyproject.toml").unlink()
    assert phases_of_a_start(recorder) == ANEW


@pytest.mark.parametrize("phase", ANEW)
def test_an_interrupted_set_up_is_made_anew(recorder: Recorder, phase: str) -> None:
    recorder.failing[phase] = "interrupt"
    with pytest.raises(KeyboardInterrupt):
        environment.ensure_venv()
    recorder.failing.clear()
    assert phases_of_a_start(recorder) == ANEW


def test_an_interrupted_update_is_made_anew(recorder: Recorder) -> None:
    environment.ensure_venv()
    (environment.ROOT / "shared" / "pyproject.toml").write_text("[project]\n\n")
    recorder.failing["installing"] = "interrupt"
    with pytest.raises(KeyboardInterrupt):
        environment.ensure_venv()
    recorder.failing.clear()
    assert phases_of_a_start(recorder) == ANEW


def test_a_missing_extra_package_is_survived_and_named(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.failing["recbole==1"] = "no such package"
    assert phases_of_a_start(recorder) == ANEW
    told = capsys.readouterr().err
    assert "without recbole==1" in told
    assert "pip install --no-deps recbole==1" in told
    assert phases_of_a_start(recorder) == []


@pytest.mark.parametrize(
    ("log", "advised"),
    [(f"ERROR\n{REFUSAL}", True), ("torch depends on cuda-toolkit", True), ("disk full", False)],
)
def test_a_refused_cuda_build_ends_with_advice(recorder: Recorder, log: str, advised: bool) -> None:
    recorder.failing["installing"] = log
    with pytest.raises(SystemExit) as stopped:
        environment.ensure_venv()
    assert (environment.CPU_TORCH_ADVICE in str(stopped.value)) == advised
    assert log in str(stopped.value)


def test_python_that_is_named_is_used_with_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    python, variables = environment.interpreter()
    assert python == sys.executable
    paths = variables["PYTHONPATH"].split(":")
    assert paths[0] == str(environment.ROOT / "shared" / "src")
    assert paths[-1] == "/elsewhere"


def test_python_that_is_no_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "no-such-python")
    with pytest.raises(SystemExit, match="'no-such-python'"):
        environment.interpreter()


@pytest.mark.parametrize(("status", "used"), [(0, True), (1, False)])
def test_the_active_python_is_used_when_its_torch_sees_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, used: bool
) -> None:
    """The active python3 is a script that answers the probe; a driver's tool lies beside it."""
    for name in ("python3", "nvidia-smi"):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._python_with_cuda() == (str(tmp_path / "python3") if used else None)


HOLD = """
import time, environment
with environment._only_set_up():
    begun = time.monotonic()
    time.sleep(0.3)
    print(begun, time.monotonic())
"""


def test_two_set_ups_do_not_overlap() -> None:
    command = [sys.executable, "-c", HOLD]
    tools = Path(environment.__file__).parent
    holders = [
        subprocess.Popen(command, cwd=tools, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    spans = [[float(word) for word in h.communicate(timeout=60)[0].split()] for h in holders]
    (_, first_end), (second_begin, _) = sorted(spans)
    assert first_end <= second_begin
