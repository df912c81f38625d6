"""Continued pretraining: a run starts with exactly the weights it is given, or says what it could not take."""

import json
import logging
import shutil
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import capi
from capi.api import training
from capi.config.files import load_config, parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.report.draw import load_prototypes
from capi.train import initial_weights
from capi.train.build import build_learner
from capi.train.checkpoint import tensors
from capi.train.initial_weights import Initialized, fingerprint, initialize
from capi.train.step import Learner
from capi.zoo.released import load_released
from tests.conftest import REFERENCE
from tests.photos import noise_photos

State = dict[str, Tensor]


class Seen:
    """An evaluation that keeps what a learner holds, by step."""

    every_steps = 1000

    def __init__(self) -> None:
        self.states: dict[int, State] = {}

    def run(self, learner: Learner, step: int) -> dict[str, float]:
        self.states[step] = {name: value.clone() for name, value in tensors(learner).items()}
        return {}


@pytest.fixture(scope="module", autouse=True)
def _without_curves() -> Iterator[None]:
    """Drawing takes longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "draw_curves", lambda _: None)
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noise_photos(tmp_path_factory.mktemp("images"), size=(32, 24))


TREE: dict[str, Any] = {
    "data": {"image_size": [32, 24], "workers": 0},
    "model": {"width": 32, "depth": 2, "heads": 2, "patch_size": 4, "registers": 4},
    "clustering": {"prototypes": 24},
    "masking": {"predict": 5},
    "optimization": {"batch_size": 6, "steps": 2, "learning_rate": 0.01},
    "run": {"log_steps": 1, "loggers": [], "snapshots": 0, "report": False},
}
# The reference checkpoint's own shape.
AS_RELEASED: dict[str, Any] = {
    "data": {"image_size": [32, 24]},
    "model": {
        "width": 64,
        "depth": 2,
        "heads": 2,
        "patch_size": 8,
        "registers": 8,
        "positions": "released",
        "predictor": {"depth": 2},
    },
    "clustering": {"prototypes": 48},
    "masking": {"predict": 5},
}


def made(changes: dict[str, dict[str, Any]] | None = None, tree: dict[str, Any] = TREE) -> Config:
    changes = changes or {}
    return parse_config({name: tree.get(name, {}) | changes.get(name, {}) for name in {**tree, **changes}})


def filled(config: Config) -> tuple[Learner, Initialized]:
    learner = build_learner(config)
    done = initialize(learner, config)
    assert done is not None
    return learner, done


@pytest.fixture(scope="module")
def run(images: Path, _without_curves: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, whose teacher is not its student."""
    return capi.pretrain(made(), data=images, out=tmp_path_factory.mktemp("runs") / "first", device="cpu").path


def weights_of(state: State, owner: str) -> State:
    return {name.removeprefix(owner): value for name, value in state.items() if name.startswith(owner)}


def assert_equal(weights: State, expected: State) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def begin(config: Config, images: Path, out: Path, **others: Any) -> Seen:
    seen = Seen()
    capi.pretrain(config, data=images, out=out, device="cpu", evaluations=[seen], **others)
    return seen


@pytest.mark.parametrize("kind", ["folder", "safetensors", "released"])
def test__student_and_teacher_start_with_exactly_the_given_weights(
    kind: str, run: Path, images: Path, tmp_path: Path
) -> None:
    source = run if kind == "folder" else capi.export(run, tmp_path / f"encoder.{kind}", format=kind)
    config = made({"init": {"encoder": str(source)}})
    start = begin(config, images, tmp_path / "second").states[0]
    given = capi.load(source).state_dict()
    assert not torch.equal(given["encoder.registers"], capi.load(run, weights="student").encoder.registers)
    assert_equal(weights_of(start, "student."), given)
    assert_equal(weights_of(start, "teacher.average."), given)


def test__a_released_checkpoint_starts_a_run_of_its_shape(reference_checkpoint: Path) -> None:
    learner, done = filled(made({"init": {"encoder": str(reference_checkpoint)}}, AS_RELEASED))
    given = load_released(REFERENCE / "student.pth").state_dict()
    assert_equal(dict(learner.student.state_dict()), given)
    assert_equal(dict(learner.teacher.average.state_dict()), given)
    assert [(part.name, len(part.loaded), part.fits) for part in done.parts] == [
        ("encoder", 3 + 2 * 8, True),
        ("predictor", 1 + 2 * 8, True),
        ("head", 2, True),
    ]
    assert done.notes == (f"prototypes: fresh, since {reference_checkpoint} carries none",)


def test__prototypes_of_a_run_come_along(run: Path) -> None:
    learner, done = filled(made({"init": {"encoder": str(run)}}))
    prototypes = load_prototypes(run)
    assert torch.equal(learner.target.prototypes, prototypes.weight)
    assert torch.equal(learner.target.bias, prototypes.bias)
    part = done.parts[-1]
    assert (part.name, part.loaded, part.parameters, part.fits) == ("prototypes", ("prototypes", "bias"), 24 * 33, True)
    assert done.notes == ()


def test__prototypes_and_head_of_another_number_stay_fresh_and_that_is_reported(run: Path) -> None:
    config = made({"init": {"encoder": str(run)}, "clustering": {"prototypes": 30}})
    learner, done = filled(config)
    fresh = build_learner(config)
    assert torch.equal(learner.target.prototypes, fresh.target.prototypes)
    assert_equal(learner.student.head.state_dict(), fresh.student.head.state_dict())
    head, prototypes = done.parts[-2:]
    assert head.sentence == ("head: 0 tensors with 0 parameters loaded; direction, length fresh (another shape)")
    assert prototypes.misshapen == ("prototypes", "bias")


def test__the_optimizers_train_the_weights_that_were_loaded(run: Path) -> None:
    learner, _ = filled(made({"init": {"encoder": str(run)}}))
    trained = {id(parameter) for group in learner.student_optimizer.param_groups for parameter in group["params"]}
    assert {id(parameter) for parameter in learner.student.parameters()} == trained
    assert not any(parameter.requires_grad for parameter in learner.teacher.parameters())
    assert all(parameter.requires_grad for parameter in learner.student.parameters())


def test__without_init_nothing_is_opened() -> None:
    config = made()
    assert initialize(build_learner(config), config) is None


def test__a_resumed_run_continues_where_it_was_and_needs_no_source(run: Path, images: Path, tmp_path: Path) -> None:
    source = shutil.copytree(run, tmp_path / "source")
    short = {"init": {"encoder": str(source)}, "checkpoint": {"every_steps": 1}}
    begin(made(short), images, tmp_path / "second")
    last = {name: value.clone() for name, value in capi.load(tmp_path / "second").state_dict().items()}
    shutil.rmtree(max((tmp_path / "second" / "checkpoints").iterdir()))
    shutil.rmtree(source)
    seen = begin(made(short), images, tmp_path / "second", resume=True)
    assert list(seen.states) == [2]
    assert_equal(capi.load(tmp_path / "second").state_dict(), last)


def test__a_run_without_a_checkpoint_starts_over_from_the_same_weights(run: Path, images: Path, tmp_path: Path) -> None:
    source = shutil.copytree(run, tmp_path / "source")
    config = made({"init": {"encoder": str(source)}})
    first = begin(config, images, tmp_path / "second")
    shutil.rmtree(tmp_path / "second" / "checkpoints")
    assert_equal(begin(config, images, tmp_path / "second", resume=True).states[0], first.states[0])
    shutil.rmtree(tmp_path / "second" / "checkpoints")
    begin(made({"optimization": TREE["optimization"] | {"learning_rate": 0.02}}), images, source, overwrite=True)
    with pytest.raises(CapiError, match=r"was started from other weights than .*source holds now"):
        begin(config, images, tmp_path / "second", resume=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"positions": "axial"},
            "model.positions is axial and its weights have released: set model.positions=released;",
        ),
        ({"registers": 16}, "model.registers is 16 and its weights have 8: set model.registers=8;"),
        ({"heads": 4}, "set model.heads=2 model.predictor.heads=2 "),
        ({"mlp_ratio": 2.0}, "model.mlp_ratio is 2 and its weights have 4: set model.mlp_ratio=4;"),
        ({"depth": 3}, "weights have 2: set model.depth=2 model.predictor.width=64 model.predictor.depth=2 "),
        ({"predictor": {"depth": 1}}, "set model.predictor.depth=2;"),
        ({"predictor": {"kind": "fused"}}, "set model.predictor.kind=cross;"),
        ({"width": 32}, "set model.width=64"),
        ({"positions": "learned"}, "set model.positions=released;"),
        ({"patch_size": 4}, "set model.patch_size=8; or init.strict=false, which takes what fits; or start with "),
    ],
)
def test__what_does_not_fit_is_refused_with_the_key_to_change(
    model: dict[str, Any], message: str, reference_checkpoint: Path
) -> None:
    changed = {"model": AS_RELEASED["model"] | model, "init": {"encoder": str(reference_checkpoint)}}
    config = made(changed, AS_RELEASED)
    learner = build_learner(config)
    before = fingerprint(tensors(learner))
    with pytest.raises(CapiError) as refused:
        initialize(learner, config)
    assert message in str(refused.value)
    adapting = f"; or start with `capi adapt {reference_checkpoint}`, which resamples the patch embedding"
    ending = "or init.strict=false, which takes what fits" + (adapting if "patch_size" in model else "")
    assert str(refused.value).endswith(ending)
    assert fingerprint(tensors(learner)) == before


def test__learned_positions_of_another_grid_name_the_image_size(images: Path, tmp_path: Path) -> None:
    learned = {"model": TREE["model"] | {"positions": "learned"}}
    source = capi.pretrain(made(learned), data=images, out=tmp_path / "first", device="cpu").path
    config = made(learned | {"data": {"image_size": [40, 24]}, "init": {"encoder": str(source)}})
    with pytest.raises(CapiError, match=r"set data\.image_size=\[32,24\];"):
        filled(config)


def test__a_tensor_that_no_key_explains_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = capi.load(run)
    monkeypatch.setattr(initial_weights, "open_configured_encoder", lambda *_, **__: given)
    given.encoder.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    del given.predictor.mask_token
    config = made({"init": {"encoder": "odd"}})
    with pytest.raises(CapiError, match=r"in its encoder: .*scale left out.*: init\.strict=false takes what fits"):
        initialize(build_learner(config), config)
    del given.encoder.scale
    with pytest.raises(CapiError, match=r"in its predictor: .*mask_token fresh \(not there\)"):
        initialize(build_learner(config), config)


def test__not_strict_takes_what_fits_and_says_the_rest(reference_checkpoint: Path) -> None:
    model = AS_RELEASED["model"] | {"depth": 3, "positions": "axial", "registers": 4}
    changed = {"model": model, "init": {"encoder": str(reference_checkpoint), "strict": False}}
    config = made(changed, AS_RELEASED)
    learner, done = filled(config)
    given, fresh = load_released(REFERENCE / "student.pth").state_dict(), build_learner(config).student.state_dict()
    for name, value in learner.student.state_dict().items():
        is_fresh = name == "encoder.registers" or name.startswith("encoder.blocks.2.")
        assert torch.equal(value, (fresh if is_fresh else given)[name]), name
    assert_equal(learner.teacher.average.state_dict(), learner.student.state_dict())
    encoder = done.parts[0]
    assert encoder.misshapen == ("registers",)
    assert len(encoder.missing) == 8
    assert encoder.sentence.startswith("encoder: 18 tensors with ")
    assert "blocks.2.attention_norm.weight" in encoder.sentence
    assert "and 5 more fresh (not there)" in encoder.sentence
    assert any(note.startswith("model.positions is axial, but these weights") for note in done.notes)


def test__layers_that_the_run_has_not_are_left_out(reference_checkpoint: Path) -> None:
    model = AS_RELEASED["model"] | {"depth": 1}
    changed = {"model": model, "init": {"encoder": str(reference_checkpoint), "strict": False}}
    _, done = filled(made(changed, AS_RELEASED))
    assert len(done.parts[0].extra) == 8
    assert "and 5 more left out (the run has no such tensors)" in done.parts[0].sentence


def test__a_run_that_could_take_nothing_is_refused_all_the_same(reference_checkpoint: Path) -> None:
    config = made({"init": {"encoder": str(reference_checkpoint), "strict": False}})
    with pytest.raises(CapiError, match=r"nothing of .* fits the encoder of the config: .* set model\.width=64"):
        filled(config)


def test__other_statistics_are_reported(run: Path) -> None:
    config = made({"data": TREE["data"] | {"mean": [0.5] * 3, "std": [0.25] * 3}, "init": {"encoder": str(run)}})
    _, done = filled(config)
    assert done.notes == (
        "images are normalized with mean 0.5,0.5,0.5 and std 0.25,0.25,0.25, but these weights learnt from "
        "images normalised with data.mean=[0.485,0.456,0.406] data.std=[0.229,0.224,0.225]",
    )


def test__another_target_keeps_its_own_head(run: Path) -> None:
    learner, done = filled(made({"target": {"kind": "features"}, "init": {"encoder": str(run)}}))
    assert [part.name for part in done.parts] == ["encoder", "predictor", "head"]
    assert (done.parts[2].missing, done.parts[2].extra) == (("weight",), ("direction", "length"))
    assert done.notes == ()
    assert torch.equal(learner.student.encoder.registers, capi.load(run).encoder.registers)


@pytest.mark.parametrize("sentence", ["console", "log"])
def test__what_was_loaded_is_printed_and_recorded(
    sentence: str, run: Path, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "capi")
    written = StringIO()
    console = Console(file=written) if sentence == "console" else None
    begin(made({"init": {"encoder": str(run)}}), images, tmp_path / "second", console=console)
    printed = written.getvalue() if sentence == "console" else "\n".join(caplog.messages)
    count = sum(value.numel() for value in capi.load(run).encoder.state_dict().values())
    digest = fingerprint(capi.load(run).state_dict())
    assert f"starts from {run} (sha256 of its tensors {digest[:16]})" in printed
    assert f"  encoder: 19 tensors with {count:,} parameters loaded\n" in printed
    assert "  prototypes: 2 tensors with 792 parameters loaded" in printed
    record = json.loads((tmp_path / "second" / "run.json").read_text())["init"]
    assert (record["encoder"], record["sha256"]) == (str(run), digest)
    assert record["loaded"]["encoder"] == {"tensors": 19, "parameters": count}
    assert load_config(tmp_path / "second" / "config.yaml").init.encoder == str(run)


def test__a_refused_start_leaves_nothing_behind(run: Path, images: Path, tmp_path: Path) -> None:
    with pytest.raises(CapiError, match=r"set model\.registers=4"):
        begin(
            made({"model": TREE["model"] | {"registers": 8}, "init": {"encoder": str(run)}}),
            images,
            tmp_path / "second",
        )
    assert not (tmp_path / "second").exists()


def test__an_encoder_of_another_kind_is_refused() -> None:
    config = made({"init": {"encoder": "pixels:4"}})
    with pytest.raises(CapiError, match=r"init\.encoder=pixels:4 is a PixelEncoder"):
        initialize(build_learner(config), config)


def test__the_fingerprint_is_of_names_shapes_and_values() -> None:
    state = {"a": torch.arange(6.0), "b": torch.zeros(0, 3), "c": torch.tensor(1.0)}
    assert fingerprint(state) == fingerprint(dict(reversed(state.items())))
    others = [{"a": state["a"].view(2, 3)}, {"a": state["a"] + 1}, {"a": state["a"].half()}, {"d": torch.zeros(1)}]
    assert len({fingerprint(state | other) for other in [{}, *others]}) == 5
