"""What is wrong with the words of a command, in one sentence: a misspelt name, a value that is none, an idle option."""

import sys
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from inspect import cleandoc
from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from capi.config.benchmarks import PROTOCOL_CONFIGS
from capi.config.files import nearest_key
from capi.config.schema import Config
from capi.errors import CapiError, nearest

# Typer uses click, or from some release on a copy of it without a public name. Both have this class, whose parent is
# what all errors about the words of a command are.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


# The commands of `capi --help`, in the order in which people come to need them.
PANELS = {
    "Train": ("demo", "recipes", "data", "pretrain", "adapt"),
    "Use": ("models", "export", "extract", "nearest", "predict", "push"),
    "Judge": ("datasets", "evaluate", "compare"),
    "Look": ("doctor", "report", "watch", "visualize", "explore"),
    "Scale": ("selftest", "plan", "shards", "launch"),
    "Paper": ("ablate", "speedrun"),
}
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
RECIPE_HELP = "A recipe's name, or the path of a YAML file."


class Commands(TyperGroup):
    """Commands in panels, where a misspelt one raises with its nearest neighbor."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = list(_PANEL_OF)
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name) if name in order else len(order))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None and ctx.parent is None:
            command.rich_help_panel = _PANEL_OF.get(cmd_name)
        if command is not None and command.help:
            # Typer would break lines where the source does, whatever the width of the terminal.
            command.help = "\n\n".join(" ".join(part.split()) for part in cleandoc(command.help).split("\n\n"))
        if command is None and not ctx.resilient_parsing:
            commands = self.list_commands(ctx)
            # No error of usage: Typer would add a suggestion of its own to those.
            raise CapiError(
                f'there is no command "{ctx.command_path} {cmd_name}"{nearest(cmd_name, commands)} '
                f"({_help(ctx)} lists all)"
            )
        return command


def sentence_of(error: Any) -> str:
    """What a person can act on: which word is wrong, what was expected, and where to read more."""
    say = _SENTENCES.get(type(error).__name__)
    if say is not None:
        return say(error)
    message = error.format_message().rstrip(".")
    more = f" ({_help(error.ctx)} tells what there is)" if error.ctx is not None else ""
    return message[:1].lower() + message[1:] + more


def _no_such_option(error: Any) -> str:
    if error.ctx.info_name in ("evaluate", "compare") and error.option_name in ("--protocol", "--dataset"):
        where = "after the model" if error.ctx.info_name == "evaluate" else "after --on"
        return (
            f'{error.ctx.command_path} has no option "{error.option_name}": data set and protocol are one word, '
            f"DATASET/PROTOCOL, {where}, such as folder/knn (capi datasets lists data sets)"
        )
    if override := _meant_override(error):
        return (
            f'{error.ctx.command_path} has no option "{error.option_name}": values of a '
            f"{'benchmark' if error.ctx.info_name == 'evaluate' else 'recipe'} are given without dashes, {override}"
        )
    return (
        f'{error.ctx.command_path} has no option "{error.option_name}"{nearest(error.option_name, _options_of(error))} '
        f"({_help(error.ctx)} lists all)"
    )


def _meant_override(error: Any) -> str:
    """`optimization.steps=3` for `--steps 3`, where a command takes overrides and a key is called so; else nothing."""
    if not any(parameter.name == "overrides" for parameter in error.ctx.command.params):
        return ""
    word = error.option_name.lstrip("-").replace("-", "_")
    likeness = max((SequenceMatcher(None, word, name.lstrip("-")).ratio() for name in _options_of(error)), default=0)
    sections = PROTOCOL_CONFIGS.values() if error.ctx.info_name == "evaluate" else [Config]
    closeness, key = max(nearest_key(word, section) for section in sections)
    if closeness < 0.8 or closeness < likeness:
        return ""
    given = sys.argv[1:]
    value = next((each.partition("=")[2] for each in given if each.startswith(f"{error.option_name}=")), None)
    if value is None and error.option_name in given[:-1]:
        value = given[given.index(error.option_name) + 1]
    return f"{key}={value}" if value else f"{key}=VALUE"


def _options_of(error: Any) -> list[str]:
    parameters = error.ctx.command.params
    options = [option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)]
    return [option for option in options if option.startswith("-")]


def _missing(error: Any) -> str:
    parameter = error.param
    about = (getattr(parameter, "help", None) or "").rstrip(".")
    # The words of the help stand in brackets, as they are.
    return f"{error.ctx.command_path} needs {_written(parameter)}" + (f" ({about})" if about else "")


def _bad_value(error: Any) -> str:
    # Typer's words hold what was expected and why that is not what came; the first part says it all.
    expected = error.message.rstrip(".").partition(", unable")[0].replace("Input should be", "it should be")
    if error.param is None:
        return expected
    cause = error.__cause__
    came = f' cannot be "{cause.errors()[0]["input"]}"' if isinstance(cause, ValidationError) else ""
    return f"{_written(error.param)}{came}: {expected}"


_SENTENCES: dict[str, Callable[[Any], str]] = {
    "NoSuchOption": _no_such_option,
    "MissingParameter": _missing,
    "BadParameter": _bad_value,
    "BadOptionUsage": lambda error: f"{error.option_name} needs a value after it",
}


def _written(parameter: Any) -> str:
    """An option as it is typed, an argument in capitals."""
    if parameter.param_type_name != "option":
        return str(parameter.name).upper()
    return "/".join((parameter.opts[0], *parameter.secondary_opts))


def _help(context: Any) -> str:
    return f"{context.command_path} --help"


def refuse_idle(context: typer.Context, names: Sequence[str], reason: str) -> None:
    """Refuse an option without effect, which would be overlooked: `reason` says whose it is, and what to do."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"{_written(parameter)} {reason}")


def between(low: int | float, high: int | float) -> Callable[[typer.CallbackParam, Any], Any]:
    """The callback of an option with numbers in a range; a range in the type would fill half the help's width."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is not None and not low <= number <= high:
                raise CapiError(f'{_written(parameter)} cannot be "{number}": it should be from {low} to {high}')
        return value

    return check


def others_than(context: typer.Context, *names: str) -> list[str]:
    """All that a command takes but these."""
    return [str(parameter.name) for parameter in context.command.params if parameter.name not in names]
