import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from ecorec import TTEmbeddingBag, TTSpec
from ecorec.convert_file import convert_rows


@pytest.fixture
def table():
    return torch.randn(600, 8, generator=torch.Generator().manual_seed(0))


def test_a_file_becomes_a_file_that_a_module_loads(tmp_path, table):
    np.save(tmp_path / "table.npy", table.numpy())
    command = ["convert", str(tmp_path / "table.npy"), "--rank", "6", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "ecorec", *command, "--output", str(tmp_path / "tt.pt")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout)}
    state = torch.load(tmp_path / "tt.pt", weights_only=True)
    spec = TTSpec(**state.pop("spec"))
    emb = TTEmbeddingBag(600, 8, spec=spec)
    emb.load_state_dict(state)
    error = (emb.to_dense() - table).norm() / table.norm()
    assert rows["relative_error"] == pytest.approx(error.item(), rel=1e-3)
    assert rows["bytes"] == spec.bytes
    assert rows["dense_bytes"] == 600 * 8 * 4
    assert {path.name for path in tmp_path.iterdir()} == {"table.npy", "tt.pt"}


def test_a_tensor_of_a_state_is_found_by_its_key(tmp_path, table):
    torch.save({"a.weight": table, "other": torch.zeros(2)}, tmp_path / "model.pt")
    output = tmp_path / "tt.pt"
    (first, *_) = convert_rows(tmp_path / "model.pt", output, key="a.weight", rel_error=0.5)
    assert first["value"] <= 0.5


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("absent.npy", {"rank": 2}, FileNotFoundError, "there is none at"),
        ("model.pt", {"rank": 2}, ValueError, "key must be one of a.weight; got None"),
        ("words.txt", {"rank": 2}, ValueError, "must be a .npy, .pt or .pth file; got words.txt"),
        ("broken.pt", {"rank": 2}, ValueError, "must be what torch.save wrote; broken.pt"),
        ("model.pt", {"key": "a.weight"}, ValueError, "rank"),
    ],
)
def test_a_wrong_file_or_argument_is_named_and_nothing_is_written(
    tmp_path, table, name, options, error, message
):
    torch.save({"a.weight": table}, tmp_path / "model.pt")
    (tmp_path / "words.txt").write_text("no table")
    (tmp_path / "broken.pt").write_bytes(b"not a pickle")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=message):
        convert_rows(tmp_path / name, tmp_path / "tt.pt", **options)
    assert sorted(tmp_path.iterdir()) == before


def test_what_cannot_be_converted_is_told_before_the_work(tmp_path):
    table = tmp_path / "half.npy"
    np.save(table, np.zeros((100, 8), dtype=np.float16))
    with pytest.raises(ValueError, match=r"float32 or float64; half\.npy is torch\.float16"):
        convert_rows(table, tmp_path / "out.pt", rank=2)
    with pytest.raises(FileNotFoundError, match="output must be in a folder that exists"):
        convert_rows(table, tmp_path / "nowhere" / "out.pt", rank=2)
    noise = np.random.default_rng(0).standard_normal((100, 8), dtype=np.float32)
    np.save(table, noise)
    with pytest.warns(UserWarning, match="allow a larger error, or keep the table"):
        convert_rows(table, tmp_path / "out.pt", rel_error=0.001)
