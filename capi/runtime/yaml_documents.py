"""YAML that is read, with limits: no aliases, no tags, no repeated keys, a bounded depth."""

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from capi.errors import CapiError
from capi.runtime.documents import CONFIG_BYTES, DEEPEST, read_text

# libyaml's parser where it is installed: about ten times as fast as the one in Python.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Characters of a number or date. Python needs quadratic time to read long ones in base 60.
_LONGEST_NUMBER = 400
# Keys and values of a document. A config has some hundreds; a list of images belongs into a table.
_MOST_NODES = 20_000
_TEXT = "tag:yaml.org,2002:str"


class _Loader(Composer, _Base):
    """Safe YAML in which 1e-3 is a number. Nodes are put together here, since libyaml's own way has no limits."""

    def __init__(self, text: str) -> None:
        _Base.__init__(self, text)
        Composer.__init__(self)
        self.depth = self.nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            raise _error("aliases and anchors (& and *) are not read: write the value out", event)
        if getattr(event, "tag", None) is not None:
            raise _error(f"tags such as {event.tag[:40]} are not read: leave it out", event)
        if self.depth >= DEEPEST:
            raise _error(f"it is nested deeper than {DEEPEST} levels", event)
        if self.nodes >= _MOST_NODES:
            raise _error(f"it has more than {_MOST_NODES} keys and values", event)
        self.nodes += 1
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | type(None)):
                raise _error("a key must be a text or a number", key_node)
            if key in seen:
                raise _error(f'the key "{str(key)[:60]}" stands twice', key_node)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.tag != _TEXT and len(node.value) > _LONGEST_NUMBER:
            raise _error(f"a number has more than {_LONGEST_NUMBER} digits", node)
        return super().construct_object(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path, *, limit: int = CONFIG_BYTES) -> Any:
    """The value of a YAML file."""
    return parse_yaml(read_text(path, limit=limit), str(path))


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; every error is one sentence that names the source."""
    if len(text) > CONFIG_BYTES:
        raise CapiError(f"{source} has more than {CONFIG_BYTES} characters, which no config needs")
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        # Dates that do not exist are found by Python, after the grammar.
        said = str(error) or type(error).__name__
        raise CapiError(f"{source} is not valid YAML: {' '.join(said.split())}") from error


def _error(message: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=message, problem_mark=place.start_mark)
