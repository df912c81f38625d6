import dataclasses
import json
from pathlib import Path

import pytest

from capi.api.ablation import FAILURE, Study, gather, outcome_of, training_clock
from capi.zoo.run_folder import read_metrics


def test__a_finished_study_has_scores_curves_costs_and_pictures(done: Study) -> None:
    table = gather(done)
    assert table.finished
    assert [row.name for row in table.everything] == ["standard", "positionwise", "untrained encoder", "raw pixels"]
    for row in table.everything:
        assert set(row.runs[0].scores) == set(table.columns) == set(table.measures)
    run = table.rows[0].runs[0]
    assert (run.steps, run.total_steps, run.trained) == (4, 4, True)
    assert [point.images for point in run.curves["csv/knn"]] == [0, 8, 16]
    assert 0 < run.seconds < 60
    assert run.curves["csv/knn"][-1].seconds == run.seconds
    assert run.pictures[0].photo is not None
    assert run.report == "runs/sinkhorn-standard-seed0/report.html"
    assert table.rows[0].cost.images_seen == 16
    assert table.shortest == min(row.seconds.mean for row in table.rows)


def test__photos_can_be_left_out(done: Study) -> None:
    (with_photos, *_), (left_out, *_) = (outcome_of(done.jobs[-1], photos=photos).pictures for photos in (True, False))
    assert with_photos.photo is not None
    assert left_out.photo is None
    assert left_out.pictures == with_photos.pictures


def test__scores_are_those_of_the_results(done: Study) -> None:
    run = gather(done).rows[0].runs[0]
    (results,) = (done.out / "scores" / run.name / "cells").glob("*attentive*/results.json")
    assert run.scores["csv/attentive"] == next(iter(json.loads(results.read_text())["scores"].values()))


def test__what_has_not_been_run_is_empty(done: Study, tmp_path: Path) -> None:
    elsewhere = [dataclasses.replace(job, out=tmp_path) for job in done.jobs]
    table = gather(dataclasses.replace(done, out=tmp_path, jobs=elsewhere))
    assert not table.finished
    assert table.shortest is None
    assert all(not run.done for row in table.everything for run in row.runs)


def test__a_run_that_broke_off_counts_as_done(done: Study, tmp_path: Path) -> None:
    job = dataclasses.replace(done.jobs[-1], out=tmp_path)
    job.scores.mkdir(parents=True)
    (job.scores / FAILURE).write_text(json.dumps({"reason": "out of memory"}))
    assert outcome_of(job).failure == "out of memory"
    assert outcome_of(job).done


def test__the_clock_leaves_out_evaluations_and_continues_when_a_run_is_resumed() -> None:
    records = [
        {"step": 1, "seconds": 10.0, "evaluation_seconds": 0.0},
        {"step": 1, "score": 1},
        {"step": 2, "seconds": 25.0, "evaluation_seconds": 5.0},
        {"step": 3, "seconds": 4.0, "evaluation_seconds": 0.0},
        {"step": 4, "seconds": 9.0, "evaluation_seconds": 2.0},
    ]
    assert training_clock(records) == {0: 0.0, 1: 10.0, 2: 20.0, 3: 24.0, 4: 27.0}


def test__evaluations_are_logged_apart_from_training(done: Study) -> None:
    records = read_metrics(done.jobs[-1].run / "metrics.jsonl")
    last = [record for record in records if "seconds" in record][-1]
    assert 0 < last["evaluation_seconds"] < last["seconds"]
    assert training_clock(records)[4] == pytest.approx(last["seconds"] - last["evaluation_seconds"])
