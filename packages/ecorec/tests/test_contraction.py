import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ecorec import TTSpec
from ecorec.contraction import BatchPlan, directions, lower_bound, unique_prefixes
from ecorec.shape_search import suggest
from ecorec.shapes import largest_ranks
from ecorec.torch_backend import unique_rows


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


def table(p, q, ranks):
    return TTSpec(math.prod(p), math.prod(q), p, q, ranks)


def sorted_rows(rows):
    return torch.tensor(sorted(set(rows)), dtype=torch.int64)


def some_rows(rng, spec, most):
    return sorted_rows(rng.integers(0, spec.num_embeddings, rng.integers(1, most + 1)).tolist())


THREE = [
    table((4, 3, 5), (2, 3, 4), (3, 5)),
    table((4, 3, 5), (4, 1, 2), (6, 2)),
    table((1, 3, 20), (8, 2, 1), (4, 4)),
    table((9, 1, 9), (1, 2, 3), (2, 6)),
    table((3, 4, 2000), (2, 2, 2), (3, 4)),  # more possible back pairs than flags
]


@given(st.sampled_from(THREE), st.lists(st.integers(0, 10**6)))
def test_each_middle_digit_takes_the_faster_of_its_directions(spec, numbers):
    rows = sorted_rows(number % spec.num_embeddings for number in numbers)
    found = directions(rows, spec)
    _, p2, p3 = spec.p
    (q1, q2, q3), (r1, r2) = spec.q, spec.ranks
    digits = [(row // p3 // p2, row // p3 % p2, row % p3) for row in rows.tolist()]
    in_front, in_back = (-(-n // 8) * 8 / n for n in (q1 * q2, q2 * q3))  # of eight lanes
    front, back, chosen = 0, 0, []
    for middle in range(p2):
        mine = [(i1, i3) for i1, i2, i3 in digits if i2 == middle]
        from_front = 2 * q1 * q2 * r1 * r2 * len({i1 for i1, _ in mine})
        from_front += 2 * q1 * q2 * q3 * r2 * len(mine)
        from_back = 2 * r1 * q2 * q3 * r2 * len({i3 for _, i3 in mine})
        from_back += 2 * q1 * q2 * q3 * r1 * len(mine)
        front, back = front + from_front, back + from_back
        turned = from_back * in_back < from_front * in_front - 1e-6
        chosen.append((turned, from_back if turned else from_front, bool(mine)))
    assert found.front_pairs == len({(i1, i2) for i1, i2, _ in digits})
    assert found.back_pairs == len({(i2, i3) for _, i2, i3 in digits})
    assert (found.flops_front, found.flops_back) == (front, back)
    assert found.flops == sum(flops for _, flops, _ in chosen)
    assert spec.flops(len(rows), found.front_pairs, found.back_pairs) == min(front, back)
    is_back = [turned for turned, _, _ in chosen]
    if not any(is_back):
        assert (found.name, found.back_first) == ("front", None)
    else:
        assert found.back_first.tolist() == is_back
        everyone = all(turned for turned, _, occurs in chosen if occurs)
        assert found.name == ("back" if everyone else "mixed")


@pytest.mark.parametrize(
    "spec",
    [*THREE, table((6, 50), (3, 5), (7,)), table((4, 5, 3, 6), (2, 3, 2, 2), (3, 5, 4))],
    ids=lambda spec: "x".join(map(str, spec.p)),
)
def test_the_back_of_a_table_is_the_front_of_the_mirrored_one(spec):
    rows = some_rows(np.random.default_rng(0), spec, 300)
    turned = table(spec.p[::-1], spec.q[::-1], spec.ranks[::-1])
    mirror = torch.arange(spec.num_embeddings).view(spec.p).permute(*range(len(spec.p))[::-1])
    place = torch.empty(spec.num_embeddings, dtype=torch.int64)
    place[mirror.flatten()] = torch.arange(spec.num_embeddings)
    one, other = directions(rows, spec), directions(place[rows].sort().values, turned)
    assert one.front_pairs == other.back_pairs
    assert one.flops_back == other.flops_front


@pytest.mark.parametrize("count", [0, 1, 60, 360])
@pytest.mark.parametrize(
    "spec", [table((6, 60), (3, 5), (7,)), table((4, 5, 3, 6), (2, 3, 2, 2), (3, 5, 4))]
)
def test_two_and_four_cores_count_what_the_torch_backend_executes(spec, count):
    order = torch.randperm(360, generator=torch.Generator().manual_seed(1))
    rows = order[:count].sort().values
    found = directions(rows, spec)
    assert (found.name, found.back_first) == ("front", None)
    cores = [torch.randn(shape) for shape in spec.core_shapes]
    with FlopCounterMode(display=False) as counter:
        unique_rows(cores, rows)
    assert found.flops == found.flops_front == counter.get_total_flops()


def test_rows_beyond_int32_have_their_pairs():
    spec = TTSpec(2**40, 4, (2**20, 2**10, 2**10), (1, 2, 2), (2, 2))
    top = (2**20 - 1) * 2**20
    found = directions(torch.tensor([5, 7, top + 5, top + 7, top + 2**10 + 5]), spec)
    assert (found.front_pairs, found.back_pairs) == (3, 3)


def least_by_trying_all(rows, spec):
    """Every one of the 2^U choices, as bit masks of the rows that start at the back."""
    _, p2, p3 = spec.p
    (q1, q2, q3), (r1, r2) = spec.q, spec.ranks
    masks = np.arange(2 ** len(rows))
    front_rows = sum((~masks >> n) & 1 for n in range(len(rows)))
    cost = 2 * q1 * q2 * q3 * (r2 * front_rows + r1 * (len(rows) - front_rows))
    needed = {}
    for n, row in enumerate(rows.tolist()):
        for key in ("front", row // p3), ("back", row % (p2 * p3)):
            needed[key] = needed.get(key, 0) | 1 << n
    for (end, _), members in needed.items():
        if end == "front":
            cost = cost + 2 * q1 * q2 * r1 * r2 * ((~masks & members) != 0)
        else:
            cost = cost + 2 * r1 * q2 * q3 * r2 * ((masks & members) != 0)
    return int(cost.min())


@pytest.mark.parametrize("ranks", [(4, 4), (4, 5), (5, 3)])
def test_the_bound_is_the_least_of_all_choices(ranks):
    rng = np.random.default_rng(sum(ranks))
    inside = 0
    for _ in range(200):
        p = tuple(map(int, rng.integers((2, 1, 2), (6, 3, 6))))
        q = tuple(map(int, rng.integers(2, 5, 3)))
        spec = table(p, q, tuple(map(min, ranks, largest_ranks(p, q))))
        rows = some_rows(rng, spec, 12)
        least = least_by_trying_all(rows, spec)
        found = directions(rows, spec)
        assert lower_bound(rows, spec) == least <= found.flops
        inside += least < found.flops
    assert inside > 10  # batches whose bound needs both directions within one i_2


def test_the_searched_shape_is_at_the_bound_on_a_skewed_batch():
    spec = suggest(1_000_000, 32, rank=32, lookups=20_000)
    weights = np.cumsum(np.arange(1, 1_000_001) ** -1.05)
    ranks = 1 + np.searchsorted(weights / weights[-1], np.random.default_rng(0).random(20_000))
    rows = sorted_rows(((ranks * 2654435761 + 12345) % 1_000_000).tolist())
    plan = BatchPlan.of(rows, spec, lookups=20_000, chunks=1, workspace_bytes=0, exact=True)
    assert plan.uniques > 5000
    assert plan.flops_lower_bound <= plan.flops <= 1.02 * plan.flops_lower_bound


@pytest.mark.parametrize("ranks", [(32, 32), (16, 24)])
def test_stars_take_a_direction_each(ranks):
    """For even i_2 one i_1 has 300 i_3; for odd i_2 one i_3 has 300 i_1."""
    spec = table((300, 8, 300), (2, 4, 4), ranks)
    rows = sorted_rows(
        ((17 if middle % 2 == 0 else i) * 8 + middle) * 300 + (i if middle % 2 == 0 else 5)
        for middle in range(8)
        for i in range(300)
    )
    plan = BatchPlan.of(rows, spec, lookups=2400, chunks=1, workspace_bytes=0, exact=True)
    assert plan.direction == "mixed"
    assert plan.flops <= 1.1 * plan.flops_lower_bound
    assert 3 * plan.flops < min(plan.flops_front, plan.flops_back)
    assert directions(rows, spec).back_first.tolist() == [False, True] * 4


def test_two_cores_are_their_own_bound_and_four_have_none():
    rows = torch.arange(0, 300, 7)
    two = table((6, 50), (3, 5), (7,))
    assert lower_bound(rows, two) == two.flops(len(rows), 0)
    with pytest.raises(NotImplementedError, match="2 or 3 cores; got 4"):
        lower_bound(rows, table((4, 5, 3, 6), (2, 3, 2, 2), (3, 5, 4)))


def test_no_rows_cost_nothing():
    nothing = torch.empty(0, dtype=torch.int64)
    for spec in THREE:
        assert lower_bound(nothing, spec) == directions(nothing, spec).flops == 0


def test_costs_that_a_flow_cannot_hold_are_refused():
    spec = table((1000, 1000, 1000), (7, 11, 13), (4099, 4093))
    with pytest.raises(OverflowError, match="fewer rows"):
        lower_bound(torch.arange(0, 10**9, 10**7), spec)


def test_the_plan_tells_what_it_found():
    spec = table((4, 3, 5), (4, 1, 2), (6, 2))
    rows = torch.arange(0, 60, 2)
    plan = BatchPlan.of(rows, spec, lookups=1234, chunks=3, workspace_bytes=5678, exact=True)
    assert (plan.uniques, plan.front_pairs, plan.back_pairs) == (30, 12, 15)
    text = plan.explain()
    for number in (1234, 30, 12, 15, plan.flops, plan.flops_lower_bound, 3, 5678):
        assert f"{number:,}" in text
    assert plan.direction in text
    inexact = BatchPlan.of(rows, spec, lookups=1234, chunks=3, workspace_bytes=5678)
    assert inexact.flops_lower_bound is None
    assert "fewer than" not in inexact.explain()


@settings(deadline=None)
@given(st.sampled_from(THREE), st.lists(st.integers(0, 10**6), max_size=60))
def test_no_plan_is_below_the_bound(spec, numbers):
    rows = sorted_rows(number % spec.num_embeddings for number in numbers)
    assert lower_bound(rows, spec) <= directions(rows, spec).flops
