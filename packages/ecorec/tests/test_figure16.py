"""The simulated timeline of a plan takes what `sharding_plan` predicts in closed form."""

import random

import pytest

from ecorec import TableConfig
from ecorec.experiments.figure16 import timeline
from ecorec.sharding_plan import Plan, StepProfile, TableStatistics, predict


def predicted_and_simulated_s(seed, kinds):
    """Of a plan that nobody would make: kinds, owners and groups by chance."""
    chance = random.Random(seed)
    tables = [
        TableConfig(f"t{k}", round(10 ** chance.uniform(1, 5)), chance.choice([8, 16]),
                    [f"f{k}.{i}" for i in range(chance.choice([1, 1, 2]))], kind="dense")
        for k in range(chance.randint(1, 12))
    ]  # fmt: skip
    known = {table.name: TableStatistics(chance.uniform(0.1, 40)) for table in tables}
    size, batch = chance.choice([1, 2, 3, 8]), chance.choice([16, 4096])
    profile = StepProfile(
        link_bytes_per_s=10 ** chance.uniform(7, 10), mlp_bytes=chance.choice([0, 1000])
    )
    kind = {table.name: chance.choice(kinds) for table in tables}
    owner = {name: chance.randrange(size) for name, word in kind.items() if word == "tw"}
    count = chance.randint(1, 5)
    groups = [tuple(name for name in owner if int(name[1:]) % count == g) for g in range(count)]
    groups = [names for names in groups if names]
    made = Plan(kind, owner, tuple(groups), "given", size, batch)
    forward_s = {
        table.name: profile.forward_s(
            table, known[table.name], batch * (size if kind[table.name] == "tw" else 1)
        )
        for table in tables
    }
    lookups = sum(statistics.lookups_per_sample for statistics in known.values())
    lengths = sum(len(table.feature_names) for table in tables)
    predicted_s = predict(
        made, tables, forward_s, profile, index_bytes=4 * batch * (lookups + lengths)
    )
    return predicted_s, timeline(made, tables, known, profile).makespan_s


@pytest.mark.parametrize("kind", ["tw", "dp"])
def test_with_one_kind_of_table_the_timeline_takes_the_predicted_step(kind):
    for seed in range(100):
        predicted_s, simulated_s = predicted_and_simulated_s(seed, [kind])
        assert simulated_s == pytest.approx(predicted_s, rel=1e-9), seed


def test_with_both_kinds_the_prediction_is_never_too_low():
    # It lets replicas wait for the slowest rank's tables; in the timeline no rank waits for that.
    for seed in range(200):
        predicted_s, simulated_s = predicted_and_simulated_s(seed, ["tw", "dp"])
        assert simulated_s <= predicted_s * (1 + 1e-9), seed
        assert predicted_s <= 1.05 * simulated_s, seed
