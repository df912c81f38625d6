from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cosine_similarity

from capi.data.sources import EncodedImages, Files, image_folder
from capi.errors import CapiError
from capi.evals import feature_files
from capi.evals.extraction import extract_features
from capi.evals.feature_files import FeatureFile, read_features
from capi.evals.features import Encoding, encoded_batches
from capi.evals.retrieval import find_similar
from capi.models.features import CapiEncoder, PixelEncoder
from capi.runtime.atomic import Output
from capi.types import IMAGENET, Statistics, VisionEncoder
from tests.data.pictures import encoded, photo

COUNT = 9
ENCODING = Encoding(size=(16, 24), batch_size=4)


@pytest.fixture
def source(tmp_path: Path) -> Files:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(COUNT):
        Image.fromarray(photo(30 + 3 * number, 50, number)).save(folder / f"{number}.png")
    return image_folder(folder)


def features_file(encoder: VisionEncoder, source: Files, name: str = "x.safetensors", **settings: Any) -> FeatureFile:
    out = source.root.parent / name
    extract_features(
        encoder, source, Output(out), **({"encoding": ENCODING, "kinds": ["patch", "mean_patch"]} | settings)
    )
    return read_features(out)


def feature_map(encoder: VisionEncoder, image: Path, **settings: Any) -> Tensor:
    source = Files(image.parent, [image.name])
    return next(encoded_batches(encoder, source, ENCODING, **settings)).features.feature_map[0]


@pytest.mark.parametrize("kind", [None, "mean_patch", "pooled", "register"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.parquet"])
def test__matches_are_those_of_a_plain_computation(
    tmp_path: Path, source: Files, model: CapiEncoder, name: str, kind: str | None
) -> None:
    file = features_file(model, source, name, kinds=["pooled", "register", "mean_patch"], labels=list("abcabcabc"))
    query = tmp_path / "query.png"
    Image.fromarray(photo(33, 47, 99)).save(query)
    features = next(encoded_batches(model, Files(tmp_path, [query.name]), ENCODING, pooled=True)).features
    vector = {"pooled": features.pooled, "register": features.registers.flatten(1)}.get(
        kind or "", features.feature_map.mean((1, 2))
    )
    assert vector is not None
    expected = cosine_similarity(file.array(kind or "mean_patch").flatten(1).double(), vector.double())
    order = expected.argsort(descending=True)[:4].tolist()
    matches = find_similar(file, model, query, count=4, kind=kind, encoding=Encoding(size=(224, 224)))
    assert [match.number for match in matches] == order
    assert [match.name for match in matches] == [f"{number}.png" for number in order]
    assert [match.label for match in matches] == ["abcabcabc"[number] for number in order]
    np.testing.assert_allclose([match.similarity for match in matches], expected[order], atol=1e-6)
    assert not any(match.itself or match.patch for match in matches)


@pytest.mark.parametrize("name", ["x.safetensors", "x.parquet"])
def test__patches_are_searched_over_all_images_however_the_bank_is_cut(
    source: Files, model: CapiEncoder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(feature_files, "_PART_BYTES", 2 * (24 + 1) * 32 * 4)
    file = features_file(model, source, name)
    assert len(list(file.parts("patch"))) == 5
    framing, image = file.facts.framing, source.root / "3.png"
    left, top, right, bottom = framing.patch_box((39, 50), 2, 4)
    matches = find_similar(file, model, image, count=40, at=((left + right) / 2, (top + bottom) / 2), encoding=ENCODING)
    bank = file.array("patch").flatten(0, 2).double()
    expected = cosine_similarity(bank, feature_map(model, image)[2, 4][None].double())
    order = expected.argsort(descending=True)[:40]
    np.testing.assert_allclose([match.similarity for match in matches], expected[order], atol=1e-6)
    assert [(match.number, match.patch) for match in matches] == [
        (row // 24, (row % 24 // 6, row % 6)) for row in order.tolist()
    ]
    assert [match.itself for match in matches] == [True] + [False] * 39


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test__an_image_of_the_file_comes_first_even_after_its_copies(source: Files, model: CapiEncoder, dtype: str) -> None:
    for name in ("0-copy.png", "7-copy.png"):
        (source.root / name).write_bytes((source.root / "5.png").read_bytes())
    file = features_file(model, image_folder(source.root), dtype=dtype)
    matches = find_similar(file, model, source.root / ".." / "images" / "5.png", count=3, encoding=ENCODING)
    assert [(match.name, match.itself) for match in matches] == [
        ("5.png", True),
        ("0-copy.png", False),
        ("7-copy.png", False),
    ]
    assert [match.similarity for match in matches] == pytest.approx([1, 1, 1], abs=1e-5)


def test__an_image_that_has_changed_is_not_put_first(source: Files) -> None:
    encoder = PixelEncoder(4)
    file = features_file(encoder, source)
    (source.root / "5.png").write_bytes((source.root / "2.png").read_bytes())
    matches = find_similar(file, encoder, source.root / "5.png", count=COUNT, encoding=ENCODING)
    assert matches[0].name == "2.png"
    assert [match.name for match in matches if match.itself] == ["5.png"]


def test__equally_similar_images_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    contents = {"blue": encoded(Image.new("RGB", (20, 20), "blue"), "PNG"), "red": encoded(photo(20, 20), "PNG")}
    kinds = ["red", "blue", "blue", "red", "blue", "blue"]
    extract_features(
        PixelEncoder(4),
        EncodedImages([f"{number}" for number in range(6)], [contents[kind] for kind in kinds]),
        Output(tmp_path / "x.safetensors"),
        encoding=ENCODING,
    )
    (tmp_path / "blue.png").write_bytes(contents["blue"])
    file = read_features(tmp_path / "x.safetensors")
    matches = find_similar(file, PixelEncoder(4), tmp_path / "blue.png", encoding=ENCODING)
    assert [match.number for match in matches] == [1, 2, 4, 5, 0, 3]


def test__the_mean_of_patches_need_not_be_stored(source: Files, model: CapiEncoder) -> None:
    both = features_file(model, source)
    patches = features_file(model, source, "patches.safetensors", kinds=["patch"])
    expected = find_similar(both, model, source.root / "1.png", encoding=ENCODING)
    matches = find_similar(patches, model, source.root / "1.png", encoding=ENCODING)
    assert [match.number for match in matches] == [match.number for match in expected]
    assert [match.similarity for match in matches] == pytest.approx([match.similarity for match in expected], abs=1e-6)


def test__features_without_direction_are_at_right_angles_to_all(tmp_path: Path) -> None:
    encoder = PixelEncoder(4, Statistics((0.0,) * 3, (1.0,) * 3))
    colors = ["black", "blue", "red", "black"]
    source = EncodedImages(colors, [encoded(Image.new("RGB", (20, 20), color), "PNG") for color in colors])
    extract_features(encoder, source, Output(tmp_path / "x.safetensors"), encoding=ENCODING)
    file = read_features(tmp_path / "x.safetensors")
    Image.new("RGB", (20, 20), "purple").save(tmp_path / "q.png")
    matches = find_similar(file, encoder, tmp_path / "q.png", encoding=ENCODING)
    assert [match.number for match in matches] == [1, 2, 0, 3]
    assert [match.similarity for match in matches] == pytest.approx([0.5**0.5, 0.5**0.5, 0, 0], abs=1e-6)


@pytest.mark.parametrize("other", [PixelEncoder(8), PixelEncoder(4, IMAGENET._replace(mean=(0.0, 0.0, 0.0)))])
def test__an_encoder_that_differs_is_refused(source: Files, other: PixelEncoder) -> None:
    file = features_file(PixelEncoder(4), source)
    with pytest.raises(CapiError, match="use the encoder"):
        find_similar(file, other, source.root / "1.png", encoding=ENCODING)


def test__the_same_encoder_with_other_weights_is_refused(source: Files, model: CapiEncoder) -> None:
    file = features_file(model, source)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    with pytest.raises(CapiError, match="another encoder of the same width"):
        find_similar(file, model, source.root / "1.png", encoding=ENCODING)


@pytest.mark.parametrize(
    ("kinds", "settings", "message"),
    [
        (["patch"], {"kind": "pooled"}, 'no "pooled" features, but patch'),
        (["patch"], {"kind": "patch"}, "say with `at` x,y, in pixels, where"),
        (["patch"], {"kind": "mean_patch", "at": (20.0, 20.0)}, "leave one of them out"),
        (["mean_patch"], {"at": (20.0, 20.0)}, 'no "patch" features'),
        (["patch"], {"at": (0.0, 0.0)}, "choose one in there"),
        (["patch"], {"count": 0}, "at least 1"),
    ],
)
def test__questions_that_the_file_cannot_answer_are_errors(
    source: Files, kinds: list[str], settings: dict[str, Any], message: str
) -> None:
    file = features_file(PixelEncoder(4), source, kinds=kinds)
    with pytest.raises(CapiError, match=message):
        find_similar(file, PixelEncoder(4), source.root / "1.png", encoding=ENCODING, **settings)


def test__an_image_that_is_not_there_is_an_error(source: Files) -> None:
    file = features_file(PixelEncoder(4), source)
    with pytest.raises(CapiError, match=r"^there is no file .*absent.png: give the image"):
        find_similar(file, PixelEncoder(4), source.root / "absent.png", encoding=ENCODING)
