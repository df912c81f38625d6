"""AIM: its positions, the layer of the paper, and its names."""

import math
from pathlib import Path

import torch

from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.sources.aim import BASELINES
from tests.zoo.baseline_checkpoints import assert_same, images, original, random_model, save, small


def test__its_names_are_read_and_a_head_is_left_out(tmp_path: Path) -> None:
    baseline, x = small("aim_600m"), images(4, 6)
    model = random_model(baseline)
    state = original(baseline, model) | {"head.linear.weight": torch.zeros(10, 24)}
    assert_same(load_baseline(baseline, save(state, tmp_path / "aim.pth"))(x), model(x))


def test__positions_are_sines_and_cosines_of_the_column_and_then_of_the_row() -> None:
    model, x = random_model(small("aim_600m")), images(2, 4)
    assert model.patch_norm is not None
    patches = model.patch_norm(model.patch_embedding(x).flatten(2).transpose(1, 2))
    added = (model._embed(x, 2, 4) - patches)[0]
    for row in range(2):
        for column in range(4):
            for channel in range(24):
                quarter, within = divmod(channel, 6)
                angle = (column if quarter < 2 else row) / 10_000 ** (within / 6)
                expected = math.cos(angle) if quarter % 2 else math.sin(angle)
                assert abs(added[row * 4 + column, channel].item() - expected) < 1e-5


def test__features_come_after_the_layer_of_the_paper_without_a_norm() -> None:
    model, x = random_model(small("aim_600m", depth=4, blocks_used=2)), images()
    tokens = model._embed(x, 5, 5)
    for block in model.blocks[:2]:
        tokens = block(tokens, None, None)
    torch.testing.assert_close(model(x).feature_map.flatten(1, 2), tokens)
    assert all(each.architecture.blocks_used == 19 for each in BASELINES)


def test__the_sizes_are_those_of_the_authors() -> None:
    known = {each.name: (each.architecture.width, each.architecture.heads) for each in BASELINES}
    assert known["aim_600m"] == (1536, 12)
    assert known["aim_3b"] == (3072, 24)
