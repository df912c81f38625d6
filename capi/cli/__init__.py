"""The command line: parse, build the config, call api. Bad input ends with one sentence and exit code 2."""

from capi.cli import ablating as _ablating
from capi.cli import data as _data
from capi.cli import datasets as _datasets
from capi.cli import evaluating as _evaluating
from capi.cli import launching as _launching
from capi.cli import planning as _planning
from capi.cli import recipes as _recipes
from capi.cli import seeing as _seeing
from capi.cli import sharing as _sharing
from capi.cli import training as _training
from capi.cli.app import main

__all__ = ["main"]
# Commands come to be when their module is imported.
del _ablating, _data, _datasets, _evaluating, _launching, _planning, _recipes, _seeing, _sharing, _training
