"""What a `CapiEncoder` is, without its weights: plain values from which an equal one is built.

Files that carry weights elsewhere carry these values along. They say nothing of training, so that a built encoder has
no stochastic depth.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, cast, get_args

from torch import nn

from capi.errors import CapiError, counted, nearest
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import HEADS, Head, LinearMap
from capi.models.layers import Block
from capi.models.positions import POSITIONS, GridSize
from capi.models.predictor import PREDICTORS, MaskedPlaces, Predictor, PredictorShape, SplitPredictor
from capi.models.weightless import without_weights
from capi.types import IMAGENET, Statistics

# Those of the package, not what is registered later.
_PREDICTORS, _HEADS = tuple(PREDICTORS), HEADS | {LinearMap.kind: LinearMap}
_NAMES: dict[str, tuple[str | None, ...]] = {
    "positions": tuple(POSITIONS),
    "predictor_kind": _PREDICTORS,
    "predictor_mask_tokens": (*get_args(MaskedPlaces), None),
    "head": (*_HEADS, None),
}
# Files come from others: what is described must be possible to build in moments, without its weights.
_MOST, _MOST_OF = 2**20, {"depth": 2**12, "predictor_depth": 2**12, "patch_size": 2**12, "channels": 2**12}
_MOST_ROWS = 2**12


@dataclass(frozen=True)
class Architecture:
    """Sizes and kinds; None where a part does not exist. `grid` is the native one in patches, of learned positions."""

    width: int
    depth: int
    heads: int
    mlp_width: int
    patch_size: int
    registers: int
    channels: int
    positions: str
    grid: GridSize | None
    predictor_kind: str
    predictor_mask_tokens: MaskedPlaces | None
    """Only of `self`: where its mask tokens stand when it predicts."""
    predictor_width: int | None
    """A fused model has no predictor; this and the sizes below are None there."""
    predictor_depth: int | None
    predictor_heads: int | None
    predictor_mlp_width: int | None
    head: str | None
    """`map` is the plain linear map of targets without prototypes; None where the model came without a head."""
    outputs: int | None
    """Prototypes, or values of a target."""
    head_hidden: int | None
    head_bottleneck: int | None
    """Both only of an `mlp` head."""

    def __post_init__(self) -> None:
        predictor = PREDICTORS[self.predictor_kind]
        self._only_where("grid", POSITIONS[self.positions].has_table, "positions are learned")
        self._only_where("predictor_mask_tokens", "mask_tokens" in predictor.reads, "the predictor is of kind self")
        for name in ("predictor_width", "predictor_depth", "predictor_heads", "predictor_mlp_width"):
            self._only_where(name, "depth" in predictor.reads, "the predictor is not fused")
        self._only_where("outputs", self.head is not None, "there is a head")
        sizes = _HEADS[self.head].size_names if self.head else ()
        self._only_where("head_hidden", "hidden" in sizes, "the head is an mlp")
        self._only_where("head_bottleneck", "bottleneck" in sizes, "the head is an mlp")

    def _only_where(self, name: str, there: bool, condition: str) -> None:
        if there != (getattr(self, name) is not None):
            raise CapiError(
                f"the architecture has {name}={getattr(self, name)}, but it has a value if, and only if, {condition}"
            )

    def as_plain(self) -> dict[str, Any]:
        """The architecture as values of JSON."""
        return asdict(self) | {"grid": None if self.grid is None else list(self.grid)}

    @classmethod
    def from_plain(cls, values: Any, source: str = "the architecture") -> "Architecture":
        """The architecture that `as_plain` wrote, from a file that `source` names; no key may lack or be unknown."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict):
            raise CapiError(f"{source} holds no architecture: expected the keys {', '.join(names)}")
        for name in values:
            if name not in names:
                raise CapiError(f'{source} has "{name}", which no architecture has{nearest(name, names)}')
        for name in names:
            if name not in values:
                raise CapiError(f'{source} lacks "{name}" of the architecture: it must have {", ".join(names)}')
        return cls(**{name: _checked(name, values[name], source) for name in names})


def _checked(name: str, value: Any, source: str) -> Any:
    """One value, if it is of its kind and within reason."""
    if name in _NAMES:
        if not isinstance(value, str | None) or value not in _NAMES[name]:
            names = ", ".join("null" if kind is None else kind for kind in _NAMES[name])
            raise CapiError(f'{source} has "{name}": {value!r}, expected one of {names}')
        return value
    if name == "grid":
        return _checked_grid(value, source)
    if value is None and name.startswith(("predictor_", "outputs", "head_")):
        return None
    least, most = int(name != "registers"), _MOST_OF.get(name, _MOST)
    if not _is_count(value, least, most):
        raise CapiError(f'{source} has "{name}": {value!r}, expected a whole number from {least} to {most}')
    return value


def _checked_grid(value: Any, source: str) -> GridSize | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(_is_count(v, 1, _MOST_ROWS) for v in value):
        raise CapiError(f'{source} has "grid": {value!r}, expected two whole numbers, the rows and columns of patches')
    return value[0], value[1]


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def architecture_of(encoder: CapiEncoder) -> Architecture:
    """The description of a model as it stands there."""
    trunk = encoder.encoder
    if not isinstance(trunk, Encoder):
        raise CapiError(
            "this encoder is another method's, which files of CAPI models do not describe: of a run there are the "
            "formats original and safetensors"
        )
    return Architecture(
        **_stack_of(trunk),
        patch_size=encoder.patch_size,
        registers=trunk.num_registers,
        channels=trunk.patch_embedding.weight.shape[1],
        positions=trunk.positions.kind,
        grid=trunk.positions.grid,
        **_predictor_of(encoder.predictor, trunk),
        **_head_of(encoder.head),
    )


def _stack_of(stack: Encoder | SplitPredictor) -> dict[str, Any]:
    if not len(stack.blocks):
        raise CapiError("a model without blocks has no architecture to describe: it needs one block at least")
    first = stack.blocks[0]
    assert isinstance(first, Block)
    return {
        "width": stack.width,
        "depth": len(stack.blocks),
        "heads": first.attention.heads,
        "mlp_width": first.mlp.expand.out_features,
    }


def _predictor_of(predictor: Predictor, trunk: Encoder) -> dict[str, Any]:
    kind = next((kind for kind, made in PREDICTORS.items() if type(predictor) is made), None)
    if kind not in _PREDICTORS:
        raise CapiError(
            f"a predictor of class {type(predictor).__name__} is none of {', '.join(_PREDICTORS)}, which "
            "alone can be described without its code"
        )
    sizes: dict[str, int | None] = dict.fromkeys(("width", "depth", "heads", "mlp_width"))
    if "depth" in predictor.reads:
        stack = cast("SplitPredictor", predictor)
        sizes |= _stack_of(stack)
        ours, theirs = ((part.positions.kind, part.positions.grid) for part in (stack, trunk))
        if ours != theirs:
            raise CapiError(f"the predictor has positions {ours} and the encoder {theirs}: they must be the same")
    return {f"predictor_{name}": value for name, value in sizes.items()} | {
        "predictor_kind": kind,
        "predictor_mask_tokens": getattr(predictor, "mask_tokens", None),
    }


def _head_of(head: nn.Module | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"head": None, "outputs": None, "head_hidden": None, "head_bottleneck": None}
    if head is None:
        return facts
    if not isinstance(head, Head):
        raise CapiError(f"a head of class {type(head).__name__} is none of {', '.join(_HEADS)}")
    return facts | {"head": head.kind, "outputs": head.outputs} | {f"head_{k}": size for k, size in head.sizes.items()}


def build_encoder(
    architecture: Architecture, statistics: Statistics = IMAGENET, image_size: tuple[int, int] | None = None
) -> CapiEncoder:
    """A model of this description with fresh weights; under `torch.device("meta")` with none, which takes no memory."""
    encoder = Encoder(
        width=architecture.width,
        depth=architecture.depth,
        heads=architecture.heads,
        mlp_width=architecture.mlp_width,
        patch_size=architecture.patch_size,
        registers=architecture.registers,
        channels=architecture.channels,
        positions=architecture.positions,
        grid=architecture.grid,
    )
    predictor = _build_predictor(architecture)
    head = _build_head(architecture, predictor.width)
    return CapiEncoder(encoder=encoder, predictor=predictor, head=head, statistics=statistics, image_size=image_size)


def weightless_encoder(
    architecture: Architecture,
    names: Sequence[str],
    statistics: Statistics,
    source: str,
    image_size: tuple[int, int] | None = None,
) -> CapiEncoder:
    """A model without memory for its weights, which will get those that `names` lists."""
    depths = {"depth": ("encoder", architecture.depth), "predictor_depth": ("predictor", architecture.predictor_depth)}
    with weightless(names, depths, source):
        return build_encoder(architecture, statistics, image_size)


@contextmanager
def weightless(names: Sequence[str], depths: Mapping[str, tuple[str, int | None]], source: str) -> Iterator[None]:
    """Build a model on the device `meta`, from sizes that a file gives.

    A depth, by the key that it has in the file, is compared with the blocks that the weights have, since blocks take
    time and memory even there.
    """
    for key, (stack, depth) in depths.items():
        blocks = {name.split(".")[2] for name in names if name.startswith(f"{stack}.blocks.")}
        if depth is not None and depth > len(blocks):
            raise CapiError(
                f"{source} has {key}={depth}, but its weights have {counted(len(blocks), 'block')} in the {stack}"
            )
    try:
        with without_weights():
            yield
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise CapiError(f"{source} describes tensors too large for any computer: reduce its widths") from error


def _build_predictor(architecture: Architecture) -> Predictor:
    kind = PREDICTORS[architecture.predictor_kind]
    # Without blocks the sizes of blocks are read by nobody.
    shape = PredictorShape(
        width=architecture.predictor_width or 0,
        depth=architecture.predictor_depth or 0,
        heads=architecture.predictor_heads or 0,
        context_width=architecture.width,
        mlp_width=architecture.predictor_mlp_width or 0,
        positions=architecture.positions,
        grid=architecture.grid,
    )
    settings = (name for name in kind.reads if name not in shape._fields)
    return kind.build(shape, **{name: getattr(architecture, f"predictor_{name}") for name in settings})


def _build_head(architecture: Architecture, width: int) -> Head | None:
    if architecture.head is None:
        return None
    sizes = {"hidden": architecture.head_hidden, "bottleneck": architecture.head_bottleneck}
    given = {name: size for name, size in sizes.items() if size is not None}
    return _HEADS[architecture.head](width=width, outputs=architecture.outputs, **given)
