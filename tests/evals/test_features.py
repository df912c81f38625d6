from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from capi.data.crops import centre_box
from capi.data.decoding import Decoder
from capi.data.reader import Reader
from capi.data.sources import Encoded, Files, image_folder
from capi.errors import CapiError
from capi.evals.features import evaluation_images, image_features
from capi.models.features import CapiEncoder

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(256, (7, 3, 12, 16), dtype=torch.uint8)


def write_noise(path: Path, height: int, width: int, seed: int = 0) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def test__features_are_those_of_the_encoder_for_normalised_images(model: CapiEncoder, images: torch.Tensor) -> None:
    centre, scale = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    with torch.no_grad():
        expected = model((images / 255 - centre) / scale)
    mean_patch = image_features(model, images, mean=MEAN, std=STD)
    pooled = image_features(model, images, mean=MEAN, std=STD, kind="pooled")
    torch.testing.assert_close(mean_patch, expected.feature_map.mean((1, 2)))
    torch.testing.assert_close(pooled, expected.pooled)


@pytest.mark.parametrize("kind", ["mean_patch", "pooled"])
def test__features_do_not_depend_on_the_batch(model: CapiEncoder, images: torch.Tensor, kind: str) -> None:
    sizes = []
    model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    whole = image_features(model, images, mean=MEAN, std=STD, kind=kind)
    parts = image_features(model, images, mean=MEAN, std=STD, kind=kind, batch_size=3)
    assert sizes == [7, 3, 3, 1]
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("name", ["image.png", "image.jpg"])
def test__pixels_are_those_of_the_middle_at_full_decoding(tmp_path: Path, name: str) -> None:
    write_noise(tmp_path / name, 160, 256)
    source = image_folder(tmp_path)
    ours = evaluation_images(source, [0], (16, 8), kept=0.5)
    # Half of the largest 2:1 rectangle, 160 x 80, in the middle of 160 x 256.
    box = (128 - 20, 80 - 40, 128 + 20, 80 + 40)
    whole = Image.open(tmp_path / name).resize((8, 16), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    assert ours.dtype == torch.uint8
    assert torch.equal(ours[0], torch.tensor(np.asarray(whole)).permute(2, 0, 1))
    reduced = Reader(source, Decoder(reduced=True)).crop(0, centre_box((160, 256), (16, 8), 0.5), (16, 8))
    assert (reduced == ours[0].numpy()).all() == name.endswith("png")


def test__images_come_in_the_order_and_channels_asked_for(tmp_path: Path) -> None:
    for seed in range(4):
        write_noise(tmp_path / f"{seed}.png", 10 + seed, 20, seed)
    source = image_folder(tmp_path)
    in_turn = torch.cat([evaluation_images(source, [number], (8, 8)) for number in range(4)])
    assert len(in_turn.flatten(1).unique(dim=0)) == 4
    assert torch.equal(evaluation_images(source, [2, 0, 3], (8, 8)), in_turn[[2, 0, 3]])
    assert evaluation_images(source, [2, 0, 3], (8, 8), channels=1).shape == (3, 1, 8, 8)


def test__a_broken_image_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_noise(tmp_path / "good.png", 32, 32)
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    for name in ("cut.png", "text.png", "absent.png"):
        source = Files(tmp_path, ["good.png", name])
        with pytest.raises(CapiError, match=f"^{name} cannot be read"):
            evaluation_images(source, range(2), (8, 8))
    with pytest.raises(CapiError, match=r"^in memory cannot be read"):
        evaluation_images(Encoded(["in memory"], [b"no image"]), [0], (8, 8))
