"""Where weights of baselines are found."""

from pathlib import Path

import pytest
import torch

import capi
from capi.errors import CapiError
from capi.models.plain_vit import PlainViT
from capi.zoo.baselines import is_baseline, is_on_this_machine
from capi.zoo.baselines.load import find_weights, open_baseline
from capi.zoo.baselines.registry import BASELINES
from capi.zoo.encoders import open_capi_encoder, open_encoder
from capi.zoo.published import hub
from tests.zoo.baseline_checkpoints import assert_same, images, original, random_model, save, small

NAME = "ijepa_vith14_in1k"


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASELINES, NAME, small(NAME))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("CAPI_BASELINES", raising=False)


def test__a_place_and_a_part_can_be_named(tmp_path: Path) -> None:
    baseline, x = BASELINES[NAME], images()
    target, context = random_model(baseline), random_model(baseline)
    contents = {"encoder": original(baseline, context), "target_encoder": original(baseline, target)}
    path = save(contents, tmp_path / "some=file.pth.tar")
    assert_same(capi.load(f"baseline:{NAME}={path}")(x), target(x))
    assert_same(open_baseline(f"baseline:{NAME}@encoder={path}")(x), context(x))
    assert_same(open_encoder(f"baseline:{NAME}={path}")(x), target(x))


@pytest.mark.parametrize("grid", [(5, 5), (8, 3), (3, 4)])
def test__positions_come_to_other_grids_by_plain_or_antialiased_bicubic(
    grid: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BASELINES, "mae_vitl16", small("mae_vitl16"))
    baseline, x = BASELINES["mae_vitl16"], images(*grid)
    model = random_model(baseline)
    path = save({"model": original(baseline, model)}, tmp_path / "mae.pth")
    assert model.positions is not None
    table = model.positions[:, 1:].reshape(1, 5, 5, -1).permute(0, 3, 1, 2)
    features = {}
    for way, antialias in (("", False), ("+bicubic", False), ("+antialias", True)):
        features[way] = capi.load(f"baseline:mae_vitl16{way}={path}")(x).feature_map
        placed = torch.nn.functional.interpolate(table, grid, mode="bicubic", antialias=antialias)
        torch.testing.assert_close(features[way], with_positions(model, placed, x), rtol=1e-5, atol=1e-5)
    assert torch.equal(features["+bicubic"], features["+antialias"]) == (grid == (5, 5))


def with_positions(model: PlainViT, placed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The feature map of a model whose patches have the positions `placed` (1, d, rows, columns)."""
    assert model.positions is not None
    assert model.class_token is not None
    assert model.final_norm is not None
    patches = model.patch_embedding(x, None) + placed.flatten(2).transpose(1, 2)
    tokens = torch.cat([(model.class_token + model.positions[:, :1]).expand(len(x), -1, -1), patches], 1)
    for block in model.blocks:
        tokens = block(tokens, None, None)
    normed: torch.Tensor = model.final_norm(tokens)
    return normed[:, 1:].unflatten(1, placed.shape[2:])


def test__a_resampling_that_a_model_does_not_have_is_reported() -> None:
    with pytest.raises(CapiError, match=r'knows "\+bicubic" and "\+antialias", not "\+nearest"; its own is bicubic'):
        capi.load(f"baseline:{NAME}+nearest")
    with pytest.raises(
        CapiError, match=r'dino_vitb16 has one way to other sizes than its own: leave out "\+antialias"'
    ):
        capi.load("baseline:dino_vitb16+antialias")


def test__the_folder_of_the_environment_comes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = BASELINES[NAME]
    cache = tmp_path / "torch" / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    (cache / baseline.file).touch()
    assert find_weights(baseline) == cache / baseline.file
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / f"{NAME}.pth.tar").touch()
    monkeypatch.setenv("CAPI_BASELINES", str(tmp_path / "own"))
    assert find_weights(baseline) == tmp_path / "own" / f"{NAME}.pth.tar"


def test__missing_weights_say_what_to_download_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(CapiError) as caught:
        capi.load(f"baseline:{NAME}")
    said = str(caught.value)
    assert "put IN1K-vit.h.14-300e.pth.tar of facebookresearch/ijepa at " in said
    assert str(tmp_path / "torch" / "hub" / "checkpoints" / f"{NAME}.pth") in said
    assert f"baseline:{NAME}=hub (facebook/ijepa_vith14_1k on the Hub)" in said


def test__names_parts_and_places_that_do_not_exist_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CapiError, match='no baseline "ijepa"'):
        capi.load("baseline:ijepa")
    with pytest.raises(CapiError, match='have no part "both": there is target_encoder, encoder'):
        capi.load(f"baseline:{NAME}@both")
    with pytest.raises(CapiError, match=r"there is no nowhere.pth"):
        capi.load(f"baseline:{NAME}=nowhere.pth")
    with pytest.raises(CapiError, match="ibot_vitl16 is not known to be on the Hub"):
        capi.load("baseline:ibot_vitl16=hub")


def test__the_hub_is_asked_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def folder(name: str, *, kind: str | None) -> Path:
        asked.append(name)
        assert kind is None
        raise CapiError("offline")

    monkeypatch.setattr(hub, "hub_folder", folder)
    for place, name in (("hub", "facebook/ijepa_vith14_1k"), ("someone/theirs", "someone/theirs")):
        with pytest.raises(CapiError, match="offline"):
            capi.load(f"baseline:{NAME}={place}")
        assert asked[-1] == name


def test__what_needs_a_model_of_capi_says_so() -> None:
    assert is_baseline("baseline:x")
    assert not is_baseline("pixels:16")
    with pytest.raises(CapiError, match="is no model of CAPI"):
        open_capi_encoder(f"baseline:{NAME}")


@pytest.mark.parametrize(
    ("place", "here"),
    [("", True), ("=file.pth", True), ("=gone.pth", False), ("=hub", False), ("=someone/else", False)],
)
def test__it_is_known_before_opening_whether_the_hub_would_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, here: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("file.pth", "hub"):
        Path(name).touch()
    assert is_on_this_machine(f"baseline:{NAME}{place}") is here
