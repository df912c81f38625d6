"""What is said of the published models."""

import re
import subprocess
import sys

import pytest
import torch

from capi.config.files import load_config
from capi.models.encoder import Encoder
from capi.zoo.published.registry import RELEASED, list_models, similar_names


def test__the_four_published_models_are_listed() -> None:
    assert [model.name for model in list_models()] == [
        "capi_vitl14_lvd",
        "capi_vitl14_p205",
        "capi_vitl14_in22k",
        "capi_vitl14_in1k",
    ]
    assert {name: model.file for name, model in RELEASED.items()} == {
        "capi_vitl14_lvd": "capi_vitl14_lvd.pth",
        "capi_vitl14_p205": "capi_vitl14_p205.pth",
        "capi_vitl14_in22k": "capi_vitl14_i22k.pth",
        "capi_vitl14_in1k": "capi_vitl14_in1k.pth",
    }


@pytest.mark.parametrize("model", list_models(), ids=lambda model: model.name)
def test__every_fact_is_there(model) -> None:
    assert model.address.startswith("https://")
    assert model.licence == "Apache-2.0"
    assert model.verified
    assert model.data
    assert all(0 < score < 100 for score in model.scores.values())


def test__the_number_of_parameters_is_that_of_the_encoder() -> None:
    config = load_config("vitl14").model
    for model in list_models():
        with torch.device("meta"):
            encoder = Encoder(
                width=config.width,
                depth=config.depth,
                heads=config.heads,
                patch_size=model.patch_size,
                registers=config.registers,
                mlp_width=round(config.width * config.mlp_ratio),
            )
        assert model.parameters == sum(parameter.numel() for parameter in encoder.parameters())
        assert re.fullmatch(r"ViT-L", model.architecture)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("capi_vitl14_ldv", '"capi_vitl14_lvd"'),
        ("capi-vitl14-in1k", '"capi_vitl14_in1k"'),
        ("capi_vitl14_i22k", '"capi_vitl14_in22k"'),
        ("CAPI_vitl14_p205", '"capi_vitl14_p205"'),
    ],
)
def test__a_name_with_a_typo_finds_its_nearest(name: str, expected: str) -> None:
    assert similar_names(name).startswith(f" (did you mean {expected}")


def test__nothing_is_suggested_for_another_word() -> None:
    assert similar_names("resnet50") == ""
    assert similar_names("student.pht", ["student.pth", "other"]) == ' (did you mean "student.pth"?)'


def test__it_is_plain_data() -> None:
    code = (
        "import sys, capi.zoo.published.registry; "
        "print([n for n in ('torch', 'numpy', 'yaml', 'rich') if n in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
