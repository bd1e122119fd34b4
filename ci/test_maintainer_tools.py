"""`release`, `new_system` and `gpu_check`: what they refuse, and what they leave behind."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


release, new_system, gpu_check = tool("release"), tool("new_system"), tool("gpu_check")


# --- release ---


@pytest.mark.parametrize(
    ("present", "asked", "version"),
    [("0.1.0.dev0", None, "0.1.0"), ("0.1.0", "0.1.1", "0.1.1"), ("0.9.0", "0.10.0", "0.10.0")],
)
def test_a_release_takes_the_next_version(present, asked, version):
    assert release.next_version(f'x = 1\n__version__ = "{present}"\n', asked) == version


@pytest.mark.parametrize(
    ("present", "asked"), [("0.1.0", None), ("0.2.0", "0.1.9"), ("0.1.0", "new"), ("", None)]
)
def test_a_version_that_is_not_above_the_present_one_is_refused(present, asked):
    with pytest.raises(release.Refused, match="version"):
        release.next_version(f'__version__ = "{present}"\n' if present else "", asked)


def test_the_changelog_gets_version_and_day():
    text = "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.1.0 - 2026-01-01\n\n- Old.\n"
    assert release.dated(text, "0.2.0", "2026-12-01") == (
        "# Changelog\n\n## 0.2.0 - 2026-12-01\n\n- New.\n\n## 0.1.0 - 2026-01-01\n\n- Old.\n"
    )


@pytest.mark.parametrize("text", ["# Changelog\n", "## Unreleased\n\n## 0.1.0 - x\n\n- Old.\n"])
def test_a_changelog_that_says_nothing_new_is_refused(text):
    with pytest.raises(release.Refused, match="Unreleased"):
        release.dated(text, "0.2.0", "2026-12-01")


def test_a_wheel_tied_to_a_place_is_noticed(tmp_path):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    lines = ["Name: a", "Requires-Dist: b>=1", "Requires-Dist: c @ file:///somewhere"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a-1.dist-info/METADATA", "\n".join(lines) + "\n\nd @ e\n")
    assert release.metadata_problems(wheel) == ["Requires-Dist: c @ file:///somewhere"]


def test_an_unknown_system_is_told_which_exist():
    with pytest.raises(release.Refused, match=r"shared, .*; got 'nothing'"):
        release.folder_of("nothing")


# --- new_system ---


@pytest.mark.parametrize("name", ["", "Upper", "with-dash", "class", "json", "template_system"])
def test_a_name_that_cannot_be_imported_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="NAME must"):
        new_system.create(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_new_system_keeps_no_word_of_the_template(tmp_path):
    (tmp_path / "packages").mkdir()
    target = new_system.create("graph_cache", tmp_path)
    files = [p for p in target.rglob("*") if p.is_file()]
    assert target / "src" / "graph_cache" / "kernels" / "scale_rows.py" in files
    assert not [p for p in files if "template" in str(p.relative_to(tmp_path))]
    assert not [p for p in files if "template_system" in p.read_text()]
    assert 'name = "graph-cache"' in (target / "pyproject.toml").read_text()


def test_a_new_system_passes_its_tests_and_types(tmp_path):
    (tmp_path / "packages").mkdir()
    target = new_system.create("graph_cache", tmp_path)
    sources = [str(target / "src"), str(ROOT / "shared" / "src")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sources),
        "MYPYPATH": os.pathsep.join(sources),
        "TRITON_INTERPRET": "1",
    }
    config = str(ROOT / "pyproject.toml")
    for words in (
        ["mypy", "--config-file", config, "src"],
        ["pytest", "-q", "-c", config, "tests"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=target,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_an_existing_system_is_not_overwritten(tmp_path):
    mine = tmp_path / "packages" / "graph_cache" / "mine.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("x = 1")
    with pytest.raises(ValueError, match="exists"):
        new_system.create("graph_cache", tmp_path)
    assert [p.name for p in (tmp_path / "packages").rglob("*")] == ["graph_cache", "mine.py"]


def test_a_failure_halfway_leaves_no_half_package(tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    monkeypatch.setattr(new_system, "_ruff", lambda: [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(subprocess.CalledProcessError):
        new_system.create("graph_cache", tmp_path)
    assert not list((tmp_path / "packages").iterdir())


def test_without_ruff_it_names_the_command_that_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(new_system, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ValueError, match="make new-system"):
        new_system.create("graph_cache", tmp_path)
    assert not list(tmp_path.iterdir())


# --- gpu_check ---


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_step_keeps_the_rows_that_its_command_prints():
    outcome = gpu_check.run_step("bench", python("print('[{\"value\": 1}]')"), 30, rows=True)
    assert (outcome.state, outcome.rows, outcome.tail) == ("passed", [{"value": 1}], "")


def test_a_step_that_fails_keeps_the_end_of_its_output():
    outcome = gpu_check.run_step("tests", python("print('why'); raise SystemExit(3)"), 30)
    assert outcome.state == "failed"
    assert "why" in outcome.tail


def test_a_step_that_prints_no_rows_has_failed():
    assert gpu_check.run_step("bench", python("print('?')"), 30, rows=True).state == "failed"


def test_a_step_past_its_limit_is_stopped():
    outcome = gpu_check.run_step("slow", python("import time; time.sleep(60)"), 0.5)
    assert outcome.state == "out of time"
    assert outcome.seconds < 30


def test_no_step_starts_without_time_left():
    assert gpu_check.run_step("late", ["no such program"], 0).state == "out of time"


def test_our_sources_come_first_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = gpu_check.environment()
    assert found["PYTHONPATH"].startswith(str(ROOT / "shared" / "src"))
    assert found["PYTHONPATH"].endswith("before")
    assert "TRITON_INTERPRET" not in found
