import logging

import pytest

from capi.data.reader import BrokenImages
from capi.errors import CapiError


def test__each_image_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="capi")
    images = BrokenImages(total=100, limit=0.1, reasons={"old.jpg": "truncated"})
    for broken in ({"a.jpg": "no image"}, {}, {"b.jpg": "too small", "a.jpg": "no image"}, {"old.jpg": "truncated"}):
        images.note(broken)
    assert caplog.messages == ["a.jpg is left out: no image", "b.jpg is left out: too small"]
    assert images.reasons == {"old.jpg": "truncated", "a.jpg": "no image", "b.jpg": "too small"}


def test__the_run_stops_above_the_limit_and_not_at_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="capi")
    images = BrokenImages(total=40, limit=0.1)
    images.note({f"{number}.jpg": "truncated" for number in range(4)})
    with pytest.raises(CapiError, match=r"5 of 40 .*data\.broken_limit = 0\.1 .*example 0\.jpg \(truncated\), 1\.jpg"):
        images.note({"last.jpg": "empty"})
    assert caplog.messages[-1] == "last.jpg is left out: empty"


def test__a_limit_of_zero_stops_at_the_first() -> None:
    images = BrokenImages(total=1000, limit=0.0)
    images.note({})
    with pytest.raises(CapiError, match=r"only\.jpg \(empty\)"):
        images.note({"only.jpg": "empty"})


def test__what_was_known_before_counts_and_is_not_changed() -> None:
    reasons = {f"{number}.jpg": "truncated" for number in range(10)}
    with pytest.raises(CapiError, match="11 of 100"):
        BrokenImages(total=100, limit=0.1, reasons=reasons).note({"new.jpg": "empty"})
    assert len(reasons) == 10
