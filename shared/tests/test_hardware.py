"""Hardware profiles: what they refuse, what they answer, what ships, what calibration measures."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from septet_shared import ranks
from septet_shared.hardware import (
    SHIPPED,
    HardwareProfile,
    Link,
    _Bench,
    _cuda_facts,
    _fit_link,
    calibrate,
)


def profile(**changes):
    given = {
        "name": "test",
        "gemm_flops": {"float32": 4.0},
        "copy_bytes_s": 2.0,
        "memory_bytes_s": 16.0,
        "link": {"nic": Link(0.5, 1.0, low=0.5, high=2.0)},
    }
    return HardwareProfile(**{**given, **changes})


@pytest.mark.parametrize("name", SHIPPED)
def test_every_constant_of_a_shipped_profile_has_a_source(name):
    shipped = HardwareProfile.load(name)
    assert shipped.name == name
    unset = HardwareProfile("unset", 1.0, 1.0, 1.0, 1.0)
    leaves = {f"gemm_flops.{dtype}" for dtype in shipped.gemm_flops}
    for kind, link in shipped.link.items():
        leaves |= {
            f"link.{kind}.{f.name}" for f in fields(Link) if getattr(link, f.name) is not None
        }
    for field in fields(HardwareProfile):
        plain = field.name not in ("name", "gemm_flops", "link", "source")
        if plain and getattr(shipped, field.name) != getattr(unset, field.name):
            leaves.add(field.name)
    leaves |= {"machines", "gpus_per_machine"}
    assert set(shipped.source) == leaves
    known = (
        "assumed",
        "fitted",
        "measured",
        "NVIDIA",
        "CUDA",
        "MPipeMoE",
        "MPMoE",
        "EcoRec",
        "one ",
    )
    assert all(text.startswith(known) for text in shipped.source.values())


def test_the_shipped_profiles_have_what_the_systems_ask_for():
    adira = HardwareProfile.load("dgx-a100-8x8")
    assert (adira.machines, adira.gpus_per_machine) == (8, 8)
    assert set(adira.link) == {"nvlink", "nvlink_small", "hbm_small", "pcie", "nic"}
    for kind in ("gemm:float32", "gemm:tf32", "gemm:bfloat16", "copy", "memory", "link:nic"):
        assert adira.seconds(kind, 1e9) > 0
    unknown = HardwareProfile.load("pcie-4x8").link["nic"]
    assert unknown.high >= 10 * unknown.low
    for name in SHIPPED[:-1]:
        gpu = HardwareProfile.load(name)
        assert min(gpu.sm_count, gpu.shared_bytes_per_block, gpu.l2_bytes) > 0


def test_the_files_of_the_shipped_profiles_are_as_they_would_be_saved(tmp_path):
    for name in SHIPPED:
        HardwareProfile.load(name).save(tmp_path / f"{name}.json")
        again = HardwareProfile.load(tmp_path / f"{name}.json")
        assert again == HardwareProfile.load(name)


def test_a_saved_profile_is_loaded_unchanged(tmp_path):
    before = profile(
        gemm_flops={"tf32": [(1, 2), (5, 8.5)], "float32": 3},
        interference={("link:nic", frozenset({"gemm", "copy"})): 0.5},
        source={"copy_bytes_s": "assumed"},
        sm_count=3,
    )
    before.save(tmp_path / "p.json")
    assert HardwareProfile.load(tmp_path / "p.json") == before
    assert HardwareProfile.load(str(tmp_path / "p.json")) == before
    assert list(tmp_path.iterdir()) == [tmp_path / "p.json"]


def test_plain_numbers_stand_for_every_dtype_and_class():
    plain = HardwareProfile("plain", 4, 2, 1, 8)
    assert plain.seconds("gemm:whatever", 12) == 3
    assert plain.seconds("link:whatever", 16) == 2
    assert profile(link={"nic": 5}).link == {"nic": Link(0.0, 5.0)}


def test_a_link_takes_its_latency_and_then_its_bytes():
    assert profile().seconds("link:nic", 3) == 0.5 + 3
    assert profile().seconds("link:nic", 0) == 0.5
    assert profile().latency_s("copy") == 0


@pytest.mark.parametrize(
    ("work", "rate"), [(0, 2), (1, 2), (3, 5), (5, 8), (6, 7), (9, 4), (10**12, 4)]
)
def test_a_piecewise_rate_is_linear_between_its_points_and_constant_outside(work, rate):
    stepped = profile(gemm_flops={"tf32": [(1, 2), (5, 8), (9, 4)]})
    assert stepped.rate("gemm:tf32", work) == rate


def test_the_entry_that_names_all_running_kinds_wins_over_parts_of_it():
    table = {
        ("link", frozenset({"gemm"})): 0.5,
        ("link:nic", frozenset({"copy"})): 0.25,
        ("link:nic", frozenset({"gemm:tf32", "copy"})): 0.75,
    }
    slowed = profile(interference=table)
    assert slowed.factor("link:nic", []) == 1
    assert slowed.factor("link:nic", ["memory"]) == 1
    assert slowed.factor("link:nvlink", ["gemm:float32"]) == 0.5
    assert slowed.factor("link:nic", {"gemm:tf32", "copy"}) == 0.75
    assert slowed.factor("link:nic", {"gemm:float32", "copy"}) == 0.25  # the smallest of parts
    assert slowed.factor("gemm:tf32", {"link:nic", "copy"}) == 1
    assert profile().factor("link:nic", {"copy"}) == 1


def test_the_bounds_of_a_profile_move_only_links_with_a_band():
    banded = profile(link={"nic": Link(0.5, 1.0, low=0.25), "nvlink": 8})
    assert banded.bound("low").link == {"nic": Link(0.5, 0.25), "nvlink": Link(0.0, 8.0)}
    assert banded.bound("high").link == {"nic": Link(0.5, 1.0), "nvlink": Link(0.0, 8.0)}
    with pytest.raises(ValueError, match="end must be 'low' or 'high'; got 'middle'"):
        banded.bound("middle")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name must be a non-empty string; got ''"),
        ({"copy_bytes_s": 0}, "copy_bytes_s must be finite and > 0; got 0"),
        ({"memory_bytes_s": float("nan")}, "memory_bytes_s must be finite and > 0; got nan"),
        ({"memory_bytes_s": "fast"}, r"memory_bytes_s must be a number > 0 or .*; got 'fast'"),
        ({"copy_bytes_s": True}, "copy_bytes_s must be a number"),
        ({"gemm_flops": {"tf32": -1}}, r"gemm_flops\['tf32'\] must be finite and > 0; got -1"),
        ({"gemm_flops": {"tf32": []}}, r"gemm_flops\['tf32'\] must hold one or more"),
        ({"gemm_flops": {"tf32": [(1, 2), (1, 3)]}}, "must have points of increasing work"),
        ({"gemm_flops": {"tf32": [(1, 2, 3)]}}, r"must hold one or more \(work, rate\) pairs"),
        (
            {"gemm_flops": {"tf32": [(1, 0)]}},
            r"rate of gemm_flops\['tf32'\] must be finite and > 0",
        ),
        ({"link": {"nic": "x"}}, r"link\['nic'\] must be a Link or a number > 0; got 'x'"),
        ({"link": {"nic": {"latency_s": -1, "bytes_s": 1}}}, r"link\['nic'\]: latency_s must be"),
        ({"link": {"nic": {"bytes_s": 1}}}, r"link\['nic'\]: .*latency_s"),
        ({"machines": 0}, "machines must be an integer >= 1; got 0"),
        ({"gpus_per_machine": None}, "gpus_per_machine must be an integer >= 1; got None"),
        ({"l2_bytes": 1.5}, "l2_bytes must be an integer >= 1; got 1.5"),
        ({"launch_s": float("inf")}, "launch_s must be finite and >= 0; got inf"),
        ({"source": "me"}, "source must map field names to text; got 'me'"),
        ({"interference": {"copy": 0.5}}, "interference must be keyed by"),
        ({"interference": {("copy", frozenset()): 0.5}}, "interference must be keyed by"),
        ({"interference": {("copy", frozenset({"x"})): 0.5}}, "kind must be link:<class>"),
        ({"interference": {("copy", frozenset({"gemm"})): 2}}, r"must be finite and in \(0, 1\]"),
        ({"interference": [{"kind": "copy"}]}, "interference must map"),
    ],
)
def test_a_bad_field_names_itself_its_rule_and_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        profile(**changes)


@pytest.mark.parametrize("band", [{"low": 2}, {"high": 0.5}, {"low": [(0, 0.5), (9, 2)]}])
def test_a_band_that_does_not_hold_the_rate_is_refused(band):
    with pytest.raises(ValueError, match="low <= bytes_s <= high must hold; got"):
        Link(0, 1, **band)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "p.json: "),
        ("[]", "p.json: a profile is a JSON object; got list"),
        (
            '{"gemm_flop": 3}',
            "p.json: field 'gemm_flop' is unknown; the fields are name, gemm_flops",
        ),
        ('{"name": "x"}', "p.json: .*gemm_flops"),
    ],
)
def test_a_bad_file_names_itself_and_what_is_wrong(tmp_path, text, message):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        HardwareProfile.load(tmp_path / "p.json")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(FileNotFoundError, match=r"one of dgx-a100-8x8, .*; got 'b300'"):
        HardwareProfile.load("b300")


@pytest.mark.parametrize(("latency_s", "bytes_s"), [(0.002, 1e9), (0.0, 5e8), (1e-6, 25e9)])
def test_a_link_is_found_again_in_exact_times(latency_s, bytes_s):
    points = [(64.0 * 4**i, latency_s + 64.0 * 4**i / bytes_s) for i in range(10)]
    link = _fit_link(points)
    assert link.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-12)
    assert link.bytes_s == pytest.approx(bytes_s, rel=1e-6)


def test_times_that_no_line_with_both_signs_fits_still_give_a_legal_link():
    falling = _fit_link([(64.0, 3.0), (128.0, 2.0), (256.0, 1.0)])  # larger was faster
    assert falling.latency_s == 1.0
    assert falling.bytes_s == 256
    bent = _fit_link([(64.0, 1.0), (128.0, 4.0), (256.0, 16.0)])  # latency would be negative
    assert bent.latency_s == 0
    assert 16 <= bent.bytes_s <= 64


def measured(group, seconds):
    return calibrate(group, seconds=seconds)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "long"])
def test_calibration_takes_a_positive_number_of_seconds(seconds):
    with pytest.raises(ValueError, match="seconds must be"):
        calibrate(None, seconds=seconds)


@pytest.mark.ranks
def test_ranks_of_two_unequal_machines_measure_one_profile_with_both_links():
    one, *others = ranks.run(measured, 3, 0.5, ranks_per_machine=2)
    assert others == [one, one]
    assert (one.machines, one.gpus_per_machine) == (2, 2)
    assert set(one.link) == {"nvlink", "nic"}
    assert set(one.gemm_flops) == {"float32", "bfloat16"}
    how = "measured by calibrate() on 3 rank(s)"
    assert all(text.startswith(how) for text in one.source.values())


@pytest.mark.ranks
def test_one_rank_alone_measures_no_link():
    (alone,) = ranks.run(measured, 1, 0.5)
    assert alone.link == {}
    assert alone.memory_bytes_s == 2 * alone.copy_bytes_s > 0


class OneRank:
    """A rank alone, as calibration sees it."""

    def __init__(self, device):
        self.device = device

    def barrier(self, op):
        pass

    def all_gather_object(self, x):
        return [x]


def test_facts_of_a_gpu_come_from_its_properties_and_from_timed_launches(monkeypatch):
    synchronised = []
    found = {"multi_processor_count": 7, "L2_cache_size": 2**20, "shared_memory_per_block": 49152}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**found))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronised.append)
    gpu = torch.device("cuda:0")
    facts = _cuda_facts(_Bench(OneRank(gpu)), gpu, torch.zeros(4))
    assert (facts["sm_count"], facts["l2_bytes"]) == (7, 2**20)
    assert facts["shared_bytes_per_block"] == 49152  # what a driver without opt-in offers
    assert 0 < facts["launch_s"] < 1e-3
    assert facts["host_sync_s"] >= 0
    assert set(synchronised) == {gpu}
    found["shared_memory_per_block_optin"] = 166912
    assert (
        _cuda_facts(_Bench(OneRank(gpu)), gpu, torch.zeros(4))["shared_bytes_per_block"] == 166912
    )
