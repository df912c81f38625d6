"""The model card: what a model is, where it comes from and what it is good for, as Markdown with a YAML head.

Its words are those of `templates/card.md`. Everything else is given as plain values, and whatever the template does not
call `safe` is escaped, so that it can only be text; the description of the data is its author's Markdown.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from capi.errors import CapiError
from capi.models.architecture import Architecture
from capi.report.pages.page import environment
from capi.report.pictures.sheets import printable

# By this a folder of ours is known again.
MARK = "<!-- written by capi push -->"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,60}")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>#&~$!|])")


@dataclass(frozen=True)
class TrainingScore:
    """A score that was measured while the model was trained: before the first step, and last."""

    benchmark: str
    first: float | None
    last: float | None
    step: int


@dataclass(frozen=True)
class ModelCard:
    """All that a card says of a model."""

    repo_id: str
    licence: str
    architecture: Architecture
    parameters: int
    """Of the encoder."""
    image_size: tuple[int, int]
    target: str
    """What it learnt to predict of hidden patches, in plain words."""
    training: str
    """How it was trained, in sentences."""
    data: str
    """What run.json says of the images."""
    data_description: str = ""
    """Markdown by whoever shares the model."""
    origin: str = ""
    training_scores: Sequence[TrainingScore] = ()
    results: Sequence[Mapping[str, Any]] = ()
    """Records of `capi evaluate`."""
    pictures: Sequence[tuple[str, str]] = ()
    """File and caption."""
    alarms: Sequence[str] = ()
    cost: Sequence[tuple[str, str]] = ()
    assumptions: Sequence[str] = ()
    provenance: Sequence[tuple[str, str]] = ()


def require_licence(licence: str) -> str:
    """An identifier as the Hub wants it; which one it is, is for the owner of the weights to say."""
    if not _LICENCE.fullmatch(licence):
        raise CapiError(
            f'"{licence}" cannot name a licence on the Hub: expected small letters, such as apache-2.0 or cc-by-nc-4.0'
        )
    return licence


def as_markdown(card: ModelCard) -> str:
    """The whole README.md."""
    markdown = environment().overlay(
        finalize=lambda value: value if isinstance(value, Markup) else Markup(plain(value))  # noqa: S704 - Markdown has its own escapes
    )
    # JSON is YAML that cannot be broken out of.
    written = markdown.get_template("card.md").render(card=card, mark=MARK, licence=json.dumps(card.licence))
    return written.rstrip() + "\n"


def plain(text: object) -> str:
    """Text from outside, on one line and without a meaning in Markdown."""
    return _MARKDOWN.sub(r"\\\1", " ".join(printable(str(text)).split()))
