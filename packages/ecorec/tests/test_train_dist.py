"""Training over torchrun's ranks equals one process."""

import json
import subprocess
import sys

import pytest

from ecorec.train_dist import train_dist_rows


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, "-m", "ecorec", "train-dist", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [["--plan", "tw"], ["--plan", "dp", "--samples", "4992"], ["--samples", "4992"]],
    ids=" ".join,
)
def test_two_ranks_end_where_one_process_ends(options):
    done = torchrun("--steps", "20", *options, "--check-against-single", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert 0 < rows["loss"]["value"] < 2
    assert rows["max_relative_difference"]["value"] < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "criteo"}, "data must be synthetic; got 'criteo'"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"plan": "rw"}, "plan must be auto, tw, dp or a Plan; got 'rw'"),
        ({"samples": 10**6}, r"samples must be in \[1, 2560\], the steps' batches; got 1000000"),
        ({"link": "fast"}, "rate must be like '100mbit'"),
    ],
)
def test_a_wrong_argument_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        train_dist_rows(**options)
