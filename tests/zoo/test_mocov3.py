"""MoCo v3: which of its encoders is taken, and its table of positions."""

import math
from pathlib import Path

import pytest
import torch

from capi.errors import CapiError
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.mocov3 import BASELINES
from tests.zoo.baseline_checkpoints import assert_same, images, original, random_model, save, small


def test__the_base_encoder_is_taken_unless_the_other_is_asked_for(tmp_path: Path) -> None:
    baseline, x = small("mocov3_vitb16"), images()
    base, momentum = random_model(baseline), random_model(baseline)
    state = {
        f"module.{name}.{key}": value
        for name, model in (("base_encoder", base), ("momentum_encoder", momentum))
        for key, value in (original(baseline, model) | {"head.0.weight": torch.zeros(2, 2)}).items()
    }
    contents = {"state_dict": state | {"module.predictor.0.weight": torch.zeros(2, 2)}, "epoch": 300}
    path = save(contents, tmp_path / "vit-b-300ep.pth.tar")
    assert_same(load_baseline(baseline, path)(x), base(x))
    assert_same(load_baseline(baseline, path, "momentum_encoder")(x), momentum(x))


def test__a_file_of_linear_probing_is_read_too(tmp_path: Path) -> None:
    baseline, x = small("mocov3_vitb16"), images()
    model = random_model(baseline)
    state = {f"module.{name}": value for name, value in original(baseline, model).items()}
    contents = {"state_dict": state | {"module.head.weight": torch.zeros(10, 24), "module.head.bias": torch.zeros(10)}}
    assert_same(load_baseline(baseline, save(contents, tmp_path / "linear.pth.tar"))(x), model(x))


def test__on_another_square_the_table_is_computed_rows_first() -> None:
    model, x = random_model(small("mocov3_vitb16")), images(3, 3)
    added = model._embed(x, 3, 3)[:, 1:] - model.patch_embedding(x).flatten(2).transpose(1, 2)
    expected = torch.tensor(
        [[_wave(row, column, channel) for channel in range(24)] for row in range(3) for column in range(3)]
    )
    torch.testing.assert_close(added[0], expected, atol=1e-5, rtol=1e-5)


def _wave(row: int, column: int, channel: int) -> float:
    """A quarter of the channels each: sine of the row, cosine of it, sine of the column, cosine of it."""
    quarter, within = divmod(channel, 6)
    angle = (row if quarter < 2 else column) / 10_000 ** (within / 6)
    return math.cos(angle) if quarter % 2 else math.sin(angle)


def test__images_that_are_not_square_are_refused() -> None:
    with pytest.raises(CapiError, match="takes square images only"):
        random_model(small("mocov3_vitb16"))(images(3, 4))


def test__the_small_one_has_twelve_heads() -> None:
    assert {each.name: each.architecture.heads for each in BASELINES} == {"mocov3_vits16": 12, "mocov3_vitb16": 12}
