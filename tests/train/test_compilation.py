"""Compiled networks beside plain ones, and what happens where nothing can be compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from capi.config.files import load_config, parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.method.pixel_targets import PixelTargets
from capi.method.registry import TARGETS
from capi.train.build import build_learner
from capi.train.compilation import Compiled, compile_networks, wants_compiling
from capi.zoo.run_folder import WALL_CLOCK, read_metrics
from tests.photos import noise_photos
from tests.train.compiled_driver import CASES


def driven(backend: str, *names: str) -> tuple[dict[str, dict[str, Any]], str]:
    """What the driver found, and what it wrote to the log."""
    command = [sys.executable, "-m", "tests.train.compiled_driver", backend, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


QUICK = ("stochastic", "queued")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CASES]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Traced and differentiated as by any backend, and then carried out as it is."""
    wanted = {item.callspec.params["name"] for item in request.session.items if "compiled" in item.fixturenames}  # type: ignore[attr-defined]
    return driven("aot_eager", *wanted)[0]


@pytest.mark.parametrize("name", EACH)
def test__blocks_heads_and_slices_are_compiled_whole(compiled: dict[str, dict[str, Any]], name: str) -> None:
    assert compiled[name]["breaks"] == {}
    # Blocks of the teacher, the encoder and the predictor, and a head, however deep the networks are; and a slice of
    # the clustering, once more where a queue makes it longer.
    networks = compiled[name]["graphs"] - compiled[name]["clusters"]
    assert 4 <= networks <= (7 if name == "queued" else 5)
    assert set(compiled[name]["copies"]) <= {"method", "partial"}


@pytest.mark.parametrize("name", EACH)
def test__compiled_networks_learn_what_plain_ones_do(compiled: dict[str, dict[str, Any]], name: str) -> None:
    assert compiled[name]["moved"] > 1e-2
    assert compiled[name]["distance"] < 1e-3 * compiled[name]["moved"]
    assert compiled[name]["target_distance"] <= 1e-3 * compiled[name]["target_moved"]


def test__a_slice_of_several_processes_is_one_graph() -> None:
    records = driven("aot_eager", "slice")[0]["slice"]
    assert records["breaks"] == {}
    assert records["graphs"] == 1
    compiled, plain = records["losses"]
    assert compiled == pytest.approx(plain, rel=1e-5)


@pytest.mark.thorough
def test__code_of_the_default_compiler_learns_the_same() -> None:
    records = driven("inductor", "plain", "parts", "stochastic")[0]
    assert all(case["distance"] < 1e-3 * case["moved"] for case in records.values())


def test__a_compiler_that_fails_at_a_step_is_reported_once_and_changes_nothing() -> None:
    records, log = driven("broken", "plain")
    assert records["plain"]["distance"] == 0
    assert log.count("torch.compile does not work here (OSError: the compiler is not there)") == 1


def test__functions_that_a_target_names_are_compiled_beside_the_networks(
    small_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fast(PixelTargets):
        compiled: ClassVar = {"make": {}}

    monkeypatch.setitem(TARGETS, "fast", Fast)
    for kind, names in (("fast", {"make"}), ("clustering", {"cluster_slice"}), ("pixels", set[str]())):
        target = small_config.target.model_copy(update={"kind": kind})
        learner = build_learner(small_config.model_copy(update={"target": target}))
        compile_networks(learner, backend="eager")
        assert {name for name, value in vars(learner.target).items() if isinstance(value, Compiled)} == names


@pytest.mark.thorough
def test__without_a_compiler_a_run_says_so_before_its_first_step_and_trains(
    small_config: Config, tmp_path: Path
) -> None:
    images = noise_photos(tmp_path / "images", size=(32, 24))
    sizes = ["data.image_size=16", "model.width=16", "model.heads=1", "model.depth=1", "optimization.batch_size=4"]
    options = [
        *sizes,
        "optimization.steps=2",
        "run.log_steps=1",
        "run.report=false",
        "run.snapshots=0",
        "data.workers=0",
    ]
    records = []
    for switch in ("on", "off"):
        out = tmp_path / switch
        command = ["-m", "capi", "pretrain", "tiny4", "--data", str(images), "--out", str(out), "--device", "cpu"]
        missing = {"CXX": "/no/compiler", "CC": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code")}
        done = subprocess.run(
            [sys.executable, *command, *options, f"run.compile={switch}"],
            env=os.environ | missing,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = " ".join((done.stdout + done.stderr).split())
        assert said.count("torch.compile does not work here") == (switch == "on")
        assert ("CXX names it" in said) == (switch == "on")
        assert "Traceback" not in said
        records.append(
            [
                {key: record[key] for key in record if key not in WALL_CLOCK}
                for record in read_metrics(out / "metrics.jsonl")
            ]
        )
    assert records[0] == records[1]


def test__the_switch_may_be_a_boolean_and_is_on_by_itself_for_cuda(small_config: Config) -> None:
    assert small_config.run.compile == "auto"
    for given, meant in {"on": "on", "true": "on", "off": "off", "false": "off", "auto": "auto"}.items():
        assert load_config("tiny4", [f"run.compile={given}"]).run.compile == meant
    tree = small_config.model_dump(mode="json")
    for value in (True, False):
        assert parse_config(tree | {"run": tree["run"] | {"compile": value}}).run.compile == ("on" if value else "off")
    with pytest.raises(CapiError, match=r"run\.compile.*auto"):
        load_config("tiny4", ["run.compile=[1]"])
    for kind, automatic in (("cuda", True), ("cpu", False), ("mps", False)):
        assert wants_compiling("auto", torch.device(kind)) is automatic
        assert wants_compiling("on", torch.device(kind))
        assert not wants_compiling("off", torch.device(kind))
