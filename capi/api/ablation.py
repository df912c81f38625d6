"""A study: train and judge every row of a table with every seed; what is finished is kept, what fails is a result.

OUT/configs/NAME.yaml       what a run is started with; `capi pretrain` takes it too
OUT/runs/NAME               a run, shared by all tables that have its row
OUT/scores/NAME             what its finished encoder scores
OUT/TABLE.html, .md, .json  the table, written anew whenever a run is done
"""

import json
import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from rich.console import Console

from capi.api.ablation_plan import FAILURE, Job, plan_study
from capi.api.ablation_results import gather
from capi.api.comparison import compare
from capi.api.training import pretrain
from capi.config.loading import dump_config
from capi.errors import CapiError
from capi.report.ablation.page import write_table
from capi.report.run_report import write_report
from capi.runtime.atomic import atomic_write
from capi.runtime.devices import choose_device

_LOG = logging.getLogger("capi")


class InterruptionError(Exception):
    """Someone stopped the study; it goes on where it was."""


def ablate(
    table: str,
    overrides: Sequence[str] = (),
    *,
    data: str | Path,
    out: str | Path,
    scale: str = "mini",
    seeds: int = 1,
    options: Sequence[str] = (),
    device: torch.device | str | None = None,
    jobs: int = 1,
    photos: bool = True,
    console: Console | None = None,
) -> Path | None:
    """Run all rows of one of the paper's tables in miniature, judge them, and write a page, whose place is returned.

    `data` is a place with labels, or `demo`; `overrides` change the recipe of all rows, `options` the benchmarks.
    With several `jobs` so many runs go on at once, each in a process with its share of the processor's cores. Without
    `photos` the page shows features alone, not the images. None when it was interrupted; the same call goes on.
    """
    chosen = str(choose_device(device))
    study = plan_study(
        table,
        overrides,
        data=str(data),
        out=Path(out),
        scale=scale,
        seeds=seeds,
        options=options,
        device=chosen,
        photos=photos,
    )
    console = console or Console(quiet=True)
    _write_recipes(study.jobs)
    try:
        for number, job in enumerate(_finished(study.jobs, jobs, console), 1):
            write_table(gather(study), study.out)
            console.print(f"{number} of {len(study.jobs)}: {job.name} is done", highlight=False)
    except (InterruptionError, KeyboardInterrupt):
        return None
    return write_table(gather(study), study.out)


def _write_recipes(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.config is not None:
            job.recipe.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(job.recipe, dump_config(job.config))


def _finished(jobs: Sequence[Job], at_once: int, console: Console) -> Iterator[Job]:
    """Each job when it is done: one after another here, or several at once in processes of their own."""
    if at_once <= 1:
        for job in jobs:
            finish(job, console)
            yield job
        return
    threads = max((os.cpu_count() or 1) // at_once, 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        waiting: dict[Future[None], Job] = {pool.submit(_finish_unless_stopped, job): job for job in jobs}
        try:
            for future in as_completed(waiting):
                future.result()
                yield waiting[future]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Stopping:
    """Whether this process was asked to stop: jobs that wait in its queue are then not begun."""

    asked = False


def _finish_unless_stopped(job: Job) -> None:
    if _Stopping.asked:
        raise InterruptionError
    try:
        finish(job)
    except (InterruptionError, KeyboardInterrupt):
        _Stopping.asked = True
        raise InterruptionError from None


def finish(job: Job, console: Console | None = None) -> None:
    """Train a run to its end, and judge it. A run that breaks off is noted as such; the study goes on without it."""
    model = job.model
    if job.config is not None:
        if not _train(job, console):
            return
        model = str(job.run)
        write_report(job.run)
    judged = compare(model, job.columns, out=job.scores, device=job.device)
    if judged.failed:
        raise CapiError(f"{job.name} could not be judged by {judged.failed[0].benchmark}: {judged.failed[0].reason}")


def _train(job: Job, console: Console | None) -> bool:
    """Whether the run came to its end."""
    assert job.config is not None
    note = job.scores / FAILURE
    try:
        done = pretrain(
            job.config,
            data=job.data,
            out=job.run,
            resume=True,
            device=job.device,
            trust=job.trust,
            console=console,
        )
    except CapiError as error:
        if not any(job.run.glob("checkpoints/*")):
            # It never began: the study is wrong, not the row.
            raise
        _LOG.warning("%s broke off: %s", job.name, error)
        note.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(note, json.dumps({"reason": str(error)}) + "\n")
        return False
    if not done.finished:
        raise InterruptionError
    note.unlink(missing_ok=True)
    return True
