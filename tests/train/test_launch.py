"""Job scripts, run by a Slurm that is played by three small scripts."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from capi.config.files import load_config
from capi.errors import CapiError
from capi.train.launch import FIRST_PORT, PORTS, SlurmOptions, check_job, slurm_script, submit

JOB = 70123


def executable(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with sbatch, srun and scontrol: two tasks on this machine; srun's code is the largest of theirs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    executable(
        folder / "sbatch",
        f'export SLURM_JOB_ID={JOB} SLURM_JOB_NODELIST="node[7-8]"\n'
        f'echo "Submitted batch job {JOB}"; bash "$1" >{tmp_path}/log 2>&1; echo $? >{tmp_path}/code; exit 0',
    )
    executable(
        folder / "srun",
        'while [[ "$1" == --* ]]; do shift; done\nexport SLURM_NTASKS=2\n'
        'for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done\n'
        'largest=0\nfor task in "${tasks[@]}"; do wait "$task"; code=$?; ((code > largest)) && largest=$code; done\n'
        "exit $largest",
    )
    executable(
        folder / "scontrol",
        f'[ "$1" = show ] && printf "node7\\nnode8\\n" && exit 0\necho "$@" >>{tmp_path}/scontrol',
    )
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def fake_python(folder: Path, code: int) -> str:
    """Notes what it is called with and where it stands, and leaves with a code; the second task a little later."""
    return str(
        executable(
            folder / "python",
            'place="$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT"\n'
            f'printf "%s\\n" "$place" "$@" >{folder}/task$RANK\n'
            f"sleep 0.$RANK; exit {code}",
        )
    )


@pytest.mark.parametrize("code", [0, 75, 1, 2])
def test__every_task_knows_its_place_and_only_75_is_requeued(slurm: Path, code: int) -> None:
    overrides = ["optimization.batch_size=64", "data.crop_scale=[0.5, 1.0]"]
    options = SlurmOptions(nodes=1, gpus_per_node=2, python=fake_python(slurm, code))
    data = slurm / "photos of $HOME; it's `here`"
    data.mkdir()
    script = slurm_script("demo", overrides, data=str(data), out=slurm / "runs" / "first", options=options)
    path, said = submit(script, slurm / "runs" / "first")
    assert said == f"Submitted batch job {JOB}"
    assert path == slurm / "runs" / "first-job.sh"
    assert not (slurm / "runs" / "first").exists()
    port = JOB % PORTS + FIRST_PORT
    called = ["-m", "capi", "pretrain", "demo", *overrides, "--data", str(data), "--out", str(slurm / "runs/first")]
    for rank in (0, 1):
        place, *arguments = (slurm / f"task{rank}").read_text().splitlines()
        assert place == f"{rank} {rank} 2 node7 {port}"
        assert arguments == [*called, "--resume"]
    assert (slurm / "code").read_text().strip() == str(code)
    requeued = (slurm / "scontrol").read_text().split() if (slurm / "scontrol").exists() else []
    assert requeued == (["requeue", str(JOB)] if code == 75 else [])


def test__a_signal_to_the_script_itself_does_not_end_it_before_its_tasks(slurm: Path) -> None:
    python = executable(
        slurm / "python", f"trap 'exit 75' USR1; echo $$ >{slurm}/pid$RANK; for i in {{1..100}}; do sleep 0.05; done"
    )
    options = SlurmOptions(gpus_per_node=2, python=str(python))
    script = slurm / "job.sh"
    script.write_text(slurm_script("demo", [], data="demo", out=slurm / "run", options=options))
    job = subprocess.Popen(
        ["bash", str(script)],
        env={**os.environ, "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n"},
        start_new_session=True,
    )
    pids = [slurm / "pid0", slurm / "pid1"]
    while not all(pid.exists() and pid.read_text() for pid in pids):
        assert job.poll() is None
    job.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.3)
    for pid in pids:
        os.kill(int(pid.read_text()), signal.SIGUSR1)
    assert job.wait(10) == 75
    assert (slurm / "scontrol").read_text().split() == ["requeue", "5"]


def test__directives_ask_for_a_task_a_gpu_and_a_warning(tmp_path: Path) -> None:
    options = SlurmOptions(
        nodes=4, gpus_per_node=8, partition="gpu", account="vision", qos="high", constraint="a100&ib",
        time="1-00:00:00", mem="400G", cpus_per_gpu=12, extra=("#SBATCH --exclusive",), setup=("module load cuda",),
    )  # fmt: skip
    lines = slurm_script("vitl14", [], data="photos", out=tmp_path / "large", options=options).splitlines()
    directives = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert directives == {
        "--job-name=large", "--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=12",
        "--partition=gpu", "--account=vision", "--qos=high", "--constraint=a100&ib", "--time=1-00:00:00", "--mem=400G",
        f"--output={tmp_path}/large-slurm-%j.log", "--open-mode=append", "--requeue",
        "--signal=USR1@180", "--exclusive",
    }  # fmt: skip
    # All directives stand before the first command, or Slurm does not read them.
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[first:])
    (number,) = (number for number, line in enumerate(lines) if line.startswith("srun"))
    assert lines.index("module load cuda") < number
    assert lines[number].startswith("srun --cpus-per-task=12 ")


def test__all_sources_go_into_the_job_with_their_weights(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    data = [f"{tmp_path}/photos@1", "web/*.tar@3", "hf://name?split=train@2"]
    script = slurm_script("demo", [], data=data, out=tmp_path / "run", options=SlurmOptions())
    assert f"--data {tmp_path}/photos@1 --data 'web/*.tar@3' --data 'hf://name?split=train@2' --out" in script


def test__images_that_are_not_here_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "photos").mkdir()
    given = [str(tmp_path / "photos"), "demo", "hf://name", "web/*.tar", "web/{000..123}.tar"]
    with caplog.at_level("WARNING", logger="capi"):
        for data in given:
            slurm_script("demo", [], data=data, out=tmp_path / "run", options=SlurmOptions())
        assert not caplog.messages
        slurm_script("demo", [], data=f"{tmp_path}/phtos", out=tmp_path / "run", options=SlurmOptions())
    (message,) = caplog.messages
    assert message == f"there is no {tmp_path}/phtos on this machine: the job fails unless its nodes have it"


def test__a_place_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "sbatch", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "file").write_text("")
    with pytest.raises(CapiError, match="is a file: `out` takes the folder"):
        submit("#!/bin/bash\n", tmp_path / "file")
    with pytest.raises(CapiError, match="cannot be written"):
        submit("#!/bin/bash\n", tmp_path / "file" / "run")


def test__a_recipe_in_a_file_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("extends: demo\nversion: 3\n")
    script = slurm_script("own.yaml", [], data="demo", out="run", options=SlurmOptions())
    assert shlex.quote(str(tmp_path / "own.yaml")) in script
    assert f"--out {tmp_path}/run " in script
    assert "--data demo " in script


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "dmeo"}, 'did you mean "demo"'),
        ({"overrides": ["model.dept=3"]}, 'did you mean "model.depth"'),
        ({"options": SlurmOptions(nodes=3, gpus_per_node=8)}, "cannot be divided among 24 GPUs"),
        ({"options": SlurmOptions(partition="a b")}, "`partition` must be one word"),
        ({"options": SlurmOptions(account="a\n#SBATCH --x")}, "`account` must be one word"),
        ({"options": SlurmOptions(extra=("rm -rf /",))}, "`extra` takes whole lines"),
        ({"options": SlurmOptions(extra=("#SBATCH --a\nrm",))}, "printable"),
        ({"out": "a b"}, "cannot hold spaces"),
        ({"data": "a\nb"}, "`data` must be one line"),
        ({"options": SlurmOptions(time="25h")}, "`time` 25h is nothing that Slurm knows"),
        ({"options": SlurmOptions(setup=('echo "open',))}, "is no line of a shell"),
        ({"options": SlurmOptions(mem="lots")}, "`mem` lots is nothing that Slurm knows"),
        ({"options": SlurmOptions(gpus_per_node=2), "overrides": ["distributed.shards=3"]}, "does not divide 2 GPUs"),
    ],
)
def test__a_job_that_could_only_fail_is_refused(changes: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "recipe": "demo",
        "overrides": [],
        "data": "demo",
        "out": "run",
        "options": SlurmOptions(),
    }
    given |= changes
    with pytest.raises(CapiError, match=message):
        slurm_script(given.pop("recipe"), given.pop("overrides"), **given)  # type: ignore[arg-type]


def test__micro_batches_divide_what_a_gpu_has() -> None:
    config = load_config("demo", ["optimization.batch_size=64", "optimization.micro_batches=16"])
    check_job(config, SlurmOptions(gpus_per_node=4))
    with pytest.raises(CapiError, match="in 16 micro-batches cannot be divided among 8 GPUs"):
        check_job(config, SlurmOptions(gpus_per_node=8))


def test__without_slurm_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CapiError, match=r"there is no sbatch here: .* `dry_run`"):
        submit("#!/bin/bash\n", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test__what_sbatch_complains_of_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(CapiError, match=r"refused .*code 1.*invalid partition"):
        submit("#!/bin/bash\n", tmp_path / "run")
