"""Files and folders that describe another model than their weights: told before memory or time is taken for it."""

import json
import re
import resource
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import capi
from capi.models.architecture import Architecture
from tests.cli.conftest import RunHere, assert_refused
from tests.old_runs import unpack_old_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return unpack_old_run(tmp_path)


def refused_at_once(run_here: RunHere, words: list[object], message: str) -> None:
    """The answer comes in one sentence, within seconds, and in little more memory than before."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ran = run_here(*words)
    assert time.monotonic() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
    assert_refused(ran, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("depth", 10**7, "depth"),
        ("width", 10**6, ""),
        ("width", 4 * 10**9, ""),
        ("registers", 10**9, ""),
        ("prototypes", 10**9, ""),
    ],
)
@pytest.mark.parametrize("command", ["export", "extract", "visualize", "resume"])
def test__a_run_whose_config_is_of_another_model(
    run_here: RunHere, run: Path, command: str, key: str, value: int, message: str
) -> None:
    text, changes = re.subn(rf"^  {key}: \d+$", f"  {key}: {value}", (run / "config.yaml").read_text(), flags=re.M)
    assert changes == 1
    (run / "config.yaml").write_text(text)
    words: dict[str, list[object]] = {
        "export": ["export", run],
        "extract": ["extract", run, "photos", "--out", "features.safetensors"],
        "visualize": ["visualize", run, "photos", "--kind", "prototypes", "--out", "pictures"],
        "resume": ["pretrain", run / "config.yaml", "--data", "photos", "--out", run, "--resume"],
    }
    refused_at_once(run_here, words[command], message)


def exported(run: Path, **changes: Any) -> Path:
    """An exported file with other facts about itself."""
    file = capi.export(run, run / "encoder.safetensors", overwrite=True)
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["capi"])
    for key, value in changes.items():
        if key == "capi":
            facts = value
        else:
            facts["config"]["model"][key] = value
    save_file(load_file(file), file, metadata={"capi": facts if isinstance(facts, str) else json.dumps(facts)})
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 10**7}, "depth"),
        ({"width": 10**6}, ""),
        ({"capi": "{"}, "is not valid JSON"),
        ({"capi": "[" * 10**5}, "is nested deeper than"),
        ({"capi": "[]"}, "holds a list, expected an object"),
        ({"capi": {}}, "does not say what its weights belong to"),
        ({"capi": {"config": 3}}, "does not say what its weights belong to"),
        ({"capi": {"architecture": {"depth": 3}}}, 'lacks "width" of the architecture'),
    ],
    ids=str,
)
def test__an_exported_file_that_says_another_model(
    run_here: RunHere, run: Path, changes: dict[str, Any], message: str
) -> None:
    file = exported(run, **changes)
    refused_at_once(run_here, ["extract", file, "photos", "--out", "features.safetensors"], message)


def test__an_exported_file_with_another_description_of_itself(run_here: RunHere, run: Path) -> None:
    facts = json.loads((capi.export(run, "folder", format="transformers") / "config.json").read_text())
    names = [field.name for field in fields(Architecture)]
    for changes, message in (
        ({"depth": 4096}, "has depth=4096, but its weights have 1 block in the encoder"),
        ({"predictor_depth": 4096}, "has predictor_depth=4096, but its weights have 1 block in the predictor"),
        ({"width": 2**20}, "of shape"),
    ):
        (run.parent / "folder" / "config.json").write_text(json.dumps(facts | changes))
        refused_at_once(run_here, ["extract", "folder", "photos", "--out", "features.safetensors"], message)
        architecture = {name: (facts | changes)[name] for name in names}
        file = exported(run, capi={"architecture": architecture, "statistics": {"mean": [0.5] * 3, "std": [0.5] * 3}})
        refused_at_once(run_here, ["extract", file, "photos", "--out", "features.safetensors"], message)
    for statistics in (None, 3, {"mean": [0.5]}, {"mean": [0.5] * 3, "std": [0] * 3}):
        architecture = {name: facts[name] for name in names}
        file = exported(run, capi={"architecture": architecture, "statistics": statistics})
        refused_at_once(run_here, ["extract", file, "photos", "--out", "features.safetensors"], "image_")
