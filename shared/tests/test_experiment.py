"""Sweeps, rows, claims, what they are shown beside, and what is written."""

import csv
import importlib
import io
import json
import math
import pickle
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from septet_shared import experiment
from septet_shared.experiment import (
    Claim,
    Headline,
    Rows,
    Sweep,
    experiments,
    plot,
    progress,
    run_experiment,
    stdlib_text,
    terminal,
    user_errors,
)
from septet_shared.experiment.results import plain, show


def test_importing_it_brings_no_heavy_package():
    code = "import sys, septet_shared.experiment as e; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    heavy = {"torch", "numpy", "typer", "rich", "matplotlib", "scipy", "triton"}
    assert not heavy & set(done.stdout.split())


# Sweep and Claim


def test_a_sweep_is_read_as_attributes_and_cannot_change():
    sweep = Sweep(lengths=[1, 2], repeats=7)
    assert (sweep.lengths, sweep.repeats) == ((1, 2), 7)
    with pytest.raises(AttributeError, match="frozen"):
        sweep.repeats = 8
    with pytest.raises(AttributeError, match="frozen"):
        del sweep.repeats
    assert repr(sweep) == "Sweep(lengths=(1, 2), repeats=7)"


def test_an_unknown_point_of_a_sweep_names_those_that_exist():
    with pytest.raises(AttributeError, match="no 'length'; it has lengths, repeats"):
        Sweep(lengths=[1], repeats=7).length


def test_a_sweep_reaches_another_process_unchanged():
    sweep = Sweep(lengths=[1, 2])
    assert pickle.loads(pickle.dumps(sweep)) == sweep
    assert sweep != Sweep(lengths=[1])


def test_a_claim_takes_the_truth_of_numpy():
    assert Claim("yes", np.bool_(True)).holds is True
    assert json.dumps(Claim("no", np.float64(1) > 2).holds) == "false"


# Rows

ROWS = Rows(
    [
        {"length": 4, "variant": "ours", "ms": 2.0, "kind": "measured"},
        {"length": 1, "variant": "ours", "ms": 1.0, "kind": "measured"},
        {"length": 1, "variant": "peer", "ms": 3.0, "kind": "measured"},
        {"length": 4, "variant": "peer", "ms": 10.0, "kind": "simulated"},
        {"length": 4, "variant": "absent", "ms": None, "kind": "measured", "notes": "pip install"},
    ],
    scale="cpu",
)


def test_rows_answer_about_the_rows_that_match():
    assert ROWS.min("ms") == 1.0
    assert ROWS.max("ms", variant="ours") == 2.0
    assert ROWS.mean("ms", variant="peer") == 6.5
    assert [row["length"] for row in ROWS.where(variant="ours")] == [4, 1]
    assert ROWS.column("notes") == [None, None, None, None, "pip install"]
    assert (len(ROWS), len(ROWS[1:3]), ROWS[0]["ms"]) == (5, 2, 2.0)
    assert ROWS.where(length=4).where(kind="simulated").scale == "cpu"


def test_a_misspelt_column_is_no_answer():
    for ask in (
        lambda: ROWS.min("mss"),
        lambda: ROWS.where(varient="ours"),
        lambda: ROWS.column("mss"),
        lambda: ROWS.is_increasing("mss", by="length", variant="ours"),
    ):
        with pytest.raises(KeyError, match="there are length, variant, ms, kind, notes"):
            ask()


@pytest.mark.parametrize("rows", [Rows([]), ROWS.where(variant="absent")])
def test_a_question_about_no_value_is_an_error(rows):
    with pytest.raises(ValueError, match="no row has a value of 'ms'"):
        rows.min("ms")


def test_a_ratio_divides_the_rows_of_the_same_point():
    ratio = ROWS.ratio("ms", over="peer", under="ours", by="length")
    assert {row["length"]: row["ratio"] for row in ratio} == {1: 3.0, 4: 5.0}
    assert {row["length"]: row["kind"] for row in ratio} == {1: "measured", 4: "simulated"}
    assert ratio.is_increasing("ratio", by="length")
    same = ROWS.ratio("ms", {"variant": "peer"}, {"variant": "ours"}, by=["length"])
    assert list(same) == list(ratio)


def test_a_ratio_without_a_partner_is_an_error():
    lonely = Rows([row for row in ROWS if row["ms"] not in (None, 3.0)])
    with pytest.raises(ValueError, match=r"without a partner: \['\(1,\)'\]"):
        lonely.ratio("ms", over="peer", under="ours", by="length")
    with pytest.raises(ValueError, match="none at all"):
        ROWS.ratio("ms", over="absent", under="absent", by="length")
    with pytest.raises(ValueError, match=r"two rows of .*'peer'"):
        ROWS.ratio("ms", over="peer", under="ours", by="notes")


@pytest.mark.parametrize(
    ("values", "grows"), [([1, 2, 3], True), ([1, 2, 2], False), ([2, 1], False)]
)
def test_increasing_is_strict_and_in_the_order_of_by(values, grows):
    rows = [{"x": x, "y": y} for x, y in enumerate(values)]
    assert Rows(rows[::-1]).is_increasing("y", by="x") is grows


def test_growth_needs_two_different_points():
    with pytest.raises(ValueError, match=r"two or more different length; got \[1\]"):
        ROWS.where(length=1).is_increasing("ms", by="length", variant="ours")
    with pytest.raises(ValueError, match="different length"):
        ROWS.is_increasing("ms", by="length")


def test_a_headline_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="measured, simulated, counted; got 'guessed'"):
        Headline(ran="x", ours="y", kind="guessed")


# A system with two experiments, made for these tests

FIGURE = '''
"""Figure 1: ours against the peer.

Paper: 3x. Not reproduced: 512 GPUs, because there are none.
"""
from septet_shared.experiment import Claim, Sweep
NAME = "figure1"
TITLE = "Ours | the peer"
SCALES = {"smoke": Sweep(lengths=[1, 8], least=0), "cpu": Sweep(lengths=[1, 8], least=99)}
PAPER = [
    {"length": 8, "variant": "ours", "ratio": 3.1, "from": "Fig. 1, read off the plot"},
    {"length": 512, "variant": "ours", "ratio": 9.0, "from": "abstract"},
]
def run(sweep):
    for length in sweep.lengths:
        for variant, kind in (("ours", "measured"), ("cluster", "simulated")):
            yield {"length": length, "variant": variant, "peer": "numpy", "ratio": 1 + length / 4,
                   "ratio_low": 0.9, "ratio_high": 9.1, "least": sweep.least, "kind": kind}
def claims(rows):
    yield Claim("never slower", rows.min("ratio") >= rows.max("least"), "1.25")
    yield Claim("the gain grows", rows.is_increasing("ratio", by="length", variant="ours"))
'''
TABLE = '''
"""Table 2."""
from septet_shared.experiment import Claim, Sweep
NAME = "table2"
TITLE = "Bytes"
SCALES = {"smoke": Sweep()}
PAPER = [{"variant": "tt", "value": 900, "from": "Table 2"}]
def run(sweep):
    for variant, value in (("tt", 1000), ("dense", float("nan"))):
        row = {"name": "bytes", "variant": variant, "value": value, "unit": "B", "kind": "counted"}
        yield row
def claims(rows):
    yield Claim("there are bytes", rows.max("value", variant="tt") > 0)
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Writes modules of a package `toy_system` and makes it importable, afresh."""
    root = tmp_path / "source"

    def write(**modules):
        folder = root / "toy_system" / "experiments"
        folder.mkdir(parents=True, exist_ok=True)
        (root / "toy_system" / "__init__.py").write_text('__version__ = "0.3.0"\n')
        (folder / "__init__.py").touch()
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return "toy_system"

    def forget():
        for name in [n for n in sys.modules if n.split(".")[0] == "toy_system"]:
            del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(root)
    yield write
    forget()


def test_experiments_are_the_modules_with_a_name(toy):
    package = toy(figure1=FIGURE, table2=TABLE, data="ROWS = 3\n")
    assert list(experiments(package)) == ["figure1", "table2"]


def test_a_module_that_lacks_a_name_is_refused(toy):
    with pytest.raises(ValueError, match="table2 lacks TITLE, claims"):
        experiments(toy(table2=TABLE.replace("TITLE", "TITEL").replace("def claims", "def claim")))


def test_two_experiments_of_one_name_are_refused(toy):
    with pytest.raises(ValueError, match=r"two experiments .* 'table2'"):
        experiments(toy(table2=TABLE, table3=TABLE))


def test_a_package_without_experiments_says_so():
    with pytest.raises(ValueError, match=r"no package septet_shared\.experiments"):
        experiments("septet_shared")


def test_a_broken_import_inside_an_experiment_is_not_hidden(toy):
    with pytest.raises(ModuleNotFoundError, match="no_such_peer"):
        experiments(toy(table2="import no_such_peer\n" + TABLE))


def test_an_unknown_experiment_or_scale_names_what_exists(toy):
    package = toy(figure1=FIGURE, table2=TABLE)
    with pytest.raises(ValueError, match="no experiment 'figure9'; it has figure1, table2"):
        run_experiment(package, "figure9", "smoke")
    with pytest.raises(ValueError, match="no scale 'paper'; it has smoke, cpu"):
        run_experiment(package, "figure1", "paper")


@pytest.mark.parametrize("kind", ['"guessed"', "None"])
def test_a_row_that_does_not_say_how_it_came_about_is_refused(toy, kind):
    package = toy(table2=TABLE.replace('"counted"', f'"counted" if variant == "tt" else {kind}'))
    with pytest.raises(ValueError, match=r"row 1 of table2 must .* measured, simulated, counted"):
        run_experiment(package, "table2", "smoke")


def test_a_run_without_rows_is_refused(toy):
    silent = TABLE.replace("def run(sweep):", "def run(sweep):\n    return")
    with pytest.raises(ValueError, match="table2 at scale 'smoke' gave no rows"):
        run_experiment(toy(table2=silent), "table2", "smoke")


def test_the_papers_figure_stands_beside_the_row_of_its_point_only(toy):
    result = run_experiment(toy(figure1=FIGURE), "figure1", "smoke")
    header, cells, notes = result.table()
    assert header == ["length", "variant", "ratio", "paper's ratio", "kind"]
    assert cells == [
        ["1", "ours", "1.25 [0.9, 9.1]", "", "measured"],
        ["1", "cluster", "1.25 [0.9, 9.1]", "", "simulated"],
        ["8", "ours", "3 [0.9, 9.1]", "3.1 [1]", "measured"],
        ["8", "cluster", "3 [0.9, 9.1]", "", "simulated"],
    ]
    assert notes == [
        "in every row: peer numpy, least 0",
        "[1] Fig. 1, read off the plot",
        "[2] abstract",
    ]
    assert result.paper_alone() == ["length 512, variant ours, ratio 9 [2]"]


def test_a_point_of_the_paper_without_a_place_stands_alone(toy):
    everywhere = FIGURE.replace('"length": 512, "variant": "ours", ', "")
    result = run_experiment(toy(figure1=everywhere), "figure1", "smoke")
    assert result.paper_alone() == ["ratio 9 [2]"]


def test_an_experiment_may_name_its_figures(toy):
    result = run_experiment(
        toy(figure1=FIGURE + 'FIGURES = ("least", "nothing")\n'), "figure1", "smoke"
    )
    assert result.figures == ["least"]


def test_the_record_has_what_is_needed_to_judge_it(toy):
    record = run_experiment(toy(figure1=FIGURE), "figure1", "smoke").record()
    assert json.loads(json.dumps(record)) == record
    assert record["command"] == "python -m toy_system reproduce figure1 --scale smoke"
    assert {"cpu", "cores", "memory_gb", "os", "gpus"} <= record["machine"].keys()
    versions = record["versions"]
    assert versions["toy_system"] == "0.3.0"
    assert {"python", "torch", "triton", "numpy", "septet-shared"} <= versions.keys()
    assert [claim["holds"] for claim in record["claims"]] == [True, True]
    assert record["rows"][0]["kind"] == "measured"


def test_what_is_written_reads_back_as_the_rows(toy, tmp_path):
    pytest.importorskip("matplotlib")
    result = run_experiment(toy(table2=TABLE), "table2", "smoke")
    files = result.write(tmp_path / "out")
    assert [path.name for path in files] == [
        f"table2.smoke.{e}" for e in ("json", "csv", "md", "png")
    ]
    assert sorted(files) == sorted((tmp_path / "out").iterdir())  # and no temporary file
    rows = list(csv.DictReader(io.StringIO(files[1].read_text())))
    assert [row["value"] for row in rows] == ["1000", "nan"]
    assert [row["paper_value"] for row in rows] == ["900", ""]
    written = json.loads(files[0].read_text())["rows"]
    assert [row["value"] for row in written] == [1000, None]  # JSON has no nan
    assert "- holds: there are bytes" in files[2].read_text()
    assert files[3].read_bytes().startswith(b"\x89PNG")


def test_a_bar_in_a_text_does_not_split_a_cell_of_markdown(toy):
    result = run_experiment(
        toy(figure1=FIGURE.replace('"numpy"', '"a|b" + str(length)')), "figure1", "smoke"
    )
    lines = [line for line in result.markdown().splitlines() if line.startswith("| ")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "a\\|b1" in lines[2]


def test_a_plot_that_fails_leaves_no_file(toy, tmp_path):
    pytest.importorskip("matplotlib")
    broken = TABLE + 'def plot(rows, ax):\n    raise ValueError("no ink")\n'
    with pytest.raises(ValueError, match="no ink"):
        run_experiment(toy(table2=broken), "table2", "smoke").write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Plots


@pytest.mark.parametrize(("module", "name"), [(FIGURE, "figure1"), (TABLE, "table2")])
def test_the_picture_for_a_page_takes_the_pages_ink(toy, module, name):
    pytest.importorskip("matplotlib")
    picture = plot.svg(run_experiment(toy(**{name: module}), name, "smoke"))
    assert picture.startswith("<svg")
    assert "currentColor" in picture
    assert "#31363f" not in picture
    assert "http://" not in picture.replace("http://www.w3.org/", "")  # nothing is fetched


def test_simulated_points_are_hollow_and_named(toy):
    pytest.importorskip("matplotlib")
    figure = plot._plain(run_experiment(toy(figure1=FIGURE), "figure1", "smoke"))
    lines = {line.get_label(): line.get_markerfacecolor() for line in figure.axes[0].lines}
    assert set(lines) == {"ours", "cluster (simulated)", "paper"}
    assert [name for name, colour in lines.items() if colour == "none"] == ["cluster (simulated)"]


def test_simulated_bars_are_hollow_and_named(toy):
    pytest.importorskip("matplotlib")
    text = TABLE.replace('"counted"', '"counted" if variant == "tt" else "simulated"')
    result = run_experiment(toy(table2=text.replace('float("nan")', "5")), "table2", "smoke")
    bars = plot._plain(result).axes[0].containers
    assert [bar.get_label() for bar in bars] == ["_container0", "simulated"]
    assert [bar.patches[0].get_facecolor()[3] for bar in bars] == [1, 0]


def test_points_that_words_do_not_tell_apart_are_series_of_their_own(toy):
    pytest.importorskip("matplotlib")
    grid = """
        for n in (1, 2):
            for batch in (3, 4):
                yield {"n": n, "batch": batch, "ratio": 1.5, "kind": "counted"}
        return
        yield"""
    text = TABLE.replace("def run(sweep):", "def run(sweep):" + grid.replace("\n    ", "\n"))
    text = text.replace('rows.max("value", variant="tt") > 0', "True")
    figure = plot._plain(run_experiment(toy(table2=text), "table2", "smoke"))
    assert [line.get_label() for line in figure.axes[0].lines] == ["batch 3", "batch 4"]


def test_an_experiments_own_plot_is_the_one_drawn(toy):
    pytest.importorskip("matplotlib")
    own = FIGURE + 'def plot(rows, ax):\n    ax.set_title(f"drawn by hand, {len(rows)} rows")\n'
    assert "drawn by hand, 4 rows" in plot.svg(run_experiment(toy(figure1=own), "figure1", "smoke"))


# Values as text and as JSON


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), (True, "true"), (0, "0"), (1234567, "1,234,567"), (0.123456, "0.1235"),
        (12345.6, "12,346"), (math.nan, "nan"), (np.float32(2), "2"), ("a", "a"), ([1], "[1]"),
        (list(range(99)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1 ..."),
    ],
)  # fmt: skip
def test_a_value_is_shown_short(value, text):
    assert show(value) == text


def test_json_gets_plain_values():
    value = {"a": np.int64(3), "b": (np.float32(0.5), math.inf), 3: {"c": None}, "d": np.arange(2)}
    assert plain(value) == {"a": 3, "b": [0.5, None], "3": {"c": None}, "d": [0, 1]}


# Text


def test_topics_are_those_of_pydoc_in_their_own_order():
    topics = pytest.importorskip("pydoc_data.topics").topics
    assert stdlib_text("topics") == list(topics.values())


def test_sources_are_the_librarys_files_by_path_without_tests():
    texts = stdlib_text("sources")
    library = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.name for path in library.glob("[a-z]*.py"))
    known = [texts.index((library / name).read_text()) for name in names]
    assert known == sorted(known)
    assert len(texts) > 300
    assert not any("class TestOrderedDict" in text for text in texts)


def test_another_kind_of_text_is_refused():
    with pytest.raises(ValueError, match="'sources' or 'topics'; got 'novels'"):
        stdlib_text("novels")


# What is shown on standard error


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_progress_passes_every_item_on_and_is_silent_without_a_terminal(capfd):
    assert list(progress(["a", "b"], "letters")) == ["a", "b"]
    assert list(progress(3, "numbers")) == [0, 1, 2]
    assert list(progress(0, "nothing")) == []
    assert capfd.readouterr() == ("", "")


def test_nested_bars_share_one_display_that_ends_with_the_outermost(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")  # on a dumb terminal no bar is drawn
    pairs = [(i, j) for i in progress(2, "outer") for j in progress(iter("xy"), "inner")]
    assert pairs == [(0, "x"), (0, "y"), (1, "x"), (1, "y")]
    assert "outer" in screen.getvalue()
    assert terminal._shown is None


def test_a_loop_that_is_left_early_ends_its_display(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    bars = progress(10, "long")
    assert next(bars) == 0
    assert terminal._shown is not None
    bars.close()
    assert terminal._shown is None


def test_only_the_first_rank_shows_progress(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("RANK", "1")
    assert list(progress(2, "work")) == [0, 1]
    assert screen.getvalue() == ""


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, ModuleNotFoundError])
def test_a_users_mistake_is_shown_as_it_is_with_exit_code_2(capsys, error):
    with pytest.raises(SystemExit) as ended, user_errors():
        raise error("rank must be in [0, 4); got [/red] 7 " + "x" * 200 + "\npip install a")
    assert ended.value.code == 2
    shown = f"rank must be in [0, 4); got [/red] 7 {'x' * 200}\npip install a\n"
    assert capsys.readouterr().err == shown


def test_an_error_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), user_errors():
        _ = 1 / 0


def test_the_public_names_exist():
    assert all(hasattr(experiment, name) for name in experiment.__all__)
