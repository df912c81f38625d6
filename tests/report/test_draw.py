import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from capi.config.files import dump_config
from capi.config.schema import Config
from capi.data.sources import Files, demo_photos
from capi.errors import CapiError
from capi.evals.features import Encoding
from capi.models.features import PixelEncoder
from capi.report.draw import PICTURE_KINDS, Prototypes, built_in_photos, load_prototypes, picture
from capi.report.pictures.feature_maps import FeatureMaps, PictureFrame
from capi.report.pictures.painters import PcaColors, paint
from capi.report.pictures.sheets import enlarged
from capi.runtime.atomic import Output
from capi.train.build import build_learner
from capi.types import Features, Statistics
from capi.zoo.run_folder import RunFolder
from tests.data.pictures import photo
from tests.evals.toys import PatchColors, RandomPatches
from tests.report.test_feature_maps import claimed
from tests.zoo.test_weights import make_run

MODELS = {"random": RandomPatches(), "pixels:4": PixelEncoder(4)}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b & c.png", "inner/a.png")):
        Image.fromarray(photo(40, 60, seed=number)).save(folder / name)
    return folder


class OnePatch(PatchColors):
    """An encoder that gives one patch for an image of 16 pixels."""

    patch_size = 16

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        return Features(None, torch.zeros(len(images), 0, 3), images.mean((2, 3))[:, None, None])


def test__there_is_a_picture_for_each_image_kind_model_and_size(images: Path, tmp_path: Path) -> None:
    done = picture(MODELS, [images], Output(tmp_path / "out"), sizes=(16, 32), kinds=("pca", "components", "clusters"))
    assert done.failed == {}
    assert done.files[0] == done.page
    assert all(path.is_file() for path in done.files)
    for kind in ("pca", "components", "clusters"):
        assert (tmp_path / "out" / f"{kind}.png").is_file()
        for folder in ("1-random-16", "1-random-32", "2-pixels-4-16", "2-pixels-4-32"):
            names = {
                str(path.relative_to(tmp_path / "out" / kind / folder))
                for path in done.files
                if f"{kind}/{folder}/" in str(path)
            }
            assert names == {"a.png.png", "b & c.png.png", "inner/a.png.png"}
    # Photos, 3 kinds x 4 columns, 3 sheets, the page; nothing half-written.
    assert len(done.files) == 3 + 3 * 3 * 4 + 3 + 1
    assert {path for path in (tmp_path / "out").rglob("*") if path.is_file()} == set(done.files)


def test__pictures_show_the_features(images: Path, tmp_path: Path) -> None:
    encoder = PatchColors()
    picture({"m": encoder}, [images / "a.png"], Output(tmp_path / "out"), sizes=(32,), kinds=("pca",), whole=True)
    maps = [
        each.feature_map
        for each in FeatureMaps(encoder, Files(images, ["a.png"]), PictureFrame(32, 4, True), Encoding())
    ]
    expected = enlarged(paint(PcaColors(), maps)[0][0].picture, 256)
    with Image.open(tmp_path / "out" / "pca" / "1-m-32" / "a.png.png") as opened:
        assert opened.size == (384, 256)
        assert np.array_equal(np.asarray(opened), np.asarray(expected))


def test__every_kind_can_be_drawn_together(images: Path, tmp_path: Path) -> None:
    prototypes = {"random": Prototypes(torch.randn(5, 8))}
    done = picture(
        MODELS,
        [images],
        Output(tmp_path / "out"),
        sizes=(16,),
        kinds=PICTURE_KINDS,
        joint=True,
        whole=True,
        prototypes=prototypes,
    )
    assert {f"{kind}.png" for kind in PICTURE_KINDS} <= {path.name for path in done.files}
    text = done.page.read_text()
    assert all(f'id="{kind}"' in text for kind in PICTURE_KINDS)
    assert "b &amp; c.png" in text


def test__sizes_that_patches_round_to_one_count_once(images: Path, tmp_path: Path) -> None:
    picture({"m": PatchColors()}, [images], Output(tmp_path / "out"), sizes=(16, 17, 15, 32), kinds=("pca",))
    assert sorted(path.name for path in (tmp_path / "out" / "pca").iterdir()) == ["1-m-16", "1-m-32"]


def test__without_images_the_built_in_photos_are_drawn(tmp_path: Path) -> None:
    done = picture({"m": PatchColors()}, [], Output(tmp_path / "out"), sizes=(32,), kinds=("pca",), whole=True)
    assert len([path for path in done.files if "photos" in path.parts]) == 6


def test__built_in_photos_are_of_different_categories_and_none_is_trained_on() -> None:
    shown, held_out = built_in_photos(), demo_photos("val")
    places = [held_out.images.contents.index(content) for content in shown.contents]
    assert len({held_out.labels[place] for place in places}) == len(shown) == 6
    assert [held_out.images.names[place] for place in places] == shown.names
    assert not set(shown.contents) & set(demo_photos("train").images.contents)


def test__built_in_photos_name_their_extra_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(CapiError, match=r"pip install 'capi\[demo\]', or give images$"):
        built_in_photos()


def test__images_that_cannot_be_read_are_listed_and_the_others_drawn(images: Path, tmp_path: Path) -> None:
    (images / "huge.png").write_bytes(claimed(20000, 20000))
    (images / "text.jpg").write_text("no image")
    done = picture(MODELS, [images], Output(tmp_path / "out"), sizes=(16,), kinds=("pca", "clusters"), joint=True)
    assert set(done.failed) == {"huge.png", "text.jpg"}
    with (tmp_path / "out" / "failed.csv").open(newline="") as file:
        assert dict(list(csv.reader(file))[1:]) == done.failed
    assert "2 images could not be drawn" in done.page.read_text()
    assert (tmp_path / "out" / "pca" / "1-random-16" / "a.png.png").is_file()


def test__a_model_that_cannot_read_the_images_leaves_the_others_alone(images: Path, tmp_path: Path) -> None:
    models = {"random": RandomPatches(), "five channels": PixelEncoder(4, Statistics((0.5,) * 5, (0.2,) * 5))}
    done = picture(models, [images], Output(tmp_path / "out"), sizes=(16,), kinds=("pca", "components"), joint=True)
    assert (tmp_path / "out" / "pca.png").is_file()
    assert "3 channels" in done.failed["a.png"]
    assert (tmp_path / "out" / "components.png").is_file()
    assert (tmp_path / "out" / "pca" / "1-random-16" / "a.png.png").is_file()


def test__images_of_one_pixel_one_color_or_gray_are_drawn(tmp_path: Path) -> None:
    for name, values in {
        "one.png": np.zeros((1, 1, 3), np.uint8),
        "even.png": np.full((30, 20, 3), 90, np.uint8),
        "grey.png": photo(40, 40)[..., 0],
    }.items():
        Image.fromarray(values).save(tmp_path / name)
    files = [tmp_path / name for name in ("one.png", "even.png", "grey.png")]
    done = picture(
        {"m": RandomPatches()}, files, Output(tmp_path / "out"), sizes=(16,), kinds=("pca", "components", "dictionary")
    )
    assert done.failed == {}
    for name in ("one.png", "even.png"):
        with Image.open(tmp_path / "out" / "pca" / "1-m-16" / f"{name}.png") as drawn:
            colors = np.unique(np.asarray(drawn).reshape(-1, 3), axis=0)
        assert colors.tolist() == [[128, 128, 128]]


def test__an_encoder_with_one_patch_is_drawn(images: Path, tmp_path: Path) -> None:
    for joint in (False, True):
        kinds = tuple(kind for kind in PICTURE_KINDS if kind != "prototypes")
        done = picture(
            {"m": OnePatch()}, [images], Output(tmp_path / f"out{joint}"), sizes=(16,), kinds=kinds, joint=joint
        )
        assert done.failed == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {}}, "no model"),
        ({"sizes": (16, 0)}, "at least 1 pixel"),
        ({"kinds": ()}, "nothing to draw"),
        ({"kinds": ("clutsers",)}, "clusters"),
        ({"kinds": ("prototypes",)}, "none of the models has prototypes"),
        ({"prototypes": {"random": Prototypes(torch.randn(5, 3))}}, "width 8, but its prototypes 3"),
    ],
)
def test__a_request_that_makes_no_sense_is_refused(
    images: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    request: dict[str, object] = {"models": MODELS, "sizes": (16,), "kinds": ("pca",)} | changes
    with pytest.raises(CapiError, match=message):
        picture(images=[images], output=Output(tmp_path / "out"), **request)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test__folders_without_images_and_images_that_are_none_are_reported(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CapiError, match="holds no images"):
        picture(MODELS, [empty], Output(tmp_path / "out"), sizes=(16,))
    (empty / "a.png").write_text("no image")
    with pytest.raises(CapiError, match="none of the images can be read"):
        picture(MODELS, [empty], Output(tmp_path / "out"), sizes=(16,))


def test__a_folder_that_holds_something_is_not_written_to_by_accident(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(CapiError, match="`overwrite=True`"):
        picture(MODELS, [images], Output(out), sizes=(16,), kinds=("pca",))
    picture(MODELS, [images], Output(out, overwrite=True), sizes=(16,), kinds=("pca",))
    assert (out / "mine.txt").read_text() == "mine"
    with pytest.raises(CapiError, match="is a file"):
        picture(MODELS, [images], Output(out / "mine.txt", overwrite=True), sizes=(16,), kinds=("pca",))


def test__many_images_are_all_drawn_and_the_sheet_says_how_many_it_shows(tmp_path: Path) -> None:
    for number in range(15):
        Image.fromarray(photo(16, 16, seed=number)).save(tmp_path / f"{number:02d}.png")
    done = picture({"m": PatchColors()}, [tmp_path], Output(tmp_path / "out"), sizes=(16,), kinds=("pca",), joint=True)
    assert len([path for path in done.files if "pca" in path.parts]) == 15
    few = picture({"m": PatchColors()}, [tmp_path / "00.png"], Output(tmp_path / "few"), sizes=(16,), kinds=("pca",))
    with Image.open(tmp_path / "out" / "pca.png") as many, Image.open(few.folder / "pca.png") as single:
        rows = many.height - single.height
    assert 11 * 190 < rows < 11 * 210


@pytest.mark.parametrize("bias", [True, False])
def test__the_prototypes_of_a_run_are_those_of_its_clustering(small_config: Config, tmp_path: Path, bias: bool) -> None:
    clustering = small_config.clustering.model_copy(update={"bias": bias})
    config = small_config.model_copy(update={"clustering": clustering})
    prototypes, learner = load_prototypes(make_run(config, tmp_path / "run")), build_learner(config)
    assert torch.equal(prototypes.weight, learner.target.prototypes)
    assert (prototypes.bias is None) == (not bias)


def test__a_run_without_a_checkpoint_has_no_prototypes(small_config: Config, tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").create(dump_config(small_config), {"seed": 0, "data": {}})
    with pytest.raises(CapiError, match="no checkpoint yet"):
        load_prototypes(tmp_path / "run")
