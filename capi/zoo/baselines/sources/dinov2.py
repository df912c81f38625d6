"""DINOv2, with and without registers: layer scale, learned positions for 518 pixels, SwiGLU in ViT-g.

Facts from facebookresearch/dinov2, dinov2/models/vision_transformer.py (names, sizes, eps 1e-6, registers between
class token and patches, which have no positions; blocks may come in chunks), dinov2/layers/swiglu_ffn.py (w12 is gate
and up, one after the other; the hidden width is two thirds, rounded up to a multiple of 8) and
dinov2/hub/backbones.py: positions of models with registers are resampled bicubically with antialiasing and without
offset, those of the others without antialiasing by the ratio (grid + 0.1) / own grid. In transformers they are
`Dinov2WithRegistersModel` and `Dinov2Model`; the latter has no offset.
"""

from typing import Any

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import MLP_RULES, PATCHES, WITH_TRANSFORMERS, Baseline, timm_rules
from capi.zoo.baselines.keys import Layout, Part, Rule, rule, with_bias

_GATED_RULES = (
    *with_bias("blocks.{n}.mlp.w12", "blocks.{n}.mlp.gate", "blocks.{n}.mlp.expand"),
    *with_bias("blocks.{n}.mlp.w3", "blocks.{n}.mlp.contract"),
)


def _layout(mlp: tuple[Rule, ...]) -> Layout:
    return Layout(
        method="DINOv2",
        rules=(
            *timm_rules(mlp),
            rule("register_tokens", "registers"),
            rule("blocks.{n}.ls1.gamma", "blocks.{n}.attention_scale"),
            rule("blocks.{n}.ls2.gamma", "blocks.{n}.mlp_scale"),
        ),
        signature=PATCHES,
        ignored=(r"mask_token", r"head\..*", r"(dino|ibot)_head\..*"),
        parts={"teacher": Part(((), ("teacher",), ("model",)), ("", "backbone.", "teacher.backbone."))},
        # Training keeps blocks in chunks: blocks.CHUNK.NUMBER.
        renamed=((r"blocks\.\d+\.(\d+\.)", r"blocks.\1"),),
    )


LAYOUT, GATED = _layout(MLP_RULES), _layout(_GATED_RULES)


def _pair(letter: str, size: str, word: str, sizes: tuple[int, int, int], **more: Any) -> tuple[Baseline, Baseline]:
    """The model with registers and the one without."""

    def made(registers: int) -> Baseline:
        resampling = "antialias" if registers else "offset"
        return Baseline(
            name=f"dinov2{'_reg' if registers else ''}_vit{letter}14",
            title="DINOv2+reg" if registers else "DINOv2",
            size=size,
            data="LVD-142M",
            architecture=vit(
                *sizes, 14, image_size=518, registers=registers, layer_scale=True, resampling=resampling, **more
            ),
            layout=GATED if more.get("gated_mlp") else LAYOUT,
            source="facebookresearch/dinov2",
            file=f"dinov2_vit{letter}14_{'reg4_' if registers else ''}pretrain.pth",
            licence="Apache-2.0",
            verified=WITH_TRANSFORMERS,
            model_type="dinov2_with_registers" if registers else "dinov2",
            hub_id=f"facebook/dinov2-{'with-registers-' if registers else ''}{word}",
        )

    return made(4), made(0)


BASELINES = (
    *_pair("s", "ViT-S/14", "small", (384, 12, 6)),
    *_pair("b", "ViT-B/14", "base", (768, 12, 12)),
    *_pair("l", "ViT-L/14", "large", (1024, 24, 16)),
    *_pair("g", "ViT-g/14", "giant", (1536, 40, 24), gated_mlp=True, mlp_width=4096),
)
