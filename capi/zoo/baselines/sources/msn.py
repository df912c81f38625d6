"""MSN: DINO's ViT, with positions resampled by the plain ratio of the grids.

Facts from facebookresearch/msn, src/deit.py (names, sizes, eps 1e-6, bicubic resampling; the projection head is `fc`,
the prediction head `pred`) and src/msn_train.py (`encoder` and `target_encoder`, with `module.` in front of names).
The target encoder is used, as the conversion for transformers does (`ViTMSNModel`).
"""

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import PATCHES, WITH_TRANSFORMERS, Baseline, timm_rules
from capi.zoo.baselines.keys import Layout, Part

LAYOUT = Layout(
    method="MSN",
    rules=timm_rules(),
    signature=PATCHES,
    ignored=(r"fc\..*", r"pred\..*"),
    parts={"target_encoder": Part((("target_encoder",), ())), "encoder": Part((("encoder",),))},
)


def _msn(name: str, size: str, sizes: tuple[int, int, int, int], file: str, hub_id: str) -> Baseline:
    return Baseline(
        name=name,
        title="MSN",
        size=size,
        data="ImageNet-1k",
        architecture=vit(*sizes),
        layout=LAYOUT,
        source="facebookresearch/msn",
        file=file,
        licence="CC-BY-NC-4.0 (non-commercial)",
        verified=WITH_TRANSFORMERS,
        model_type="vit_msn",
        hub_id=f"facebook/{hub_id}",
    )


BASELINES = (
    _msn("msn_vits16", "ViT-S/16", (384, 12, 6, 16), "vits16_800ep.pth.tar", "vit-msn-small"),
    _msn("msn_vitb16", "ViT-B/16", (768, 12, 12, 16), "vitb16_600ep.pth.tar", "vit-msn-base"),
    _msn("msn_vitl16", "ViT-L/16", (1024, 24, 16, 16), "vitl16_600ep.pth.tar", "vit-msn-large"),
    _msn("msn_vitb4", "ViT-B/4", (768, 12, 12, 4), "vitb4_300ep.pth.tar", "vit-msn-base-4"),
    _msn("msn_vitl7", "ViT-L/7", (1024, 24, 16, 7), "vitl7_200ep.pth.tar", "vit-msn-large-7"),
)
