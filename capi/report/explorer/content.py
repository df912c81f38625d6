"""What the explorer shows of an image, a clicked patch, a prototype and hidden patches, as pictures and HTML.

Text, pictures with captions, scales and legends are the macros of `templates/explorer.html`. Pictures are within the
page, every text is escaped, and nothing refers to anything outside.
"""

import base64
import io
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from PIL import Image
from torch import Tensor, tensor

from capi.report.explorer.session import Explorer, View
from capi.report.pages.page import environment
from capi.report.pictures.clusters import KMeans
from capi.report.pictures.colormaps import coolwarm
from capi.report.pictures.gallery import PatchPlace
from capi.report.pictures.hidden_patches import HiddenPredictions, filled_picture
from capi.report.pictures.painters import ComponentMaps, PcaColors, PrototypeMaps, distinct_colors
from capi.report.pictures.similarity import contrast, heat_over, most_similar, outline_patch, similarity_map
from capi.types import Int

Patch = tuple[int, int]
_OTHERS, _NEAREST, _MEMBERS, _ANSWERS = 3, 12, 24, 5
# Patches around a patch that is shown, the side of that picture, and of one that fills a hidden patch.
_CONTEXT, _CROP_SIDE, _TILE_SIDE = 2, 96, 32

parts: Any = environment().get_template("explorer.html").module


@dataclass(frozen=True)
class Figure:
    """A picture with a caption; one of patches has a pixel for each, and is enlarged without blurring."""

    picture: Image.Image
    caption: str = ""
    patches: bool = False

    @property
    def address(self) -> str:
        """The picture itself as an address: exact where pixels are patches, else as a photo."""
        buffer = io.BytesIO()
        if self.patches:
            self.picture.save(buffer, "PNG")
        else:
            self.picture.convert("RGB").save(buffer, "JPEG", quality=90)
        kind = "png" if self.patches else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Content:
    """The words and pictures of the page; everything takes well under a second once the images have been read."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        index = explorer.index
        self._colors = None if index is None else PrototypeMaps(index.prototypes, index.bias).colors

    def pca(self, view: View) -> str:
        """All of the image in three colours, then one component after the other."""
        color = PcaColors().draw(view.feature_map)[0].picture
        components = [
            Figure(drawn.picture, f"{drawn.title} · {drawn.caption}", patches=True)
            for drawn in ComponentMaps().draw(view.feature_map)
        ]
        cold, warm = coolwarm(tensor([-1.0, 1.0])).tolist()
        return (
            parts.facts(PcaColors().explanation)
            + parts.figures([Figure(color, patches=True)], "large")
            + parts.facts(ComponentMaps().explanation)
            + parts.figures(components, "middle")
            + parts.swatches([(tuple(cold), "below the mean"), (tuple(warm), "above the mean")])
        )

    def clusters(self, view: View, number: int) -> str:
        """Groups of alike patches, and their shares."""
        patches = view.feature_map.flatten(0, 1)
        means, colors = KMeans(number).fit(patches), distinct_colors(number)
        picture = _patch_picture(colors[means.predict(patches)], view)
        shares = zip(colors.tolist(), means.shares_.tolist(), strict=False)
        legend = parts.swatches([((red, green, blue), f"{100 * share:.0f} %") for (red, green, blue), share in shares])
        note = parts.facts(
            f"The patches of this image in {len(means.shares_)} groups, found by k-means, with their shares."
        )
        return note + parts.figures([Figure(picture, patches=True)], "large") + legend

    def prototype_map(self, view: View) -> str:
        """The prototype of each patch as a colour."""
        nearest = self.explorer.nearest(view)
        assert self._colors is not None
        picture = _patch_picture(self._colors[nearest.flatten()], view)
        note = parts.facts(
            f"The patches of this image in the colours of their prototypes, of which {len(nearest.unique())} of "
            f"{len(self._colors)} appear here. Prototypes that are alike have alike colours."
        )
        return note + parts.figures([Figure(picture, patches=True)], "large")

    def similarity(self, view: View, patch: Patch) -> str:
        """How alike the other patches of the image are."""
        similarity = similarity_map(view.feature_map[patch], view.feature_map)
        row, column = best = most_similar(similarity, patch)
        whether = "the one you clicked" if best == patch else "not the one you clicked"
        low, high = contrast(similarity)
        text = (
            f"Most similar patch: row {row}, column {column} ({whether}), cosine {float(similarity[best]):.3f}. The "
            f"median of all is {float(similarity.median()):.3f}."
        )
        heat = outline_patch(heat_over(view.photo, similarity, (low, high)), patch, view.grid)
        head = parts.facts(text, f"You clicked row {patch[0]}, column {patch[1]}.")
        return (
            head
            + parts.figures([Figure(heat)], "large")
            + parts.scale(f"cosine up to {low:.2f}", f"{high:.2f} and more")
        )

    def others(self, view: View, patch: Patch) -> str:
        """The nearest patches of other images; they may have to be read first."""
        places = self.explorer.similar(view, patch, _NEAREST)
        if not places:
            return parts.facts(f"No other image to look for alike patches in ({self.explorer.progress()}).")
        own = similarity_map(view.feature_map[patch], view.feature_map)
        limits = contrast(own)
        heat = [Figure(self._heat(view, patch, place, limits), self._caption(place)) for place in places[:_OTHERS]]
        return (
            parts.facts("on the same scale, the nearest patch outlined:", "In other images,")
            + parts.figures(heat, "middle")
            + parts.facts(f"one of an image ({self.explorer.progress()}):", "The nearest patches,")
            + parts.figures(self._crops(places), "small")
        )

    def prototype(self, number: int) -> str:
        """The patches that belong to a prototype most."""
        places = self.explorer.members(number, _MEMBERS)
        share = 100 * self.explorer.share(number)
        use = f"is the nearest of {share:.2g} % of all patches" if share else "is the nearest of no patch"
        closest = " Those closest to it, with their cosines:" if places else ""
        head = parts.facts(f"{use} ({self.explorer.progress()}).{closest}", f"Prototype {number}")
        return head + parts.figures(self._crops(places), "small")

    def filled(self, view: View, predictions: HiddenPredictions, labels: Int[Tensor, " p"]) -> Image.Image:
        """The image with each hidden patch replaced by the best patch of a prototype."""

        def tile(prototype: int) -> Image.Image | None:
            # Of another image: this one would give the answer away.
            places = self.explorer.members(prototype, 1, besides=view.number)
            return self.explorer.crop(places[0], context=0, side=_TILE_SIDE) if places else None

        return filled_picture(view.photo, predictions.hidden, labels, tile)

    def outcome(self, view: View, predictions: HiddenPredictions) -> str:
        """How good the predictions are, in numbers, and what of them cannot be shown."""
        count, prototypes = predictions.probabilities.shape
        confidence, entropy = float(predictions.confidence.mean()), float(predictions.entropy.mean())
        labels, counts = predictions.predicted.unique(return_counts=True)
        pairs = zip(labels.tolist(), counts.tolist(), strict=True)
        covered = sum(patches for label, patches in pairs if not self.explorer.members(label, 1, view.number))
        shown = f" No other image has a patch of the prototypes of {covered}, which stay covered." if covered else ""
        return parts.facts(
            f"The likeliest prototype is the true one for {100 * predictions.hits():.0f} % of them (by chance "
            f"{100 / prototypes:.1g} %); the truth is among the five likeliest for {100 * predictions.hits(5):.0f} %. "
            f"Mean confidence {100 * confidence:.0f} %, mean entropy {entropy:.2f} nat.{shown}",
            f"{count} of {predictions.hidden.numel()} patches are hidden.",
        )

    def confidence(self, view: View, predictions: HiddenPredictions) -> str:
        """What the best filling would be, and how sure the model is of its own."""
        most = float(predictions.confidence.max())
        heat = heat_over(view.photo, predictions.as_map(predictions.confidence), (0.0, most))
        truth = self.filled(view, predictions, predictions.truth)
        return parts.figures(
            [
                Figure(truth, "Filled with the true prototypes: the best it could do"),
                Figure(heat, "Confidence: the probability of the likeliest prototype"),
            ],
            "wide",
        ) + parts.scale("confidence 0 %", f"{100 * most:.0f} %")

    def answers(self, view: View, predictions: HiddenPredictions, patch: Patch) -> str:
        """The likeliest prototypes of one patch, with patches that belong to them."""
        position = predictions.position(*patch)
        where = f"Row {patch[0]}, column {patch[1]}:"
        if position is None:
            return parts.facts(
                "this patch is visible, so there is nothing to predict; click one that is hidden.", where
            )
        truth, best, rows = int(predictions.truth[position]), predictions.top(position, _ANSWERS), []
        for place, guess in enumerate(best):
            detail = f"{100 * guess.probability:.1f} %{', the truth' if guess.prototype == truth else ''}"
            rows.append(
                parts.answer(f"{place + 1}. prototype {guess.prototype}", detail, self._examples(guess.prototype, view))
            )
        if all(guess.prototype != truth for guess in best):
            rows.append(parts.answer(f"The truth: prototype {truth}", "", self._examples(truth, view)))
        head = f"the {len(best)} likeliest prototypes; entropy {float(predictions.entropy[position]):.2f} nat"
        return parts.facts(head, where) + Markup().join(rows)

    def _heat(self, view: View, patch: Patch, place: PatchPlace, limits: tuple[float, float]) -> Image.Image:
        other = self.explorer.library.maps[place.image]
        values = similarity_map(view.feature_map[patch], other)
        picture = heat_over(self.explorer.photo(place.image), values, limits)
        return outline_patch(picture, (place.row, place.column), (other.shape[0], other.shape[1]))

    def _examples(self, prototype: int, view: View) -> list[Figure]:
        return self._crops(self.explorer.members(prototype, _ANSWERS, besides=view.number))

    def _crops(self, places: list[PatchPlace]) -> list[Figure]:
        return [
            Figure(self.explorer.crop(place, context=_CONTEXT, side=_CROP_SIDE), self._caption(place))
            for place in places
        ]

    def _caption(self, place: PatchPlace) -> str:
        return f"{place.score:.2f} · {self.explorer.name(place.image)}"


def _patch_picture(colors: Tensor, view: View) -> Image.Image:
    """A colour for each patch, row by row, as a small picture."""
    return Image.fromarray(colors.view(*view.grid, 3).contiguous().numpy())
