import random
from collections import Counter

import pytest
import torch

from mcfuser import chain, place, reference
from mcfuser.tiling import expressions

CH = "bmk,bkn->bmn; bmn,bnh->bmh"
S = {"b": 1, "m": 1024, "n": 1024, "k": 512, "h": 512}
PRINTED = {  # expression: text, traffic of L_A, L_B and L_D
    "mhnk": ("mh(n(k(L_A,L_B,C_C),L_D,C_E),S_E)", 16777216, 16777216, 4194304),
    "mhkn": ("mh(k(L_A,n(L_B,C_C)),n(L_D,C_E),S_E)", 2097152, 16777216, 4194304),
    "mnhk": ("m(n(h(k(L_A,L_B,C_C),L_D,C_E)),S_E)", 16777216, 16777216, 4194304),
    "mknh": ("m(k(L_A,n(L_B,C_C)),n(h(L_D,C_E)),S_E)", 524288, 4194304, 4194304),
    "mn(k,h)": ("m(n(k(L_A,L_B,C_C),h(L_D,C_E)),S_E)", 4194304, 4194304, 4194304),
}


@pytest.mark.parametrize("expression", PRINTED)
def test_statements_stand_where_the_paper_has_them_and_move_what_it_says(expression):
    placed = place(CH, S, expression, {"m": 128, "n": 128, "k": 64, "h": 128})
    text, *traffic = PRINTED[expression]
    assert str(placed) == text
    names = ("L_A", "L_B", "L_D", "S_E")
    assert placed.traffic() == dict(zip(names, (*traffic, 524288), strict=True))


def test_the_26_expressions_are_five_placements():
    tiles = {"m": 128, "n": 128, "k": 64, "h": 128}
    found = Counter(str(place(CH, S, e, tiles)) for e in expressions(chain(CH)))
    counts = zip(PRINTED, (4, 8, 8, 4, 2), strict=True)
    assert found == {PRINTED[expression][0]: count for expression, count in counts}


@pytest.mark.parametrize(
    ("expression", "text", "of_a"),
    [
        ("mhnk", "mh(L_A,n(L_B,C_C,L_D,C_E),S_E)", 2097152),
        ("mhkn", "mh(L_A,n(L_B,C_C,L_D,C_E),S_E)", 2097152),
        ("mknh", "m(L_A,n(L_B,C_C,h(L_D,C_E)),S_E)", 524288),
        ("mn(k,h)", "m(L_A,n(L_B,C_C,h(L_D,C_E)),S_E)", 524288),
        ("mnhk", "m(L_A,n(L_B,h(C_C,L_D,C_E)),S_E)", 524288),
    ],
)
def test_a_loop_of_one_turn_disappears_and_loads_leave_further_loops(expression, text, of_a):
    placed = place(CH, S, expression, {"m": 128, "n": 128, "k": 512, "h": 128})
    assert str(placed) == text
    assert placed.traffic()["L_A"] == of_a


@pytest.mark.parametrize("stage", ["", "gelu; ", "softmax; "])
@pytest.mark.parametrize("expression", expressions(chain(CH)))
def test_every_expression_computes_the_product_and_moves_what_it_counts(expression, stage):
    rng = random.Random(f"{expression}{stage}")
    text = f"bmk,bkn->bmn; {stage}bmn,bnh->bmh"
    for _ in range(20 if not stage else 3):
        sizes = {x: rng.randint(1, 40) for x in "mnkh"} | {"b": rng.randint(1, 2)}
        tiles = {x: rng.choice((16, 32, 48)) for x in "mnkh"}
        shapes = [[sizes[x] for x in letters] for letters in ("bmk", "bkn", "bnh")]
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        inputs = [torch.randn(shape, generator=generator).double() for shape in shapes]
        placed = place(text, sizes, expression, tiles)
        out, counted = placed.execute(*inputs)
        truth = reference.run(text, *inputs)
        assert out.shape == truth.shape
        assert float((out - truth).abs().max()) <= 1e-12 * max(1.0, float(truth.abs().max()))
        assert counted == placed.traffic()


def test_a_recomputed_product_counts_each_time():
    tiles = {"m": 128, "n": 128, "k": 64, "h": 128}
    once = place(CH, S, "mn(k,h)", tiles).flops()
    assert once == 2 * 1024 * 1024 * (512 + 512)
    assert place(CH, S, "mhnk", tiles).flops() == 2 * 1024 * 1024 * (4 * 512 + 512)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expression": "mhk"}, "expression must be one of"),
        ({"tiles": {"m": 0, "n": 16, "k": 16, "h": 16}}, "tiles must be at least 1; got m: 0"),
        ({"tiles": {"m": 16, "n": 16, "k": 16}}, "tiles must have the letters"),
        ({"tiles": {"m": 16, "n": 16, "k": 16, "h": 16, "z": 1}}, "got .*z"),
        ({"sizes": S | {"m": 0}}, "sizes must be at least 1; got m: 0"),
        ({"dtype": torch.float64}, "dtype must be one of torch.float32"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(change, words):
    given = {"sizes": S, "expression": "mhnk", "tiles": dict.fromkeys("mnkh", 16)} | change
    with pytest.raises(ValueError, match=words):
        place(CH, **given)


def test_inputs_of_other_sizes_are_not_executed():
    sizes = {"b": 1, "m": 4, "n": 5, "k": 6, "h": 7}
    placed = place(CH, sizes, "mhnk", dict.fromkeys("mnkh", 16))
    with pytest.raises(ValueError, match="sizes must be those that were placed"):
        placed.execute(torch.ones(1, 4, 3), torch.ones(1, 3, 5), torch.ones(1, 5, 7))
