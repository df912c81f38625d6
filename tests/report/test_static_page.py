import base64
import hashlib
import re

from capi.report.pages.static_page import static_page


def test__its_policy_allows_its_own_style_and_nothing_else() -> None:
    page = static_page("A & B", "<p>body</p>")
    style = re.search("<style>(.*)</style>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page)[1]
    assert f"style-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy


def test__a_title_is_text() -> None:
    assert "<h1>&lt;i&gt;</h1>" in static_page("<i>", "")
