import io
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from sklearn.decomposition import PCA
from torch import Tensor

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.data.crops import normalize
from capi.data.recorded import spaced
from capi.data.sources import EncodedImages
from capi.errors import CapiError
from capi.report import snapshots
from capi.report.pictures.feature_maps import SizedImages
from capi.report.pictures.pca import Components, fit_components
from capi.report.snapshots import Snapshots, matched, run_frame, snapshot_sheet, snapshot_steps
from capi.train.build import build_learner
from capi.train.loop import Evaluation
from capi.train.step import Learner
from capi.types import Statistics
from capi.zoo.build import frozen, statistics
from tests.data.pictures import encoded, noise, photo
from tests.evals.toys import source_of

SIZE = (32, 24)
# The grid is 8 x 6, enlarged three times.
GRID = (24, 18)


@pytest.fixture
def learner(small_config: Config) -> Learner:
    return build_learner(small_config)


@pytest.fixture
def photos() -> EncodedImages:
    return source_of([photo(60, 50 + number, seed=number) for number in range(9)])


def taken(source: Any, folder: Path, config: Config, **options: Any) -> Snapshots:
    return Snapshots(source, statistics(config), SIZE, folder, 10, **options)


def colors(folder: Path, step: int, count: int) -> list[np.ndarray]:
    return [np.asarray(Image.open(folder / f"step_{step:08d}_{number}.png")) for number in range(count)]


def moved(learner: Learner, seed: int) -> None:
    """The teacher goes on a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.teacher.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def test__pictures_are_the_components_of_scikit_learn(
    learner: Learner, photos: EncodedImages, tmp_path: Path, small_config: Config
) -> None:
    assert taken(photos, tmp_path, small_config, count=3).run(learner, 40) == {}
    frame = run_frame(SIZE, 4)
    pixels = torch.stack([SizedImages(photos, frame)[number].pixels for number in (0, 3, 6)])
    tokens = learner.teacher(normalize(pixels, *statistics(small_config))).flatten(0, 1).numpy()
    theirs = PCA(3).fit_transform(tokens)
    ours = np.concatenate([picture.reshape(-1, 3) for picture in colors(tmp_path, 40, 3)])
    assert colors(tmp_path, 40, 3)[0].shape == (*GRID, 3)
    for channel in range(3):
        # All but the outermost hundredths are drawn as they are, up to rounding to bytes.
        assert abs(np.corrcoef(ours[:, channel], theirs[:, channel])[0, 1]) > 0.98


def test__it_is_an_evaluation_that_leaves_the_run_as_it_was(
    learner: Learner, photos: EncodedImages, tmp_path: Path, small_config: Config
) -> None:
    drawer = taken(photos, tmp_path, small_config, count=2)
    assert isinstance(drawer, Evaluation)
    learner.student.train()
    modes = [module.training for part in (learner.student, learner.teacher) for module in part.modules()]
    weights = [parameter.clone() for parameter in learner.teacher.parameters()]
    state, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    for step in (0, 10):
        drawer.run(learner, step)
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numbers).all()
    assert modes == [module.training for part in (learner.student, learner.teacher) for module in part.modules()]
    assert all(
        torch.equal(parameter, other) for parameter, other in zip(weights, learner.teacher.parameters(), strict=True)
    )
    assert all(parameter.grad is None for parameter in learner.teacher.parameters())


def test__colors_stay_where_components_change_order_and_sign(
    learner: Learner, photos: EncodedImages, tmp_path: Path, small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawer = taken(photos, tmp_path, small_config, count=2)
    drawer.run(learner, 10)

    def turned(features: Tensor) -> Components:
        components = fit_components(features)
        return Components(
            components.mean, components.directions[[2, 0, 1]] * torch.tensor([[-1.0], [1], [-1]]), components.shares
        )

    monkeypatch.setattr(snapshots, "fit_components", turned)
    drawer.run(learner, 20)
    for before, after in zip(colors(tmp_path, 10, 2), colors(tmp_path, 20, 2), strict=True):
        assert abs(before.astype(int) - after).max() <= 1


def slowly_matched(values: Tensor, before: Tensor) -> Tensor:
    """The same pair by pair."""
    pairs = []
    for place in range(3):
        for component in range(3):
            pairs.append((np.corrcoef(before[:, place], values[:, component])[0, 1], place, component))
    result = torch.full_like(values, torch.nan)
    taken_places: set[int] = set()
    taken_components: set[int] = set()
    for correlation, place, component in sorted(pairs, key=lambda pair: -abs(pair[0])):
        if place not in taken_places and component not in taken_components:
            result[:, place] = values[:, component] * np.sign(correlation)
            taken_places.add(place)
            taken_components.add(component)
    return result


@pytest.mark.parametrize("seed", range(5))
def test__matching_takes_the_surest_pairs_first(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(40, 3, generator=generator) + 100
    values = before @ torch.randn(3, 3, generator=generator) + torch.randn(40, 3, generator=generator)
    torch.testing.assert_close(matched(values, before), slowly_matched(values, before))


def test__components_that_do_not_vary_take_what_is_left() -> None:
    before = torch.randn(30, 3)
    before[:, 1] = 7
    values = torch.stack([torch.zeros(30), -before[:, 2], before[:, 0]], 1)
    expected = torch.stack([before[:, 0], torch.zeros(30), before[:, 2]], 1)
    torch.testing.assert_close(matched(values, before), expected)


def flipping(monkeypatch: pytest.MonkeyPatch, flips: Sequence[bool]) -> None:
    """Signs that change from one fit to the next, as they do where components are even."""
    calls = itertools.cycle(flips)

    def fit(features: Tensor) -> Components:
        components = fit_components(features)
        return Components(components.mean, components.directions * (-1 if next(calls) else 1), components.shares)

    monkeypatch.setattr(snapshots, "fit_components", fit)


def test__a_resumed_run_continues_in_the_same_colors(
    photos: EncodedImages, tmp_path: Path, small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def course(folder: Path, *, resumed: bool) -> list[np.ndarray]:
        learner, drawer = build_learner(small_config), taken(photos, folder, small_config, count=2)
        for step in (0, 10, 20):
            if resumed and step == 10:
                drawer = taken(photos, folder, small_config, count=2)
            drawer.run(learner, step)
            moved(learner, step)
        return [picture for step in (0, 10, 20) for picture in colors(folder, step, 2)]

    flipping(monkeypatch, [False, True, False])
    whole, parts = course(tmp_path / "whole", resumed=False), course(tmp_path / "parts", resumed=True)
    assert all((value == other).all() for value, other in zip(whole, parts, strict=True))
    correlation = np.corrcoef(whole[0].reshape(-1, 3).T, whole[2].reshape(-1, 3).T)
    assert (correlation.diagonal(3) > 0).all()


def test__a_step_that_is_repeated_gives_the_same_picture_and_later_ones_go(
    photos: EncodedImages, tmp_path: Path, small_config: Config
) -> None:
    learner, drawer = build_learner(small_config), taken(photos, tmp_path, small_config, count=2)
    drawer.run(learner, 0)
    moved(learner, 1)
    for step in (10, 20):
        drawer.run(learner, step)
    first = colors(tmp_path, 10, 2)
    # Whatever stands there of this step and of later ones is not looked at.
    for path in (path for step in (10, 20) for path in tmp_path.glob(f"step_{step:08d}_*.png")):
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    taken(photos, tmp_path, small_config, count=2).run(learner, 10)
    assert all((value == other).all() for value, other in zip(first, colors(tmp_path, 10, 2), strict=True))
    assert snapshot_steps(tmp_path) == [0, 10]


def test__a_broken_or_incomplete_snapshot_is_passed_over(
    learner: Learner, photos: EncodedImages, tmp_path: Path, small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipping(monkeypatch, [False, True])
    drawer = taken(photos, tmp_path, small_config, count=2)
    drawer.run(learner, 0)
    picture = 255 - colors(tmp_path, 0, 2)[0]
    Image.fromarray(picture).save(tmp_path / "step_00000010_0.png")
    Image.fromarray(picture).save(tmp_path / "step_00000020_0.png")
    (tmp_path / "step_00000020_1.png").write_bytes(b"\x89PNG\r\n\x1a\nhalf")
    for number in range(2):
        Image.fromarray(picture[:5]).save(tmp_path / f"step_00000030_{number}.png")
    drawer.run(learner, 40)
    for before, after in zip(colors(tmp_path, 0, 2), colors(tmp_path, 40, 2), strict=True):
        assert abs(before.astype(int) - after).max() <= 1


def test__images_that_cannot_be_read_give_way_to_their_neighbors(
    learner: Learner, photos: EncodedImages, tmp_path: Path, small_config: Config
) -> None:
    contents = list(photos.contents)
    for number in (0, 1, 5, 6, 7, 8):
        contents[number] = b"no image" if number % 2 else contents[number][:200]
    taken(EncodedImages(photos.names, contents), tmp_path, small_config, count=3).run(learner, 0)
    # Of the three parts 0-2, 3-5 and 6-8 the first image each that can be read; the last has none.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "photo_0.jpg",
        "photo_1.jpg",
        "step_00000000_0.png",
        "step_00000000_1.png",
    ]
    taken(source_of([photo(60, 52, seed=2), photo(60, 53, seed=3)]), tmp_path / "same", small_config).run(learner, 0)
    for number in range(2):
        name = f"photo_{number}.jpg"
        assert (tmp_path / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


def test__photos_have_a_short_side_of_256_pixels(
    learner: Learner, photos: EncodedImages, tmp_path: Path, small_config: Config
) -> None:
    taken(photos, tmp_path, small_config, count=1).run(learner, 0)
    with Image.open(tmp_path / "photo_0.jpg") as image:
        assert image.size == (256, 341)


def test__nothing_readable_is_reported_once_and_the_run_continues(
    learner: Learner, tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    drawer = taken(EncodedImages(["a", "b"], [b"no", b"image"]), tmp_path, small_config)
    with caplog.at_level(logging.WARNING, "capi"):
        assert drawer.run(learner, 0) == drawer.run(learner, 10) == {}
    assert len(caplog.records) == 1
    assert "none of the images" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test__features_that_are_not_finite_and_a_folder_that_cannot_be_written_do_not_end_the_run(
    learner: Learner, photos: EncodedImages, tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "capi"):
        assert taken(photos, tmp_path / "file" / "folder", small_config).run(learner, 0) == {}
        with torch.no_grad():
            next(learner.teacher.parameters()).fill_(torch.nan)
        assert taken(photos, tmp_path / "folder", small_config).run(learner, 10) == {}
    assert "step 0 could not be drawn" in caplog.text
    assert "step 10 could not be drawn" in caplog.text
    assert snapshot_steps(tmp_path / "folder") == []


def bands(seed: int) -> bytes:
    """A TIFF of five channels."""
    buffer = io.BytesIO()
    pixels = noise(40, 30, 5, dtype=np.uint16, seed=seed)
    tifffile.imwrite(buffer, pixels, photometric="minisblack", planarconfig="contig", metadata=None)
    return buffer.getvalue()


def channelled(channels: int) -> tuple[Learner, Statistics]:
    config = parse_config(
        {
            "data": {"image_size": list(SIZE), "mean": [0.5] * channels, "std": [0.2] * channels},
            "model": {"width": 32, "depth": 1, "heads": 2, "patch_size": 4, "channels": channels},
            "clustering": {"prototypes": 24},
            "masking": {"predict": 5},
            "optimization": {"batch_size": 6, "steps": 20},
        }
    )
    return build_learner(config), statistics(config)


def test__five_channels_are_drawn_and_the_first_three_are_the_photo(tmp_path: Path) -> None:
    learner, normalized = channelled(5)
    source = EncodedImages([f"{number}.tif" for number in range(3)], [bands(number) for number in range(3)])
    Snapshots(source, normalized, SIZE, tmp_path, 10).run(learner, 0)
    assert [picture.shape for picture in colors(tmp_path, 0, 3)] == [(*GRID, 3)] * 3
    with Image.open(tmp_path / "photo_0.jpg") as image:
        assert image.mode == "RGB"


def test__one_channel_is_drawn_from_gray_and_from_color(tmp_path: Path) -> None:
    learner, normalized = channelled(1)
    source = source_of([photo(40, 30), photo(40, 30, seed=1)[..., 0]])
    Snapshots(source, normalized, SIZE, tmp_path, 10).run(learner, 0)
    assert len(colors(tmp_path, 0, 2)) == 2
    spreads = [np.asarray(Image.open(tmp_path / f"photo_{number}.jpg")).astype(int) for number in range(2)]
    # What the encoder sees as grey is shown in its colours.
    assert abs(spreads[0][..., 0] - spreads[0][..., 2]).max() > 30
    assert abs(spreads[1][..., 0] - spreads[1][..., 2]).max() <= 3


@pytest.mark.parametrize(
    ("size", "patch_size", "grid"),
    [
        ((48, 48), 8, (24, 24)),
        ((32, 24), 4, (24, 18)),
        ((224, 224), 16, (14, 14)),
        ((448, 448), 14, (32, 32)),
        ((64, 64), 8, (24, 24)),
        ((80, 40), 8, (20, 10)),
        ((8, 8), 8, (24, 24)),
    ],
)
def test__images_are_enlarged_by_a_whole_factor_where_there_are_few_patches(
    size: tuple[int, int], patch_size: int, grid: tuple[int, int]
) -> None:
    frame = run_frame(size, patch_size)
    assert frame.grid == grid
    height, width = frame.size((300, 1000))
    assert (height // patch_size, width // patch_size) == grid
    assert (height % size[0], width % size[1]) == (0, 0)


def test__a_frame_shows_the_middle_in_the_aspect_of_the_run() -> None:
    frame = run_frame((32, 16), 4)
    assert frame.box((100, 200)) == (75, 0, 125, 100)
    assert frame.box((200, 50)) == (0, 50, 50, 150)
    assert replace(frame, shown=100).size((5, 7)) == (200, 100)


def test__enlarging_gives_the_encoder_more_patches(learner: Learner, small_config: Config) -> None:
    encoder = frozen(learner.teacher.average, statistics(small_config))
    features = encoder(torch.zeros(1, 3, *run_frame(SIZE, encoder.patch_size).size((9, 9))), pooled=False)
    assert features.feature_map.shape[1:3] == GRID


def test__spaced_numbers_hold_both_ends() -> None:
    assert spaced(3, 8) == [0, 1, 2]
    assert spaced(9, 3) == [0, 4, 8]
    assert spaced(5, 1) == [0]
    assert len(set(spaced(1000, 256))) == 256
    assert len(set(spaced(100, 8))) == 8


def test__a_sheet_has_a_row_for_each_image_and_columns_from_the_first_to_the_last_step(
    learner: Learner, photos: EncodedImages, tmp_path: Path, small_config: Config
) -> None:
    drawer = taken(photos, tmp_path, small_config, count=2)
    for step in (0, 10, 20):
        drawer.run(learner, step)
    whole, few = (snapshot_sheet(tmp_path, columns=columns, side=200) for columns in (8, 2))
    assert whole.width - few.width == 208
    (tmp_path / "step_00000010_1.png").unlink()
    lacking = snapshot_sheet(tmp_path, side=200)
    assert lacking.width == whole.width
    assert lacking.tobytes() != whole.tobytes()
    # The step between is not shown, so nothing is missing.
    assert snapshot_sheet(tmp_path, columns=2, side=200).tobytes() == few.tobytes()


def test__a_sheet_of_nothing_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "step_1_1.png").write_bytes(encoded(photo(8, 8), "PNG"))
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CapiError, match="holds no snapshots"):
            snapshot_sheet(folder)
