from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from capi.data.crops import Frame, center_box, crop_draws, flips, random_box
from capi.data.decoding import Decoder
from capi.data.reader import ImageReader
from capi.data.sources import EncodedImages, Files, image_folder
from capi.errors import CapiError
from capi.evals.images import AugmentedBatches, ReadBatch, StillBatches, read_in_order, shuffled
from capi.runtime.randomness import sample_keys
from tests.data.pictures import noise
from tests.evals.toys import Masks, source_of


def write_noise(path: Path, height: int, width: int, seed: int = 0) -> None:
    Image.fromarray(noise(height, width, 3, seed=seed)).save(path)


def all_of(batches: StillBatches, workers: int = 0) -> list[ReadBatch]:
    return list(read_in_order(batches, range(len(batches)), workers=workers))


@pytest.mark.parametrize("name", ["image.png", "image.jpg"])
def test__pixels_are_those_of_the_middle_at_full_decoding(tmp_path: Path, name: str) -> None:
    write_noise(tmp_path / name, 160, 256)
    source = image_folder(tmp_path)
    ours = StillBatches(source, Frame((16, 8), share=0.5), torch.tensor([0]), 1)[0].images
    # Half of the largest 2:1 rectangle, 160 x 80, in the middle of 160 x 256.
    box = (128 - 20, 80 - 40, 128 + 20, 80 + 40)
    whole = Image.open(tmp_path / name).resize((8, 16), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    assert ours.dtype == torch.uint8
    assert torch.equal(ours[0], torch.tensor(np.asarray(whole)).permute(2, 0, 1))
    reduced = ImageReader(source, Decoder(reduced=True)).crop(0, center_box((160, 256), (16, 8), 0.5), (16, 8))
    assert (reduced == ours[0].numpy()).all() == name.endswith("png")


def test__the_middle_is_what_resizing_to_256_and_cutting_224_keeps() -> None:
    box = Frame((224, 224)).box((256, 400))
    assert box == pytest.approx((200 - 112, 128 - 112, 200 + 112, 128 + 112))


def test__the_whole_image_is_squeezed_into_the_frame() -> None:
    image = noise(20, 30, 3)
    ours = StillBatches(source_of([image]), Frame((8, 8), share=None), torch.tensor([0]), 1)[0].images[0]
    theirs = Image.fromarray(image).resize((8, 8), Image.Resampling.BICUBIC, reducing_gap=3.0)
    assert torch.equal(ours, torch.tensor(np.asarray(theirs)).permute(2, 0, 1))


def test__images_come_in_the_order_and_channels_asked_for(tmp_path: Path) -> None:
    for seed in range(4):
        write_noise(tmp_path / f"{seed}.png", 10 + seed, 20, seed)
    source = image_folder(tmp_path)
    in_turn = torch.cat(
        [StillBatches(source, Frame((8, 8)), torch.tensor([number]), 1)[0].images for number in [*range(4)]]
    )
    assert len(in_turn.flatten(1).unique(dim=0)) == 4
    first, second = all_of(StillBatches(source, Frame((8, 8)), torch.tensor([2, 0, 3]), 2))
    assert (first.numbers.tolist(), second.numbers.tolist()) == ([2, 0], [3])
    assert torch.equal(torch.cat([first.images, second.images]), in_turn[[2, 0, 3]])
    assert first.masks is None
    assert StillBatches(source, Frame((8, 8), channels=1), torch.tensor([2, 0]), 2)[0].images.shape == (2, 1, 8, 8)


def test__random_crops_are_cut_before_they_are_resized() -> None:
    image = noise(60, 80, 3)
    batches = AugmentedBatches(source_of([image]), Frame((16, 12)), torch.tensor([0]), batch_size=8, seed=3)
    keys = sample_keys(3, 0, torch.arange(8))
    for cropped, draws, mirrored in zip(batches[0].images, crop_draws(keys), flips(keys), strict=True):
        box = random_box((60, 80), draws, (0.08, 1.0), (3 / 4, 4 / 3))
        cut = Image.fromarray(image).crop(tuple(map(int, box))).resize((12, 16), Image.Resampling.BICUBIC)
        expected = torch.tensor(np.asarray(cut)).permute(2, 0, 1)
        assert torch.equal(cropped, expected.flip(2) if mirrored else expected)


@pytest.mark.parametrize("share", [None, 0.875])
def test__masks_are_cut_as_their_images_are_and_come_with_them(share: float | None) -> None:
    arrays = [noise(72, 54, seed=seed) for seed in range(3)]
    images = source_of([array.repeat(3).reshape(*array.shape, 3) for array in arrays])
    frame = Frame((8, 6), share=share)
    batch = StillBatches(images, frame, torch.tensor([2, 0, 1]), 3, Masks(arrays))[0]
    box = frame.box((72, 54))
    # The pixel in the middle of each cell.
    rows = (np.arange(8) + 0.5) * (box.bottom - box.top) / 8 + box.top
    columns = (np.arange(6) + 0.5) * (box.right - box.left) / 6 + box.left
    assert batch.masks is not None
    for number, mask in zip([2, 0, 1], batch.masks.numpy(), strict=True):
        assert (mask == arrays[number][np.ix_(rows.astype(int), columns.astype(int))]).all()


def test__labels_are_never_mixed_and_may_exceed_a_byte() -> None:
    labels = noise(31, 17, seed=3).astype(np.int64) * 300
    batch = StillBatches(
        source_of([noise(31, 17, 3)]), Frame((13, 11), share=None), torch.tensor([0]), 1, Masks([labels])
    )[0]
    assert batch.masks is not None
    assert batch.masks.shape == (1, 13, 11)
    assert batch.masks.max() > 65535
    assert set(batch.masks.unique().tolist()) <= set(np.unique(labels).tolist())


def test__a_mask_of_another_size_is_an_error_that_names_both_files() -> None:
    batches = StillBatches(
        source_of([noise(8, 10, 3)]), Frame((4, 4)), torch.tensor([0]), 1, Masks([np.zeros((10, 8), np.uint8)])
    )
    with pytest.raises(CapiError, match=r"mask 0 has 8 x 10 pixels, but its image image 0 has 10 x 8"):
        all_of(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test__a_broken_image_is_an_error_that_names_it(tmp_path: Path, workers: int) -> None:
    write_noise(tmp_path / "good.png", 32, 32)
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    for name in ("cut.png", "text.png", "absent.png")[: 1 if workers else 3]:
        place = str(tmp_path / name)
        message = f"^there is no file {place}: " if name == "absent.png" else f"^{place} cannot be read"
        source = Files(tmp_path, ["good.png", name])
        for batches in (
            StillBatches(source, Frame((8, 8)), torch.arange(2), 1),
            AugmentedBatches(source, Frame((8, 8)), torch.arange(2), 2, seed=0),
        ):
            with pytest.raises(CapiError, match=message):
                list(read_in_order(batches, range(2), workers=workers))


def test__a_broken_image_in_memory_is_an_error_that_names_it() -> None:
    source = EncodedImages(["in memory"], [b"no image"])
    with pytest.raises(CapiError, match=r"^in memory cannot be read"):
        all_of(StillBatches(source, Frame((8, 8)), torch.tensor([0]), 1))


def test__several_workers_give_the_batches_that_none_give() -> None:
    images = source_of([noise(12 + seed, 16, 3, seed=seed) for seed in range(5)])
    masks = Masks([noise(12 + seed, 16, seed=seed) for seed in range(5)])
    still = StillBatches(images, Frame((8, 8), share=None), torch.arange(5), 2, masks)
    augmented = AugmentedBatches(images, Frame((8, 8)), torch.arange(5), 3, seed=4)
    for batches, count in ((still, len(still)), (augmented, 4)):
        alone, together = (list(read_in_order(batches, range(count), workers=workers)) for workers in (0, 2))
        assert len(alone) == len(together) == count
        for batch, other in zip(alone, together, strict=True):
            assert torch.equal(batch.numbers, other.numbers)
            assert torch.equal(batch.images, other.images)
            assert batch.masks is other.masks is None or torch.equal(batch.masks, other.masks)


def test__random_crops_depend_on_seed_and_step_alone() -> None:
    source = source_of([noise(24, 24, 3, seed=seed) for seed in range(6)])

    def batch(seed: int, step: int) -> ReadBatch:
        return AugmentedBatches(source, Frame((8, 8)), torch.arange(6), 6, seed)[step]

    first = batch(0, 3)
    assert torch.equal(first.images, batch(0, 3).images)
    assert torch.equal(first.numbers, batch(0, 3).numbers)
    for other in (batch(1, 3), batch(0, 4)):
        assert not torch.equal(first.images, other.images)
        assert not torch.equal(first.numbers, other.numbers)


@pytest.mark.parametrize(("piece_size", "pieces"), [(None, 1), (1, 7), (3, 3), (7, 1), (9, 1)])
def test__pieces_of_a_batch_are_the_batch(piece_size: int | None, pieces: int) -> None:
    source = source_of([noise(24, 24, 3, seed=seed) for seed in range(5)])
    whole = AugmentedBatches(source, Frame((8, 8)), torch.arange(5), 7, seed=2)
    parts = AugmentedBatches(source, Frame((8, 8)), torch.arange(5), 7, seed=2, piece_size=piece_size)
    assert parts.pieces == pieces
    for step in (0, 3):
        read = [parts[step * pieces + piece] for piece in range(pieces)]
        assert torch.equal(torch.cat([part.numbers for part in read]), whole[step].numbers)
        assert torch.equal(torch.cat([part.images for part in read]), whole[step].images)


def test__only_the_images_asked_for_are_cropped() -> None:
    source = source_of([noise(12, 12, 3, seed=seed) for seed in range(6)])
    batches = AugmentedBatches(source, Frame((8, 8)), torch.tensor([5, 1, 3]), 3, seed=0)
    assert [sorted(batches[step].numbers.tolist()) for step in range(3)] == [[1, 3, 5]] * 3


def test__crops_are_parts_of_their_image_half_of_them_mirrored() -> None:
    # Brightness rises to the right: a mirrored crop falls.
    ramp = np.broadcast_to(np.arange(40, 240, 2, dtype=np.uint8)[None, :, None], (50, 100, 3))
    images = AugmentedBatches(source_of([ramp]), Frame((8, 8)), torch.tensor([0]), 200, seed=0)[0].images.float()
    rising = images[:, 0, 4, 7] > images[:, 0, 4, 0]
    assert 70 < rising.sum() < 130
    assert images.min() >= 30
    assert images.max() <= 250
    assert len(images.flatten(1).unique(dim=0)) > 150


@pytest.mark.parametrize(("count", "batch_size"), [(10, 4), (7, 7), (3, 8)])
def test__every_sample_comes_once_an_epoch(count: int, batch_size: int) -> None:
    order = torch.cat([shuffled(step, batch_size, count, seed=2) for step in range(3 * count)])
    epochs = order[: 3 * count].view(3, count)
    assert all(sorted(epoch.tolist()) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1


def test__an_image_with_a_mask_is_not_turned(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    pixels[:4] = 255
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    source, frame = image_folder(tmp_path), Frame((8, 8), share=None)
    with_mask = StillBatches(source, frame, torch.tensor([0]), 1, Masks([np.zeros((8, 8), dtype=np.uint8)]))[0]
    alone = StillBatches(source, frame, torch.tensor([0]), 1)[0]
    assert torch.equal(with_mask.images[0], torch.from_numpy(pixels).permute(2, 0, 1))
    assert torch.equal(alone.images[0].flip(1), with_mask.images[0])


def test__other_channels_than_the_models_are_reported_with_both_numbers(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "a.tif", noise(20, 20, 5), photometric="minisblack", planarconfig="contig")
    batches = StillBatches(image_folder(tmp_path), Frame((16, 16), channels=3), torch.tensor([0]), 1)
    failure = batches[0].failure
    assert failure is not None
    assert "a.tif has 5 channels, and the model reads 3: take a model that was trained on 5" in failure
    assert "repair" not in failure
