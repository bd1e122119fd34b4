from collections import Counter
from itertools import permutations

import pytest

from mcfuser import chain
from mcfuser.tiling import canonical, expressions, grid, parse

TWO = chain("bmk,bkn->bmn; bmn,bnh->bmh")


def test_two_products_have_26_expressions():
    deep = {"".join(order) for order in permutations("mnkh")}
    assert set(expressions(TWO)) == deep | {"mn(k,h)", "nm(k,h)"}
    assert len(expressions(TWO)) == 26


def test_five_different_loops_are_left_in_a_block():
    found = Counter(canonical(text, TWO) for text in expressions(TWO))
    assert found == {"nk": 4, "kn": 8, "nhk": 8, "knh": 4, "n(k,h)": 2}


@pytest.mark.parametrize(
    ("text", "left", "bound"),
    [
        ("mhnk", "nk", "bmh"),
        ("khnm", "kn", "bmh"),  # h changes places with k, which no product shares with it
        ("nkhm", "nhk", "bm"),
        ("mknh", "knh", "bm"),
        ("nm(k,h)", "n(k,h)", "bm"),
    ],
)
def test_loops_of_the_output_go_to_the_grid_where_no_reduction_is_around_them(text, left, bound):
    assert canonical(text, TWO) == left
    assert grid(text, TWO) == bound


def test_an_unknown_expression_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"expression must be one of hkmn, .*nm\(k,h\); got 'mkh'"):
        parse("mkh", TWO)


def test_an_expression_is_read_back():
    for text in expressions(TWO):
        assert ",".join(map(str, parse(text, TWO))) == text
