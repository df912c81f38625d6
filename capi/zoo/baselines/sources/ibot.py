"""iBOT: DINO's ViT; its mask token and heads are left out.

Facts from bytedance/ibot, models/vision_transformer.py (names, sizes, eps 1e-6, positions resampled as in DINO, the
mask token `masked_embed`) and its README (backbones under `state_dict` in checkpoint_teacher.pth or
checkpoint_student.pth).
"""

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import PATCHES, Baseline, timm_rules
from capi.zoo.baselines.keys import Layout, Part

LAYOUT = Layout(
    method="iBOT",
    rules=timm_rules(),
    signature=PATCHES,
    ignored=(r"head\d?\..*", r"masked_embed"),
    parts={
        "teacher": Part((("state_dict",), ("teacher",), ()), ("", "backbone.")),
        "student": Part((("student",),), ("", "backbone.")),
    },
)


def _ibot(name: str, size: str, sizes: tuple[int, int, int], data: str, file: str) -> Baseline:
    return Baseline(
        name=name,
        title="iBOT",
        size=size,
        data=data,
        architecture=vit(*sizes, 16, resampling="offset"),
        layout=LAYOUT,
        source="bytedance/ibot",
        file=file,
        licence="Apache-2.0",
    )


_IN1K, _IN22K = "ImageNet-1k", "ImageNet-22k"
BASELINES = (
    _ibot("ibot_vits16", "ViT-S/16", (384, 12, 6), _IN1K, "checkpoint_teacher.pth of vits_16"),
    _ibot("ibot_vitb16", "ViT-B/16", (768, 12, 12), _IN1K, "checkpoint_teacher.pth of vitb_16_rand_mask"),
    _ibot("ibot_vitl16", "ViT-L/16", (1024, 24, 16), _IN1K, "checkpoint_teacher.pth of vitl_16_rand_mask"),
    _ibot("ibot_vitb16_in22k", "ViT-B/16", (768, 12, 12), _IN22K, "checkpoint_student.pth of vitb_16_pt22k"),
    _ibot("ibot_vitl16_in22k", "ViT-L/16", (1024, 24, 16), _IN22K, "checkpoint_student.pth of vitl_16_pt22k"),
)
