import dataclasses
import json
from pathlib import Path

import pytest

from capi.api import ablation
from capi.api.ablation import FAILURE, AblationJob, Study, ablate, finish, gather, plan_study
from capi.errors import CapiError
from capi.train.run import PretrainedRun
from capi.zoo.run_folder import RunFolder, run_config
from tests.api.studies import QUICK, SMALL


def test__a_row_can_be_run_again_by_hand_from_its_recipe(done: Study) -> None:
    for job in done.jobs:
        if job.config is not None:
            assert capi_config(job.recipe) == run_config(RunFolder(job.run))


def capi_config(path: Path):
    from capi.config.files import load_config

    return load_config(path)


def test__what_is_done_is_not_done_again(done: Study, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("trained or evaluated again")

    monkeypatch.setattr("capi.train.loop.Loop.run", fail)
    monkeypatch.setattr("capi.api.comparison.evaluate", fail)
    before = gather(done)
    shown = ablate("sinkhorn", SMALL, data=data, out=done.out, scale="smoke", options=QUICK, device="cpu")
    assert shown is not None
    assert shown.page == done.out / "sinkhorn.html"
    after = gather(done)
    assert [run.scores for row in after.everything for run in row.runs] == [
        run.scores for row in before.everything for run in row.runs
    ]


def test__another_table_shares_the_default_run(done: Study, data: Path) -> None:
    other = plan_study("registers", SMALL, data=str(data), out=done.out, scale="smoke", options=QUICK)
    shared = {job.name: job for job in done.jobs if job.name == "default-seed0"}
    assert next(job for job in other.jobs if job.name == "default-seed0") == shared["default-seed0"]


def test__a_run_that_breaks_off_is_a_result_and_the_study_continues(
    done: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = dataclasses.replace(done.jobs[-1], out=tmp_path)
    (job.run / "checkpoints" / "step_00000001").mkdir(parents=True)

    def broken(*_: object, **__: object) -> None:
        raise CapiError("the loss is NaN")

    monkeypatch.setattr(ablation, "pretrain", broken)
    finish(job)
    assert json.loads((job.scores / FAILURE).read_text()) == {"reason": "the loss is NaN"}


def test__a_study_that_cannot_begin_is_no_result(done: Study, tmp_path: Path) -> None:
    job = dataclasses.replace(done.jobs[-1], out=tmp_path, data=str(tmp_path / "nowhere"))
    with pytest.raises(CapiError, match="nowhere"):
        finish(job)
    assert not job.scores.exists()


def test__interrupted_it_says_so_and_keeps_what_is_done(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "pretrain", lambda *_, **__: PretrainedRun(tmp_path, 1, finished=False))
    given = {"data": data, "out": tmp_path, "scale": "smoke", "options": QUICK, "device": "cpu"}
    assert ablate("sinkhorn", SMALL, **given) is None
    assert (tmp_path / "sinkhorn.html").exists()
    assert (tmp_path / "scores" / "pixels" / "comparison.json").exists()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ablation, "finish", interrupt)
    assert ablate("sinkhorn", SMALL, **given) is None


def test__a_process_that_was_asked_to_stop_begins_nothing_new(done: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def interrupt(job: AblationJob) -> None:
        started.append(job.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(ablation, "finish", interrupt)
    monkeypatch.setattr(ablation._Stopping, "asked", False)
    for job in done.jobs[:3]:
        with pytest.raises(ablation.InterruptionError):
            ablation._finish_unless_stopped(job)
    assert started == [done.jobs[0].name]


def test__labels_that_do_not_fit_are_reported_by_the_first_evaluation(data: Path, tmp_path: Path) -> None:
    given = {"data": data, "out": tmp_path, "scale": "smoke", "device": "cpu"}
    with pytest.raises(CapiError, match=r'pixels could not be judged by csv/attentive: .* no column "breed"'):
        ablate("sinkhorn", SMALL, options=[*QUICK, "label=breed"], **given)


@pytest.mark.thorough
def test__several_runs_at_once_give_the_same_scores(done: Study, data: Path, tmp_path: Path) -> None:
    ablate("sinkhorn", SMALL, data=data, out=tmp_path, scale="smoke", options=QUICK, device="cpu", jobs=2)
    other = plan_study("sinkhorn", SMALL, data=str(data), out=tmp_path, scale="smoke", options=QUICK)
    scores_of_both = [[run.scores for row in gather(study).everything for run in row.runs] for study in (done, other)]
    assert scores_of_both[0] == [pytest.approx(scores, abs=1e-6) for scores in scores_of_both[1]]


def test__scores_of_other_settings_are_no_part_of_a_study(done: Study, data: Path) -> None:
    changes = [*SMALL, "optimization.steps=13"]
    with pytest.raises(CapiError, match=r"other settings \(optimization.steps was 4, is 13\): choose another"):
        ablate("sinkhorn", changes, data=data, out=done.out, scale="smoke", options=QUICK, device="cpu")
