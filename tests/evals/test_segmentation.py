from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capi.data.crops import normalize
from capi.errors import CapiError
from capi.evals.features import Encoding
from capi.evals.patches import Patches, Standard
from capi.evals.results import Outcome, hold_out
from capi.evals.segmentation import (
    KnnSegmentation,
    LogisticSegmentation,
    SegmentationProtocol,
    is_among,
)
from capi.evals.tasks import MaskedImages, SegmentationData
from capi.models.features import PixelEncoder
from capi.runtime.protocol import PAPER_STRENGTHS
from capi.types import IMAGENET, Features, VisionEncoder
from tests.data.pictures import noise
from tests.evals.slow_segmentation import PATCH, SIZE, Reference, in_patches, pixels_of
from tests.evals.toys import Masks, PatchColors, RandomPatches, beside_choice, source_of

VOID = 9
SMALL = Encoding(size=SIZE, batch_size=3)
CLASSES = {0: "ground", 1: "thing", 2: "other thing"}
PALETTE = np.array([(20, 30, 40), (220, 60, 40), (40, 200, 90)], dtype=np.uint8)
KINDS = {"knn": KnnSegmentation, "logistic": LogisticSegmentation}


def plain_images(count: int, seed: int = 0) -> MaskedImages:
    """Patches of pure colours, whose labels are the colours."""
    labels = [np.random.default_rng(seed + number).integers(0, 3, (3, 2)) for number in range(count)]
    masks = [in_patches(each).astype(np.uint8) for each in labels]
    return MaskedImages(source_of([PALETTE[mask] for mask in masks]), Masks(masks))


def noisy_images(count: int, seed: int = 0, labels: tuple[int, ...] = (0, 1, 2, VOID)) -> MaskedImages:
    """Noisy colours; labels go with them, but for scattered pixels of any label."""
    generator = np.random.default_rng(seed)
    masks, images = [], []
    for _ in range(count):
        mask = in_patches(generator.integers(0, len(labels), (3, 2)))
        images.append((PALETTE[mask % 3] + generator.normal(0, 140, (*SIZE, 3))).clip(0, 255).astype(np.uint8))
        stray = generator.random(SIZE) < 0.3
        mask = np.where(stray, generator.integers(0, len(labels), SIZE), mask)
        masks.append(np.array(labels)[mask].astype(np.uint8))
    return MaskedImages(source_of(images), Masks(masks))


def plain_data() -> SegmentationData:
    return SegmentationData(CLASSES, frozenset(), plain_images(10), plain_images(4, seed=50))


def noisy_data(count: int = 14) -> SegmentationData:
    return SegmentationData(CLASSES, frozenset({VOID}), noisy_images(count), noisy_images(5, seed=50))


def protocol(kind: str, data: SegmentationData, **options: Any) -> SegmentationProtocol:
    few = {"neighbors": (1, 4)} if kind == "knn" else {"strengths": (1e-2, 1.0)}
    return KINDS[kind](data, **{"encoding": SMALL, "validation_share": 0.3, **few, **options})


def predicted(outcome: Outcome) -> np.ndarray:
    return np.stack([picture.prediction.numpy() for picture in outcome.pictures])


@pytest.mark.parametrize("encoder", [PatchColors(), PixelEncoder(PATCH)], ids=["colors", "pixels"])
@pytest.mark.parametrize("kind", KINDS)
def test__labels_that_can_be_seen_are_all_right(kind: str, encoder: VisionEncoder) -> None:
    outcome = protocol(kind, plain_data()).run(encoder)
    assert outcome.scores == {"test mIoU": 1.0, "test pixel accuracy": 1.0}
    assert outcome.main == 1.0
    # Class 0 is a class.
    assert outcome.details["IoU by class"] == {"ground": 1.0, "thing": 1.0, "other thing": 1.0}
    assert beside_choice(outcome) == []
    # Three of ten images were held out.
    assert outcome.details["held-out images"] == 3
    assert outcome.warnings[0].startswith(f"the best of {len(outcome.grid)} settings was chosen by 3 held-out images")


@pytest.mark.parametrize(
    ("kind", "setting"), [("knn", {"neighbors": (1,), "distances": ("l2",)}), ("logistic", {"strengths": (1.0,)})]
)
def test__a_single_setting_is_not_chosen_by_held_out_images(kind: str, setting: dict[str, Any]) -> None:
    outcome = protocol(kind, plain_data(), **setting).run(PatchColors())
    assert outcome.details["held-out images"] == 0
    assert outcome.warnings == []


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("votes", [True, False])
def test__knn_is_what_a_slow_version_says(standardize: bool, votes: bool) -> None:
    data, encoder = noisy_data(), RandomPatches(patch_size=PATCH)
    options = {"neighbors": (1, 3, 6), "standardize": standardize, "ignored_labels_vote": votes, "pictures": 99}
    outcome = protocol("knn", data, **options).run(encoder)
    reference, split = Reference(encoder, data, standardize), hold_out(14, 0.3, 0)
    fit, held_out = split
    for row in outcome.grid:
        guess = reference.knn(fit, data.train, held_out, row["neighbours"], row["distance"], clean=not votes)
        assert row["validation"] == pytest.approx(reference.mean_iou(guess, data.train, held_out))
    scores = [row["validation"] for row in outcome.grid]
    assert len(scores) == 6
    assert len(set(scores)) > 3
    assert outcome.chosen == outcome.grid[scores.index(max(scores))]
    # The chosen setting takes all training images, in units of those it was tried on.
    chosen = outcome.chosen["neighbours"], outcome.chosen["distance"]
    guess = reference.knn(range(14), data.test, range(5), *chosen, clean=not votes, of=fit)
    assert (predicted(outcome) == np.array(guess)).all()
    assert outcome.main == pytest.approx(reference.mean_iou(guess, data.test, range(5)))


def test__ignored_labels_are_predicted_only_where_they_vote() -> None:
    data, encoder = noisy_data(), RandomPatches(patch_size=PATCH)
    counts = []
    for votes in (True, False):
        outcome = protocol("knn", data, ignored_labels_vote=votes, pictures=99, neighbors=(1,)).run(encoder)
        counts.append(sum(int((picture.prediction == VOID).sum()) for picture in outcome.pictures))
        # A predicted label that is ignored is a class of its own, and always wrong.
        assert outcome.details["IoU by class"].get(f"{VOID} (ignored)") == (0.0 if votes else None)
    assert counts[0] > 0 == counts[1]


@pytest.mark.parametrize("standardize", [True, False])
def test__logistic_regression_is_that_of_scikit_learn(standardize: bool) -> None:
    data, encoder = noisy_data(), RandomPatches(patch_size=PATCH)
    options = {"strengths": (1e-3, 1e-1, 10.0), "standardize": standardize, "tolerance": 1e-10, "pictures": 99}
    outcome = protocol("logistic", data, **options).run(encoder)
    reference, (fit, held_out) = Reference(encoder, data, standardize), hold_out(14, 0.3, 0)
    for row in outcome.grid:
        guess = reference.logistic(fit, data.train, held_out, row["strength"])
        assert row["validation"] == pytest.approx(reference.mean_iou(guess, data.train, held_out))
    scores = [row["validation"] for row in outcome.grid]
    assert len(set(scores)) > 1
    assert outcome.chosen == outcome.grid[scores.index(max(scores))]
    guess = reference.logistic(range(14), data.test, range(5), outcome.chosen["strength"], of=fit)
    assert (predicted(outcome) == np.array(guess)).all()
    assert outcome.main == pytest.approx(reference.mean_iou(guess, data.test, range(5)))


def test__standardisation_changes_what_is_near() -> None:
    class Stretched(RandomPatches):
        def forward(self, images: Tensor, *, pooled: bool = True) -> Features:
            features = super().forward(images, pooled=pooled)
            return features._replace(feature_map=features.feature_map * torch.logspace(-3, 3, 8) + 5)

    data = noisy_data()
    on, off, plain = (
        protocol("knn", data, standardize=standardize, pictures=99).run(encoder)
        for standardize, encoder in ((True, Stretched()), (False, Stretched()), (True, RandomPatches()))
    )
    assert on.grid != off.grid
    assert [row["validation"] for row in on.grid] == pytest.approx([row["validation"] for row in plain.grid])
    assert "standardize: False instead of True" in off.deviations


def test__a_channel_that_never_changes_does_no_harm() -> None:
    class Constant(PatchColors):
        width = 4

        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            features = super().__call__(images, pooled=pooled)
            feature_map = torch.nn.functional.pad(features.feature_map, (0, 1), value=0.1)
            return Features(None, torch.zeros(len(images), 0, 4), feature_map)

    for kind in KINDS:
        assert protocol(kind, plain_data()).run(Constant()).main == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test__patches_that_are_mostly_ignored_are_left_out(kind: str) -> None:
    data, encoder = noisy_data(), RandomPatches(patch_size=PATCH)
    outcome = protocol(kind, data).run(encoder)
    rows, _, _ = Reference(encoder, data).patches(range(14))
    assert outcome.details["training patches"] == len(rows) < 14 * 6
    assert outcome.details["patches left out"] == 14 * 6 - len(rows)
    if kind == "knn":
        model = outcome.probe.model
        # Images to fit on come first, then those held out.
        order = torch.cat(hold_out(14, 0.3, 0)).tolist()
        expected = Reference(encoder, data).patches(order)
        np.testing.assert_allclose(model.bank.numpy(), expected[0], rtol=1e-4, atol=1e-5)
        assert (model.blocks.numpy() == np.array(expected[1])).all()


def test__the_held_out_images_are_not_fitted_on_while_settings_are_tried() -> None:
    # Every image is all of one colour of its own, and every label is all of one number.
    count = 10
    images = source_of([np.full((*SIZE, 3), 25 * number, dtype=np.uint8) for number in range(count)])
    masks = Masks([np.full(SIZE, number, dtype=np.uint8) for number in range(count)])
    own = {number: str(number) for number in range(count)}
    data = SegmentationData(own, frozenset(), MaskedImages(images, masks), MaskedImages(images, masks))
    outcome = protocol("knn", data, neighbors=(1, 2), distances=("l2",)).run(PatchColors())
    assert [row["validation"] for row in outcome.grid] == [0.0, 0.0]
    # In the end all are fitted on, and known.
    assert outcome.main == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test__a_single_setting_needs_no_trial(kind: str) -> None:
    single = {"neighbors": (1,), "distances": ("l2",)} if kind == "knn" else {"strengths": (1.0,)}
    outcome = protocol(kind, plain_data(), **single).run(PatchColors())
    assert outcome.grid == [outcome.chosen]
    assert outcome.chosen["validation"] is None
    assert outcome.main == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test__results_do_not_depend_on_how_images_are_read_or_kept(kind: str, tmp_path: Path) -> None:
    data, encoder = noisy_data(), RandomPatches(patch_size=PATCH)
    first = protocol(kind, data, pictures=99).run(encoder)
    for changes in (
        {"batch_size": 1},
        {"batch_size": 64},
        {"workers": 2},
        {"image_cache": {}},
        {"folder": tmp_path / kind, "memory_bytes": 1},
    ):
        other = protocol(kind, data, pictures=99, encoding=replace(SMALL, **changes)).run(encoder)
        assert (other.grid, other.scores, other.details) == (first.grid, first.scores, first.details)
        for picture, two in zip(first.pictures, other.pictures, strict=True):
            assert torch.equal(picture.prediction, two.prediction)
    assert sorted(path.name for path in (tmp_path / kind).iterdir()) == ["blocks.bin", "features.bin", "labels.bin"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["train", "test"])
def test__a_label_out_of_range_is_an_error_that_names_the_mask(kind: str, part: str) -> None:
    data = plain_data()
    images = getattr(data, part)
    images.masks.masks[2][0, 0] = 77
    with pytest.raises(CapiError, match="the mask mask 2 holds the label 77, which is neither a class nor ignored"):
        protocol(kind, data).run(PatchColors())


def test__labels_are_looked_up_whatever_their_range() -> None:
    labels = torch.tensor([[-5, -1, 0], [3, 300, 10**6]])
    assert is_among(labels, {-1, 3, 300}).tolist() == [[False, True, False], [True, True, False]]
    assert torch.equal(is_among(labels, [0]), labels == 0)
    assert labels[1, 2] == 10**6


@pytest.mark.parametrize("offset", [0, 300])
@pytest.mark.parametrize("ignored", [-1, 255])
def test__labels_may_be_any_numbers(offset: int, ignored: int) -> None:
    data = noisy_data()
    # Renaming changes which label is the smallest.
    expected = protocol("knn", data, pictures=9, ties="nearest").run(PatchColors())

    def renamed(images: MaskedImages) -> MaskedImages:
        masks = [mask.astype(np.int32) for mask in images.masks.masks]  # type: ignore[attr-defined]
        return MaskedImages(images.images, Masks([np.where(mask == VOID, ignored, mask + offset) for mask in masks]))

    classes = {label + offset: name for label, name in CLASSES.items()}
    other = SegmentationData(classes, frozenset({ignored}), renamed(data.train), renamed(data.test))
    outcome = protocol("knn", other, pictures=9, ties="nearest").run(PatchColors())
    assert outcome.grid == expected.grid
    assert outcome.scores == expected.scores
    first = expected.pictures[0].prediction.long()
    assert torch.equal(outcome.pictures[0].prediction, torch.where(first == VOID, ignored, first + offset))


def test__the_first_test_images_are_kept_to_look_at() -> None:
    data = plain_data()
    outcome = protocol("knn", data, pictures=3, encoding=replace(SMALL, batch_size=2)).run(PatchColors())
    assert [(picture.name, picture.number) for picture in outcome.pictures] == [
        (f"image {number}", number) for number in range(3)
    ]
    for picture in outcome.pictures:
        assert (picture.truth.numpy() == data.test.masks.read(picture.number)).all()
        assert torch.equal(picture.prediction, picture.truth)
    assert protocol("knn", data).run(PatchColors()).pictures == []


def test__images_and_masks_are_squeezed_to_the_size() -> None:
    """Masks are resized with their images: patches of other sizes and shapes, but whole ones."""
    data = plain_data()

    def enlarged(images: MaskedImages) -> MaskedImages:
        pixels = pixels_of(images, range(len(images.images))).permute(0, 2, 3, 1).numpy()
        larger = [each.repeat(3, 0).repeat(5, 1) for each in pixels]
        return MaskedImages(source_of(larger), Masks([mask.repeat(3, 0).repeat(5, 1) for mask in images.masks.masks]))

    larger = replace(data, train=enlarged(data.train), test=enlarged(data.test))
    outcome = protocol("knn", larger, pictures=1).run(PatchColors())
    assert outcome.main == 1.0
    assert (outcome.pictures[0].truth.numpy() == data.test.masks.read(0)).all()


def test__the_papers_own_settings_are_no_deviation() -> None:
    masks = [in_patches(np.random.default_rng(seed).integers(0, 3, (56, 56))).astype(np.uint8) for seed in range(3)]
    images = MaskedImages(source_of([PALETTE[mask] for mask in masks]), Masks(masks))
    data = SegmentationData(CLASSES, frozenset(), images, images)

    class Coarse(PatchColors):
        patch_size = 16

    for kind in KINDS.values():
        outcome = kind(data).run(Coarse())
        assert outcome.deviations == []
        assert outcome.probe.size == (224, 224)
    assert KnnSegmentation(data).settings(_patches(40)) == [
        {"distance": distance, "neighbours": k} for distance in ("l2", "cosine") for k in (1, 3, 10, 30)
    ]
    np.testing.assert_allclose(PAPER_STRENGTHS, np.logspace(-6, 5, 8))


def _patches(count: int) -> Any:
    labels = torch.zeros(count, dtype=torch.uint8)
    plain = Standard(torch.zeros(2), torch.ones(2))
    return Patches(torch.zeros(count, 2), torch.zeros(count, 2, 2, dtype=torch.uint8), labels, plain)


def test__each_deviation_is_reported_and_no_other() -> None:
    data = replace(plain_data(), notes=("one image is missing",))
    outcome = KnnSegmentation(
        data, Encoding(size=(13, 8)), standardize=False, neighbors=(1, 2), ignored_labels_vote=False
    ).run(PatchColors())
    assert outcome.deviations == [
        "standardize: False instead of True",
        "neighbors: 1, 2 instead of 1, 3, 10, 30",
        "ignored labels vote: False instead of True",
        "image size: 13 x 8 px instead of 224 x 224 px",
        "image size: 12 x 8 px, the nearest to 13 x 8 px that patches of 4 fill",
        "one image is missing",
    ]
    logistic = LogisticSegmentation(plain_data(), SMALL, strengths=(0.5, 2.0)).run(PatchColors())
    assert len(logistic.deviations) == 2
    assert logistic.deviations[0].startswith("strengths: 0.5, 2 instead of 1e-06, ")


def test__more_neighbors_than_patches_are_left_out_with_a_warning() -> None:
    # 10 images of 6 patches, of which 3 are held out.
    outcome = protocol("knn", plain_data(), neighbors=(1, 42, 43)).run(PatchColors())
    assert {row["neighbours"] for row in outcome.grid} == {1, 42}
    assert beside_choice(outcome) == ["neighbours [43] were not tried: they are more than 42 patches"]
    with pytest.raises(CapiError, match="42 patches are fewer than the 43 neighbours"):
        protocol("knn", plain_data(), neighbors=(43,)).run(PatchColors())


@pytest.mark.parametrize("kind", KINDS)
def test__a_class_without_training_patches_is_a_warning(kind: str) -> None:
    data = replace(plain_data(), classes={**CLASSES, 3: "never seen"})
    outcome = protocol(kind, data).run(PatchColors())
    assert beside_choice(outcome) == ["no training patch is mostly never seen: these classes can hardly be predicted"]


def test__data_that_cannot_be_scored_is_an_error() -> None:
    data = plain_data()
    empty = MaskedImages(source_of([]), Masks([]))
    fewer = MaskedImages(data.train.images, Masks(data.train.masks.masks[:-1]))  # type: ignore[attr-defined]
    for changes, message in (
        ({"train": empty}, "the training split has no images"),
        ({"test": empty}, "the test split has no images"),
        ({"train": fewer}, "10 images, but 9 masks"),
        ({"classes": {}, "ignored": frozenset(CLASSES)}, "all are ignored"),
    ):
        with pytest.raises(CapiError, match=message):
            protocol("knn", replace(data, **changes)).run(PatchColors())


def test__a_single_class_cannot_be_learnt_by_logistic_regression() -> None:
    masks = [np.zeros(SIZE, np.uint8)] * 4
    images = MaskedImages(source_of([noise(*SIZE, 3, seed=seed) for seed in range(4)]), Masks(masks))
    with pytest.raises(CapiError, match="at least two classes"):
        protocol("logistic", SegmentationData(CLASSES, frozenset(), images, images)).run(PatchColors())


def test__a_feature_map_that_does_not_tile_the_mask_is_an_error() -> None:
    class Overlapping(PatchColors):
        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            return Features(None, torch.zeros(len(images), 0, 3), torch.ones(len(images), 5, 3, 3))

    with pytest.raises(
        CapiError, match="5 x 3 patches for images of 12 x 8 pixels, but its patch_size of 4 makes 3 x 2"
    ):
        protocol("knn", plain_data()).run(Overlapping())


@pytest.mark.parametrize("kind", KINDS)
def test__the_probe_gives_the_pictures_again(kind: str) -> None:
    data, encoder = noisy_data(), RandomPatches(patch_size=PATCH)
    outcome = protocol(kind, data, pictures=5).run(encoder)
    probe = outcome.probe
    assert (probe.size, probe.classes, probe.ignored) == (SIZE, CLASSES, (VOID,))
    assert probe.kind == f"{kind}-segmentation"
    with torch.no_grad():
        features = encoder(normalize(pixels_of(data.test, range(5)), *IMAGENET))
        assert torch.equal(
            probe.model.segment(features, SIZE), torch.stack([picture.prediction for picture in outcome.pictures])
        )
