"""What the doctor says of made-up runs, of a real one, and of folders in every bad state."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from capi.config.files import dump_config, parse_config
from capi.config.schema import CONFIG_VERSION, Config
from capi.errors import CapiError
from capi.report.doctor import Diagnosis, diagnosis_text, doctor
from capi.report.pages.data import RunState
from capi.report.references import make_reference, parse_reference
from capi.train.health import RULES, Finding, FindingState, Watchman
from capi.train.run import pretrain, run_facts
from capi.zoo.run_folder import RunFolder
from tests.photos import noise_photos
from tests.variants import TARGETS, varied

STEPS = 400


@pytest.fixture
def config(small_config: Config) -> Config:
    tree = small_config.model_dump(mode="json")
    tree["optimization"] |= {"steps": STEPS}
    return parse_config(tree)


def healthy(config: Config, step: int) -> dict[str, Any]:
    """A record in which every value is well."""
    facts = run_facts(config)
    record: dict[str, Any] = {"student_loss": 4 - step / STEPS}
    record |= {"clustering_loss": 9 - step / STEPS} if config.target.kind == "clustering" else {}
    record |= {"seconds": 2.0 * step, "broken_images": 0.0}
    for rule in Watchman(facts).rules:
        low, high = rule.limits(facts)
        record[rule.key] = 2 * low if np.isinf(high) else high / 2
    return record | ({"folder/knn/teacher": 0.3 + step / 1000} if step % 100 == 0 else {})


def write_run(
    folder: Path, config: Config, steps: int = STEPS, changes: dict[str, Any] | None = None, **record: Any
) -> Path:
    """A run with a checkpoint; `changes` are made to every record after the first quarter."""
    facts = {"path": "some images", "images": 100, "fingerprint": "photos"}
    RunFolder(folder).create(dump_config(config), {"seed": config.seed, "data": facts, **record})
    lines = []
    for step in range(10, steps + 1, 10):
        changed = changes if changes and step > steps / 4 else {}
        lines.append(json.dumps({"step": step, **healthy(config, step), **changed}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    checkpoint = folder / "checkpoints" / f"step_{steps:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"format": 2, "step": steps}))
    return folder


def titles(diagnosis: Diagnosis, state: FindingState) -> set[str]:
    return {finding.title for finding in diagnosis.of(state)}


def finding(diagnosis: Diagnosis, title: str) -> Finding:
    return next(finding for finding in diagnosis.findings if finding.title == title)


def test__a_healthy_run_is_well(config: Config, tmp_path: Path) -> None:
    diagnosis = doctor(write_run(tmp_path / "run", config))
    assert not diagnosis.has_alarms
    assert diagnosis.state.kind == "finished"
    assert diagnosis.of("alarm") == diagnosis.of("look") == []
    assert {rule.title for rule in RULES} <= titles(diagnosis, "well")
    assert {"Checkpoint", "Loss of the student", "folder/knn/teacher", "Speed", "Images", "Batch"} <= titles(
        diagnosis, "well"
    )
    assert titles(diagnosis, "unknown") == {"Reference runs"}
    assert diagnosis.sentence == "All is well."


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test__a_healthy_run_of_another_target_lacks_nothing(config: Config, tmp_path: Path, kind: str) -> None:
    diagnosis = doctor(write_run(tmp_path / "run", varied(config, *TARGETS[kind])))
    assert diagnosis.sentence == "All is well."
    assert titles(diagnosis, "unknown") == {"Reference runs"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test__each_range_raises_an_alarm_with_its_advice(config: Config, tmp_path: Path, rule: Any) -> None:
    low, high = rule.limits(run_facts(config))
    value = low / 2 if np.isinf(high) else 2 * high
    diagnosis = doctor(write_run(tmp_path / "run", config, changes={rule.key: value}))
    assert diagnosis.has_alarms
    assert titles(diagnosis, "alarm") == {rule.title}
    assert finding(diagnosis, rule.title).advice.startswith(rule.below if value < low else rule.above)
    assert diagnosis.sentence.startswith("1 thing not well")


def test__an_alarm_that_is_over_is_reported_with_its_step(config: Config, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[10:20]:
        line["position_share"] = 0.9
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    diagnosis = doctor(run)
    assert not diagnosis.has_alarms
    assert [finding.text for finding in diagnosis.of("look")] == ["alarm at step 130, over now"]


def test__nan_is_an_alarm(config: Config, tmp_path: Path) -> None:
    diagnosis = doctor(write_run(tmp_path / "run", config, changes={"student_loss": None, "effective_rank": None}))
    assert titles(diagnosis, "alarm") == {"Loss of the student", "Effective rank of the features"}
    assert "NaN" in finding(diagnosis, "Effective rank of the features").text
    diagnosis_text(diagnosis)


def test__a_run_that_was_interrupted_names_the_command_that_resumes(config: Config, tmp_path: Path) -> None:
    words = ["/somewhere/capi", "pretrain", "demo", "model.depth=2", "--overwrite", "--data", "my photos", "--out", "r"]
    home = tmp_path / "home of [red]"
    start = {"command": words, "folder": str(home), "step": 0}
    home.mkdir()
    diagnosis = doctor(write_run(home / "r", config, steps=200, starts=[start]))
    assert (diagnosis.state.kind, diagnosis.has_alarms) == ("stopped", False)
    state = finding(diagnosis, "State")
    assert state.text == "stopped at step 200 of 400"
    command = f"cd '{home}' && capi pretrain demo model.depth=2 --data 'my photos' --out r --resume"
    assert state.advice == f"To resume: {command}"
    # As it stands: no part of it is taken for a style.
    assert command in printed(diagnosis)
    assert finding(diagnosis, "Checkpoint").text == "the newest is of step 200"


def test__a_run_that_was_moved_is_resumed_where_it_is(config: Config, tmp_path: Path) -> None:
    words = ["/somewhere/capi", "pretrain", "demo", "--data", "photos", "--out", "r"]
    start = {"command": words, "folder": "/home/of/another", "step": 0}
    diagnosis = doctor(write_run(tmp_path / "moved", config, steps=200, starts=[start]))
    assert f"--out {tmp_path / 'moved'} --resume" in finding(diagnosis, "State").advice


def test__a_run_that_python_started_names_a_command_that_does_the_same(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "my run"
    diagnosis = doctor(write_run(run, config, steps=200, starts=[{"command": ["notebook.py"], "step": 0}]))
    expected = f"capi pretrain '{run}/config.yaml' --data 'some images' --out '{run}' --resume"
    assert finding(diagnosis, "State").advice == f"To resume: {expected}"


_TRAINER = """
import fcntl, sys
with open(sys.argv[1], "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test__a_run_that_is_running_is_recognized_by_its_lock(config: Config, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config, steps=200)
    command = [sys.executable, "-c", _TRAINER, str(run / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "held\n"
        while_trained = doctor(run)
        trainer.communicate()
    assert while_trained.state.kind == "running"
    assert "State" not in titles(while_trained, "look")
    assert doctor(run).state.kind == "stopped"


def test__a_run_without_metrics_is_not_known(config: Config, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config)
    (run / "metrics.jsonl").unlink()
    diagnosis = doctor(run)
    assert not diagnosis.has_alarms
    assert finding(diagnosis, "Metrics").text == "nothing was logged yet"
    assert finding(diagnosis, "State").text == "the run ended before it logged anything"
    assert {rule.title for rule in RULES} <= titles(diagnosis, "unknown")
    (run / "metrics.jsonl").write_text("")
    assert doctor(run).findings == diagnosis.findings


def test__a_half_written_line_and_lines_that_are_no_records_are_left_out(config: Config, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config)
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"step": 410, "student_lo')
    diagnosis = doctor(run)
    assert diagnosis.state.step == STEPS
    assert [finding.text for finding in diagnosis.of("look")] == [
        "the last line of metrics.jsonl is cut off, and was left out"
    ]
    (run / "metrics.jsonl").write_text(f"[3]\nnull\n{whole}")
    assert "2 lines of metrics.jsonl left out" in finding(doctor(run), "Metrics").text


def test__a_run_that_was_not_measured_says_so_once(config: Config, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = {rule.key for rule in RULES} - {"target_entropy"}
    records = [{key: value for key, value in line.items() if key not in measured} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    diagnosis = doctor(run)
    assert titles(diagnosis, "unknown") == {"Health", "Reference runs"}
    assert "Effective rank of the features" in finding(diagnosis, "Health").text
    assert "Entropy of the targets" in titles(diagnosis, "well")


def test__a_config_of_a_newer_version_leaves_what_can_be_said(config: Config, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config)
    text = (run / "config.yaml").read_text().replace(f"version: {CONFIG_VERSION}", "version: 99")
    (run / "config.yaml").write_text(text)
    diagnosis = doctor(run)
    assert "install a newer capi; health is not judged" in finding(diagnosis, "Config").text
    assert {"Checkpoint", "Loss of the student", "folder/knn/teacher"} <= titles(diagnosis, "well")
    assert not titles(diagnosis, "well") & {rule.title for rule in RULES}


def test__what_is_no_run_is_refused_and_of_a_newer_one_is_said_what_can_be(config: Config, tmp_path: Path) -> None:
    with pytest.raises(CapiError, match="there is no folder"):
        doctor(tmp_path / "nowhere")
    with pytest.raises(CapiError, match="is no run"):
        doctor(tmp_path)
    run = write_run(tmp_path / "run", config)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"format": 99}))
    diagnosis = doctor(run)
    assert "newer capi" in finding(diagnosis, "Config").text
    assert "Loss of the student" in titles(diagnosis, "well")
    (run / "run.json").write_text(json.dumps(record))
    (run / "config.yaml").unlink()
    with pytest.raises(CapiError, match=r"it has no config\.yaml"):
        doctor(run)


def test__checkpoints_that_are_missing_or_unreadable_are_reported(config: Config, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config)
    state = run / "checkpoints" / f"step_{STEPS:08d}" / "state.json"
    for text, message in (
        ('{"format": 99}', "install a newer capi"),
        ("", "is damaged"),
        ('{"format": 2, "x": 1}', "does not say where the run stands"),
    ):
        state.write_text(text)
        diagnosis = doctor(run)
        assert titles(diagnosis, "alarm") == {"Checkpoint"}
        assert message in finding(diagnosis, "Checkpoint").text
    state.unlink()
    assert "the encoder is lost" in finding(doctor(run), "Checkpoint").text
    half = write_run(tmp_path / "half", config, steps=200)
    (half / "checkpoints" / "step_00000200" / "state.json").unlink()
    assert finding(doctor(half), "Checkpoint").state == "unknown"


@pytest.mark.parametrize("data", [None, [], {}, {"images": "many"}])
def test__a_strange_record_of_the_data_is_no_reason_to_fail(config: Config, tmp_path: Path, data: Any) -> None:
    run = write_run(tmp_path / "run", config, data=data, starts=[3])
    diagnosis = doctor(run)
    assert not diagnosis.has_alarms
    assert "Images" not in {finding.title for finding in diagnosis.findings}


def test__curves_outside_of_the_reference_runs_are_reported(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for seed in range(3):
        changes = {"student_loss": 3.0 + 0.1 * seed}
        runs.append(write_run(tmp_path / str(seed), config.model_copy(update={"seed": seed}), changes=changes))
    made = parse_reference(json.dumps(make_reference(runs, "demo")), "made up")
    monkeypatch.setattr("capi.report.doctor.reference_for", lambda *_: made)
    inside = doctor(runs[1])
    count = len(made.curves)
    assert (
        finding(inside, "Reference runs").text
        == f"{count} of {count} curves lie where those of 3 reference runs of demo do"
    )
    diagnosis = doctor(write_run(tmp_path / "odd", config, changes={"student_loss": 3.5}))
    assert not diagnosis.has_alarms
    state = finding(diagnosis, "student_loss against reference runs")
    assert state.state == "look"
    assert (
        state.text
        == "3.5 after 100% of the run; 3 reference runs of demo have 3 to 3.2, and 2.8 to 3.4 is taken for normal"
    )
    assert finding(diagnosis, "Reference runs").text.startswith(f"{count - 1} of {count} curves")


def printed(diagnosis: Diagnosis) -> str:
    """The diagnosis as the command prints it."""
    console = Console(width=80, highlight=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(diagnosis_text(diagnosis))
    return capture.get()


def test__the_text_has_what_is_wrong_first_and_every_finding(tmp_path: Path) -> None:
    state = RunState("running", 5, 10)
    listed = [
        Finding("unknown", "D", "d"),
        Finding("well", "C", "c"),
        Finding("look", "B", "b [red]not a style[/]", "B advice"),
        Finding("alarm", "A", "a", "A advice"),
    ]
    diagnosis = Diagnosis(Path("[/] run"), state, listed)
    assert diagnosis.has_alarms
    assert printed(diagnosis).splitlines() == [
        "[/] run: The run is training, at step 5 of 10.",
        "1 thing not well, 1 worth a look.",
        "",
        "Not well",
        "  A: a",
        "    A advice",
        "",
        "Worth a look",
        "  B: b [red]not a style[/]",
        "    B advice",
        "",
        "Well",
        "  C: c",
        "",
        "Not known",
        "  D: d",
    ]
    assert Diagnosis(Path("x"), state, listed[:3]).sentence == "No alarm; 1 thing worth a look."
    assert Diagnosis(Path("x"), state, listed[:1]).sentence == "Nothing is known yet."


def test__a_real_run_is_diagnosed(small_config: Config, tmp_path: Path) -> None:
    images = noise_photos(tmp_path / "images", 30)
    tree = small_config.model_dump(mode="json")
    tree["optimization"] |= {"steps": 16}
    tree["data"] |= {"workers": 0}
    tree["run"] |= {"log_steps": 1, "loggers": []}
    pretrain(parse_config(tree), data=images, out=tmp_path / "run", device=torch.device("cpu"))
    diagnosis = doctor(tmp_path / "run")
    assert (diagnosis.state.kind, diagnosis.state.step) == ("finished", 16)
    assert finding(diagnosis, "Checkpoint").state == "well"
    assert {rule.title for rule in RULES} <= titles(diagnosis, "well") | titles(diagnosis, "alarm")


def with_statistics(run: Path, mean: Any, std: Any) -> Path:
    record = json.loads((run / "run.json").read_text())
    record["data"]["statistics"] = {"mean": mean, "std": std}
    (run / "run.json").write_text(json.dumps(record))
    return run


DIM = ([0.00712] * 3, [0.00207] * 3)


def test__the_range_of_the_images_is_named_as_the_cause_of_a_collapse(tmp_path: Path, config: Config) -> None:
    collapsed = write_run(tmp_path / "a", config, changes={"effective_rank": 0.1, "position_share": 0.9})
    diagnosis = doctor(with_statistics(collapsed, *DIM))
    first = diagnosis.of("alarm")[0]
    assert first.title == "Range of the images"
    assert "mean 0.00712,0.00712,0.00712 and std 0.00207,0.00207,0.00207" in first.text
    assert first.advice == "Start another run with data.mean=auto data.std=auto."
    # Of a run that is well it is worth a look, and what fits is well.
    fine = with_statistics(write_run(tmp_path / "b", config), *DIM)
    assert [finding.state for finding in doctor(fine).findings if finding.title == first.title] == ["look"]
    fine = with_statistics(fine, [0.5, 0.4, 0.4], [0.2, 0.2, 0.2])
    assert [finding.state for finding in doctor(fine).findings if finding.title == first.title] == ["well"]


@pytest.mark.parametrize(
    "values", [None, 3, [], ["a", "b", "c"], [0.1], [0.1, 0.1, float("nan")], [True, None, 0.1], {"a": 1}, "auto"]
)
def test__statistics_that_are_none_are_left_out(tmp_path: Path, config: Config, values: Any) -> None:
    run = with_statistics(write_run(tmp_path / "a", config), values, [0.1, 0.1, 0.1])
    assert not [finding for finding in doctor(run).findings if finding.title == "Range of the images"]


def test__what_is_set_is_never_advised(tmp_path: Path, config: Config) -> None:
    changes = {"position_share": 0.9, "position_information": 0.9, "student_loss": None}
    start = {"command": [], "device": "cpu"}
    advised = {}
    for name, options in (
        ("without", ["clustering.sinkhorn=standard", "masking.roll=false", "run.precision=bfloat16"]),
        ("with", ["clustering.sinkhorn=positionwise", "masking.roll=true", "run.precision=float32"]),
        ("half", ["clustering.sinkhorn=positionwise", "masking.roll=false", "run.precision=auto"]),
    ):
        run = write_run(tmp_path / name, varied(config, *options), changes=changes, starts=[start])
        advised[name] = " ".join(finding.advice for finding in doctor(run).findings)
    for setting in ("clustering.sinkhorn=positionwise", "masking.roll=true", "run.precision=float32"):
        assert setting in advised["without"]
        assert setting not in advised["with"]
    # On a CPU `auto` is float32.
    assert "masking.roll=true" in advised["half"]
    assert "positionwise" not in advised["half"]
    assert "float32" not in advised["half"]


@pytest.mark.parametrize(
    ("overrides", "images", "batch", "data"),
    [
        (["clustering.prototypes=256", "optimization.batch_size=64"], 675, "well", "well"),
        (["clustering.prototypes=2048", "optimization.batch_size=128"], 500, "look", "look"),
        (["clustering.prototypes=2048", "optimization.batch_size=8"], 9999, "look", "well"),
        (
            ["clustering.prototypes=256", "optimization.batch_size=128", "clustering.sinkhorn=standard"],
            9999,
            "well",
            "well",
        ),
    ],
)
def test__batch_and_data_must_suffice_for_the_prototypes(
    config: Config, tmp_path: Path, overrides: list[str], images: int, batch: str, data: str
) -> None:
    facts = {"path": "some images", "images": images}
    diagnosis = doctor(write_run(tmp_path / "run", varied(config, *overrides), data=facts))
    assert (finding(diagnosis, "Batch").state, finding(diagnosis, "Data").state) == (batch, data)
    assert ("clustering.prototypes" in finding(diagnosis, "Batch").advice) == (batch == "look")
    assert f"{images:,} images" in finding(diagnosis, "Data").text


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test__batches_are_not_judged_where_nothing_is_clustered(config: Config, tmp_path: Path, kind: str) -> None:
    diagnosis = doctor(write_run(tmp_path / "run", varied(config, "clustering.prototypes=4096", *TARGETS[kind])))
    assert not {"Batch", "Data", "Loss of the clustering"} & {finding.title for finding in diagnosis.findings}
