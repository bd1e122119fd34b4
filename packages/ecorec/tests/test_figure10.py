import pytest

from ecorec.experiments import figure10
from ecorec.sharding_plan import plan_of_traces
from ecorec.traces import meta788


@pytest.mark.parametrize("system", ["ours", "el-rec", "tt-rec"])
def test_the_fit_gives_the_times_back_that_it_is_made_from(system):
    fitted = figure10.fit(system)
    tables, known = plan_of_traces(788, 32, figure10.LOCAL_BATCH)
    largest = sorted(meta788(), key=lambda trace: -trace.num_embeddings)[: figure10.LARGEST]
    names = {trace.name for trace in largest}
    chosen = [table for table in tables if table.name in names]
    for batch, milliseconds in zip((4096, 131072), (1, 6), strict=True):
        printed = figure10._FORWARD_MS[system][milliseconds]
        found = 1e3 * sum(fitted.forward_s(table, known[table.name], batch) for table in chosen)
        assert found == pytest.approx(printed, rel=0.25)
