"""One model through one benchmark: load the data, run the protocol, leave results, probe and pictures."""

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from capi.config.benchmark_loading import load_benchmark
from capi.config.benchmarks import BenchmarkConfig
from capi.data.frame import image_size_of
from capi.errors import CapiError
from capi.evals.build import build_encoding, build_protocol, count_images, fingerprints, load_data
from capi.evals.features import Encoding, Progress, silent
from capi.evals.outcome import Outcome
from capi.evals.probe_files import encoder_facts, save_probe
from capi.evals.results import (
    PICTURES,
    PROBE,
    Context,
    Record,
    as_record,
    clear_results,
    make_folder,
    refuse_results,
    write_record,
)
from capi.evals.tasks import EvaluationData, SegmentationData
from capi.evals.teamwork import encoding_together, on_a_machine, prepared, sources_of
from capi.report.predictions import draw_predictions
from capi.runtime.atomic import scratch_folder
from capi.runtime.leading import ALONE
from capi.runtime.privacy import hide_paths_within
from capi.runtime.processes import Processes, own_device
from capi.types import VisionEncoder
from capi.zoo.encoders import open_encoder
from capi.zoo.published.registry import RELEASED
from capi.zoo.weights import Weights


@dataclass(frozen=True)
class Evaluated:
    """An evaluation that is done: its outcome, and the same as it was written."""

    outcome: Outcome
    record: Record
    folder: Path | None


def evaluate(
    model: str | Path | VisionEncoder,
    benchmark: str | Path | BenchmarkConfig,
    overrides: Iterable[str] = (),
    *,
    out: str | Path | None = None,
    weights: Weights = "teacher",
    device: torch.device | str = "cpu",
    overwrite: bool = False,
    progress: Progress = silent,
    processes: Processes = ALONE,
) -> Evaluated:
    """Score a frozen encoder. With `out`, a folder gets results.json, results.md, the probe and pictures.

    Of several `processes` each encodes a part of the images; the main one does all else.
    """
    folder = None if out is None else Path(out)
    begun = time.monotonic()
    with prepared(processes):
        if folder is not None and processes.is_main:
            refuse_results(folder, overwrite)
        config = as_benchmark(benchmark, overrides)
        own = own_device(torch.device(device)) if processes.size > 1 else device
        encoder = open_encoder(model, weights=weights, device=own)
        data = load_data(config)
    encoding = build_encoding(
        config,
        image_size_of(encoder),
        device=own,
        progress=progress,
        images=count_images(data) // processes.size,
        processes=on_a_machine(processes),
    )

    def run(encoding: Encoding) -> Evaluated:
        if folder is not None:
            make_folder(folder)
        with _room(folder) as work:
            outcome = build_protocol(config, data, replace(encoding, folder=work)).run(encoder)
            context = Context(
                model=str(model) if isinstance(model, str | Path) else type(model).__name__,
                weights=weights if isinstance(model, str | Path) and Path(model).is_dir() else None,
                encoder=encoder_facts(encoder),
                image_size=encoding.fitted(encoder.patch_size).size,
                benchmark=f"{config.dataset}/{config.protocol}",
                config=config.model_dump(mode="json"),
                data=fingerprints(data),
                device=str(device),
                seconds=time.monotonic() - begun,
                licence=licence_of(model, encoder),
            )
            record = as_record(outcome, context)
            if folder is not None:
                _write(record, outcome, data, encoding.fitted(encoder.patch_size), folder)
        return Evaluated(outcome, record, folder)

    return encoding_together(processes, encoder, sources_of(data), encoding, run, told=_without_tensors)


@contextmanager
def _room(folder: Path | None) -> Iterator[Path]:
    """Where features lie that do not fit into memory, for as long as they are needed."""
    if folder is not None:
        with scratch_folder(folder / "features") as work:
            yield work
        return
    with tempfile.TemporaryDirectory(prefix="capi_features_", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _without_tensors(done: Evaluated) -> Evaluated:
    """What other processes are told: a bank of k-NN may be most of the memory."""
    return replace(done, outcome=replace(done.outcome, probe=None, pictures=[]))


def licence_of(model: str | Path | VisionEncoder, encoder: VisionEncoder) -> str | None:
    """Under what licence the weights of a published model stand; None for one's own."""
    if str(model) in RELEASED:
        return RELEASED[str(model)].licence
    licence: str | None = getattr(encoder, "licence", None)
    return licence or None


def as_benchmark(benchmark: str | Path | BenchmarkConfig, overrides: Iterable[str] = ()) -> BenchmarkConfig:
    """A config as it is, or that of a name or file with overrides."""
    if not isinstance(benchmark, BenchmarkConfig):
        return load_benchmark(benchmark, overrides)
    if list(overrides):
        raise CapiError("overrides go with the name of a benchmark; a BenchmarkConfig is already complete")
    return benchmark


def _write(record: Record, outcome: Outcome, data: EvaluationData, encoding: Encoding, folder: Path) -> None:
    clear_results(folder)
    if record["config"]["save_probe"] and outcome.probe is not None:
        about = {name: record[name] for name in ("model", "weights", "benchmark", "scores")}
        try:
            save_probe(replace(outcome.probe, about=about), folder / PROBE)
        except Exception as error:
            # A full disk is an OSError or a SafetensorError; the scores took long and must not be lost with the probe.
            said = hide_paths_within(str(getattr(error, "strerror", None) or error))
            record["warnings"].append(f"the probe could not be written ({said})")
    if outcome.pictures and isinstance(data, SegmentationData):
        draw_predictions(outcome, data, encoding, folder / PICTURES)
    write_record(record, folder)
