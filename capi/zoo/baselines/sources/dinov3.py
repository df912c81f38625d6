"""DINOv3: rotary positions on patches, registers, layer scale, no bias of keys; SwiGLU in some sizes. Not in the
paper.

Facts from facebookresearch/dinov3, dinov3/hub/backbones.py (sizes; eps 1e-5; the bias of keys is masked, in ViT-7B
queries and values have none either), dinov3/models/vision_transformer.py (names; a norm of its own for class tokens of
local crops, which is not used here) and dinov3/layers (w1 is the gate, w2 up, w3 down; the hidden width is two
thirds). The `periods` of rotary positions come from the file, since published ones are rounded to bfloat16, and so
does the mask of biases. In transformers, which computes the periods anew, it is `DINOv3ViTModel`.
"""

from typing import Any

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import MLP_RULES, PATCHES, WITH_TRANSFORMERS, Baseline, timm_rules
from capi.zoo.baselines.keys import Layout, Part, Rule, rule, with_bias

_ATTENTION = "blocks.{n}.attention"
_GATED_RULES = (
    *with_bias("blocks.{n}.mlp.w1", "blocks.{n}.mlp.gate"),
    *with_bias("blocks.{n}.mlp.w2", "blocks.{n}.mlp.expand"),
    *with_bias("blocks.{n}.mlp.w3", "blocks.{n}.mlp.contract"),
)


def _layout(mlp: tuple[Rule, ...]) -> Layout:
    return Layout(
        method="DINOv3",
        rules=(
            *(each for each in timm_rules(mlp) if not each.theirs.endswith("qkv.bias")),
            rule("blocks.{n}.attn.qkv.bias", f"{_ATTENTION}.query.bias", None, f"{_ATTENTION}.value.bias"),
            rule("storage_tokens", "registers"),
            rule("blocks.{n}.ls1.gamma", "blocks.{n}.attention_scale"),
            rule("blocks.{n}.ls2.gamma", "blocks.{n}.mlp_scale"),
        ),
        signature=PATCHES,
        ignored=(r"mask_token", r".*\.qkv\.bias_mask", r"local_cls_norm\..*", r"head\..*"),
        periods="rope_embed.periods",
        parts={"teacher": Part(((), ("teacher",)), ("", "backbone."))},
    )


LAYOUT, GATED = _layout(MLP_RULES), _layout(_GATED_RULES)


def _dinov3(size: str, shown: str, sizes: tuple[int, int, int], **more: Any) -> Baseline:
    return Baseline(
        name=f"dinov3_vit{size}",
        title="DINOv3",
        size=shown,
        data="LVD-1689M",
        architecture=vit(
            *sizes, 16, positions="none", rotary=True, registers=4, layer_scale=True, key_bias=False, eps=1e-5, **more
        ),
        layout=GATED if more.get("gated_mlp") else LAYOUT,
        source="facebookresearch/dinov3",
        file=f"the file of dinov3_vit{size} there",
        licence="DINOv3 License",
        verified=WITH_TRANSFORMERS,
        model_type="dinov3_vit",
        hub_id=f"facebook/dinov3-vit{size}-pretrain-lvd1689m",
        note="not in the paper",
    )


_NO_BIAS: dict[str, Any] = {"query_bias": False, "value_bias": False}
BASELINES = (
    _dinov3("s16", "ViT-S/16", (384, 12, 6)),
    _dinov3("s16plus", "ViT-S+/16", (384, 12, 6), gated_mlp=True, mlp_width=1536),
    _dinov3("b16", "ViT-B/16", (768, 12, 12)),
    _dinov3("l16", "ViT-L/16", (1024, 24, 16)),
    _dinov3("h16plus", "ViT-H+/16", (1280, 32, 20), gated_mlp=True, mlp_width=5120),
    _dinov3("7b16", "ViT-7B/16", (4096, 40, 32), gated_mlp=True, mlp_width=8192, **_NO_BIAS),
)
