"""The reference pages, written from the code: config keys, benchmark options, commands, the Python API."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.cli import get_docs_for_click
from typer.main import get_command

import capi
import capi.cli
from capi.cli.app import app
from capi.config.benchmarks import PROTOCOL_CONFIGS
from capi.config.schema import Config
from capi.method.masking import MASKS
from capi.method.registry import TARGETS
from capi.models.heads import HEADS
from capi.models.positions import POSITIONS
from capi.models.predictor import PREDICTORS
from capi.train.build import OPTIMIZERS
from capi.train.metrics import LOGGERS


def write(folder: Path) -> None:
    """All pages of the reference."""
    folder.mkdir(exist_ok=True)
    pages = {"config.md": config(), "benchmarks.md": benchmarks(), "commands.md": commands(), "python.md": python()}
    for name, text in pages.items():
        path = folder / name
        # A page that did not change is not built again.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def config() -> str:
    """Every key of a run's config, a table for each section."""
    lines = [
        "# Config keys",
        "",
        "A recipe is a YAML file of these keys; `section.key=value` on the command line changes one. A key that is not",
        "there is an error that names its nearest neighbor. `capi recipes show NAME` prints the values of a recipe.",
    ]
    for path, section in _sections(Config, ""):
        lines += [f"## `{path}`" if path else "## At the top", "", inspect.getdoc(section) or "", ""]
        lines += [*_table(section, path), ""]
        for name in section.model_fields:
            lines += _components(f"{path}.{name}")
    return "\n".join(lines)


# What keys of the config name.
COMPONENTS: dict[str, Mapping[str, Any]] = {
    "target.kind": TARGETS,
    "masking.kind": MASKS,
    "model.predictor.kind": PREDICTORS,
    "model.positions": POSITIONS,
    "model.head": HEADS,
    "optimization.optimizer": OPTIMIZERS,
    "run.loggers": LOGGERS,
}


def _components(key: str) -> list[str]:
    """The components that a key names, with what each says of itself."""
    if key not in COMPONENTS:
        return []
    lines = []
    for name, component in COMPONENTS[key].items():
        first = (inspect.getdoc(component) or "").split("\n\n")[0]
        asked = getattr(component, "description", None)
        lines.append(f"- `{name}`: {' '.join((f'it asks for {asked}. {first}' if asked else first).split())}")
    return [f"`{key}` names one of:", "", *lines, ""]


def benchmarks() -> str:
    """Every option of an evaluation, a table for each protocol."""
    lines = [
        "# Benchmark options",
        "",
        "`capi evaluate MODEL DATASET/PROTOCOL key=value ...` and `capi compare` take these. `capi datasets` lists the",
        "data sets. What departs from the paper's protocol is written into the results.",
        "",
    ]
    for name, protocol in sorted(PROTOCOL_CONFIGS.items()):
        lines += [f"## `{name}`", "", inspect.getdoc(protocol) or "", "", *_table(protocol, ""), ""]
    return "\n".join(lines)


def commands() -> str:
    """Every command with its options, by typer's own tool."""
    command = get_command(app)
    _show_summaries_whole(command)
    text = get_docs_for_click(obj=command, ctx=click.Context(command, info_name="capi"), name="capi")
    return text.replace("# `capi`", "# Commands", 1).replace("```console", "```text")


def _show_summaries_whole(group: click.Command) -> None:
    """Lists of commands have the first paragraph of each; click would cut it after 45 letters."""
    for command in getattr(group, "commands", {}).values():
        command.short_help = " ".join((command.help or "").split("\n\n")[0].split())
        _show_summaries_whole(command)


def python() -> str:
    """The public names, documented by their docstrings."""
    lines = ["# Python", "", "Names are imported when they are first used, so that `import capi` costs nothing.", ""]
    for name in sorted(capi.__all__, key=str.lower):
        value = getattr(capi, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            kind = "autoclass" if inspect.isclass(value) else "autofunction"
            lines += [f"## `capi.{name}`", "", "```{eval-rst}", f".. {kind}:: capi.{name}", "```", ""]
    return "\n".join(lines)


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """A section, then those inside it, with their paths."""
    yield path, model
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            yield from _sections(inner, f"{path}.{name}" if path else name)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for part in (annotation, *get_args(annotation)):
        if inspect.isclass(part) and issubclass(part, BaseModel):
            return part
    return None


def _table(model: type[BaseModel], path: str) -> list[str]:
    """Key, type, default and meaning of the plain values of a section."""
    # On a narrow screen the style of the class stacks the cells of a row.
    rows = ["```{table}", ":class: keys", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            continue
        key = f"{path}.{name}" if path else name
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{key}` | {_cell(_type(field.annotation))} | {_default(field)} | {_cell(meaning)} |")
    return [*rows, "```"]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if field.is_required():
        return "required"
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    """A default as YAML has it; 4/3 with five digits."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.5g}" if isinstance(value, float) and len(repr(value)) > 10 else str(value)


def _type(annotation: Any) -> str:
    """An annotation as someone who writes YAML would say it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    words = {int: "integer", float: "number", bool: "true or false", str: "text", dict: "mapping", Any: "any"}
    if origin is Annotated:
        text = _type(parts[0])
    elif origin is Literal:
        text = ", ".join(f"`{part}`" for part in parts)
    elif origin in {Union, UnionType}:
        text = " or ".join("null" if part is NoneType else _type(part) for part in parts)
    elif origin in {tuple, list}:
        text = "list of " + " and ".join(dict.fromkeys(_type(part) for part in parts if part is not Ellipsis))
    elif inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        text = "section"
    else:
        text = words.get(origin or annotation, str(annotation))
    return text
