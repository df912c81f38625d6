"""What an evaluation leaves on disk: results.json for programs, results.md for people, departures first.

Which training samples are held out to choose a setting: a share that follows from the seed alone.

What an evaluation ends with, and how far it departed from the paper's protocol.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from capi.errors import CapiError, counted
from capi.evals.fitted_probes import Probe
from capi.runtime.atomic import Output, atomic_write, remove
from capi.runtime.documents import read_json
from capi.runtime.numerics import NUMERICS
from capi.runtime.privacy import hide_paths
from capi.runtime.randomness import permuted
from capi.types import Int, VisionEncoder
from capi.zoo.run_folder import versions

# Fewer held-out images than these tell settings apart by chance.
FEW_IMAGES, FEW_OF_A_CLASS = 50, 2


class Split(NamedTuple):
    """Numbers of samples, ascending: those to fit on while settings are tried, and those to choose by."""

    fit: Int[Tensor, " f"]
    held_out: Int[Tensor, " v"]


def hold_out(count: int, share: float, seed: int) -> Split:
    """A random share of `count` samples, at least one; the same for the same count and seed."""
    held = max(int(count * share), 1)
    if held >= count:
        raise CapiError(
            f"{counted(count, 'training image')} cannot give {share:.0%} to choose a setting by: at least 2 are needed"
        )
    order = permuted(torch.arange(count), count, seed, torch.zeros(count, dtype=torch.int64))
    return Split(order[held:].sort().values, order[:held].sort().values)


def few_held_out(held_out: int, *, classes: int, settings: int) -> list[str]:
    """A warning where few images decided between several settings."""
    if settings < 2 or (held_out >= FEW_IMAGES and held_out >= FEW_OF_A_CLASS * classes):
        return []
    return [
        f"the best of {settings} settings was chosen by {counted(held_out, 'held-out image')} of "
        f"{counted(classes, 'class')}, which is few: "
        "another seed may choose another; fix the setting, or raise validation_share"
    ]


@dataclass(frozen=True)
class SegmentedImage:
    """A test image by name and number, with its true and its predicted labels."""

    name: str
    number: int
    truth: Int[Tensor, "height width"]
    prediction: Int[Tensor, "height width"]


@dataclass(frozen=True)
class Outcome:
    """Scores from 0 to 1, the first being the one to quote; how they came about; and the probe that gave them."""

    scores: dict[str, float]
    chosen: dict[str, Any]
    """The settings that did best on held-out training images."""
    grid: list[dict[str, Any]]
    """Every setting that was tried, with its score there."""
    deviations: list[str]
    """Every departure from the paper's protocol."""
    warnings: list[str]
    details: dict[str, Any]
    probe: Probe | None = field(repr=False)
    """None in a process that helped another one."""
    pictures: list[SegmentedImage] = field(default_factory=list, repr=False)

    @property
    def main(self) -> float:
        return next(iter(self.scores.values()))


@runtime_checkable
class EvaluationProtocol(Protocol):
    """Anything that scores a frozen encoder."""

    def run(self, encoder: VisionEncoder) -> Outcome: ...


def departures(protocol: object, paper: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting that is not the paper's."""
    return [
        f"{name.replace('_', ' ')}: {_shown(getattr(protocol, name))} instead of {_shown(value)}"
        for name, value in paper.items()
        if getattr(protocol, name) != value
    ]


def _shown(value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return ", ".join(_shown(item) for item in value)


def size_notes(asked: tuple[int, int], used: tuple[int, int], patch_size: int, paper: tuple[int, int]) -> list[str]:
    """What must be said about the resolution."""
    notes = []
    if asked != paper:
        notes.append(f"image size: {_pixels(asked)} instead of {_pixels(paper)}")
    if used != asked:
        notes.append(f"image size: {_pixels(used)}, the nearest to {_pixels(asked)} that patches of {patch_size} fill")
    return notes


def precision_notes(precision: torch.dtype) -> list[str]:
    """What must be said about the precision of the encoder."""
    name = str(precision).removeprefix("torch.")
    return [] if name == "float32" else [f"precision: {name} instead of float32"]


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} px"


JSON, MARKDOWN, PROBE, PICTURES = "results.json", "results.md", "probe.safetensors", "predictions"
FORMAT_VERSION = 1
ResultRecord = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """What was evaluated on what, beside the outcome itself."""

    model: str
    weights: str | None
    """Of a run: teacher or student."""
    encoder: dict[str, Any]
    image_size: tuple[int, int]
    """Height and width that images were encoded at."""
    benchmark: str
    config: dict[str, Any]
    data: dict[str, str]
    device: str
    seconds: float
    licence: str | None = None
    """Of the model's weights, where it is known."""


def as_record(outcome: Outcome, context: Context) -> ResultRecord:
    """Everything there is to know about an evaluation, as plain values; of paths only the names."""
    record = _plain(
        {
            "version": FORMAT_VERSION,
            "model": context.model,
            "weights": context.weights,
            "licence": context.licence,
            "benchmark": context.benchmark,
            "image_size": context.image_size,
            "scores": outcome.scores,
            "deviations": outcome.deviations,
            "warnings": outcome.warnings,
            "chosen": outcome.chosen,
            "grid": outcome.grid,
            "details": outcome.details,
            "encoder": context.encoder,
            "config": context.config,
            "data_fingerprint": context.data,
            "seconds": round(context.seconds, 2),
            "device": context.device,
            "versions": versions(),
            "numerics": NUMERICS,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    shared: ResultRecord = hide_paths(record)
    return shared


def write_record(record: ResultRecord, folder: Path) -> None:
    """The results of one evaluation; the JSON comes last, so that where it is, all is."""
    atomic_write(folder / MARKDOWN, as_markdown(record))
    atomic_write(folder / JSON, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def read_record(folder: Path) -> ResultRecord | None:
    """The results in a folder; None where there are none that this version can read.

    Earlier versions wrote whole paths: of those only the names are left.
    """
    try:
        record = read_json(folder / JSON)
    except CapiError:
        return None
    if not isinstance(record, dict) or record.get("version") != FORMAT_VERSION:
        return None
    shared: ResultRecord = hide_paths(record)
    return shared


def refuse_results(output: Output) -> None:
    """Results are not replaced by accident."""
    output.check_no_file()
    if not output.overwrite and (output.path / JSON).exists():
        raise CapiError(f"{output.path} already holds results: choose another --out, or replace them with --overwrite")


def make_folder(folder: Path) -> None:
    """A folder to write to; where that is impossible, it raises before the work begins."""
    Output(folder).check_no_file()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CapiError(f"{folder} cannot be written ({error.strerror}): choose another --out") from error


def clear_results(folder: Path) -> None:
    """Remove what an earlier evaluation left, the JSON first: what is half removed must not look complete."""
    for name in (JSON, MARKDOWN, PROBE, PICTURES):
        remove(folder / name)


def as_markdown(record: Mapping[str, Any]) -> str:
    """The same for people."""
    parts = [f"# {record['benchmark']}: {record['model']}"]
    parts.append("## Departures from the paper's protocol")
    parts.append("\n".join(f"- {line}" for line in record["deviations"]) or "None.")
    if record["warnings"]:
        parts += ["## Warnings", "\n".join(f"- {line}" for line in record["warnings"])]
    parts += ["## Scores", table(("score", "value"), [(name, percent(v)) for name, v in record["scores"].items()])]
    parts += ["## Chosen settings", table(("setting", "value"), list(record["chosen"].items()))]
    by_class = record["details"].get("IoU by class")
    if by_class:
        parts += ["## IoU by class", table(("class", "IoU"), [(name, percent(v)) for name, v in by_class.items()])]
    if record["grid"]:
        parts += ["## All settings", table(tuple(record["grid"][0]), [tuple(row.values()) for row in record["grid"]])]
    facts = {name: value for name, value in record["details"].items() if name != "IoU by class"}
    facts |= {"image size": shown_size(record)} | ({"weights": record["weights"]} if record["weights"] else {})
    facts |= {"licence of the weights": record["licence"]} if record.get("licence") else {}
    facts |= {"seconds": record["seconds"], "device": record["device"], "date": record["date"]}
    facts |= record["versions"] | {
        "numerics": record.get("numerics", 1),
        "data fingerprint": record["data_fingerprint"],
    }
    parts += ["## Facts", table(("what", "value"), list(facts.items()))]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def percent(value: float | None) -> str:
    """A share as people write it."""
    return "-" if value is None else f"{100 * value:.2f} %"


def shown_size(record: Mapping[str, Any]) -> str:
    """The size of the images that an evaluation encoded; one side where they are square."""
    height, width = record["image_size"]
    return f"{height} px" if height == width else f"{height} x {width} px"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(item)}" for name, item in value.items())
    return "-" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _plain(value: Any) -> Any:
    """JSON has no numbers that are not finite; they become null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
