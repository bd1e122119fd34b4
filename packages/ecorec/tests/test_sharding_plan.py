"""Plans: never worse than the simple ones by their prediction, and fit for what they are for."""

import json
import math
import random
import subprocess
import sys

import pytest
import torch

from ecorec import TableConfig, TTSpec
from ecorec.sharding_plan import Plan, StepProfile, TableStatistics, plan, predict, simple_plan


def some_tables(chance, most=12):
    tables, known = [], {}
    for k in range(chance.randint(1, most)):
        rows = round(10 ** chance.uniform(1, 8))
        kind = "dense" if rows < 10_000 and chance.random() < 0.5 else "tt"
        features = [f"f{k}.{i}" for i in range(chance.choice([1, 1, 2]))]
        spec = None
        if kind == "tt":
            side = math.ceil(rows ** (1 / 3))
            p, q = (side, side, math.ceil(rows / side**2)), (2, 2, 4)
            spec = TTSpec(rows, 16, p, q, (2, 2) if rows < 1000 else (4, 4))
        tables.append(TableConfig(f"t{k}", rows, 16, features, kind=kind, spec=spec))
        known[f"t{k}"] = TableStatistics(
            chance.uniform(0.1, 40), chance.uniform(0.5, 2), chance.uniform(0.3, 1)
        )
    return tables, known


def test_auto_is_never_worse_than_owners_replicas_or_slope_on_200_points():
    for seed in range(200):
        chance = random.Random(seed)
        tables, known = some_tables(chance)
        settings = {
            "world_size": chance.choice([1, 2, 4, 32]),
            "local_batch": chance.choice([16, 512, 4096]),
            "profile": StepProfile(link_bytes_per_s=10 ** chance.uniform(7, 11)),
            "order": chance.choice(["cost", "given"]),
        }
        auto = plan(tables, known, **settings)
        auto.check(tables, settings["world_size"])
        for options in (
            {"kinds": ("tw",)},
            {"kinds": ("dp",)},
            {"kinds": ("tw",), "groups": "slope"},
            {"kinds": ("tw",), "groups": 1},
        ):
            other = plan(tables, known, **settings, **options)
            assert auto.predicted_step_s <= other.predicted_step_s, (seed, options)


def test_a_step_is_predicted_as_it_is_by_hand():
    tables = [TableConfig(name, 1000, 10, [name], kind="dense") for name in "abc"]
    made = Plan(
        kind={"a": "tw", "b": "tw", "c": "dp"}, owner={"a": 0, "b": 1}, groups=(("a",), ("b",)),
        order="given", world_size=2, local_batch=100,
    )  # fmt: skip
    profile = StepProfile(
        backward=2.0, mlp_s=0.01, mlp_bytes=0, link_bytes_per_s=4000.0, link_latency_s=0.0
    )
    seconds = {"a": 1.0, "b": 3.0, "c": 0.5}
    # Each exchange carries 100 samples of 10 numbers: 1 s. Of c's 40,000 bytes all are sent once.
    forward = max(3 + 0.5, 3 + 1) + 1  # b computed, its rows, then the MLP
    backward = max(forward + 2 * 0.5, forward + 1) + 2 * 3  # replicas while b's gradients travel
    expected = backward + 40_000 / 4000
    assert predict(made, tables, seconds, profile) == pytest.approx(expected)
    blocked = 1 + 1 + 3 + 1 + 0.5 + 1  # nothing overlaps but the ranks
    blocked += 2 * 0.5 + 1 + 6 + 1 + 2 + 10
    assert predict(made, tables, seconds, profile, overlap=False) == pytest.approx(blocked)


def test_memory_is_a_limit_and_not_a_wish():
    tables = [TableConfig(f"t{k}", 1000, 10, [f"f{k}"], kind="dense") for k in range(4)]
    known = {table.name: TableStatistics(1.0) for table in tables}
    fast = StepProfile(link_bytes_per_s=1.0, memory_bytes=80_000)  # two tables; a link to avoid
    found = plan(tables, known, world_size=2, local_batch=8, profile=fast)
    assert sorted(found.owner.values()) == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="memory_bytes must hold a rank's tables"):
        plan(tables, known, world_size=2, local_batch=8, profile=StepProfile(memory_bytes=79_999))


def test_cheap_tables_come_first_where_cost_is_the_order():
    tables = [TableConfig(f"t{k}", 1000, 10, [f"f{k}"], kind="dense") for k in range(6)]
    known = {f"t{k}": TableStatistics(float(10 - k)) for k in range(6)}
    by_cost = plan(tables, known, world_size=1, local_batch=1000, kinds=("tw",), groups=3)
    assert by_cost.groups == (("t5", "t4"), ("t3", "t2"), ("t1", "t0"))
    given = plan(
        tables, known, world_size=1, local_batch=1000, kinds=("tw",), groups=3, order="given"
    )
    assert given.groups == (("t0", "t1"), ("t2", "t3"), ("t4", "t5"))
    slope = plan(
        [*tables, TableConfig("t6", 9, 10, ["f6"], kind="dense")] * 1,
        {**known, "t6": TableStatistics(1.0)},
        world_size=1, local_batch=1000, kinds=("tw",), groups="slope",
    )  # fmt: skip
    sizes = [len(group) for group in slope.groups]
    assert sizes == sorted(sizes, reverse=True)


def test_the_law_of_a_batch_gives_its_own_uniques_back():
    generator = torch.Generator().manual_seed(0)
    indices = (torch.rand(20_000, generator=generator) ** 4 * 50_000).long()
    known = TableStatistics.measure(indices, 1000)
    assert known.lookups_per_sample == 20
    for part in (10_000, 20_000):
        different = len(torch.unique(indices[:part]))
        assert known.uniques(part, 50_000) == pytest.approx(different, rel=0.01)
    assert known.uniques(1e12, 50_000) == 50_000
    assert TableStatistics.measure(indices[:0], 8).uniques(0, 10) == 0


def test_a_plan_survives_its_text():
    made = simple_plan([TableConfig("a", 100, 4, ["a"], kind="dense")], "tw", 3)
    assert Plan.from_json(made.to_json()) == made
    assert "1 tables on 3 ranks: 1 with an owner" in made.explain()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": ()}, r"kinds must be some of tw, dp; got \(\)"),
        ({"kinds": ("rw",)}, "kinds must be some of"),
        ({"groups": "many"}, "groups must be one of auto, slope or a number; got 'many'"),
        ({"groups": 0}, "groups must be at least 1; got 0"),
        ({"order": "random"}, "order must be one of cost, given; got 'random'"),
        ({"world_size": 0}, "world_size must be at least 1; got 0"),
        ({"statistics": {}}, "statistics must have every table; they lack a"),
        ({"tables": []}, "tables must be one or more"),
        ({"twice": True}, "names of tables must differ; got a more than once"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    table = TableConfig("a", 100, 4, ["a"], kind="dense")
    arguments = {"tables": [table], "statistics": {"a": TableStatistics(1.0)}, "world_size": 2}
    arguments |= {"local_batch": 4} | change
    if arguments.pop("twice", False):
        arguments["tables"] = [table, table]
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


def test_the_command_predicts_four_plans_and_auto_is_the_least():
    command = ["plan", "--tables", "meta240", "--ranks", "8", "--local-batch", "512", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "ecorec", *command],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = {row["variant"]: row["value"] for row in json.loads(done.stdout)}
    assert found.keys() == {"auto", "tw", "dp", "slope"}
    assert found["auto"] == min(found.values())
