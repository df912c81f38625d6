import pytest
from pydantic import ValidationError

from capi.config.schema import DataConfig, EvaluationConfig, InitConfig


def test__a_side_is_a_square() -> None:
    assert DataConfig(image_size=64).height_and_width == (64, 64)
    assert DataConfig(image_size=(64, 96)).height_and_width == (64, 96)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop_scale": (1.0, 0.6)}, "runs backwards"),
        ({"crop_aspect": (2.0, 0.5)}, "runs backwards"),
        ({"std": (0.2, 0.0, 0.2)}, "above 0 in every channel"),
    ],
)
def test__impossible_images_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**values)


def test__strictness_needs_weights_to_start_from() -> None:
    assert not InitConfig(encoder="run", strict=False).strict
    with pytest.raises(ValidationError, match="has no meaning without weights"):
        InitConfig(strict=False)


def test__defaults_are_each_evaluation_s_own() -> None:
    first, second = EvaluationConfig(benchmark="demo/knn"), EvaluationConfig(benchmark="demo/knn")
    first.weights.append("student")
    first.options["seed"] = 1
    assert second.weights == ["teacher"]
    assert second.options == {}
