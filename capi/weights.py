"""Weights out of a run, and back in: safetensors with the config inside, or the released layout."""

import json
import os
import stat
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from capi.build import build_student, frozen, statistics
from capi.config.loading import parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.models.architecture import Architecture, architecture_of, build_encoder
from capi.models.features import CapiEncoder
from capi.models.files import read_contents
from capi.models.pretrained import to_released
from capi.models.weightless import without_weights
from capi.pretraining import run_config
from capi.runtime.documents import parse_object
from capi.train.checkpoint import Checkpoints
from capi.train.checkpoint_reading import read_tensors
from capi.train.run_folder import RunFolder
from capi.transformers_files import check_statistics
from capi.types import Statistics

Weights = Literal["teacher", "student"]
FileFormat = Literal["safetensors", "released"]
Facts = dict[str, Any]
_PREFIX: dict[str, str] = {"teacher": "teacher.average.", "student": "student."}
_MARK = "capi"


def check_weights(weights: str) -> None:
    """Refuse what is no choice, also where a file leaves none."""
    if weights not in _PREFIX:
        raise CapiError(f'weights="{weights}" is not one of {", ".join(_PREFIX)}')


def load_run(path: Path, weights: Weights = "teacher") -> CapiEncoder:
    """The encoder of a run's newest checkpoint, in evaluation mode."""
    check_weights(weights)
    folder = RunFolder(path)
    config = run_config(folder)
    checkpoints = Checkpoints(folder.checkpoints)
    if not checkpoints.steps():
        raise CapiError(f"{path} holds no checkpoint yet: wait for the first one, or train with --resume")
    model = _empty(config).to_empty(device="cpu")
    own = {_PREFIX[weights] + name: value for name, value in model.state_dict().items()}
    read_tensors(checkpoints.path(checkpoints.steps()[-1]), own)
    return model.eval().requires_grad_(False)


def export_run(path: Path, out: Path, format: FileFormat, weights: Weights) -> Path:
    """Write the encoder of a run as one file, with the run's config where the format has a place for it."""
    config = run_config(RunFolder(path))
    facts = {"config": config.model_dump(mode="json"), "weights": weights}
    return export_encoder(load_run(path, weights), out, format, facts)


def export_encoder(encoder: CapiEncoder, out: Path, format: FileFormat, facts: Facts | None = None) -> Path:
    """Write one file, which appears complete or not at all; without `facts` it says what the model itself tells."""
    if out.is_dir():
        raise CapiError(f"{out} is a folder: --out takes the name of a file")
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if format == "released":
            _refuse_unreleasable(architecture_of(encoder))
            torch.save(to_released(encoder), partial)
        else:
            _save_safetensors(encoder, facts or _described(encoder), partial)
        partial.replace(out)
    except CapiError:
        raise
    except Exception as error:
        # A full disk is an OSError, a RuntimeError or a SafetensorError, depending on who writes.
        raise CapiError(f"{out} cannot be written ({getattr(error, 'strerror', None) or error})") from error
    finally:
        partial.unlink(missing_ok=True)
    return out


def load_exported(path: Path) -> CapiEncoder | None:
    """The encoder of a file that `capi export --format safetensors` wrote; None for any other file."""
    known = _metadata(path)
    if _MARK not in known:
        return None
    model = _of_facts(parse_object(known[_MARK], str(path)), str(path))
    _fill(model, read_contents(path), path)
    return model.eval().requires_grad_(False)


def _described(encoder: CapiEncoder) -> Facts:
    mean, std = encoder.statistics
    return {
        "architecture": architecture_of(encoder).as_plain(),
        "statistics": {"mean": list(mean), "std": list(std)},
    }


def _of_facts(facts: Facts, source: str) -> CapiEncoder:
    """The model without memory for its weights, by the config of its run or by its own description."""
    known = facts.get("statistics")
    if "architecture" not in facts:
        if not isinstance(facts.get("config"), dict):
            raise CapiError(f"{source} does not say what its weights belong to: export them again")
        return _empty(parse_config(facts["config"], source=source))
    if not isinstance(known, dict):
        raise CapiError(f"{source} does not say what its weights belong to: export them again")
    architecture = Architecture.from_plain(facts.get("architecture"), source)
    check_statistics(known.get("mean"), known.get("std"), architecture.channels, source)
    with without_weights():
        return build_encoder(architecture, Statistics(mean=tuple(known["mean"]), std=tuple(known["std"])))


def _empty(config: Config) -> CapiEncoder:
    """The model without memory for its weights, which come from a file as they are."""
    with without_weights():
        return frozen(build_student(config), statistics(config))


def _fill(model: CapiEncoder, state: dict[str, Tensor], path: Path) -> None:
    weights = {name: value.float() for name, value in state.items()}
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise CapiError(f"{path} does not fit the config inside it: {' '.join(str(error).split())}") from error


def _save_safetensors(model: CapiEncoder, facts: Facts, path: Path) -> None:
    from safetensors.torch import save_file

    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    path.touch()
    usual = stat.S_IMODE(path.stat().st_mode)
    save_file(state, path, metadata={_MARK: json.dumps(facts)})
    # safetensors writes files that only their owner may read.
    path.chmod(usual)


def _metadata(path: Path) -> dict[str, str]:
    """What a safetensors file says of itself; nothing for other files."""
    from safetensors import SafetensorError, safe_open

    # Opening a pipe would wait for ever.
    if not os.path.isfile(path):
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def _refuse_unreleasable(architecture: Architecture) -> None:
    """The layout knows the paper's default architecture, and one place for each of its tensors."""
    for key, value, held in (
        ("model.predictor.kind", architecture.predictor_kind, ("cross",)),
        ("model.positions", architecture.positions, ("axial", "released")),
        ("model.head", architecture.head, ("linear", None)),
    ):
        if value not in held:
            # The plain map of a target without prototypes is no choice of a config.
            shown = "a target without prototypes" if value == "map" else f"{key}={value}"
            fitting = " and ".join(str(each) for each in held if each)
            raise CapiError(
                f"the released layout has no place for {shown}, only for {key}={fitting}: export with --format "
                "safetensors"
            )
    # Others place a quarter of the registers on each side.
    if architecture.registers % 4:
        raise CapiError(
            f"the released layout cannot hold {architecture.registers} registers: its readers spread them over four "
            "sides, a multiple of 4; export with --format safetensors"
        )
