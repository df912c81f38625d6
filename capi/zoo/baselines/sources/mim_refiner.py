"""MIM-Refiner: MAE, data2vec 2.0, dBOT and CrossMAE, refined by contrastive heads.

Facts from ml-jku/MIM-Refiner, hubconf.py (names, sizes, the dict is under `state_dict`), hub/prenorm_vit.py (a final
norm over all tokens, which torch hub's model gives), hub/postnorm_vit.py (of data2vec 2.0: a norm of all tokens first,
norms after the sums, none at the end; eps 1e-6), and from BenediktAlkin/KappaModules, vit/vit_pos_embed.py and
functional/pos_embed.py (a table (1, rows, columns, width) on patches alone, resampled bicubically),
vit/vit_class_tokens.py (`cls_tokens.tokens`).
"""

from typing import Any

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import PATCHES, Baseline, timm_block_rules
from capi.zoo.baselines.keys import Layout, Part, rule, with_bias

LAYOUT = Layout(
    method="MIM-Refiner",
    rules=(
        rule("cls_tokens.tokens", "class_token"),
        rule("pos_embed.embed", "positions", as_grid=True),
        *with_bias("patch_embed.proj", "patch_embedding"),
        *with_bias("embed_norm", "input_norm"),
        *timm_block_rules(),
        *with_bias("norm", "final_norm"),
    ),
    signature=PATCHES,
    parts={"state_dict": Part((("state_dict",), ()))},
)
_SIZES = {
    "l16": ("ViT-L/16", (1024, 24, 16, 16)),
    "h14": ("ViT-H/14", (1280, 32, 16, 14)),
    "2b14": ("ViT-2B/14", (2560, 24, 32, 14)),
}
_POST_NORM: dict[str, Any] = {"input_norm": True, "post_norm": True, "final_norm": False}


def _refined(base: str, title: str, size: str, file: str, **more: Any) -> Baseline:
    shown, sizes = _SIZES[size]
    return Baseline(
        name=f"{base}_refined_vit{size}",
        title=f"{title}-refined",
        size=shown,
        data="ImageNet-1k",
        architecture=vit(*sizes, class_position=False, **more),
        layout=LAYOUT,
        source="ml-jku/MIM-Refiner",
        file=f"{file}.th",
        licence="MIT",
    )


BASELINES = (
    _refined("dbot", "dBOT", "l16", "dbotrefined_l16"),
    _refined("dbot", "dBOT", "h14", "dbotrefined_h14"),
    _refined("mae", "MAE", "l16", "maerefined_l16"),
    _refined("mae", "MAE", "h14", "maerefined_h14"),
    _refined("mae", "MAE", "2b14", "maerefined_twob14"),
    _refined("data2vec2", "Data2Vec 2.0", "l16", "d2v2refined_l16", **_POST_NORM),
    _refined("data2vec2", "Data2Vec 2.0", "h14", "d2v2refined_h14", **_POST_NORM),
    _refined("crossmae", "CrossMAE", "l16", "crossmaerefined_l16"),
)
