import json

import pytest
from typer.testing import CliRunner

from mcfuser.cli import app


def run(*words):
    return CliRunner().invoke(app, list(words))


def test_funnel_prints_the_rules_as_rows():
    sizes = "m=1024,n=1024,k=512,h=512"
    found = run("funnel", "--sizes", sizes, "--device", "a100", "--dtype", "fp16", "--json")
    assert found.exit_code == 0, found.output
    rows = json.loads(found.output)
    counts = [109051904, 20971520, 12582912, 37632, 16098, 12036]
    assert [row["value"] for row in rows] == counts
    assert {(row["unit"], row["kind"]) for row in rows} == {("candidates", "counted")}
    assert len(rows[1]["notes"].split()) == 5


def test_place_prints_what_moves():
    words = [
        "--sizes",
        "m=64,n=64,k=32,h=32",
        "--tiles",
        "m=16,n=16,k=32,h=32",
        "--expr",
        "mn(k,h)",
    ]
    found = run("place", *words, "--json")
    rows = {row["name"]: row for row in json.loads(found.output)}
    assert rows["L_A"]["value"] == 64 * 32
    assert rows["S_E"]["notes"] == "m(L_A,n(L_B,C_C,L_D,C_E),S_E)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["funnel", "--sizes", "m=1024"], "sizes must have b, m, k, n, h"),
        (["funnel", "--sizes", "m:1024"], "sizes must be like m=1024,n=512"),
        (["funnel", "--sizes", "m=16,n=16,k=16,h=16", "--dtype", "fp8"], "dtype must be one of"),
        (["funnel", "--sizes", "m=16,n=16,k=16,h=16", "--chain", "mk,kn->mn"], "got 1"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(words, said):
    found = run(*words)
    assert found.exit_code == 2
    assert said in found.stderr
