"""The images that a run was trained on, opened again from what run.json says of them.

Nobody names these images in the call, and anyone may have written run.json. So they are opened only if they lie on
this machine and are those of the run by their contents: whoever wrote run.json then had them already, and a report
that shows them gives nothing away. Nothing is downloaded, and nothing is written beside them.
"""

import hashlib
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from capi.data.decoding import BrokenImageError
from capi.data.locations import described_data, open_images, weighted_sources
from capi.data.sources import ImageSource
from capi.errors import CapiError

# Images whose contents are compared, and no others are shown; and bytes of each of them that count.
SAMPLE, COMPARED_BYTES = 200, 2**20


class RecordedImagesError(CapiError):
    """Why the images that run.json names are not shown, without a path, since a report repeats it."""


def spaced(total: int, count: int) -> list[int]:
    """Evenly spaced numbers below `total`, `count` of them, with the first and the last."""
    if total <= count:
        return list(range(total))
    return [round(number * (total - 1) / max(count - 1, 1)) for number in range(count)]


def with_sample(facts: Mapping[str, Any], source: ImageSource) -> dict[str, Any]:
    """What run.json says of the images, with a fingerprint of their contents where they lie on this machine."""
    if not _is_local(facts):
        return dict(facts)
    return {**facts, "sample": sample_fingerprint(source)}


def sample_fingerprint(source: ImageSource) -> str:
    """A checksum of the number of images and of the contents of some of them."""
    digest = hashlib.sha256(f"{len(source)}\n".encode())
    for number in spaced(len(source), SAMPLE):
        digest.update(_content_digest(source, number))
    return digest.hexdigest()


def open_recorded(record: Mapping[str, Any]) -> ImageSource:
    """The images that run.json names, if they may be shown."""
    facts = record.get("data")
    if not isinstance(facts, Mapping) or not isinstance(facts.get("sample"), str):
        raise RecordedImagesError(
            "run.json has no fingerprint of the contents of its images, as older versions wrote it"
        )
    if not _is_local(facts):
        raise RecordedImagesError(
            "the images of the run are not on this machine, and nothing is downloaded for a report"
        )
    try:
        source = open_images(described_data(facts), index_beside=False)
    except (CapiError, OSError, ValueError) as error:
        raise RecordedImagesError("the images of the run are not where it found them") from error
    if source.fingerprint != facts.get("fingerprint") or sample_fingerprint(source) != facts["sample"]:
        raise RecordedImagesError("the images that lie where the run found its own are others")
    return source


def _is_local(facts: Mapping[str, Any]) -> bool:
    """Whether all sources are paths: no protocol, no server of a Windows network; without names, none is."""
    try:
        names = [source.name for source in weighted_sources(described_data(facts))]
    except (CapiError, OSError, KeyError, TypeError, ValueError):
        return False
    return not any("://" in name or name.startswith(("//", "\\\\")) for name in names)


def _content_digest(source: ImageSource, number: int) -> bytes:
    """A digest of an image; of nothing where the image is missing or cannot be read, and so cannot be shown either."""
    size, start = 0, b""
    with suppress(BrokenImageError, OSError, ValueError):
        content = source.read(number)
        if isinstance(content, bytes):
            size, start = len(content), content[:COMPARED_BYTES]
        elif content.exists() and not content.is_file():
            # A device or a pipe may never end: such an image is never the same.
            return secrets.token_bytes(32)
        else:
            with content.open("rb") as file:
                size, start = content.stat().st_size, file.read(COMPARED_BYTES)
    return hashlib.sha256(f"{size}\n".encode() + start).digest()
