"""What a user calls."""

from capi.api.arguments import choose_device
from capi.api.evaluating import compare, compare_table, draw, evaluate, explore, extract, nearest, predict
from capi.api.models import export, load, push
from capi.api.training import check, check_data, doctor, pack_shards, plan, pretrain, report, suggest, watch
from capi.data.transform import transform
from capi.train.build import build_learner, mask_sampler

__all__ = [
    "build_learner",
    "check",
    "check_data",
    "choose_device",
    "compare",
    "compare_table",
    "doctor",
    "draw",
    "evaluate",
    "explore",
    "export",
    "extract",
    "load",
    "mask_sampler",
    "nearest",
    "pack_shards",
    "plan",
    "predict",
    "pretrain",
    "push",
    "report",
    "suggest",
    "transform",
    "watch",
]
