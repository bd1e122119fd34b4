"""tools/reproduce.py, tools/bench.py and tools/demo.py on a small checkout made here."""

import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import bench
import demo
import reproduce

EXPERIMENT = '''
"""Figure 1: what the paper <claims>."""
from septet_shared.experiment import Claim, Sweep
NAME = "figure1"
TITLE = "Ours & the peer"
SCALES = {"smoke": Sweep(), "cpu": Sweep()}
PAPER = [{"variant": "ours", "ratio": 3.1, "from": "Fig. 1"}]
def run(sweep):
    yield {"variant": "ours", "ratio": 2.5, "kind": "counted"}
def claims(rows):
    yield Claim("never slower", rows.min("ratio") >= (1 if rows.scale != "cpu" else 99))
'''
DEMO = """
from septet_shared.experiment import Demo, Headline, Sweep
DEMO = Demo("figure1", Sweep(), lambda rows: Headline("two <rows>", "2.5x", "3.1x", "counted"))
"""
COMMAND = """
import typer
from septet_shared.experiment import mount
app = typer.Typer()
mount(app, "toy_good")
app()
"""
BROKEN = "import sys\nprint('warming up', file=sys.stderr)\nsys.exit('no data: pip <install> it')\n"
BENCH = """
import os
print("a word in between")
os.system("echo another")
def run():
    row = dict.fromkeys(("peer", "ratio", "ratio_low", "ratio_high", "unit", "threads", "notes"))
    row |= {"name": "copy", "kind": "measured"}
    yield {**row, "variant": "fast", "value": 3.0, "unit": "ms", "must": "<= 10"}
    yield {**row, "variant": "ratio", "ratio": 6.5, "ratio_low": 6, "ratio_high": 7, "value": 99,
           "must": ">= 5"}
    yield {**row, "variant": "peer|absent", "value": None, "must": "<= 10"}
"""


README = "# Before\n\n<!-- bench -->\nstale\n<!-- /bench -->\n\nafter\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with `toy` (imported as toy_good) and `wrong`, whose command fails."""
    files = {
        "shared/benchmarks/bench_copy.py": BENCH,
        "shared/benchmarks/README.md": README,
        "packages/toy/pyproject.toml": "",
        "packages/toy/src/toy_good/__init__.py": '__version__ = "0.3.0"\n',
        "packages/toy/src/toy_good/__main__.py": COMMAND,
        "packages/toy/src/toy_good/experiments/__init__.py": DEMO,
        "packages/toy/src/toy_good/experiments/figure1.py": EXPERIMENT,
        "packages/wrong/pyproject.toml": "",
        "packages/wrong/src/wrong/__init__.py": "",
        "packages/wrong/src/wrong/__main__.py": BROKEN,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    sources = [str(tmp_path / "packages" / name / "src") for name in ("toy", "wrong")]
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sources, *([before] if before else [])]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


TOY = reproduce.System("toy", "toy_good")


def test_a_system_is_found_by_folder_and_by_import_name(checkout):
    assert reproduce.systems(checkout) == [TOY, reproduce.System("wrong", "wrong")]
    assert reproduce.systems(checkout, "toy") == reproduce.systems(checkout, "toy_good") == [TOY]
    with pytest.raises(ValueError, match="no system 'joy'; there are toy, wrong"):
        reproduce.systems(checkout, "joy")


def test_an_experiment_is_run_and_summed_up(checkout, capfd):
    code = reproduce.main(["--system", "toy", "--experiment", "figure1", "--out", "o"], checkout)
    assert code == 0
    out = capfd.readouterr().out
    assert re.search(r"toy\s+figure1\s+1 of 1 hold", out)
    assert (checkout / "o/toy_good/figure1.smoke.json").exists()


def test_a_claim_that_does_not_hold_is_named_in_the_summary(checkout, capfd):
    assert reproduce.main(["--system", "toy", "--scale", "cpu"], checkout) == 1
    assert "0 of 1 hold; not: never slower" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--system", "joy"], "no system 'joy'; there are toy, wrong"),
        (["--system", "toy", "--experiment", "figure9"], "there are: figure1 (smoke, cpu)"),
        (["--system", "wrong"], "no data: pip <install> it"),
    ],
)
def test_what_cannot_be_reproduced_is_said_with_exit_code_2(checkout, capfd, words, named):
    assert reproduce.main(words, checkout) == 2
    assert named in capfd.readouterr().err


def test_the_last_line_of_a_failing_command_is_its_error(checkout, capfd):
    system = reproduce.System("wrong", "wrong")
    found = reproduce.run_verb(system, "demo", timeout_s=60, keep_output=False)
    assert found == (1, "no data: pip <install> it")
    assert "warming up" in capfd.readouterr().err


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(checkout):
    (checkout / "packages/wrong/src/wrong/__main__.py").write_text(
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    system = reproduce.System("wrong", "wrong")
    code, said = reproduce.run_verb(system, "demo", timeout_s=2, keep_output=False)
    assert (code, said) == (124, "took longer than 2 s")
    assert not is_running(int((checkout / "child").read_text()))


def is_running(pid, patience_s=10):
    """Whether a process other than a zombie has this id, after waiting for it to go."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


# bench


def test_json_is_one_list_whatever_a_benchmark_prints(checkout, capfd):
    assert bench.main(["shared", "--json"], checkout) == 0
    out, err = capfd.readouterr()
    assert [row["variant"] for row in json.loads(out)] == ["fast", "ratio", "peer|absent"]
    assert "a word in between" in err


def test_a_must_that_fails_ends_with_exit_code_1_and_is_named(checkout, capfd):
    slow = BENCH.replace('"value": 3.0', '"value": 30.0')
    (checkout / "shared/benchmarks/bench_slow.py").write_text(slow)
    assert bench.main(["shared"], checkout) == 1
    out, err = capfd.readouterr()
    assert "does not hold: copy fast: <= 10" in err
    assert "not measured" in out
    assert bench.main(["shared", "--only", "copy"], checkout) == 0


@pytest.mark.parametrize(
    ("must", "ratio", "value", "verdict"),
    [
        (None, None, 5, ""),
        ("<= 10", None, 10, "holds"),
        ("< 10", None, 10, "does not hold"),
        (">= 5", 4.9, 99, "does not hold"),  # of the ratio, where there is one
        (">=1e-3", None, 0.001, "holds"),
        ("> 0", None, 0, "does not hold"),
        ("<= 10", None, None, "not measured"),
    ],
)
def test_a_must_is_asked_of_the_ratio_or_else_of_the_value(must, ratio, value, verdict):
    assert bench.verdict({"name": "x", "must": must, "ratio": ratio, "value": value}) == verdict


def test_a_must_that_compares_nothing_is_refused():
    with pytest.raises(ValueError, match="got 'fast' in x"):
        bench.verdict({"name": "x", "must": "fast", "ratio": None, "value": 1})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("raise RuntimeError('at import')", "bench_bad failed with exit code 1"),
        (
            "def run():\n    yield {'name': 'x'}",
            "bench_bad gave a row without variant, peer, ratio",
        ),
    ],
)
def test_a_benchmark_that_fails_does_not_keep_the_others_from_running(checkout, capfd, text, named):
    (checkout / "shared/benchmarks/bench_bad.py").write_text(text)
    readme = checkout / "shared/benchmarks/README.md"
    before = readme.read_text()
    assert bench.main(["shared", "--json", "--write"], checkout) == 1
    out, err = capfd.readouterr()
    assert len(json.loads(out)) == 3
    assert named in err
    assert readme.read_text() == before  # half a table would be a lie


def test_a_benchmark_that_takes_too_long_is_ended(checkout):
    path = checkout / "shared/benchmarks/bench_long.py"
    path.write_text("import time\ndef run():\n    time.sleep(600)\n    yield {}\n")
    with pytest.raises(ValueError, match="bench_long took longer than 1 s"):
        bench.run_module(path, 1)


def test_writing_replaces_what_stands_between_the_markers_only(checkout):
    readme = checkout / "shared/benchmarks/README.md"
    for _ in range(2):
        assert bench.main(["shared", "--write"], checkout) == 0
        text = readme.read_text()
        assert text.startswith("# Before\n\n<!-- bench -->\n")
        assert text.endswith("<!-- /bench -->\n\nafter\n")
        assert "stale" not in text
        assert "`python tools/bench.py shared --write`, 20" in text
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        assert len(rows) == 2 + 3
        assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
        assert "| 6.5x [6, 7] | 99 | >= 5 | holds |" in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["joy"], "no package 'joy'; there are shared, toy, wrong"),
        (["toy"], "there are: none"),
        (["shared", "--only", "paste"], "there are: copy"),
        (["shared", "--only", "copy", "--write"], "--write needs all modules"),
    ],
)
def test_what_cannot_be_benchmarked_is_said_with_exit_code_2(checkout, capfd, words, named):
    assert bench.main(words, checkout) == 2
    assert named in capfd.readouterr().err


@pytest.mark.parametrize("text", ["", "<!-- /bench --> <!-- bench -->", "<!-- bench -->\n" * 2])
def test_a_readme_without_its_markers_is_refused_before_anything_runs(checkout, capfd, text):
    (checkout / "shared/benchmarks/README.md").write_text(text)
    (checkout / "shared/benchmarks/bench_copy.py").write_text("open('ran', 'w')")
    assert bench.main(["shared", "--write"], checkout) == 2
    assert "must have the lines <!-- bench --> and <!-- /bench -->" in capfd.readouterr().err
    assert not (checkout / "ran").exists()


# demo


class Page(HTMLParser):
    """The tags that are open at the end, all ids, and every address that would be fetched."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.fetched, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "img", "link"):
            self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.fetched += [v for n, v in attrs if n == "src" or (n == "href" and tag == "link")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_every_demo_stands_in_one_table_and_on_one_page(checkout, capfd):
    assert demo.main(["--out", "shown"], checkout) == 1  # one of them fails
    out = capfd.readouterr().out
    assert re.search(r"toy_good\s+two <rows>\s+3\.1x\s+2\.5x\s+counted", out)
    assert re.search(r"wrong\s+failed: no data: pip <install> it", out)
    text = (checkout / "shown/index.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    assert len(page.ids) == len(set(page.ids))
    assert "toy_good" in page.ids
    for said in ("1 of 2 systems", "two <rows>", "no data: pip <install> it", "Ours & the peer"):
        assert said in page.text
    for part in ("<svg", "currentColor", 'name="viewport"', "prefers-color-scheme: dark"):
        assert part in text


def test_a_page_says_which_claim_does_not_hold_and_shows_pictures_on_white(tmp_path):
    record = {
        "title": "T", "about": "", "command": "c", "versions": {}, "rows": [],
        "headline": {"ran": "r", "paper": "p", "ours": "o", "kind": "simulated"},
        "claims": [{"text": "a < b", "holds": False, "detail": "3 > 2"}],
        "table": {"header": ["x"], "cells": [["1"]], "notes": ["n"]},
    }  # fmt: skip
    (tmp_path / "plot.png").write_bytes(b"\x89PNG")
    shown = demo.Shown(TOY, 1.25, None, record, [demo._figure(tmp_path / "plot.png")])
    assert shown.line() == ["toy_good", "r", "p", "o; does not hold: a < b", "simulated", "1.2"]
    page = Page(demo.page([shown]))
    assert page.open == []
    assert page.fetched == ["data:image/png;base64,iVBORw=="]
    assert "does not hold: a < b" in page.text


def test_a_checkout_without_systems_has_no_demo(tmp_path, capsys):
    assert demo.main([], tmp_path) == 2
    assert "no system under" in capsys.readouterr().err
