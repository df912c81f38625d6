from typing import Any

import pytest
from pydantic import ValidationError

from capi.config.benchmarks import PROTOCOL_CONFIGS, BenchmarkConfig, KnnSegmentationConfig, SegmentationConfig
from capi.evals.fitted_probes import PROBES
from capi.evals.probes import PAPER_GRID
from capi.runtime.protocol import PAPER_STRENGTHS

EVERY = pytest.mark.parametrize("kind", PROTOCOL_CONFIGS.values(), ids=PROTOCOL_CONFIGS)


@EVERY
def test__every_field_is_documented(kind: type[BenchmarkConfig]) -> None:
    assert [name for name, field in kind.model_fields.items() if not field.description and name != "protocol"] == []
    assert kind.__doc__


def test__a_protocol_is_known_by_the_name_in_its_config() -> None:
    for name, kind in PROTOCOL_CONFIGS.items():
        assert kind(dataset="demo").protocol == name
    # What an evaluation saves is known by the same names.
    assert set(PROTOCOL_CONFIGS) == set(PROBES)


def test__tasks_follow_from_the_name() -> None:
    for name, kind in PROTOCOL_CONFIGS.items():
        assert kind.task == ("segmentation" if name.endswith("segmentation") else "classification")
        assert issubclass(kind, SegmentationConfig) == (kind.task == "segmentation")


def test__the_defaults_are_the_paper_s() -> None:
    for name in ("attentive", "linear"):
        probe = PROTOCOL_CONFIGS[name](dataset="demo")
        settings = [(rate, decay) for decay in probe.weight_decays for rate in probe.learning_rates]
        assert settings == [(setting.learning_rate, setting.weight_decay) for setting in PAPER_GRID]
        assert len(settings) == 30
    neighbors = KnnSegmentationConfig(dataset="demo")
    assert (neighbors.neighbors, neighbors.distances) == ((1, 3, 10, 30), ("l2", "cosine"))
    assert neighbors.ignored_labels_vote
    logistic = PROTOCOL_CONFIGS["logistic-segmentation"](dataset="demo")
    assert logistic.strengths == PAPER_STRENGTHS
    assert logistic.strengths == pytest.approx([10.0 ** (-6 + 11 * step / 7) for step in range(8)])
    assert (logistic.strengths[0], logistic.strengths[-1]) == pytest.approx((1e-6, 1e5))


@EVERY
def test__held_out_are_ten_percent_and_class_0_counts(kind: type[BenchmarkConfig]) -> None:
    config = kind(dataset="demo")
    assert config.validation_share == 0.1
    # Only the data set may say that a class is ignored.
    assert getattr(config, "ignored", None) is None


@pytest.mark.parametrize(
    ("given", "expected"), [(None, None), (64, (64, 64)), ((32, 48), (32, 48))], ids=["none", "square", "oblong"]
)
def test__a_size_is_a_side_or_height_and_width(given: Any, expected: Any) -> None:
    assert KnnSegmentationConfig(dataset="demo", image_size=given).height_and_width == expected


@EVERY
def test__configs_are_frozen_and_know_no_other_keys(kind: type[BenchmarkConfig]) -> None:
    config = kind(dataset="demo")
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3
    with pytest.raises(ValidationError, match="Extra inputs"):
        kind(dataset="demo", sed=3)


def test__segmentation_reports_one_split() -> None:
    assert KnnSegmentationConfig(dataset="demo", tests=("val",)).tests == ("val",)
    for tests in ((), ("val", "test")):
        with pytest.raises(ValidationError, match="segmentation reports one split"):
            KnnSegmentationConfig(dataset="demo", tests=tests)
