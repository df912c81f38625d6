"""The components of the explorer's page, and what happens when they are used. It is given gradio, and imports nothing.

A handler gives the new values of some components. A `CapiError` becomes the message at the top, and all else stays.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from capi.errors import CapiError
from capi.method.masking import MASKS
from capi.report.explorer.content import Content, Patch, parts
from capi.report.explorer.session import Explorer, View
from capi.report.pictures.hidden_patches import HiddenPredictions, hidden_picture, rectangle
from capi.report.pictures.similarity import outline_patch, patch_at

# Seconds between the looks for old pictures on the disk, and how old those may become.
_CLEANED = (600, 1800)
_CLICK = "Click a patch of the image to see what the model finds alike."
_HIDE = (
    "Hide a part of the image: click two corners in the first picture, or draw a mask at random. For each hidden patch "
    "the model predicts the prototype it belongs to. The second picture shows that prototype by a real patch, the best "
    "one of another image."
)
_CORNERS = "Nothing is hidden yet."
_FILLED = "Click a hidden patch of the second picture to see its likeliest prototypes."

Values = dict[Any, Any]


class ExplorerLayout:
    """All components, and the handlers of their events."""

    def __init__(self, gradio: Any, explorer: Explorer, model_name: str) -> None:
        self.gradio, self.explorer, self.content = gradio, explorer, Content(explorer)
        self.thumbnails = explorer.thumbnails()
        title = f"capi explore: {model_name}"
        with gradio.Blocks(title=title, analytics_enabled=False, delete_cache=_CLEANED, fill_width=True) as self.page:
            self.view, self.clicked = gradio.State(), gradio.State()
            self.corner, self.predictions, self.seed = gradio.State(), gradio.State(), gradio.State(0)
            gradio.HTML(parts.heading(model_name, explorer.facts(), explorer.failed))
            self.message = gradio.HTML(elem_id="message")
            self._build_picking()
            # The photo to click and its answer beside each other, above the fold of a laptop's screen.
            with gradio.Row():
                with gradio.Column(scale=2, min_width=300):
                    self.where = gradio.HTML(elem_id="where")
                    self.photo = self._image("The image", "photo")
                with gradio.Column(scale=3, min_width=300), gradio.Tabs(overflow_behavior="wrap"):
                    self._build_looking()
                    self._build_prototypes()
                    self._build_predictions()
            self._connect()

    def _build_picking(self) -> None:
        """One row of small photos, which scrolls."""
        gradio = self.gradio
        self.images = gradio.Gallery(
            [(picture, name) for _, name, picture in self.thumbnails],
            label="Pick an image",
            show_label=False,
            columns=6,
            allow_preview=False,
            object_fit="cover",
            buttons=[],
            interactive=False,
            height=84,
            elem_id="images",
        )
        self.upload = gradio.UploadButton("or open one of your own", size="sm", elem_id="upload")

    def _build_looking(self) -> None:
        """The tabs that any encoder has."""
        gradio = self.gradio
        with gradio.Tab("PCA"):
            self.pca = gradio.HTML(elem_id="pca")
        with gradio.Tab("Similarity"):
            self.similarity = gradio.HTML(parts.facts(_CLICK), elem_id="similarity")
            self.others = gradio.HTML(elem_id="others")
        with gradio.Tab("Clusters"):
            self.number = gradio.Slider(2, 24, value=8, step=1, label="How many clusters", elem_id="number")
            self.clusters = gradio.HTML(elem_id="clusters")

    def _build_prototypes(self) -> None:
        gradio, index = self.gradio, self.explorer.index
        with gradio.Tab("Prototypes"):
            if index is None:
                gradio.HTML(parts.missing(self.explorer.missing_prototypes or ""))
                return
            last = len(index.prototypes) - 1
            self.prototype = gradio.Number(
                0, precision=0, label=f"Prototype (0 to {last}), or click a patch of the image"
            )
            self.members = gradio.HTML(elem_id="members")
            self.prototype_map = gradio.HTML(elem_id="prototype-map")

    def _build_predictions(self) -> None:
        gradio, absent, masks = self.gradio, self.explorer.missing_predictions, self.explorer.masks
        with gradio.Tab("Predictions"):
            if absent is not None:
                gradio.HTML(parts.missing(absent))
                return
            gradio.HTML(parts.facts(_HIDE, "What does it predict?"))
            with gradio.Row():
                labels = {kind: kind.replace("_", " ") + " (recipe)" * (kind == masks.kind) for kind in MASKS}
                choices = [(label, kind) for kind, label in labels.items()]
                self.kind = gradio.Dropdown(choices, value=masks.kind, label="Shape of the mask", min_width=220)
                self.ratio = gradio.Slider(
                    0.05, 0.95, masks.ratio, step=0.05, label="Share that is hidden", min_width=220
                )
            self.draw_mask = gradio.Button("Hide a random part", variant="primary", size="md", elem_id="draw-mask")
            # Nothing above the picture changes, and its size stays, or the second corner would be somewhere else.
            with gradio.Row():
                self.hide = self._image("What the model sees", "hide", 250)
                self.filled = self._image("Filled with the predicted prototypes", "filled", 250)
            self.outcome = gradio.HTML(parts.facts(_CORNERS), elem_id="outcome")
            self.confidence = gradio.HTML(elem_id="confidence")
            self.answers = gradio.HTML(elem_id="answers")

    def _image(self, label: str, name: str, min_width: int = 160) -> Any:
        """A picture to click; a label would lie over its corner."""
        return self.gradio.Image(
            label=label,
            show_label=False,
            elem_id=name,
            interactive=False,
            buttons=[],
            format="jpeg",
            type="pil",
            min_width=min_width,
        )

    def _connect(self) -> None:
        """Which event calls what; what is drawn of an image follows once the image itself is there."""
        starts = (
            self._on(self.page.load, lambda: self._pick(0), []),
            self._on(self.images.select, self._pick, [], selects=True),
            self._on(self.upload.upload, self._open, [self.upload]),
        )
        clustering = [self.view, self.number]
        draw_features = self._drawing(self.pca, self.content.pca)
        draw_clusters = self._drawing(self.clusters, self.content.clusters)
        for event in starts:
            drawn = self._on(event.then, draw_features, [self.view], follows=True)
            drawn = self._on(drawn.then, draw_clusters, clustering, follows=True)
            if self.explorer.index is not None:
                draw_prototypes = self._drawing(self.prototype_map, self.content.prototype_map)
                self._on(drawn.then, draw_prototypes, [self.view], follows=True)
        self._on(self.number.release, draw_clusters, clustering)
        clicked = self._on(self.photo.select, self._click, [self.view], selects=True)
        patch = [self.view, self.clicked]
        clicked = self._on(clicked.then, self._drawing(self.others, self.content.others), patch, follows=True)
        if self.explorer.index is not None:
            self._on(clicked.then, self._find_prototype, patch, follows=True)
            self._on(self.prototype.input, self._show_prototype, [self.prototype])
        if self.explorer.missing_predictions is None:
            self._on(self.hide.select, self._corner, [self.view, self.corner], selects=True)
            self._on(self.draw_mask.click, self._hide, [self.view, self.kind, self.ratio, self.seed])
            self._on(self.filled.select, self._answer, [self.view, self.predictions], selects=True)

    def _on(
        self,
        event: Callable[..., Any],
        handler: Callable[..., Values],
        inputs: Sequence[Any],
        *,
        selects: bool = False,
        follows: bool = False,
    ) -> Any:
        """Connect an event. One that a person starts takes the last message away; one that follows leaves it."""

        def handled(*values: Any) -> Values:
            try:
                changes = ({} if follows else {self.message: ""}) | handler(*values)
            except CapiError as error:
                changes = {self.message: parts.alert(str(error))}
            return changes or {self.message: self.gradio.skip()}

        def selected(event: Any, *values: Any) -> Values:
            return handled(*values, event.index)

        # Gradio finds out by this annotation that the place of the click is wanted.
        selected.__annotations__["event"] = self.gradio.SelectData
        return event(
            selected if selects else handled,
            inputs=list(inputs),
            outputs=self._outputs(),
            show_progress="hidden",
            # No click may be lost while an earlier one is answered: two of them make a rectangle.
            trigger_mode="multiple" if selects else "always_last",
            api_visibility="private",
        )

    def _outputs(self) -> list[Any]:
        """Everything that a handler may change."""
        outputs = [
            *(self.message, self.view, self.clicked, self.photo, self.where, self.pca, self.similarity, self.others),
            *(self.clusters, self.corner, self.predictions, self.seed),
        ]
        if self.explorer.index is not None:
            outputs += [self.prototype, self.members, self.prototype_map]
        if self.explorer.missing_predictions is None:
            outputs += [self.hide, self.outcome, self.filled, self.confidence, self.answers]
        return outputs

    def _pick(self, place: int) -> Values:
        return self._shown(self.explorer.view(self.thumbnails[place][0]))

    def _open(self, upload: str | None) -> Values:
        """An upload is read and removed at once."""
        if upload is None:
            raise CapiError("no file came: open one of your images")
        path = Path(upload)
        try:
            return self._shown(self.explorer.opened(path, path.name))
        finally:
            path.unlink(missing_ok=True)

    def _shown(self, view: View) -> Values:
        """Show a new image and clear what was shown of the last one."""
        where = parts.facts(f"· {view.grid[0]} x {view.grid[1]} patches · click one", view.name)
        values = {
            **{self.view: view, self.photo: view.photo, self.where: where},
            **{self.similarity: parts.facts(_CLICK), self.others: "", self.clicked: None},
        }
        return values if self.explorer.missing_predictions is not None else values | self._nothing_hidden(view)

    def _drawing(self, component: Any, draw: Callable[..., Any]) -> Callable[..., Values]:
        """A handler that draws one component, once there are an image and a patch to draw it of."""
        return lambda *values: {} if any(value is None for value in values) else {component: draw(*values)}

    def _click(self, view: View | None, pixel: Sequence[int | float]) -> Values:
        """The similarity within the image, at once."""
        seen, patch = _clicked(view, pixel)
        return {
            self.photo: outline_patch(seen.photo, patch, seen.grid),
            self.clicked: patch,
            self.similarity: self.content.similarity(seen, patch),
            self.others: parts.facts("Searching the other images …"),
        }

    def _find_prototype(self, view: View | None, patch: Patch | None) -> Values:
        if view is None or patch is None:
            return {}
        prototype = int(self.explorer.nearest(view)[patch])
        return {self.prototype: prototype, self.members: self.content.prototype(prototype)}

    def _show_prototype(self, prototype: int | None) -> Values:
        index = self.explorer.index
        if prototype is None or index is None:
            return {}
        # Said here: gradio's own limits would print a traceback into the terminal.
        last = len(index.prototypes) - 1
        if not 0 <= prototype <= last:
            raise CapiError(f"there is no prototype {prototype}: give a number from 0 to {last}")
        return {self.members: self.content.prototype(int(prototype))}

    def _corner(self, view: View | None, corner: Patch | None, pixel: Sequence[int | float]) -> Values:
        """The first click marks a corner, the second one hides the rectangle between both."""
        seen, patch = _clicked(view, pixel)
        if corner is not None:
            return {self.corner: None} | self._predicted(seen, rectangle(corner, patch, seen.grid))
        return self._nothing_hidden(seen) | {
            self.corner: patch,
            self.hide: outline_patch(seen.photo, patch, seen.grid),
            self.outcome: parts.facts("Now click the opposite corner in the same picture."),
        }

    def _hide(self, view: View | None, kind: str, ratio: float, seed: int) -> Values:
        if view is None:
            raise CapiError("no image is there yet: pick one")
        hidden = self.explorer.random_mask(view, kind, ratio, seed)
        return {self.corner: None, self.seed: seed + 1} | self._predicted(view, hidden)

    def _nothing_hidden(self, view: View) -> Values:
        return {
            **{self.hide: view.photo, self.filled: view.photo, self.corner: None, self.predictions: None},
            **{self.outcome: parts.facts(_CORNERS), self.confidence: "", self.answers: ""},
        }

    def _predicted(self, view: View, hidden: Tensor) -> Values:
        predictions = self.explorer.predict(view, hidden)
        return {
            self.predictions: predictions,
            self.hide: hidden_picture(view.photo, hidden),
            self.filled: self.content.filled(view, predictions, predictions.predicted),
            self.outcome: self.content.outcome(view, predictions),
            self.confidence: self.content.confidence(view, predictions),
            self.answers: parts.facts(_FILLED),
        }

    def _answer(self, view: View | None, predictions: HiddenPredictions | None, pixel: Sequence[int | float]) -> Values:
        seen, patch = _clicked(view, pixel)
        if predictions is None:
            raise CapiError("nothing is hidden yet: hide a part of the image first")
        return {self.answers: self.content.answers(seen, predictions, patch)}


def _clicked(view: View | None, pixel: Sequence[int | float]) -> tuple[View, Patch]:
    """The image, and the patch of it under a pixel."""
    if view is None:
        raise CapiError("no image is there yet: pick one")
    return view, patch_at((pixel[0], pixel[1]), view.grid, view.photo.size)
