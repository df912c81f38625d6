"""The command line: parse, build the config, call api. Bad input ends with one sentence and exit code 2."""

# Importing a module registers its commands.
from capi.cli import data, evaluation, inspection, models, plan, recipes, training
from capi.cli.app import main

__all__ = ["main"]
del data, evaluation, inspection, models, plan, recipes, training
