import math
from itertools import product

import numpy as np
import pytest
import torch

from mcfuser import chain, place, space
from mcfuser.cost_model import gpu_seconds, profile_of, work
from mcfuser.tiling import canonical, expressions

CH = "bmk,bkn->bmn; bmn,bnh->bmh"
S = {"b": 1, "m": 1024, "n": 1024, "k": 512, "h": 512}


def test_the_funnel_has_the_papers_counts():
    found = space(CH, S, device="a100", dtype=torch.float16).funnel()
    assert [(step.rule, len(step.expressions), step.candidates) for step in found] == [
        ("raw", 26, 109051904),
        ("dedup", 5, 20971520),
        ("intermediates", 3, 12582912),
        ("padding", 3, 37632),
        ("shared_memory", 3, 16098),
        ("live", 3, 12036),
    ]


def survivors_by_hand(sizes, limit_bytes):
    """The rules one candidate at a time, from placements."""
    found = set()
    forms = {}
    for text in expressions(chain(CH)):
        forms.setdefault(canonical(text, chain(CH)), text)
    for form, text in forms.items():
        many = dict.fromkeys("bmnkh", 2) | {"b": 1}
        if place(CH, many, text, dict.fromkeys("mnkh", 1)).keeps_partial_tiles:
            continue
        for m, n, k, h in product(*(range(16, sizes[x] + 16, 16) for x in "mnkh")):
            tiles = dict(zip("mnkh", (m, n, k, h), strict=True))
            if any(math.ceil(sizes[x] / t) * t / sizes[x] - 1 >= 0.05 for x, t in tiles.items()):
                continue
            row = math.ceil(sizes["h"] / h) * h if form in ("nhk", "n(k,h)") else h
            if 2 * (m * k + k * n + m * n + n * h + m * row) <= 1.2 * limit_bytes:
                found.add((form, m, n, k, h))
    return found


def test_survivors_are_those_of_the_rules_taken_one_by_one():
    sizes = {"b": 3, "m": 96, "n": 176, "k": 64, "h": 160}
    found = {
        (canonical(c.expression, chain(CH)), *(c.tiles[x] for x in "mnkh"))
        for c in space(CH, sizes, device="rtx3080").candidates()
    }
    limit = profile_of("rtx3080").shared_bytes_per_block
    assert found == survivors_by_hand(sizes, limit)
    assert found


def test_work_is_what_placements_move_and_multiply():
    sizes = {"b": 3, "m": 96, "n": 176, "k": 64, "h": 160}
    rng = np.random.default_rng(0)
    for expression in expressions(chain(CH)):
        tiles = {x: rng.choice([16, 32, 64, 176], 8) for x in "mnkh"}
        found = work(chain(CH), sizes, expression, tiles)
        for i in range(8):
            placed = place(CH, sizes, expression, {x: int(t[i]) for x, t in tiles.items()})
            assert found.moved[i] == sum(placed.traffic().values())
            assert found.flops[i] == placed.flops()
            assert found.blocks[i] == math.prod(placed.extent(x) for x in placed.grid)


def test_more_bandwidth_is_never_slower():
    sizes = {"b": 1, "m": 512, "n": 256, "k": 64, "h": 64}
    tiles = {x: np.array([16, 64]) for x in "mnkh"}
    found = work(chain(CH), sizes, "mhnk", tiles)
    a100, h100 = (gpu_seconds(found, profile_of(d), torch.float16) for d in ("a100", "h100"))
    assert (h100 < a100).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "tpu"}, "device must be one of a100, .*cpu; got 'tpu'"),
        ({"sizes": {"b": 1, "m": 16}}, "sizes must have b, m"),
        ({"sizes": S | {"m": 0}}, "at least 1"),
    ],
)
def test_what_has_no_space_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        space(CH, **({"sizes": S} | change))
