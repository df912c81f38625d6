"""BEiT: a number for each head and offset between patches in place of positions, shared by all blocks; no bias of
keys.

Facts from microsoft/unilm, beit/modeling_pretrain.py (names, sizes, eps 1e-6, the final norm, `lm_head` and
`mask_token`), beit/modeling_finetune.py (`q_bias` and `v_bias` with a bias of zero for keys, `gamma_1` and `gamma_2`,
the order of the table), beit/run_beit_pretraining.py (the dict is under `model`; images are normalised with mean and
deviation 0.5, unless told otherwise). The model refuses other sizes than its own; fine-tuning at another one changes
the table before, which is not done here. In transformers it is `BeitForMaskedImageModeling`.
"""

from capi.models.plain_architecture import vit
from capi.types import Statistics
from capi.zoo.baselines.baseline import PATCHES, WITH_TRANSFORMERS, Baseline, timm_rules
from capi.zoo.baselines.keys import Layout, Part, rule

LAYOUT = Layout(
    method="BEiT",
    rules=(
        *(each for each in timm_rules() if not each.theirs.endswith("qkv.bias")),
        rule("blocks.{n}.attn.q_bias", "blocks.{n}.attention.query.bias"),
        rule("blocks.{n}.attn.v_bias", "blocks.{n}.attention.value.bias"),
        rule("blocks.{n}.gamma_1", "blocks.{n}.attention_scale"),
        rule("blocks.{n}.gamma_2", "blocks.{n}.mlp_scale"),
        rule("rel_pos_bias.relative_position_bias_table", "relative_bias.table"),
        rule("blocks.{n}.attn.relative_position_bias_table", "blocks.{n}.relative_bias.table"),
    ),
    signature=PATCHES,
    ignored=(r"mask_token", r"lm_head\..*", r".*relative_position_index"),
    parts={"model": Part((("model",), ("module",), ()))},
)


def _beit(name: str, size: str, sizes: tuple[int, int, int, int], word: str) -> Baseline:
    return Baseline(
        name=name,
        title="BeiT",
        size=size,
        data="ImageNet-22k",
        architecture=vit(*sizes, positions="none", relative_bias="shared", key_bias=False, layer_scale=True),
        layout=LAYOUT,
        source="microsoft/unilm, beit",
        file=f"beit_{word}_patch16_224_pt22k.pth",
        licence="MIT",
        verified=WITH_TRANSFORMERS,
        statistics=Statistics((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        model_type="beit",
        hub_id=f"microsoft/beit-{word}-patch16-224-pt22k",
        note="normalised with mean and deviation 0.5, as it was trained; the paper normalises all models as ImageNet",
    )


BASELINES = (
    _beit("beit_vitb16", "ViT-B/16", (768, 12, 12, 16), "base"),
    _beit("beit_vitl16", "ViT-L/16", (1024, 24, 16, 16), "large"),
)
