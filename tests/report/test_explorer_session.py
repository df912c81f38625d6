import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from capi.data.sources import EncodedImages
from capi.errors import CapiError
from capi.evals.features import Encoding
from capi.method.masking import MaskSampler
from capi.models.features import CapiEncoder, PixelEncoder
from capi.report.draw import Prototypes, built_in_photos
from capi.report.explorer import session
from capi.report.explorer.session import Explorer, View
from capi.report.pictures.feature_maps import FeatureMaps
from capi.report.pictures.gallery import PrototypeIndex
from capi.types import Features, Statistics
from tests.evals.toys import PatchColors
from tests.report.small_models import PROTOTYPES, photo_folder, some_prototypes, untrained_model
from tests.report.test_feature_maps import claimed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return photo_folder(tmp_path / "photos", 4)


@pytest.fixture
def explorer(folder: Path) -> Explorer:
    made = Explorer(untrained_model(), [folder], prototypes=some_prototypes(), size=32)
    made.collect()
    return made


class Counting(PatchColors):
    """Counts how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
        self.calls += 1
        return super().__call__(images, pooled=pooled)


def test__a_view_has_the_features_of_the_image_and_a_photo_of_the_same_part(explorer: Explorer) -> None:
    view = explorer.view(0)
    [(_, expected), *_] = list(FeatureMaps(explorer.encoder, explorer.source, explorer.frame, Encoding()))
    torch.testing.assert_close(view.feature_map, expected)
    assert view.grid == (4, 6)
    # Every patch has the same number of whole pixels in the photo.
    assert (view.photo.height % 4, view.photo.width % 6) == (0, 0)
    assert view.photo.width / view.photo.height == pytest.approx(6 / 4)
    assert view.image.shape == (1, 3, 32, 48)


def test__features_are_computed_once(folder: Path) -> None:
    encoder = Counting()
    explorer = Explorer(encoder, [folder], size=32)
    first = explorer.view(0)
    assert explorer.view(0) is first
    explorer.collect()
    explorer.collect()
    assert encoder.calls == 4


def test__similar_patches_come_from_other_images_and_from_all_of_them_for_an_upload(
    explorer: Explorer, folder: Path
) -> None:
    view = explorer.view(2)
    places = explorer.similar(view, (1, 3), 10)
    assert sorted(place.image for place in places) == [0, 1, 3]
    assert [place.score for place in places] == sorted((place.score for place in places), reverse=True)
    upload = explorer.opened(folder / "photo2.png", "mine.png")
    torch.testing.assert_close(upload.feature_map, view.feature_map)
    best = explorer.similar(upload, (1, 3), 10)[0]
    assert (upload.number, best.image, best.row, best.column) == (None, 2, 1, 3)


def test__members_are_those_of_an_index_over_all_images(explorer: Explorer) -> None:
    prototypes = some_prototypes()
    index = PrototypeIndex(prototypes.weight, prototypes.bias, session.MEMBERS)
    for number in range(4):
        index.add(number, explorer.view(number).feature_map)
    for prototype in range(PROTOTYPES):
        assert explorer.members(prototype, 99) == index.members(prototype)
        others = explorer.members(prototype, 99, besides=1)
        assert others == [place for place in index.members(prototype) if place.image != 1]
        assert explorer.share(prototype) == pytest.approx(float(index.shares[prototype]))
    place = next(place for number in range(PROTOTYPES) for place in explorer.members(number, 1))
    assert explorer.crop(place, side=40).size == (40, 40)


def test__predictions_hide_what_was_asked_for(explorer: Explorer) -> None:
    view = explorer.view(1)
    hidden = torch.zeros(4, 6, dtype=torch.bool)
    hidden[1:3, 2:5] = True
    predictions = explorer.predict(view, hidden)
    assert torch.equal(predictions.hidden, hidden)
    assert predictions.probabilities.shape == (6, PROTOTYPES)
    assert torch.equal(predictions.truth, explorer.nearest(view)[hidden])


@pytest.mark.parametrize("kind", ["random", "block", "inverse_block"])
def test__masks_hide_the_share_that_was_asked_for_and_depend_on_the_seed_alone(explorer: Explorer, kind: str) -> None:
    view = explorer.view(0)
    masks = [explorer.random_mask(view, kind, 0.5, seed) for seed in range(8)]
    assert all(int(mask.sum()) == 12 for mask in masks)
    assert torch.equal(masks[3], explorer.random_mask(view, kind, 0.5, 3))
    assert any(not torch.equal(masks[0], mask) for mask in masks[1:])


def test__the_mask_of_the_recipe_is_its_own(folder: Path) -> None:
    recipe = MaskSampler(kind="block", ratio=0.25, roll=False, predict=3)
    explorer = Explorer(untrained_model(), [folder], size=32, masks=recipe)
    mask = explorer.random_mask(explorer.view(0), recipe.kind, recipe.ratio, 0)
    rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
    # Without rolling a block lies in one piece: it fills its bounding box but for the excess.
    assert int(mask.sum()) == 6
    assert (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1) < 6 + 4


def test__while_images_are_read_those_that_are_there_are_searched(folder: Path) -> None:
    explorer = Explorer(untrained_model(), [folder], prototypes=some_prototypes(), size=32)
    view = explorer.view(0)
    assert explorer.similar(view, (0, 0), 5) == []
    assert explorer.progress() == "0 of 4 images searched, the others are being read"
    reader = threading.Thread(target=explorer.collect)
    reader.start()
    reader.join()
    assert len(explorer.similar(view, (0, 0), 5)) == 3
    assert explorer.progress() == "4 images searched"


def test__one_image_is_called_one_image(folder: Path) -> None:
    explorer = Explorer(untrained_model(), sorted(folder.iterdir())[:1], size=32)
    explorer.collect()
    assert explorer.facts()[0].startswith("1 image ·")
    assert explorer.progress() == "1 image searched"


def test__the_library_stops_where_its_room_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LIBRARY_BYTES", 2 * 4 * 6 * 32 * 4)
    explorer = Explorer(untrained_model(), [folder], size=32)
    explorer.collect()
    assert sorted(explorer.library.maps) == [0, 1]


def test__an_encoder_without_predictor_or_prototypes_says_what_is_missing(
    folder: Path, model: CapiEncoder, tmp_path: Path
) -> None:
    pixels = Explorer(PixelEncoder(8), [folder], size=32)
    assert "no predictor" in (pixels.missing_predictions or "")
    assert "without prototypes" in (pixels.missing_prototypes or "")
    headless = Explorer(model, [folder], prototypes=Prototypes(torch.randn(4, 32)), size=32)
    assert "no head" in (headless.missing_predictions or "")
    assert headless.missing_prototypes is None
    alone = Explorer(untrained_model(), [folder], size=32)
    assert "without prototypes" in (alone.missing_predictions or "")
    with pytest.raises(CapiError, match="without prototypes"):
        alone.nearest(alone.view(0))
    with pytest.raises(CapiError, match="without prototypes"):
        alone.predict(alone.view(0), torch.eye(4, 6).bool())
    assert len(pixels.thumbnails()) == 4


def test__prototypes_of_another_width_and_strange_sizes_are_refused(folder: Path) -> None:
    with pytest.raises(CapiError, match="width 32, but the prototypes 5"):
        Explorer(untrained_model(), [folder], prototypes=Prototypes(torch.randn(4, 5)))
    with pytest.raises(CapiError, match="0 pixels"):
        Explorer(untrained_model(), [folder], size=0)


def test__a_folder_without_images_and_one_of_broken_ones_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="no images"):
        Explorer(untrained_model(), [tmp_path])
    (tmp_path / "broken.png").write_bytes(b"nothing")
    (tmp_path / "huge.png").write_bytes(claimed(20000, 20000))
    with pytest.raises(CapiError, match="none of the images can be read"):
        Explorer(untrained_model(), [tmp_path]).thumbnails()


def test__broken_images_among_good_ones_are_reported_and_left_out(folder: Path) -> None:
    (folder / "a.png").write_bytes(b"nothing")
    explorer = Explorer(untrained_model(), [folder], size=32)
    assert [number for number, _, _ in explorer.thumbnails()] == [0, 2, 3, 4]
    explorer.collect()
    assert set(explorer.failed) == {"a.png"}
    assert sorted(explorer.library.maps) == [0, 2, 3, 4]


@pytest.mark.parametrize(("content", "reason"), [(b"no image", "no image"), (claimed(20000, 20000), "pixels")])
def test__uploads_that_cannot_be_shown_say_why(explorer: Explorer, tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "upload.png"
    path.write_bytes(content)
    with pytest.raises(CapiError, match=reason):
        explorer.opened(path, "upload.png")
    with pytest.raises(CapiError, match=r"gone\.png cannot be read"):
        explorer.opened(tmp_path / "gone.png", "gone.png")


def test__a_single_pixel_can_be_explored(explorer: Explorer, tmp_path: Path) -> None:
    Image.new("RGB", (1, 1), "teal").save(tmp_path / "pixel.png")
    view = explorer.opened(tmp_path / "pixel.png", "pixel.png")
    assert view.grid == (4, 4)
    assert isinstance(view, View)
    assert len(explorer.similar(view, (0, 0), 3)) == 3


def test__an_encoder_that_sees_gray_is_shown_in_color(folder: Path) -> None:
    explorer = Explorer(PixelEncoder(8, Statistics((0.5,), (0.2,))), [folder], size=32)
    view = explorer.view(0)
    assert view.image.shape[1] == 1
    red, green, _ = view.photo.split()
    assert red.tobytes() != green.tobytes()


def test__without_images_there_are_built_in_photos() -> None:
    explorer = Explorer(PixelEncoder(16), size=64)
    assert isinstance(explorer.source, EncodedImages)
    assert [name for _, name, _ in explorer.thumbnails()] == built_in_photos().names
    assert explorer.facts() == ["6 images · short side 64 px, patches of 16 px · features of width 768"]
