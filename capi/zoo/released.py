"""Checkpoints in the released layout, a flat state dict of the student: found in a file, and to and from our modules.

A file without it says whose checkpoint it is instead. Training checkpoints wrap a state dict: `{"student": {...},
"optimizer": ...}`, keys with `module.` in front. The one that looks like the released layout is chosen, and what was
chosen is logged; where several do, the user must say which.

Loading is strict: the architecture is read off the file, and a missing, extra or misshapen key is an error that names
it. Each block of the file carries its table of rotary frequencies, whose pattern tells the variant: [a, a, c, c] is
`released`; a run trained with `axial` is written with its query and key channels reordered and the table [a, c, a, c],
so that the released formula computes the same.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capi.errors import CapiError, quoted, some_of
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import LinearHead
from capi.models.positions import RopeVariant, RotaryPositions, frequencies
from capi.models.predictor import CrossPredictor
from capi.models.weightless import without_weights
from capi.types import IMAGENET, Statistics
from capi.zoo.files import read_contents

StateDict = dict[str, Tensor]

_LOG = logging.getLogger("capi")
_DEEPEST = 3
# Names that training code puts around a model.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")
_OWNERS = ("student", "teacher", "model", "state_dict")
_RELEASED = re.compile(r"backbone\.patch_embed\.weight|backbone\.(en|de)coder\.blocks\.\d+\.residual\d\..*")

# Checkpoints of other methods by a name that only they have, those that are more special first.
_OTHERS = {
    "MAE": r"decoder_blocks\.\d+\..*|decoder_pos_embed",
    "I-JEPA": r"predictor_blocks\.\d+\..*|predictor_pos_embed",
    "DINOv3": r"storage_tokens|rope_embed\.periods",
    "DINOv2": r"blocks\.(\d+\.)?\d+\.ls1\.gamma",
    "iBOT": r"masked_embed",
    "BEiT or data2vec": r"blocks\.\d+\.gamma_1|blocks\.\d+\.attn\.relative_position_bias_table",
    "DINO": r"head\.mlp\.\d+\.weight|dino_head\..*",
    "CLIP": r"visual\.transformer\.resblocks\..*|visual\.class_embedding|visual_projection\.weight",
    "a vision transformer of the transformers library": r"embeddings\.patch_embeddings\.projection\.weight",
    "a plain vision transformer (timm's, or the backbone of DINO)": r"blocks\.\d+\.attn\.qkv\.weight",
    "a ResNet": r"layer1\.\d+\.conv1\.weight",
    "this package in its own layout": r"encoder\.patch_embedding\.weight",
}


_OWN = "this package in its own layout"


def find_released(contents: Any, source: str) -> StateDict:
    """The one state dict in the released layout among what a file holds."""
    candidates = {
        place: mapping
        for place, mapping in _mappings(contents)
        if any(isinstance(name, str) and _RELEASED.fullmatch(unwrapped(name)) for name in mapping)
    }
    if not candidates:
        raise CapiError(f"{source} {_instead(contents)}")
    if len(candidates) > 1:
        names = " and ".join(f'"{place}"' for place in candidates)
        raise CapiError(f"{source} holds several models, under {names}: save the state dict of the one you want alone")
    ((place, mapping),) = candidates.items()
    if place:
        _LOG.info('%s: the weights under "%s" are taken, of %s', source, place, _top_keys(contents))
    return _plain(mapping, source)


def _mappings(contents: Any) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Every dict in there, once, with the names that lead to it; keys behind the name of an owner are a dict too."""
    # The dicts are kept along, so that no other one can get their number.
    seen: dict[int, Mapping[Any, Any]] = {}
    waiting = [("", contents)]
    for _ in range(_DEEPEST + 1):
        level, waiting = waiting, []
        for place, value in level:
            if not isinstance(value, Mapping) or id(value) in seen:
                continue
            seen[id(value)] = value
            yield place, value
            inner = [*value.items(), *_owned(value).items()]
            waiting += [(f"{place}.{name}" if place else str(name), each) for name, each in inner]


def _owned(mapping: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """The tensors of a flat dict whose names begin with an owner, by owner."""
    owned: dict[str, dict[str, Any]] = {}
    for name, value in mapping.items():
        owner, _, rest = unwrapped(name).partition(".") if isinstance(name, str) else ("", "", "")
        if owner in _OWNERS and rest and isinstance(value, Tensor):
            owned.setdefault(owner, {})[rest] = value
    return owned


def _plain(mapping: Mapping[Any, Any], source: str) -> StateDict:
    """A dict of tensors by their own names; anything else in there raises."""
    state: StateDict = {}
    for name, value in mapping.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise CapiError(
                f'{source} holds "{name}" beside its weights, which is no plain tensor: expected a flat dict of '
                "tensors, the student's state dict alone"
            )
        plain = unwrapped(name)
        if plain in state:
            raise CapiError(f'{source} holds "{plain}" twice, once as "{name}": save the state dict without wrappers')
        state[plain] = value.detach()
    return state


def unwrapped(name: str) -> str:
    """A name of a tensor without what training code puts in front."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def look_of(contents: Any) -> tuple[str, str] | None:
    """Whose checkpoint of another method this looks like, and the name that tells; None where nothing does."""
    names = [name for _, mapping in _mappings(contents) for name in _tensor_names(mapping)]
    for other, pattern in _OTHERS.items():
        compiled = re.compile(rf"(?:.*\.)?(?:{pattern})")
        name = next((name for name in names if compiled.fullmatch(unwrapped(name))), None)
        if name is not None:
            return other, name
    return None


def _instead(contents: Any) -> str:
    """What a file without the released layout is, as the rest of a sentence."""
    seen = look_of(contents)
    if seen is not None:
        other, name = seen
        own = ": load it with capi.load, which needs the config inside, or export with --format released"
        return (
            f'looks like a checkpoint of {other} (it has "{name}") and lacks the names of the released layout of '
            f"CAPI{own if other == _OWN else ''}"
        )
    names = [name for _, mapping in _mappings(contents) for name in _tensor_names(mapping)]
    if not names:
        what = f"a dict with {_top_keys(contents)}" if isinstance(contents, Mapping) else f"a {type(contents).__name__}"
        return f"holds no flat dict of tensors, but {what}: expected the state dict of a CAPI student"
    return f'lacks the names of the released layout of CAPI, such as "backbone.registers"; it has "{names[0]}"'


def _tensor_names(mapping: Mapping[Any, Any]) -> list[str]:
    return [name for name, value in mapping.items() if isinstance(name, str) and isinstance(value, Tensor)]


def _top_keys(contents: Mapping[Any, Any], most: int = 6) -> str:
    """The names on top of a file, which may be anything, in a short form."""
    names = [f'"{str(name)[:40]}"' for name in contents]
    return ", ".join(names[:most]) + (" and more" if len(names) > most else "") if names else "nothing in it"


_LOG = logging.getLogger("capi")
_PLAIN_KEYS = {
    "encoder.patch_embedding.weight": "backbone.patch_embed.weight",
    "encoder.patch_embedding.bias": "backbone.patch_embed.bias",
    "encoder.registers": "backbone.registers",
    "predictor.mask_token": "backbone.mask_token",
    "head.direction": "head.last_layer.weight_v",
    "head.length": "head.last_layer.weight_g",
}
_STACKS = {"encoder": "backbone.encoder", "predictor": "backbone.decoder"}
_BLOCK_KEYS = {
    "attention_norm.weight": "residual1.norm.weight",
    "attention.query.weight": "residual1.fn.q_proj.weight",
    "attention.key.weight": "residual1.fn.k_proj.weight",
    "attention.value.weight": "residual1.fn.v_proj.weight",
    "attention.output.weight": "residual1.fn.proj.weight",
    "mlp_norm.weight": "residual2.norm.weight",
    "mlp.expand.weight": "residual2.fn.fc1.weight",
    "mlp.contract.weight": "residual2.fn.fc2.weight",
}
_NORM_KEYS = ("attention_norm.weight", "mlp_norm.weight")
_TABLE_KEY = "residual1.fn.rope.freqs"
_ROTATED = ("attention.query.weight", "attention.key.weight")


def load_released(path: Path) -> CapiEncoder:
    """The frozen model of a checkpoint file, in evaluation mode."""
    return from_released(read_state(path), source=str(path))


def read_state(path: Path) -> StateDict:
    """The tensors of a `.pth` or `.safetensors` file in the released layout, also where a training checkpoint holds it.

    Nothing that a file contains is run.
    """
    return find_released(read_contents(path), str(path))


def from_released(state: StateDict, source: str = "the checkpoint") -> CapiEncoder:
    """Our modules with the weights of a released state dict, whose tensors they take over where they can."""
    unreal = sorted(key for key, value in state.items() if not value.is_floating_point() or value.is_meta)
    if unreal:
        raise CapiError(f"{source} holds no real numbers in {some_of(quoted(unreal))}")
    variant = _rope_variant(state, source)
    with without_weights():
        model = _build(state, variant, source)
    names = _key_map(model)
    shapes = {theirs: tuple(model.get_parameter(ours).shape) for ours, theirs in names.items()}
    shapes |= {key: (2, head_width) for key, head_width in _table_keys(model).items()}
    _check_keys(state, shapes, source)
    weights = {ours: state[theirs].float() for ours, theirs in names.items()}
    model.load_state_dict(_reorder_for(variant, weights, model), strict=True, assign=True)
    return model.requires_grad_(False).eval()


def to_released(model: CapiEncoder) -> StateDict:
    """A released state dict that computes exactly what `model` computes, whichever rotary variant it has."""
    positions = model.encoder.positions
    assert isinstance(positions, RotaryPositions), "the released layout has rotary positions alone"
    variant = positions.variant
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = _reorder_for(variant, weights, model)
    state = {theirs: weights[ours].clone() for ours, theirs in _key_map(model).items()}
    tables = {key: _table(head_width, variant) for key, head_width in _table_keys(model).items()}
    return state | tables


def _predictor(model: CapiEncoder) -> CrossPredictor:
    assert isinstance(model.predictor, CrossPredictor), "the released layout has a cross-attention predictor alone"
    return model.predictor


def _encoder(model: CapiEncoder) -> Encoder:
    assert isinstance(model.encoder, Encoder), "the released layout has CAPI's own encoder alone"
    return model.encoder


def _key_map(model: CapiEncoder) -> dict[str, str]:
    """Our parameter names to those of the released layout."""
    names = {}
    for ours in model.state_dict():
        if ours in _PLAIN_KEYS:
            names[ours] = _PLAIN_KEYS[ours]
        else:
            stack, _, number, rest = ours.split(".", 3)
            names[ours] = f"{_STACKS[stack]}.blocks.{number}.{_BLOCK_KEYS[rest]}"
    return names


def _table_keys(model: CapiEncoder) -> dict[str, int]:
    """The key of every block's rotary table, and the head width there."""
    stacks = (("encoder", _encoder(model)), ("predictor", _predictor(model)))
    return {
        f"{_STACKS[name]}.blocks.{number}.{_TABLE_KEY}": stack.head_width
        for name, stack in stacks
        for number in range(len(stack.blocks))
    }


def _build(state: StateDict, variant: RopeVariant, source: str) -> CapiEncoder:
    """The architecture that the shapes of a state dict speak of."""
    patches = _get(state, "backbone.patch_embed.weight", 4, source)
    if patches.shape[2] != patches.shape[3] or not patches.numel():
        raise CapiError(
            f'{source} has "backbone.patch_embed.weight" of shape {tuple(patches.shape)}, expected '
            "(width, channels, patch size, patch size)"
        )
    registers = _get(state, "backbone.registers", 3, source)
    encoder = Encoder(
        **_stack_sizes(state, "encoder", (patches.shape[0], registers.shape[2]), source),
        channels=patches.shape[1],
        patch_size=patches.shape[2],
        registers=registers.shape[1],
        positions=variant,
    )
    mask_token = _get(state, "backbone.mask_token", 2, source)
    predictor = CrossPredictor(
        **_stack_sizes(state, "predictor", mask_token.shape[1:], source),
        context_width=encoder.width,
        positions=variant,
    )
    head = None
    if any(key.startswith("head.") for key in state):
        direction, length = (_get(state, f"head.last_layer.{name}", 2, source) for name in ("weight_v", "weight_g"))
        if len(direction) != len(length):
            raise CapiError(
                f'{source} has "head.last_layer.weight_v" of shape {tuple(direction.shape)} and '
                f'"head.last_layer.weight_g" of shape {tuple(length.shape)}: each must have a row for every prototype'
            )
        head = LinearHead(width=predictor.width, outputs=direction.shape[0])
    statistics = _statistics(patches.shape[1], source)
    return CapiEncoder(encoder=encoder, predictor=predictor, head=head, statistics=statistics)


def _statistics(channels: int, source: str) -> Statistics:
    """The layout does not hold them: of three channels they are ImageNet's, of others nobody knows."""
    if channels == len(IMAGENET.mean):
        return IMAGENET
    _LOG.warning(
        "%s does not say which mean and std its %d channels had: 0.5 is taken for both; set encoder.statistics "
        "where they were others",
        source,
        channels,
    )
    return Statistics((0.5,) * channels, (0.5,) * channels)


def _stack_sizes(state: StateDict, stack: str, widths: Sequence[int], source: str) -> dict[str, Any]:
    """Width, depth, heads and MLP width of encoder or predictor; the head width is that of its rotary tables."""
    depth = _depth(state, stack, source)

    def sizes(name: str, dimensions: int, axis: int) -> list[int]:
        keys = [f"{_STACKS[stack]}.blocks.{number}.{name}" for number in range(depth)]
        return [_get(state, key, dimensions, source).shape[axis] for key in keys]

    norms = [size for key in _NORM_KEYS for size in sizes(_BLOCK_KEYS[key], 1, 0)]
    width = _agreed([*norms, *widths])
    head_width = _agreed(sizes(_TABLE_KEY, 2, 1), parts_of=width)
    expand, contract = (_BLOCK_KEYS[f"mlp.{name}.weight"] for name in ("expand", "contract"))
    hidden = _agreed([*sizes(expand, 2, 0), *sizes(contract, 2, 1)])
    if not width or not head_width or width % head_width:
        raise CapiError(
            f"{source} has width {width} in its {stack}, which is no multiple of the head width {head_width} there"
        )
    return {"width": width, "depth": depth, "heads": width // head_width, "mlp_width": hidden}


def _depth(state: StateDict, stack: str, source: str) -> int:
    pattern = re.compile(rf"{re.escape(_STACKS[stack])}\.blocks\.(0|[1-9]\d*)\.")
    blocks = {int(match[1]): key for key in state if (match := pattern.match(key))}
    if not blocks:
        raise CapiError(f'{source} has no key that begins with "{_STACKS[stack]}.blocks.0." of the released layout')
    gap = next(number for number in range(len(blocks) + 1) if number not in blocks)
    if gap < len(blocks):
        raise CapiError(f'{source} has "{blocks[max(blocks)]}", but nothing of "{_STACKS[stack]}.blocks.{gap}."')
    return len(blocks)


def _agreed(sizes: Sequence[int], parts_of: int | None = None) -> int:
    """The size that most tensors speak of, so that the misshapen one is named and not those that fit.

    Of sizes that equally many speak of, the first that divides `parts_of`, or simply the first.
    """
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], bool(parts_of and size and parts_of % size == 0)))


def _get(state: StateDict, key: str, dimensions: int, source: str) -> Tensor:
    if key not in state:
        raise CapiError(f'{source} lacks the key "{key}" of the released layout')
    if state[key].ndim != dimensions:
        raise CapiError(f'{source} has "{key}" with {state[key].ndim} dimensions, expected {dimensions}')
    return state[key]


def _check_keys(state: StateDict, expected: dict[str, tuple[int, ...]], source: str) -> None:
    """Every key there, none too many, each of the shape that the rest of the file asks for."""
    missing = sorted(expected.keys() - state.keys())
    extra = sorted(state.keys() - expected.keys())
    wrong = sorted(key for key in expected.keys() & state.keys() if tuple(state[key].shape) != expected[key])
    if missing:
        raise CapiError(f"{source} lacks {some_of(quoted(missing))} of the released layout")
    if extra:
        raise CapiError(f"{source} has {some_of(quoted(extra))}, which the released layout does not know")
    if wrong:
        key = wrong[0]
        raise CapiError(
            f'{source} has "{key}" of shape {tuple(state[key].shape)}, but its other tensors ask for {expected[key]}'
        )


def _table(head_width: int, variant: RopeVariant) -> Tensor:
    """The rotary table of the released layout: a row of frequencies for each axis, zero where it has no say."""
    values = frequencies(head_width, "cpu")
    zero = torch.zeros_like(values)
    if variant == "released":
        return torch.stack([torch.cat([values, values, zero, zero]), torch.cat([zero, zero, values, values])])
    return torch.stack([torch.cat([values, zero, values, zero]), torch.cat([zero, values, zero, values])])


def _rope_variant(state: StateDict, source: str) -> RopeVariant:
    """The variant that all rotary tables of a file agree on."""
    tables = {key: value for key, value in state.items() if key.endswith(_TABLE_KEY)}
    if not tables:
        raise CapiError(f'{source} lacks rotary tables ("*.{_TABLE_KEY}"): it is no checkpoint in the released layout')
    variants = {_variant_of(key, table, source) for key, table in tables.items()}
    if len(variants) > 1:
        raise CapiError(f"{source} mixes both rotary variants; all blocks must have the same")
    return variants.pop()


def _variant_of(key: str, table: Tensor, source: str) -> RopeVariant:
    if table.ndim == 2 and table.shape[0] == 2 and table.shape[1] and table.shape[1] % 4 == 0:
        variants: tuple[RopeVariant, ...] = ("released", "axial")
        for variant in variants:
            # Half precision rounds the frequencies; they are constants, so that does no harm.
            expected = _table(table.shape[1], variant).to(table.dtype)
            if torch.allclose(table.float(), expected.float(), rtol=1e-4, atol=1e-7):
                return variant
    raise CapiError(
        f'{source} has a table "{key}" of shape {tuple(table.shape)} that is neither rotary variant: expected '
        "(2, head width) with frequencies from 7 down to 7e-4 cycles"
    )


def _reorder_for(variant: RopeVariant, weights: StateDict, model: CapiEncoder) -> StateDict:
    """Swap the middle quarters of each head's query and key channels for `axial`; the swap undoes itself."""
    if variant == "released":
        return weights
    widths = {"encoder": _encoder(model).head_width, "predictor": _predictor(model).head_width}
    return {
        name: _swap_quarters(weight, widths[name.split(".")[0]]) if name.endswith(_ROTATED) else weight
        for name, weight in weights.items()
    }


def _swap_quarters(weight: Tensor, head_width: int) -> Tensor:
    """Output channels of each head from [1, 2, 3, 4] to [1, 3, 2, 4], in quarters; twice is as before."""
    # (heads w, d) as (heads, 4, w / 4, d)
    quarters = weight.unflatten(0, (-1, 4, head_width // 4))
    return quarters[:, [0, 2, 1, 3]].flatten(0, 2)
