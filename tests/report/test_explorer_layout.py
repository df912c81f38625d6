"""Handlers of the page without a browser and without gradio: a stand-in holds the components."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from capi.errors import CapiError
from capi.report.explorer.layout import ExplorerLayout
from capi.report.explorer.session import Explorer
from tests.report.small_models import photo_folder, some_prototypes, untrained_model


class Component:
    """Anything that gradio makes: it can hold others, and has every event."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events = events

    def __enter__(self) -> "Component":
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., "Component"]:
        def connected(handler: Callable[..., Any], **options: Any) -> Component:
            self.events.append({"name": name, "handler": handler, **options})
            return Component(self.events)

        return connected


class StandIn:
    """Makes components of every kind."""

    SelectData = int

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., Component]:
        return lambda *_, **__: Component(self.events)

    def update(self, **values: Any) -> dict[str, Any]:
        return values

    def skip(self) -> str:
        return "skipped"


def layout_of(explorer: Explorer) -> ExplorerLayout:
    return ExplorerLayout(StandIn(), explorer, "a model")


@pytest.fixture
def layout(tmp_path: Path) -> ExplorerLayout:
    explorer = Explorer(untrained_model(), [photo_folder(tmp_path / "photos")], prototypes=some_prototypes(), size=32)
    explorer.collect()
    return layout_of(explorer)


def test__no_event_can_be_called_by_other_programs(layout: ExplorerLayout) -> None:
    events = layout.gradio.events
    assert len(events) > 10
    assert {event["api_visibility"] for event in events} == {"private"}
    # The place of a click is only given to handlers that say so.
    assert {event["name"] for event in events if event["handler"].__annotations__.get("event") is int} == {"select"}


def test__picking_gives_the_image_and_takes_away_what_was_seen_of_the_last(layout: ExplorerLayout) -> None:
    values = layout._pick(2)
    assert values[layout.view].number == 2
    assert values[layout.photo].size == values[layout.view].photo.size
    assert (values[layout.clicked], values[layout.corner], values[layout.predictions]) == (None, None, None)
    assert "Click a patch" in values[layout.similarity]


def test__each_random_mask_is_another_one(layout: ExplorerLayout) -> None:
    view = layout.explorer.view(0)
    first = layout._hide(view, "random", 0.5, 0)
    second = layout._hide(view, "random", 0.5, first[layout.seed])
    assert not (first[layout.predictions].hidden == second[layout.predictions].hidden).all()


def test__an_upload_is_removed_also_when_it_is_no_image(layout: ExplorerLayout, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.new("RGB", (9, 9), "red").save(good)
    bad.write_text("no image")
    assert layout._open(str(good))[layout.view].name == "good.png"
    with pytest.raises(CapiError, match=r"bad\.png is no image"):
        layout._open(str(bad))
    assert not good.exists()
    assert not bad.exists()


def test__without_an_image_clicks_say_so_and_drawings_wait(layout: ExplorerLayout) -> None:
    for handler in (lambda: layout._click(None, [1, 1]), lambda: layout._hide(None, "random", 0.5, 0)):
        with pytest.raises(CapiError, match="pick one"):
            handler()
    assert layout._drawing(layout.pca, layout.content.pca)(None) == {}
    assert layout._drawing(layout.others, layout.content.others)(layout.explorer.view(0), None) == {}


def test__what_goes_wrong_becomes_the_message_and_nothing_else(layout: ExplorerLayout) -> None:
    def fails() -> dict[Any, Any]:
        raise CapiError("so it is: do that")

    connected: list[Any] = []
    layout._on(lambda handler, **_: connected.append(handler), fails, [])
    layout._on(lambda handler, **_: connected.append(handler), lambda: {layout.where: "here"}, [])
    layout._on(lambda handler, **_: connected.append(handler), lambda: {layout.where: "here"}, [], follows=True)
    assert connected[0]() == {layout.message: '<p class="alert" role="alert">so it is: do that</p>'}
    assert connected[1]() == {layout.message: "", layout.where: "here"}
    # What follows by itself does not take the message away before it was read.
    assert connected[2]() == {layout.where: "here"}
