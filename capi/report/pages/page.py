"""A page is one HTML file from the templates of this package, with its one stylesheet, and opens offline.

jinja2 escapes whatever comes from outside. A policy with the digests of script and style keeps anything else from being
run or fetched. Curves travel as JSON and are drawn by the page's own script (`templates/chart.js`), all else is HTML.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import escape

from capi.evals.results import percent
from capi.train.health import metric_of, number_text


@dataclass(frozen=True)
class Live:
    """Where a served page asks for what changed, and how often."""

    base: str
    seconds: float
    home: str | None = None


def render(
    template: str,
    title: str,
    *,
    charts: Mapping[str, Any] | None = None,
    live: Live | None = None,
    digests: Mapping[str, str] | None = None,
    images: str = "data:",
    **values: Any,
) -> str:
    """The whole file. `charts` is what its script draws; `images` says where its pictures may lie."""
    asking = {"base": live.base, "seconds": live.seconds, "digests": digests} if live else None
    return (
        environment()
        .get_template(template)
        .render(
            title=title,
            policy=policy(live=live is not None, scripted=charts is not None, images=images),
            style=style(),
            script=None if charts is None else script(),
            settings=as_json({"live": asking}),
            data=as_json(charts),
            home=live.home if live else None,
            **values,
        )
    )


def section(name: str, *values: Any) -> str:
    """The inside of one section of a report."""
    return str(getattr(environment().get_template("sections.html").module, name)(*values)).strip()


def policy(*, live: bool = False, scripted: bool = True, images: str = "data:") -> str:
    """What a page may do: run its script and style, show its pictures, ask its server if there is one."""
    rules = {
        "default-src": "'none'",
        **({"script-src": digest(script())} if scripted else {}),
        "style-src": digest(style()),
        "img-src": images,
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def digest(content: str) -> str:
    """How a policy names a script or a style that may be used."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def as_json(data: Any) -> str:
    """JSON that can stand inside a page: nothing in it can end the element that holds it."""
    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def script() -> str:
    """The script of a page, in a scope of its own."""
    return f'"use strict";\n{{\n{asset("chart.js")}{asset("report.js")}}}'


@cache
def style() -> str:
    """The style of a page."""
    return asset("colors.css") + asset("style.css")


@cache
def asset(name: str) -> str:
    """A text file among the templates."""
    return resources.files("capi.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def environment() -> Environment:
    """Everything is escaped, Markdown too has its own filter; a name that is misspelt in a template is an error."""
    made = Environment(
        loader=PackageLoader("capi.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_text,
    )
    made.filters |= {"number": number_text, "compact": _compact, "percent": percent}
    made.filters["meaning"] = lambda key: metric_of(key).description
    # Text of several lines: its spaces carry meaning and stay.
    made.filters["lines"] = lambda text: escape(_text(text))
    # A path from the page as an address, also where a name holds bytes that are no text.
    made.filters["link"] = lambda path: "./" + quote(path, errors="surrogateescape")
    return made


def _text(value: Any) -> Any:
    """A file's name may hold bytes that are no text."""
    return value.encode("utf-8", "replace").decode("utf-8") if type(value) is str else value


def _compact(step: int) -> str:
    """A step in few letters."""
    if step >= 1_000_000:
        return f"{step / 1_000_000:.3g}M"
    return f"{step / 1000:.3g}k" if step >= 1000 else str(step)
