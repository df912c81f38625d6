"""Commands about recipes: list them, list the paper's tables, show one with every value written out."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from capi import api
from capi.cli.app import OverrideArguments, app, echo
from capi.cli.terminal import Terminal, print_scores
from capi.cli.usage import RECIPE_HELP, Commands
from capi.config import files
from capi.config.experiments import ablations
from capi.config.paper import FIGURE_ONLY, PaperTable, number_of, paper_models, paper_table, paper_tables
from capi.config.schema import Config
from capi.errors import CapiError

recipes_app = typer.Typer(
    cls=Commands, help="List the recipes or the paper's tables, or show one recipe with every value."
)
app.add_typer(recipes_app, name="recipes")


@recipes_app.callback(invoke_without_command=True)
def recipes(
    context: typer.Context,
    table: Annotated[
        str | None, typer.Option(help='A table of the paper, such as masking-strategy or "Table 1b".')
    ] = None,
    tables: Annotated[bool, typer.Option("--tables", help="Name the paper's tables.")] = False,
) -> None:
    """List the recipes that come with the package, those of the paper's models included."""
    if sum((table is not None, tables, context.invoked_subcommand is not None)) > 1:
        raise CapiError("--table, --tables and `show` are three questions: ask one at a time")
    if context.invoked_subcommand is not None:
        return
    if table is not None:
        shorts = {ablation.short: full for full, ablation in ablations().items()}
        _print_table(paper_table(shorts.get(table, table)))
    elif tables:
        Terminal().print(_tables_table())
    else:
        _print_recipes()


@recipes_app.command("show")
def show(
    name: Annotated[str, typer.Argument(help=RECIPE_HELP)],
    overrides: OverrideArguments = None,
) -> None:
    """Show a recipe: its opening comment, then the whole config that it resolves to."""
    config = files.load_config(name, overrides or [])
    for line in _opening(name, config):
        echo(line)
    echo(files.dump_config(config), nl=False)


def _opening(name: str, config: Config) -> Iterator[str]:
    """The opening comment of a recipe; what a model of the paper costs is computed from its config."""
    for line in files.recipe_text(name).splitlines():
        if not line.startswith("#"):
            return
        yield line
        if line.startswith("# Command:") and name in paper_models():
            yield f"# Cost:     {_cost(config)}"


def _cost(config: Config) -> str:
    if api.target_class(config).wants_encoder:
        return "not known before the frozen encoder is opened"
    cost = api.planned_cost(config)
    return (
        f"{cost.flop_an_image / 1e9:.1f} GFLOP an image for a whole iteration, {cost.images_seen:.3g} images seen: "
        f"{cost.flop:.2e} FLOP"
    )


def _print_recipes() -> None:
    console = Terminal()
    packaged = Table("recipe", "what it is", box=None, pad_edge=False)
    for name in files.recipe_names():
        packaged.add_row(name, files.recipe_title(name))
    console.print(packaged)
    console.print("\nThe paper's models (`capi recipes --tables` names the tables that compare them)\n")
    listed = Table("recipe", "what it is", "data", box=None, pad_edge=False)
    for name, model in paper_models().items():
        listed.add_row(name, model.title, model.data)
    console.print(listed)


def _tables_table() -> Table:
    table = Table("table", "what it compares", "rows", "in the paper", box=None, pad_edge=False)
    for name, each in paper_tables().items():
        table.add_row(name, each.title, str(len(each.rows)), each.number)
    return table


def _print_table(table: PaperTable) -> None:
    console = Terminal()
    console.print(f"{table.title} ({table.number})", soft_wrap=True)
    rows = []
    for row in table.rows:
        name = row.name + (" (default)" if row.default else "")
        figure = row.scores == FIGURE_ONLY
        scores = [FIGURE_ONLY] * len(table.columns) if figure else [f"{score:.1f}" for score in row.scores]
        rows.append(((name, ", ".join(row.models)), scores))
    print_scores(console, ("row", "recipe"), table.columns, rows)
    for note in _notes(table):
        console.print(note, soft_wrap=True)


def _notes(table: PaperTable) -> Iterator[str]:
    """What has to be known to read a table."""
    for row in table.rows:
        if len(row.models) > 1:
            yield f"{row.name}: the mean of {' and '.join(row.models)}, which differ in the seed alone."
        if row.numbers_in:
            yield f"{row.name}: a figure; the numbers stand in {' and '.join(map(number_of, row.numbers_in))}."
    if table.open:
        yield table.open
