"""The verbs that every system's command has, on a small system made here."""

import importlib
import json
import re
import sys

import pytest
import typer
from typer.testing import CliRunner

from septet_shared import testing
from septet_shared.experiment import doctor, mount, plot

FIGURE = '''
"""Figure 1: what the paper claims."""
from septet_shared.experiment import Claim, Sweep
NAME = "figure1"
TITLE = "Ours against the peer"
SCALES = {"smoke": Sweep(least=1), "cpu": Sweep(least=99)}
PAPER = [{"variant": "ours", "ratio": 3.1, "from": "Fig. 1"}]
def run(sweep):
    for variant in ("ours", "twin"):
        yield {"variant": variant, "ratio": 2.5, "least": sweep.least, "kind": "counted"}
def claims(rows):
    yield Claim("never slower [than the peer]", rows.min("ratio") >= rows.max("least"), "2.5")
'''
ABSENT = '''
"""Figure 2."""
from septet_shared.experiment import Sweep
NAME = "figure2"
TITLE = "Needs data"
SCALES = {"smoke": Sweep()}
PAPER = []
def run(sweep):
    raise FileNotFoundError("no data [here]: pip install --no-deps data brings it")
def claims(rows):
    return []
'''
DEMO = """
from septet_shared.experiment import Demo, Headline, Sweep
def headline(rows):
    assert rows.scale == "demo"
    return Headline("two <rows>", f"{rows.max('ratio'):.1f}x", "3.1x (Fig. 1)", "counted")
DEMO = Demo("figure1", Sweep(least=2), headline)
"""
KERNEL = '''
"""Copy."""
import triton
import triton.language as tl
@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))
SIGNATURES = {"copy_kernel": [({"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"BLOCK": 32})]}
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Writes the package `toy_system` (files by path) and returns a way to call its command."""
    root = tmp_path / "source" / "toy_system"

    def forget():
        for name in [n for n in sys.modules if n.split(".")[0] == "toy_system"]:
            del sys.modules[name]

    def write(**files):
        files = {"__init__": '__version__ = "0.3.0"\n', "experiments/__init__": DEMO, **files}
        for name, text in files.items():
            path = root / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        app = typer.Typer()
        mount(app, "toy_system")
        return lambda *words: CliRunner().invoke(app, words)

    forget()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(root.parent)
    yield write
    forget()


FILES = {"experiments/figure1": FIGURE}


def test_reproduce_shows_the_papers_figure_and_the_claims(toy, tmp_path):
    done = toy(**FILES)("reproduce", "figure1", "--out", "there")
    assert done.exit_code == 0, done.output
    assert "paper's ratio" in done.stdout
    assert "3.1 [1]" in done.stdout
    assert "holds: never slower [than the peer] (2.5)" in done.stdout
    assert {p.suffix for p in (tmp_path / "there/toy_system").iterdir()} >= {".json", ".csv", ".md"}


def test_a_claim_that_does_not_hold_ends_with_exit_code_1(toy):
    done = toy(**FILES)("reproduce", "figure1", "--scale", "cpu")
    assert done.exit_code == 1
    assert "does not hold: never slower" in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["reproduce", "figure9"], "no experiment 'figure9'; it has figure1"),
        (["reproduce", "figure1", "--scale", "gpu"], "scale 'gpu'; they have smoke, cpu"),
        (["reproduce", "all", "--scale", "gpu"], "scale 'gpu'; they have smoke, cpu"),
    ],
)
def test_a_users_mistake_is_one_line_with_exit_code_2(toy, words, named):
    done = toy(**FILES)(*words)
    assert done.exit_code == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_one_experiment_that_cannot_run_does_not_keep_the_others_from_it(toy, tmp_path):
    done = toy(**FILES, **{"experiments/figure2": ABSENT})(
        "reproduce", "all", "--json", "--out", "o"
    )
    assert done.exit_code == 2
    assert re.search(r"^figure2 \(figure2\.py:\d+\): no data \[here\]", done.stderr, re.M)
    assert "pip install --no-deps data" in done.stderr
    assert [row["experiment"] for row in json.loads(done.stdout)] == ["figure1", "figure1"]
    assert not list((tmp_path / "o" / "toy_system").glob("figure2*"))


def test_with_json_standard_output_holds_one_list_only(toy):
    command = toy(**FILES)
    rows = json.loads(command("reproduce", "figure1", "--json").stdout)
    assert [(row["variant"], row["kind"]) for row in rows] == [
        ("ours", "counted"),
        ("twin", "counted"),
    ]
    listed = json.loads(command("reproduce", "list", "--json").stdout)
    assert listed == [
        {"name": "figure1", "title": "Ours against the peer", "scales": ["smoke", "cpu"]}
    ]
    assert "smoke, cpu" in command("reproduce").stdout


def test_without_matplotlib_all_but_the_picture_is_written(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "is_available", lambda: False)
    done = toy(**FILES)("reproduce", "figure1", "--out", "o")
    assert done.exit_code == 0
    assert "pip install 'septet-shared[experiments]'" in done.stderr
    names = {path.name for path in (tmp_path / "o/toy_system").iterdir()}
    assert names == {"figure1.smoke.json", "figure1.smoke.csv", "figure1.smoke.md"}


def test_many_points_of_the_paper_are_counted_on_the_terminal(toy, tmp_path):
    far = FIGURE.replace(
        "PAPER = [", "PAPER = [{'variant': str(i), 'ratio': 2.0} for i in range(9)] + ["
    )
    done = toy(**{"experiments/figure1": far})("reproduce", "figure1", "--out", "o")
    assert "9 points that no row of this scale stands beside" in done.stdout
    assert (tmp_path / "o/toy_system/figure1.smoke.md").read_text().count("the paper also has") == 9


def test_the_demo_shows_its_headline_and_leaves_rows_and_picture(toy, tmp_path):
    pytest.importorskip("matplotlib")
    command = toy(**FILES)
    done = command("demo")
    assert done.exit_code == 0, done.output
    assert "3.1x (Fig. 1)" in done.stdout
    done = command("demo", "--json", "--out", "shown")
    rows = json.loads(done.stdout)
    assert rows == json.loads((tmp_path / "shown/rows.json").read_text())
    record = json.loads((tmp_path / "shown/demo.json").read_text())
    assert record["headline"] == {
        "ran": "two <rows>", "ours": "2.5x", "paper": "3.1x (Fig. 1)", "kind": "counted"
    }  # fmt: skip
    assert record["command"] == "python -m toy_system demo"
    assert (tmp_path / "shown/figure1.svg").read_text().startswith("<svg")


def test_a_demo_whose_claim_does_not_hold_ends_with_exit_code_1(toy):
    files = {**FILES, "experiments/__init__": DEMO.replace("least=2", "least=9")}
    done = toy(**files)("demo", "--json")
    assert done.exit_code == 1
    assert "does not hold" in done.stderr
    assert len(json.loads(done.stdout)) == 2


def test_a_system_without_a_demo_says_what_is_missing(toy):
    done = toy(**FILES, **{"experiments/__init__": ""})("demo")
    assert done.exit_code == 2
    assert "toy_system.experiments must have DEMO = Demo(...); got None" in done.stderr


def test_the_doctor_says_what_there_is_and_why_something_is_not(toy, monkeypatch):
    monkeypatch.setenv("SEPTET_CXX", "/nonexistent/compiler")
    done = toy(**FILES)("doctor", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found) == ["versions", "compiler", "devices", "backends", "advice"]
    assert found["versions"]["toy_system"] == "0.3.0"
    assert found["compiler"] is None
    assert "no C++ compiler" in found["backends"]["cpu"]
    assert found["backends"]["reference"] == "available"
    assert any("'/nonexistent/compiler'" in line for line in found["advice"])
    assert found["devices"][0]["name"] == "cpu"
    assert any(device.get("memory_gb_s", 0) > 0 for device in found["devices"])


def test_the_doctor_asks_the_system_for_its_backends(toy, monkeypatch):
    monkeypatch.setattr(doctor, "_rates", lambda _: {})  # the test above measures them
    offered = '__version__ = "1"\ndef backends():\n    return {"abacus": "no beads"}\n'
    done = toy(**FILES, __init__=offered)("doctor")
    assert done.exit_code == 0, done.output
    assert "abacus" in done.stdout
    assert "no beads" in done.stdout
    assert done.stdout.rpartition("To get more:")[2].strip()


def test_kernels_are_compiled_ahead_although_tests_interpret_them(toy):
    pytest.importorskip("triton")
    command = toy(**FILES, **{"kernels/copy": KERNEL, "kernels/__init__": ""})
    done = command("kernels", "--arch", "80", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert (row["name"], row["arch"], row["spills"]) == ("copy_kernel", 80, 0)
    assert row["registers"] > 0


def test_a_kernel_that_no_row_came_of_is_named(toy, monkeypatch):
    monkeypatch.setattr(testing, "compile_package", lambda *_, **__: [])
    done = toy(**FILES)("kernels", "--kernel", "paste")
    assert (done.exit_code, done.stderr) == (2, "toy_system has no kernel paste\n")


def test_a_kernel_that_does_not_compile_ends_with_exit_code_1(toy, monkeypatch):
    row = {"name": "copy", "variant": "", "arch": 80, "registers": None, "spills": None}
    row |= {"value": None, "notes": "CompilationError: [no] such thing"}
    monkeypatch.setattr(testing, "compile_package", lambda *_, **__: [row])
    done = toy(**FILES)("kernels")
    assert done.exit_code == 1
    assert "[no] such thing" in done.stdout


def test_the_version_is_the_systems(toy):
    done = toy(**FILES)("--version")
    assert (done.exit_code, done.stdout) == (0, "toy_system 0.3.0\n")


def test_an_app_with_a_callback_of_its_own_is_refused():
    app = typer.Typer()
    app.callback()(lambda: None)
    with pytest.raises(ValueError, match="toy_system must have no callback"):
        mount(app, "toy_system")
