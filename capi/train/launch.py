"""A run as a Slurm job: the script is written beside the run and submitted.

One task for each GPU, started by `srun`; each task learns its rank from Slurm and calls `capi pretrain --resume`, so
that the same script starts a run and resumes it. Some minutes before the time is up Slurm sends SIGUSR1 to every
task, and SIGTERM when the job must make room: the run saves and leaves with exit code 75, and exactly then the job is
put back into the queue. Any other code but 0 ends the job with that code.
"""

import logging
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from capi.config.files import load_config
from capi.config.schema import Config
from capi.config.trust import Trust, trusted_code, trusting
from capi.errors import PREEMPTED, CapiError, counted
from capi.runtime.atomic import atomic_write
from capi.train.build import mask_sampler
from capi.zoo.build import target_settings

_LOG = logging.getLogger("capi")
# Seconds before the end at which Slurm sends the signal: long enough to finish a step and to save.
WARNING_SECONDS = 180
SCRIPT = "job.sh"
# Minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
_TIME = r"(\d+-)?\d+(:[0-5]?\d){0,2}"
_MEMORY = r"\d+[KMGT]?B?"
LOG = "slurm-%j.log"
# A port that follows from the job's number, so that jobs that share a machine do not meet.
FIRST_PORT, PORTS = 15000, 15000


@dataclass(frozen=True)
class SlurmOptions:
    """What Slurm is asked for; None leaves it to the cluster. `extra` are whole lines that start with #SBATCH."""

    nodes: int = 1
    gpus_per_node: int = 1
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    mem: str | None = None
    cpus_per_gpu: int | None = None
    job_name: str | None = None
    extra: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str = sys.executable

    @property
    def tasks(self) -> int:
        return self.nodes * self.gpus_per_node


def slurm_script(
    recipe: str,
    overrides: Iterable[str],
    *,
    data: str | Sequence[str],
    out: str | Path,
    options: SlurmOptions,
    trust: Trust = (),
) -> str:
    """The job script of a run whose recipe, values and numbers are known to be good."""
    overrides = list(overrides)
    config = load_config(recipe, overrides)
    check_job(config, options)
    with trusting(trust, overrides):
        # Components that are misspelt or lack a setting fail here, not in a queue.
        mask_sampler(config)
        target_settings(config)
    folder = _plain_folder(Path(out).absolute())
    # A path would mean another file in the folder where the job runs.
    named = str(Path(recipe).absolute()) if Path(recipe).suffix in {".yaml", ".yml"} else recipe
    command = [options.python, "-m", "capi", "pretrain", named, *overrides]
    for source in [data] if isinstance(data, str) else data:
        command += ["--data", _whole(_one_line("data", source))]
    for code in sorted(trusted_code(trust)):
        command += ["--trust", _one_line("trust", code)]
    command += ["--out", str(folder), "--resume"]
    cores = "" if options.cpus_per_gpu is None else f" --cpus-per-task={options.cpus_per_gpu}"
    for line in options.extra:
        if not re.match(r"#SBATCH\s+-", line) or not _one_line("extra", line):
            raise CapiError(f'--extra takes whole lines such as "#SBATCH --exclusive", not {line!r}')
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {line}" for line in _directives(options, folder)),
        *options.extra,
        "",
        _PREAMBLE,
        *options.setup,
        _MASTER.format(ports=PORTS, first=FIRST_PORT),
        # In single quotes, so that each task fills in its own numbers.
        # A task that leaves first must not have the others killed while they save.
        # srun does not take the job's number of cores for its tasks by itself.
        f"srun{cores} --kill-on-bad-exit=0 bash -c {shlex.quote(_TASK)} capi-task {shlex.join(command)} &",
        _WAITING.format(code=PREEMPTED),
    ]
    return "\n".join(lines) + "\n"


# bash itself must outlive the signals that make the tasks save.
_PREAMBLE = """# The run resumes where it was when this script starts again.
set -u
trap : USR1 USR2 TERM"""
_MASTER = """export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_PORT=$((SLURM_JOB_ID % {ports} + {first}))"""
_TASK = 'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"; exec "$@"'
# Waiting is cut short by every signal that is trapped.
_WAITING = """running=$!
while :; do
    wait "$running"
    code=$?
    kill -0 "$running" 2>/dev/null || break
done
# The last one may have been cut short as the tasks ended: their own code can still be read.
wait "$running"
code=$?
if [ "$code" -eq {code} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code\""""


def _directives(options: SlurmOptions, folder: Path) -> Iterator[str]:
    yield f"--job-name={_one_word('job_name', options.job_name or folder.name)}"
    yield f"--nodes={options.nodes}"
    yield f"--ntasks-per-node={options.gpus_per_node}"
    yield f"--gpus-per-node={options.gpus_per_node}"
    if options.cpus_per_gpu is not None:
        yield f"--cpus-per-task={options.cpus_per_gpu}"
    for name in ("partition", "account", "qos", "constraint", "time", "mem"):
        value = getattr(options, name)
        if value is not None:
            yield f"--{name}={_one_word(name, value)}"
    yield f"--output={folder.parent / folder.name}-{LOG}"
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=USR1@{WARNING_SECONDS}"


def _one_line(name: str, value: str) -> str:
    if not value or not value.isprintable():
        raise CapiError(f"--{name.replace('_', '-')} must be one line of printable characters, not {value!r}")
    return value


def _one_word(name: str, value: str) -> str:
    """Lines that start with #SBATCH are read by Slurm, whose quoting is not the shell's: nothing there needs any."""
    if not re.fullmatch(r"[\w.,:@%+&|()\[\]*=/-]+", value):
        raise CapiError(f"--{name.replace('_', '-')} must be one word of letters, digits and .,:-, not {value!r}")
    return value


def _plain_folder(folder: Path) -> Path:
    if not re.fullmatch(r"[\w./+=@,:-]+", str(folder)):
        raise CapiError(
            f"Slurm's log lies beside --out, and its name cannot hold spaces, quotes or %, as {str(folder)!r} does"
        )
    return folder


def _whole(data: str) -> str:
    """A path of the file system in full, since a job may run elsewhere; other sources as they are."""
    name, at, weight = data.rpartition("@") if not Path(data).exists() else (data, "", "")
    name = name or data
    if name == "demo" or not Path(name).exists():
        if name != "demo" and "://" not in name and not set(name) & set("{*?["):
            _LOG.warning("there is no %s on this machine: the job fails unless its nodes have it", name)
        return data
    return str(Path(name).absolute()) + at + weight


def check_job(config: Config, options: SlurmOptions) -> None:
    """A job that could only fail is refused before it waits in a queue."""
    batch, parts = config.optimization.batch_size, config.optimization.micro_batches
    for name, pattern, example in (("time", _TIME, "24:00:00 or 2-12:00:00"), ("mem", _MEMORY, "200G or 0 for all")):
        value = getattr(options, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise CapiError(f"--{name} {value} is nothing that Slurm knows: give it as {example}")
    for line in options.setup:
        try:
            shlex.split(line)
        except ValueError as error:
            raise CapiError(f"--setup {line!r} is no line of a shell ({error}): close what is open") from error
    shards = config.distributed.shards
    if shards is not None and options.tasks % shards:
        raise CapiError(
            f"distributed.shards is {shards}, which does not divide {counted(options.tasks, 'GPU')}: set a divisor"
        )
    if options.nodes < 1 or options.gpus_per_node < 1:
        raise CapiError(f"a job needs at least one node and one GPU, not {options.nodes} and {options.gpus_per_node}")
    if batch % (options.tasks * parts):
        raise CapiError(
            f"a batch of {counted(batch, 'image')} in {counted(parts, 'micro-batch')} cannot be divided among "
            f"{counted(options.tasks, 'GPU')} ({counted(options.nodes, 'node')} with "
            f"{options.gpus_per_node} each): change one of them"
        )


def submit(script: str, out: str | Path, *, run: Sequence[str] = ("sbatch",)) -> tuple[Path, str]:
    """Write the script beside the run's folder and hand it to Slurm; where it is, and what Slurm said."""
    program = shutil.which(run[0])
    if program is None:
        raise CapiError(
            f"there is no {run[0]} here: submit from a machine of the cluster, or see the job with --dry-run"
        )
    folder = Path(out).absolute()
    if folder.is_file():
        raise CapiError(f"{folder} is a file: --out takes the folder of the run")
    # Beside and not inside: the folder of a run must be new or its own.
    path = folder.parent / f"{folder.name}-{SCRIPT}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, script)
    except OSError as error:
        raise CapiError(f"{path} cannot be written ({error.strerror}): give another --out") from error
    done = subprocess.run([program, *run[1:], str(path)], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise CapiError(f"sbatch refused {path} (code {done.returncode}): {' '.join(done.stderr.split())}")
    return path, done.stdout.strip()
