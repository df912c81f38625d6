"""Pictures that a run keeps, read into a report: fixed images over time, and strips of prototypes."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from capi.data.recorded import spaced
from capi.errors import CapiError
from capi.report.pages.data import Emergence, Picture, PrototypeStrip
from capi.runtime.documents import read_json, read_regular
from capi.runtime.image_files import open_image

# So many steps of an image are shown, and so many images and prototypes: a page should open at once.
STEPS_SHOWN, IMAGES_SHOWN, PROTOTYPES_SHOWN = 24, 16, 96
PIXELS = "pixels.json"
_NEIGHBORS_SHOWN = 12
_LARGEST_FILE, _LARGEST_SIDE = 2**22, 8192
_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg"}
_SNAPSHOT = re.compile(r"step_(\d+)_(\d+)\.png")


def read_emergence(folder: Path) -> tuple[list[Emergence], str]:
    """The fixed images of a run with their pictures, and what there is to say about them."""
    snapshots = _snapshots(folder)
    if not snapshots:
        return [], (
            'This run has kept no pictures of fixed images. They are drawn while a run trains; "capi visualize RUN" '
            "draws what the encoder sees now."
        )
    steps = sorted({step for pictures in snapshots.values() for step in pictures})
    chosen = [steps[place] for place in spaced(len(steps), STEPS_SHOWN)]
    shown = [_emergence(folder, number, snapshots[number], chosen) for number in sorted(snapshots)[:IMAGES_SHOWN]]
    readable = [emergence for emergence in shown if emergence.pictures]
    if not readable:
        return [], f"None of the pictures in {folder.name} can be read."
    notes = []
    if len(chosen) < len(steps):
        notes.append(f"Shown are {len(chosen)} of {len(steps)} steps.")
    if len(snapshots) > IMAGES_SHOWN:
        notes.append(f"Shown are {IMAGES_SHOWN} of {len(snapshots)} images.")
    return readable, " ".join(notes)


def read_prototypes(folder: Path) -> tuple[list[PrototypeStrip], str]:
    """The strips of a run's prototypes, and what there is to say about them."""
    index = _index(folder / "index.json")
    if index is None:
        return [], (
            'There are no pictures of prototypes in this run. They are drawn when a run ends; "capi explore RUN" shows '
            "them for any folder of images."
        )
    listed = [entry for entry in index.get("prototypes", []) if isinstance(entry, dict)]
    strips = [strip for strip in (_strip(folder, entry) for entry in listed[:PROTOTYPES_SHOWN]) if strip]
    missing = min(len(listed), PROTOTYPES_SHOWN) - len(strips)
    notes = [str(index.get("note") or "")]
    if len(listed) > PROTOTYPES_SHOWN:
        notes.append(
            f"Shown are {PROTOTYPES_SHOWN} of {len(listed)} prototypes; the others lie in its folder {folder.name}."
        )
    if missing:
        notes.append(f"{missing} picture{'s' * (missing != 1)} could not be read.")
    return strips, " ".join(note for note in notes if note)


def read_neighbors(folder: Path) -> list[list[tuple[Picture, float | None]]]:
    """Rows of a photo and the images nearest to it; what cannot be read is left out."""
    try:
        listed = read_json(folder / "index.json")
    except CapiError:
        return []
    rows = []
    for row in listed if isinstance(listed, list) else []:
        cells: list[tuple[Picture, float | None]] = []
        entries = row[:_NEIGHBORS_SHOWN] if isinstance(row, list) else []
        for each in entries:
            name, cosine = (each.get("file"), each.get("cosine")) if isinstance(each, dict) else (None, None)
            picture = read_picture(folder / name) if isinstance(name, str) and Path(name).name == name else None
            if picture is not None:
                cells.append((picture, cosine if isinstance(cosine, float) else None))
        if cells and len(cells) == len(entries):
            rows.append(cells)
    return rows[:IMAGES_SHOWN]


def read_pixel_scores(pictures: Path) -> dict[str, float]:
    """What raw pixels score, by evaluation."""
    try:
        listed = read_json(pictures / PIXELS)
    except CapiError:
        return {}
    pairs = listed.items() if isinstance(listed, dict) else ()
    return {str(name): score for name, score in pairs if isinstance(score, float) and 0 <= score <= 1}


def read_picture(path: Path) -> Picture | None:
    """A PNG or JPEG of sensible size as part of a page; None where there is none."""
    try:
        content = read_regular(path, limit=_LARGEST_FILE)
        with open_image(content, list(_TYPES)) as image:
            kind, (width, height) = _TYPES[str(image.format)], image.size
            if max(width, height) > _LARGEST_SIDE:
                return None
            # Half a file opens too; only decoding it tells.
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return Picture(f"data:{kind};base64,{base64.b64encode(content).decode()}", width, height)


def _snapshots(folder: Path) -> dict[int, dict[int, Path]]:
    """Pictures by image and step."""
    snapshots: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := _SNAPSHOT.fullmatch(path.name):
            snapshots.setdefault(int(match[2]), {})[int(match[1])] = path
    return snapshots


def _emergence(folder: Path, number: int, paths: dict[int, Path], steps: Sequence[int]) -> Emergence:
    pictures = [(step, read_picture(paths[step])) for step in steps if step in paths]
    return Emergence(
        number,
        read_picture(folder / f"photo_{number}.jpg"),
        [(step, picture) for step, picture in pictures if picture is not None],
    )


def _index(path: Path) -> dict[str, Any] | None:
    try:
        index = read_json(path)
    except CapiError:
        return None
    return index if isinstance(index, dict) and isinstance(index.get("prototypes", []), list) else None


def _strip(folder: Path, entry: dict[str, Any]) -> PrototypeStrip | None:
    name, number, share = entry.get("file"), entry.get("number"), entry.get("share")
    # A name alone, so that an index cannot point out of its folder.
    if not isinstance(name, str) or not isinstance(number, int) or Path(name).name != name:
        return None
    picture = read_picture(folder / name)
    if picture is None:
        return None
    # A whole number of JSON may be too large for a float.
    readable = float(share) if isinstance(share, int | float) and 0 <= share <= 1 else None
    return PrototypeStrip(number, readable, picture)
