"""From an encoder to a graph of ONNX operators, in which batch, height and width stay open.

torch.export follows the encoder once with symbols in place of these three sizes, so that grids, rotary tables and the
places of registers are computed inside the graph from the shape of the images.
"""

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from capi.errors import CapiError
from capi.models.features import CapiEncoder

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

Precision = Literal["float32", "float16", "int8"]

OUTPUTS = ("pooled", "registers", "feature_map")
# torch writes graphs in the operators of 18 and later; its way down to older sets gives up on some of ours.
OLDEST_OPSET, NEWEST_OPSET = 18, 23
# Sizes of the images that tracing follows. No two of them may be alike, nor 0 or 1, lest they be taken for the same.
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
    device = encoder.encoder.registers.device.type
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
    """Only sets of operators that torch can write."""
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        advice = (
            "use a newer runtime, and opset 18" if opset < OLDEST_OPSET else "newer runtimes read older ones as well"
        )
        raise CapiError(
            f"ONNX is written with opset {OLDEST_OPSET} to {NEWEST_OPSET}, and {opset} was asked for: {advice}"
        )


def facts(encoder: CapiEncoder, precision: Precision) -> dict[str, str]:
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
    """Without the warnings and log lines of the libraries at work, which are about themselves."""
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
