from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capi.errors import CapiError
from capi.evals import probe_protocol
from capi.evals.features import Encoding
from capi.evals.probe_protocol import (
    LARGE,
    AttentiveClassification,
    Cached,
    LinearClassification,
    Samples,
    Streamed,
    TrainedClassification,
    _head_deviations,
)
from capi.evals.probes import PAPER_GRID, ProbeSchedule, ProbeTrainer
from capi.evals.results import size_notes
from capi.evals.tasks import AnsweredImages, ClassificationData, LabeledImages
from capi.types import Features
from tests.evals.toys import (
    COLORS,
    PatchColors,
    RandomPatches,
    answered,
    beside_choice,
    colored_data,
    shades,
    source_of,
)

SMALL = Encoding(size=(12, 8), batch_size=5)
FAST = {"learning_rates": (1e-3, 1e-1, 5e-1), "weight_decays": (1e-3,)}
KINDS = {"attentive": AttentiveClassification, "linear": LinearClassification}


def protocol(kind: str = "linear", data: ClassificationData | None = None, **options: Any) -> TrainedClassification:
    values = {"encoding": SMALL, **FAST, "iterations": 40, "batch_size": 16, **options}
    return KINDS[kind](colored_data() if data is None else data, **values)


def of_size(images: int) -> ClassificationData:
    """Data of which only the labels are looked at."""
    train = LabeledImages(shades([]), torch.arange(images) % 3)
    return ClassificationData(tuple(COLORS), train, {"test": answered([0])})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["small", "paper"])
def test__classes_that_can_be_seen_are_all_recognised(kind: str, schedule: str) -> None:
    outcome = protocol(kind, schedule=schedule).run(PatchColors())
    assert outcome.main == 1.0
    assert outcome.chosen["validation"] == 1.0
    assert outcome.chosen in outcome.grid


def test__attention_finds_the_patch_that_tells_the_class() -> None:
    """One patch in six has the colour of the class, the others are grey and take its place at random."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % 2
        patches = 0.1 * torch.randn(count, 6, 8, generator=generator)
        patches[torch.arange(count), torch.randint(6, (count,), generator=generator), labels] += 2.0
        patches[:, :, 7] += torch.randn(count, 1, generator=generator)
        return patches.unflatten(1, (3, 2)), labels

    feature_map, labels = draw(120)

    class Looked:
        """Images are numbered by their brightness."""

        width, patch_size = 8, 4

        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            numbers = ((images[:, 0].mean((1, 2)) * 0.229 + 0.485) * 255).round().long()
            return Features(None, torch.zeros(len(images), 0, 8), feature_map[numbers])

    pictures = source_of([np.full((12, 8, 3), number, dtype=np.uint8) for number in range(120)])
    test = AnsweredImages(pictures, labels[:, None])
    data = ClassificationData(("left", "right"), LabeledImages(pictures, labels), {"test": test})
    assert protocol("attentive", data, iterations=150).run(Looked()).main > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test__the_streamed_path_works_to_the_end_in_few_steps(kind: str) -> None:
    outcome = protocol(kind, schedule="paper", iterations=5, batch_size=8).run(RandomPatches())
    assert outcome.details["iterations"] == 5
    assert outcome.details["batch"] == 8
    assert 0 <= outcome.main <= 1
    assert "features of each image's middle" not in " ".join(outcome.deviations)


def test__all_kinds_of_vectors_are_tried_and_scored() -> None:
    outcome = protocol().run(RandomPatches())
    kinds = ("mean_patch", "pooled", "both")
    assert list(outcome.scores) == ["test", *(f"test, {kind}" for kind in kinds)]
    assert [row["feature"] for row in outcome.grid] == [kind for kind in kinds for _ in range(3)]
    assert outcome.probe.model.feature == outcome.chosen["feature"]
    assert outcome.main == outcome.scores[f"test, {outcome.chosen['feature']}"]


def test__an_encoder_without_a_pooled_vector_is_a_warning() -> None:
    outcome = protocol().run(PatchColors(gives_pooled=False))
    assert beside_choice(outcome) == ["the encoder gives no pooled vector: the mean of the patches alone was used"]
    assert {row["feature"] for row in outcome.grid} == {"mean_patch"}


@pytest.mark.parametrize("kind", KINDS)
def test__a_choice_by_few_images_is_a_warning(kind: str) -> None:
    outcome = protocol(kind).run(RandomPatches())
    held_out = outcome.details["held-out images"]
    assert held_out == outcome.details["training images"] // 10
    (warning,) = outcome.warnings
    assert warning.startswith(f"the best of {len(outcome.grid)} settings was chosen by {held_out} held-out images")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["small", "paper"])
def test__the_same_seed_gives_the_same_scores(kind: str, schedule: str) -> None:
    data = colored_data(train=10, spread=400)

    def run(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed + 50)
        outcome = protocol(kind, data, schedule=schedule, iterations=8, seed=seed).run(RandomPatches())
        weights = [value for value in vars(outcome.probe.model).values() if isinstance(value, Tensor)]
        return outcome.scores, outcome.grid, torch.cat([value.flatten() for value in weights])

    first, second, other = run(0), run(0), run(1)
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])
    assert not torch.equal(first[2], other[2])


def losses_of(monkeypatch: pytest.MonkeyPatch, encoding: Encoding, **options: Any) -> tuple[Tensor, Any]:
    """The losses of every step and setting, and the scores."""
    losses: list[Tensor] = []
    update = ProbeTrainer.update

    def listening(trainer: ProbeTrainer, step: int) -> Tensor:
        losses.append(update(trainer, step))
        return losses[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ProbeTrainer, "update", listening)
        outcome = protocol(encoding=encoding, **options).run(RandomPatches())
    return torch.stack(losses), outcome


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["small", "paper"])
def test__the_batch_is_of_the_whole_job_however_it_is_divided(
    monkeypatch: pytest.MonkeyPatch, kind: str, schedule: str
) -> None:
    options = {"kind": kind, "data": colored_data(spread=300), "schedule": schedule, "iterations": 6}
    whole, first = losses_of(monkeypatch, replace(SMALL, batch_size=16), **options)
    for changes in ({"batch_size": 8}, {"batch_size": 5}, {"workers": 2}):
        parts, second = losses_of(monkeypatch, replace(SMALL, **{"batch_size": 16, **changes}), **options)
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)
        assert second.scores == pytest.approx(first.scores, abs=1e-5)
        assert second.chosen == first.chosen


def test__every_step_of_the_stream_has_the_whole_batch_in_parts_that_the_encoder_takes() -> None:
    encoder = RandomPatches()
    plan = ProbeSchedule(total_steps=3, warmup_steps=0, batch_size=12)
    split = probe_protocol.hold_out(24, 0.1, 0)
    samples = Streamed(protocol(), encoder, SMALL, split, plan, ("pooled", "patches"))
    steps = [list(parts) for parts in samples.training()]
    assert [[len(labels) for _, labels in parts] for parts in steps] == [[5, 5, 2]] * 3
    assert all(set(inputs) == {"pooled", "patches"} for parts in steps for inputs, _ in parts)
    held = list(samples.held_out())
    assert torch.equal(torch.cat([labels for _, labels in held]), samples.labels[split.held_out])


@pytest.mark.parametrize("samples", [Cached, Streamed])
def test__the_order_of_images_follows_from_the_seed(samples: type[Samples]) -> None:
    plan = ProbeSchedule(total_steps=1, warmup_steps=0, batch_size=12)
    split = probe_protocol.hold_out(24, 0.1, 0)

    def labels(seed: int) -> list[int]:
        made = samples(protocol(seed=seed), PatchColors(), SMALL, split, plan, ("patches",))
        return [label for parts in made.training() for _, part in parts for label in part.tolist()]

    assert labels(0) == labels(0) != labels(1)


def test__features_of_small_data_are_computed_once() -> None:
    counted = []

    class Counting(PatchColors):
        def __call__(self, images: Tensor, *, pooled: bool = True) -> Features:
            counted.append(len(images))
            return super().__call__(images, pooled=pooled)

    protocol("attentive").run(Counting())
    # 24 training and 12 test images, and none for a second time.
    assert sum(counted) == 24 + 12


def test__mapped_features_give_the_same(tmp_path: Path) -> None:
    here = protocol("attentive").run(RandomPatches())
    mapped = protocol("attentive", encoding=replace(SMALL, folder=tmp_path, memory_bytes=1)).run(RandomPatches())
    assert [path.name for path in tmp_path.iterdir()] == ["train_patches.bin"]
    assert (mapped.scores, mapped.grid) == (here.scores, here.grid)


def test__held_out_images_are_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    data = colored_data()
    # Labels that would be refused if a step saw them.
    split = probe_protocol.hold_out(24, 0.1, 0)
    labels = torch.full((24,), 1)
    labels[split.held_out] = 0
    data = replace(data, train=replace(data.train, labels=labels))
    seen: list[int] = []
    accumulate = ProbeTrainer.accumulate

    def listening(trainer: ProbeTrainer, inputs: Tensor, labels: Tensor) -> None:
        seen.extend(labels.tolist())
        accumulate(trainer, inputs, labels)

    monkeypatch.setattr(ProbeTrainer, "accumulate", listening)
    for schedule in ("small", "paper"):
        protocol(data=data, schedule=schedule, iterations=4).run(PatchColors())
    assert set(seen) == {1}


def test__heads_that_fail_are_warned_about() -> None:
    outcome = protocol("attentive", learning_rates=(1e-2, 1e38)).run(PatchColors())
    assert beside_choice(outcome) == ["1 head given up, since the loss was not finite"]
    assert outcome.grid[1]["validation"] is None
    assert outcome.chosen == outcome.grid[0]


def test__heads_that_all_fail_are_an_error() -> None:
    with pytest.raises(CapiError, match="no setting is left"):
        protocol("attentive", learning_rates=(1e38,)).run(PatchColors())


@pytest.mark.parametrize("kind", KINDS)
def test__one_class_alone_is_an_error(kind: str) -> None:
    data = colored_data()
    data = replace(data, train=replace(data.train, labels=torch.zeros(24, dtype=torch.long)))
    with pytest.raises(CapiError, match="one class"):
        protocol(kind, data).run(PatchColors())


def test__the_papers_schedule_is_the_default_for_large_data_alone() -> None:
    def plan(images: int, **options: Any) -> ProbeSchedule:
        return LinearClassification(of_size(images), **options)._plan(images * 9 // 10)

    assert plan(LARGE) == ProbeSchedule(12500, 1250, 1024)
    assert plan(1000, schedule="paper") == ProbeSchedule(12500, 1250, 1024)
    # 50 passes over 90,000 images are more than the paper's.
    assert plan(LARGE, schedule="small") == ProbeSchedule(12500, 1250, 256)
    # 50 passes over 9,000 images, 256 at a time.
    assert plan(10_000) == ProbeSchedule(1758, 175, 256)
    assert plan(100) == ProbeSchedule(200, 20, 90)
    assert plan(10_000, iterations=30, batch_size=7) == ProbeSchedule(30, 3, 7)


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("options", [{}, {"schedule": "paper"}])
def test__the_papers_own_settings_are_no_deviation(kind: type, options: dict[str, Any]) -> None:
    """At 224 px with patches of 16, and heads of width 64."""
    chosen = kind(of_size(LARGE), **options)
    deviations = chosen._deviations(chosen._plan(LARGE * 9 // 10))
    deviations += _head_deviations(chosen.features, 1024)
    used = chosen.encoding.fitted(16).size
    assert deviations + size_notes(chosen.encoding.size, used, 16, (224, 224)) == []
    assert (chosen.settings, len(PAPER_GRID)) == (PAPER_GRID, 30)


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        ({"iterations": 1000}, ["iterations: 1000 instead of 12500", "warm-up: 100 instead of 1250"]),
        ({"batch_size": 256}, ["batch: 256 instead of 1024"]),
        ({"validation_share": 0.2}, ["validation share: 0.2 instead of 0.1"]),
        (FAST, ["a grid of 3 settings that is not the paper's of 30"]),
        (
            {"schedule": "small"},
            [
                "batch: 256 instead of 1024",
                "features of each image's middle, computed once, instead of random crops and flips",
            ],
        ),
    ],
)
def test__each_deviation_is_reported_and_no_other(options: dict[str, Any], sentences: list[str]) -> None:
    chosen = AttentiveClassification(of_size(LARGE), **options)
    assert chosen._deviations(chosen._plan(LARGE)) == sentences


def test__heads_of_another_width_are_reported() -> None:
    assert _head_deviations(("patches",), 96) == [
        "attention heads of width 48 instead of 64, of which 96 is no multiple"
    ]
    assert _head_deviations(("mean_patch", "both"), 96) == []
    assert _head_deviations(("patches",), 384) == []


def test__a_run_lists_its_deviations() -> None:
    data = replace(colored_data(), notes=("one image is missing",))
    outcome = protocol("attentive", data, iterations=3).run(PatchColors())
    assert outcome.deviations == [
        "iterations: 3 instead of 12500",
        "warm-up: 0 instead of 1250",
        "batch: 16 instead of 1024",
        "features of each image's middle, computed once, instead of random crops and flips",
        "a grid of 3 settings that is not the paper's of 30",
        "attention heads of width 3 instead of 64, of which 3 is no multiple",
        "image size: 12 x 8 px instead of 224 x 224 px",
        "one image is missing",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test__the_probe_gives_the_scores_again(kind: str) -> None:
    data, encoder = colored_data(spread=400), RandomPatches()
    outcome = protocol(kind, data).run(encoder)
    model, test = outcome.probe.model, data.tests["test"]
    assert (outcome.probe.kind, outcome.probe.size) == (kind, (12, 8))
    batches = probe_protocol.encoded_batches(encoder, test.images, SMALL, pooled=True)
    chosen = torch.cat([model.judge(model.inputs(batch.features)).argmax(1) for batch in batches])
    assert (chosen == test.answers[:, 0]).double().mean().item() == pytest.approx(outcome.main)
    assert outcome.main < 1


def test__progress_of_training_is_reported() -> None:
    progress = []
    protocol(encoding=replace(SMALL, progress=lambda *facts: progress.append(facts)), iterations=3).run(PatchColors())
    assert [facts for facts in progress if facts[0] == "training heads"] == [
        ("training heads", step, 3) for step in (1, 2, 3)
    ]
