import os
import re
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from capi.errors import CapiError
from capi.models.features import PixelEncoder
from capi.report.explorer.page import MAX_UPLOAD, _wait, free_port, serve, serving
from capi.report.explorer.session import Explorer
from tests.browser import browser, page  # noqa: F401
from tests.report.small_models import photo_folder, some_prototypes, untrained_model

# Pages are built by scripts, on machines that have other things to do.
PATIENCE = 20_000


expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a small untrained model with prototypes."""
    folder = photo_folder(tmp_path_factory.mktemp("explorer") / "photos")
    explorer = Explorer(untrained_model(), [folder], prototypes=some_prototypes(), size=32)
    explorer.collect()
    with serving(explorer, "a <b>model", port=any_port()) as served:
        yield served


def any_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def opened(page: Page, address: str) -> None:  # noqa: F811 - the fixture's value
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    expect(page.locator("#pca img").first).to_be_visible()


def click_at(page: Page, name: str, across: float, down: float) -> None:  # noqa: F811 - the fixture's value
    picture = page.locator(f"#{name} img")
    expect(picture).to_be_visible()
    box = picture.bounding_box()
    assert box is not None
    picture.click(position={"x": box["width"] * across, "y": box["height"] * down})


def test__the_clicked_patch_is_the_maximum_of_its_own_similarity_map(page: Page, address: str) -> None:  # noqa: F811
    opened(page, address)
    page.get_by_role("tab", name="Similarity").click()
    # The grid has 4 x 6 patches.
    for across, down, place in ((0.1, 0.1, "row 0, column 0"), (0.6, 0.7, "row 2, column 3")):
        click_at(page, "photo", across, down)
        expect(page.locator("#similarity")).to_contain_text(f"You clicked {place}.")
        expect(page.locator("#similarity")).to_contain_text(
            f"Most similar patch: {place} (the one you clicked), cosine 1.000"
        )
        expect(page.locator("#similarity img")).to_be_visible()
    expect(page.locator("#others img")).to_have_count(4)
    # A click shows the patch's prototype as well.
    page.get_by_role("tab", name="Prototypes").click()
    expect(page.locator("#members")).to_contain_text(re.compile(r"Prototype \d+ is the nearest of"))


def test__photo_and_answer_are_seen_together_on_a_laptop(browser: Browser, address: str) -> None:  # noqa: F811
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    seen = context.new_page()
    opened(seen, address)
    seen.get_by_role("tab", name="Similarity").click()
    click_at(seen, "photo", 0.5, 0.5)
    answer = seen.locator("#similarity img").first
    expect(answer).to_be_visible()
    photo, heat = seen.locator("#photo img").bounding_box(), answer.bounding_box()
    assert photo
    assert heat
    assert photo["x"] + photo["width"] <= heat["x"], "beside each other"
    assert photo["y"] + photo["height"] <= 800, "without scrolling"
    tallest = seen.evaluate("getComputedStyle(document.querySelector('#similarity .large img')).maxHeight")
    assert heat["y"] + float(tallest.removesuffix("px")) <= 800, "also where the image is square"
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test__the_page_fits_every_screen_in_light_and_dark(browser: Browser, address: str, scheme: str) -> None:  # noqa: F811
    for width in (390, 1280):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        shown = context.new_page()
        opened(shown, address)
        for tab in shown.get_by_role("tab").all():
            tab.click()
            assert shown.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        colors = shown.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        background, color = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
        assert (background < color) is (scheme == "dark")
        context.close()


def test__an_upload_that_is_no_image_is_reported_and_the_page_lives_on(
    page: Page,  # noqa: F811
    address: str,
    tmp_path: Path,
) -> None:
    opened(page, address)
    evil = tmp_path / "no image.png"
    evil.write_text("<b>no image at all</b>")
    page.locator("#upload").locator("xpath=..").locator("input[type=file]").set_input_files(evil)
    expect(page.locator("#message")).to_contain_text("is no image that can be shown")
    expect(page.locator("#where")).to_contain_text("4 x 6 patches")
    page.locator("#images button.thumbnail-item, #images .thumbnail-lg").nth(1).click()
    expect(page.locator("#where")).to_contain_text("photo0.png")
    expect(page.locator("#message")).not_to_contain_text("is no image")
    expect(page.locator("#pca img").first).to_be_visible()


def test__hidden_patches_are_predicted_with_a_confidence_map(page: Page, address: str) -> None:  # noqa: F811
    opened(page, address)
    page.get_by_role("tab", name="Predictions").click()
    page.locator("#draw-mask").click()
    expect(page.locator("#outcome")).to_contain_text("15 of 24 patches are hidden")
    expect(page.locator("#confidence")).to_contain_text("Confidence: the probability of the likeliest prototype")
    expect(page.locator("#confidence img")).to_have_count(2)
    click_at(page, "hide", 0.3, 0.3)
    expect(page.locator("#outcome")).to_contain_text("opposite corner")
    click_at(page, "hide", 0.6, 0.6)
    expect(page.locator("#outcome")).to_contain_text("6 of 24 patches are hidden")
    click_at(page, "filled", 0.4, 0.4)
    expect(page.locator("#answers")).to_contain_text("Row 1, column 2: the 5 likeliest prototypes")
    expect(page.locator("#answers")).to_contain_text(re.compile("[Tt]he truth"))


def test__a_model_without_prototypes_says_what_is_missing_and_shows_the_rest(
    page: Page,  # noqa: F811
    tmp_path: Path,
) -> None:
    explorer = Explorer(PixelEncoder(8), [photo_folder(tmp_path / "photos")], size=32)
    page.set_viewport_size({"width": 380, "height": 800})
    with serving(explorer, "pixels:8", port=any_port()) as address:
        opened(page, address)
        # Names of files are text, whatever they hold.
        expect(page.locator("#where")).to_contain_text("<b>bold<b> & ${1 + 1}.png")
        page.get_by_role("tab", name="Prototypes").click()
        expect(page.get_by_text("This model comes without prototypes")).to_be_visible()
        page.get_by_role("tab", name="Predictions").click()
        expect(page.get_by_text("This encoder has no predictor and no head")).to_be_visible()
        page.get_by_role("tab", name="Clusters").click()
        expect(page.locator("#clusters img")).to_be_visible()
        # Nothing is wider than a phone.
        assert page.evaluate("document.documentElement.scrollWidth") <= 380


def status(address: str, **headers: str) -> int:
    asked = urllib.request.Request(address, headers=headers)  # noqa: S310 - our own page
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:  # noqa: S310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return int(error.code)


def test__no_file_of_the_machine_and_no_description_of_the_interface_is_served(address: str) -> None:
    assert status(address) == 200
    for place in ("/etc/passwd", str(Path(__file__)), "pyproject.toml", "/proc/self/environ"):
        assert status(f"{address}gradio_api/file={place}") in {403, 404}
    for place in ("docs", "redoc", "openapi.json"):
        assert status(f"{address}{place}") in {403, 404, 405}
    with urllib.request.urlopen(f"{address}gradio_api/info", timeout=20) as answer:  # noqa: S310 - our own page
        assert b'"named_endpoints":{}' in answer.read().replace(b" ", b"")


def test__a_foreign_host_name_is_refused(address: str) -> None:
    assert status(address, Host="127.0.0.1:80") == 200
    assert status(address, Host="evil.example") == 400


def test__what_the_page_wrote_is_removed_and_settings_are_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADIO_ALLOWED_PATHS", "/")
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
    explorer = Explorer(PixelEncoder(8), [photo_folder(tmp_path / "photos")], size=32)
    with serving(explorer, "pixels:8", port=any_port()) as address:
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        assert any(folder.rglob("*.*"))
        assert status(f"{address}gradio_api/file=/etc/passwd") in {403, 404}
    assert not folder.exists()
    assert "GRADIO_TEMP_DIR" not in os.environ
    assert os.environ["GRADIO_ALLOWED_PATHS"] == "/"
    with pytest.raises(OSError, match="refused"):
        status(address)


def test__ports_that_are_taken_are_reported(tmp_path: Path) -> None:
    explorer = Explorer(PixelEncoder(8), [photo_folder(tmp_path / "photos")], size=32)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(CapiError, match=f"127.0.0.1, port {port}"), serving(explorer, "m", port=port):
            pass
        assert free_port() != port
    with pytest.raises(CapiError, match="port 700000"), serving(explorer, "m", port=700000):
        pass
    with pytest.raises(CapiError, match=r"no page can be served at 203\.0\.113\.7"):
        free_port("203.0.113.7")


def test__exploring_announces_its_address_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def interrupt() -> None:
        assert status(said[-1].split(" at ")[1].split()[0]) == 200

    monkeypatch.setattr("capi.report.explorer.page._wait", interrupt)
    folder = photo_folder(tmp_path / "photos")
    serve("a model", PixelEncoder(8), [folder], prototypes=None, size=32, port=any_port(), announce=said.append)
    assert len(said) == 2
    assert said[0].startswith("exploring a model at http://127.0.0.1:")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test__ctrl_c_and_a_signal_to_end_stop_the_waiting(sent: signal.Signals) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), sent)).start()
    _wait()
    assert signal.getsignal(signal.SIGTERM) is before


def test__without_gradio_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    folder = photo_folder(tmp_path / "photos")
    with pytest.raises(CapiError, match=r"pip install 'capi\[explore\]'"):
        serve("a model", PixelEncoder(8), [folder], prototypes=None, announce=print)


def test__uploads_are_limited() -> None:
    assert MAX_UPLOAD == "32mb"
