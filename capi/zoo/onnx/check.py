"""Whether an ONNX file gives what the PyTorch encoder gives, and how long both take, by onnxruntime on the CPU."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.errors import CapiError
from capi.models.features import CapiEncoder
from capi.types import Float
from capi.zoo.onnx.trace import OUTPUTS, plain_copy

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
    if not set(names) <= set(OUTPUTS) or [one.name for one in session.get_inputs()] != ["images"]:
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
