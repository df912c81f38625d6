import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from capi.config.schema import Config
from capi.data.sources import EncodedImages
from capi.errors import CapiError
from capi.evals.features import Encoding
from capi.report.draw import Prototypes, load_prototypes
from capi.report.explorer.page import run_parts
from capi.report.gallery_files import index_images, write_gallery, write_neighbors
from capi.report.picture_files import read_neighbors
from capi.report.pictures.feature_maps import PictureFrame, SizedImages
from capi.report.pictures.gallery import PrototypeIndex, patch_crop
from capi.report.snapshots import run_frame
from capi.train.build import build_learner
from capi.train.checkpoint import Checkpoints
from capi.types import Features, statistics_of
from capi.zoo.weights import load_run
from tests.data.pictures import photo
from tests.evals.toys import COLORS, PatchColors, source_of
from tests.variants import varied
from tests.zoo.test_weights import make_run


@pytest.fixture
def run(small_config: Config, tmp_path: Path) -> Path:
    return make_run(small_config, tmp_path / "run")


@pytest.fixture
def photos() -> EncodedImages:
    return source_of([photo(40, 40 + number, seed=number) for number in range(5)])


def index_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "index.json").read_text(encoding="utf-8"))


def test__patches_of_a_color_belong_to_the_prototype_of_that_color() -> None:
    """Images of one colour each, an encoder of colours, and a prototype for each colour."""
    colors = torch.tensor(list(COLORS.values()), dtype=torch.float32)
    source = source_of([np.full((16, 16, 3), COLORS[name], np.uint8) for name in ("green", "red", "blue", "red")])
    # Patches are normalised colours, so prototypes are as well.
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    prototypes = Prototypes((colors / 255 - mean) / deviation)
    index = index_images(PatchColors(), prototypes, source, PictureFrame(16, 4), Encoding(batch_size=3))
    images = [[place.image for place in index.members(number)] for number in range(3)]
    assert images == [[1, 1, 1, 3, 3, 3], [0, 0, 0], [2, 2, 2]]
    torch.testing.assert_close(index.shares, torch.tensor([0.5, 0.25, 0.25]))


def test__a_bias_that_outweighs_all_takes_all_patches(photos: EncodedImages) -> None:
    prototypes = Prototypes(torch.eye(3), torch.tensor([0.0, 9.0, 0.0]))
    index = index_images(PatchColors(), prototypes, photos, PictureFrame(16, 4), Encoding())
    assert index.shares.tolist() == [0, 1, 0]
    assert index.seen == 5 * 16


def test__images_that_cannot_be_read_are_reported_with_the_reason(photos: EncodedImages) -> None:
    source = EncodedImages(photos.names, [b"no image", *photos.contents[1:]])
    failed: dict[str, str] = {}
    frame = PictureFrame(16, 4)
    index = index_images(PatchColors(), Prototypes(torch.eye(3)), source, frame, Encoding(), failed=failed)
    assert list(failed) == ["image 0"]
    assert index.seen == 4 * 16
    with pytest.raises(CapiError, match="none of the images can be read, for example"):
        index_images(PatchColors(), Prototypes(torch.eye(3)), EncodedImages(["a"], [b"no"]), frame, Encoding())


def test__a_gallery_shows_the_patches_that_an_index_finds(run: Path, photos: EncodedImages) -> None:
    folder = write_gallery(run, photos, prototypes=6)
    assert folder == run / "pictures" / "prototypes"
    prototypes, frame = load_prototypes(run), run_frame((32, 24), 4)
    expected = index_images(load_run(run), prototypes, photos, frame, Encoding())
    listed = index_of(folder)["prototypes"]
    shares = [strip["share"] for strip in listed]
    np.testing.assert_allclose(shares, [float(expected.shares[strip["number"]]) for strip in listed], rtol=1e-5)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(float(expected.shares.max()))
    assert shares[-1] == pytest.approx(float(expected.shares[expected.shares > 0].min()))
    for strip in listed:
        assert strip["file"] == f"{strip['number']:05d}.png"
        _check_strip(folder / strip["file"], expected, strip["number"], photos)


def test__prototypes_of_averaged_layers_are_shown_patches_of_averaged_layers(
    small_config: Config, photos: EncodedImages, tmp_path: Path
) -> None:
    config = varied(small_config, "target.layers=all", "target.normalize=instance")
    run, seen = make_run(config, tmp_path / "run"), run_frame((32, 24), 4)
    with pytest.raises(CapiError, match=r"prototypes of .* averages of the teacher's layers .*: choose other pictures"):
        load_prototypes(run)
    assert run_parts(run)["prototypes"] is None
    learner = build_learner(config)
    Checkpoints(run / "checkpoints").load(learner)

    class Tokens(torch.nn.Module):
        """What the run's own teacher gives."""

        width, patch_size, statistics = 32, 4, statistics_of(load_run(run))

        def forward(self, images: torch.Tensor, *, pooled: bool = True) -> Features:
            tokens = learner.teacher(images)
            return Features(None, tokens[:, :1], tokens.unflatten(1, (24, 18)))

    expected = index_images(Tokens(), load_prototypes(run, any_layers=True), photos, seen, Encoding())
    listed = index_of(write_gallery(run, photos, prototypes=6))["prototypes"]
    shares = [float(expected.shares[strip["number"]]) for strip in listed]
    np.testing.assert_allclose([strip["share"] for strip in listed], shares, rtol=1e-5)


def _check_strip(path: Path, index: PrototypeIndex, number: int, photos: EncodedImages) -> None:
    """The strip is as long as there are patches, up to eight, and its first picture is the best patch."""
    members, frame = index.members(number)[:8], run_frame((32, 24), 4)
    picture = Image.open(path)
    assert picture.size == (len(members) * 66 - 2, 64)
    # At the size that the encoder sees; strips are drawn from larger photos, so that they differ in details alone.
    pixels = SizedImages(photos, frame)[members[0].image].pixels
    crop = patch_crop(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()), members[0], frame.grid)
    difference = abs(np.asarray(picture)[:, :64].astype(int) - np.asarray(crop))
    assert np.median(difference) <= 6


def test__the_note_says_what_is_shown_and_what_is_missing(run: Path, photos: EncodedImages) -> None:
    source = EncodedImages(photos.names, [b"no image", *photos.contents[1:]])
    facts = index_of(write_gallery(run, source, prototypes=2))
    assert facts["images"] == 4
    assert len(facts["prototypes"]) == 2
    for said in ("Of 24 prototypes", "4 images", "24 x 18 patches", "1 more could not be read", "Shown are 2", "least"):
        assert said in facts["note"]


def test__so_many_images_are_looked_at_spread_over_the_source(
    run: Path, photos: EncodedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    whole = EncodedImages.read
    monkeypatch.setattr(EncodedImages, "read", lambda self, number: read.append(number) or whole(self, number))
    assert index_of(write_gallery(run, photos, images=3))["images"] == 3
    assert set(read) == {0, 2, 4}


def test__a_new_gallery_replaces_the_old_one_and_leaves_nothing_else(run: Path, photos: EncodedImages) -> None:
    folder = write_gallery(run, photos, prototypes=5)
    (folder / "99999.png").write_text("old")
    write_gallery(run, photos, prototypes=1)
    listed = index_of(folder)["prototypes"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([listed[0]["file"], "index.json"])
    assert [path.name for path in folder.parent.iterdir()] == ["prototypes"]


def test__a_gallery_that_fails_leaves_the_old_one(
    run: Path, photos: EncodedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_gallery(run, photos, prototypes=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(CapiError, match="No space left"):
        write_gallery(run, photos, prototypes=3)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["prototypes"]


def test__progress_comes_to_its_end(run: Path, photos: EncodedImages) -> None:
    progress: dict[str, tuple[int, int]] = {}
    encoding = Encoding(progress=lambda what, done, total: progress.update({what: (done, total)}))
    write_gallery(run, photos, encoding=encoding)
    assert progress["prototypes"] == (5, 5)
    assert progress["photos"][0] == progress["photos"][1] > 0


def test__a_run_without_a_checkpoint_says_so(run: Path, photos: EncodedImages) -> None:
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CapiError, match="no checkpoint yet"):
        write_gallery(run, photos)


def test__the_nearest_image_of_a_copy_is_the_other_copy(run: Path) -> None:
    originals = [photo(40, 40 + number, seed=number) for number in range(4)]
    folder = write_neighbors(run, source_of([*originals, *originals]))
    rows = json.loads((folder / "index.json").read_text())
    assert len(rows) == 4
    shown = read_neighbors(folder)
    for row, pictures in zip(rows, shown, strict=True):
        cosines = [each["cosine"] for each in row]
        assert cosines[0] is None
        assert cosines[1] == pytest.approx(1, abs=1e-4)
        assert cosines[1:] == sorted(cosines[1:], reverse=True)
        assert (folder / row[0]["file"]).read_bytes() == (folder / row[1]["file"]).read_bytes()
        assert [cosine for _, cosine in pictures] == cosines


def test__nearest_images_need_two_that_can_be_read(run: Path, photos: EncodedImages) -> None:
    with pytest.raises(CapiError, match="fewer than two images"):
        write_neighbors(run, EncodedImages(photos.names[:2], [b"no image", photos.contents[1]]))
