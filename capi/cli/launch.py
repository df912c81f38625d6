"""Commands that start a run elsewhere: launch slurm."""

from pathlib import Path
from typing import Annotated

import typer

from capi import api
from capi.cli.app import Overrides, Trust, app, echo
from capi.cli.usage import Commands

launch_app = typer.Typer(cls=Commands, help="Start a run on a cluster.", no_args_is_help=True)
app.add_typer(launch_app, name="launch")


@launch_app.callback()
def launch() -> None:
    """Start a run on a cluster."""


@launch_app.command("slurm")
def slurm(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of a YAML file.")],
    overrides: Overrides = None,
    data: Annotated[list[str], typer.Option(help="What `capi pretrain --data` takes; may be repeated.")] = ...,  # type: ignore[assignment]
    out: Annotated[
        Path, typer.Option(help="Folder of the run, seen by all nodes; job script and log lie beside it.")
    ] = ...,  # type: ignore[assignment]
    trust: Trust = None,
    nodes: Annotated[int, typer.Option(min=1, max=10**5, help="Machines.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, max=1024, help="GPUs of each machine; one process for each.")
    ] = 8,
    time: Annotated[
        str | None, typer.Option(help="Time limit, such as 24:00:00; the run is requeued after it.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's --partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's --account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Slurm's --qos.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Slurm's --constraint.")] = None,
    mem: Annotated[str | None, typer.Option(help="Slurm's --mem, such as 200G.")] = None,
    cpus_per_gpu: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Cores for each process and its readers.")
    ] = None,
    job_name: Annotated[str | None, typer.Option(help="By default that of the run's folder.")] = None,
    extra: Annotated[
        list[str] | None, typer.Option(help='A whole line such as "#SBATCH --exclusive"; may be repeated.')
    ] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help='A shell line before the run, such as "module load cuda".')
    ] = None,
    python: Annotated[str | None, typer.Option(help="The Python of the nodes; by default this one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script, submit nothing.")] = False,
) -> None:
    """Write a job script for Slurm beside the run and submit it; preempted, it is requeued and goes on."""
    options = api.SlurmOptions(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        partition=partition,
        account=account,
        qos=qos,
        constraint=constraint,
        time=time,
        mem=mem,
        cpus_per_gpu=cpus_per_gpu,
        job_name=job_name,
        extra=tuple(extra or ()),
        setup=tuple(setup or ()),
        **({"python": python} if python else {}),
    )
    script = api.slurm_script(recipe, overrides or [], data=data, out=out, options=options, trust=trust or [])
    if dry_run:
        echo(script, nl=False)
        return
    path, said = api.submit(script, out)
    echo(f"{said}\n{path} is the job's script; the log lies beside it.")
