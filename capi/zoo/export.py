"""One encoder in any of the formats that others read: each starts from what `capi.load` gives."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from capi.data.crops import image_size_of
from capi.errors import CapiError
from capi.models.architecture import architecture_of
from capi.models.features import CapiEncoder
from capi.models.plain_vit import PlainNetwork
from capi.runtime.atomic import Output
from capi.runtime.protocol import PAPER_SIZE
from capi.zoo.encoders import Trainee, open_capi_encoder
from capi.zoo.huggingface.files import write_transformers
from capi.zoo.onnx import OLDEST_OPSET, OnnxExported, OnnxPrecision, write_onnx
from capi.zoo.run_folder import RunFolder
from capi.zoo.weights import WeightsName, export_encoder, export_run, unreleasable

_LOG = logging.getLogger("capi")
ExportFormat = Literal["safetensors", "released", "transformers", "onnx", "original"]


@dataclass(frozen=True)
class ExportOptions:
    """What some formats leave to choose."""

    image_size: int | None = None
    """transformers: side that images are resized to; None takes the encoder's own, or the paper's."""
    precision: OnnxPrecision = "float32"
    """onnx: what weights are held in."""
    opset: int | None = None
    """onnx: version of the operators."""
    pooled: bool = True
    """onnx: whether the file gives pooled features too."""


@dataclass(frozen=True)
class Exported:
    """What was written, and what was measured of an ONNX file."""

    path: Path
    onnx: OnnxExported | None = None


def export(
    model: str | Path | Trainee,
    out: str | Path,
    *,
    format: ExportFormat = "safetensors",
    weights: WeightsName = "teacher",
    image_size: int | None = None,
    precision: OnnxPrecision = "float32",
    opset: int | None = None,
    pooled: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write the encoder of a learner or of anything that `load` takes: as safetensors, in the released layout, for the
    transformers library (with `image_size`), or as ONNX (with `precision`, `opset` and `pooled`). Says where it is.
    `original` is the layout of the weights that `adapt` started from: what loads those loads these in their place.
    """
    options = ExportOptions(image_size=image_size, precision=precision, opset=opset, pooled=pooled)
    return write_export(model, Output(Path(out), overwrite), format=format, weights=weights, options=options).path


def write_export(
    model: str | Path | Trainee,
    output: Output,
    *,
    format: ExportFormat,
    weights: WeightsName = "teacher",
    options: ExportOptions | None = None,
) -> Exported:
    """Write an encoder as a file or a folder, which appears complete or not at all."""
    options = options or ExportOptions()
    if format not in _WRITERS:
        raise CapiError(f'there is no format "{format}", only {", ".join(_WRITERS)}')
    _refuse_idle_options(format, options)
    if format not in ("transformers", "original"):
        output.check_file()
    elif output.path.exists():
        output.check_replacing()
    return _WRITERS[format](model, output.path, weights, options)


def _refuse_idle_options(format: str, options: ExportOptions) -> None:
    """An option of another format would be overlooked."""
    default = ExportOptions()
    owners = {"image_size": "transformers", "precision": "onnx", "opset": "onnx", "pooled": "onnx"}
    for name, owner in owners.items():
        if format != owner and getattr(options, name) != getattr(default, name):
            raise CapiError(f"{name} is an option of --format {owner}, not of {format}: leave it out")


def _safetensors(model: str | Path | Trainee, out: Path, weights: WeightsName, _: ExportOptions) -> Exported:
    """Write a safetensors file: the whole config of a run goes along, of anything else what its weights tell."""
    if isinstance(model, str | Path) and RunFolder(Path(model)).exists:
        return Exported(export_run(Path(model), out, weights))
    return Exported(export_encoder(open_capi_encoder(model, weights), out, "safetensors"))


def _released(model: str | Path | Trainee, out: Path, weights: WeightsName, _: ExportOptions) -> Exported:
    encoder = open_capi_encoder(model, weights)
    size = image_size_of(encoder)
    if size != PAPER_SIZE:
        _LOG.warning("the released layout holds no image size: give %d x %d when you use %s", *size, out.name)
    return Exported(export_encoder(encoder, out, "released"))


def _transformers(model: str | Path | Trainee, out: Path, weights: WeightsName, options: ExportOptions) -> Exported:
    encoder = open_capi_encoder(model, weights)
    size = options.image_size or image_size_of(encoder)
    return Exported(write_transformers(encoder, out, image_size=size, overwrite=True))


def _onnx(model: str | Path | Trainee, out: Path, weights: WeightsName, options: ExportOptions) -> Exported:
    encoder: CapiEncoder = open_capi_encoder(model, weights)
    opset = OLDEST_OPSET if options.opset is None else options.opset
    done = write_onnx(encoder, out, opset=opset, precision=options.precision, pooled=options.pooled, overwrite=True)
    return Exported(done.path, done)


def _original(model: str | Path | Trainee, out: Path, weights: WeightsName, options: ExportOptions) -> Exported:
    encoder = open_capi_encoder(model, weights)
    if not isinstance(encoder.encoder, PlainNetwork):
        # The layout that CAPI's published weights have, where it can hold what was added.
        reason = unreleasable(architecture_of(encoder))
        if reason is None:
            return _released(model, out, weights, options)
        _LOG.warning("%s: %s is written as safetensors, which capi.load reads like the source", reason, out.name)
        return _safetensors(model, out, weights, options)
    # The table of baselines, which nothing else here needs.
    from capi.zoo.baselines.write import write_original

    return Exported(write_original(encoder.encoder, out))


_WRITERS: dict[str, Callable[[str | Path | Trainee, Path, WeightsName, ExportOptions], Exported]] = {
    "safetensors": _safetensors,
    "released": _released,
    "transformers": _transformers,
    "onnx": _onnx,
    "original": _original,
}
