"""An encoder as one ONNX file, traced and written in float32, float16 or int8, if it gives PyTorch's features.

torch.export follows the encoder once with symbols in place of batch, height and width, so that grids, rotary tables and
the places of registers are computed inside the graph from the shape of the images. onnxruntime compares the file with
the encoder on the CPU, and tells how long both take.

The file takes `images` (batch, channels, height, width), normalised, and gives `pooled` (batch, the predictor's width),
`registers` (batch, registers, width) and `feature_map` (batch, rows, columns, width), all float32. Batch, height and
width are open, sides being multiples of the patch size. What else a user must know stands in its metadata.

- `float16` holds and computes in half precision; angles of rotary positions and the insides of norms stay float32.
- `int8` holds the matrices in 8 bits, a scale for each of their columns, and rounds what they multiply while it runs.
"""

import copy
import importlib.util
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capi.errors import CapiError
from capi.models.features import CapiEncoder
from capi.runtime.atomic import move_into_place, scratch_folder
from capi.types import Float

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

OnnxPrecision = Literal["float32", "float16", "int8"]

OUTPUTS = ("pooled", "registers", "feature_map")
# torch writes graphs in the operators of 18 and later; its way down to older sets gives up on some of ours.
OLDEST_OPSET, NEWEST_OPSET = 18, 23
# Sizes of the images that tracing follows. No two may be equal, nor 0 or 1, or they would be taken for the same.
_BATCH, _ROWS, _COLUMNS = 2, 5, 7


class _Traced(nn.Module):
    """Images and features are float32 whatever the encoder computes in; features that are left out are no outputs."""

    def __init__(self, encoder: CapiEncoder, *, pooled: bool) -> None:
        super().__init__()
        self.capi, self.pooled = encoder, pooled

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.capi(images.to(_dtype(self.capi)), pooled=self.pooled)
        return tuple(output.float() for output in features if output is not None)


def plain_copy(encoder: CapiEncoder, dtype: torch.dtype = torch.float32) -> CapiEncoder:
    """The same encoder for evaluation, of one precision, on the CPU, without its head; itself where it is all that."""
    device = encoder.encoder.patch_embedding.weight.device.type
    if encoder.head is None and not encoder.training and _dtype(encoder) == dtype and device == "cpu":
        return encoder
    own, predictor = copy.deepcopy((encoder.encoder, encoder.predictor))
    bare = CapiEncoder(encoder=own, predictor=predictor, statistics=encoder.statistics, image_size=encoder.image_size)
    return bare.to(device="cpu", dtype=dtype).eval().requires_grad_(False)


def trace(encoder: CapiEncoder, *, opset: int, pooled: bool) -> "ONNXProgram":
    """The graph with its weights, in the encoder's own precision."""
    refuse_opset(opset)
    size, channels = encoder.patch_size, encoder.encoder.patch_embedding.weight.shape[1]
    images = torch.zeros(_BATCH, channels, _ROWS * size, _COLUMNS * size)
    anything = torch.export.Dim.DYNAMIC
    try:
        with quietly(), torch.no_grad():
            exported = torch.export.export(
                _Traced(encoder, pooled=pooled).eval(),
                (images,),
                dynamic_shapes=({0: anything, 2: anything, 3: anything},),
                strict=False,
            )
            program = torch.onnx.export(
                exported,
                opset_version=opset,
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=list(OUTPUTS if pooled else OUTPUTS[1:]),
                dynamic_shapes=({0: "batch", 2: "height", 3: "width"},),
            )
    except Exception as error:
        # Whatever torch stumbles over has a type of its own; the first line of its message says what it is.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CapiError(f"torch {torch.__version__} cannot turn this model into ONNX ({reason})") from error
    assert program is not None
    _describe(program, encoder)
    return program


def refuse_opset(opset: int) -> None:
    """Refuse sets of operators that torch cannot write."""
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        advice = (
            "use a newer runtime, and opset 18" if opset < OLDEST_OPSET else "newer runtimes read older ones as well"
        )
        raise CapiError(
            f"ONNX is written with opset {OLDEST_OPSET} to {NEWEST_OPSET}, and {opset} was asked for: {advice}"
        )


def facts(encoder: CapiEncoder, precision: OnnxPrecision) -> dict[str, str]:
    """What a user of the file must know, as values of JSON."""
    values = {
        "capi_version": metadata.version("capi"),
        "patch_size": encoder.patch_size,
        "image_size": encoder.image_size,
        "channels": encoder.encoder.patch_embedding.weight.shape[1],
        "width": encoder.width,
        "registers": encoder.encoder.num_registers,
        "mean": list(encoder.statistics.mean),
        "std": list(encoder.statistics.std),
        "precision": precision,
    }
    return {name: json.dumps(value) for name, value in values.items()}


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings and log lines of the libraries at work, which are about themselves."""
    before, handlers = logging.root.manager.disable, list(logging.root.handlers)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        # Whoever logs by `logging.warning` sets up a handler for the whole process.
        logging.root.handlers[:] = handlers


def _dtype(encoder: CapiEncoder) -> torch.dtype:
    return encoder.encoder.patch_embedding.weight.dtype


def _describe(program: "ONNXProgram", encoder: CapiEncoder) -> None:
    """Our facts in place of what torch notes at each node: lines of source with the paths of this machine."""
    graph = program.model.graph
    graph.metadata_props.clear()
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        node.metadata_props.clear()
        values.extend(node.outputs)
    for value in values:
        value.metadata_props.clear()
    program.model.metadata_props.clear()
    program.model.metadata_props.update(facts(encoder, "float16" if _dtype(encoder) == torch.float16 else "float32"))


if TYPE_CHECKING:
    from onnxruntime import InferenceSession

# In patches: rows and columns, one grid square and the other not.
_GRIDS = ((6, 6), (4, 9))
_BATCHES = (1, 3)
_TIMED_GRID = (14, 14)


@dataclass(frozen=True)
class Difference:
    """How far the vectors of an output are from PyTorch's."""

    absolute: float
    """The largest."""
    relative: float
    """The largest, as a part of the largest value in PyTorch."""
    cosine: float
    """Cosine similarity to PyTorch's vectors, on average."""
    least_cosine: float
    """Of the worst vector."""


def check_onnx(
    encoder: CapiEncoder, path: Path, *, batches: Iterable[Float[Tensor, "b c height width"]] | None = None
) -> dict[str, Difference]:
    """Run the file and the encoder on the same images; the differences of each output over all of them.

    Unless `batches` of normalised images are given it is noise at two resolutions, one of them not square, in batches
    of one and of three.
    """
    encoder, session = plain_copy(encoder), open_session(path)
    names = [output.name for output in session.get_outputs()]
    if not set(names) <= set(OUTPUTS) or [node.name for node in session.get_inputs()] != ["images"]:
        raise CapiError(f"{path} gives {', '.join(names)}: it is no encoder that capi wrote as ONNX")
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    for images in noise(encoder) if batches is None else batches:
        expected, given = _features(encoder, images, names), _run(session, images, path)
        for name, value in zip(names, given, strict=True):
            if value.shape != expected[name].shape:
                raise CapiError(
                    f"{path} gives {name} of shape {tuple(value.shape)} where the encoder gives "
                    f"{tuple(expected[name].shape)}: it was written from another model"
                )
            pairs[name].append((expected[name].flatten(0, -2), value.flatten(0, -2)))
    return {
        name: difference(*(torch.cat(side) for side in zip(*both, strict=True))) for name, both in pairs.items() if both
    }


def difference(expected: Float[Tensor, "v d"], given: Float[Tensor, "v d"]) -> Difference:
    """Of vectors, v of them."""
    if expected.numel() == 0:
        return Difference(0.0, 0.0, 1.0, 1.0)
    absolute = (given - expected).abs().max().item()
    cosine = F.cosine_similarity(expected.double(), given.double(), dim=-1)
    return Difference(absolute, absolute / expected.abs().max().item(), cosine.mean().item(), cosine.min().item())


def compare_speed(
    encoder: CapiEncoder, files: Mapping[str, Path], *, size: tuple[int, int] | None = None, rounds: int = 5
) -> dict[str, float]:
    """Seconds for the features of one image, in PyTorch and by each file: the best of several interleaved rounds.

    `size` is the height and width in pixels; without it the image has 14 x 14 patches.
    """
    encoder = plain_copy(encoder)
    sessions = {name: open_session(path) for name, path in files.items()}
    height, width = size or tuple(side * encoder.patch_size for side in _TIMED_GRID)
    images = _noise(encoder, 1, height, width)
    names = [output.name for output in next(iter(sessions.values())).get_outputs()] if sessions else list(OUTPUTS)
    works: dict[str, Callable[[], object]] = {"PyTorch": lambda: _features(encoder, images, names)}
    for name, session in sessions.items():
        works[name] = lambda session=session, name=name: _run(session, images, files[name])  # type: ignore[misc]
    return _interleaved_best(works, rounds)


def noise(encoder: CapiEncoder) -> list[Float[Tensor, "b c height width"]]:
    """Images like normalised ones, always the same, of every batch size and resolution that is checked."""
    side = encoder.patch_size
    return [_noise(encoder, batch, rows * side, columns * side) for rows, columns in _GRIDS for batch in _BATCHES]


def open_session(path: Path) -> "InferenceSession":
    """The file in onnxruntime, with as many threads as PyTorch has."""
    onnxruntime = require_onnxruntime()
    if not path.is_file():
        raise CapiError(f"{path} is no file: give an ONNX file that capi wrote")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # onnxruntime has an exception for each of its codes, and no common base but this.
        raise CapiError(f"{path} cannot be opened by onnxruntime ({_first_line(error)})") from error


def require_onnxruntime() -> Any:
    """The library, or a sentence that says how to get it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise CapiError("running ONNX files needs an extra: pip install 'capi[onnx]'") from error
    return onnxruntime


def _noise(encoder: CapiEncoder, batch: int, height: int, width: int) -> Tensor:
    channels = encoder.encoder.patch_embedding.weight.shape[1]
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(0))


def _features(encoder: CapiEncoder, images: Tensor, names: list[str]) -> dict[str, Tensor]:
    with torch.inference_mode():
        features = encoder(images, pooled="pooled" in names)._asdict()
    return {name: features[name] for name in names}


def _run(session: "InferenceSession", images: Tensor, path: Path) -> list[Tensor]:
    try:
        return [torch.from_numpy(value) for value in session.run(None, {"images": images.numpy()})]
    except Exception as error:
        raise CapiError(f"{path} fails on images of shape {tuple(images.shape)} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _interleaved_best(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Every round runs all of them, so that noise meets them alike; the first run of each is not counted."""
    best = dict.fromkeys(works, float("inf"))
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


# Of the largest value in an output; float32 in another order of summation is some 1e-6 away.
TOLERANCE = 1e-4
# What a file of protocol buffers can hold is 2 GiB; the graph itself needs a little of it.
LARGEST_WEIGHTS = 2**31 - 2**26


@dataclass(frozen=True)
class OnnxExported:
    """A file that was written, and what was measured of it."""

    path: Path
    precision: OnnxPrecision
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
    precision: OnnxPrecision = "float32",
    pooled: bool = True,
    overwrite: bool = False,
) -> OnnxExported:
    """Write, check and measure one file; it appears complete or not at all.

    `pooled=False` leaves that output and the predictor's weights out. Weights above 2 GB lie in a file beside it.
    """
    refuse_opset(opset)
    needed = ("onnx", "onnxscript") if precision == "float32" else ("onnx", "onnxscript", "onnxruntime")
    if not _installed(*needed):
        raise CapiError(f"writing ONNX files in {precision} needs an extra: pip install 'capi[onnx]'")
    _refuse_place(out, overwrite=overwrite)
    encoder = plain_copy(encoder)
    try:
        with scratch_folder(out) as folder:
            made = _make(encoder, folder, out.name, opset=opset, precision=precision, pooled=pooled)
            return _put(made, out)
    except OSError as error:
        raise CapiError(f"{out} cannot be written ({error.strerror or error})") from error


def _make(
    encoder: CapiEncoder, folder: Path, name: str, *, opset: int, precision: OnnxPrecision, pooled: bool
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
        _quantize(encoder, plain, small)
    differences = check_onnx(encoder, small)
    _refuse_overflow(differences, precision)
    seconds = compare_speed(encoder, {"ONNX float32": plain, f"ONNX {precision}": small})
    return OnnxExported(small, precision, opset, _size(small), differences, seconds)


def _save(encoder: CapiEncoder, path: Path, *, opset: int, pooled: bool) -> None:
    program = trace(encoder, opset=opset, pooled=pooled)
    held = (value.const_value for value in program.model.graph.initializers.values())
    weights = sum(tensor.nbytes for tensor in held if tensor is not None)
    program.save(path, external_data=weights > LARGEST_WEIGHTS)


def _quantize(encoder: CapiEncoder, plain: Path, small: Path) -> None:
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
    """Move a file into place; weights first, so that the file never stands there without them."""
    if _beside(made.path).exists():
        move_into_place(_beside(made.path), _beside(out))
    move_into_place(made.path, out)
    return OnnxExported(out, made.precision, made.opset, made.size, made.differences, made.seconds)


def _place(folder: Path, precision: OnnxPrecision, name: str) -> Path:
    (folder / precision).mkdir()
    return folder / precision / name


def _beside(path: Path) -> Path:
    """Where weights lie that do not fit in the file."""
    return path.with_name(f"{path.name}.data")


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, _beside(path)) if file.exists())


def _installed(*libraries: str) -> bool:
    return all(importlib.util.find_spec(library) is not None for library in libraries)


def _refuse_place(out: Path, *, overwrite: bool) -> None:
    if out.is_dir():
        raise CapiError(f"{out} is a folder: give the name of a file, such as {out / 'encoder.onnx'}")
    taken = [path for path in (out, _beside(out)) if path.exists()]
    if taken and not overwrite:
        raise CapiError(f"{taken[0]} exists: give another name, or overwrite it")


def _refuse_unequal(differences: dict[str, Difference] | None) -> None:
    for name, difference in (differences or {}).items():
        # Written so that NaN is refused as well.
        if not difference.relative <= TOLERANCE:
            raise CapiError(
                f"the ONNX file gives {name} that differ by {difference.relative:.1e} of their size from PyTorch's, "
                f"and {TOLERANCE:.0e} is the most that rounding explains: nothing was written"
            )


def _refuse_overflow(differences: dict[str, Difference], precision: OnnxPrecision) -> None:
    for name, difference in differences.items():
        if math.isnan(difference.cosine) or not math.isfinite(difference.absolute):
            raise CapiError(
                f"in {precision} this model gives {name} that are NaN, because some of its values are too large "
                "for it: nothing was written; float32 holds them"
            )
