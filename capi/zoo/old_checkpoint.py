"""Checkpoints of formats 1 and 2, written by torch.distributed.checkpoint: a pickled index, and pickled tensors.

The index is not unpickled. A small interpreter follows the dozen opcodes that such an index needs and makes plain
values of them: a class or function is only its name, a call only a note of its arguments. So no class is ever looked
up, called or changed. Tensors are opened by torch's loader of weights.
"""

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capi.runtime.documents import read_regular
from capi.runtime.tensor_file import DTYPES, MOST_AXES, CutOffError
from capi.zoo.checkpoint_index import Chunk, Index, Stored, TensorShape
from capi.zoo.files import load_weights_only

INDEX = ".metadata"
# Of a billion parameters over a hundred processes it has about 50 MB.
_MOST_BYTES = 2**28
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}
# Of one object, in the classes of an index.
_MOST_FIELDS = 32
_METADATA = "torch.distributed.checkpoint.metadata"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"


class _Name(NamedTuple):
    """A class, function or constant that a pickle names."""

    name: str


@dataclass
class _Object:
    """A call that a pickle asks for, and the state that it gives to the result."""

    name: str
    arguments: Any
    state: Any = None


class _Dict(list[tuple[Any, Any]]):
    """A dict as pairs: keys are not hashed, which a pickle could make slow."""


def read_index(folder: Path) -> Index:
    """Translate a pickled index. What is not one of torch.distributed.checkpoint is a ValueError."""
    path = folder / INDEX
    contents = read_regular(path, limit=_MOST_BYTES)
    try:
        return _translate(_parse(contents), limit=len(contents))
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX} is not an index of tensors") from error


def read_chunk(file: io.BufferedIOBase, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """A part of a tensor, which torch.save wrote there."""
    file.seek(chunk.start)
    contents = file.read(chunk.length)
    if len(contents) != chunk.length:
        raise CutOffError(f"{chunk.file} is cut off")
    try:
        value = load_weights_only(io.BytesIO(contents))
    except Exception as error:
        raise ValueError(f"{chunk.file} does not hold tensors ({type(error).__name__})") from error
    if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != chunk.shape:
        raise ValueError(f"{chunk.file} holds another tensor than {INDEX} says")
    return value


class _Machine:
    """The state of a pickle that is followed: its stack, those below a mark, and what it noted to name again."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def replace(self, count: int, make: Callable[..., Any]) -> None:
        """Put one value in the place of the last ones."""
        operands, self.stack[-count:] = self.stack[-count:], []
        self.stack.append(make(*operands))

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def unmark(self, kind: type = list) -> None:
        """Put all values since the last mark on the stack below it, as one list or tuple."""
        values, self.stack = self.stack, self.marks.pop()
        self.stack.append(kind(values))

    def extend_marked(self) -> None:
        """Put all values since the last mark into the list or dict below it."""
        self.unmark()
        self.replace(2, _extended)

    def note(self, number: int) -> None:
        self.memo[number] = self.stack[-1]


def _called(function: Any, arguments: Any) -> _Object:
    if not isinstance(function, _Name):
        raise TypeError("a call of something without a name")
    return _Object(function.name, arguments)


def _built(made: Any, state: Any) -> _Object:
    if not isinstance(made, _Object) or made.state is not None:
        raise TypeError("a state for something that was not just made")
    made.state = state
    return made


def _extended(values: Any, items: list[Any]) -> Any:
    """A list with elements, or a dict with alternating keys and values."""
    if type(values) not in (list, _Dict):
        raise TypeError("items for something that has none")
    values.extend(items if type(values) is list else zip(items[::2], items[1::2], strict=True))
    return values


_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE")
_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda *_: None),
    **dict.fromkeys(_LITERALS, lambda machine, value: machine.stack.append(value)),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append(_Dict()),
    "TUPLE1": lambda machine, _: machine.replace(1, lambda a: (a,)),
    "TUPLE2": lambda machine, _: machine.replace(2, lambda a, b: (a, b)),
    "TUPLE3": lambda machine, _: machine.replace(3, lambda a, b, c: (a, b, c)),
    "GLOBAL": lambda machine, name: machine.stack.append(_Name(name.replace(" ", "."))),
    "STACK_GLOBAL": lambda machine, _: machine.replace(2, lambda module, name: _Name(f"{_text(module)}.{_text(name)}")),
    "NEWOBJ": lambda machine, _: machine.replace(2, _called),
    "REDUCE": lambda machine, _: machine.replace(2, _called),
    "BUILD": lambda machine, _: machine.replace(2, _built),
    "MEMOIZE": lambda machine, _: machine.note(len(machine.memo)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda machine, number: machine.note(number)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, number: machine.stack.append(machine.memo[number])),
    "MARK": lambda machine, _: machine.mark(),
    "TUPLE": lambda machine, _: machine.unmark(tuple),
    "APPEND": lambda machine, _: machine.replace(2, lambda values, item: _extended(values, [item])),
    "SETITEM": lambda machine, _: machine.replace(3, lambda values, *item: _extended(values, [*item])),
    **dict.fromkeys(("APPENDS", "SETITEMS"), lambda machine, _: machine.extend_marked()),
}


def _parse(contents: bytes) -> Any:
    """The value that a pickle describes, of plain values, `_Name` and `_Object`."""
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(contents):
        if opcode.name == "STOP":
            (value,) = machine.stack
            return value
        if opcode.name not in _OPCODES:
            raise ValueError(f"{INDEX} has the opcode {opcode.name}, which no index needs")
        _OPCODES[opcode.name](machine, argument)
    raise ValueError(f"{INDEX} is cut off")


def _translate(root: Any, limit: int) -> Index:
    """The index of plain values. No more than `limit` parts, as a pickle may name the same list again and again."""
    fields = _fields(root, f"{_METADATA}.Metadata")
    places = {}
    for key, value in fields["storage_data"]:
        place, info = _fields(key, f"{_METADATA}.MetadataIndex"), _fields(value, _INFO)
        if info.get("transform_descriptors") is not None:
            raise ValueError(f"{INDEX} names transformations, which no checkpoint has")
        # Tensors lie beside the index; a path that leads elsewhere does not belong to a checkpoint.
        file = info["relative_path"]
        if not isinstance(file, str) or len(file) > 255 or Path(file).name != file:
            raise ValueError(f'{INDEX} points to "{str(file)[:80]}", outside of the checkpoint')
        where = (file, _count(info["offset"]), _count(info["length"]))
        places[_text(place["fqn"]), _size(place["offset"])] = where
    index: Index = {}
    for name, value in fields["state_dict_metadata"]:
        described = _fields(value, f"{_METADATA}.TensorStorageMetadata")
        limit -= len(described["chunks"])
        if limit < 0:
            raise ValueError(f"{INDEX} has more parts than bytes")
        boxes = [_fields(chunk, f"{_METADATA}.ChunkStorageMetadata") for chunk in described["chunks"]]
        corners = [(_size(box["offsets"]), _size(box["sizes"])) for box in boxes]
        chunks = [Chunk(*places[_text(name), offsets], offsets, sizes) for offsets, sizes in corners]
        properties = described["properties"]
        if not isinstance(properties, _Object) or properties.name != f"{_METADATA}.TensorProperties":
            raise TypeError("expected the properties of a tensor")
        index[name] = Stored(_DTYPES[properties.state[0].name], _size(described["size"]), chunks)
        index[name].check(name)
    return index


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The state of an object of a class."""
    if not isinstance(value, _Object) or value.name != name or not isinstance(value.state, _Dict):
        raise TypeError(f"expected an object of {name}")
    # A pickle may name one state for many objects, so a large one would take time for each of them.
    if len(value.state) > _MOST_FIELDS:
        raise ValueError(f"{INDEX} has an object of {len(value.state)} fields")
    return {_text(key): field for key, field in value.state}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError("expected a whole number from 0 on")
    return value


def _size(value: Any) -> TensorShape:
    """A torch.Size."""
    if not isinstance(value, _Object) or value.name != "torch.Size":
        raise TypeError("expected a size")
    (sides,) = value.arguments or ((),)
    if not isinstance(sides, tuple) or len(sides) > MOST_AXES:
        raise TypeError("expected a size")
    return tuple(_count(side) for side in sides)
