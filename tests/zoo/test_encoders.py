"""Encoders by name, as the commands take them."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import capi
from capi.config.files import dump_config, load_config, parse_config
from capi.config.schema import Config
from capi.errors import CapiError
from capi.models.features import CapiEncoder, PixelEncoder
from capi.train.build import build_learner
from capi.types import IMAGENET, Features, Statistics, VisionEncoder, statistics_of
from capi.zoo.encoders import open_capi_encoder, open_encoder, open_noted_encoder, untrained
from capi.zoo.huggingface.files import write_transformers
from capi.zoo.published.registry import RELEASED
from tests.zoo.serving import serving
from tests.zoo.test_weights import make_run

OWN = '''
from __future__ import annotations
from dataclasses import dataclass
import torch
from capi.types import Features

@dataclass
class Means:
    """The mean colour of each patch."""
    patch_size: int = 4
    width: int = 3

    def __call__(self, images, *, pooled=True):
        means = torch.nn.functional.avg_pool2d(images, self.patch_size).permute(0, 2, 3, 1)
        return Features(None, images.new_zeros(len(images), 0, 3), means)

def make():
    return Means(8)

def fails():
    raise ValueError("no\\nweights")

ready = Means(2)
number = 3
text = str
'''


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test imports is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "own" in name:
            del sys.modules[name]


@pytest.fixture
def run(small_config: Config, tmp_path: Path) -> Path:
    return make_run(small_config, tmp_path / "run")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my own" / "own_encoder.py"
    path.parent.mkdir()
    path.write_text(OWN)
    monkeypatch.chdir(path.parent)
    return path


def same(first: CapiEncoder, other: CapiEncoder) -> bool:
    states = [first.state_dict(), other.state_dict()]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )


def test__a_path_is_a_run_an_exported_file_or_a_released_checkpoint(
    run: Path, tmp_path: Path, reference_checkpoint: Path
) -> None:
    teacher, student = open_encoder(run), open_encoder(str(run), weights="student")
    assert same(teacher, capi.load(run))
    assert same(student, capi.load(run, weights="student"))
    assert not same(teacher, student)
    assert same(open_encoder(capi.export(run, tmp_path / "x: y.safetensors")), teacher)
    assert same(open_encoder(reference_checkpoint), open_capi_encoder(reference_checkpoint))


def test__a_name_that_no_file_can_have_is_reported_in_one_sentence() -> None:
    with pytest.raises(CapiError, match=r"cannot be looked at \(File name too long\): expected a run folder"):
        open_capi_encoder(300 * "x")


def test__pixels_are_raw_patches() -> None:
    encoder = open_encoder("pixels:4")
    assert isinstance(encoder, PixelEncoder)
    assert (encoder.patch_size, encoder.width, statistics_of(encoder)) == (4, 48, IMAGENET)
    five = open_encoder("pixels:4x5")
    # Of other channels nobody knows a mean: the values stay as they are.
    images = torch.rand(2, 5, 8, 8)
    assert (five.patch_size, five.width, statistics_of(five)) == (4, 80, ((0.0,) * 5, (1.0,) * 5))
    assert torch.equal(five(images).feature_map[1, 0, 1], images[1, :, :4, 4:].flatten())


def test__untrained_is_what_a_run_starts_from(small_config: Config, run: Path, tmp_path: Path) -> None:
    config = small_config.model_copy(update={"seed": 5})
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(dump_config(config))
    opened = open_encoder(f"untrained:{recipe}")
    start = build_learner(config).teacher.average
    assert torch.equal(opened.encoder.blocks[1].mlp.expand.weight, start.encoder.blocks[1].mlp.expand.weight)
    assert all(torch.equal(value, dict(opened.named_parameters())[name]) for name, value in start.named_parameters())
    assert not same(opened, untrained(str(run)))
    assert same(untrained(str(run)), open_encoder(run))


def test__untrained_takes_the_recipes_that_come_with_the_package() -> None:
    model = load_config("tiny4").model
    assert (open_encoder("untrained:tiny4").width, untrained("tiny4").patch_size) == (model.width, model.patch_size)


def test__statistics_are_those_of_the_run(small_config: Config, tmp_path: Path) -> None:
    tree = small_config.model_dump(mode="json")
    tree["data"] |= {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    run = make_run(parse_config(tree), tmp_path / "run")
    expected = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    for name in (run, f"untrained:{run}", capi.export(run, tmp_path / "encoder.safetensors")):
        assert statistics_of(open_encoder(name)) == expected


@pytest.mark.parametrize(("name", "patch"), [("Means", 4), ("make", 8), ("ready", 2)])
@pytest.mark.parametrize("place", ["FILE", "own_encoder.py", "own_encoder"])
def test__python_of_one_s_own_is_a_class_a_function_or_an_object(own: Path, place: str, name: str, patch: int) -> None:
    encoder = open_encoder(f"{str(own) if place == 'FILE' else place}:{name}")
    assert isinstance(encoder, VisionEncoder)
    assert (encoder.width, encoder.patch_size) == (3, patch)
    assert isinstance(encoder(torch.zeros(1, 3, 16, 16), pooled=False), Features)


def test__a_file_may_import_what_lies_beside_it(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own.parent / "mine.py").write_text("from own_encoder import make\n")
    monkeypatch.chdir("/")
    assert open_encoder(f"{own.parent / 'mine.py'}:make").patch_size == 8


def test__a_file_with_the_name_of_a_library_replaces_nothing(own: Path) -> None:
    (own.parent / "torch.py").write_text(OWN)
    assert open_encoder(f"{own.parent / 'torch.py'}:make").patch_size == 8
    assert sys.modules["torch"] is torch


def test__an_encoder_that_is_given_is_set_to_evaluate(model: CapiEncoder) -> None:
    model.train()
    opened = open_encoder(model)
    assert opened is model
    assert not model.training
    # It stays the caller's: gradients are not switched off.
    assert all(value.requires_grad for value in model.parameters())


@pytest.mark.parametrize("name", ["run", "untrained:run", "pixels:2"])
def test__what_is_opened_is_frozen_and_evaluates(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    encoder = open_encoder(name)
    assert isinstance(encoder, nn.Module)
    assert not encoder.training
    assert not any(value.requires_grad for value in encoder.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "there is no encoder nowhere: expected a run folder, a file of `capi export`"),
        ("nowhere.pth", "there is no encoder nowhere.pth: expected a run folder"),
        ("folder/nowhere.pth", "there is no encoder folder/nowhere.pth: expected a run folder"),
        ("own_encodr.py", 'there is no encoder own_encodr.py (did you mean "own_encoder.py"?): expected'),
        ("capi_vitl14_ldv", 'there is no encoder capi_vitl14_ldv (did you mean "capi_vitl14_lvd"'),
        ("capi_vitl14", "capi_vitl14_in22k"),
        ("", "is no run"),
        ("pixels:", "needs the side of a patch in pixels, such as pixels:16"),
        ("pixels:0", "such as pixels:16"),
        ("pixels:-4", "such as pixels:16"),
        ("pixels:4.5", "such as pixels:16"),
        ("pixels:4x0", "or pixels:16x5 where images have 5 channels"),
        ("untrained:tiny5", 'did you mean "tiny4"?'),
        ("untrained:nowhere.yaml", "there is no file nowhere.yaml"),
        ("untrained:FOLDER", "is no run"),
        ("FOLDER", "is no run"),
        ("FILE", "own_encoder.py"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("no_such_module:make", "there is no encoder no_such_module:make (No module named 'no_such_module')"),
        ("own_encoder.inner:make", "there is no encoder own_encoder.inner:make"),
        (":make", "cannot be imported"),
        ("FILE:mkae", 'has nothing called "mkae"'),
        ("FILE:", 'has nothing called ""'),
        ("FILE:number", "is no encoder: it needs width, patch_size"),
        ("FILE:text", "is no encoder: it needs width, patch_size"),
        ("FILE:fails", "makes no encoder when it is called without arguments (ValueError: no weights)"),
        ("BROKEN:make", "cannot be imported (SyntaxError"),
        ("FAILING:make", "failing.py cannot be imported (ModuleNotFoundError: No module named 'not_installed')"),
    ],
)
def test__what_is_no_encoder_is_reported_in_one_sentence(own: Path, tmp_path: Path, name: str, message: str) -> None:
    (own.parent / "broken.py").write_text("def make(:\n")
    (own.parent / "failing.py").write_text("import not_installed\n")
    places = {
        "FILE": own,
        "FOLDER": own.parent,
        "BROKEN": own.parent / "broken.py",
        "FAILING": own.parent / "failing.py",
    }
    for word, place in places.items():
        name = name.replace(word, str(place))
    with pytest.raises(CapiError) as caught:
        open_encoder(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("patch_size", (4, 4), r"patch_size of the encoder Means is \(4, 4\): expected a whole number from 1 on"),
        ("patch_size", 0, "patch_size of the encoder Means is 0"),
        ("width", None, "width of the encoder Means is None"),
        ("image_size", "large", "image_size of the encoder Means is 'large': expected a side in pixels"),
        ("image_size", (8, 8, 8), r"image_size of the encoder Means is \(8, 8, 8\)"),
        ("image_size", 0, "image_size of the encoder Means is 0"),
        ("statistics", ((0.5,), (0.5,)), r"statistics of the encoder Means are .* expected capi.types.Statistics"),
        ("statistics", Statistics((0.5,), (0.2, 0.2)), "with one number for each channel in both"),
    ],
)
def test__what_an_encoder_says_of_itself_is_looked_at(own: Path, name: str, value: object, message: str) -> None:
    encoder = open_encoder(f"{own}:make")
    setattr(encoder, name, value)
    with pytest.raises(CapiError, match=message):
        open_encoder(encoder)


def test__auto_statistics_need_a_run(small_config: Config, tmp_path: Path) -> None:
    tree = small_config.model_dump(mode="json")
    tree["data"] |= {"mean": "auto", "std": "auto"}
    (tmp_path / "auto.yaml").write_text(dump_config(parse_config(tree)))
    with pytest.raises(CapiError, match="only a run with images"):
        untrained(str(tmp_path / "auto.yaml"))


def test__a_published_name_is_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_checkpoint: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    reference_checkpoint.rename(folder / "capi_vitl14_i22k.pth")
    loaded = open_capi_encoder("capi_vitl14_in22k")
    assert same(loaded, open_capi_encoder(folder / "capi_vitl14_i22k.pth"))
    assert same(loaded, open_encoder("capi_vitl14_in22k"))
    assert same(loaded, capi.load("capi_vitl14_in22k"))


def test__a_published_name_is_downloaded_when_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_checkpoint: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with serving(reference_checkpoint.read_bytes()) as server:
        model = replace(RELEASED["capi_vitl14_lvd"], address=server.address)
        monkeypatch.setitem(RELEASED, "capi_vitl14_lvd", model)
        assert same(open_encoder("capi_vitl14_lvd"), open_capi_encoder(reference_checkpoint))
    assert len(server.requests) == 1


def test__what_lies_here_under_a_published_name_comes_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run.rename("capi_vitl14_lvd")
    assert same(open_encoder("capi_vitl14_lvd"), capi.load(tmp_path / "capi_vitl14_lvd"))


@pytest.fixture
def transformers_folder(model: CapiEncoder, tmp_path: Path) -> Path:
    return write_transformers(model, tmp_path / "written", image_size=32)


def test__a_folder_of_the_transformers_library_and_its_file_are_read(
    model: CapiEncoder, transformers_folder: Path
) -> None:
    assert same(open_encoder(transformers_folder), model)
    assert same(open_capi_encoder(transformers_folder / "model.safetensors"), model)


def test__an_id_of_the_hub_is_read_from_where_it_was_fetched_to(
    model: CapiEncoder, transformers_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetched(name: str) -> Path:
        asked.append(name)
        return transformers_folder

    monkeypatch.setattr("capi.zoo.published.hub.hub_folder", fetched)
    assert same(open_encoder("someone/capi-small@v1"), model)
    assert same(capi.load("someone/capi-small"), model)
    assert asked == ["someone/capi-small@v1", "someone/capi-small"]


def test__weights_alone_are_not_looked_for_among_other_encoders() -> None:
    with pytest.raises(CapiError, match=r"there is no encoder pixels:4: expected .* id of the Hub \(owner/name\)$"):
        open_capi_encoder("pixels:4")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own_encoder.py:make", "is Python that would be run"),
        ("own_encoder:make", "is Python that would be run"),
        ("C:pixels:4", "is Python that would be run"),
        ("someone/capi-small@v1", "is not on this machine, and would be looked for on the Hub"),
        ("baseline:mae_vitb16=hub", "is not on this machine, and would be looked for on the Hub"),
        ("baseline:mae_vitb16=someone/else", "is not on this machine, and would be looked for on the Hub"),
    ],
)
def test__a_name_that_a_file_brings_runs_and_fetches_nothing(
    own: Path, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capi.zoo.published.hub.hub_folder", lambda *_, **__: pytest.fail("asked the Hub"))
    own.write_text("raise SystemExit('run')")
    with pytest.raises(CapiError, match=f"^f.safetensors says that {name} made it, which {reason}: .* with `model`$"):
        open_noted_encoder(name, "f.safetensors")
    assert not any(module.endswith("own_encoder") for module in sys.modules)


def test__a_name_that_a_file_brings_opens_what_is_here(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference_checkpoint: Path
) -> None:
    assert same(open_noted_encoder(str(run), "f", weights="student"), capi.load(run, weights="student"))
    assert same(open_noted_encoder(f"untrained:{run}", "f"), untrained(str(run)))
    assert open_noted_encoder("pixels:4", "f").patch_size == 4
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with serving(reference_checkpoint.read_bytes()) as server:
        model = replace(RELEASED["capi_vitl14_lvd"], address=server.address)
        monkeypatch.setitem(RELEASED, "capi_vitl14_lvd", model)
        assert same(open_noted_encoder("capi_vitl14_lvd", "f"), open_capi_encoder(reference_checkpoint))


def test__what_a_file_brings_must_be_a_name() -> None:
    with pytest.raises(CapiError, match=r"f says that \['x'\] made it, which is no name: give the model with `model`"):
        open_noted_encoder(["x"], "f")
