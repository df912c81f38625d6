"""The way back: after training, weights in the source's own layout compute in its own code what they compute here."""

from pathlib import Path

import pytest
import torch
import transformers

import capi
from capi.api.training import adapted_config
from capi.train.build import build_learner, masked_batch
from capi.train.initial_weights import initialize
from capi.train.step import Learner, train_step
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.registry import BASELINES
from tests.zoo.baseline_checkpoints import assert_same, images, random_model, small, transformers_model
from tests.zoo.test_baselines import _DECODER, CHECKPOINTS, PARITY, Theirs, _features, _use_silu, original

TINY = ["optimization.batch_size=4", "optimization.steps=4", "clustering.prototypes=8", "masking.predict=4"]


# Without LoRA class token, positions, norms and patch embedding change too.
EXTENTS = pytest.mark.parametrize("extent", [[], ["adapt.lora_rank=2"]], ids=["all weights", "LoRA"])
# Sines and cosines, and the periods of angles, belong to the weights of some models and are never trained.
FIXED = {"positions", "rotary_periods"}


def trained(model: str, extent: list[str]) -> Learner:
    """Three steps at a rate at which they change everything that they may."""
    config = adapted_config(model, [*TINY, "adapt.frozen_share=0", "optimization.learning_rate=0.01", *extent])
    learner = build_learner(config)
    initialize(learner, config)
    before = {name: value.clone() for name, value in learner.student.encoder.state_dict().items()}
    for step in range(3):
        train_step(learner, [masked_batch(config, images(count=4), step)], step)
    encoder = learner.student.encoder
    changed = {name for name, value in encoder.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name, weight in encoder.named_parameters() if weight.requires_grad}
    assert extent or before.keys() - changed <= FIXED
    return learner


@EXTENTS
@pytest.mark.parametrize("case", PARITY, ids=lambda each: each.name)
def test__transformers_loads_what_was_adapted_in_place_of_what_it_wrote(
    case: Theirs, extent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = small(case.name, **case.changes)
    monkeypatch.setitem(BASELINES, case.name, baseline)
    before = transformers_model(case.model, case.config, **case.options)
    if "use_gated_mlp" in case.options:
        _use_silu(before)
    before.save_pretrained(tmp_path / "before")
    learner = trained(f"baseline:{case.name}={tmp_path / 'before'}", extent)
    folder, x = capi.export(learner, tmp_path / "after", format="original", weights="student"), images()
    more = {"mask_ratio": 0.0} | _DECODER if "MAE" in case.model else {}
    after = getattr(transformers, case.model).from_pretrained(folder, **more).eval()
    ours = learner.as_encoder("student")(x)
    with torch.no_grad():
        assert_same(_features(baseline, case.tokens(after, x), (5, 5)), ours)
        moved = _features(baseline, case.tokens(before, x), (5, 5)).feature_map - ours.feature_map
    assert moved.abs().max() > 1e-3
    assert_same(load_baseline(baseline, folder)(x), ours)


@EXTENTS
@pytest.mark.parametrize("name", sorted({each.name for each in CHECKPOINTS if "aim" not in each.name}))
def test__a_checkpoint_of_the_authors_comes_back_under_the_same_names(
    name: str, extent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = small(name)
    monkeypatch.setitem(BASELINES, name, baseline)
    before = original(baseline, random_model(baseline))
    contents = before
    for place in reversed(baseline.layout.part(None).places[0]):
        contents = {place: contents}
    torch.save(contents, tmp_path / "before.pth")
    learner = trained(f"baseline:{name}={tmp_path / 'before.pth'}", extent)
    path = capi.export(learner, tmp_path / "after.pth", format="original")
    after = torch.load(path, weights_only=True)
    for place in baseline.layout.part(None).places[0]:
        after = after[place]
    shapes = {key: value.shape for key, value in after.items() if key != baseline.layout.periods}
    assert shapes == {baseline.layout.part(None).prefixes[0] + key: value.shape for key, value in before.items()}
    x = images()
    assert_same(load_baseline(baseline, path)(x), learner.as_encoder()(x))
