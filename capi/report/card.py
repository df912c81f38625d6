"""The model card: what a model is, where it comes from and what it is good for, as Markdown with a YAML head.

Everything that a card says is given to it as plain values. Text that comes out of files is escaped, so that it can only
be text; the description of the data is its author's Markdown and stands as it is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from capi.errors import CapiError
from capi.evals.results import percent, table
from capi.models.architecture import Architecture
from capi.report.pictures.sheets import printable

# By this a folder of ours is known again.
MARK = "<!-- written by capi push -->"
_TAGS = ("capi", "self-supervised-learning", "masked-image-modeling", "vision-transformer", "transformers")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,60}")
# Without the bar, which tables take care of.
_MARKDOWN = re.compile(r"([\\`*_\[\]<>#&~$!])")
_CITATION = """\
The method: T. Darcet, F. Baldassarre, M. Oquab, J. Mairal, P. Bojanowski, *Cluster and Predict Latent Patches for
Improved Masked Image Modeling*, Transactions on Machine Learning Research, 2025."""
_UNKNOWN_DATA = "What these images show, where they come from and under which terms was not said."


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
    parts = [card.training, card.origin, f"Data: {card.data}", card.data_description.strip() or _UNKNOWN_DATA]
    shown = [f"![{plain(caption)}]({name})\n\n{plain(caption)}" for name, caption in card.pictures]
    started = " The weights that it started from have a licence of their own, which counts too." if card.origin else ""
    sections = (
        _opening(card),
        ("## How to use", _usage(card)),
        ("## Training", "\n\n".join([part for part in parts if part] + ["`config.yaml` has every setting."])),
        ("## Scores", _scores(card)),
        ("## Pictures", "\n\n".join(shown) or "None."),
        ("## Intended use", _intended_use()),
        ("## Limits", _limits(card)),
        ("## Energy and CO2", _energy(card)),
        ("## Licence", f"The weights are shared under `{card.licence}`.{started} The code of `capi` has its own."),
        ("## Citation", _CITATION),
        ("## Where it comes from", _facts(card.provenance) or "Not known."),
    )
    written = [part for section in sections for part in section if part]
    return f"{_head(card)}\n{MARK}\n\n" + "\n\n".join(written) + "\n"


def plain(text: object) -> str:
    """Text from outside, on one line and without a meaning in Markdown."""
    return _MARKDOWN.sub(r"\\\1", " ".join(printable(str(text)).split()))


def _head(card: ModelCard) -> str:
    """What the Hub reads, as YAML that cannot be broken out of."""
    facts = {
        "license": card.licence,
        "library_name": "capi",
        "pipeline_tag": "image-feature-extraction",
        "tags": list(_TAGS),
    }
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---"


def _opening(card: ModelCard) -> tuple[str, ...]:
    shape, (height, width) = card.architecture, card.image_size
    name = card.repo_id.partition("/")[2]
    return (
        f"# {plain(name)}",
        f"A vision transformer that gives features of images: one vector for each patch of {shape.patch_size} x "
        f"{shape.patch_size} pixels, and one for the whole image. It learnt without labels, by predicting "
        f"{plain(card.target)} of patches that it did not see, and was not fine-tuned for anything.",
        table(
            ("what", "value"),
            [
                ("encoder", f"{shape.depth} blocks, width {shape.width}, {shape.heads} heads"),
                ("parameters of the encoder", f"{card.parameters:,}"),
                ("patch size, registers", f"{shape.patch_size} px, {shape.registers}"),
                ("positions", shape.positions),
                ("images", f"{shape.channels} channels, trained at {height} x {width} px; sides in whole patches"),
            ],
        ),
    )


def _usage(card: ModelCard) -> str:
    return f"""With `capi`:

```python
import capi

encoder = capi.load("{card.repo_id}")
images = capi.transform(encoder)("photo.jpg")
features = encoder(images)
features.feature_map, features.registers, features.pooled
```

With `transformers`, where `capi` is installed beside it; no code is fetched from here:

```python
import capi.huggingface  # makes the Auto classes know the model
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

processor = AutoImageProcessor.from_pretrained("{card.repo_id}")
model = AutoModel.from_pretrained("{card.repo_id}")
output = model(**processor(Image.open("photo.jpg"), return_tensors="pt"))
output.feature_map, output.pooler_output
```"""


def _scores(card: ModelCard) -> str:
    parts = []
    if card.results:
        rows = [
            (plain(record["benchmark"]), plain(name), percent(value), plain(record.get("weights") or "-"))
            for record in card.results
            for name, value in record["scores"].items()
        ]
        parts += ["Of the frozen encoder:", table(("benchmark", "score", "value", "weights"), rows), _departures(card)]
    if card.training_scores:
        measured = [
            (plain(one.benchmark), percent(one.first), percent(one.last), f"{one.step:,}")
            for one in card.training_scores
        ]
        parts += [
            "Measured while it was trained, often with settings that are quicker than a benchmark's own:",
            table(("benchmark", "before training", "last", "at step"), measured),
        ]
    return "\n\n".join(parts) or "None were measured."


def _departures(card: ModelCard) -> str:
    """A score is that of its protocol only as far as the protocol was followed."""
    lines = [
        f"- {plain(record['benchmark'])}: {plain(line)}" for record in card.results for line in record["deviations"]
    ]
    if not lines:
        return "As in the paper's protocols."
    return "\n".join(["Departures from the paper's protocols:", "", *lines])


def _intended_use() -> str:
    return (
        "Features for research and for tools of one's own: classification and segmentation by a probe on frozen "
        "features, nearest neighbours, clustering, or as a start for further training. Measure on your own images "
        "before you rely on them."
    )


def _limits(card: ModelCard) -> str:
    lines = [
        "It knows what its training images show. Elsewhere features may be poor, and what is unbalanced or unfair in "
        "the images is in the features too.",
        "It has no classes and no words, and gives no decisions. It was not tested for use on people, in medicine, or "
        "wherever an error does harm.",
        "Scores above are those of single runs, where nothing else is said.",
        *(
            f"Training did not raise {plain(one.benchmark)}: {percent(one.first)} before, {percent(one.last)} after."
            for one in card.training_scores
            if one.first is not None and one.last is not None and one.last <= one.first
        ),
        *(f"At the end of training something was not well: {plain(alarm)}" for alarm in card.alarms),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _energy(card: ModelCard) -> str:
    if not card.cost:
        return "Not known."
    assumed = "\n".join(f"- {plain(line)}" for line in card.assumptions)
    return f"{_facts(card.cost)}\n\nEstimated, not measured:\n\n{assumed}"


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = [(plain(name), plain(value)) for name, value in facts]
    return table(("what", "value"), rows) if rows else ""
