import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecorec.contraction import unique_prefixes


@given(
    st.lists(st.integers(0, 3 * 4 * 5 * 2 - 1)), st.sampled_from([(30, 4), (3, 8, 5), (3, 4, 5, 2)])
)
def test_every_prefix_occurs_once_and_leads_to_its_rows(indices, p):
    rows = torch.tensor(sorted(set(indices)), dtype=torch.int64)
    levels = unique_prefixes(rows, p)
    assert len(levels) == len(p)
    digits_of = []
    for row in rows.tolist():  # by hand, last factor first
        digits = []
        for factor in reversed(p):
            row, digit = divmod(row, factor)
            digits.append(digit)
        digits_of.append(tuple(reversed(digits)))
    prefixes = [()]
    for k, level in enumerate(levels, start=1):
        parents = level.parent.tolist() if k > 1 else [0] * len(level.digit)
        prefixes = [
            (*prefixes[parent], digit)
            for parent, digit in zip(parents, level.digit.tolist(), strict=True)
        ]
        assert prefixes == sorted({digits[:k] for digits in digits_of})


def test_rows_beyond_int32_keep_their_digits():
    p = (2**20, 2**10, 2**10)
    row = (2**20 - 1) * 2**20 + 5 * 2**10 + 7
    levels = unique_prefixes(torch.tensor([3, row]), p)
    assert [level.digit.tolist() for level in levels] == [[0, 2**20 - 1], [0, 5], [3, 7]]


@pytest.mark.parametrize("p", [(7, 3), (2, 2, 2)])
def test_no_rows_have_no_prefixes(p):
    levels = unique_prefixes(torch.empty(0, dtype=torch.int64), p)
    assert all(len(level.digit) == 0 for level in levels)
