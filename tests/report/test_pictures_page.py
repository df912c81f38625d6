from html.parser import HTMLParser
from urllib.parse import unquote_to_bytes

from capi.report.pictures.page import Figure, ImageCard, Section, as_page

STRANGE = '<script>alert("x")</script>&\'.jpg'


class Reading(HTMLParser):
    """Collects tags, and text outside of styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def values(self, tag: str, name: str) -> list[str | None]:
        return [attributes.get(name) for found, attributes in self.tags if found == tag]


def page(name: str = "a.jpg", failed: dict[str, str] | None = None) -> str:
    figures = [Figure(f"components/{name}.png", "wide one", wide=True), Figure(f"photos/{name}.jpg", "photo")]
    section = Section("pca", "PCA in colour", "What it is.", "pca.png")
    return as_page([section], [ImageCard(name, figures)], failed or {}, ["a model"])


def test__names_are_escaped_wherever_they_stand() -> None:
    found = Reading(page(STRANGE, {STRANGE: "<b>bad</b>"}))
    assert "script" not in {tag for tag, _ in found.tags}
    assert {tag for tag, _ in found.tags if tag == "b"} == {"b"}
    text = "".join(found.texts)
    assert STRANGE in text
    assert "<b>bad</b>" in text
    sources = [source for source in found.values("img", "src") if source and "photos" in source]
    assert [unquote_to_bytes(source).decode() for source in sources] == [f"./photos/{STRANGE}.jpg"]


def test__a_name_that_is_no_text_is_linked_by_its_bytes() -> None:
    name = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    found = page(name)
    assert found.encode("utf-8")
    assert "./photos/caf%E9.jpg.jpg" in found


def test__pictures_are_relative_files_with_words_for_those_who_do_not_see_them() -> None:
    found = Reading(page("folder/a b.jpg"))
    assert found.values("img", "src") == [
        "./pca.png",
        "./photos/folder/a%20b.jpg.jpg",
        "./components/folder/a%20b.jpg.png",
    ]
    assert all(found.values("img", "alt"))
    assert found.values("a", "href")[:2] == ["#pca", "#images"]
    assert "pca" in found.values("h2", "id")


def test__nothing_is_run_or_fetched_and_all_screens_are_thought_of() -> None:
    text = page()
    policy = next(
        content for content in Reading(text).values("meta", "content") if content and "default-src" in content
    )
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    assert "http:" not in text
    assert "https:" not in text


def test__failures_are_told_with_their_number() -> None:
    assert "could not be drawn" not in page()
    assert "1 image could not be drawn" in page(failed={"x.jpg": "no image"})
    assert "2 images could not be drawn" in page(failed={"x.jpg": "no image", "y.jpg": "no image"})
