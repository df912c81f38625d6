"""One model through one benchmark: load the data, run the protocol, leave results, probe and pictures."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from capi.config.benchmarks import BenchmarkConfig
from capi.config.files import Overrides, as_benchmark, override_texts
from capi.data.crops import image_size_of
from capi.evals.build import build_encoding, build_protocol, count_images, fingerprints, load_data
from capi.evals.features import Encoding
from capi.evals.fitted_probes import encoder_facts, save_probe
from capi.evals.results import (
    PICTURES,
    PROBE,
    Context,
    Outcome,
    ResultRecord,
    as_record,
    clear_results,
    make_folder,
    percent,
    refuse_results,
    shown_size,
    write_record,
)
from capi.evals.tasks import EvaluationData, SegmentationData
from capi.evals.team import (
    Execution,
    executing,
    follow_encoding,
    lead_encoding,
    prepared,
    sources_of,
)
from capi.report.predictions import draw_predictions
from capi.runtime.atomic import Output, scratch_folder
from capi.runtime.privacy import hide_path
from capi.runtime.summary import Summary
from capi.types import VisionEncoder
from capi.zoo.encoders import Trainee, open_encoder
from capi.zoo.published.registry import RELEASED
from capi.zoo.weights import WeightsName


@dataclass(frozen=True, repr=False)
class Evaluated(Summary):
    """An evaluation that is done: its outcome, and the same as it was written."""

    outcome: Outcome
    record: ResultRecord
    folder: Path | None

    @property
    def probe(self) -> Path | None:
        """The file of the fitted probe, which `predict` takes; None where none was written."""
        file = None if self.folder is None else self.folder / PROBE
        return file if file is not None and file.is_file() else None

    def summary(self) -> tuple[str, dict[str, str]]:
        record = self.record
        about = {name: percent(value) for name, value in record["scores"].items()}
        about["chosen"] = ", ".join(f"{key} {value}" for key, value in record["chosen"].items() if key != "validation")
        about["images"] = f"{shown_size(record)}, {record['seconds']:.0f} s on {record['device']}"
        for name, lines in (("departs from the paper", record["deviations"]), ("warnings", record["warnings"])):
            if lines:
                about[name] = "; ".join(lines)
        if self.folder is not None:
            about["folder"] = str(self.folder)
        return f"{record['benchmark']}: {record['model']}", about


def evaluate(
    model: str | Path | VisionEncoder | Trainee,
    benchmark: str | Path | BenchmarkConfig,
    overrides: Overrides = (),
    *,
    out: str | Path | None = None,
    weights: WeightsName = "teacher",
    device: torch.device | str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
    execution: Execution | None = None,
    **options: Any,
) -> Evaluated:
    """Score a frozen encoder by a benchmark, `DATASET/PROTOCOL` or a YAML file.

    Options of the benchmark are keywords (`data="photos", neighbors=[10]`), a dict, or text (`["neighbors=[10]"]`).

    `model` is a path, another name that `capi evaluate` knows, a learner, or any `VisionEncoder`. With `out`, that
    folder gets results.json, results.md, the fitted probe and pictures. Under torchrun all processes call this: each
    encodes a part of the images, and the main one does all else. An `execution` takes the place of `device` and
    `console`.
    """
    start = time.monotonic()
    with nullcontext(execution) if execution else executing(device, console) as run:
        folder = None if out is None else Path(out)
        with prepared(run.processes):
            if folder is not None and run.processes.is_main:
                refuse_results(Output(folder, overwrite))
            config = as_benchmark(benchmark, override_texts(overrides, options))
            encoder = open_encoder(model, weights=weights, device=run.device)
            data = load_data(config)
        encoding = build_encoding(
            config,
            image_size_of(encoder),
            device=run.device,
            progress=run.progress,
            images=count_images(data) // run.processes.size,
            processes=run.processes.count_on_machine(),
        )
        if not run.processes.is_main:
            evaluated: Evaluated = follow_encoding(run.processes, encoder, sources_of(data), encoding)
            return evaluated
        with lead_encoding(run.processes, encoder, sources_of(data), encoding) as work, _room(folder) as room:
            outcome = build_protocol(config, data, replace(work.encoding, folder=room)).run(encoder)
            fitted = encoding.fitted(encoder.patch_size)
            named = isinstance(model, str | Path)
            context = Context(
                model=str(model) if named else type(model).__name__,
                weights=weights if isinstance(model, Trainee) or (named and Path(str(model)).is_dir()) else None,
                encoder=encoder_facts(encoder),
                image_size=fitted.size,
                benchmark=f"{config.dataset}/{config.protocol}",
                config=config.model_dump(mode="json"),
                data=fingerprints(data),
                device=str(run.device),
                seconds=time.monotonic() - start,
                licence=licence_of(model, encoder),
            )
            record = as_record(outcome, context)
            if folder is not None:
                _write(record, outcome, data, fitted, folder)
            # Without tensors: a bank of k-NN may be most of the memory.
            work.result = Evaluated(replace(outcome, probe=None, pictures=[]), record, folder)
        return Evaluated(outcome, record, folder)


@contextmanager
def _room(folder: Path | None) -> Iterator[Path]:
    """Where features lie that do not fit into memory, for as long as they are needed."""
    if folder is not None:
        make_folder(folder)
        with scratch_folder(folder / "features") as work:
            yield work
        return
    with tempfile.TemporaryDirectory(prefix="capi_features_", ignore_cleanup_errors=True) as name:
        yield Path(name)


def licence_of(model: object, encoder: VisionEncoder) -> str | None:
    """The licence of the weights of a published model; None for a model of the user's own."""
    if str(model) in RELEASED:
        return RELEASED[str(model)].licence
    licence: str | None = getattr(encoder, "licence", None)
    return licence or None


def _write(record: ResultRecord, outcome: Outcome, data: EvaluationData, encoding: Encoding, folder: Path) -> None:
    clear_results(folder)
    if record["config"]["save_probe"] and outcome.probe is not None:
        about = {name: record[name] for name in ("model", "weights", "benchmark", "scores")}
        try:
            save_probe(replace(outcome.probe, about=about), folder / PROBE)
        except Exception as error:
            # A full disk is an OSError or a SafetensorError; the scores took long and must not be lost with the probe.
            said = hide_path(str(getattr(error, "strerror", None) or error))
            record["warnings"].append(f"the probe could not be written ({said})")
    if outcome.pictures and isinstance(data, SegmentationData):
        draw_predictions(outcome, data, encoding, folder / PICTURES)
    write_record(record, folder)
