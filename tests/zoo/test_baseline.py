"""What is known of each baseline."""

from capi.zoo.baselines.baseline import BY_DOCUMENTATION, WITH_TRANSFORMERS
from capi.zoo.baselines.registry import BASELINES


def test__what_transformers_has_was_verified_with_it_and_nothing_else() -> None:
    for baseline in BASELINES.values():
        expected = WITH_TRANSFORMERS if baseline.model_type else BY_DOCUMENTATION
        assert baseline.verified == expected, baseline.name


def test__each_has_a_licence_a_source_and_a_file() -> None:
    for baseline in BASELINES.values():
        assert baseline.licence
        assert "/" in baseline.source
        assert baseline.file


def test__shapes_are_those_of_the_model() -> None:
    shapes = BASELINES["dino_vitb16"].shapes()
    assert shapes["positions"] == (1, 197, 768)
    assert shapes["blocks.11.mlp.expand.weight"] == (3072, 768)
