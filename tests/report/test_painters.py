import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from torch import Tensor

from capi.report.pictures.colormaps import coolwarm, heat
from capi.report.pictures.painters import (
    PAINTERS,
    AtomMaps,
    ClusterMaps,
    ComponentMaps,
    Painter,
    PcaColors,
    PrototypeMaps,
    distinct_colors,
    paint,
)
from capi.report.pictures.pca import as_colors, fit_components


def uneven(*shape: int) -> Tensor:
    return torch.empty(*shape).exponential_() * torch.arange(shape[-1], 0, -1)


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy())


@pytest.fixture(params=PAINTERS)
def painter(request: pytest.FixtureRequest) -> Painter:
    return PAINTERS[request.param](True)


def test__every_painter_keeps_its_contract(painter: Painter) -> None:
    assert isinstance(painter, Painter)
    drawn = paint(painter, [uneven(4, 6, 10), uneven(3, 3, 10)])
    assert len(drawn[0]) == len(drawn[1])
    assert {drawing.picture.size for drawing in drawn[0]} == {(6, 4)}
    assert {drawing.picture.size for drawing in drawn[1]} == {(3, 3)}
    assert all(drawing.picture.mode == "RGB" for drawing in drawn[0])
    assert painter.explanation.endswith(".")


def test__pictures_are_the_same_every_time(painter: Painter) -> None:
    maps = [uneven(4, 6, 10), uneven(3, 3, 10)]
    first = [pixels(drawing.picture) for drawn in paint(painter, maps) for drawing in drawn]
    again = [pixels(drawing.picture) for drawn in paint(painter, maps) for drawing in drawn]
    assert all(torch.equal(drawing, other) for drawing, other in zip(first, again, strict=True))


@pytest.mark.parametrize("feature_map", [torch.full((3, 4, 10), 2.5), torch.randn(1, 1, 10), torch.zeros(2, 2, 10)])
def test__nothing_to_see_is_one_quiet_color(painter: Painter, feature_map: Tensor) -> None:
    for drawing in paint(painter, [feature_map])[0]:
        colors = pixels(drawing.picture).flatten(0, 1).unique(dim=0)
        assert len(colors) == 1
        if not isinstance(painter, ClusterMaps | AtomMaps):
            # Grey: all channels alike, neither dark nor bright.
            assert colors.int().amax() - colors.int().amin() <= 3
            assert 100 < colors.float().mean() < 230


def test__pca_of_each_image_alone_is_that_of_its_patches() -> None:
    maps = [uneven(4, 6, 5), uneven(4, 6, 5) * 3]
    for feature_map, (drawn,) in zip(maps, paint(PcaColors(), maps), strict=True):
        patches = feature_map.flatten(0, 1)
        expected = as_colors(fit_components(patches).project(patches))
        assert torch.equal(pixels(drawn.picture).flatten(0, 1), expected)


def test__joint_pca_is_that_of_all_patches() -> None:
    maps = [uneven(4, 6, 5), uneven(2, 3, 5) * 3]
    together = torch.cat([drawing.flatten(0, 1) for drawing in maps])
    expected = as_colors(fit_components(together).project(together)).int()
    colors = torch.cat(
        [pixels(drawing.picture).flatten(0, 1) for (drawing,) in paint(PcaColors(joint=True), maps)]
    ).int()
    assert (colors - expected).abs().max() <= 1


@pytest.mark.parametrize("joint", [False, True])
def test__component_maps_show_each_component_around_the_mean(joint: bool) -> None:
    feature_map = uneven(8, 8, 10)
    patches = feature_map.flatten(0, 1).double().numpy()
    theirs = PCA(8).fit(patches)
    drawn = paint(ComponentMaps(joint), [feature_map])[0]
    assert [part.title for part in drawn] == [f"PC {number}" for number in range(1, 9)]
    for number, part in enumerate(drawn):
        values = theirs.transform(patches)[:, number]
        values *= np.sign((values**3).mean())
        expected = coolwarm(torch.from_numpy(values / np.quantile(abs(values), 0.99)).float()).int()
        assert (pixels(part.picture).flatten(0, 1).int() - expected).abs().max() <= 6
        assert part.caption == f"{100 * theirs.explained_variance_ratio_[number]:.1f} %"


def test__the_position_check_has_six_components_of_all_images_together() -> None:
    position = torch.linspace(-1, 1, 8)[:, None, None].expand(8, 8, 1)
    maps = [torch.cat([20 * position, torch.randn(8, 8, 9)], 2) for _ in range(3)]
    drawn = paint(PAINTERS["collapse"](False), maps)
    assert [len(drawings) for drawings in drawn] == [6, 6, 6]
    first = [pixels(drawings[0].picture).int() for drawings in drawn]
    # A leak looks alike in all images, other components do not.
    assert (first[0] - first[1]).abs().max() < 40
    assert (pixels(drawn[0][1].picture).int() - pixels(drawn[1][1].picture).int()).abs().max() > 100


def test__a_component_that_is_even_keeps_its_sign() -> None:
    ramp = torch.linspace(-1, 1, 9)[:, None, None] * torch.tensor([1.0, -2.0, 0.5])
    noisy = [(ramp + 1e-6 * torch.randn(9, 4, 3)) for _ in range(6)]
    pictures = [pixels(paint(ComponentMaps(), [noise])[0][0].picture).int() for noise in noisy]
    assert all((picture - pictures[0]).abs().max() < 10 for picture in pictures)


def test__clusters_have_a_color_each_in_all_images() -> None:
    grid = torch.tensor([[0, 1], [2, 2]])
    centers = torch.randn(3, 5) * 9
    maps = [centers[grid] + 0.01 * torch.randn(2, 2, 5), centers[grid.T] + 0.01 * torch.randn(2, 2, 5)]
    (first,), (second,) = paint(ClusterMaps(3), maps)
    assert torch.equal(pixels(first.picture).transpose(0, 1), pixels(second.picture))
    assert len(pixels(first.picture).flatten(0, 1).unique(dim=0)) == 3


@pytest.mark.parametrize("count", range(1, 25))
def test__colors_differ(count: int) -> None:
    colors = distinct_colors(count).double()
    assert colors.shape == (count, 3)
    if count > 1:
        distances = torch.cdist(colors, colors) + 1e3 * torch.eye(count)
        assert distances.min() > (70 if count <= 12 else 25)


def test__atoms_show_their_codes_on_one_scale() -> None:
    maps = [uneven(4, 4, 6), 0.2 * uneven(4, 4, 6)]
    painter = AtomMaps(3)
    drawn = paint(painter, maps)
    for feature_map, parts in zip(maps, drawn, strict=True):
        codes = painter.dictionary_.transform(feature_map.flatten(0, 1))
        for number, part in enumerate(parts):
            assert torch.equal(pixels(part.picture).flatten(0, 1), heat(codes[:, number] / painter.reach_[number]))
            assert part.caption == f"in {100 * (codes[:, number] > 0).float().mean():.0f} %"


def test__prototypes_color_the_patches_that_are_most_like_them() -> None:
    prototypes, bias = torch.randn(6, 4), torch.tensor([0.0, 0, 0, 0, 0, 1e6])
    feature_map = torch.randn(3, 5, 4)
    plain = PrototypeMaps(prototypes)
    labels = torch.tensor(
        [[(feature_map[row, column] @ prototypes.T).argmax() for column in range(5)] for row in range(3)]
    )
    drawn = plain.draw(feature_map)[0]
    assert torch.equal(pixels(drawn.picture), plain.colors[labels])
    assert drawn.caption == f"{len(labels.unique())} of 6"
    biased = PrototypeMaps(prototypes, bias).draw(feature_map)[0]
    assert (pixels(biased.picture) == plain.colors[5]).all()


def test__the_length_of_a_token_does_not_outweigh_the_bias_of_prototypes() -> None:
    prototypes, bias = torch.eye(2), torch.tensor([0.0, 0.5])
    drawn = PrototypeMaps(prototypes, bias).draw(torch.tensor([[[100.0, 99.0]]]))[0]
    assert (pixels(drawn.picture) == PrototypeMaps(prototypes).colors[1]).all()
