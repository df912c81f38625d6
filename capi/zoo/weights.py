"""Weights out of a run, and back in: safetensors with the config inside, or the released layout."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from capi.config.files import parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.method.targets import TargetFacts
from capi.models.architecture import Architecture, architecture_of, weightless_encoder
from capi.models.features import CapiEncoder
from capi.models.heads import HEADS
from capi.models.low_rank import merge_low_rank
from capi.models.positions import POSITIONS
from capi.models.predictor import PREDICTORS
from capi.runtime.atomic import atomic_open, atomic_path
from capi.runtime.documents import parse_object
from capi.runtime.privacy import hide_paths
from capi.runtime.tensor_file import Header, read_header
from capi.types import Statistics
from capi.zoo.build import TARGET, check_code, frozen, recorded_target, statistics, weightless_student
from capi.zoo.checkpoint_files import STATE, CheckpointFolder, StoredTensors
from capi.zoo.files import read_contents
from capi.zoo.huggingface.files import check_statistics, checked_image_size
from capi.zoo.released import to_released
from capi.zoo.run_folder import RunFolder, run_config

WeightsName = Literal["teacher", "student"]
FileFormat = Literal["safetensors", "released"]
Facts = dict[str, Any]
_PREFIX: dict[str, str] = {"teacher": "teacher.average.", "student": "student."}
_MARK = "capi"


def check_weights(weights: str) -> None:
    """Refuse what is no choice, also where a file leaves none."""
    if weights not in _PREFIX:
        raise CapiError(f'weights="{weights}" is not one of {", ".join(_PREFIX)}')


def load_run(path: Path, weights: WeightsName = "teacher") -> CapiEncoder:
    """The encoder of a run's newest checkpoint, or of `RUN/checkpoints/best` or `step_N`, in evaluation mode."""
    check_weights(weights)
    checkpoint = path if (path / STATE).is_file() else None
    folder = RunFolder(path.absolute().parent.parent if checkpoint else path)
    config = run_config(folder)
    checkpoint = checkpoint or CheckpointFolder(folder.checkpoints).newest
    record = folder.record()
    check_code(record, config, ["model.predictor.kind"], resumed=False)
    stored, prefix = StoredTensors(checkpoint), _PREFIX[weights]
    names = [name.removeprefix(prefix) for name in stored.weightless if name.startswith(prefix)]
    model = _empty(config, names, str(path), recorded_target(record, config))
    taken = stored.take({prefix + name: value for name, value in model.state_dict().items()})
    state = {name.removeprefix(prefix): value for name, value in taken.items()}
    model.load_state_dict(state, strict=True, assign=True)
    merge_low_rank(model)
    return model.eval().requires_grad_(False)


def export_run(path: Path, out: Path, weights: WeightsName) -> Path:
    """Write the encoder of a run as one safetensors file, with the run's config inside."""
    folder = RunFolder(path)
    config, record = run_config(folder), folder.record()
    # What is written has been merged.
    config = config.model_copy(update={"adapt": config.adapt.model_copy(update={"lora_rank": None})})
    facts = {"config": hide_paths(config.model_dump(mode="json")), "weights": weights}
    facts |= {TARGET: record[TARGET]} if TARGET in record else {}
    return export_encoder(load_run(path, weights), out, "safetensors", facts)


def export_encoder(encoder: CapiEncoder, out: Path, format: FileFormat, facts: Facts | None = None) -> Path:
    """Write one file, which appears complete or not at all; without `facts` it says what the model itself tells."""
    if out.is_dir():
        raise CapiError(f"{out} is a folder: --out takes the name of a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if format == "released":
            reason = unreleasable(architecture_of(encoder))
            if reason is not None:
                raise CapiError(f"{reason}; export with --format safetensors")
            with atomic_open(out) as file:
                torch.save(to_released(encoder), file)
        else:
            _save_safetensors(encoder, facts or _described(encoder), out)
    except CapiError:
        raise
    except Exception as error:
        # A full disk is an OSError, a RuntimeError or a SafetensorError, depending on who writes.
        raise CapiError(f"{out} cannot be written ({getattr(error, 'strerror', None) or error})") from error
    return out


def load_exported(path: Path) -> CapiEncoder | None:
    """The encoder of a file that `capi export --format safetensors` wrote; None for any other file."""
    try:
        header = read_header(path)
    except (ValueError, OSError):
        # What is wrong with it, or what else it is, is found out by those who read other files.
        return None
    if _MARK not in header.metadata:
        return None
    model = _of_facts(parse_object(header.metadata[_MARK], str(path)), list(header.entries), str(path))
    _check_shapes(model, header, path)
    _fill(model, read_contents(path), path)
    return model.eval().requires_grad_(False)


def _check_shapes(model: CapiEncoder, header: Header, path: Path) -> None:
    """Compare shapes before the weights are read, by the header alone."""
    for name, value in model.state_dict().items():
        if name in header.entries and header.entries[name].shape != tuple(value.shape):
            raise CapiError(
                f'{path} does not fit the config inside it: it has "{name}" of shape {header.entries[name].shape}, and '
                f"the config asks for {tuple(value.shape)}"
            )


def _described(encoder: CapiEncoder) -> Facts:
    mean, std = encoder.statistics
    return {
        "architecture": architecture_of(encoder).as_plain(),
        "statistics": {"mean": list(mean), "std": list(std)},
        "image_size": encoder.image_size,
    }


def _of_facts(facts: Facts, names: Sequence[str], source: str) -> CapiEncoder:
    """The model without memory for its weights, by the config of its run or by its own description."""
    if "architecture" not in facts:
        if not isinstance(facts.get("config"), dict):
            raise CapiError(f"{source} does not say what its weights belong to: export them again")
        config = parse_config(facts["config"], source=source)
        return _empty(config, names, source, recorded_target(facts, config))
    architecture, statistics = Architecture.from_plain(facts["architecture"], source), facts.get("statistics")
    given: Facts = statistics if isinstance(statistics, dict) else {}
    mean, std, size = given.get("mean", ()), given.get("std", ()), facts.get("image_size")
    check_statistics(mean, std, architecture.channels, source)
    image_size = None if size is None else checked_image_size(size, architecture.patch_size, source)
    return weightless_encoder(architecture, names, Statistics(tuple(mean), tuple(std)), source, image_size)


def _empty(config: Config, names: Sequence[str], source: str, target: TargetFacts) -> CapiEncoder:
    """The model without memory for its weights, which come from a file as they are."""
    return frozen(weightless_student(config, names, source, target), statistics(config), config.data.height_and_width)


def _fill(model: CapiEncoder, state: dict[str, Tensor], path: Path) -> None:
    weights = {name: value.float() for name, value in state.items()}
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise CapiError(f"{path} does not fit the config inside it: {' '.join(str(error).split())}") from error


def _save_safetensors(model: CapiEncoder, facts: Facts, path: Path) -> None:
    from safetensors.torch import save_file

    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    with atomic_path(path) as partial:
        save_file(state, partial, metadata={_MARK: json.dumps(facts)})


def unreleasable(architecture: Architecture) -> str | None:
    """Why the released layout cannot hold a model: it knows the paper's default architecture, and one place for each of
    its tensors.
    """
    named: list[tuple[str, str | None, Mapping[str, Any]]] = [
        ("model.predictor.kind", architecture.predictor_kind, PREDICTORS),
        ("model.positions", architecture.positions, POSITIONS),
        ("model.head", architecture.head, HEADS),
    ]
    for key, value, components in named:
        fitting = [name for name, component in components.items() if component.in_released_layout]
        if value is not None and value not in fitting:
            # The plain map of a target without prototypes is no choice of a config.
            shown = f"{key}={value}" if value in components else "a target without prototypes"
            return f"the released layout has no place for {shown}, only for {key}={' and '.join(fitting)}"
    # Others place a quarter of the registers on each side.
    if architecture.registers % 4:
        return (
            f"the released layout cannot hold {architecture.registers} registers: its readers spread them over four "
            "sides, a multiple of 4"
        )
    return None
