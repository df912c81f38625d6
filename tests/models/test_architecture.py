"""Descriptions of models, and models from descriptions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from capi.config.schema import Config
from capi.errors import CapiError
from capi.method.student import student_of
from capi.models.architecture import Architecture, architecture_of, build_encoder
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import MlpHead
from capi.models.predictor import CrossPredictor, FusedPredictor
from capi.types import Statistics
from capi.zoo.build import frozen, statistics
from capi.zoo.released import load_released
from tests.variants import VARIANTS, learner_of, varied


def shapes_of(model: CapiEncoder) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def rebuilt(model: CapiEncoder) -> CapiEncoder:
    """Through the description as text, with the weights moved over."""
    plain = json.loads(json.dumps(architecture_of(model).as_plain()))
    with torch.device("meta"):
        copy = build_encoder(Architecture.from_plain(plain), model.statistics)
    assert all(value.is_meta for value in copy.state_dict().values())
    assert shapes_of(copy) == shapes_of(model)
    copy.load_state_dict(model.state_dict(), strict=True, assign=True)
    return copy.eval()


def assert_same_model(ours: CapiEncoder, theirs: CapiEncoder, images: Tensor) -> None:
    with torch.no_grad():
        for value, other in zip(ours(images), theirs(images), strict=True):
            assert torch.equal(value, other)
        visible, hidden = torch.tensor([[0, 3, 4], [1, 2, 5]]), torch.tensor([[1, 5], [0, 3]])
        students = [
            student_of(encoder=model.encoder, predictor=model.predictor, head=nn.Identity()) for model in (ours, theirs)
        ]
        predictions = [student(images, visible, hidden) for student in students]
        assert torch.equal(*predictions)
        if ours.head is not None:
            assert theirs.head is not None
            assert torch.equal(ours.head(predictions[0]), theirs.head(predictions[1]))


@pytest.mark.parametrize("overrides", [[], ["model.positions=released"], *VARIANTS.values()], ids=str)
def test__every_variant_is_rebuilt_from_its_description(small_config: Config, overrides: list[str]) -> None:
    config = varied(small_config, *overrides)
    model = frozen(learner_of(config).student, statistics(config)).eval()
    assert_same_model(model, rebuilt(model), torch.randn(2, 3, 32, 24))


def test__reference_checkpoint_is_rebuilt_from_its_description(reference_checkpoint: Path) -> None:
    model = load_released(reference_checkpoint)
    assert architecture_of(model).positions == "released"
    size = 3 * model.patch_size
    assert_same_model(model, rebuilt(model), torch.randn(2, model.encoder.patch_embedding.weight.shape[1], size, size))


def test__models_without_a_head_are_rebuilt(model: CapiEncoder) -> None:
    assert architecture_of(model).head is None
    assert_same_model(model, rebuilt(model), torch.randn(2, 3, 16, 12))


def test__sizes_of_an_mlp_head_are_kept(model: CapiEncoder) -> None:
    model.head = MlpHead(width=48, outputs=7, hidden=20, bottleneck=12)
    assert_same_model(model, rebuilt(model), torch.randn(2, 3, 16, 12))


def test__statistics_and_fresh_weights_go_into_what_is_built(model: CapiEncoder) -> None:
    built = build_encoder(architecture_of(model), Statistics((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)))
    assert built.statistics == Statistics((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    assert shapes_of(built) == shapes_of(model)
    assert all(value.isfinite().all() for value in built.state_dict().values())


def test__description_is_what_the_model_was_made_with() -> None:
    encoder = Encoder(
        width=32,
        depth=3,
        heads=2,
        patch_size=7,
        registers=5,
        channels=2,
        mlp_width=80,
        positions="learned",
        grid=(3, 4),
    )
    model = CapiEncoder(encoder=encoder, predictor=FusedPredictor(width=32))
    assert architecture_of(model) == Architecture(
        width=32,
        depth=3,
        heads=2,
        mlp_width=80,
        patch_size=7,
        registers=5,
        channels=2,
        positions="learned",
        grid=(3, 4),
        predictor_kind="fused",
        predictor_mask_tokens=None,
        predictor_width=None,
        predictor_depth=None,
        predictor_heads=None,
        predictor_mlp_width=None,
        head=None,
        outputs=None,
        head_hidden=None,
        head_bottleneck=None,
    )


def test__what_has_no_description_is_refused(model: CapiEncoder) -> None:
    model.head = nn.Linear(48, 3)
    with pytest.raises(CapiError, match="head of class Linear"):
        architecture_of(model)
    model.head = None
    model.predictor = CrossPredictor(
        width=48, depth=1, heads=4, context_width=32, mlp_width=64, positions="learned", grid=(2, 2)
    )
    with pytest.raises(CapiError, match="must be the same"):
        architecture_of(model)

    class Another(FusedPredictor):
        pass

    model.predictor = Another(width=32)
    with pytest.raises(CapiError, match="class Another is none of"):
        architecture_of(model)
    model.encoder.blocks = nn.ModuleList()
    with pytest.raises(CapiError, match="without blocks"):
        architecture_of(model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"widht": 3}, 'FILE has "widht", which no architecture has; did you mean "width"'),
        ({"depth": ...}, 'FILE lacks "depth"'),
        ({"width": 32.0}, '"width": 32.0, expected a whole number'),
        ({"width": True}, '"width": True, expected a whole number'),
        ({"width": None}, '"width": None, expected a whole number'),
        ({"depth": 0}, "from 1 to 4096"),
        ({"depth": 10**9}, "from 1 to 4096"),
        ({"registers": -1}, "from 0 to"),
        ({"patch_size": 10**9}, "from 1 to 4096"),
        ({"positions": "sideways"}, "expected one of axial, released, learned"),
        ({"positions": ["axial"]}, "expected one of axial, released, learned"),
        ({"head": "round"}, "expected one of linear, mlp, map, null"),
        ({"positions": "learned", "grid": [4]}, "two whole numbers"),
        ({"positions": "learned", "grid": [4, 2**40]}, "two whole numbers"),
        ({"positions": "learned"}, "grid=None, but it has a value if, and only if, positions are learned"),
        ({"grid": [4, 4]}, "positions are learned"),
        ({"predictor_kind": "fused"}, "the predictor is not fused"),
        ({"predictor_width": None}, "the predictor is not fused"),
        ({"predictor_kind": "self"}, "the predictor is of kind self"),
        ({"outputs": 3}, "there is a head"),
        ({"head": "linear", "outputs": 3, "head_hidden": 4}, "the head is an mlp"),
    ],
    ids=str,
)
def test__impossible_descriptions_are_refused_by_name(model: CapiEncoder, changes: dict, words: str) -> None:
    plain = architecture_of(model).as_plain() | changes
    plain = {name: value for name, value in plain.items() if value is not ...}
    with pytest.raises(CapiError) as error:
        Architecture.from_plain(plain, source="FILE")
    assert words in str(error.value)


def test__largest_description_can_be_built_without_memory(model: CapiEncoder) -> None:
    largest = replace(architecture_of(model), width=2**20, heads=2**18, mlp_width=2**20, patch_size=2**12)
    with torch.device("meta"):
        built = build_encoder(Architecture.from_plain(largest.as_plain() | {"channels": 2**12, "registers": 2**20}))
    assert built.width == 2**20
