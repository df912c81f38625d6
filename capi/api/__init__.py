"""What `import capi` gives and what the command line needs: names from all rooms, imported when first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capi.api.ablation import ablate as ablate
    from capi.api.comparison import compare as compare
    from capi.api.demo import DemoSummary as DemoSummary
    from capi.api.demo import run_demo as run_demo
    from capi.api.evaluation import evaluate as evaluate
    from capi.api.features import extract as extract
    from capi.api.features import extract_tiles as extract_tiles
    from capi.api.features import nearest as nearest
    from capi.api.features import predict as predict
    from capi.api.race import speedrun as speedrun
    from capi.api.share import push as push
    from capi.api.tables import compare_table as compare_table
    from capi.api.training import adapt as adapt
    from capi.api.training import adapted_config as adapted_config
    from capi.api.training import pretrain as pretrain
    from capi.config.files import load_config as load_config
    from capi.config.trust import trusting as trusting
    from capi.data.crops import transform as transform
    from capi.data.locations import register_source as register_source
    from capi.data.shard_writer import pack_shards as pack_shards
    from capi.data.sources import ENDINGS as ENDINGS
    from capi.data.sources import is_csv as is_csv
    from capi.data.survey import DataSummary as DataSummary
    from capi.data.survey import Survey as Survey
    from capi.data.survey import check_data as check_data
    from capi.data.survey import significant as significant
    from capi.errors import CapiError as CapiError
    from capi.evals.comparison_cells import Comparison as Comparison
    from capi.evals.comparison_cells import missing_cells as missing_cells
    from capi.evals.comparison_cells import shown_score as shown_score
    from capi.evals.datasets import DATASETS as DATASETS
    from capi.evals.datasets import dataset_named as dataset_named
    from capi.evals.results import percent as percent
    from capi.evals.results import shown_size as shown_size
    from capi.method.masking import register_mask as register_mask
    from capi.method.registry import register_target as register_target
    from capi.method.targets import LossLabel as LossLabel
    from capi.models.predictor import register_predictor as register_predictor
    from capi.report.ablation import paper_score as paper_score
    from capi.report.ablation import score_text as score_text
    from capi.report.doctor import diagnosis_text as diagnosis_text
    from capi.report.doctor import doctor as doctor
    from capi.report.draw import DEFAULT_KINDS as DEFAULT_KINDS
    from capi.report.draw import draw as draw
    from capi.report.explorer.page import explore as explore
    from capi.report.run_report import report as report
    from capi.report.watch import watch as watch
    from capi.runtime.atomic import Output as Output
    from capi.runtime.atomic import atomic_write as atomic_write
    from capi.runtime.devices import choose_device as choose_device
    from capi.runtime.documents import read_text as read_text
    from capi.runtime.signals import StopRequest as StopRequest
    from capi.train.build import build_learner as build_learner
    from capi.train.build import masked_batch as masked_batch
    from capi.train.build import register_optimizer as register_optimizer
    from capi.train.cost.hardware import CARBON_INTENSITY as CARBON_INTENSITY
    from capi.train.cost.hardware import gpus as gpus
    from capi.train.cost.hardware import this_machine as this_machine
    from capi.train.cost.measure import Measured as Measured
    from capi.train.cost.measure import measure as measure
    from capi.train.cost.measure import measured_config as measured_config
    from capi.train.cost.plan import Assumptions as Assumptions
    from capi.train.cost.plan import PlanComparison as PlanComparison
    from capi.train.cost.plan import RunPlan as RunPlan
    from capi.train.cost.plan import against_paper as against_paper
    from capi.train.cost.plan import plan as plan
    from capi.train.cost.plan import planned_cost as planned_cost
    from capi.train.cost.step import StepCost as StepCost
    from capi.train.cost.suggest import Suggestion as Suggestion
    from capi.train.cost.suggest import suggest as suggest
    from capi.train.dry_run import check as check
    from capi.train.launch import SlurmOptions as SlurmOptions
    from capi.train.launch import slurm_script as slurm_script
    from capi.train.launch import submit as submit
    from capi.train.run import PretrainedRun as PretrainedRun
    from capi.train.selftest import selftest as selftest
    from capi.train.step import train_step as train_step
    from capi.types import Features as Features
    from capi.types import MaskedBatch as MaskedBatch
    from capi.types import VisionEncoder as VisionEncoder
    from capi.zoo.baselines.registry import PAPER_BASELINES as PAPER_BASELINES
    from capi.zoo.baselines.registry import Baseline as Baseline
    from capi.zoo.baselines.registry import list_baselines as list_baselines
    from capi.zoo.build import loss_label as loss_label
    from capi.zoo.build import target_class as target_class
    from capi.zoo.encoders import load as load
    from capi.zoo.export import ExportOptions as ExportOptions
    from capi.zoo.export import export as export
    from capi.zoo.export import write_export as write_export
    from capi.zoo.onnx import OnnxExported as OnnxExported
    from capi.zoo.published.registry import REFERENCE_REPOSITORY as REFERENCE_REPOSITORY
    from capi.zoo.published.registry import list_models as list_models

# The names of `capi`, with the module that defines each.
PUBLIC = {
    "ablate": "capi.api.ablation",
    "adapt": "capi.api.training",
    "build_learner": "capi.train.build",
    "check": "capi.train.dry_run",
    "check_data": "capi.data.survey",
    "compare": "capi.api.comparison",
    "compare_table": "capi.api.tables",
    "doctor": "capi.report.doctor",
    "draw": "capi.report.draw",
    "evaluate": "capi.api.evaluation",
    "explore": "capi.report.explorer.page",
    "export": "capi.zoo.export",
    "extract": "capi.api.features",
    "extract_tiles": "capi.api.features",
    "load": "capi.zoo.encoders",
    "masked_batch": "capi.train.build",
    "nearest": "capi.api.features",
    "pack_shards": "capi.data.shard_writer",
    "plan": "capi.train.cost.plan",
    "predict": "capi.api.features",
    "pretrain": "capi.api.training",
    "push": "capi.api.share",
    "register_mask": "capi.method.masking",
    "register_optimizer": "capi.train.build",
    "register_predictor": "capi.models.predictor",
    "register_source": "capi.data.locations",
    "register_target": "capi.method.registry",
    "report": "capi.report.run_report",
    "selftest": "capi.train.selftest",
    "speedrun": "capi.api.race",
    "suggest": "capi.train.cost.suggest",
    "train_step": "capi.train.step",
    "transform": "capi.data.crops",
    "trusting": "capi.config.trust",
    "watch": "capi.report.watch",
    "load_config": "capi.config.files",
    "CapiError": "capi.errors",
    "Features": "capi.types",
    "MaskedBatch": "capi.types",
    "VisionEncoder": "capi.types",
}
# What the command line needs beside them, to choose and to print.
_COMMANDS = {
    "adapted_config": "capi.api.training",
    "DemoSummary": "capi.api.demo",
    "run_demo": "capi.api.demo",
    "ENDINGS": "capi.data.sources",
    "is_csv": "capi.data.sources",
    "DataSummary": "capi.data.survey",
    "Survey": "capi.data.survey",
    "significant": "capi.data.survey",
    "Comparison": "capi.evals.comparison_cells",
    "DATASETS": "capi.evals.datasets",
    "dataset_named": "capi.evals.datasets",
    "percent": "capi.evals.results",
    "shown_size": "capi.evals.results",
    "missing_cells": "capi.evals.comparison_cells",
    "shown_score": "capi.evals.comparison_cells",
    "LossLabel": "capi.method.targets",
    "paper_score": "capi.report.ablation",
    "score_text": "capi.report.ablation",
    "diagnosis_text": "capi.report.doctor",
    "DEFAULT_KINDS": "capi.report.draw",
    "atomic_write": "capi.runtime.atomic",
    "choose_device": "capi.runtime.devices",
    "read_text": "capi.runtime.documents",
    "StopRequest": "capi.runtime.signals",
    "loss_label": "capi.zoo.build",
    "target_class": "capi.zoo.build",
    "gpus": "capi.train.cost.hardware",
    "this_machine": "capi.train.cost.hardware",
    "Measured": "capi.train.cost.measure",
    "measure": "capi.train.cost.measure",
    "measured_config": "capi.train.cost.measure",
    "Assumptions": "capi.train.cost.plan",
    "PlanComparison": "capi.train.cost.plan",
    "RunPlan": "capi.train.cost.plan",
    "against_paper": "capi.train.cost.plan",
    "CARBON_INTENSITY": "capi.train.cost.hardware",
    "StepCost": "capi.train.cost.step",
    "Suggestion": "capi.train.cost.suggest",
    "planned_cost": "capi.train.cost.plan",
    "PretrainedRun": "capi.train.run",
    "SlurmOptions": "capi.train.launch",
    "slurm_script": "capi.train.launch",
    "submit": "capi.train.launch",
    "Baseline": "capi.zoo.baselines.registry",
    "PAPER_BASELINES": "capi.zoo.baselines.registry",
    "list_baselines": "capi.zoo.baselines.registry",
    "ExportOptions": "capi.zoo.export",
    "Output": "capi.runtime.atomic",
    "write_export": "capi.zoo.export",
    "OnnxExported": "capi.zoo.onnx",
    "REFERENCE_REPOSITORY": "capi.zoo.published.registry",
    "list_models": "capi.zoo.published.registry",
}
_MODULES = PUBLIC | _COMMANDS


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'capi.api' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
