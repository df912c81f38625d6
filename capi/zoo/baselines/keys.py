"""Names of a source's state dict to ours, strictly: a tensor is used, known to belong elsewhere, or an error.

A `Layout` is a list of rules, one for each kind of tensor; `{n}` stands for the number of a block. A tensor of theirs
may be several of ours, one after the other in its first dimension: a fused map of queries, keys and values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from capi.errors import CapiError, quoted, some_of
from capi.zoo.released import StateDict, unwrapped

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class KeyRule:
    """One of their names, and what it is of ours; None stands for a part that is not used."""

    theirs: str
    ours: tuple[str | None, ...]
    as_grid: bool = False
    """Whether their table of positions is (1, rows, columns, width), where ours is (1, rows x columns, width)."""


def rule(theirs: str, *ours: str | None, as_grid: bool = False) -> KeyRule:
    """One tensor of theirs, which is one of ours or several."""
    return KeyRule(theirs, ours, as_grid)


def with_bias(theirs: str, *ours: str) -> tuple[KeyRule, KeyRule]:
    """Weight and bias of a linear map or a norm, or of several that are fused."""
    names = {kind: tuple(f"{name}.{kind}" for name in ours) for kind in ("weight", "bias")}
    return KeyRule(f"{theirs}.weight", names["weight"]), KeyRule(f"{theirs}.bias", names["bias"])


@dataclass(frozen=True)
class Subnetwork:
    """One of the networks that a checkpoint holds: where its dict may lie, and what its names may begin with."""

    places: tuple[tuple[str, ...], ...] = ((),)
    prefixes: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Layout:
    """How a source names its tensors."""

    method: str
    rules: tuple[KeyRule, ...]
    signature: str
    """A name that every checkpoint in this layout has."""
    ignored: tuple[str, ...] = ()
    """Patterns of names that are in such files and do not belong to the encoder: heads, decoders, mask tokens."""
    parts: Mapping[str, Subnetwork] | None = None
    """By name; the first one is the default."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns of names that come in two forms, and what they are taken for."""
    leading_blocks: str = ""
    """What the first blocks may be called, where some files count them by themselves."""
    periods: str = ""
    """What the periods of rotary positions are called, in files that have them; else they are computed."""
    positions: Literal["column", "row", "learned"] | None = None
    """Whether the table of positions is learned or fixed sines and cosines, of the column or of the row first."""

    def part(self, name: str | None) -> Subnetwork:
        """The part of a name; the first one where none is given."""
        parts = self.parts or {"": Subnetwork()}
        if name is None:
            return next(iter(parts.values()))
        if name not in parts:
            names = ", ".join(each for each in parts if each) or "none: leave it out"
            raise CapiError(f'checkpoints of {self.method} have no part "{name}": there is {names}')
        return parts[name]


class _Place(NamedTuple):
    """What one of their names must be."""

    ours: tuple[str | None, ...]
    shape: tuple[int, ...]
    as_grid: bool


def find_state(contents: Any, layout: Layout, part: Subnetwork) -> StateDict | None:
    """The tensors of one part of a checkpoint by their own names, without wrappers; None where they are not there."""
    for place in part.places:
        mapping = contents
        for name in place:
            mapping = mapping.get(name) if isinstance(mapping, Mapping) else None
        if not isinstance(mapping, Mapping):
            continue
        # What else lies beside the tensors (a moving average, settings) is another part or none.
        tensors = {
            name: value for name, value in mapping.items() if isinstance(value, Tensor) and isinstance(name, str)
        }
        plain = {unwrapped(name): value for name, value in tensors.items()}
        for prefix in part.prefixes:
            if prefix + layout.signature in plain:
                return _renamed(plain, layout, prefix)
    return None


def _renamed(plain: StateDict, layout: Layout, prefix: str) -> StateDict:
    """Names as the layout has them; two that become the same are an error."""
    state: StateDict = {}
    for name, value in plain.items():
        short = name.removeprefix(prefix)
        for pattern, replacement in layout.renamed:
            short = re.sub(f"^{pattern}", replacement, short)
        if short in state:
            raise CapiError(f'the checkpoint holds "{short}" twice, once as "{name}": save the encoder alone')
        state[short] = value
    return _masked(_renumbered(state, layout.leading_blocks))


def _renumbered(state: StateDict, leading: str) -> StateDict:
    """All blocks in one row, those that were counted by themselves first."""
    first = {
        int(match[1]) for name in state if leading and (match := re.match(rf"{re.escape(leading)}\.(\d+)\.", name))
    }

    def name_of(name: str) -> str:
        if leading and name.startswith(f"{leading}."):
            return f"blocks.{name.removeprefix(f'{leading}.')}"
        return re.sub(r"^blocks\.(\d+)\.", lambda match: f"blocks.{int(match[1]) + len(first)}.", name)

    return {name_of(name): value for name, value in state.items()} if first else state


def _masked(state: StateDict) -> StateDict:
    """A bias that lies beside a mask is their product."""
    products = {
        name: value * state[f"{name}_mask"]
        for name, value in state.items()
        if name.endswith(".bias") and f"{name}_mask" in state
    }
    return state | products


def to_ours(state: StateDict, layout: Layout, shapes: Shapes, source: str) -> StateDict:
    """Our state dict out of theirs; a missing, extra or misshapen name is an error that says it."""
    places = _places(layout, shapes)
    refuse_misfit(state, layout, shapes, source)
    ours: StateDict = {}
    for theirs, place in places.items():
        value = state[theirs].detach().float()
        value = value.flatten(1, 2) if place.as_grid else value
        for name, part in zip(place.ours, value.chunk(len(place.ours)), strict=True):
            if name is not None:
                ours[name] = part
    return ours


def to_theirs(ours: StateDict, layout: Layout) -> StateDict:
    """Their state dict out of ours. A part of theirs that is not used is zero."""
    theirs: StateDict = {}
    for name, place in _places(layout, {name: tuple(value.shape) for name, value in ours.items()}).items():
        used = next(ours[each] for each in place.ours if each is not None)
        parts = [torch.zeros_like(used) if each is None else ours[each] for each in place.ours]
        theirs[name] = torch.cat(parts).reshape(place.shape).contiguous()
    return theirs


def refuse_misfit(state: StateDict, layout: Layout, shapes: Shapes, source: str) -> None:
    """Every name there, none too many, each of its shape."""
    places = _places(layout, shapes)
    missing = [name for name in places if name not in state]
    extra = [name for name in state if name not in places and name != layout.periods and not is_ignored(name, layout)]
    wrong = [name for name in places if name in state and tuple(state[name].shape) != places[name].shape]
    unreal = [name for name in places if name in state and not state[name].is_floating_point()]
    if wrong:
        name = wrong[0]
        shape, expected = tuple(state[name].shape), places[name].shape
        others = f" (and {len(wrong) - 1} more tensors of other shapes)" if len(wrong) > 1 else ""
        raise CapiError(f'{source} has "{name}" of shape {shape}, expected {expected}{others}')
    if missing:
        raise CapiError(f"{source} lacks {some_of(quoted(missing))} of the layout of {layout.method}")
    if extra:
        raise CapiError(f"{source} has {some_of(quoted(extra))}, which the layout of {layout.method} does not know")
    if unreal:
        raise CapiError(f"{source} has {some_of(quoted(unreal))} that hold no real numbers")


def fits(state: StateDict, layout: Layout, shapes: Shapes) -> bool:
    """Whether these are the tensors of a model of such shapes."""
    try:
        refuse_misfit(state, layout, shapes, "")
    except CapiError:
        return False
    return True


def is_ignored(name: str, layout: Layout) -> bool:
    """Whether a name is known to belong to something else than the encoder."""
    return any(re.fullmatch(pattern, name) for pattern in layout.ignored)


def _places(layout: Layout, shapes: Shapes) -> dict[str, _Place]:
    """Their names for a model whose tensors have these shapes."""
    depth = 1 + max(int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name)))
    places: dict[str, _Place] = {}
    for each in layout.rules:
        for number in range(depth if "{n}" in each.theirs else 1):
            ours = tuple(name and name.replace("{n}", str(number)) for name in each.ours)
            used = [name for name in ours if name is not None]
            if all(name in shapes for name in used):
                shape = _their_shape(shapes[used[0]], len(ours), each.as_grid)
                places[each.theirs.replace("{n}", str(number))] = _Place(ours, shape, each.as_grid)
    return places


def _their_shape(ours: tuple[int, ...], parts: int, as_grid: bool) -> tuple[int, ...]:
    if as_grid:
        side = round(ours[1] ** 0.5)
        return (ours[0], side, side, *ours[2:])
    return (parts * ours[0], *ours[1:])
