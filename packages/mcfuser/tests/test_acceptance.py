"""What a user of the package sees; public names only."""

import subprocess
import sys

import torch

import mcfuser


def test_every_public_name_exists():
    assert all(hasattr(mcfuser, name) for name in mcfuser.__all__)


def test_the_readme_example_scales_rows():
    x, weight = torch.ones(2, 3), torch.tensor([2.0, 3.0])
    assert mcfuser.scale_rows(x, weight).tolist() == [[2, 2, 2], [3, 3, 3]]


def test_smoke_experiments_hold(tmp_path):
    command = [sys.executable, "-m", "mcfuser", "reproduce", "all", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mcfuser" / "figure1.smoke.json").exists()
