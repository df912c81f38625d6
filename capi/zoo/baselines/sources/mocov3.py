"""MoCo v3: timm's ViT with fixed sines and cosines as positions, of the row first and then of the column.

Facts from facebookresearch/moco-v3, vits.py (sizes, where ViT-S has 12 heads; eps 1e-6; the table, in which the class
token has a row of zeros, laid out for square grids), main_lincls.py (`state_dict` with `module.base_encoder.`, which
linear probing uses; its `head` is the projection) and moco/builder.py (`momentum_encoder`, `predictor`). The original
takes one size only; a model of its code for another square size computes the same table there, which is done here.
"""

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import PATCHES, Baseline, timm_rules
from capi.zoo.baselines.keys import Layout, Part

_PLACES = (("state_dict",), ())
LAYOUT = Layout(
    method="MoCo v3",
    rules=timm_rules(),
    signature=PATCHES,
    ignored=(r"head\..*", r"predictor\..*", r"(base|momentum)_encoder\..*"),
    parts={
        # A file of linear probing has the encoder alone, without a name in front.
        "base_encoder": Part(_PLACES, ("base_encoder.", "")),
        "momentum_encoder": Part(_PLACES, ("momentum_encoder.",)),
    },
)


def _mocov3(name: str, size: str, width: int, file: str) -> Baseline:
    return Baseline(
        name=name,
        title="MoCov3",
        size=size,
        data="ImageNet-1k",
        architecture=vit(width, 12, 12, 16, resampling="rows"),
        layout=LAYOUT,
        source="facebookresearch/moco-v3",
        file=file,
        licence="CC-BY-NC-4.0 (non-commercial)",
    )


BASELINES = (
    _mocov3("mocov3_vits16", "ViT-S/16", 384, "vit-s-300ep.pth.tar"),
    _mocov3("mocov3_vitb16", "ViT-B/16", 768, "vit-b-300ep.pth.tar"),
)
