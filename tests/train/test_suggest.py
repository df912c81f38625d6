"""Suggestions are configs that load, fit and say where each value is from."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capi.config.files import load_config
from capi.data.sources import image_folder
from capi.errors import CapiError
from capi.train import build
from capi.train.build import mask_sampler
from capi.train.cost.hardware import Gpu, gpus
from capi.train.cost.suggest import Images, look_at, suggest, suggest_run

LAPTOP = Gpu("this", "a laptop", 16e9, None, 170e9, None, accelerator=False, measured=True)


@pytest.mark.parametrize(
    ("images", "gpu", "count", "recipe"),
    [
        (Images(50, 300), LAPTOP, 1, "demo"),
        (Images(3680, 128), LAPTOP, 1, "small"),
        (Images(60_000, 32), gpus()["rtx3090"], 1, "tiny4"),
        (Images(3000, 7), LAPTOP, 1, "tiny4"),
        (Images(100_000, 500), gpus()["rtx3090"], 1, "vits16"),
        (Images(1_281_167, 400), gpus()["a100-80g"], 8, "vitb14"),
        (Images(14_000_000, 400), gpus()["a100-80g"], 32, "vitl16"),
        (Images(142_000_000, 400), gpus()["h200"], 256, "vitl14"),
        # A model for a million images, and a processor for none of it.
        (Images(1_281_167, 400), LAPTOP, 1, "small"),
    ],
)
def test__a_suggestion_loads_fits_and_gives_reasons(images: Images, gpu: Gpu, count: int, recipe: str) -> None:
    suggestion = suggest_run(images, gpu, count, hours=48.0)
    words = shlex.split(suggestion.command("my photos"))
    overrides = [word for word in words if "=" in word]
    named = words[words.index("--data") - len(overrides) - 1]
    config = load_config(named, overrides)
    assert config == suggestion.config
    mask_sampler(config)
    assert named == recipe == suggestion.recipe.value
    assert words[-4:] == ["--data", "my photos", "--out", "my_photos_run"]
    assert suggestion.plan.fits
    assert suggestion.plan.effort.hours <= 48 * 1.01
    assert config.optimization.batch_size % count == 0
    assert max(config.data.height_and_width) <= max(images.side, 4 * config.model.patch_size)
    for choice in (suggestion.recipe, *suggestion.choices):
        assert choice.reason
        assert choice.origin in {"measured", "paper", "rule of thumb"}


def test__what_was_measured_is_suggested_for_what_it_was_measured_on() -> None:
    few = suggest_run(Images(675, 348), LAPTOP)
    assert few.command("photos") == "capi pretrain demo --data photos --out photos_run"
    assert few.config == load_config("demo")
    pets = suggest_run(Images(3680, 128), LAPTOP, hours=0.07).config
    small = load_config("small")
    assert (pets.data, pets.model, pets.target, pets.clustering) == (
        small.data,
        small.model,
        small.target,
        small.clustering,
    )
    assert pets.optimization.optimizer == "muon"


def test__no_override_says_what_the_recipe_has_already() -> None:
    for images in (Images(50, 300), Images(700, 300), Images(5000, 300), Images(14_000_000, 400)):
        suggestion = suggest_run(images, gpus()["a100-80g"], 8, hours=1000.0)
        plain = load_config(str(suggestion.recipe.value))
        for override in suggestion.overrides:
            assert load_config(str(suggestion.recipe.value), [override]) != plain, override


def test__few_photos_are_not_seen_a_thousand_times_and_very_few_are_said_to_be_too_few() -> None:
    for count, too_few in ((1, True), (40, True), (99, True), (100, False), (300, False), (900, False)):
        suggestion = suggest_run(Images(count, 348, data=("my photos",)), LAPTOP)
        assert suggestion.plan.images_seen <= 300 * count
        assert any("too few to train a good encoder on" in line for line in suggestion.advice) == too_few
        assert any(
            "`capi adapt capi_vitl14_lvd --data 'my photos' --out my_photos_adapted`" in line
            for line in suggestion.advice
        )


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (["photos"], "photos"),
        (["/mnt/my photos/"], "my_photos"),
        (["a/photos.zip", "b"], "photos"),
        (["hf://owner/cats?split=train"], "cats"),
        (["shards/{000000..000009}.tar"], "shards"),
        (["photos@2", "others@1"], "photos"),
        (["labels.csv?images=/mnt"], "labels"),
        ([".."], "images"),
    ],
)
def test__folders_of_results_are_named_for_the_images(data: list[str], name: str) -> None:
    assert shlex.split(suggest_run(Images(700, 300), LAPTOP).command(data))[-1] == f"{name}_run"


def test__a_batch_holds_no_image_twice() -> None:
    for count in (60, 20, 3):
        config = suggest_run(Images(count, 160), LAPTOP).config
        assert 1 <= config.optimization.batch_size <= count
        assert build.batch_warning(config, count) is None


def test__the_hours_shorten_the_run() -> None:
    long, short = (suggest_run(Images(675, 348), LAPTOP, hours=hours).plan for hours in (1.0, 0.02))
    assert short.effort.hours == pytest.approx(0.02, rel=0.02)
    assert short.images_seen < long.images_seen


def test__micro_batches_make_it_fit() -> None:
    suggestion = suggest_run(Images(1_281_167, 400), gpus()["rtx3090"], 8, hours=500.0)
    assert suggestion.config.optimization.micro_batches > 1
    assert suggestion.plan.fits


def test__many_gpus_are_started_by_what_can_start_them() -> None:
    images = Images(14_000_000, 400)
    assert (
        suggest_run(images, gpus()["h100"], 8, hours=1000.0)
        .command("x")
        .startswith("torchrun --nproc-per-node 8 -m capi pretrain ")
    )
    many = suggest_run(images, gpus()["h100"], 32, hours=1000.0).command("x")
    assert many.startswith("capi launch slurm --nodes 4 --gpus-per-node 8 vitl16 ")


def test__a_gpu_that_holds_nothing_is_refused() -> None:
    with pytest.raises(CapiError, match="no recipe fits the 0 GB of a stamp"):
        suggest_run(Images(100, 100), Gpu("stamp", "a stamp", 1e6, None, 1e9, None))


def test__the_images_are_counted_and_their_size_is_typical(tmp_path: Path) -> None:
    for number, size in enumerate([(40, 60), (100, 50), (500, 400)]):
        Image.fromarray(np.zeros((*size, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    images = look_at(image_folder(tmp_path))
    assert (images.count, images.side, images.channels) == (4, 50, 3)
    for number in range(3):
        (tmp_path / f"{number}.png").unlink()
    with pytest.raises(CapiError, match="1 image tried, and none could be read"):
        look_at(image_folder(tmp_path))


def test__a_published_encoder_is_the_first_advice_where_photos_are_few_and_have_three_channels() -> None:
    few, many, cells = (
        suggest_run(images, gpus()["a100-80g"], 8).advice
        for images in (Images(5000, 300, data=("my/photos",)), Images(14_000_000, 300), Images(5000, 300, channels=5))
    )
    assert "capi extract capi_vitl14_lvd" in few[0]
    assert "capi adapt capi_vitl14_lvd --data my/photos --out photos_adapted" in few[1]
    assert "init.encoder=capi_vitl14_lvd with optimization.optimizer=adamw" in few[1]
    assert "Last, train your own" in few[2]
    assert many == []
    (advice,) = cells
    assert "Published encoders see 3 channels, and these images have 5: adapt one" in advice
    assert "capi adapt capi_vitl14_lvd --data IMAGES --out images_adapted model.channels=5 data.mean=auto" in advice


def test__copies_are_counted_and_named(tmp_path: Path) -> None:
    for number in range(6):
        pixels = np.random.default_rng(number // 2).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    images = look_at(image_folder(tmp_path))
    assert images.copies == 3
    assert "3 of 6 files have the bytes of another one" in suggest_run(images, LAPTOP).advice[0]


def test__a_suggestion_names_channels_range_and_advice_by_itself(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    for number in range(3):
        values = np.random.default_rng(number).integers(0, 4096, (64, 64, 5), dtype=np.uint16)
        values[0, 0], values[1, 1] = 0, 4095
        tifffile.imwrite(tmp_path / f"{number}.tif", values, planarconfig="contig", metadata={"axes": "YXS"})
    suggestion = suggest_run(look_at(image_folder(tmp_path)), LAPTOP)
    text = repr(suggestion)
    # The advice speaks of a command, which stands at the end.
    assert " ".join(text.split()).endswith(f"{suggestion.length} command {suggestion.command()}")
    assert text.startswith("For 3 images of about 64 px, 5 channels, values 0 to 0.0625 of full scale\n")
    assert "Published encoders see 3 channels" in " ".join(text.split())


def test__masks_are_left_out_of_the_plan_and_of_its_command(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        for number in range(4):
            pixels = np.random.default_rng(number).integers(0, 255, (60, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels if folder == "images" else pixels[:8, :8] // 200).save(
                tmp_path / folder / f"{number}.png"
            )
    suggestion = suggest([tmp_path], gpu="l4")
    photos = str(tmp_path / "images")
    assert (suggestion.images.count, suggestion.images.side, suggestion.images.data) == (4, 60, (photos,))
    assert f"4 of 8 files look like masks: give --data {photos}, as the command below does" in suggestion.advice[0]
    assert shlex.split(suggestion.command())[-4:] == ["--data", photos, "--out", "images_run"]
    several = suggest([f"{tmp_path}@3", f"{photos}@1"], gpu="l4")
    assert several.images.data == (f"{photos}@3.0", f"{photos}@1.0")
    assert several.images.count == 8


def test__one_odd_image_does_not_outvote_the_others(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    for number in range(8):
        values = np.random.default_rng(number).integers(0, 4096, (64, 64, 5), dtype=np.uint16)
        tifffile.imwrite(tmp_path / f"{number}.tif", values, planarconfig="contig", metadata={"axes": "YXS"})
    Image.fromarray(np.full((64, 64, 3), 255, dtype=np.uint8)).save(tmp_path / "a.jpg")
    images = look_at(image_folder(tmp_path))
    assert images.channels == 5
    assert images.values is not None
    assert images.values[1] < 0.1
    (warning,) = images.warnings
    assert "1 of 9 images that were looked at has other than 5 channels (a.jpg: 3): move it elsewhere" in warning


def test__no_step_of_a_plan_is_shorter_than_launching_it() -> None:
    plan = suggest_run(Images(3000, 40), gpus()["h200"]).plan
    assert plan.effort.seconds_a_step > 5e-3
    assert plan.effort.hours > 1300 * 5e-3 / 3600
