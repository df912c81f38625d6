import numpy as np
import pytest
import torch
from PIL import Image

from capi.errors import CapiError
from capi.report.pictures.painters import PAINTERS, ComponentMaps, Drawn, PcaColors
from capi.report.pictures.sheets import MOST_ROWS, DrawnModel, Photo, figure, figure_of

RED = (250, 0, 0)


def photos(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (6, 6), RED) for _ in range(count)]


def red_squares(sheet: Image.Image) -> int:
    return int((np.asarray(sheet) == RED).all(2).sum()) // 168**2


@pytest.mark.parametrize("kind", PAINTERS)
def test__every_kind_makes_a_figure_of_several_models(kind: str) -> None:
    maps = {"a": [torch.randn(4, 4, 8) for _ in range(2)], "b": [torch.randn(6, 6, 12) for _ in range(2)]}
    sheet = figure(kind, photos(2), maps, joint=True)
    # One photo a row: images, or images times models.
    assert red_squares(sheet) == (2 if kind in {"pca", "clusters"} else 4)


def test__a_kind_that_does_not_exist_names_its_nearest_neighbor() -> None:
    with pytest.raises(CapiError, match="clusters"):
        figure("cluster", photos(1), {"a": [torch.randn(4, 4, 8)]})


def test__each_photo_needs_a_map() -> None:
    with pytest.raises(CapiError, match="each of the 2 photos"):
        figure("pca", photos(2), {"a": [torch.randn(4, 4, 8)]})
    with pytest.raises(CapiError, match="at least one"):
        figure("pca", [], {"a": []})


def test__a_sheet_has_no_more_rows_than_one_can_look_at() -> None:
    drawn = {number: [Drawn(Image.new("RGB", (2, 2)), f"PC {n}") for n in range(2)] for number in range(12)}
    shown = {number: Photo(f"image {number}", photo) for number, photo in enumerate(photos(12))}
    columns = [DrawnModel(f"model {n}", "64 px", drawn) for n in range(5)]
    assert red_squares(figure_of(ComponentMaps(), shown, columns, images=12)) == MOST_ROWS // 5 * 5


def test__what_a_model_could_not_read_stays_empty_and_the_rest_is_drawn() -> None:
    shown = {number: Photo(f"image {number}", photo) for number, photo in enumerate(photos(2))}
    green = Image.new("RGB", (2, 2), (0, 250, 0))
    sheet = figure_of(PcaColors(), shown, [DrawnModel("a", "64 px", {1: [Drawn(green)]})])
    assert red_squares(sheet) == 2
    assert (np.asarray(sheet) == (0, 250, 0)).all(2).sum() == 168**2
