"""A run from a recipe to its report: what `capi.pretrain` does around the training itself."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from capi.config.files import (
    Overrides,
    Recipe,
    as_config,
    load_config,
    merge,
    override_texts,
    parse_config,
    recipe_tree,
)
from capi.config.schema import Config, OptimizationConfig
from capi.config.trust import Trust, trusting
from capi.data.locations import DataLocation, open_images
from capi.data.sources import image_names
from capi.errors import CapiError, expect
from capi.report.curves import draw_curves
from capi.report.run_report import conclude, pictures_over_time
from capi.runtime.devices import choose_device
from capi.runtime.processes import joined
from capi.runtime.progress import default_console
from capi.train import run
from capi.train.build import OPTIMIZERS, largest_batch
from capi.train.initial_weights import adapted_sections
from capi.train.loop import Evaluation
from capi.train.metrics import Logger
from capi.train.run import PretrainedRun
from capi.zoo.build import component
from capi.zoo.run_folder import RunFolder, run_config


def pretrain(
    recipe: Recipe,
    overrides: Overrides = (),
    *,
    data: DataLocation,
    out: str | Path,
    resume: bool = False,
    extend: bool = False,
    overwrite: bool = False,
    device: torch.device | str | None = None,
    loggers: Sequence[Logger] = (),
    evaluations: Sequence[Evaluation] = (),
    trust: Trust = (),
    console: Console | None = None,
    **sections: Any,
) -> PretrainedRun:
    """Pretrain on unlabeled images.

    `overrides` and further keywords change the recipe, as those of `load_config` do: `optimization={"steps": 100}`.

    `data` is a folder, shards, tables, a name of the Hub (docs/guides/data.md), several of these with weights, or
    `demo` for the built-in photos; `out` becomes the folder of the run. `resume` continues the run that is there, if
    there is one; with `extend` a finished one trains on to more `optimization.steps`, at its last learning rate;
    `overwrite` replaces it. A logger is called with every record of metrics.
    `trust` names the Python files that the recipe may import encoders from; those that `overrides` name need no trust.
    In a terminal or notebook there is a progress bar, or on the `console` that is given. At the end a report is
    written, report.html in the run's folder.
    """
    chosen, console = choose_device(device), console or default_console()
    with ExitStack() as stack:
        with joined(chosen) as processes:
            with processes.together():
                expect("out", out, (str, Path), "the folder of the run")
                overrides = override_texts(overrides, sections)
                config = as_config(recipe, overrides)
                stack.enter_context(trusting(trust, overrides))
            done = run.pretrain(
                config,
                data=data,
                out=out,
                resume=resume,
                extend=extend,
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


def adapt(
    model: str | Path,
    overrides: Overrides = (),
    *,
    data: DataLocation,
    out: str | Path,
    recipe: str | Path = "adapt",
    resume: bool = False,
    extend: bool = False,
    overwrite: bool = False,
    device: torch.device | str | None = None,
    loggers: Sequence[Logger] = (),
    evaluations: Sequence[Evaluation] = (),
    trust: Trust = (),
    console: Console | None = None,
    **sections: Any,
) -> PretrainedRun:
    """Continue to train a published encoder, or one of your own, on your images: a run like any other.

    `model` is anything that `load` takes: a run, a published model, a file, `baseline:NAME=FILE`. Student and teacher
    start from it; predictor, head and prototypes are new, and learn while the encoder is frozen
    (`adapt.frozen_share`). The section `adapt` says how much it may change. Where there are fewer images than the
    recipe `adapt` has in a batch, and no override names it, batches are smaller. Everything else is as in `pretrain`.
    """
    texts = override_texts(overrides, sections)
    with trusting(trust, texts):
        with joined(choose_device(device)) as processes, processes.together():
            fitting: list[str] = []
            if recipe == "adapt" and not (resume and RunFolder(Path(out)).exists):
                # It stands first: an override of the user's wins.
                batch = min(load_config(recipe).optimization.batch_size, largest_batch(len(open_images(data))))
                fitting = [f"optimization.batch_size={batch}"]
            config = adapted_config(model, [*fitting, *texts], recipe=recipe, out=Path(out) if resume else None)
        return pretrain(
            config,
            data=data,
            out=out,
            resume=resume,
            extend=extend,
            overwrite=overwrite,
            device=device,
            loggers=loggers,
            evaluations=evaluations,
            console=console,
        )


def _refuse_images(place: Path) -> None:
    """A folder of images where a model is expected: what `--data` takes was given first."""
    models = ("run.json", "config.json", "model.safetensors")
    if not place.is_dir() or any((place / name).exists() for name in models):
        return
    if any(image_names(place)):
        raise CapiError(
            f"{place} is a folder of images, and a model comes first, such as capi_vitl14_lvd: give the images with "
            "--data"
        )


def adapted_config(
    model: str | Path,
    overrides: Overrides = (),
    *,
    recipe: str | Path = "adapt",
    out: Path | None = None,
    weights: bool = True,
) -> Config:
    """The config of a run that adapts a model. Of the run in `out`, where there is one, it is its own: the model is not
    opened again. Without `weights`, for a plan, a baseline needs no file. AdamW takes the place of a recipe's Muon,
    unless an override names the optimizer: weights that Adam trained are better left with it.
    """
    expect("the model", model, (str, Path), "what capi.load takes, such as a run or baseline:NAME=FILE")
    name = str(model)
    _refuse_images(Path(name))
    if out is not None and RunFolder(out).exists:
        before = run_config(RunFolder(out))
        if before.init.encoder != name:
            raise CapiError(
                f"{out} was started from {before.init.encoder or 'fresh weights'}, not from {name}: resume it with "
                "that name, or give --out another folder"
            )
        return parse_config(before.model_dump(mode="json"), override_texts(overrides))
    tree, texts = merge(recipe_tree(str(recipe)), adapted_sections(name, weights=weights)), override_texts(overrides)
    optimization = tree.get("optimization")
    optimizer = OPTIMIZERS.get(str(optimization.get("optimizer"))) if isinstance(optimization, Mapping) else None
    if optimizer is not None and not optimizer.adapts:
        default = OptimizationConfig.model_fields["optimizer"].default
        tree = merge(tree, {"optimization": {"optimizer": default}})
    config = parse_config(tree, texts, source=str(recipe))
    if "depth" in component("model.predictor.kind", config).reads:
        return config
    # A predictor without blocks has no use for the depth that was chosen here.
    without_depth = merge(tree, {"model": {"predictor": {"depth": None}}})
    return parse_config(without_depth, texts, source=str(recipe))
