"""Benchmarks by name or file: `DATASET/PROTOCOL`, or YAML with a line `benchmark: DATASET/PROTOCOL` and its options."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from capi.config.benchmarks import PROTOCOLS, BenchmarkConfig
from capi.config.loading import FILE_ENDINGS, overridden, validated
from capi.errors import CapiError, nearest
from capi.runtime.documents import read_yaml

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
    dataset, protocol = split_name(tree.pop("benchmark"), name)
    for key in ("dataset", "protocol"):
        if key in tree:
            raise CapiError(f"{name}: {key} cannot be given beside the benchmark: the benchmark's name says it")
    for key in tree:
        if owners := protocols_with(key, but=[protocol]):
            raise CapiError(f"{name}: {key} is an option of {owners}, not of {protocol}: leave it out")
    return validated(PROTOCOLS[protocol], {"dataset": dataset} | tree, name)


def as_benchmark(benchmark: str | Path | BenchmarkConfig, overrides: Iterable[str] = ()) -> BenchmarkConfig:
    """A config as it is, or that of a name or file with overrides."""
    if not isinstance(benchmark, BenchmarkConfig):
        return load_benchmark(benchmark, overrides)
    if list(overrides):
        raise CapiError("overrides go with the name of a benchmark; a BenchmarkConfig is already complete")
    return benchmark


def protocols_with(key: str, *, but: Iterable[str]) -> str:
    """The protocols that have an option which none of these has; empty where they have it, or nobody has."""
    if any(key in PROTOCOLS[name].model_fields for name in but):
        return ""
    return " and ".join(name for name, config in PROTOCOLS.items() if key in config.model_fields)


def split_name(chosen: object, source: str) -> tuple[str, str]:
    """Data set and protocol of a benchmark's name."""
    if not isinstance(chosen, str) or chosen.count("/") != 1 or not all(chosen.split("/")):
        raise CapiError(
            f'{source}: "{chosen}" is no benchmark: expected DATASET/PROTOCOL, such as demo/knn, with one of the '
            f"protocols {', '.join(PROTOCOLS)}, or the path of a YAML file"
        )
    dataset, protocol = chosen.split("/")
    if protocol not in PROTOCOLS:
        known = ", ".join(PROTOCOLS)
        raise CapiError(
            f'{source}: there is no protocol "{protocol}"{nearest(protocol, PROTOCOLS)} (there are {known})'
        )
    return dataset, protocol


def _read(path: Path) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise CapiError(f"there is no file {path}: give DATASET/PROTOCOL, or the path of a YAML file")
    tree = read_yaml(path)
    if not isinstance(tree, dict) or "benchmark" not in tree:
        raise CapiError(f"{path} must hold a line `benchmark: DATASET/PROTOCOL` and options, one a line")
    return tree
