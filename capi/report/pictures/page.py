"""The page of pictures: one HTML file beside them, without scripts, for screens of any width, light and dark."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

from capi.report.pictures.sheets import printable

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #5c6675; --line: #dfe3e8;
  --bad-soft: #fdecea; }
@media (prefers-color-scheme: dark) { :root { --page: #12151a; --card: #1b2027; --text: #e6e9ee; --soft: #9aa5b4;
  --line: #2f3742; --bad-soft: #3a1f1d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
main { max-width: 80rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { margin: 0; font-size: 1.75rem; letter-spacing: -.01em; }
h2 { margin: 2.5rem 0 .25rem; font-size: 1.2rem; }
h3 { margin: 0 0 .75rem; font-size: 1rem; }
p { margin: .25rem 0; }
.soft, figcaption { color: var(--soft); font-size: .875rem; }
.card { margin: 1rem 0 0; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .75rem; }
.sheet { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: .75rem; margin-top: .75rem; }
.sheet img { display: block; max-width: none; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 11rem), 1fr));
  align-items: start; }
figure { margin: 0; min-width: 0; }
figure img { display: block; width: 100%; height: auto; border-radius: .3rem; }
.wide { grid-column: 1 / -1; }
.wide img { max-width: 60rem; background: #fff; }
.failures { background: var(--bad-soft); border-color: transparent; }
ul { margin: .25rem 0; padding-left: 1.2rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin-top: 1rem; }
a { color: inherit; }
"""


@dataclass(frozen=True)
class Figure:
    """A picture beside the page, by its path from there."""

    path: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """The sheet of one kind of picture, with what there is to know."""

    key: str
    title: str
    explanation: str
    sheet: str


@dataclass(frozen=True)
class ImageCard:
    """All pictures of one image."""

    name: str
    figures: Sequence[Figure]


def as_page(
    sections: Sequence[Section], cards: Sequence[ImageCard], failed: Mapping[str, str], facts: Sequence[str]
) -> str:
    """The whole page; what comes from outside is escaped, and a policy keeps anything from being run or fetched."""
    body = [*_opening(sections, cards, failed, facts), *_sections(sections), *_cards(cards)]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' file:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>What the features show</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _opening(
    sections: Sequence[Section], cards: Sequence[ImageCard], failed: Mapping[str, str], facts: Sequence[str]
) -> Iterator[str]:
    yield "<h1>What the features show</h1>"
    yield from (f'<p class="soft">{_text(fact)}</p>' for fact in facts)
    links = [(one.key, one.title) for one in sections] + ([("images", "Image by image")] if cards else [])
    yield "<nav>" + "".join(f'<a href="#{escape(key)}">{_text(title)}</a>' for key, title in links) + "</nav>"
    if failed:
        count = f"{len(failed)} image{'s' * (len(failed) != 1)} could not be drawn"
        lines = "".join(f"<li><b>{_text(name)}</b>: {_text(reason)}</li>" for name, reason in failed.items())
        yield f'<section class="card failures"><p>{count}:</p><ul>{lines}</ul></section>'


def _sections(sections: Sequence[Section]) -> Iterator[str]:
    for one in sections:
        yield f'<h2 id="{escape(one.key)}">{_text(one.title)}</h2><p class="soft">{_text(one.explanation)}</p>'
        # Scrolled by the keyboard too, hence the tab index.
        yield f'<div class="sheet" tabindex="0"><img src="{_link(one.sheet)}" alt="{_text(one.title)}"></div>'


def _cards(cards: Sequence[ImageCard]) -> Iterator[str]:
    if cards:
        yield '<h2 id="images">Image by image</h2>'
    for card in cards:
        # Wide ones come last, where they leave no holes.
        figures = "".join(_figure(one, card.name) for one in sorted(card.figures, key=lambda one: one.wide))
        yield f'<section class="card"><h3>{_text(card.name)}</h3><div class="figures">{figures}</div></section>'


def _figure(figure: Figure, name: str) -> str:
    link, wide = _link(figure.path), ' class="wide"' if figure.wide else ""
    image = f'<a href="{link}"><img loading="lazy" src="{link}" alt="{_text(f"{figure.caption} of {name}")}"></a>'
    return f"<figure{wide}>{image}<figcaption>{_text(figure.caption)}</figcaption></figure>"


def _text(text: str) -> str:
    return escape(printable(text))


def _link(path: str) -> str:
    """A path from the page as an address, also where a name holds bytes that are no text."""
    return escape("./" + quote(path, errors="surrogateescape"))
