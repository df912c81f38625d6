"""A run from a recipe to its report: what `capi.pretrain` does around the training itself."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from capi.config.files import Recipe, as_config
from capi.config.trust import Trust, trusting
from capi.data.locations import Data
from capi.errors import expect
from capi.report.runs import conclude, draw_curves, pictures_over_time
from capi.runtime.devices import choose_device
from capi.runtime.processes import joined
from capi.train import run
from capi.train.loop import Evaluation
from capi.train.metrics import Logger
from capi.train.run import PretrainedRun


def pretrain(
    recipe: Recipe,
    overrides: Iterable[str] = (),
    *,
    data: Data,
    out: str | Path,
    resume: bool = False,
    overwrite: bool = False,
    device: torch.device | str | None = None,
    loggers: Sequence[Logger] = (),
    evaluations: Sequence[Evaluation] = (),
    trust: Trust = (),
    console: Console | None = None,
) -> PretrainedRun:
    """Pretrain on unlabelled images.

    `data` is a folder, shards, tables, a name of the Hub (docs/data.md), several of these with weights, or `demo` for
    the built-in photos; `out` becomes the folder of the run. `resume` continues
    the run that is there, if there is one; `overwrite` replaces it. A logger is called with every record of metrics.
    `trust` names the Python files that the recipe may import encoders from; those that `overrides` name need no trust.
    With a `console` there is a progress bar. At the end a report is written, report.html in the run's folder.
    """
    chosen = choose_device(device)
    with ExitStack() as stack:
        with joined(chosen) as processes:
            with processes.together():
                expect("out", out, (str, Path), "the folder of the run")
                overrides = [overrides] if isinstance(overrides, str) else list(overrides)
                config = as_config(recipe, overrides)
                stack.enter_context(trusting(trust, overrides))
            done = run.pretrain(
                config,
                data=data,
                out=out,
                resume=resume,
                overwrite=overwrite,
                device=chosen,
                loggers=loggers,
                evaluations=evaluations,
                pictures=pictures_over_time,
                processes=processes,
                console=console,
            )
        if done.is_main:
            draw_curves(done.path)
        if not config.run.report or not done.is_main:
            return done
        return replace(done, report=conclude(done.path, data, finished=done.finished, device=chosen))
