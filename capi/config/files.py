"""Recipes, configs and benchmarks as files: reading, inheriting, overriding, migrating, errors that name the nearest
key.

A benchmark is a name, `DATASET/PROTOCOL`, or YAML with a line `benchmark: DATASET/PROTOCOL` and its options.
"""

import copy
import difflib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from capi.config.benchmarks import PROTOCOL_CONFIGS, BenchmarkConfig
from capi.config.paper import paper_models, paper_recipe
from capi.config.schema import CONFIG_VERSION, Config
from capi.errors import CapiError, expect, nearest, warn_once
from capi.runtime.documents import read_text
from capi.runtime.yaml_documents import parse_yaml, read_yaml

Tree = dict[str, Any]
Recipe = str | Path | Config
Overrides = Iterable[str] | Mapping[str, Any]
AnySection = TypeVar("AnySection", bound=BaseModel)
FILE_ENDINGS = (".yaml", ".yml")

_LOG = logging.getLogger("capi")
# Far more than any config needs.
_DEEPEST, _MOST_EXTENDED = 10, 20

_OLD_NAMES = "{} has names of an earlier version ({}), which are read as today's"
# What a file without a version is taken for.
FIRST_VERSION = 1
# The last version with names that are spelt otherwise now.
_BRITISH = 3


def _name_benchmarks(tree: Tree) -> Tree:
    """Version 1 knew k-NN classification alone; version 2 names a benchmark and its options."""
    if not isinstance(tree.get("evaluations"), list):
        return tree
    return tree | {"evaluations": [_as_benchmark(old) for old in tree["evaluations"]]}


def _as_benchmark(old: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(old.get("data"), str):
        return old
    data = old["data"]
    dataset = "demo" if data == "demo" else "csv" if data.lower().endswith(".csv") else "folder"
    options = {"tests": [old.get("split", "val")], "neighbours": [old.get("neighbours", 10)], "votes": ["majority"]}
    options["features"] = [old.get("feature", "mean_patch")]
    if dataset != "demo":
        options["data"] = data
    if dataset == "csv" and "label" in old:
        options["label"] = old["label"]
    moved = ("data", "split", "neighbours", "feature", "label")
    return {"benchmark": f"{dataset}/knn", "options": options} | {k: v for k, v in old.items() if k not in moved}


def _name_positions(tree: Tree) -> Tree:
    """Version 2 knew rotary positions alone, under the key model.rope; version 3 has model.positions."""
    model = tree.get("model")
    if not isinstance(model, dict) or "rope" not in model:
        return tree
    return tree | {"model": {"positions" if key == "rope" else key: value for key, value in model.items()}}


def _spell_american(tree: Tree) -> Tree:
    """Version 3 spelt some keys and a value the British way."""
    tree = copy.deepcopy(tree)
    head = tree.get("target")
    head = head.get("ema_head") if isinstance(head, dict) else None
    if isinstance(head, dict):
        if "centre_momentum" in head:
            head["center_momentum"] = head.pop("centre_momentum")
        if head.get("balance") == "centring":
            head["balance"] = "centering"
    evaluations = tree.get("evaluations")
    for evaluation in evaluations if isinstance(evaluations, list) else []:
        options = evaluation.get("options") if isinstance(evaluation, dict) else None
        if isinstance(options, dict) and "neighbours" in options:
            options["neighbors"] = options.pop("neighbours")
    return tree


# Keys of older versions, which people remember.
_RENAMED = {
    "model.rope": "model.positions",
    "target.ema_head.centre_momentum": "target.ema_head.center_momentum",
    "neighbours": "neighbors",
}
# How alike two names of keys must be, and what it counts that they stand in the same section: less than a letter.
_LEAST_LIKENESS, _SAME_SECTION = 0.6, 0.09

# From version to the function that lifts a config to the next one.
MIGRATIONS: dict[int, Callable[[Tree], Tree]] = {
    1: _name_benchmarks,
    2: _name_positions,
    3: _spell_american,
}


def recipe_names() -> list[str]:
    """The recipes that come with the package as files; those of the paper's models are in `paper_models`."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


def load_config(recipe: str | Path, overrides: Overrides = (), **sections: Any) -> Config:
    """The config of a recipe by name, or of a YAML file by path.

    Overrides are text of the form `key.sub=value`, or a dict: `{"optimization.steps": 3}`, `{"optimization": {"steps":
    3}}`. Sections may also be given by name: `load_config("tiny4", optimization={"steps": 3}, seed=1)`.
    """
    return parse_config(recipe_tree(str(recipe)), override_texts(overrides, sections), source=str(recipe))


def as_config(recipe: Recipe, overrides: Overrides = ()) -> Config:
    """A config as it is, or that of a recipe with overrides."""
    if not isinstance(recipe, Config):
        return load_config(recipe, overrides)
    if override_texts(overrides):
        raise CapiError("overrides go with a recipe; a Config is already complete")
    return recipe


def parse_config(tree: Tree, overrides: Iterable[str] = (), *, source: str = "the config") -> Config:
    """A config from plain values: migrated to the present version, overridden, checked."""
    return validated(Config, overridden(migrate(_mapping(tree, source), source), overrides), source)


def _mapping(tree: Any, source: str) -> Tree:
    if not isinstance(tree, dict):
        held = "is empty" if tree is None else f"holds a {type(tree).__name__}"
        raise CapiError(f"{source} must hold a mapping of sections such as `model:`, but {held}")
    return tree


def override_texts(overrides: Overrides, values: Mapping[str, Any] | None = None) -> list[str]:
    """Overrides in any form, and further values by key, as text of the form `key.sub=value`."""
    if isinstance(overrides, str):
        return [overrides, *_texts(values or {})]
    return [*(_texts(overrides) if isinstance(overrides, Mapping) else overrides), *_texts(values or {})]


def _texts(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        # An empty dict is a value; another one a section.
        if isinstance(value, Mapping) and value:
            yield from _texts(value, f"{prefix}{key}.")
        else:
            plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
            yield f"{prefix}{key}={json.dumps(plain, default=str, ensure_ascii=False)}"


def overridden(tree: Tree, overrides: Overrides, *, example: str = "model.depth=6") -> Tree:
    """Plain values with overrides; what has another form than `key.sub=value` is shown the example."""
    for override in override_texts(overrides):
        expect("an override", override, str, f'text of the form key=value, such as "{example}"')
        key, value = _parse_override(override, example)
        tree = merge(tree, _nested(key.split("."), value))
    return tree


def validated(kind: type[AnySection], tree: Tree, source: str) -> AnySection:
    """Plain values as a section, or an error that names the first one that does not fit."""
    try:
        # Strict JSON: a number does not pass for a string, nor the reverse, but a list may fill a pair.
        return kind.model_validate_json(_to_json(tree, source))
    except ValidationError as error:
        raise CapiError(f"{source}: {_explain(error, kind)}") from error


def dump_config(config: Config) -> str:
    """The whole config as YAML, every value written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def differences(before: Config, after: Config, free: Iterable[str] = ()) -> list[str]:
    """What differs, a line for each key; keys that are free, or lie in a section that is, do not count."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    spared = tuple(free)
    return [
        f"{key} was {json.dumps(old.get(key))}, is {json.dumps(new.get(key))}"
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key) and not any(key == prefix or key.startswith(f"{prefix}.") for prefix in spared)
    ]


def _flat(tree: Tree, prefix: str = "") -> Tree:
    flat: Tree = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def recipe_text(name: str) -> str:
    """The file of a recipe as it stands, or what a model of the paper would have in one."""
    path = _recipe_path(name)
    if path is None:
        return paper_recipe(name)
    return read_text(path) if isinstance(path, Path) else str(path.read_text(encoding="utf-8"))


def recipe_title(name: str) -> str:
    """The first line of a recipe's opening comment."""
    return recipe_text(name).splitlines()[0].removeprefix("#").strip()


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Tree:
    """`base` with the values of `changes`, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def migrate(tree: Tree, source: str) -> Tree:
    """Lift an older config to the present version; a newer one is refused."""
    version = tree.get("version", FIRST_VERSION)
    if not isinstance(version, int) or isinstance(version, bool):
        raise CapiError(f"{source}: version must be a whole number, not {version!r}")
    if version > CONFIG_VERSION:
        raise CapiError(
            f"{source} has config version {version}, but this capi knows versions up to {CONFIG_VERSION}: install a "
            "newer capi"
        )
    for number in range(version, CONFIG_VERSION):
        if number not in MIGRATIONS:
            raise CapiError(f"{source} has config version {version}, which this capi can no longer read")
        older, tree = tree, MIGRATIONS[number](tree) | {"version": number + 1}
        if number == _BRITISH and {**older, "version": number + 1} != tree:
            warn_once(_OLD_NAMES.format(source, "centre_momentum, centring or neighbours"))
    return tree | {"version": CONFIG_VERSION}


def recipe_tree(name: str, seen: tuple[str, ...] = ()) -> Tree:
    """A recipe with what it extends filled in."""
    if name in seen:
        raise CapiError(f"recipe {name} extends itself: {' -> '.join((*seen, name))}")
    if len(seen) > _MOST_EXTENDED:
        raise CapiError(f"recipe {seen[0]} extends more than {_MOST_EXTENDED} others, one after the other")
    tree = _mapping(parse_yaml(recipe_text(name), name), name)
    base = tree.pop("extends", None)
    # Before the merge: a file and what it extends may be of different versions.
    tree = migrate(tree, name)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise CapiError(f"{name}: extends must be the name of a recipe, not {base!r}")
    if base.endswith(FILE_ENDINGS):
        base = os.path.normpath(Path(name).parent / base)
    return merge(recipe_tree(base, (*seen, name)), tree)


def _recipe_path(name: str) -> Any:
    """Where a recipe lies; None for a model of the paper, which has no file of its own."""
    if name.endswith(FILE_ENDINGS):
        if not _is_file(Path(name)):
            raise CapiError(f"there is no file {name}: give a recipe's name or the path of a YAML file")
        return Path(name)
    if name in recipe_names():
        return _folder() / f"{name}.yaml"
    if name in paper_models():
        return None
    close = nearest(name, [*recipe_names(), *paper_models()])
    raise CapiError(f'there is no recipe "{name}"{close} (`capi recipes` lists them; a file must end in .yaml)')


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # A name that no file can have.
        return False


def _folder() -> Any:
    return resources.files("capi.config") / "recipes"


def _parse_override(override: str, example: str) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")) or key.count(".") > _DEEPEST:
        data = f", or did you mean --data {override}?" if os.path.isdir(override) else ""
        raise CapiError(f'"{override}" is not an override: expected key=value, such as {example}{data}')
    if key == "version":
        raise CapiError("version is the format of the file that is read, and cannot be overridden")
    return key, parse_yaml(value, f'the value of "{override}"')


def _nested(path: list[str], value: Any) -> Tree:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


def _to_json(tree: Tree, source: str) -> str:
    try:
        return json.dumps(tree)
    except (TypeError, ValueError, RecursionError) as error:
        # A value may hold itself, by an anchor of YAML.
        raise CapiError(f"{source} holds a value that is not a number, text, list or section: {error}") from error


def _explain(error: ValidationError, root: type[BaseModel]) -> str:
    """The first complaint in one sentence, with the path of the key."""
    # A misspelt key is also missing under its right name; the misspelling says more.
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    # Within a choice of types pydantic adds the type's name to the path; the key ends before it.
    path = [str(part) for part in first["loc"]]
    fields, section = _split_path(path, root)
    key = ".".join(fields)
    if first["type"] == "extra_forbidden":
        return f'there is no key "{key}"{_nearest_key(fields, section, root)}'
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    about_key = [each for each in error.errors() if [str(part) for part in each["loc"]][: len(fields)] == fields]
    # A list whose only entry does not fit is also called too short, though it is not.
    options = [
        _wording(each, alone=len(about_key) == 1)
        for each in about_key
        if not (each["type"] == "too_short" and len(each["input"]) >= each["ctx"]["min_length"])
    ]
    return f"{key} = {json.dumps(first['input'])} does not fit: {', or '.join(dict.fromkeys(options))}"


def _wording(complaint: ErrorDetails, *, alone: bool) -> str:
    """A complaint in words of ours where pydantic's speak of Python or JSON."""
    kind, place = complaint["type"], complaint["loc"][-1]
    if kind in {"tuple_type", "list_type"}:
        if not alone:
            return "input should be a list"
        # A single value may have been meant as a list of one.
        single = isinstance(complaint["input"], str | int | float)
        return "expected a list" + (
            f", so write [{json.dumps(complaint['input'])}]" if single else " in square brackets"
        )
    if kind == "too_short":
        return f"expected a list of at least {complaint['ctx']['min_length']}"
    if kind == "missing" and isinstance(place, int):
        return f"input should be a list of at least {place + 1}"
    return complaint["msg"][:1].lower() + complaint["msg"][1:]


def _split_path(path: list[str], root: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The part of an error's path that names sections and a key, and the section it ends in."""
    section = root
    fields: list[str] = []
    for part in path:
        fields.append(part)
        if part.isdigit():
            # The number of an entry of a list, whose section is already known.
            continue
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        annotation = get_args(annotation)[0] if get_origin(annotation) is list else annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        section = annotation
    return fields, section


def _nearest_key(fields: list[str], section: type[BaseModel], root: type[BaseModel]) -> str:
    """The key that was most likely meant, by its own name: of the same section, or of another that has it."""
    if renamed := _RENAMED.get(".".join(fields)):
        return f'; it is called "{renamed}" now'
    prefix = "".join(f"{field}." for field in fields[:-1])
    here = [prefix + name for name in section.model_fields]

    def closeness(path: str) -> float:
        # Of keys with the same name the one nearest to the root is meant.
        return (
            _likeness(fields[-1], path.rsplit(".", maxsplit=1)[-1])
            + _SAME_SECTION * (path in here)
            - 1e-3 * path.count(".")
        )

    best = max([*here, *_all_keys(root)], key=closeness)
    if closeness(best) < _LEAST_LIKENESS:
        return f"; {prefix.rstrip('.') or 'a config'} has the keys {', '.join(section.model_fields)}"
    return f'; did you mean "{best}"?'


def nearest_key(word: str, section: type[BaseModel]) -> tuple[float, str]:
    """How alike the name of a key is to a word, and that key with its sections; of several the one nearest to the root,
    and of these that of the optimisers."""
    keys = sorted(_all_keys(section), key=lambda key: (key.count("."), not key.startswith("optimization.")))
    best = max(keys, key=lambda key: _likeness(word, key.rsplit(".", maxsplit=1)[-1]))
    return _likeness(word, best.rsplit(".", maxsplit=1)[-1]), best


def _likeness(given: str, name: str) -> float:
    """From 0 to 1: how much of two names is alike. A beginning or the initials (lr) are as good as a small mistake."""
    beginning = len(given) > 2 and name.startswith(given)
    initials = len(given) > 1 and given == "".join(word[0] for word in name.split("_"))
    return max(difflib.SequenceMatcher(None, given, name).ratio(), 0.8 * (beginning or initials))


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _all_keys(field.annotation, f"{prefix}{name}.")


# An option that all benchmarks have, for messages.
EXAMPLE = "image_size=448"


def load_benchmark(
    benchmark: str | Path, overrides: Iterable[str] = (), options: Mapping[str, Any] | None = None
) -> BenchmarkConfig:
    """The config of a benchmark; `options` are plain values, `overrides` have the form `key=value`."""
    name = str(benchmark)
    tree: dict[str, Any] = {"benchmark": name}
    if name.endswith(FILE_ENDINGS):
        tree = _read(Path(name))
    tree = overridden(tree | dict(options or {}), overrides, example=EXAMPLE)
    if "neighbours" in tree:
        tree["neighbors"] = tree.pop("neighbours")
        warn_once(_OLD_NAMES.format(name, "neighbours"))
    dataset, protocol = split_name(tree.pop("benchmark"), name)
    for key in ("dataset", "protocol"):
        if key in tree:
            raise CapiError(f"{name}: {key} cannot be given beside the benchmark: the benchmark's name says it")
    for key in tree:
        if owners := protocols_with(key, but=[protocol]):
            raise CapiError(f"{name}: {key} is an option of {owners}, not of {protocol}: leave it out")
    return validated(PROTOCOL_CONFIGS[protocol], {"dataset": dataset} | tree, name)


def as_benchmark(benchmark: str | Path | BenchmarkConfig, overrides: Iterable[str] = ()) -> BenchmarkConfig:
    """A config as it is, or that of a name or file with overrides."""
    if not isinstance(benchmark, BenchmarkConfig):
        return load_benchmark(benchmark, overrides)
    if list(overrides):
        raise CapiError("overrides go with the name of a benchmark; a BenchmarkConfig is already complete")
    return benchmark


def protocols_with(key: str, *, but: Iterable[str]) -> str:
    """The protocols that have an option which none of these has; empty where they have it, or nobody has."""
    if any(key in PROTOCOL_CONFIGS[name].model_fields for name in but):
        return ""
    return " and ".join(name for name, config in PROTOCOL_CONFIGS.items() if key in config.model_fields)


def split_name(chosen: object, source: str) -> tuple[str, str]:
    """Data set and protocol of a benchmark's name."""
    if not isinstance(chosen, str) or chosen.count("/") != 1 or not all(chosen.split("/")):
        raise CapiError(
            f'{source}: "{chosen}" is no benchmark: expected DATASET/PROTOCOL, such as demo/knn, with one of the '
            f"protocols {', '.join(PROTOCOL_CONFIGS)}, or the path of a YAML file"
        )
    dataset, protocol = chosen.split("/")
    if protocol not in PROTOCOL_CONFIGS:
        protocols = ", ".join(PROTOCOL_CONFIGS)
        raise CapiError(
            f'{source}: there is no protocol "{protocol}"{nearest(protocol, PROTOCOL_CONFIGS)} (there are {protocols})'
        )
    return dataset, protocol


def _read(path: Path) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise CapiError(f"there is no file {path}: give DATASET/PROTOCOL, or the path of a YAML file")
    tree = read_yaml(path)
    if not isinstance(tree, dict) or "benchmark" not in tree:
        raise CapiError(f"{path} must hold a line `benchmark: DATASET/PROTOCOL` and options, one a line")
    return tree
