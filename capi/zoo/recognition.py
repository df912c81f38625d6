"""What a checkpoint holds: the state dict in the released layout, wherever it lies in there, or whose it is instead.

Training checkpoints wrap a state dict: `{"student": {...}, "optimizer": ...}`, keys with `module.` in front. The one
that looks like the released layout is chosen, and what was chosen is logged; where several do, the user must say which.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from capi.errors import CapiError

State = dict[str, Tensor]

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


def find_released(contents: Any, source: str) -> State:
    """The one state dict in the released layout among what a file holds."""
    found = {place: mapping for place, mapping in _mappings(contents) if _looks_released(mapping)}
    if not found:
        raise CapiError(f"{source} {_instead(contents)}")
    if len(found) > 1:
        names = " and ".join(f'"{place}"' for place in found)
        raise CapiError(f"{source} holds several models, under {names}: save the state dict of the one you want alone")
    ((place, mapping),) = found.items()
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
        owner, _, rest = _unwrapped(name).partition(".") if isinstance(name, str) else ("", "", "")
        if owner in _OWNERS and rest and isinstance(value, Tensor):
            owned.setdefault(owner, {})[rest] = value
    return owned


def _looks_released(mapping: Mapping[Any, Any]) -> bool:
    return any(isinstance(name, str) and _RELEASED.fullmatch(_unwrapped(name)) for name in mapping)


def _plain(mapping: Mapping[Any, Any], source: str) -> State:
    """A dict of tensors by their own names; anything else in there is told."""
    state: State = {}
    for name, value in mapping.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise CapiError(
                f'{source} holds "{name}" beside its weights, which is no plain tensor: expected a flat dict of '
                "tensors, the student's state dict alone"
            )
        plain = _unwrapped(name)
        if plain in state:
            raise CapiError(f'{source} holds "{plain}" twice, once as "{name}": save the state dict without wrappers')
        state[plain] = value.detach()
    return state


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def look_of(contents: Any) -> tuple[str, str] | None:
    """Whose checkpoint of another method this looks like, and the name that tells; None where nothing does."""
    names = [name for _, mapping in _mappings(contents) for name in _tensor_names(mapping)]
    for other, pattern in _OTHERS.items():
        known = re.compile(rf"(?:.*\.)?(?:{pattern})")
        name = next((name for name in names if known.fullmatch(_unwrapped(name))), None)
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
        return f"holds no flat dict of tensors, but {_what(contents)}: expected the state dict of a CAPI student"
    return f'lacks the names of the released layout of CAPI, such as "backbone.registers"; it has "{names[0]}"'


def _tensor_names(mapping: Mapping[Any, Any]) -> list[str]:
    return [name for name, value in mapping.items() if isinstance(name, str) and isinstance(value, Tensor)]


def _what(contents: Any) -> str:
    return f"a dict with {_top_keys(contents)}" if isinstance(contents, Mapping) else f"a {type(contents).__name__}"


def _top_keys(contents: Mapping[Any, Any], most: int = 6) -> str:
    """The names on top of a file, which may be anything, in a short form."""
    names = [f'"{str(name)[:40]}"' for name in contents]
    return ", ".join(names[:most]) + (" and more" if len(names) > most else "") if names else "nothing in it"
