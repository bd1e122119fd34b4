"""What a user of the package sees; public names and commands only."""

import inspect
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ecorec
from ecorec import movielens

PACKAGE = Path(__file__).parent.parent


def command(*arguments, timeout_s=240):
    return subprocess.run(
        [sys.executable, "-m", "ecorec", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def values(output, name):
    return {row["variant"]: row["value"] for row in json.loads(output) if row["name"] == name}


def test_every_public_name_exists():
    assert all(hasattr(ecorec, name) for name in ecorec.__all__)


def test_a_table_of_ten_million_rows_is_small_and_is_called_like_a_bag():
    emb = ecorec.TTEmbeddingBag(10_000_019, 32, tt_ranks=32)
    assert emb(torch.randint(10_000_019, (4096, 20))).shape == (4096, 32)
    assert sum(p.numel() for p in emb.parameters()) < 1_500_000


def test_a_table_of_a_hundred_million_rows_is_made_at_once():
    start = time.perf_counter()
    ecorec.TTEmbeddingBag(100_000_000, 32, tt_ranks=32)
    assert time.perf_counter() - start < 5  # a dense one would take 12.8 GB


def test_two_changed_lines_train_the_same_model():
    def losses(table):
        torch.manual_seed(0)
        head = torch.nn.Linear(8, 1)
        optimiser = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.05)
        input, target = torch.randint(500, (64, 5)), torch.randn(64, 1)
        found = []
        for _ in range(30):
            loss = (head(table(input)) - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            found.append(loss.item())
        return found

    torch.manual_seed(1)
    for table in (
        torch.nn.EmbeddingBag(500, 8, mode="mean"),
        ecorec.TTEmbeddingBag(500, 8, tt_ranks=4, mode="mean"),
    ):
        found = losses(table)
        assert found[-1] < found[0]


@pytest.fixture(scope="module")
def needs_data(ratings):
    """Skips, with the command that brings the data, where they are absent."""
    return ratings


@pytest.mark.slow
@pytest.mark.usefixtures("needs_data")
def test_the_demo_shows_tt_beside_dense_and_zero(tmp_path):
    done = command("demo", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr  # its claims hold
    auc, taken = values(done.stdout, "auc"), values(done.stdout, "embedding_bytes")
    assert auc.keys() == {"tt", "dense", "zero"}
    assert set(values(done.stdout, "test_rows").values()) == {19_633}
    assert taken["dense"] >= 50 * taken["tt"]
    assert auc["dense"] >= 0.75
    assert auc["tt"] >= auc["dense"] - 0.01
    assert auc["zero"] <= auc["dense"] - 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("needs_data")
def test_permuted_ratings_teach_nothing(tmp_path):
    inter = movielens.find_data()
    header, *lines = inter.read_text().splitlines()
    cells = [line.split("\t") for line in lines]
    stars = [row[2] for row in cells]
    random.Random(0).shuffle(stars)
    rows = ["\t".join([a, b, star, d]) for (a, b, _, d), star in zip(cells, stars, strict=True)]
    (tmp_path / "ml.inter").write_text("\n".join([header, *rows]) + "\n")
    for suffix in (".item", ".user"):
        (tmp_path / f"ml{suffix}").write_text(inter.with_suffix(suffix).read_text())
    done = command("train", "--data", str(tmp_path / "ml.inter"), "--epochs", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert all(abs(auc - 0.5) <= 0.03 for auc in values(done.stdout, "auc").values())


@pytest.mark.usefixtures("needs_data")
def test_smoke_experiments_hold(tmp_path):
    done = command("reproduce", "all", "--scale", "smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ecorec" / "accuracy.smoke.json").exists()


def test_the_quickstart_runs_from_another_folder(tmp_path):
    script = PACKAGE / "examples" / "quickstart.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_quickstart_runs_without_a_compiler_and_says_so_once(tmp_path):
    script = PACKAGE / "examples" / "quickstart.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "SEPTET_CXX": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Warning") == 1
    assert "SEPTET_CXX" in done.stderr  # what is wrong


def test_a_converted_model_trains_on_and_a_scheduler_is_obeyed():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "bag": torch.nn.EmbeddingBag(3000, 16, sparse=True, mode="mean"),
            "word": torch.nn.Embedding(2000, 16, padding_idx=0),
            "head": torch.nn.Linear(32, 1),
        }
    )
    model["again"] = model["word"]
    ecorec.convert_module(model, rank=8, optimizer="adagrad", lr=0.1)
    assert model["again"] is model["word"]
    assert isinstance(model["bag"], ecorec.TTEmbeddingBag)
    schedule = torch.optim.lr_scheduler.LambdaLR(model["bag"].fused_optimizer, lambda t: 0.9**t)
    head = torch.optim.Adagrad(model["head"].parameters(), lr=0.1)
    bags, words = torch.randint(3000, (256, 4)), torch.randint(2000, (256,))
    wanted, found = torch.randn(256, 1), []
    for _ in range(20):
        x = torch.cat([model["bag"](bags), model["again"](words)], 1)
        loss = (model["head"](x) - wanted).square().mean()
        head.zero_grad()
        loss.backward()
        head.step()
        schedule.step()
        found.append(loss.item())
    assert found[-1] < 0.5 * found[0]
    assert model["bag"].fused_optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**20)


def test_everything_public_tells_what_it_is():
    for name in ecorec.__all__:
        thing = getattr(ecorec, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            for word, method in vars(thing).items():
                if not word.startswith("_") and callable(getattr(thing, word)):
                    assert inspect.getdoc(getattr(thing, word)), f"{name}.{word} of {method}"


def test_importing_the_package_imports_no_command_line():
    code = "import sys, ecorec; sys.exit('typer' in sys.modules or 'rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
