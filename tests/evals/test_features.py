from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capi.data.crops import Frame
from capi.data.sources import EncodedImages
from capi.errors import CapiError
from capi.evals import features as features_module
from capi.evals.features import (
    EncodedBatch,
    Encoding,
    EncodingJob,
    FeatureRows,
    allocate,
    encode,
    encoded_batches,
    encoded_here,
    frame_of,
    image_vectors,
    vectors_of,
)
from capi.models.features import CapiEncoder
from capi.types import Features, Statistics, VisionEncoder
from tests.data.pictures import noise
from tests.evals.toys import Masks, PatchColors, source_of

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
SMALL = Encoding(size=(12, 16), batch_size=3)


class CountedSource(EncodedImages):
    """Counts how often an image is read."""

    reads = 0

    def read(self, index: int) -> bytes:
        self.reads += 1
        return self.contents[index]


@pytest.fixture
def images() -> Tensor:
    return torch.randint(256, (7, 3, 12, 16), dtype=torch.uint8)


@pytest.fixture
def source() -> EncodedImages:
    return source_of([noise(15, 20, 3, seed=seed) for seed in range(7)])


def normalized(model: CapiEncoder) -> CapiEncoder:
    model.statistics = Statistics(MEAN, STD)
    return model


@pytest.mark.parametrize(
    ("asked", "patch_size", "used"),
    [
        ((224, 224), 14, (224, 224)),
        ((225, 225), 14, (224, 224)),
        ((100, 100), 16, (96, 96)),
        ((104, 104), 16, (112, 112)),
        ((448, 225), 16, (448, 224)),
        ((5, 40), 16, (16, 48)),
    ],
)
def test__the_size_is_the_nearest_that_patches_fill(
    asked: tuple[int, int], patch_size: int, used: tuple[int, int]
) -> None:
    encoding = Encoding(size=asked, batch_size=5, workers=2)
    fitted = encoding.fitted(patch_size)
    assert fitted.size == used
    assert (fitted.batch_size, fitted.workers) == (5, 2)


def test__features_are_those_of_the_encoder_for_normalized_images(model: CapiEncoder, images: Tensor) -> None:
    center, scale = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    with torch.no_grad():
        expected = model((images / 255 - center) / scale)
    features = encode(normalized(model), images, SMALL, pooled=True)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    assert encode(model, images, SMALL).pooled is None


def test__lower_precision_gives_float32_features_that_are_near(model: CapiEncoder, images: Tensor) -> None:
    exact = encode(model, images, SMALL).feature_map
    rough = encode(model, images, Encoding(size=(12, 16), precision=torch.bfloat16)).feature_map
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0.1)


def test__vectors_of_each_kind_are_means_pooled_vectors_or_both(model: CapiEncoder, source: EncodedImages) -> None:
    vectors = image_vectors(model, source, SMALL, ("mean_patch", "pooled", "both"), "images")
    means, pooled = [], []
    with torch.no_grad():
        for number in range(7):
            (batch,) = encoded_batches(model, source, SMALL, numbers=torch.tensor([number]), pooled=True)
            patches = [batch.features.feature_map[0, row, column] for row in range(3) for column in range(4)]
            means.append(sum(patches) / 12)
            pooled.append(batch.features.pooled[0])
    torch.testing.assert_close(vectors["mean_patch"], torch.stack(means))
    torch.testing.assert_close(vectors["pooled"], torch.stack(pooled))
    torch.testing.assert_close(vectors["both"], torch.cat([torch.stack(means), torch.stack(pooled)], 1))


def test__without_patches_vectors_are_the_same_bit_for_bit(model: CapiEncoder, source: EncodedImages) -> None:
    whole, slim = (
        list(encoded_batches(model, source, SMALL, pooled=True, patches=wanted, registers=wanted))
        for wanted in (True, False)
    )
    for batch, other in zip(whole, slim, strict=True):
        assert batch.features.registers.shape[1] == 4
        assert (other.features.feature_map.shape[1:3], other.features.registers.shape[1]) == ((1, 1), 0)
        for kind in ("mean_patch", "pooled"):
            assert torch.equal(vectors_of(batch.features, kind), vectors_of(other.features, kind))


def test__a_team_encodes_where_there_is_one(model: CapiEncoder, source: EncodedImages) -> None:
    asked = []

    class Twice:
        """Gives every batch two times."""

        def encoded(self, encoder: VisionEncoder, job: EncodingJob, encoding: Encoding) -> Iterator[EncodedBatch]:
            asked.append(job.count)
            for item in range(job.count):
                yield from list(encoded_here(encoder, job, range(item, item + 1), encoding)) * 2

    alone = list(encoded_batches(model, source, SMALL))
    batches = list(encoded_batches(model, source, replace(SMALL, team=Twice())))
    assert asked == [len(alone)]
    assert [batch.read.numbers.tolist() for batch in batches] == [
        batch.read.numbers.tolist() for batch in alone for _ in range(2)
    ]


def test__pooled_vectors_are_computed_only_where_they_are_needed(source: EncodedImages) -> None:
    asked = []

    class Listening(PatchColors):
        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            asked.append(pooled)
            return super().__call__(images, pooled=pooled)

    image_vectors(Listening(), source, SMALL, ("mean_patch",), "images")
    assert not any(asked)
    image_vectors(Listening(), source, SMALL, ("mean_patch", "both"), "images")
    assert all(asked[3:])


@pytest.mark.parametrize("kind", ["pooled", "both"])
def test__a_pooled_vector_that_is_not_there_is_an_error(source: EncodedImages, kind: str) -> None:
    with pytest.raises(CapiError, match=f'no pooled vector, which the feature "{kind}" needs'):
        image_vectors(PatchColors(gives_pooled=False), source, SMALL, (kind,), "images")


@pytest.mark.parametrize("workers", [0, 2])
def test__features_do_not_depend_on_the_batch_or_the_workers(
    model: CapiEncoder, source: EncodedImages, workers: int
) -> None:
    sizes = []
    model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    kinds = ("mean_patch", "pooled")
    whole = image_vectors(model, source, Encoding(size=(12, 16)), kinds, "images")
    parts = image_vectors(model, source, Encoding(size=(12, 16), batch_size=3, workers=workers), kinds, "images")
    assert sizes == [7, 3, 3, 1]
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("place", ["pooled", "registers", "feature_map"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test__features_that_are_not_finite_are_an_error(images: Tensor, place: str, value: float) -> None:
    class Broken(PatchColors):
        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            features = super().__call__(images)._replace(registers=torch.zeros(len(images), 2, 3))
            broken = getattr(features, place).clone()
            broken[(-1,) * broken.ndim] = value
            return features._replace(**{place: broken})

    with pytest.raises(CapiError, match=f"no finite numbers \\(in {place}\\)"):
        encode(Broken(), images, SMALL, pooled=True)


def test__a_feature_map_of_another_width_than_said_is_an_error(images: Tensor) -> None:
    encoder = PatchColors()
    encoder.width = 5
    with pytest.raises(CapiError, match=r"shape \(7, 3, 4, 3\): expected \(7 images, rows, columns, 5\)"):
        encode(encoder, images, SMALL)


def test__an_encoder_that_gives_no_features_or_too_many_is_an_error(images: Tensor) -> None:
    class Bare(PatchColors):
        def __call__(self, images: Tensor, *, pooled: bool = True) -> Any:
            return super().__call__(images).feature_map

    class Doubled(PatchColors):
        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            features = super().__call__(images)
            return features._replace(feature_map=torch.cat([features.feature_map] * 2))

    with pytest.raises(CapiError, match=r"expected Features"):
        encode(Bare(), images, SMALL)
    with pytest.raises(CapiError, match=r"shape \(14, 3, 4, 3\)"):
        encode(Doubled(), images, SMALL)


@pytest.mark.parametrize("patch_size", [2, 8, 3])
def test__a_grid_that_contradicts_the_patch_size_is_an_error(images: Tensor, patch_size: int) -> None:
    class Claims(PatchColors):
        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            return PatchColors()(images)

    encoder = Claims()
    encoder.patch_size = patch_size
    claimed = f"its patch_size of {patch_size} makes {12 // patch_size} x {16 // patch_size}"
    with pytest.raises(CapiError, match=f"3 x 4 patches for images of 12 x 16 pixels, but {claimed}"):
        encode(encoder, images, SMALL)


class Failing(PatchColors):
    """Raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("blocks.3"), r"the encoder Failing failed on images \(KeyError: 'blocks.3'\): `capi --traceback"),
        (OSError(28, "No\nspace"), r"failed on images \(OSError: \[Errno 28\] No space\)"),
        (MemoryError(), "the memory ran out while encoding 7 images at a time: lower encode_batch"),
        (torch.OutOfMemoryError("CUDA out of memory"), "lower encode_batch"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "lower encode_batch"),
        (RuntimeError("an allocation table"), "RuntimeError: an allocation table"),
        (CapiError("give larger images"), "^give larger images$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test__what_goes_wrong_in_an_encoder_is_one_sentence(images: Tensor, error: Exception, message: str) -> None:
    with pytest.raises(CapiError, match=message) as caught:
        encode(Failing(error), images, SMALL)
    assert "\n" not in str(caught.value)
    assert error in {caught.value, caught.value.__cause__}


def test__an_interruption_inside_an_encoder_stays_one(images: Tensor) -> None:
    with pytest.raises(KeyboardInterrupt):
        encode(Failing(KeyboardInterrupt()), images, SMALL)


def test__frames_follow_the_encoder(model: CapiEncoder) -> None:
    model.statistics = Statistics((0.5,), (0.2,))
    assert frame_of(model, SMALL) == Frame((12, 16), channels=1)
    assert frame_of(PatchColors(), SMALL, whole=True) == Frame((12, 16), None, 3)


def test__chosen_images_come_in_order_with_their_masks_and_progress(source: EncodedImages) -> None:
    seen = []
    encoding = Encoding(size=(12, 16), batch_size=2, progress=lambda *facts: seen.append(facts))
    masks = Masks([noise(15, 20, seed=seed) for seed in range(7)])
    chosen = torch.tensor([4, 0, 5])
    batches = list(
        encoded_batches(PatchColors(), source, encoding, what="some", numbers=chosen, masks=masks, whole=True)
    )
    assert torch.equal(torch.cat([batch.read.numbers for batch in batches]), chosen)
    assert [batch.read.masks.shape for batch in batches] == [(2, 12, 16), (1, 12, 16)]
    assert [len(batch.features.feature_map) for batch in batches] == [2, 1]
    assert seen == [("some", 0, 3), ("some", 2, 3), ("some", 3, 3)]


def test__kept_images_are_read_once(source: EncodedImages) -> None:
    counted = CountedSource(source.names, source.contents)
    encoding = Encoding(size=(12, 16), batch_size=3, image_cache={})

    def pixels(numbers: Tensor, whole: bool = False) -> Tensor:
        batches = encoded_batches(PatchColors(), counted, encoding, numbers=numbers, whole=whole)
        return torch.cat([batch.read.images for batch in batches])

    first = pixels(torch.arange(7))
    assert torch.equal(pixels(torch.arange(7)), first)
    assert counted.reads == 7
    # Other images or another frame are other pixels.
    assert torch.equal(pixels(torch.tensor([6, 0])), first[[6, 0]])
    assert not torch.equal(pixels(torch.arange(7), whole=True), first)
    assert counted.reads == 7 + 2 + 7


def test__a_source_that_takes_the_place_of_another_is_read_again() -> None:
    encoding = Encoding(size=(8, 8), image_cache={})
    for seed in range(20):
        # Each source dies before the next is made, which may get its address.
        fresh = source_of([noise(8, 8, 3, seed=seed)])
        (batch,) = encoded_batches(PatchColors(), fresh, encoding, whole=True)
        assert torch.equal(batch.read.images[0].permute(1, 2, 0), torch.tensor(noise(8, 8, 3, seed=seed)))
        del fresh, batch


def test__no_more_images_are_kept_than_memory_is_meant_for(
    source: EncodedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = CountedSource(source.names, source.contents)
    encoding = Encoding(size=(4, 4), image_cache={})
    monkeypatch.setattr(features_module, "PIXEL_CACHE_BYTES", 5 * 3 * 4 * 4)
    for _ in range(2):
        for numbers in (torch.arange(4), torch.arange(4, 6)):
            list(encoded_batches(PatchColors(), counted, encoding, numbers=numbers))
    # The first four fit, the other two do not any more.
    assert counted.reads == 4 + 2 + 2


def test__rows_are_the_same_in_memory_and_in_a_file(tmp_path: Path) -> None:
    values = torch.arange(60, dtype=torch.float32).view(10, 2, 3)
    rows_filled = []
    for folder in (None, tmp_path / "new"):
        rows = FeatureRows(12, Encoding(folder=folder, memory_bytes=100), "numbers")
        for part in values.split(4):
            rows.append(part)
        rows_filled.append(rows.filled)
    assert (tmp_path / "new" / "numbers.bin").stat().st_size == 12 * 6 * 4
    assert all(torch.equal(each, values) for each in rows_filled)


def test__few_rows_stay_in_memory(tmp_path: Path) -> None:
    assert allocate((5, 5), torch.uint8, Encoding(folder=tmp_path, memory_bytes=25), "few").shape == (5, 5)
    assert not list(tmp_path.iterdir())
    allocate((5, 5), torch.int64, Encoding(folder=tmp_path, memory_bytes=25), "many")
    assert [path.name for path in tmp_path.iterdir()] == ["many.bin"]


def test__rows_that_were_never_filled_are_none(tmp_path: Path) -> None:
    assert len(FeatureRows(3, Encoding(), "none").filled) == 0


def test__vectors_of_a_single_feature_map_are_plain_means() -> None:
    features = Features(torch.full((1, 2), 9.0), torch.zeros(1, 0, 2), torch.arange(8.0).view(1, 2, 2, 2))
    assert vectors_of(features, "mean_patch").tolist() == [[3.0, 4.0]]
    assert vectors_of(features, "pooled").tolist() == [[9.0, 9.0]]
    assert vectors_of(features, "both").tolist() == [[3.0, 4.0, 9.0, 9.0]]
