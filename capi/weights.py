"""Weights out of a run, and back in: safetensors with the config inside, or the released layout."""

import json
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from capi.build import build_student, frozen, statistics
from capi.config.loading import parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.models.features import CapiEncoder
from capi.models.pretrained import to_released
from capi.pretraining import run_config
from capi.train.checkpoint import Checkpoints, read_tensors
from capi.train.run_folder import RunFolder

Weights = Literal["teacher", "student"]
ExportFormat = Literal["safetensors", "released"]
_PREFIX: dict[str, str] = {"teacher": "teacher.average.", "student": "student."}
_MARK = "capi"


def load_run(path: Path, weights: Weights = "teacher") -> CapiEncoder:
    """The encoder of a run's newest checkpoint, in evaluation mode."""
    if weights not in _PREFIX:
        raise CapiError(f'weights="{weights}" is not one of teacher, student')
    folder = RunFolder(path)
    config = run_config(folder)
    checkpoints = Checkpoints(folder.checkpoints)
    if not checkpoints.steps():
        raise CapiError(f"{path} holds no checkpoint yet: wait for the first one, or train with --resume")
    model = _empty(config)
    own = {_PREFIX[weights] + name: value for name, value in model.state_dict().items()}
    read_tensors(checkpoints.path(checkpoints.steps()[-1]), own)
    return model.eval().requires_grad_(False)


def export_run(path: Path, out: Path, format: ExportFormat, weights: Weights) -> Path:
    """Write one file; it appears complete or not at all."""
    model, config = load_run(path, weights), run_config(RunFolder(path))
    if out.is_dir():
        raise CapiError(f"{out} is a folder: --out takes the name of a file")
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if format == "released":
            _refuse_unreleasable(config)
            torch.save(to_released(model), partial)
        else:
            _save_safetensors(model, config, weights, partial)
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
    from safetensors.torch import load_file

    facts = json.loads(known[_MARK])
    model = _empty(parse_config(facts["config"], source=str(path)))
    _fill(model, load_file(path), path)
    return model.eval().requires_grad_(False)


def _empty(config: Config) -> CapiEncoder:
    return frozen(build_student(config), statistics(config))


def _fill(model: CapiEncoder, state: dict[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CapiError(f"{path} does not fit the config inside it: {' '.join(str(error).split())}") from error


def _save_safetensors(model: CapiEncoder, config: Config, weights: str, path: Path) -> None:
    from safetensors.torch import save_file

    facts = {"config": config.model_dump(mode="json"), "weights": weights}
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, path, metadata={_MARK: json.dumps(facts)})


def _metadata(path: Path) -> dict[str, str]:
    """What a safetensors file says of itself; nothing for other files."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def _refuse_unreleasable(config: Config) -> None:
    """The layout knows the paper's default architecture, and one place for each of its tensors."""
    model = config.model
    for key, value, held in (
        ("model.predictor.kind", model.predictor.kind, ("cross",)),
        ("model.positions", model.positions, ("axial", "released")),
        ("model.head", model.head, ("linear",)),
        ("target.kind", config.target.kind, ("clustering", "ema_head")),
    ):
        if value not in held:
            raise CapiError(
                f"the released layout has no place for {key}={value}, only for {' and '.join(held)}: export with "
                "--format safetensors"
            )
    # Others place a quarter of the registers on each side.
    if config.model.registers % 4:
        raise CapiError(
            f"the released layout cannot hold {config.model.registers} registers: its readers spread them over four "
            "sides, a multiple of 4; export with --format safetensors"
        )
