"""Every baseline by its name, those of the paper first."""

from capi.errors import CapiError, nearest
from capi.zoo.baselines.baseline import Baseline
from capi.zoo.baselines.sources import (
    aim,
    beit,
    data2vec,
    dino,
    dinov2,
    dinov3,
    ibot,
    ijepa,
    mae,
    mim_refiner,
    mocov3,
    msn,
)

_SOURCES = (dino, mocov3, msn, ibot, mim_refiner, ijepa, mae, data2vec, dinov2, beit, aim, dinov3)
BASELINES: dict[str, Baseline] = {each.name: each for source in _SOURCES for each in source.BASELINES}
# The encoders of the paper's tables and figures.
PAPER_BASELINES = (
    "dino_vitb16",
    "mocov3_vitb16",
    "msn_vitl16",
    "ibot_vitl16",
    "dbot_refined_vitl16",
    "ijepa_vith14_in1k",
    "ijepa_vith14_in22k",
    "ijepa_vith16_448",
    "mae_vitl16",
    "mae_vith14",
    "data2vec2_vitl16",
    "dinov2_reg_vitl14",
    "dinov2_reg_vitg14",
    "beit_vitl16",
    "aim_600m",
    "aim_3b",
)


def baseline_named(name: str) -> Baseline:
    """The baseline of a name; another name is an error with the closest one."""
    if name not in BASELINES:
        raise CapiError(f'there is no baseline "{name}"{nearest(name, list(BASELINES))}: `capi models` lists them')
    return BASELINES[name]


def list_baselines() -> list[Baseline]:
    """Those of the paper first, the others in the order of their sources."""
    others = [each for name, each in BASELINES.items() if name not in PAPER_BASELINES]
    return [BASELINES[name] for name in PAPER_BASELINES] + others
