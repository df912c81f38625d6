import math
import re

import numpy as np
import pytest

from capi.errors import CapiError
from capi.report.costs import CostAssumptions, cost_of, device_power, seconds_of_starts, spoken_time
from capi.report.pages.data import Column
from capi.train.cost.hardware import Gpu, gpus
from capi.train.cost.plan import Assumptions


def clock(*records: tuple[int, float]) -> Column:
    return Column(np.array([step for step, _ in records], np.int64), np.array([value for _, value in records], float))


def test__the_last_clock_of_each_start_is_counted() -> None:
    # The second start took over at step 20 and its clock restarted.
    assert seconds_of_starts(clock((10, 5.0), (20, 11.0), (30, 4.0), (40, 9.0)), [0, 20]) == [11.0, 9.0]


def test__a_start_whose_first_record_is_later_than_the_last_clock_still_restarts() -> None:
    assert seconds_of_starts(clock((10, 5.0), (20, 50.0)), [0, 10]) == [5.0, 50.0]


def test__a_roll_back_within_a_start_adds_both_clocks() -> None:
    assert seconds_of_starts(clock((10, 8.0), (20, 3.0), (30, 6.0)), [0]) == [14.0]


def test__starts_that_wrote_nothing_cost_nothing() -> None:
    assert seconds_of_starts(clock((10, 5.0), (20, 9.0)), [0, 0, 10, 10]) == [0.0, 5.0, 0.0, 9.0]
    assert seconds_of_starts(clock(), []) == [0.0]


def test__values_that_are_not_finite_are_passed_over() -> None:
    assert seconds_of_starts(clock((10, 5.0), (20, math.nan), (30, 9.0)), [0]) == [9.0]


def test__an_hour_at_a_kilowatt_is_a_kilowatt_hour() -> None:
    cost = cost_of([3600.0], [{"device": "cuda"}], CostAssumptions(watts=1000.0, carbon=0.2))
    assert cost.kilowatt_hours == pytest.approx(1.0)
    assert cost.carbon_kilograms == pytest.approx(0.2)
    assert any("1000 W" in sentence and "given" in sentence for sentence in cost.assumptions)


def test__a_report_assumes_the_same_carbon_as_a_plan() -> None:
    cost = cost_of([3600.0], [{"device": "cuda"}], CostAssumptions(watts=1000.0))
    assert cost.carbon_kilograms == pytest.approx(Assumptions().carbon_intensity)


def test__the_papers_energy_and_its_intensity_give_the_papers_carbon() -> None:
    cost = cost_of([2651 * 3600.0], [{"device": "cuda"}], CostAssumptions(watts=1000.0))
    said = next(sentence for sentence in cost.assumptions if "The paper's" in sentence)
    implied = float(re.search(r"imply ([\d.]+)\.", said)[1])
    assert round(2651 * implied) == 928


@pytest.mark.parametrize("gpu", gpus().values(), ids=lambda gpu: gpu.name)
def test__a_report_assumes_the_same_power_as_a_plan(gpu: Gpu) -> None:
    assert device_power("cuda", gpu.title).watts == gpu.watts


def test__each_start_counts_with_its_own_device() -> None:
    starts = [{"device": "cuda", "machine": {"accelerator": "NVIDIA H100 80GB HBM3"}}, {"device": "cpu"}]
    cost = cost_of([3600.0, 3600.0], starts)
    assert cost.kilowatt_hours == pytest.approx(0.700 + 0.065)
    assert sum("assumed" in sentence for sentence in cost.assumptions) == 1


@pytest.mark.parametrize(
    ("name", "watts"),
    [
        ("NVIDIA A100-SXM4-80GB", 400),
        ("NVIDIA A100 80GB PCIe", 300),
        ("NVIDIA A100-PCIE-40GB", 250),
        ("Tesla T4", 70),
        ("NVIDIA L4", 72),
        ("NVIDIA L40S", 350),
        ("Tesla V100-SXM2-16GB", 300),
        ("NVIDIA GeForce RTX 4090", 450),
    ],
)
def test__published_power_is_found_by_the_makers_name(name: str, watts: float) -> None:
    power = device_power("cuda:0", name)
    assert power.watts == watts
    assert "published" in power.said


@pytest.mark.parametrize(("device", "name"), [("cpu", None), ("cuda", None), ("cuda:0", "Unheard Of 9"), ("mps", None)])
def test__an_assumed_power_is_said_to_be_assumed(device: str, name: str | None) -> None:
    power = device_power(device, name)
    assert power.watts > 0
    assert "assumed" in power.said
    assert "guess" in power.said


@pytest.mark.parametrize(
    ("watts", "carbon"), [(0.0, None), (-3.0, None), (math.nan, None), (None, -1.0), (None, math.inf)]
)
def test__impossible_costs_are_refused(watts: float | None, carbon: float | None) -> None:
    with pytest.raises(CapiError, match="must be a number"):
        CostAssumptions(watts, carbon)


def test__times_are_said_in_the_unit_that_suits() -> None:
    assert [spoken_time(value) for value in (24.0, 600.0, 36000.0)] == ["24 seconds", "10 minutes", "10.0 hours"]


def test__small_amounts_are_said_in_thousandths() -> None:
    facts = dict(cost_of([36.0], [{"device": "cpu"}], CostAssumptions(watts=100.0, carbon=0.5)).facts)
    assert facts["Energy of the device"] == "1 Wh"
    assert facts["CO2 equivalent"] == "0.5 g"
