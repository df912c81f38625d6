"""Commands that train: pretrain, adapt, demo, speedrun.

The command that runs one of the paper's ablations again.

Commands that start a run elsewhere: launch slurm.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from capi import api
from capi.cli.app import Device, OverrideArguments, TrustOption, app, duration, echo, messages, one_of, refuse_several
from capi.cli.terminal import Terminal, print_scores
from capi.cli.usage import RECIPE_HELP, Commands, between, others_than, refuse_idle
from capi.config.experiments import ablations
from capi.config.paper import paper_table
from capi.errors import INTERRUPTED, PREEMPTED, CapiError, counted

if TYPE_CHECKING:
    from capi.api import DataSummary, DemoSummary, LossLabel, PretrainedRun, StepCost

DataOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Folder of images, tar shards, tables, hf://name or demo; several as SOURCE@WEIGHT (docs/guides/data.md)."
    ),
]
OutOption = Annotated[Path | None, typer.Option(help="Folder of the run; it must be empty or new.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Resume the run in --out, if there is one.")]
ExtendOption = Annotated[
    bool, typer.Option("--extend", help="With --resume: train a finished run to more optimization.steps.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")]


@app.command()
def pretrain(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help=RECIPE_HELP)],
    overrides: OverrideArguments = None,
    data: DataOption = None,
    out: OutOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run a few real iterations, say what they cost, write nothing.")
    ] = False,
    resume: ResumeOption = False,
    extend: ExtendOption = False,
    overwrite: OverwriteOption = False,
    trust: TrustOption = None,
    device: Device = None,
    rounds: Annotated[
        int, typer.Option(callback=between(1, 10**6), help="Iterations that --check times; the best counts.")
    ] = 3,
) -> None:
    """Pretrain an encoder on unlabeled images."""
    if check:
        refuse_several("pretrain --check")
        refuse_idle(
            context,
            ("out", "resume", "extend", "overwrite"),
            "is of no use to --check, which writes nothing: leave it out",
        )
        _check(recipe, overrides or [], data, trust or [], device, rounds)
        return
    refuse_idle(context, ("rounds",), "is the number of iterations that --check times: add --check, or leave it out")
    # Given alike to all processes, so one of them says what is wrong: a typo before what is missing.
    if not data or out is None:
        api.load_config(recipe, overrides or [])
        raise typer.BadParameter(
            "pretrain needs --data, images to learn from, and --out, a folder for the run (or --check)"
        )
    _refuse_both(resume, overwrite)
    # Around all of it: a scheduler may ask before the first step, and torchrun does once one process has left.
    with api.StopRequest() as request:
        done = api.pretrain(
            recipe,
            overrides or [],
            data=data,
            out=out,
            resume=resume,
            extend=extend,
            overwrite=overwrite,
            device=device,
            trust=trust or [],
            console=messages(),
        )
        _say_end(done, request)


@app.command()
def adapt(
    model: Annotated[str, typer.Argument(help="What to start from: a run, a published model, baseline:NAME=FILE.")],
    overrides: OverrideArguments = None,
    data: DataOption = None,
    out: OutOption = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name, or the path of a YAML file.")] = "adapt",
    resume: ResumeOption = False,
    extend: ExtendOption = False,
    overwrite: OverwriteOption = False,
    trust: TrustOption = None,
    device: Device = None,
) -> None:
    """Continue to train a published encoder, or one of your own, on your images."""
    if not data or out is None:
        # A typo before what is missing; the size of images goes with the patches of the model, which is not opened.
        api.load_config(recipe, [each for each in overrides or [] if not each.startswith("data.image_size=")])
        raise typer.BadParameter("adapt needs --data, images to learn from, and --out, a folder for the run")
    _refuse_both(resume, overwrite)
    with api.StopRequest() as request:
        done = api.adapt(
            model,
            overrides or [],
            data=data,
            out=out,
            recipe=recipe,
            resume=resume,
            extend=extend,
            overwrite=overwrite,
            device=device,
            trust=trust or [],
            console=messages(),
        )
        _say_end(done, request)


def _say_end(done: "PretrainedRun", request: api.StopRequest) -> None:
    """Say where a run stands that trained to the end or to a signal."""
    if not done.finished:
        if done.is_main and done.step == 0:
            echo("Stopped before the first step, so nothing is saved. The same command starts again.")
        elif done.is_main:
            echo(f"Stopped at step {done.step}, saved. The same command with --resume continues.")
        request.ignore()
        raise typer.Exit(PREEMPTED if done.preempted else INTERRUPTED)
    if not done.is_main:
        return
    echo(f"{done.path} is complete, at step {done.step}. capi.load({str(done.path)!r}) gives its encoder.")
    if done.report is not None:
        echo(f"{done.report} shows how it went: open it in a browser.")


def _refuse_both(resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other: resume the run in --out, or replace it")


@app.command()
def demo(
    overrides: OverrideArguments = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("demo_run"),
    split: Annotated[str, typer.Option(help="Photos to classify at the end: val or test.")] = "test",
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out, if there is one.")] = False,
    overwrite: OverwriteOption = False,
    device: Device = None,
) -> None:
    """Pretrain a small encoder on built-in photos for some minutes, and show what it learnt."""
    one_of("--split", split, ("val", "test"))
    _refuse_both(resume, overwrite)
    summary = api.run_demo(
        out, overrides or [], split=split, resume=resume, overwrite=overwrite, device=device, console=messages()
    )
    if summary is None:
        echo("Stopped and saved. The same command with --resume continues.")
        raise typer.Exit(INTERRUPTED)
    Terminal().print(_demo_table(summary))


@app.command()
def speedrun(
    track: Annotated[str, typer.Argument(help="groceries, imagenette or cifar10.")],
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of a YAML file.")],
    overrides: OverrideArguments = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; it must be empty or new.")] = Path("speedrun"),
    data: Annotated[
        Path | None,
        typer.Option(help="imagenette: folder with train/CLASS and val/CLASS; cifar10: cifar-10-batches-bin."),
    ] = None,
    device: Device = None,
) -> None:
    """Race to a fixed score on fixed photos, and write a record of what it cost (benchmarks/speedrun)."""
    refuse_several("speedrun")
    record = api.speedrun(track, recipe, overrides or [], out=out, data=data, device=device, console=messages())
    if record is None:
        echo("Stopped: a race is run in one piece, so start it again in another folder.")
        raise typer.Exit(INTERRUPTED)
    reached = "reaches" if record["reached"] else "does not reach"
    echo(f"{record['score']:.1%} {reached} the goal of {record['goal']:.0%} on {track}.")
    echo(
        f"It cost {record['cpu_seconds']:.1f} CPU seconds and {record['flop']:.3g} FLOP; {out}/speedrun.json says all."
    )


def _demo_table(summary: "DemoSummary") -> Table:
    table = Table(title="What the demo learnt", box=None, show_header=False, title_justify="left", pad_edge=False)
    rows = {
        "loss": f"{summary.first_loss:.3f} at the first logged step, {summary.last_loss:.3f} at the last",
        "targets": "no prototypes"
        if summary.target_entropy is None or summary.prototype_use is None
        else f"entropy {summary.target_entropy:.2f} nat, balance of the assignments {summary.prototype_use:.0%}",
        f"k-NN, {summary.split} photos": f"{summary.trained:.1%} by the trained encoder",
        "": f"{summary.untrained:.1%} by the same encoder untrained",
        " ": f"{summary.pixels:.1%} by raw pixels (best of several: {summary.pixels_at})",
        "run": str(summary.run),
        "pictures": ", ".join(str(picture) for picture in summary.pictures),
    }
    if summary.report is not None:
        rows["report"] = f"{summary.report}: open it in a browser; `capi explore {summary.run}` looks further"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _check(
    recipe: str,
    overrides: list[str],
    data: list[str] | None,
    trust: list[str],
    device: str | None,
    rounds: int,
) -> None:
    with Progress(transient=True, console=Terminal(stderr=True)) as bar:
        task = bar.add_task(f"{rounds + 1} iterations", total=rounds + 1)
        result = api.check(
            recipe,
            overrides,
            data=data or None,
            device=device,
            rounds=rounds,
            progress=lambda: bar.advance(task),
            trust=trust,
        )
    console = Terminal()
    if result.data is not None:
        console.print(_data_table(result.data, result.images_per_second_read or 0.0))
        for warning in result.warnings:
            console.print(f"Warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    console.print(_cost_table(result.cost, result.loss, f"{recipe} on {result.device}", result.steps))


def _data_table(data: "DataSummary", images_per_second: float) -> Table:
    table = Table(title="Data", box=None, show_header=False, title_justify="left", pad_edge=False)
    kinds = ", ".join(f"{ending} {count}" for ending, count in data.endings.items())
    broken = str(len(data.broken))
    if data.broken:
        first, reason = next(iter(data.broken.items()))
        broken += f": {first} ({reason})" + (", ..." if len(data.broken) > 1 else "")
    rows = {
        "images": f"{data.total}, of which {data.looked_at} were looked at ({kinds})",
        "sizes": f"{data.smallest[1]} x {data.smallest[0]} to {data.largest[1]} x {data.largest[0]} pixels",
        "broken": broken,
        "mean, std": f"{_numbers(data.mean)}; {_numbers(data.std)}",
        "reading": f"{images_per_second:.0f} images/s in one process, from the files",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _numbers(values: list[float]) -> str:
    return api.significant(values)


def _cost_table(cost: "StepCost", loss: "LossLabel", title: str, steps: int) -> Table:
    table = Table(title=title, box=None, show_header=False, title_justify="left", pad_edge=False)
    flop = ", ".join(
        f"{name.replace('_', ' ')} {value / 1e9:.2f}" for name, value in cost.flop_an_image._asdict().items() if value
    )
    rows = {
        "encoder": f"{cost.encoder_parameters / 1e6:.1f} M parameters",
        "trained": f"{cost.trained_parameters / 1e6:.1f} M parameters, prototypes and predictor included",
        "required": f"{sum(cost.flop_an_image) / 1e9:.2f} GFLOP an image ({flop})",
        "iteration": f"{cost.seconds:.3f} s for {counted(cost.batch_size, 'image')}: {cost.images_per_second:.1f} "
        f"images/s, {cost.flop_per_second / 1e9:.0f} GFLOP/s",
        "peak memory": f"{cost.peak_bytes / 2**30:.2f} GiB",
        "whole run": f"{duration(cost.seconds * steps / 3600)} for {counted(steps, 'iteration')}, without reading data",
        "loss": f"{cost.student_loss:.3f} {loss.unit} ({loss.name.lower()})",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


@app.command()
def ablate(
    context: typer.Context,
    table: Annotated[str | None, typer.Argument(help="A table, such as predictor; --list names them.")] = None,
    overrides: OverrideArguments = None,
    data: Annotated[str | None, typer.Option(help="Images with labels: a folder, a CSV, or demo.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; tables may share it.")] = None,
    scale: Annotated[str, typer.Option(help="mini (minutes a run) or smoke (seconds).")] = "mini",
    seeds: Annotated[int, typer.Option(help="Runs of each row.", callback=between(1, 1000))] = 1,
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the benchmarks, such as label=breed; may be repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs that train at once.", callback=between(1, 1024))] = 1,
    photos: Annotated[bool, typer.Option(help="Whether the page shows some of the images.")] = True,
    device: Device = None,
    listing: Annotated[bool, typer.Option("--list", help="Name the tables and their rows.")] = False,
) -> None:
    """Run the rows of one of the paper's tables in miniature, and put them beside the paper's numbers on a page.

    Each row trains on the same images for the same number of steps, with each seed. Interrupted, the same command goes
    on. KEY=VALUE changes the recipe of all rows, such as optimization.steps=2000.
    """
    if listing:
        refuse_idle(
            context, others_than(context, "listing"), "is of no use to --list, which runs nothing: leave it out"
        )
        Terminal().print(_tables())
        return
    if table is None or data is None or out is None:
        raise CapiError("ablate needs a table, --data with images and labels, and --out, a folder (or --list)")
    done = api.ablate(
        table,
        overrides or [],
        data=data,
        out=out,
        scale=scale,
        seeds=seeds,
        options=option or [],
        device=device,
        jobs=jobs,
        photos=photos,
        console=messages(),
    )
    if done is None:
        echo("Stopped and saved. The same command resumes.")
        raise typer.Exit(INTERRUPTED)
    console, outcome = Terminal(), done.outcome
    rows = [
        (
            (row.name,),
            [
                *(api.paper_score(row, number) for number in range(len(outcome.paper.columns))),
                *(api.score_text(row.score(column)) for column in outcome.columns),
            ],
        )
        for row in outcome.everything
    ]
    console.print(f"{outcome.paper.title}: scores in per cent")
    print_scores(console, ("row",), [*(f"paper: {column}" for column in outcome.paper.columns), *outcome.columns], rows)
    console.print(f"{done.sentence}.")
    echo(f"wrote {done.page}: open it in a browser")


def _tables() -> Table:
    table = Table("table", "or", "what it compares", "rows", box=None, pad_edge=False)
    for name, ablation in ablations().items():
        rows = "; ".join(ablation.rows)
        table.add_row(name, "" if ablation.short == name else ablation.short, paper_table(name).title, rows)
    return table


launch_app = typer.Typer(cls=Commands, help="Start a run on a cluster.", no_args_is_help=True)
app.add_typer(launch_app, name="launch")


@launch_app.callback()
def launch() -> None:
    """Start a run on a cluster."""


@launch_app.command("slurm")
def slurm(
    recipe: Annotated[str, typer.Argument(help=RECIPE_HELP)],
    overrides: OverrideArguments = None,
    data: Annotated[list[str], typer.Option(help="What `capi pretrain --data` takes; may be repeated.")] = ...,  # type: ignore[assignment]
    out: Annotated[
        Path, typer.Option(help="Folder of the run, seen by all nodes; job script and log lie beside it.")
    ] = ...,  # type: ignore[assignment]
    trust: TrustOption = None,
    nodes: Annotated[int, typer.Option(callback=between(1, 10**5), help="Machines.")] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(callback=between(1, 1024), help="GPUs of each machine; one process for each.")
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
        int | None, typer.Option(callback=between(1, 1024), help="Cores for each process and its readers.")
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
    """Write a job script for Slurm beside the run and submit it; preempted, it is requeued and resumes."""
    messages()
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
