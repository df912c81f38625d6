"""Jobs as a user starts them; what the script does is in tests/train/test_launch.py."""

from pathlib import Path

import pytest

from tests.cli.conftest import RunHere, assert_refused


def test__a_dry_run_prints_the_script_and_writes_nothing(run_here: RunHere, tmp_path: Path) -> None:
    ran = run_here(
        *("launch", "slurm", "vitl14", "optimization.micro_batches=2", "--data", "photos", "--out", tmp_path / "run"),
        *("--nodes", 4, "--gpus-per-node", 8, "--time", "24:00:00", "--extra", "#SBATCH --exclusive", "--dry-run"),
        *("--python", "/opt/python"),
    )
    assert ran.code == 0, ran.stderr
    assert "there is no photos on this machine" in " ".join(ran.stderr.split())
    assert ran.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=run\n#SBATCH --nodes=4\n")
    assert "#SBATCH --time=24:00:00\n" in ran.stdout
    assert "#SBATCH --exclusive\n" in ran.stdout
    called = (
        f"/opt/python -m capi pretrain vitl14 optimization.micro_batches=2 --data photos --out {tmp_path}/run --resume"
    )
    assert called in ran.stdout
    assert list(tmp_path.iterdir()) == []


def test__a_job_is_handed_over(run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ran = run_here("launch", "slurm", "demo", "--gpus-per-node", 2, "--data", "demo", "--out", tmp_path / "runs" / "a")
    assert ran.code == 0, ran.stderr
    assert ran.stdout.startswith("Submitted batch job 7\n")
    assert (tmp_path / "runs" / "a-job.sh").read_text().startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--gpus-per-node", "7"], "cannot be divided among 7 GPUs"),
        (["dmeo"], 'did you mean "demo"'),
        (["demo", "model.dept=3"], 'did you mean "model.depth"'),
        (["demo", "--partition", "a b"], "--partition must be one word"),
        (["demo"], "there is no sbatch here"),
    ],
)
def test__a_job_that_could_only_fail_is_refused(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert_refused(run_here("launch", "slurm", *arguments, "--data", "demo", "--out", tmp_path / "run"), message)
    assert list(tmp_path.iterdir()) == []
