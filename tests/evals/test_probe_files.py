import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from capi.errors import CapiError
from capi.evals.fitted_probes import (
    PROBES,
    AttentiveClassifier,
    KnnClassifier,
    KnnSegmenter,
    LinearClassifier,
    LogisticSegmenter,
    Probe,
    Segmenter,
    encoder_facts,
    load_probe,
    save_probe,
)
from capi.evals.probes import AttentiveProbes
from capi.models.features import PixelEncoder
from capi.types import Features, Statistics
from tests.evals.toys import PatchColors, RandomPatches

WIDTH = 6
MODELS: dict[str, Any] = {
    "attentive": lambda: AttentiveClassifier.of(AttentiveProbes(settings=1, width=WIDTH, classes=3, seed=3)),
    "knn": lambda: KnnClassifier(torch.randn(20, WIDTH), torch.arange(20) % 3, "pooled", 5, "weighted", 0.07, 3),
    "knn-segmentation": lambda: KnnSegmenter(
        bank=torch.randn(30, WIDTH)[:20],
        blocks=torch.randint(3, (20, 2, 2), dtype=torch.uint8),
        mean=torch.randn(WIDTH),
        scale=torch.rand(WIDTH) + 1,
        neighbors=3,
        distance="cosine",
        ignored=(0, 255),
        clean=True,
    ),
    "linear": lambda: LinearClassifier(torch.randn(3, 2 * WIDTH), torch.randn(3), "both"),
    "logistic-segmentation": lambda: LogisticSegmenter(
        torch.randn(3, WIDTH).double(), torch.randn(3).double(), torch.tensor([1, 2, 300])
    ),
}


def make_probe(kind: str = "linear", **options: Any) -> Probe:
    facts = {"width": WIDTH, "patch_size": 4, "fingerprint": "0123"}
    values = {"kind": kind, "model": MODELS[kind](), "classes": {0: "a", 1: "b", 300: "c"}, "size": (8, 12)}
    return Probe(**{**values, "encoder": facts, **options})


def predictions(probe: Probe) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    feature_map = torch.randn(4, 2, 3, WIDTH, generator=generator)
    features = Features(torch.randn(4, WIDTH, generator=generator), torch.zeros(4, 0, WIDTH), feature_map)
    model = probe.model
    return model.segment(features, (4, 6)) if isinstance(model, Segmenter) else model.judge(model.inputs(features))


def test__every_kind_of_probe_is_tried_here() -> None:
    assert set(MODELS) == set(PROBES)


@pytest.mark.parametrize("kind", MODELS)
def test__a_probe_that_was_saved_predicts_the_same(tmp_path: Path, kind: str) -> None:
    probe = make_probe(kind, ignored=(0, 255), about={"benchmark": "pets/knn", "scores": {"test": 0.5}})
    save_probe(probe, tmp_path / "probe.safetensors")
    loaded = load_probe(tmp_path / "probe.safetensors")
    assert torch.equal(predictions(loaded), predictions(probe))
    assert len(predictions(probe).unique()) > 1
    assert replace(loaded, model=probe.model) == probe
    assert type(loaded.model) is type(probe.model)
    assert loaded.segments == kind.endswith("segmentation")
    assert [path.name for path in tmp_path.iterdir()] == ["probe.safetensors"]


def test__classes_keep_their_names(tmp_path: Path) -> None:
    names = {0: "Löwe", 1: "猫", 7: 'a "quoted" name', 300: ""}
    save_probe(make_probe(classes=names), tmp_path / "probe")
    assert load_probe(tmp_path / "probe").classes == names


def test__saving_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("before")
    with pytest.raises(TypeError):
        save_probe(make_probe(about={"no json": object()}), tmp_path / "probe")
    assert [path.name for path in tmp_path.iterdir()] == ["probe"]
    assert (tmp_path / "probe").read_text() == "before"


def test__an_encoder_of_another_width_is_refused() -> None:
    with pytest.raises(CapiError, match="width 6, but this encoder gives 8"):
        make_probe().refuse_other(RandomPatches(width=8))


def test__an_encoder_with_other_patches_is_refused() -> None:
    encoder = PatchColors()
    facts = encoder_facts(encoder)
    make_probe(encoder=facts).refuse_other(encoder)
    with pytest.raises(CapiError, match="patches of 8 pixels, but those of this encoder have 4"):
        make_probe(encoder=facts | {"patch_size": 8}).refuse_other(encoder)


def test__another_encoder_of_the_same_width_is_refused() -> None:
    encoder, other = RandomPatches(seed=0), RandomPatches(seed=1)
    probe = make_probe(encoder=encoder_facts(encoder))
    probe.refuse_other(encoder)
    probe.refuse_other(RandomPatches(seed=0))
    with pytest.raises(CapiError, match="another encoder of the same width"):
        probe.refuse_other(other)


def test__other_statistics_make_another_encoder() -> None:
    probe = make_probe(encoder=encoder_facts(PixelEncoder(4)))
    probe.refuse_other(PixelEncoder(4))
    with pytest.raises(CapiError, match="another encoder of the same width"):
        probe.refuse_other(PixelEncoder(4, Statistics((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))))


def test__an_encoder_that_is_no_module_is_known_by_its_sizes() -> None:
    facts = encoder_facts(PatchColors())
    assert facts == {"width": 3, "patch_size": 4, "fingerprint": None}
    make_probe(encoder=facts).refuse_other(PatchColors())


def test__a_fingerprint_sees_every_weight_of_any_type() -> None:
    class Odd(nn.Module):
        width, patch_size = 3, 4

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.coarse = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("nothing", torch.zeros(0))

        def forward(self, images: torch.Tensor, *, pooled: bool = True) -> Features:
            raise NotImplementedError

    prints = [encoder_facts(Odd())["fingerprint"] for _ in range(2)]
    for change in ("scale", "coarse", "steps"):
        odd = Odd()
        getattr(odd, change).data += 1
        prints.append(encoder_facts(odd)["fingerprint"])
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


class Explosive:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exit, (3,))


def test__nothing_is_ever_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    path.write_bytes(pickle.dumps(Explosive()))
    with pytest.raises(CapiError, match="is no probe"):
        load_probe(path)
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(CapiError, match="is no probe"):
        load_probe(path)


def test__what_is_no_probe_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "tensors", metadata={"format": "pt"})
    (tmp_path / "text").write_text("no tensors")
    (tmp_path / "empty").touch()
    with pytest.raises(CapiError, match="holds tensors, but no probe"):
        load_probe(tmp_path / "tensors")
    for name in ("text", "empty"):
        with pytest.raises(CapiError, match="is no probe"):
            load_probe(tmp_path / name)
    with pytest.raises(CapiError, match=r"there is no file .*absent: give the probe.safetensors"):
        load_probe(tmp_path / "absent")
    with pytest.raises(CapiError, match=f"{tmp_path} is a folder: give the probe.safetensors"):
        load_probe(tmp_path)


def test__a_probe_cut_short_is_refused(tmp_path: Path) -> None:
    save_probe(make_probe(), tmp_path / "probe")
    whole = (tmp_path / "probe").read_bytes()
    (tmp_path / "probe").write_bytes(whole[:-10])
    with pytest.raises(CapiError, match="is no probe"):
        load_probe(tmp_path / "probe")


def rewritten(path: Path, **changes: Any) -> Path:
    """The same file with another description."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["capi_probe"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    facts = {name: value for name, value in (facts | changes).items() if value is not None}
    save_file(tensors, path, metadata={"capi_probe": json.dumps(facts)})
    return path


@pytest.mark.parametrize("changes", [{"version": 2}, {"kind": "of the future"}])
def test__a_file_of_a_newer_version_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_probe(make_probe(), tmp_path / "probe")
    assert load_probe(rewritten(tmp_path / "probe")).kind == "linear"
    with pytest.raises(CapiError, match=r"probe was written by a newer capi"):
        load_probe(rewritten(tmp_path / "probe", **changes))


@pytest.mark.parametrize("changes", [{"kind": "knn"}, {"classes": None}, {"size": 3}, {"settings": {}}])
def test__a_description_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_probe(make_probe(), tmp_path / "probe")
    with pytest.raises(CapiError, match="is a damaged probe"):
        load_probe(rewritten(tmp_path / "probe", **changes))


def test__an_encoder_without_weights_cannot_be_recognised_which_is_said(caplog: pytest.LogCaptureFixture) -> None:
    encoder = PatchColors()
    linear = LinearClassifier(torch.zeros(2, encoder.width), torch.zeros(2), "mean_patch")
    Probe("linear", linear, {0: "a", 1: "b"}, (8, 8), encoder_facts(encoder)).refuse_other(encoder)
    assert "it is unknown whether" in caplog.text
