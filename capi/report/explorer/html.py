"""The parts of the explorer's page that one only looks at, as HTML: text, pictures with captions, scales, legends.

Pictures are within the page, every text is escaped, and nothing refers to anything outside.
"""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image

FigureSize = Literal["small", "middle", "wide", "large"]
# The heat of `capi.report.pictures.colormaps`: from black over red and yellow to white.
STYLE = """
gradio-app, .gradio-container, .gradio-container .main, .gradio-container .wrap, .gradio-container main {
  min-width: 0; }
.gradio-container main { max-width: 1500px; margin: 0 auto; width: 100%; }
.facts { color: var(--body-text-color); margin: 0.2em 0 0.4em; line-height: 1.45; overflow-wrap: anywhere; }
.missing { padding: 1.2em 0; font-size: 1.05em; color: var(--body-text-color); }
.alert { border-left: 4px solid #d5452f; padding: 0.6em 0.9em; margin: 0; background: rgba(213, 69, 47, 0.14);
  overflow-wrap: anywhere; color: var(--body-text-color); }
.figures { display: grid; gap: 10px; margin: 0.4em 0; align-items: start; }
.figures.small { grid-template-columns: repeat(auto-fill, minmax(84px, 1fr)); max-width: 980px; }
.figures.middle { grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); }
.figures.wide { grid-template-columns: repeat(auto-fit, minmax(min(260px, 100%), 1fr)); }
.figures.large { grid-template-columns: minmax(0, 1fr); max-width: 460px; }
.figures.large img { max-height: 460px; object-fit: contain; object-position: left; }
.figures figure { margin: 0; min-width: 0; }
.figures img { width: 100%; display: block; border-radius: 3px; margin: 0; }
.figures img.patches { image-rendering: pixelated; }
.figures figcaption { font-size: 0.8rem; color: var(--body-text-color); opacity: 0.75; overflow-wrap: anywhere;
  line-height: 1.3; padding-top: 2px; margin: 0; }
.scale { display: flex; align-items: center; gap: 8px; max-width: 640px; font-size: 0.85rem; margin: 0.3em 0 0.6em; }
.scale i { flex: 1; height: 12px; border: 1px solid #8a93a0;
  background: linear-gradient(to right, #000, #f00 33.3%, #ff0 66.6%, #fff); }
.swatches { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 0.85rem; }
.swatches i { display: inline-block; width: 14px; height: 14px; margin-right: 5px; vertical-align: -2px;
  border: 1px solid #8a93a0; }
#photo img, #hide img, #filled img { cursor: crosshair; width: 100%; }
/* The box of the photo is the photo, or a click would be taken for one somewhere else. */
#photo img { width: auto; max-width: 100%; height: auto; max-height: 480px; }
.gradio-container h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
#images, #images .grid-wrap { min-height: 0 !important; height: 84px !important; padding: 0; overflow: hidden; }
#images .grid-wrap { overflow-x: auto; }
#images .grid-container { display: flex !important; gap: 6px; height: 100%; padding: 4px; }
#images .grid-container > * { flex: none; width: 72px; height: 72px; }
#upload { align-self: flex-start; width: auto; }
.gradio-container .column { gap: 10px; }
#message:not(:has(.alert)) { display: none; }
#images .caption-label { display: none; }
@media (max-width: 640px) {
  .gradio-container .main { padding: 10px 12px !important; }
  .tab-wrapper button { padding: 0 5px !important; font-size: 13px !important; }
}
"""


@dataclass(frozen=True)
class Figure:
    """A picture with a caption; one of patches has a pixel for each, and is enlarged without blurring."""

    picture: Image.Image
    caption: str = ""
    patches: bool = False


def facts(text: str, strong: str = "") -> str:
    """A paragraph, with what matters most in front."""
    front = f"<b>{html.escape(strong)}</b> " if strong else ""
    return f'<p class="facts">{front}{html.escape(text)}</p>'


def alert(text: str) -> str:
    """What went wrong; screen readers say it at once."""
    return f'<p class="alert" role="alert">{html.escape(text)}</p>'


def missing(text: str) -> str:
    """Why there is nothing to see."""
    return f'<p class="missing">{html.escape(text)}</p>'


def figures(shown: Sequence[Figure], size: FigureSize) -> str:
    """Pictures in rows, as many in each as the screen has room for."""
    return f'<div class="figures {size}">{"".join(_figure(figure) for figure in shown)}</div>'


def scale(low: str, high: str) -> str:
    """The colours of a heat map between what its ends mean."""
    return f'<div class="scale"><span>{html.escape(low)}</span><i></i><span>{html.escape(high)}</span></div>'


def swatches(entries: Sequence[tuple[tuple[int, int, int], str]]) -> str:
    """Colours and what they mean."""
    items = (
        f'<span><i style="background: rgb({red}, {green}, {blue})"></i>{html.escape(text)}</span>'
        for (red, green, blue), text in entries
    )
    return f'<div class="swatches">{"".join(items)}</div>'


def answer(label: str, detail: str, shown: Sequence[Figure]) -> str:
    """One of several answers: what it is, and pictures of it."""
    return facts(detail, label) + figures(shown, "small")


def heading(title: str, lines: Sequence[str], failed: dict[str, str]) -> str:
    """What is explored, and which images could not be read."""
    text = f"<h1>{html.escape(title)}</h1>" + "".join(facts(line) for line in lines)
    if failed:
        name, reason = next(iter(failed.items()))
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        text += alert(f"cannot be read: {name} ({reason}){more}")
    return text


def _figure(figure: Figure) -> str:
    caption = html.escape(figure.caption)
    kind = ' class="patches"' if figure.patches else ""
    below = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure><img src="{_as_address(figure)}" alt="{caption}"{kind}>{below}</figure>'


def _as_address(figure: Figure) -> str:
    """The picture itself as an address: exact where pixels are patches, else as a photo."""
    buffer = io.BytesIO()
    if figure.patches:
        figure.picture.save(buffer, "PNG")
    else:
        figure.picture.convert("RGB").save(buffer, "JPEG", quality=90)
    kind = "png" if figure.patches else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
