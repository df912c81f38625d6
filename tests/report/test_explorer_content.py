from pathlib import Path

import numpy as np
import pytest
import torch

from capi.report.explorer.content import Content
from capi.report.explorer.session import Explorer
from capi.report.pictures.hidden_patches import rectangle
from capi.report.pictures.pca import as_colors, fit_components
from capi.report.pictures.similarity import patch_box
from tests.report.small_models import PROTOTYPES, photo_folder, some_prototypes, untrained_model
from tests.report.test_explorer_html import pictures_in


@pytest.fixture
def content(tmp_path: Path) -> Content:
    explorer = Explorer(
        untrained_model(), [photo_folder(tmp_path / "photos", 3)], prototypes=some_prototypes(), size=32
    )
    explorer.collect()
    return Content(explorer)


def test__pca_is_that_of_the_image_with_eight_components(content: Content) -> None:
    view = content.explorer.view(0)
    first, *parts = pictures_in(content.pca(view))
    patches = view.feature_map.flatten(0, 1)
    expected = as_colors(fit_components(patches).project(patches))
    assert np.array_equal(np.asarray(first).reshape(-1, 3), expected.numpy())
    assert len(parts) == 8


@pytest.mark.parametrize("number", [2, 5])
def test__there_are_as_many_clusters_as_asked_for(content: Content, number: int) -> None:
    text = content.clusters(content.explorer.view(0), number)
    [picture] = pictures_in(text)
    assert len(picture.convert("RGB").getcolors() or []) == number
    assert f"in {number} groups" in text


def test__patches_of_one_prototype_have_one_color(content: Content) -> None:
    view = content.explorer.view(0)
    [picture] = pictures_in(content.prototype_map(view))
    nearest = content.explorer.nearest(view).flatten().tolist()
    drawn = [tuple(color) for color in np.asarray(picture).reshape(-1, 3).tolist()]
    colors = dict(zip(nearest, drawn, strict=True))
    assert [colors[prototype] for prototype in nearest] == drawn
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("patch", [(0, 0), (3, 5), (2, 1)])
def test__the_clicked_patch_is_the_most_similar_one(content: Content, patch: tuple[int, int]) -> None:
    text = content.similarity(content.explorer.view(0), patch)
    row, column = patch
    assert f"You clicked row {row}, column {column}." in text
    assert f"Most similar patch: row {row}, column {column} (the one you clicked), cosine 1.000" in text
    [heat] = pictures_in(text)
    left, top, right, bottom = patch_box(patch, (4, 6), heat.size)
    brightness = heat.convert("L").crop((left + 4, top + 4, right - 4, bottom - 4)).getextrema()
    # White, but for the shade of the photo.
    assert brightness[0] > 170


def test__other_images_come_with_names_and_numbers(content: Content) -> None:
    text = content.others(content.explorer.view(0), (1, 1))
    # A heat map and a patch of each of the other two.
    assert len(pictures_in(text)) == 4
    assert "3 images searched" in text
    assert "&lt;b&gt;bold&lt;b&gt; &amp; ${1 + 1}.png" in text or "photo2.png" in text
    assert "<b>bold" not in text


def test__a_prototype_shows_its_patches_or_says_that_it_has_none(content: Content) -> None:
    shares = [content.explorer.share(number) for number in range(PROTOTYPES)]
    most = max(range(PROTOTYPES), key=lambda number: shares[number])
    text = content.prototype(most)
    assert len(pictures_in(text)) == len(content.explorer.members(most, 24))
    assert f"<b>Prototype {most}</b> is the nearest of {100 * shares[most]:.2g} %" in text
    unused = [number for number in range(PROTOTYPES) if not shares[number]]
    assert all("the nearest of no patch" in content.prototype(number) for number in unused)


def test__predictions_are_summed_up_drawn_and_explained(content: Content) -> None:
    view = content.explorer.view(0)
    hidden = rectangle((1, 1), (2, 4), view.grid)
    predictions = content.explorer.predict(view, hidden)
    assert "8 of 24 patches are hidden." in content.outcome(view, predictions)
    assert (
        f"true one for {100 * float((predictions.predicted == predictions.truth).float().mean()):.0f} %"
        in content.outcome(view, predictions)
    )
    covered = sum(not content.explorer.members(prototype, 1, besides=0) for prototype in predictions.predicted.tolist())
    assert ("stay covered" in content.outcome(view, predictions)) == (covered > 0)
    truth, heat = pictures_in(content.confidence(view, predictions))
    assert truth.size == heat.size == view.photo.size
    text = content.answers(view, predictions, (2, 3))
    best = predictions.probabilities[6].sort(descending=True)
    for place in range(5):
        number, share = int(best.indices[place]), 100 * float(best.values[place])
        right = ", the truth" if number == int(predictions.truth[6]) else ""
        assert f"<b>{place + 1}. prototype {number}</b> {share:.1f} %{right}<" in text
    among = int(predictions.truth[6]) in best.indices[:5].tolist()
    assert (f"The truth: prototype {int(predictions.truth[6])}" in text) == (not among)
    assert "this patch is visible" in content.answers(view, predictions, (0, 0))


def test__an_image_is_not_filled_with_its_own_patches(content: Content) -> None:
    view = content.explorer.view(0)
    asked: list[int | None] = []
    members = content.explorer.members

    def spied(prototype: int, count: int, besides: int | None = None) -> list[object]:
        asked.append(besides)
        return list(members(prototype, count, besides))

    content.explorer.members = spied  # type: ignore[method-assign, assignment]
    predictions = content.explorer.predict(view, rectangle((0, 0), (1, 1), view.grid))
    filled = content.filled(view, predictions, predictions.predicted)
    assert set(asked) == {0}
    box = patch_box((3, 5), view.grid, view.photo.size)
    assert filled.crop(tuple(box)).tobytes() == view.photo.crop(tuple(box)).tobytes()
    assert torch.equal(predictions.hidden, rectangle((0, 0), (1, 1), view.grid))
