import matplotlib
import numpy as np
import torch

from capi.report.pictures.colormaps import HEAT, coolwarm, css_gradient, heat


def test__coolwarm_is_that_of_matplotlib() -> None:
    ours = coolwarm(torch.linspace(-1, 1, 256)).numpy().astype(int)
    theirs = matplotlib.colormaps["coolwarm"](np.arange(256))[:, :3] * 255
    assert abs(ours - theirs).max() <= 1


def test__coolwarm_keeps_the_shape_and_stops_at_its_ends() -> None:
    colors = coolwarm(torch.tensor([[-9.0, -1.0, 0.0], [1.0, 9.0, 0.5]]))
    assert colors.shape == (2, 3, 3)
    assert colors.dtype == torch.uint8
    assert colors[0, 0].tolist() == colors[0, 1].tolist() == [59, 76, 192]
    assert colors[1, 0].tolist() == colors[1, 1].tolist() == [180, 4, 38]
    assert colors[0, 2].float().std() < 3


def test__heat_grows_brighter_from_black_to_white() -> None:
    colors = heat(torch.linspace(0, 1, 50)).int()
    assert colors[0].tolist() == [0, 0, 0]
    assert colors[-1].tolist() == [255, 255, 255]
    assert (colors.diff(dim=0) >= 0).all()
    assert (colors.sum(1).diff() > 0).all()
    assert torch.equal(heat(torch.tensor([-1.0, 2.0])), heat(torch.tensor([0.0, 1.0])))


def test__a_style_sheet_gets_the_same_heat() -> None:
    assert css_gradient(HEAT) == "linear-gradient(to right, #000000, #ff0000, #ffff00, #ffffff)"
    for place, color in enumerate(["000000", "ff0000", "ffff00", "ffffff"]):
        assert bytes(heat(torch.tensor(place / 3)).tolist()).hex() == color
