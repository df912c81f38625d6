"""What an evaluation leaves on disk: results.json for programs, results.md for people, departures first."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from capi.errors import CapiError
from capi.evals.outcome import Outcome
from capi.runtime.atomic import atomic_write, remove
from capi.runtime.documents import read_json
from capi.runtime.numerics import NUMERICS
from capi.runtime.privacy import hide_path_of_model, hide_paths, hide_paths_within, texts_of
from capi.zoo.run_folder import versions

JSON, MARKDOWN, PROBE, PICTURES = "results.json", "results.md", "probe.safetensors", "predictions"
FORMAT_VERSION = 1
Record = dict[str, Any]


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


def as_record(outcome: Outcome, context: Context) -> Record:
    """Everything there is to know about an evaluation, as plain values; of paths only the names."""
    known = texts_of(context.config)
    return _plain(
        {
            "version": FORMAT_VERSION,
            "model": hide_path_of_model(context.model),
            "weights": context.weights,
            "licence": context.licence,
            "benchmark": context.benchmark,
            "image_size": context.image_size,
            "scores": outcome.scores,
            "deviations": [hide_paths_within(line, *known) for line in outcome.deviations],
            "warnings": [hide_paths_within(line, *known) for line in outcome.warnings],
            "chosen": outcome.chosen,
            "grid": outcome.grid,
            "details": outcome.details,
            "encoder": context.encoder,
            "config": hide_paths(context.config),
            "data_fingerprint": context.data,
            "seconds": round(context.seconds, 2),
            "device": context.device,
            "versions": versions(),
            "numerics": NUMERICS,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )


def write_record(record: Record, folder: Path) -> None:
    """The results of one evaluation; the JSON comes last, so that where it is, all is."""
    atomic_write(folder / MARKDOWN, as_markdown(record))
    atomic_write(folder / JSON, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def read_record(folder: Path) -> Record | None:
    """The results in a folder; None where there are none that this version can read.

    Earlier versions wrote whole paths: of those only the names are left.
    """
    try:
        record = read_json(folder / JSON)
    except CapiError:
        return None
    if not isinstance(record, dict) or record.get("version") != FORMAT_VERSION:
        return None
    shared: Record = hide_paths(record, *texts_of([record.get("model"), record.get("config")]))
    return shared


def refuse_results(folder: Path, overwrite: bool) -> None:
    """Results are not replaced by accident."""
    if folder.exists() and not folder.is_dir():
        raise CapiError(f"{folder} is a file: --out takes the name of a folder")
    if not overwrite and (folder / JSON).exists():
        raise CapiError(f"{folder} already holds results: choose another --out, or replace them with --overwrite")


def make_folder(folder: Path) -> None:
    """A folder to write to; where that is impossible, it is told before the work begins."""
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
        return ", ".join(f"{name} {_cell(one)}" for name, one in value.items())
    return "-" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _plain(value: Any) -> Any:
    """JSON has no numbers that are not finite; they become null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
