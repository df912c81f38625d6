"""DINO: a ViT with a class token and learned positions.

Facts from facebookresearch/dino, vision_transformer.py (names, eps 1e-6, exact GELU, q scaled by the root of a head's
width; positions resampled bicubically by the ratio (grid + 0.1) / own grid unless the image is square and of the own
size; get_intermediate_layers gives tokens after the final norm) and hubconf.py (sizes; a flat state dict of the
backbone). A checkpoint of main_dino.py has `student` and `teacher`, with `backbone.` and `head.` in front of names. In
transformers it is `ViTModel`, with an eps of its own in config.json, and positions resampled without the 0.1.
"""

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import PATCHES, WITH_TRANSFORMERS, Baseline, timm_rules
from capi.zoo.baselines.keys import Layout, Part

LAYOUT = Layout(
    method="DINO",
    rules=timm_rules(),
    signature=PATCHES,
    ignored=(r"head\..*",),
    parts={
        "teacher": Part(((), ("teacher",)), ("", "backbone.")),
        "student": Part((("student",),), ("", "backbone.")),
    },
)


def _dino(name: str, size: str, width: int, heads: int, patch_size: int, file: str) -> Baseline:
    return Baseline(
        name=name,
        title="DINO",
        size=size,
        data="ImageNet-1k",
        architecture=vit(width, 12, heads, patch_size, resampling="offset"),
        layout=LAYOUT,
        source="facebookresearch/dino",
        file=f"{file}.pth",
        licence="Apache-2.0",
        verified=WITH_TRANSFORMERS,
        model_type="vit",
        hub_id=f"facebook/{name.replace('_', '-')}",
    )


BASELINES = (
    _dino("dino_vits16", "ViT-S/16", 384, 6, 16, "dino_deitsmall16_pretrain"),
    _dino("dino_vits8", "ViT-S/8", 384, 6, 8, "dino_deitsmall8_pretrain"),
    _dino("dino_vitb16", "ViT-B/16", 768, 12, 16, "dino_vitbase16_pretrain"),
    _dino("dino_vitb8", "ViT-B/8", 768, 12, 8, "dino_vitbase8_pretrain"),
)
