"""What a user of the package sees; public names only."""

import subprocess
import sys

import torch

import template_system


def test_every_public_name_exists():
    assert all(hasattr(template_system, name) for name in template_system.__all__)


def test_the_readme_example_scales_rows():
    x, weight = torch.ones(2, 3), torch.tensor([2.0, 3.0])
    assert template_system.scale_rows(x, weight).tolist() == [[2, 2, 2], [3, 3, 3]]


def test_smoke_experiments_hold(tmp_path):
    command = [sys.executable, "-m", "template_system", "reproduce", "all", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "template_system" / "figure1.smoke.json").exists()
