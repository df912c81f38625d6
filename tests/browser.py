"""A real browser for tests of pages: Debian's chromium, driven by playwright's client.

Without a browser such tests are skipped, except where CAPI_BROWSER_TESTS=required: there a skip would hide a failure.
"""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")


# Of a module: imported into several modules, one of the session would be started by each.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next((path for path in map(shutil.which, _NAMES) if path), None)
    if program is None:
        if os.environ.get("CAPI_BROWSER_TESTS") == "required":
            pytest.fail("there is no chromium, and browser tests are required here")
        pytest.skip("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        # As root, in a container, chromium cannot make its sandbox; the pages are our own.
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page that may fetch nothing from beyond this machine, and on which a script error fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    errors: list[str] = []
    outside: list[str] = []
    opened = context.new_page()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: outside.append(request.url) if _is_outside(request.url) else None)
    yield opened
    context.close()
    assert not errors, f"scripts of the page failed: {errors}"
    assert not outside, f"the page asked for {outside}"


def _is_outside(url: str) -> bool:
    return not url.startswith(
        ("file:", "data:", "blob:", "about:", "http://127.0.0.1", "http://localhost", "ws://127.0.0.1")
    )
