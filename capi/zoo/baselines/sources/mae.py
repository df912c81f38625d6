"""MAE: timm's ViT with a fixed table of sines and cosines; the decoder is left out.

Facts from facebookresearch/mae, models_mae.py (names, sizes, eps 1e-6, the decoder), models_vit.py (linear probing
reads tokens after the final norm), util/pos_embed.py (bicubic resampling) and main_pretrain.py (the dict is under
`model`). In transformers it is `ViTMAEModel`.
"""

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import PATCHES, WITH_TRANSFORMERS, Baseline, timm_rules
from capi.zoo.baselines.keys import Layout, Part

LAYOUT = Layout(
    method="MAE",
    rules=timm_rules(),
    signature=PATCHES,
    ignored=(r"mask_token", r"decoder_.*"),
    parts={"model": Part((("model",), ()))},
)


def _mae(name: str, size: str, sizes: tuple[int, int, int, int], word: str) -> Baseline:
    return Baseline(
        name=name,
        title="MAE",
        size=size,
        data="ImageNet-1k",
        architecture=vit(*sizes),
        layout=LAYOUT,
        source="facebookresearch/mae",
        file=f"mae_pretrain_vit_{word}.pth",
        licence="CC-BY-NC-4.0 (non-commercial)",
        verified=WITH_TRANSFORMERS,
        model_type="vit_mae",
        hub_id=f"facebook/vit-mae-{word}",
    )


BASELINES = (
    _mae("mae_vitb16", "ViT-B/16", (768, 12, 12, 16), "base"),
    _mae("mae_vitl16", "ViT-L/16", (1024, 24, 16, 16), "large"),
    _mae("mae_vith14", "ViT-H/14", (1280, 32, 16, 14), "huge"),
)
