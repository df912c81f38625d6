"""Adapting: a run starts from any encoder, changes as much of it as it is asked to, and needs the source no more."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import capi
from capi.api import training
from capi.api.training import adapted_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.method.masking import PatchGrid
from capi.models.costs import ActivationPolicy, Counts
from capi.models.low_rank import LowRank
from capi.train.build import build_learner, build_networks, mask_sampler, masked_batch
from capi.train.checkpoint import Checkpoints, tensors
from capi.train.cost.activations import student_activations
from capi.train.initial_weights import fitted_patches, initialize
from capi.train.step import Learner, train_step
from capi.types import Features
from capi.zoo.baselines.registry import BASELINES
from tests.conftest import REFERENCE
from tests.photos import noise_photos
from tests.train.test_activations import kept_by_autograd
from tests.zoo.baseline_checkpoints import assert_same, images, original, random_model, small

TINY = [
    *("optimization.batch_size=4", "optimization.steps=8", "clustering.prototypes=8", "masking.predict=4"),
    *("run.log_steps=1", "run.loggers=[]", "run.snapshots=0", "run.report=false", "data.workers=0"),
]
FAMILIES = ("dinov2_reg_vitl14", "mae_vitl16", "beit_vitl16", "ijepa_vith14_in1k", "dinov3_vitl16", "data2vec2_vitl16")


@pytest.fixture(scope="module", autouse=True)
def _tiny_baselines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "draw_curves", lambda _: None)
        for name in (*FAMILIES, "aim_600m"):
            patch.setitem(BASELINES, name, small(name))
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noise_photos(tmp_path_factory.mktemp("photos"), size=(24, 24))


def source(name: str, folder: Path) -> str:
    """A checkpoint of a tiny model as its authors write it."""
    baseline = BASELINES[name]
    state: Any = original(baseline, random_model(baseline))
    for place in reversed(baseline.layout.part(None).places[0]):
        state = {place: state}
    torch.save(state, folder / f"{name}.pth")
    return f"baseline:{name}={folder / name}.pth"


def started_learner(config: Config) -> Learner:
    learner = build_learner(config)
    assert initialize(learner, config) is not None
    return learner


def trained(learner: Learner, config: Config, steps: int, first: int = 0) -> Learner:
    for step in range(first, first + steps):
        x = images(count=4) if config.grid == (5, 5) else torch.randn(4, 3, *config.data.height_and_width)
        train_step(learner, [masked_batch(config, x, step)], step)
    return learner


def state_of(learner: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in learner.student.encoder.state_dict().items()}


@pytest.mark.parametrize("name", FAMILIES)
def test__student_and_teacher_start_from_the_weights_and_both_learn(name: str, tmp_path: Path) -> None:
    model = source(name, tmp_path)
    config, expected, x = adapted_config(model, TINY), capi.load(model), images()
    learner = started_learner(config)
    for weights in ("teacher", "student"):
        assert_same(learner.as_encoder(weights)(x), expected(x))
    moved = trained(learner, config, 3).as_encoder()(x).feature_map
    assert (moved - expected(x).feature_map).abs().max() > 1e-6


def test__a_model_of_our_own_is_a_source_too() -> None:
    model, x = str(REFERENCE / "student.pth"), torch.randn(2, 3, 32, 24)
    config = adapted_config(model, [*TINY, "data.image_size=[32,24]", "clustering.prototypes=16"])
    expected: Features = capi.load(model)(x)
    features = started_learner(config).as_encoder()(x)
    torch.testing.assert_close(features.feature_map, expected.feature_map)
    torch.testing.assert_close(features.registers, expected.registers)


def test__the_optimizer_is_adamw_whatever_the_recipe_has_unless_an_override_names_one(tmp_path: Path) -> None:
    model = source("dinov2_reg_vitl14", tmp_path)
    for recipe in ("small", "vits16_gpu", "adapt"):
        assert adapted_config(model, TINY, recipe=recipe).optimization.optimizer == "adamw", recipe
        chosen = adapted_config(model, [*TINY, "optimization.optimizer=muon"], recipe=recipe)
        assert chosen.optimization.optimizer == "muon", recipe


@pytest.mark.parametrize("more", [["model.predictor.kind=fused"], ["target.kind=features"]], ids=str)
@pytest.mark.parametrize("name", ["dinov2_reg_vitl14", "our own"])
def test__other_predictors_and_targets_leave_an_encoder_that_goes_back(
    name: str, more: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The released layout of our own has no place for them; `capi.load` reads what is written in its place."""
    ours = name == "our own"
    model = str(REFERENCE / "student.pth") if ours else source(name, tmp_path)
    config = adapted_config(model, [*TINY, *more, "adapt.frozen_share=0", "data.image_size=24"])
    learner = started_learner(config)
    for step in range(2):
        train_step(learner, [masked_batch(config, torch.randn(4, 3, 24, 24), step)], step)
    written = capi.export(learner, tmp_path / "adapted.pth", format="original")
    x = torch.randn(2, 3, 24, 24)
    assert_same(capi.load(str(written) if ours else f"baseline:{name}={written}")(x), learner.as_encoder()(x))
    assert ("is written as safetensors" in caplog.text) == ours


def saved(run: Path) -> dict[str, Tensor]:
    learner = build_learner(capi.load_config(str(run / "config.yaml")))
    Checkpoints(run / "checkpoints").load(learner, 8)
    return tensors(learner)


@pytest.mark.parametrize("more", [[], ["adapt.lora_rank=2"], ["adapt.pull=0.5", "adapt.blocks=2"]], ids=str)
def test__a_resumed_run_is_the_uninterrupted_one_and_needs_no_source(
    more: list[str], photos: Path, tmp_path: Path
) -> None:
    model, out = source("dinov3_vitl16", tmp_path), tmp_path / "run"
    settings = [*TINY, *more, "checkpoint.every_steps=4", "checkpoint.keep=3"]
    capi.adapt(model, settings, data=photos, out=out, device="cpu")
    shutil.copytree(out, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000008")
    (tmp_path / "dinov3_vitl16.pth").unlink()
    capi.adapt(model, settings, data=photos, out=tmp_path / "cut", resume=True, device="cpu")
    whole, resumed = (saved(folder) for folder in (out, tmp_path / "cut"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    x = images()
    assert_same(capi.load(out)(x), capi.load(tmp_path / "cut")(x), tolerance=0)
    assert all("lora" not in line and "down" not in line for line in capi.load(out).state_dict())
    assert capi.doctor(out) is not None
    exported = capi.export(out, tmp_path / "encoder.safetensors")
    assert_same(capi.load(exported)(x), capi.load(out)(x), tolerance=1e-6)
    with pytest.raises(CapiError, match=r"was started from baseline:dinov3.*not from another"):
        capi.adapt("another", settings, data=photos, out=out, resume=True, device="cpu")


def test__the_encoder_stands_still_until_what_is_new_has_learnt(tmp_path: Path) -> None:
    config = adapted_config(source("dinov2_reg_vitl14", tmp_path), [*TINY, "adapt.frozen_share=0.5"])
    learner = started_learner(config)
    before, predictor = state_of(learner), learner.student.predictor.state_dict()["blocks.0.mlp.expand.weight"].clone()
    trained(learner, config, 4)
    assert all(torch.equal(value, before[name]) for name, value in state_of(learner).items())
    assert not torch.equal(learner.student.predictor.state_dict()["blocks.0.mlp.expand.weight"], predictor)
    trained(learner, config, 1, first=4)
    first = learner.student_optimizer.param_groups
    rates = {group["lr"] / group["rate_multiplier"] for group in first if group["frozen_steps"]}
    others = {group["lr"] / group["rate_multiplier"] for group in first if not group["frozen_steps"]}
    assert max(rates) == pytest.approx(max(others) / 4)
    assert not torch.equal(state_of(learner)["blocks.0.mlp.expand.weight"], before["blocks.0.mlp.expand.weight"])


def test__what_lies_before_the_last_blocks_stays_bit_equal(tmp_path: Path) -> None:
    config = adapted_config(source("dinov2_reg_vitl14", tmp_path), [*TINY, "adapt.blocks=1", "adapt.frozen_share=0"])
    learner = started_learner(config)
    before = state_of(learner)
    trained(learner, config, 3)
    changed = {name for name, value in state_of(learner).items() if not torch.equal(value, before[name])}
    assert {name.split(".")[0] if "blocks" not in name else name[:8] for name in changed} == {"blocks.2", "final_norm"}


def test__fixed_sines_stay_as_they_are(tmp_path: Path) -> None:
    config = adapted_config(source("mae_vitl16", tmp_path), [*TINY, "adapt.frozen_share=0"])
    learner = started_learner(config)
    before = state_of(learner)
    after = state_of(trained(learner, config, 3))
    assert torch.equal(after["positions"], before["positions"])
    assert not torch.equal(after["class_token"], before["class_token"])


def test__each_block_has_its_share_of_the_rate(tmp_path: Path) -> None:
    more = ["adapt.layer_decay=0.5", "adapt.rate_multiplier=0.1", "optimization.patch_embedding_rate_multiplier=1"]
    learner = started_learner(adapted_config(source("dinov2_reg_vitl14", tmp_path), [*TINY, *more]))
    rates = {id(p): g["rate_multiplier"] for g in learner.student_optimizer.param_groups for p in g["params"]}
    for name, parameter in learner.student.named_parameters():
        expected = 1.0
        if name.startswith("encoder."):
            block = int(name.split(".")[2]) if name.startswith("encoder.blocks.") else -1
            expected = 0.1 * (1.0 if "final_norm" in name else 0.5 ** (3 - block))
        assert rates[id(parameter)] == pytest.approx(expected), name


def test__low_rank_matrices_alone_are_trained_and_merge_into_the_same_features(tmp_path: Path) -> None:
    more = ["adapt.lora_rank=2", "adapt.lora_scale=0.5", "adapt.frozen_share=0", "optimization.learning_rate=0.1"]
    config, x = adapted_config(source("beit_vitl16", tmp_path), [*TINY, *more]), images()
    learner = started_learner(config)
    before = state_of(learner)
    after = state_of(trained(learner, config, 3))
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if name.endswith((".down", ".up"))}
    assert len(changed) == 3 * 6 * 2
    merged = learner.as_encoder("student")
    assert not any(isinstance(module, LowRank) for module in merged.modules())
    learner.student.eval()
    with torch.no_grad():
        tokens = learner.student.encoder(x).tokens
    torch.testing.assert_close(merged(x).feature_map.flatten(1, 2), tokens[:, 1:], atol=1e-5, rtol=1e-5)
    moved = capi.load(config.init.encoder)(x).feature_map.flatten(1, 2) - tokens[:, 1:]
    assert moved.abs().max() > 1e-3


def test__a_pull_is_decay_towards_the_start(tmp_path: Path) -> None:
    """Without gradients nothing else moves weights; the distance to the start shrinks by 1 - rate pull in each step."""
    more = ["adapt.pull=0.5", "adapt.frozen_share=0", "adapt.layer_decay=1", "adapt.rate_multiplier=1"]
    config = adapted_config(source("dinov2_reg_vitl14", tmp_path), [*TINY, *more])
    learner = started_learner(config)
    optimizer, weight = learner.student_optimizer, learner.student.encoder.blocks[1].mlp.expand.weight
    start = weight.detach().clone()
    assert torch.equal(optimizer.initial_state(weight)["origin"], start)
    for group in optimizer.param_groups:
        group["lr"] = 0.2
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(weight, start)
    with torch.no_grad():
        weight += 1
    optimizer.step()
    torch.testing.assert_close(weight, start + 1 - 0.2 * 0.5)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    torch.testing.assert_close(weight, start + 1 - 0.2 * 0.5)


def test__a_frozen_source_as_the_target_is_the_pull_towards_its_features(photos: Path, tmp_path: Path) -> None:
    model = source("dinov2_reg_vitl14", tmp_path)
    frozen = ["target.kind=frozen", f"target.frozen.encoder={model}", "target.normalize=none", "data.image_size=20"]
    config = adapted_config(model, [*TINY, *frozen, "target.frozen.width=24"])
    expected, x = capi.load(model), images()
    learner = build_learner(config, frozen_encoder=expected)
    initialize(learner, config)
    assert_same(learner.as_encoder("student")(x), expected(x))
    wanted = expected(x).feature_map.flatten(1, 2)
    torch.testing.assert_close(learner.target.tokens(learner.teacher, x), wanted)
    run = capi.adapt(model, [*TINY, *frozen], data=photos, out=tmp_path / "run", device="cpu")
    assert json.loads((run.path / "run.json").read_text())["target"]["outputs"] == 24


def test__new_channels_begin_as_the_mean_and_other_patches_see_the_resized_one(tmp_path: Path) -> None:
    weight = torch.randn(8, 3, 4, 4)
    more, notes = fitted_patches(weight, torch.empty(8, 5, 4, 4))
    torch.testing.assert_close(more[:, :3], weight * 3 / 5)
    torch.testing.assert_close(more[:, 4], weight.mean(1) * 3 / 5)
    assert notes == ["patch embedding: 5 channels, 3 of its own and 2 as the mean of those"]
    torch.testing.assert_close(fitted_patches(weight, torch.empty(8, 1, 4, 4))[0][:, 0], weight.sum(1))
    patch, other = torch.randn(1, 3, 6, 6), fitted_patches(weight, torch.empty(8, 3, 6, 6))[0]
    resized = torch.nn.functional.interpolate(patch, (4, 4), mode="bicubic", antialias=True)
    expected = torch.einsum("bchw,dchw->bd", resized, weight)
    torch.testing.assert_close(torch.einsum("bchw,dchw->bd", patch, other), expected, atol=1e-4, rtol=1e-4)
    changes = ["model.patch_size=6", "model.channels=5", "data.image_size=24", "data.mean=auto", "data.std=auto"]
    config = adapted_config(source("dinov2_reg_vitl14", tmp_path), [*TINY, *changes])
    assert started_learner(config).student.encoder(torch.randn(1, 5, 24, 24)).tokens.shape == (1, 5 + 16, 24)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("aim_600m", [], "it cannot leave out hidden patches"),
        ("beit_vitl16", ["data.image_size=24"], "takes images of its own size only: set data.image_size=20"),
        ("dinov2_reg_vitl14", ["adapt.blocks=4"], r"adapt.blocks trains the last 4 blocks, but the encoder has 3"),
        ("dinov2_reg_vitl14", ["adapt.lora_rank=25"], r"adapt.lora_rank is 25, more than model.width = 24"),
        ("dinov2_reg_vitl14", ["adapt.lora_rank=2", "adapt.pull=1"], "adapt.pull has no meaning with adapt.lora_rank"),
        (
            "dinov2_reg_vitl14",
            ["adapt.pull=1", "optimization.optimizer=muon"],
            "with optimization.optimizer=muon",
        ),
        ("dinov2_reg_vitl14", ["model.patch_size=7"], r"is no multiple of model.patch_size = 7"),
        ("dinov2_reg_vitl14", ["model.channels=5"], r"data.mean has 3 values, but model.channels is 5.*data.mean=auto"),
        ("dinov2_reg_vitl14", ["model.depth=4"], r"blocks\.3.*not there\): set model.depth=3"),
        (
            "dinov2_reg_vitl14",
            ["model.predictor.kind=fused", "model.predictor.depth=2"],
            "model.predictor.depth has no meaning with model.predictor.kind=fused: leave it out",
        ),
        ("dinov2_reg_vitl14", ["model.registers=0"], r"registers.*: set model.registers=4"),
    ],
)
def test__what_does_not_fit_is_reported_with_its_key(
    name: str, overrides: list[str], message: str, photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(CapiError, match=message):
        capi.adapt(source(name, tmp_path), [*TINY, *overrides], data=photos, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test__limits_without_weights_and_sources_that_are_none_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(CapiError, match=r"adapt.lora_rank has no meaning without weights to start from"):
        capi.pretrain("small", ["adapt.lora_rank=4"], data=photos, out=tmp_path / "run", device="cpu")
    with pytest.raises(CapiError, match="is a PixelEncoder, whose weights no student can start from"):
        adapted_config("pixels:8")


@pytest.mark.parametrize("name", ["dinov2_reg_vitl14", "mae_vitl16", "dinov2_reg_vitg14", "data2vec2_vitl16"])
@pytest.mark.parametrize("more", [[], ["adapt.lora_rank=2"], ["adapt.blocks=2"]], ids=str)
def test__the_planned_activations_are_what_autograd_keeps(
    name: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BASELINES, name, small(name, width=48, mlp_width=96))
    config = adapted_config(source(name, tmp_path), [*TINY, *more])
    learner = started_learner(config)
    visible, _, predicted = mask_sampler(config).counts(PatchGrid(*config.grid))
    counts = Counts(learner.student.encoder.num_registers, PatchGrid(*config.grid).size, visible, predicted)
    for precision, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        planned = sum(student_activations(learner.student, counts, 4, ActivationPolicy(compute_bytes=size)))
        # What the first of the trained blocks reads needs no gradient, so that it keeps less; there are three here.
        assert planned == pytest.approx(kept_by_autograd(config, learner, precision), rel=0.06), precision


@pytest.mark.parametrize("more", [[], ["adapt.lora_rank=16"]], ids=str)
def test__the_plan_of_a_large_encoder_is_what_tensors_without_values_keep(more: list[str]) -> None:
    """ViT-L/14 of DINOv2 at 224 px in bfloat16, whose student runs forward on tensors that have shapes alone."""
    settings = [*more, "optimization.batch_size=16"]
    config = adapted_config("baseline:dinov2_vitl14", settings, weights=False)
    visible, _, predicted = mask_sampler(config).counts(PatchGrid(*config.grid))
    sizes: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        sizes[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        return value

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        student = build_networks(config, "meta").student
    with mode:
        for module in student.modules():
            for name, each in module._parameters.items():
                if each is not None:
                    module._parameters[name] = nn.Parameter(torch.empty_like(each, device="cpu"), each.requires_grad)
        parts = (torch.empty(16, 3, 224, 224), *(torch.zeros(16, n, dtype=torch.long) for n in (visible, predicted)))
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            outputs = student(*parts)
        weights = {each.untyped_storage()._cdata for each in student.parameters()}
    saved = sum(size for storage, size in sizes.items() if storage not in weights)
    counts = Counts(student.encoder.num_registers, PatchGrid(*config.grid).size, visible, predicted)
    planned = student_activations(student, counts, 16, ActivationPolicy(compute_bytes=2))
    assert outputs.shape == (16, predicted, 1024)
    assert planned.encoder + planned.predictor + planned.weight_copies == pytest.approx(saved, rel=0.03)
