"""Components from outside the package: Python files that a user names, and tables of components by name.

A component is a class or a function in a table NAME -> component. One of a user's own is named FILE.py:NAME or
MODULE:NAME; once its file is trusted and imported it lies in the table under that name, like all others.
"""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from capi.errors import CapiError, nearest

Component = TypeVar("Component")


def look_up(table: Mapping[str, Component], name: str, key: str, *, files: bool = True) -> Component:
    """The component that the value of a key of the config names; with `files` it may be a user's own."""
    if name not in table:
        others = ", nor FILE.py:NAME" if files else ""
        raise CapiError(f"{key}={name} is none of {', '.join(table)}{others}{nearest(name, table)}")
    return table[name]


def import_component(table: MutableMapping[str, Any], name: str, place: str, key: str, contract: type | None) -> None:
    """Enter FILE.py:NAME into a table, imported from a place; once more where the file has changed.

    With a contract it must be a subclass of that, without one a function.
    """
    digest = sha256_of(place) if Path(place).is_file() else ""
    if name in table and _IMPORTED.get((key, name)) == (place, digest):
        return
    attribute, module = name.rpartition(":")[2], import_code(place)
    component = getattr(module, attribute, None)
    if component is None:
        raise CapiError(f"{key}={name}: there is no {attribute} in that file{nearest(attribute, dir(module))}")
    _check_contract(component, f"{key}={name}", contract)
    if not contract and digest:
        function = FileFunction(str(Path(place).resolve()), attribute, digest)
        _FUNCTIONS[function], component = component, function
    table[name], _IMPORTED[key, name] = component, (place, digest)


def _check_contract(component: object, name: str, contract: type | None) -> None:
    if contract is None:
        if not callable(component):
            raise CapiError(f"{name} must be a function, not {component!r}")
        return
    if not (isinstance(component, type) and issubclass(component, contract)):
        raise CapiError(f"{name} must be a subclass of {contract.__module__}.{contract.__name__}, not {component!r}")
    for attribute, annotation in inspect.get_annotations(contract).items():
        if "ClassVar" in str(annotation) and not hasattr(component, attribute):
            raise CapiError(f"{name} lacks {attribute}: every {contract.__name__} says it")


def register(
    table: MutableMapping[str, Any], name: str, component: object, key: str, contract: type | None = None
) -> None:
    """Add a component of a user's own under a name that no other has. Registering it once more replaces it."""
    _check_contract(component, f"{key}={name}", contract)
    if ":" in name:
        raise CapiError(f'"{name}" cannot name a component: a colon stands between a file and what is in it')
    if name in table and is_built_in(table[name]):
        raise CapiError(f"{key}={name} comes with capi: choose another name")
    table[name] = component


def is_built_in(component: object) -> bool:
    """Whether it comes with this package."""
    return getattr(component, "__module__", "").startswith("capi.") and not isinstance(component, FileFunction)


def check_options(
    function: Callable[..., Any], options: Mapping[str, Any], key: str, *, given: Iterable[str], name: str
) -> None:
    """Refuse options that a component does not take, or needs and does not get. `given` comes from elsewhere."""
    written = function.function if isinstance(function, FileFunction) else function
    parameters = inspect.signature(written).parameters.values()
    named = [each for each in parameters if each.kind in {each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD}]
    taken = {each.name: each for each in named if each.name not in {"self", "cls", *given}}
    for option in options:
        if option not in taken:
            offered = f"it takes {', '.join(taken)}" if taken else "it takes none"
            raise CapiError(f"{key}.{option} is no option of {name}, {offered}{nearest(option, taken)}")
    for option, parameter in taken.items():
        if parameter.default is parameter.empty and option not in options:
            raise CapiError(f"{name} needs an option: set {key}.{option}")


@dataclass(frozen=True)
class FileFunction:
    """A function in a Python file. Spawned processes import the file again."""

    file: str
    name: str
    sha256: str

    @property
    def function(self) -> Callable[..., Any]:
        if self not in _FUNCTIONS:
            if sha256_of(self.file) != self.sha256:
                raise CapiError(f"{self.file} has changed since it was imported: start again")
            _FUNCTIONS[self] = getattr(import_code(self.file), self.name)
        return _FUNCTIONS[self]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)


# What this process has imported: functions of files, and by key and name from where, with the digest of the file.
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
_IMPORTED: dict[tuple[str, str], tuple[str, str]] = {}


def sha256_of(file: str | Path) -> str:
    """The digest of a file's content."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def code_file(component: Any) -> Path | None:
    """The Python file of a component that does not come with this package; None where there is none."""
    if isinstance(component, FileFunction):
        return Path(component.file)
    try:
        file = inspect.getsourcefile(component)
    except TypeError:
        return None
    return None if is_built_in(component) or file is None or not Path(file).is_file() else Path(file)


def import_code(place: str) -> ModuleType:
    """A file or a module, which runs it; what lies beside the file, or in the present folder, can be imported too.

    A module that is not there is a ModuleNotFoundError, everything else that goes wrong a CapiError.
    """
    if place.endswith(".py") and not Path(place).is_file():
        raise CapiError(f"there is no file {place}, which should hold Python code")
    try:
        folder = str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd())
        # At the end: the user's files hide no library.
        if folder not in sys.path:
            sys.path.append(folder)
        return _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except CapiError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            raise
        raise CapiError(f"{place} cannot be imported ({in_one_line(error)}): --traceback shows where") from error


def in_one_line(error: Exception) -> str:
    """What an exception of a user's code says."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _module_of_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, by which classes look themselves up: a file torch.py replaces nothing."""
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}_{place}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
