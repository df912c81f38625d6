import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import capi
from capi.config.files import dump_config, parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.train.build import build_learner
from capi.train.checkpoint import Checkpoints, Position
from capi.types import IMAGENET, statistics_of
from capi.zoo.run_folder import RunFolder


def make_run(config: Config, path: Path) -> Path:
    """A run whose teacher and student differ."""
    folder = RunFolder(path)
    folder.create(dump_config(config), {"seed": 0, "data": {}})
    learner = build_learner(config)
    with torch.no_grad():
        for parameter in learner.student.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    Checkpoints(folder.checkpoints).save(learner, Position(step=1))
    return path


@pytest.fixture
def run(small_config: Config, tmp_path: Path) -> Path:
    return make_run(small_config, tmp_path / "run")


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 24, 32)


def test__a_run_gives_its_teacher_or_its_student(run: Path, images: torch.Tensor, small_config: Config) -> None:
    teacher, student = capi.load(run), capi.load(run, weights="student")
    assert not torch.allclose(teacher(images).pooled, student(images).pooled)
    fresh = build_learner(small_config).teacher.average.encoder
    assert torch.equal(teacher.encoder.registers, fresh.registers)
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


@pytest.mark.parametrize("weights", ["teacher", "student"])
@pytest.mark.parametrize("format", ["safetensors", "released"])
@pytest.mark.parametrize("rope", ["axial", "released"])
def test__what_is_exported_computes_the_same(
    small_config: Config, tmp_path: Path, images: torch.Tensor, format: str, weights: str, rope: str
) -> None:
    model = small_config.model.model_copy(update={"positions": rope})
    run = make_run(small_config.model_copy(update={"model": model}), tmp_path / "run")
    file = capi.export(run, tmp_path / "new" / "file", format=format, weights=weights)
    for ours, theirs in zip(capi.load(file)(images), capi.load(run, weights=weights)(images), strict=True):
        assert torch.equal(ours, theirs)
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test__safetensors_carry_the_config(run: Path, tmp_path: Path, small_config: Config) -> None:
    file = capi.export(run, tmp_path / "encoder.safetensors")
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["capi"])
    assert parse_config(facts["config"]) == small_config
    assert facts["weights"] == "teacher"


def test__a_file_with_a_config_of_version_1_is_read(run: Path, tmp_path: Path, images: torch.Tensor) -> None:
    file = capi.export(run, tmp_path / "encoder.safetensors")
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["capi"])
    facts["config"] |= {"version": 1, "evaluations": [{"data": "demo", "neighbours": 1}]}
    save_file(load_file(file), file, metadata={"capi": json.dumps(facts)})
    assert torch.equal(capi.load(file)(images).feature_map, capi.load(run)(images).feature_map)


def test__the_encoder_knows_what_its_images_are_normalized_with(small_config: Config, tmp_path: Path) -> None:
    data = small_config.data.model_copy(update={"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)})
    run = make_run(small_config.model_copy(update={"data": data}), tmp_path / "run")
    for path in (run, capi.export(run, tmp_path / "encoder.safetensors")):
        assert statistics_of(capi.load(path)) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    # The released layout has no place for them.
    assert statistics_of(capi.load(capi.export(run, tmp_path / "encoder.pth", format="released"))) == IMAGENET


def test__a_file_that_does_not_fit_its_config_is_refused(run: Path, tmp_path: Path) -> None:
    file = capi.export(run, tmp_path / "encoder.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    state = load_file(file)
    del state["encoder.registers"]
    save_file(state, file, metadata=metadata)
    with pytest.raises(CapiError, match=r"does not fit the config inside it.*encoder\.registers"):
        capi.load(file)


def test__the_released_layout_refuses_what_it_cannot_hold(small_config: Config, tmp_path: Path) -> None:
    model = small_config.model.model_copy(update={"registers": 6})
    run = make_run(small_config.model_copy(update={"model": model}), tmp_path / "run")
    with pytest.raises(CapiError, match="cannot hold 6 registers"):
        capi.export(run, tmp_path / "file.pth", format="released")
    assert not list(tmp_path.glob("*file*"))
    assert capi.load(capi.export(run, tmp_path / "file.safetensors"))


VARIANTS = {
    "model.positions=learned": {"positions": "learned"},
    "model.head=mlp": {"head": "mlp"},
    "model.predictor.kind=self": {"predictor": {"kind": "self", "width": 48, "heads": 2}},
    "model.predictor.kind=fused": {"predictor": {"kind": "fused"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test__variants_load_and_export_but_not_in_the_released_layout(
    small_config: Config, tmp_path: Path, images: torch.Tensor, name: str
) -> None:
    tree = small_config.model_dump(mode="json")
    tree["model"] |= VARIANTS[name]
    run = make_run(parse_config(tree), tmp_path / "run")
    file = capi.export(run, tmp_path / "encoder.safetensors")
    for ours, theirs in zip(capi.load(file)(images), capi.load(run)(images), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(CapiError, match=f"no place for {name}.*`format` safetensors"):
        capi.export(run, tmp_path / "file.pth", format="released")
    assert not (tmp_path / "file.pth").exists()


def test__learned_positions_of_another_image_size_are_refused(small_config: Config, tmp_path: Path) -> None:
    tree = small_config.model_dump(mode="json")
    tree["model"]["positions"] = "learned"
    run = make_run(parse_config(tree), tmp_path / "run")
    tree["data"]["image_size"] = [24, 24]
    (run / "config.yaml").write_text(dump_config(parse_config(tree)))
    with pytest.raises(CapiError, match=r"encoder\.positions\.table.* in another shape than \(6, 6, 32\)"):
        capi.load(run)


def test__a_file_with_a_config_of_version_2_is_read(run: Path, tmp_path: Path, images: torch.Tensor) -> None:
    file = capi.export(run, tmp_path / "encoder.safetensors")
    with safe_open(file, framework="pt") as opened:
        facts = json.loads(opened.metadata()["capi"])
    old = facts["config"]["model"]
    old["rope"] = old.pop("positions")
    del old["head"], old["predictor"]["kind"], old["predictor"]["mask_tokens"]
    facts["config"]["version"] = 2
    save_file(load_file(file), file, metadata={"capi": json.dumps(facts)})
    assert torch.equal(capi.load(file)(images).feature_map, capi.load(run)(images).feature_map)


def test__folders_that_are_not_there_are_refused(small_config: Config, run: Path, tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="is a folder"):
        capi.export(run, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CapiError, match="is no run"):
        capi.load(tmp_path / "empty")
    RunFolder(tmp_path / "young").create(dump_config(small_config), {})
    with pytest.raises(CapiError, match="holds no checkpoint yet"):
        capi.load(tmp_path / "young")


def test__a_choice_of_weights_that_is_none_is_refused_of_files_too(reference_checkpoint: Path) -> None:
    """In a process of its own, where annotations are not enforced."""
    code = f"import capi; capi.load({str(reference_checkpoint)!r}, weights='nonsense')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'weights="nonsense" is not one of teacher, student' in ran.stderr


def test__an_exported_file_can_be_replaced_while_its_model_is_in_use(run: Path, tmp_path: Path) -> None:
    file = capi.export(run, tmp_path / "encoder.safetensors")
    model = capi.load(file)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    file.write_bytes(b"")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test__an_exported_file_of_another_precision_loads_as_float32(run: Path, tmp_path: Path) -> None:
    file = capi.export(run, tmp_path / "encoder.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file, metadata=metadata)
    assert {parameter.dtype for parameter in capi.load(file).parameters()} == {torch.float32}


def test__an_exported_file_that_is_cut_off_is_reported(run: Path, tmp_path: Path) -> None:
    file = capi.export(run, tmp_path / "encoder.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CapiError, match="is cut off"):
        capi.load(file)


def test__a_misspelt_run_in_a_folder_that_is_here_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CapiError, match=r'there is no runs/frist in the folder runs .did you mean "runs/first"'):
        capi.load("runs/frist")
