"""The command that plans a run on paper: plan."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from capi import api
from capi.cli.app import OverrideArguments, TrustOption, app, duration, echo
from capi.cli.terminal import Terminal, print_scores
from capi.cli.usage import RECIPE_HELP, between, others_than, refuse_idle
from capi.config import files
from capi.errors import CapiError, counted

if TYPE_CHECKING:
    from capi.api import Assumptions, Measured, PlanComparison, RunPlan, Suggestion

GIB = 2**30


@app.command("plan")
def plan(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help=RECIPE_HELP)] = None,
    overrides: OverrideArguments = None,
    model: Annotated[
        str | None, typer.Option(help="Plan `capi adapt` of this model; a baseline:NAME needs no file.")
    ] = None,
    gpus: Annotated[int, typer.Option(callback=between(1, 10**6), help="How many GPUs, over all machines.")] = 1,
    gpu: Annotated[
        str, typer.Option(help="Which; `this` is the machine at hand, --gpu list names the others.")
    ] = "this",
    suggest: Annotated[
        list[str] | None, typer.Option(help="Images to suggest a run for, in place of a recipe; may be repeated.")
    ] = None,
    hours: Annotated[
        float, typer.Option(callback=between(0.01, 1e6), help="With --suggest: how long the run may take.")
    ] = 24.0,
    measure: Annotated[bool, typer.Option("--measure", help="With --gpu this: run real steps and compare.")] = False,
    images: Annotated[
        int | None, typer.Option(callback=between(1, 2**20), help="Images of a step that --measure runs.")
    ] = None,
    mfu: Annotated[
        float | None,
        typer.Option(
            callback=between(0.001, 1),
            help="Share of the GPU's peak FLOP/s that a run reaches; by default 0.06 to 0.45 of a data sheet, by width "
            "and run.compile, and 0.6 if measured.",
        ),
    ] = None,
    pue: Annotated[
        float, typer.Option(callback=between(1, 100), help="Power of the data centre over that of its GPUs.")
    ] = 1.1,
    carbon_intensity: Annotated[
        float | None,
        typer.Option(callback=between(0, 1000), help="kgCO2eq a kWh; by default 0.48, the world's average."),
    ] = None,
    trust: TrustOption = None,  # noqa: ARG001 - read by its callback
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a run would need on so many GPUs: memory, hours, energy; or suggest one for a folder of images."""
    if gpu == "list":
        refuse_idle(
            context, others_than(context, "gpu", "as_json"), "is of no use to --gpu list: leave one of both out"
        )
        _print_gpus(as_json)
        return
    if (recipe is None) == (not suggest):
        raise CapiError("capi plan needs one of both: a recipe, or --suggest with images")
    if measure:
        _refuse_to_measure(elsewhere=gpu != "this" or gpus > 1, suggesting=bool(suggest))
    elif images is not None:
        raise CapiError("--images is the number that --measure runs: add --measure, or set optimization.batch_size")
    _refuse_idle(context, measure=measure, suggest=bool(suggest))
    if suggest:
        refuse_idle(context, ("model",), "is what a recipe would start from, and --suggest chooses one: leave it out")
    carbon = api.CARBON_INTENSITY if carbon_intensity is None else carbon_intensity
    assumptions = api.Assumptions(mfu=mfu, pue=pue, carbon_intensity=carbon)
    if suggest:
        _suggest(suggest, gpu, gpus, hours, assumptions, as_json)
        return
    assert recipe is not None
    if model is None:
        config = files.load_config(recipe, overrides or [])
    else:
        config = api.adapted_config(model, overrides or [], recipe=recipe, weights=False)
    if measure:
        _measure(config, images, assumptions, as_json)
        return
    planned = api.plan(config, gpu=gpu, gpus=gpus, assumptions=assumptions)
    paper = api.against_paper(config, assumptions)
    if as_json:
        _print_json(plan_json(planned, paper))
        return
    _print_plan(recipe, planned, paper)


def _refuse_to_measure(*, elsewhere: bool, suggesting: bool) -> None:
    if elsewhere:
        raise CapiError("--measure runs steps in one process on this machine: leave out --gpu and --gpus")
    if suggesting:
        raise CapiError("--measure and --suggest exclude each other: measure the recipe that was suggested")


def _refuse_idle(context: typer.Context, *, measure: bool, suggest: bool) -> None:
    if not suggest:
        refuse_idle(context, ("hours",), "is the time that --suggest may fill: add --suggest, or leave it out")
    for mode, chosen in (("--measure", measure), ("--suggest", suggest)):
        if chosen:
            reason = f"is an assumption about energy, of which {mode} says nothing: leave it out"
            refuse_idle(context, ("pue", "carbon_intensity"), reason)


def _print_plan(recipe: str, planned: "RunPlan", paper: "list[PlanComparison] | None") -> None:
    console = Terminal()
    for table in (_summary(recipe, planned), _memory_table(planned)):
        console.print(table)
        console.print()
    console.print("With and without each saving")
    phases = planned.memory.phases
    savings = [
        (
            (variant.name,),
            [
                *(f"{size / GIB:.2f}" for size in (variant.memory.peak, *variant.memory.phases.values())),
                str(variant.largest_images),
            ],
        )
        for variant in planned.variants
    ]
    print_scores(
        console, ("saving",), ["peak GiB", *(f"{phase} GiB" for phase in phases), "largest images a GPU"], savings
    )
    console.print()
    if paper is not None:
        console.print(_comparison_table("Against the paper: 32 A100-80GB, with the same assumptions", "paper", paper))


def _summary(recipe: str, planned: "RunPlan") -> Table:
    effort, chosen = planned.effort, planned.assumptions
    flop = ", ".join(
        f"{name} {value / 1e9:.2f}" for name, value in planned.flop_an_image._asdict().items() if value
    ).replace("_", " ")
    precision = "bfloat16" if planned.saving.mixed_precision else "float32"
    peak = planned.gpu.peak("bfloat16" if planned.saving.mixed_precision else "float32") / 1e12
    rows = {
        "encoder": f"{planned.encoder_parameters / 1e6:.1f} M parameters",
        "trained": f"{planned.trained_parameters / 1e6:.1f} M parameters, prototypes and predictor included",
        "required": f"{sum(planned.flop_an_image) / 1e9:.2f} GFLOP an image ({flop})",
        "images": f"{planned.images_seen:.3g} seen, {planned.batch_size} in a batch: {planned.images_a_gpu} for a GPU",
        "GPU": f"{planned.gpu.memory / 1e9:.0f} GB, {peak:.4g} TFLOP/s in {precision}"
        f" ({'measured' if planned.gpu.measured else 'data sheet'})",
        "time": f"{duration(effort.hours)}, {effort.gpu_hours:,.2f} GPU hours, {effort.seconds_a_step:.3g} s a step"
        f" (assumed: {planned.mfu:.0%} of the peak, --mfu)",
        "energy": _energy(planned),
        "memory": f"{planned.memory.peak / GIB:.2f} GiB at its peak (phase: {planned.memory.peak_phase}), "
        f"{planned.usable_memory / GIB:.2f} GiB can be used ({chosen.usable:.0%})",
        "fits": _fit(planned),
    }
    return _two_columns(f"{recipe} on {planned.gpus} x {planned.gpu.title}: a plan, nothing was run", rows)


def _energy(planned: "RunPlan") -> str:
    effort, chosen = planned.effort, planned.assumptions
    if effort.kwh is None or effort.kg_co2 is None:
        return "not known: the power of this machine is not"
    return (
        f"{effort.kwh:,.1f} kWh, {effort.kg_co2:,.1f} kgCO2eq (assumed: {planned.gpu.watts:.0f} W a GPU, "
        f"--pue {chosen.pue:g}, --carbon-intensity {chosen.carbon_intensity:g} kg/kWh)"
    )


def _fit(planned: "RunPlan") -> str:
    """What a GPU can have, and how the recipe's batch is reached."""
    accumulation = planned.accumulation
    room = f"a GPU has room for {counted(planned.largest_images, 'image')}"
    if planned.fits:
        return f"yes; {room}"
    if accumulation.micro_batches is not None:
        return (
            f"no: {room}; optimization.micro_batches={accumulation.micro_batches} reaches the batch, or see the "
            "savings below"
        )
    return (
        f"no: {room}, and not even the most micro-batches reach {planned.batch_size}, since the teacher's tokens of a "
        f"whole batch stay in memory; the largest batch here is {accumulation.largest_batch}"
    )


def _memory_table(planned: "RunPlan") -> Table:
    table = Table(title="Memory of a GPU, part by part", title_justify="left", box=None, pad_edge=False)
    for name in ("part", "when"):
        table.add_column(name)
    table.add_column("GiB", justify="right")
    for part in planned.memory.parts:
        if part.bytes:
            table.add_row(part.name, part.phase, f"{part.bytes / GIB:.3f}")
    for phase, size in planned.memory.phases.items():
        table.add_row(Text(f"peak of the phase, with what is there always: {phase}"), phase, f"{size / GIB:.3f}")
    return table


def _comparison_table(title: str, other: str, rows: "list[PlanComparison]") -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("plan", other, "plan / " + other, "error"):
        table.add_column(name, justify="right")
    for row in rows:
        values = (f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in (row.planned, row.measured))
        table.add_row(row.name, *values, f"{1 + row.error:.2f}", f"{row.error:+.0%}")
    return table


def _measure(config: Any, images: int | None, assumptions: "Assumptions", as_json: bool) -> None:
    device, tried, rounds = api.choose_device(), api.measured_config(config, images), 2
    with Progress(transient=True, console=Terminal(stderr=True)) as bar:
        task = bar.add_task(f"{rounds + 1} iterations on {device}", total=rounds + 1)
        measured = api.measure(
            tried,
            lambda: api.this_machine(device),
            device,
            assumptions=assumptions,
            rounds=rounds,
            progress=lambda: bar.advance(task),
        )
    if as_json:
        _print_json(plan_json(measured.plan, None) | {"measured": measured_json(measured)})
        return
    title = f"A step of {counted(measured.plan.batch_size, 'image')} on {measured.plan.gpu.title}"
    console = Terminal()
    console.print(_comparison_table(title, "measured", measured.comparisons))
    console.print(
        f"It reached {measured.mfu:.0%} of the peak of a large product; the plan assumes {measured.plan.mfu:.0%}."
    )


def _suggest(data: list[str], gpu: str, gpus: int, hours: float, assumptions: "Assumptions", as_json: bool) -> None:
    suggestion = api.suggest(data, gpu=gpu, gpus=gpus, hours=hours, assumptions=assumptions)
    if as_json:
        _print_json(suggestion_json(suggestion))
        return
    console = Terminal()
    console.print(_suggestion_table(suggestion))
    for line in suggestion.advice:
        console.print(f"\n{line}.")
    took = duration(suggestion.plan.effort.hours)
    hardware = f"{gpus} x {suggestion.plan.gpu.title}"
    console.print(f"\nplanned: {suggestion.length}, in {took} on {hardware}, if images are read as fast\n")
    console.print(suggestion.command(), soft_wrap=True)


def _suggestion_table(suggestion: "Suggestion") -> Table:
    title = f"For {suggestion.images}, in {', '.join(suggestion.images.data)}"
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for name in ("", "value", "why", "from"):
        table.add_column(name, overflow="fold")
    for choice in (suggestion.recipe, *suggestion.choices):
        table.add_row(choice.key, str(choice.value), choice.reason, choice.origin)
    return table


def plan_json(planned: "RunPlan", paper: "list[PlanComparison] | None") -> dict[str, Any]:
    """A plan as plain values, bytes and seconds."""
    whole = asdict(planned) | {
        "mfu": planned.mfu,
        "fits": planned.fits,
        "images_a_gpu": planned.images_a_gpu,
        "flop_an_image": planned.flop_an_image._asdict(),
        "effort": planned.effort._asdict(),
        "accumulation": planned.accumulation._asdict(),
        "memory": {
            "peak": planned.memory.peak,
            "phases": planned.memory.phases,
            "parts": [part._asdict() for part in planned.memory.parts],
        },
        "variants": [
            {
                "name": variant.name,
                "peak": variant.memory.peak,
                "phases": variant.memory.phases,
                "largest_images": variant.largest_images,
            }
            for variant in planned.variants
        ],
    }
    return whole if paper is None else whole | {"paper": [row._asdict() | {"error": row.error} for row in paper]}


def measured_json(measured: "Measured") -> dict[str, Any]:
    """What was measured, as plain values."""
    rows = [row._asdict() | {"error": row.error} for row in measured.comparisons]
    return {"comparisons": rows, "mfu": measured.mfu}


def suggestion_json(suggestion: "Suggestion") -> dict[str, Any]:
    """A suggestion as plain values."""
    choices = [choice._asdict() for choice in (suggestion.recipe, *suggestion.choices)]
    return {
        "images": asdict(suggestion.images),
        "choices": choices,
        "hours": suggestion.plan.effort.hours,
        "advice": suggestion.advice,
        "command": suggestion.command(),
    }


def _print_gpus(as_json: bool) -> None:
    if as_json:
        _print_json({name: asdict(spec) for name, spec in api.gpus().items()})
        return
    table = Table("name", "GPU", "GB", "bfloat16 TFLOP/s", "float32 TFLOP/s", "W", box=None, pad_edge=False)
    number: Callable[[float | None], str] = lambda value: "-" if value is None else f"{value / 1e12:g}"  # noqa: E731
    for name, spec in api.gpus().items():
        table.add_row(
            name, spec.title, f"{spec.memory / 1e9:g}", number(spec.bfloat16), number(spec.float32), f"{spec.watts:g}"
        )
    Terminal().print(table)


def _two_columns(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, box=None, show_header=False, title_justify="left", pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _print_json(values: dict[str, Any]) -> None:
    echo(json.dumps(values, indent=2))
