"""Pictures in a report: fixed images over the course of training, and what the prototypes stand for."""

import json
from collections.abc import Sequence
from html import escape

from capi.report.pages.data import Emergence, Picture, PrototypeStrip, RunReport, text

# Prototypes that are shown without being asked for: a phone shows one below the other.
_AT_ONCE = 24


def emergence(run: RunReport) -> str:
    """For each fixed image its photo, its picture at the chosen step, and all steps in a row."""
    note = f'<p class="soft">{text(run.emergence_note)}</p>' if run.emergence_note else ""
    if not run.emergence:
        return note
    steps = sorted({step for one in run.emergence for step, _ in one.pictures})
    explanation = (
        "Each pixel is a patch. Its colour is the first three principal components of the teacher's features of all "
        "these images together, so that patches of like colour have like features."
    )
    return (
        f'<p class="soft">{explanation}</p>{note}{_slider(steps)}'
        f'<div class="emergence">{"".join(map(_image, run.emergence))}</div>'
    )


def gallery(run: RunReport) -> str:
    """Strips of patches, the most used prototypes first."""
    note = f'<p class="soft">{text(run.prototypes_note)}</p>' if run.prototypes_note else ""
    if not run.prototypes:
        return note
    first, more = run.prototypes[:_AT_ONCE], run.prototypes[_AT_ONCE:]
    hidden = f"<details><summary>{len(more)} more prototypes</summary>{_strips(more)}</details>" if more else ""
    return f"{note}{_strips(first)}{hidden}"


def _strips(prototypes: Sequence[PrototypeStrip]) -> str:
    return f'<div class="gallery">{"".join(map(_prototype, prototypes))}</div>'


def _slider(steps: list[int]) -> str:
    """Hidden until the script is there to move it."""
    last = len(steps) - 1
    return (
        f'<div class="timeline" data-steps="{escape(json.dumps(steps))}" hidden><button type="button">Play</button>'
        f'<label>Step <input type="range" min="0" max="{last}" value="{last}" step="1"></label>'
        f"<output>{steps[-1]:,}</output></div>"
    )


def _image(one: Emergence) -> str:
    title = f"Image {one.number + 1}"
    photo = _drawn(one.photo, f"Photo of {title.lower()}", "photo") if one.photo else "<p>The photo is missing.</p>"
    step, newest = one.pictures[-1]
    current = _drawn(newest, f"Features of {title.lower()} at step {step:,}", "pixels current")
    film = "".join(
        f'<li data-step="{step}">{_drawn(picture, f"Step {step:,}", "pixels")}<span>{_compact(step)}</span></li>'
        for step, picture in one.pictures
    )
    return (
        f'<figure class="card"><div class="pair">{photo}{current}</div>'
        f'<figcaption>{title}, <span class="when">step {step:,}</span></figcaption>'
        # Scrolled by the keyboard too, hence the tab index.
        f'<ol class="film" tabindex="0" aria-label="{title} at each step">{film}</ol></figure>'
    )


def _prototype(one: PrototypeStrip) -> str:
    share = "" if one.share is None else f" · {_percent(one.share)} of the patches"
    alt = f"Patches that belong most to prototype {one.number}"
    return (
        f'<figure class="card">{_drawn(one.strip, alt, "strip")}'
        f"<figcaption>Prototype {one.number}{share}</figcaption></figure>"
    )


def _percent(share: float) -> str:
    return "less than 0.01%" if 0 < share < 0.0001 else f"{share:.2%}"


def _drawn(picture: Picture, alt: str, kind: str) -> str:
    return (
        f'<img class="{kind}" src="{escape(picture.address)}" width="{picture.width}" height="{picture.height}" '
        f'alt="{text(alt)}">'
    )


def _compact(step: int) -> str:
    """A step in few letters."""
    if step >= 1_000_000:
        return f"{step / 1_000_000:.3g}M"
    return f"{step / 1000:.3g}k" if step >= 1000 else str(step)
