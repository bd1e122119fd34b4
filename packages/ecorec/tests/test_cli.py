import importlib.metadata
import json

import pytest
from typer.testing import CliRunner

from ecorec.cli import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_train_prints_rows_and_nothing_else_as_json(small_data):
    options = ["--data", str(small_data), "--tables", "zero, tt", "--epochs", "1", "--json"]
    done = run("train", *options)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert {row["variant"] for row in rows} == {"zero", "tt"}
    assert {row["value"] for row in rows if row["name"] == "test_rows"} == {40 * 2}


def test_train_prints_a_table_for_people(small_data):
    done = run("train", "--data", str(small_data), "--tables", "zero", "--epochs", "1")
    assert done.exit_code == 0, done.output
    assert "logloss" in done.stdout


@pytest.mark.parametrize("verb", [["train"], ["demo"]])
def test_without_the_data_a_verb_ends_with_the_command_that_brings_them(monkeypatch, verb):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    done = run(*verb)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert done.stderr.strip().endswith("pip install --no-deps -r ci/no-deps.txt")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tables", "tt,robe"], "a table must be one of tt, dense, qr, hash, zero; got 'robe'"),
        (["--epochs", "0"], "epochs must be at least 1; got 0"),
    ],
)
def test_a_users_mistake_ends_with_code_2_and_its_reason(small_data, options, message):
    done = run("train", "--data", str(small_data), *options)
    assert done.exit_code == 2
    assert message in done.stderr


def test_the_last_line_without_the_data_is_the_command_alone(tmp_path):
    done = run("train", "--data", str(tmp_path / "absent.inter"))
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == "pip install --no-deps -r ci/no-deps.txt"
