"""Memory part by part, against sizes worked out by hand and against a real learner."""

from dataclasses import replace

import pytest
import torch

from capi.config.files import load_config
from capi.method.pixel_targets import PixelTargets
from capi.method.registry import TARGETS
from capi.models.costs import ALWAYS, CLUSTERING, STUDENT, TEACHER, UPDATE, Counts, MemoryPart, Workload
from capi.train.build import build_learner
from capi.train.cost.hardware import gpus
from capi.train.cost.memory import MemoryPlan, Saving
from capi.train.cost.plan import networks
from capi.train.cost.step import measure_step
from capi.train.dry_run import _noise


def sizes(plan: MemoryPlan) -> dict[str, float]:
    return {f"{part.phase}: {part.name}": part.bytes for part in plan.parts}


def test__the_peak_is_what_is_always_there_and_the_largest_phase() -> None:
    parts = [
        MemoryPart("a", 5, ALWAYS),
        MemoryPart("b", 3, TEACHER),
        MemoryPart("c", 4, CLUSTERING),
        MemoryPart("d", 2, STUDENT),
        MemoryPart("e", 3, STUDENT),
    ]
    plan = MemoryPlan(parts)
    assert plan.phases == {TEACHER: 8, CLUSTERING: 9, STUDENT: 10, UPDATE: 5}
    assert (plan.peak, plan.peak_phase) == (10, STUDENT)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test__what_is_held_is_what_a_real_learner_holds_after_a_step(optimizer: str) -> None:
    config = load_config("demo", ["optimization.batch_size=4", "model.depth=2", f"optimization.optimizer={optimizer}"])
    learner = build_learner(config)
    measure_step(learner, [_noise(config, torch.device("cpu"))], 36, 1, lambda: None)
    planned = sizes(networks(config, gpus()["t4"]).memory(4, Saving()))

    def held(optimizer: torch.optim.Optimizer) -> int:
        states = (value for state in optimizer.state.values() for value in state.values() if value.ndim)
        return sum(4 * value.numel() for value in states)

    assert planned["always: student's weights"] == sum(4 * weight.numel() for weight in learner.student.parameters())
    assert planned["always: teacher's weights"] == sum(4 * weight.numel() for weight in learner.teacher.parameters())
    assert planned["always: prototypes"] == sum(4 * weight.numel() for weight in learner.target.parameters())
    assert planned["always: student's moments"] == held(learner.student_optimizer)
    assert learner.target_optimizer is not None
    assert planned["always: prototypes' moments"] == held(learner.target_optimizer)
    # 36 patches and 4 registers of width 128; 20 predictions over 256 prototypes; 48 x 48 pixels of 3 channels.
    assert planned["student: teacher's tokens"] == 4 * 4 * 40 * 128
    assert planned["student: targets"] == 4 * 4 * 20 * 256
    assert planned["always: images"] == 4 * 4 * 3 * 48 * 48


def test__each_saving_saves_where_it_should() -> None:
    planned = networks(load_config("vitl14"), gpus()["a100-80g"])
    plain = Saving(mixed_precision=True)

    def phases(**changes: object) -> dict[str, float]:
        return planned.memory(512, replace(plain, **changes)).phases  # type: ignore[arg-type]

    before = phases()
    sharded = phases(shards=8)
    assert all(sharded[phase] < before[phase] for phase in before)
    for changes in ({"checkpointing": "full"}, {"checkpointing": "selective"}, {"micro_batches": 4}):
        assert phases(**changes)[STUDENT] < 0.65 * before[STUDENT]
    assert phases(mixed_precision=False)[STUDENT] > 1.2 * before[STUDENT]
    unbounded = phases(bounded_clustering=False)
    # Five arrays of 512 images, 256 patches and 16384 prototypes, in place of slices that fill up to four gibibytes.
    arrays = 5 * 4 * 512 * 256 * 16384
    assert arrays - 4 * 2**30 <= unbounded[CLUSTERING] - before[CLUSTERING] <= arrays - 2.5 * 2**30
    assert (unbounded[TEACHER], unbounded[STUDENT]) == (before[TEACHER], before[STUDENT])


def test__micro_batches_keep_the_tokens_of_the_whole_batch() -> None:
    held = sizes(networks(load_config("demo"), gpus()["t4"]).memory(64, Saving(micro_batches=8)))
    assert held["student: teacher's tokens"] == 4 * 64 * 40 * 128
    assert held["clustering: tokens of all micro-batches in one"] == 4 * 64 * 36 * 128
    # Two vectors for each of 36 positions and a number for each of 64 x 36 tokens.
    assert held["student: factors that rebuild targets"] == 4 * (2 * 36 * 256 + 64 * 36)
    # Those of one micro-batch.
    assert held["student: targets"] == 4 * 8 * 20 * 256


@pytest.mark.parametrize("overrides", [["target.kind=pixels"], ["target.kind=ema_head"], ["target.kind=features"]])
def test__other_targets_have_no_clustering(overrides: list[str]) -> None:
    plan = networks(load_config("demo", overrides), gpus()["t4"]).memory(64, Saving())
    assert not [part for part in plan.parts if "clustering" in part.name]
    outputs = {"pixels": 3 * 8 * 8, "ema_head": 256, "features": 128}[overrides[0].partition("=")[2]]
    assert sizes(plan)["student: targets"] == 4 * 64 * 20 * outputs
    assert plan.peak_phase == STUDENT


def test__a_target_of_one_s_own_says_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hoard(PixelTargets):
        """Keeps a number of each image."""

        def memory(self, counts: Counts, work: Workload, outputs: int) -> list[MemoryPart]:
            return [
                *super().memory(counts, work, outputs),
                MemoryPart("a number of each image", 4 * work.images, ALWAYS),
            ]

    monkeypatch.setitem(TARGETS, "hoard", Hoard)
    a100 = gpus()["a100-80g"]
    plans = [
        networks(load_config("demo", [f"target.kind={kind}"]), a100).memory(64, Saving())
        for kind in ("hoard", "pixels")
    ]
    assert plans[0].peak - plans[1].peak == 4 * 64
