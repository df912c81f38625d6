import sys
from pathlib import Path

import numpy as np
import pytest

from capi.errors import CapiError
from capi.evals.datasets.voc import AUGMENTED, CLASSES, TRAIN, augmented, load
from capi.evals.tasks import DataOptions, MaskedImages
from tests.evals.datasets.layouts import build_voc, halves, mask_bytes

OWN, VAL, EXTRA = ([f"2008_{number:06d}" for number in numbers] for numbers in (range(4), range(4, 8), range(8, 18)))


def stems(part: MaskedImages) -> list[str]:
    return [Path(part.images.name(index)).stem for index in range(len(part.images))]


def test__images_of_the_val_list_are_never_trained_on(tmp_path: Path) -> None:
    options = build_voc(tmp_path)
    listed = (tmp_path / "sbd/benchmark_RELEASE/dataset/train.txt").read_text()
    assert VAL[0] in listed
    data = load(tmp_path, options)
    assert stems(data.train) == OWN + EXTRA
    assert stems(data.test) == VAL
    assert data.test_name == "val"


def test__masks_come_from_voc_where_it_has_them_and_else_from_sbd(tmp_path: Path) -> None:
    data = load(tmp_path, build_voc(tmp_path))
    assert data.classes == dict(enumerate(CLASSES))
    assert len(CLASSES) == 21
    assert data.ignored == {255}
    for index in range(14):
        number = int(stems(data.train)[index][-2:])
        expected = halves(number % 3, 20, 255 if number < 4 else None)
        assert np.array_equal(data.train.masks.read(index), expected)
    assert data.train.masks.name(0) == "SegmentationClass/2008_000000.png"
    assert data.train.masks.name(13) == "sbd/2008_000017.mat"


def test__masks_of_sbd_may_be_pictures(tmp_path: Path) -> None:
    build_voc(tmp_path)
    folder = tmp_path / "SegmentationClassAug"
    folder.mkdir()
    for number in range(18):
        (folder / f"2008_{number:06d}.png").write_bytes(mask_bytes(halves(number % 3, 3), palette=False))
    data = load(tmp_path, DataOptions(verify_counts=False, more={"sbd": folder}))
    assert stems(data.train) == OWN + EXTRA
    assert np.array_equal(data.train.masks.read(0), halves(0, 20, 255))
    assert np.array_equal(data.train.masks.read(13), halves(17 % 3, 3))


def test__without_sbd_the_list_of_voc_is_used_and_noted(tmp_path: Path) -> None:
    build_voc(tmp_path)
    data = load(tmp_path / "VOCdevkit" / "VOC2012", DataOptions(verify_counts=False))
    assert stems(data.train) == OWN
    assert f"4 training images instead of the official {TRAIN}" in data.notes
    assert any(f"not on the augmented list of {AUGMENTED}" in note for note in data.notes)


def test__the_length_of_the_augmented_list_is_asserted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = build_voc(tmp_path)
    monkeypatch.setattr("capi.evals.datasets.voc.VAL", 4)
    with pytest.raises(CapiError, match="found 14 training images, but the official data set has 10582"):
        load(tmp_path, DataOptions(more=options.more))
    monkeypatch.setattr("capi.evals.datasets.voc.AUGMENTED", 14)
    assert load(tmp_path, DataOptions(more=options.more)).notes == ()


def test__the_list_is_the_sum_of_lists_without_what_is_tested_on() -> None:
    assert augmented(["b", "a"], ["c", "v", "a"], ["v", "w"]) == ["a", "b", "c"]
    with pytest.raises(CapiError, match=r"train\.txt and val\.txt of VOC both name v"):
        augmented(["a", "v"], [], ["v"])


def test__missing_images_and_masks_are_errors(tmp_path: Path) -> None:
    options = build_voc(tmp_path)
    mask = tmp_path / "sbd/benchmark_RELEASE/dataset/cls/2008_000009.mat"
    content = mask.read_bytes()
    mask.unlink()
    with pytest.raises(CapiError, match=r"1 of 14 masks are missing, the first is .*2008_000009\.mat"):
        load(tmp_path, options)
    mask.write_bytes(content[:100])
    index = stems(load(tmp_path, options).train).index("2008_000009")
    with pytest.raises(CapiError, match=r"2008_000009\.mat cannot be read as a file of MATLAB"):
        load(tmp_path, options).train.masks.read(index)
    (tmp_path / "VOCdevkit/VOC2012/JPEGImages/2008_000009.jpg").unlink()
    with pytest.raises(CapiError, match=r"lists that are missing: 1 of 14, the first is .*2008_000009\.jpg"):
        load(tmp_path, options)
    with pytest.raises(CapiError, match=r"holds neither dataset/train\.txt"):
        load(tmp_path, DataOptions(more={"sbd": tmp_path / "VOCdevkit"}, verify_counts=False))


def test__a_label_beyond_the_classes_is_an_error(tmp_path: Path) -> None:
    options = build_voc(tmp_path)
    path = tmp_path / "VOCdevkit/VOC2012/SegmentationClass/2008_000004.png"
    path.write_bytes(mask_bytes(halves(0, 21), palette=True))
    with pytest.raises(CapiError, match=r"2008_000004\.png holds the label 21"):
        load(tmp_path, options).test.masks.read(0)


def test__without_scipy_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load(tmp_path, build_voc(tmp_path))
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(CapiError, match=r"pip install 'capi\[sbd\]'"):
        data.train.masks.read(13)
