"""Writing an encoder as one ONNX file, in float32, float16 or int8, that is kept only if it gives PyTorch's features.

The file takes `images` (batch, channels, height, width), normalised, and gives `pooled` (batch, the predictor's width),
`registers` (batch, registers, width) and `feature_map` (batch, rows, columns, width), all float32. Batch, height and
width are open, sides being multiples of the patch size. What else a user must know stands in its metadata.

- `float16` holds and computes in half precision; angles of rotary positions and the insides of norms stay float32.
- `int8` holds the matrices in 8 bits, a scale for each of their columns, and rounds what they multiply while it runs.
"""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from capi.errors import CapiError
from capi.models.features import CapiEncoder
from capi.runtime.atomic import move_into_place, scratch_folder
from capi.zoo.onnx.check import Difference, check_onnx, compare_speed
from capi.zoo.onnx.trace import OLDEST_OPSET, Precision, facts, plain_copy, quietly, refuse_opset, trace

# Of the largest value in an output; float32 in another order of summation is some 1e-6 away.
TOLERANCE = 1e-4
# What a file of protocol buffers can hold is 2 GiB; the graph itself needs a little of it.
LARGEST_WEIGHTS = 2**31 - 2**26


@dataclass(frozen=True)
class OnnxExported:
    """A file that was written, and what was measured of it."""

    path: Path
    precision: Precision
    opset: int
    size: int
    """Bytes, with those of the weights that lie beside it where they are too large for one file."""
    differences: dict[str, Difference] | None
    """From PyTorch in float32, by output; None where onnxruntime is not installed to find out."""
    seconds: dict[str, float] | None
    """For one image of 14 x 14 patches: PyTorch, ONNX in float32, and this file. None for float32."""


def write_onnx(
    encoder: CapiEncoder,
    out: Path,
    *,
    opset: int = OLDEST_OPSET,
    precision: Precision = "float32",
    pooled: bool = True,
    overwrite: bool = False,
) -> OnnxExported:
    """Write, check and measure one file; it appears complete or not at all.

    `pooled=False` leaves that output and the predictor's weights out. Weights above 2 GB lie in a file beside it.
    """
    refuse_opset(opset)
    _refuse_without_libraries(precision)
    _refuse_place(out, overwrite=overwrite)
    encoder = plain_copy(encoder)
    try:
        with scratch_folder(out) as folder:
            made = _make(encoder, folder, out.name, opset=opset, precision=precision, pooled=pooled)
            return _put(made, out)
    except OSError as error:
        raise CapiError(f"{out} cannot be written ({error.strerror or error})") from error


def _make(
    encoder: CapiEncoder, folder: Path, name: str, *, opset: int, precision: Precision, pooled: bool
) -> OnnxExported:
    """The file in a folder of its own, under its name to be: where weights lie beside it, it holds their name."""
    plain = _place(folder, "float32", name)
    _save(encoder, plain, opset=opset, pooled=pooled)
    differences = check_onnx(encoder, plain) if _installed("onnxruntime") else None
    _refuse_unequal(differences)
    if precision == "float32":
        return OnnxExported(plain, precision, opset, _size(plain), differences, None)
    small = _place(folder, precision, name)
    if precision == "float16":
        _save(plain_copy(encoder, torch.float16), small, opset=opset, pooled=pooled)
    else:
        _quantise(encoder, plain, small)
    differences = check_onnx(encoder, small)
    _refuse_overflow(differences, precision)
    seconds = compare_speed(encoder, {"ONNX float32": plain, f"ONNX {precision}": small})
    return OnnxExported(small, precision, opset, _size(small), differences, seconds)


def _save(encoder: CapiEncoder, path: Path, *, opset: int, pooled: bool) -> None:
    program = trace(encoder, opset=opset, pooled=pooled)
    held = (value.const_value for value in program.model.graph.initializers.values())
    weights = sum(tensor.nbytes for tensor in held if tensor is not None)
    program.save(path, external_data=weights > LARGEST_WEIGHTS)


def _quantise(encoder: CapiEncoder, plain: Path, small: Path) -> None:
    """Products with weights in 8 bits but for the patch embedding: it is little work, and all else rests on it."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    if (beside := _beside(plain)).exists():
        raise CapiError(f"int8 is made of models up to 2 GB, and this one has {beside.stat().st_size / 1e9:.1f}")
    nodes = onnx.load(plain).graph.node
    first = next(node.name for node in nodes if node.op_type == "MatMul")
    with quietly():
        # Without signs: x86 before VNNI overflows where it adds products with signed weights, and features are lost.
        # Products with weights alone: of the attention operator of opset 23 it makes a node that nothing can run.
        quantize_dynamic(
            plain,
            small,
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=[first],
            per_channel=True,
            weight_type=QuantType.QUInt8,
        )
    model = onnx.load(small)
    onnx.helper.set_model_props(model, facts(encoder, "int8"))
    onnx.save(model, small)


def _put(made: OnnxExported, out: Path) -> OnnxExported:
    """To its place; weights first, so that the file never stands there without them."""
    if _beside(made.path).exists():
        move_into_place(_beside(made.path), _beside(out))
    move_into_place(made.path, out)
    return OnnxExported(out, made.precision, made.opset, made.size, made.differences, made.seconds)


def _place(folder: Path, precision: Precision, name: str) -> Path:
    (folder / precision).mkdir()
    return folder / precision / name


def _beside(path: Path) -> Path:
    """Where weights lie that do not fit in the file."""
    return path.with_name(f"{path.name}.data")


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in (path, _beside(path)) if one.exists())


def _installed(*libraries: str) -> bool:
    return all(importlib.util.find_spec(library) is not None for library in libraries)


def _refuse_without_libraries(precision: Precision) -> None:
    needed = ("onnx", "onnxscript") if precision == "float32" else ("onnx", "onnxscript", "onnxruntime")
    if not _installed(*needed):
        raise CapiError(f"writing ONNX files in {precision} needs an extra: pip install 'capi[onnx]'")


def _refuse_place(out: Path, *, overwrite: bool) -> None:
    if out.is_dir():
        raise CapiError(f"{out} is a folder: give the name of a file, such as {out / 'encoder.onnx'}")
    taken = [one for one in (out, _beside(out)) if one.exists()]
    if taken and not overwrite:
        raise CapiError(f"{taken[0]} exists: give another name, or overwrite it")


def _refuse_unequal(differences: dict[str, Difference] | None) -> None:
    for name, found in (differences or {}).items():
        # Written so that what is no number is refused as well.
        if not found.relative <= TOLERANCE:
            raise CapiError(
                f"the ONNX file gives {name} that differ by {found.relative:.1e} of their size from PyTorch's, and "
                f"{TOLERANCE:.0e} is the most that rounding explains: nothing was written"
            )


def _refuse_overflow(differences: dict[str, Difference], precision: Precision) -> None:
    for name, found in differences.items():
        if math.isnan(found.cosine) or not math.isfinite(found.absolute):
            raise CapiError(
                f"in {precision} this model gives {name} that are no numbers, because some of its values are too large "
                "for it: nothing was written; float32 holds them"
            )
