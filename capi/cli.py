"""The command line: parse, build the config, call api. Bad input ends with one sentence and exit code 2."""

import sys
import traceback
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from capi import __version__
from capi.config import loading
from capi.errors import CapiError

if TYPE_CHECKING:
    from capi.train.check import StepCost

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="CAPI: cluster and predict latent patches, from unlabelled images to a strong dense encoder.",
)
recipes_app = typer.Typer(help="List the recipes, or show one with every value written out.")
app.add_typer(recipes_app, name="recipes")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values to change.")]


def main() -> None:
    """Run the command line; errors of the user's making are told in one sentence."""
    try:
        app()
    except CapiError as error:
        if "--traceback" in sys.argv:
            traceback.print_exc()
            sys.exit(2)
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"Error: {error}")
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"capi {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""


@recipes_app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List the recipes that come with the package."""
    if context.invoked_subcommand is not None:
        return
    table = Table("recipe", "what it is", box=None, pad_edge=False)
    for name in loading.recipe_names():
        table.add_row(name, loading.recipe_title(name))
    Console().print(table)


@recipes_app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A recipe's name, or the path of a YAML file.")],
    overrides: Overrides = None,
) -> None:
    """Show a recipe: its opening comment, then the whole config that it resolves to."""
    config = loading.load_config(name, overrides or [])
    for line in loading.recipe_text(name).splitlines():
        if not line.startswith("#"):
            break
        typer.echo(line)
    typer.echo(loading.dump_config(config), nl=False)


@app.command()
def check(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of a YAML file.")],
    overrides: Overrides = None,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu; by default the best there is.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Iterations to time; the best counts.")] = 3,
) -> None:
    """Build a recipe, run real iterations on random images and say what they cost. Nothing is written."""
    config = loading.load_config(recipe, overrides or [])
    from capi import api

    chosen = api.choose_device(device)
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{rounds + 1} iterations on {chosen}", total=rounds + 1)
        cost = api.check(config, device=chosen, rounds=rounds, progress=lambda: bar.advance(task))
    Console().print(_cost_table(cost, f"{recipe} on {chosen}, float32", config.optimization.steps))


def _cost_table(cost: "StepCost", title: str, steps: int) -> Table:
    table = Table(title=title, box=None, show_header=False, title_justify="left", pad_edge=False)
    flop = ", ".join(
        f"{name.replace('_', ' ')} {value / 1e9:.2f}" for name, value in cost.flop_an_image._asdict().items()
    )
    rows = {
        "encoder": f"{cost.encoder_parameters / 1e6:.1f} M parameters",
        "trained": f"{cost.trained_parameters / 1e6:.1f} M parameters, prototypes and predictor included",
        "required": f"{sum(cost.flop_an_image) / 1e9:.2f} GFLOP an image ({flop})",
        "iteration": f"{cost.seconds:.3f} s for {cost.batch_size} images: {cost.images_per_second:.1f} images/s, "
        f"{cost.flop_per_second / 1e9:.0f} GFLOP/s",
        "peak memory": f"{cost.peak_bytes / 2**30:.2f} GiB",
        "whole run": f"{cost.seconds * steps / 3600:.1f} h for {steps} iterations, without reading data",
        "loss": f"{cost.student_loss:.3f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
