from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from capi.data.sources import image_folder
from capi.errors import CapiError
from capi.evals.features import Encoding
from capi.evals.fitted_probes import LinearClassifier, Probe, encoder_facts
from capi.evals.prediction import Prediction
from capi.models.features import CapiEncoder, PixelEncoder
from capi.types import VisionEncoder
from tests.data.pictures import noise


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(10):
        Image.fromarray(noise(8, 8, 3, seed=number)).save(folder / f"{number}.png")
    return folder


def linear_probe(encoder: VisionEncoder) -> Probe:
    linear = LinearClassifier(torch.randn(2, encoder.width), torch.zeros(2), "mean_patch")
    return Probe("linear", linear, {0: "x", 1: "y"}, (8, 8), encoder_facts(encoder))


def test__labels_and_confidences_are_the_probe_s(images: Path) -> None:
    encoder = PixelEncoder(8)
    probe = linear_probe(encoder)
    assert isinstance(probe.model, LinearClassifier)
    weight = probe.model.weight.double().numpy()
    predictions = list(Prediction(encoder, probe, image_folder(images), Encoding(batch_size=3)).labels())
    assert [number for number, _, _ in predictions] == list(range(10))
    for number, label, confidence in predictions:
        with Image.open(images / f"{number}.png") as image:
            # Of an 8 x 8 image the middle is 7 x 7 pixels, resized.
            box = (0.5, 0.5, 7.5, 7.5)
            pixels = np.asarray(image.resize((8, 8), Image.Resampling.BICUBIC, box=box)).transpose(2, 0, 1) / 255
        mean, std = (np.array(values)[:, None, None] for values in encoder.statistics)
        logits = weight @ ((pixels - mean) / std).flatten()
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        assert label == shares.argmax()
        assert confidence == pytest.approx(shares.max(), abs=2e-3)


def test__another_encoder_is_refused(images: Path, model: CapiEncoder) -> None:
    source = image_folder(images)
    for encoder in (PixelEncoder(8), model):
        with pytest.raises(CapiError, match="fitted on features of width 48, but this encoder gives"):
            Prediction(encoder, linear_probe(PixelEncoder(4)), source, Encoding())
    own = linear_probe(model)
    with torch.no_grad():
        model.encoder.registers += 1
    with pytest.raises(CapiError, match="fitted with another encoder of the same width"):
        Prediction(model, own, source, Encoding())


def test__a_broken_image_is_noted_and_counted(images: Path) -> None:
    (images / "broken.png").write_text("")
    seen: list[Any] = []
    encoder, encoding = PixelEncoder(4), Encoding(batch_size=4, progress=lambda *numbers: seen.append(numbers))
    prediction = Prediction(encoder, linear_probe(encoder), image_folder(images), encoding)
    assert [number for number, _, _ in prediction.labels()] == list(range(10))
    assert list(prediction.failed) == ["broken.png"]
    assert seen == [("images", done, 11) for done in (4, 8, 11)]
