"""Rules that hold for any run, by made-up metrics."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.report import doctor
from capi.report.doctor import Remark, Seen, remarks
from capi.report.pages.data import Column
from tests.variants import TARGETS

STEPS = 1000


def config_of(*overrides: str) -> Config:
    return parse_config({}, [f"optimization.steps={STEPS}", *overrides])


def column(values: Sequence[float], last: int = STEPS) -> Column:
    """Values spread evenly over a run, up to a step."""
    return Column(np.linspace(last / len(values), last, len(values)).astype(np.int64), np.array(values, dtype=float))


def seen(columns: dict[str, Column], *overrides: str, images: int | None = 10**6) -> Seen:
    return Seen(columns, config_of(*overrides), images)


def only(found: Sequence[Remark]) -> Remark:
    assert len(found) == 1
    return found[0]


def loss_state(values: Sequence[float], **others: Column) -> str:
    found = list(doctor.on_losses(seen({"student_loss": column(values), **others})))
    return next(remark.state for remark in found if remark.title == "Loss of the student")


FALLING = list(np.linspace(6, 3, 40))
STANDING = [*np.linspace(6, 4, 20), *[4.0] * 20]


def test__a_falling_loss_is_well_and_one_that_never_fell_rings() -> None:
    assert loss_state(FALLING) == "well"
    assert loss_state([5.5] * 40) == "alarm"
    assert loss_state(list(np.linspace(5.5, 7, 40))) == "alarm"
    # One odd record at the end changes nothing.
    assert loss_state([*FALLING, 100.0]) == "well"


def test__a_loss_that_stands_still_is_worth_a_look_unless_scores_rise() -> None:
    assert loss_state(STANDING) == "look"
    assert loss_state(STANDING, **{"demo/knn/teacher": column([0.1, 0.2, 0.3, 0.4])}) == "well"
    assert loss_state(STANDING, **{"demo/knn/teacher": column([0.1, 0.3, 0.3, 0.2])}) == "look"


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test__of_a_run_without_clustering_nothing_is_said_of_clusters(kind: str) -> None:
    found = remarks(seen({"student_loss": column(FALLING)}, "clustering.prototypes=256", *TARGETS[kind]))
    told = {remark.title for remark in found}
    assert "Loss of the student" in told
    assert not told & {"Loss of the clustering", "Batch", "Data"}
    assert not [remark for remark in found if "prototypes" in remark.text + remark.advice]


@pytest.mark.parametrize(
    ("kind", "harder"), [("features", True), ("ema_head", True), ("pixels", False), ("frozen", False)]
)
def test__targets_get_harder_only_where_the_teacher_makes_them(kind: str, harder: bool) -> None:
    for scores in ([0.1, 0.2, 0.3, 0.4], [0.1, 0.3, 0.3, 0.2]):
        columns = {"student_loss": column(STANDING), "demo/knn/teacher": column(scores)}
        remark = next(iter(doctor.on_losses(seen(columns, *TARGETS[kind]))))
        assert ("the targets get harder" in (remark.text + remark.advice).lower()) == harder


def test__losses_are_not_judged_early_or_by_few_records() -> None:
    assert loss_state([5.5] * 8) == "unknown"
    early = Seen({"student_loss": column([5.5] * 40, last=150)}, config_of())
    assert {remark.state for remark in doctor.on_losses(early)} == {"unknown"}
    assert {remark.state for remark in doctor.on_losses(Seen({}))} == {"unknown"}


def score_state(values: Sequence[float]) -> str:
    return only(list(doctor.on_scores(seen({"demo/knn/teacher": column(values)})))).state


def test__scores_below_their_start_ring() -> None:
    assert score_state([0.3, 0.4, 0.5, 0.6]) == "well"
    assert score_state([0.3, 0.29, 0.2, 0.31]) == "alarm"
    # Scores of few images vary: one that is low by chance rings nothing.
    assert score_state([0.3, 0.4, 0.4, 0.2]) == "well"
    assert score_state([0.3, 0.9, 0.4, 0.35, 0.7]) == "look"
    assert score_state([0.3, 0.9, 0.4, 0.35, 0.8]) == "well"
    assert score_state([0.3, 0.1]) == "unknown"
    assert score_state([0.3]) == "unknown"
    assert only(list(doctor.on_scores(seen({})))).text == "no evaluation was made"


def test__a_value_that_is_no_number_is_told_with_its_step() -> None:
    nan = math.nan
    found = list(doctor.on_numbers(seen({"student_loss": column([3, nan, 2, 1])})))
    assert only(found).state == "look"
    assert "1 of 4 values are no numbers, the last at step 500" in found[0].text
    assert only(list(doctor.on_numbers(seen({"student_loss": column([3, 2, nan])})))).state == "alarm"
    assert only(list(doctor.on_numbers(seen({"student_loss": column([nan, nan])})))).state == "alarm"
    # What is not known at first becomes known later.
    assert list(doctor.on_numbers(seen({"prototype_perplexity": column([nan, nan, 0.5])}))) == []
    # A measure of health that ends so is judged by its own rule, over several records.
    assert only(list(doctor.on_numbers(seen({"effective_rank": column([9, 9, nan])})))).state == "look"
    assert list(doctor.on_numbers(seen({"student_loss": column(FALLING)}))) == []


def test__a_speed_that_fell_by_half_is_worth_a_look() -> None:
    steady = np.cumsum([1.0] * 30)
    slow = np.cumsum([1.0] * 24 + [2.5] * 6)
    states = [only(list(doctor.on_speed(seen({"seconds": column(list(one))})))).state for one in (steady, slow)]
    assert states == ["well", "look"]
    # The clock starts anew when a run is resumed, and an evaluation between two records takes its time.
    resumed = np.cumsum([1.0] * 10 + [30.0] + [1.0] * 9).tolist() + np.cumsum([1.0] * 20).tolist()
    found = only(list(doctor.on_speed(seen({"seconds": column(resumed)}, "optimization.batch_size=6"))))
    assert found.state == "well"
    # 25 steps a second, of 6 images.
    assert found.text == "150 images/s now, 150 as a rule"
    assert list(doctor.on_speed(seen({"seconds": column([1.0, 2.0])}))) == []


@pytest.mark.parametrize(("broken", "state"), [(0, "well"), (9, "well"), (11, "look"), (101, "alarm")])
def test__broken_images_are_judged_by_their_share(broken: int, state: str) -> None:
    found = only(list(doctor.on_images(seen({"broken_images": column([0, broken])}, images=1000))))
    assert found.state == state
    assert f"{broken} of 1000" in found.text
    assert bool(found.advice) == (state != "well")


@pytest.mark.parametrize(
    ("overrides", "images", "batch", "data"),
    [
        (["clustering.prototypes=256", "optimization.batch_size=64"], 675, "well", "well"),
        (["clustering.prototypes=2048", "optimization.batch_size=128"], 675, "look", "look"),
        (
            ["clustering.prototypes=2048", "optimization.batch_size=128", "clustering.sinkhorn=standard"],
            9999,
            "well",
            "well",
        ),
        (
            ["clustering.prototypes=2048", "optimization.batch_size=8", "clustering.sinkhorn=standard"],
            9999,
            "look",
            "well",
        ),
    ],
)
def test__batch_and_data_must_suffice_for_the_prototypes(
    overrides: list[str], images: int, batch: str, data: str
) -> None:
    found = {remark.title: remark for remark in doctor.on_sizes(seen({}, *overrides, images=images))}
    assert (found["Batch"].state, found["Data"].state) == (batch, data)
    assert ("clustering.prototypes" in found["Batch"].advice) == (batch == "look")
    assert f"{images} images" in found["Data"].text


def test__without_a_config_what_can_be_said_is_said() -> None:
    found = remarks(Seen({"student_loss": column(FALLING), "demo/knn/teacher": column([0.1, 0.2, 0.3, 0.4])}))
    states = {remark.title: remark.state for remark in found}
    assert states["Loss of the student"] == states["demo/knn/teacher"] == "well"
    assert "Batch" not in states
    assert remarks(Seen({}))
