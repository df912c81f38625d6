import base64
import io
import re

import numpy as np
from PIL import Image

from capi.report.explorer.content import Figure, parts
from tests.data.pictures import noise

EVIL = '<script>parts.alert("x")</script>'


def pictures_in(text: str) -> list[Image.Image]:
    return [
        Image.open(io.BytesIO(base64.b64decode(rows)))
        for rows in re.findall(r'src="data:image/\w+;base64,([^"]+)"', text)
    ]


def test__every_text_is_escaped() -> None:
    shown = [Figure(Image.new("RGB", (2, 2)), EVIL)]
    texts = [
        *(
            parts.facts(EVIL, EVIL),
            parts.alert(EVIL),
            parts.missing(EVIL),
            parts.figures(shown, "small"),
            parts.scale(EVIL, EVIL),
        ),
        *(
            parts.swatches([((1, 2, 3), EVIL)]),
            parts.answer(EVIL, EVIL, shown),
            parts.heading(EVIL, [EVIL], {EVIL: EVIL}),
        ),
    ]
    for text in texts:
        assert "&lt;script&gt;" in text
        assert "<script" not in text
        # Quotes would end an attribute.
        assert '"x"' not in text


def test__pictures_of_patches_are_exact_and_photos_nearly_so() -> None:
    pixels = noise(6, 4, 3)
    [exact] = pictures_in(parts.figures([Figure(Image.fromarray(pixels), patches=True)], "large"))
    assert np.array_equal(np.asarray(exact), pixels)
    [photo] = pictures_in(parts.figures([Figure(Image.new("RGB", (30, 20), (200, 100, 50)))], "large"))
    assert photo.size == (30, 20)
    assert np.abs(np.asarray(photo).astype(int) - (200, 100, 50)).max() < 5


def test__captions_are_said_to_those_who_do_not_see_the_picture() -> None:
    text = parts.figures([Figure(Image.new("RGB", (2, 2)), "a cat")], "small")
    assert 'alt="a cat"' in text
    assert "<figcaption>a cat</figcaption>" in text
    assert "figcaption" not in parts.figures([Figure(Image.new("RGB", (2, 2)))], "small")


def test__images_that_failed_are_named_and_counted() -> None:
    text = parts.heading("run", [], {"a.png": "broken", "b.png": "broken"})
    assert "a.png (broken) and 1 more" in text
    assert "alert" not in parts.heading("run", [], {})
