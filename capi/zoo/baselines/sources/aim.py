"""AIM, the first of that name: no class token, no biases in blocks, a norm of embedded patches, computed positions.

Facts from apple/ml-aim, aim-v1/aim/v1/torch/models.py (sizes; a trunk without biases, whose norms have them; eps 1e-6;
attention without a mask where none is given, so among all patches), layers.py (`SinCosPosEmbed`: sines and cosines of
the column, then of the row, for the grid of each image) and README.md (the files). Images are normalised as ImageNet.

The paper takes features after layer 18. In the loader of facebookresearch/capi that is the output of the block with
number 18, counted from 0, so after 19 of 24 blocks and without a norm; it does so for every size, and so it is here.
"""

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import Baseline
from capi.zoo.baselines.keys import Layout, Part, rule, with_bias

_BLOCK = "trunk.blocks.{n}"
_ATTENTION = tuple(f"blocks.{{n}}.attention.{name}.weight" for name in ("query", "key", "value"))
LAYOUT = Layout(
    method="AIM",
    rules=(
        *with_bias("preprocessor.patchifier.proj", "patch_embedding"),
        *with_bias("preprocessor.patchifier.norm", "patch_norm"),
        *with_bias(f"{_BLOCK}.norm_1", "blocks.{n}.attention_norm"),
        rule(f"{_BLOCK}.attn.qkv.weight", *_ATTENTION),
        rule(f"{_BLOCK}.attn.proj.weight", "blocks.{n}.attention.output.weight"),
        *with_bias(f"{_BLOCK}.norm_2", "blocks.{n}.mlp_norm"),
        rule(f"{_BLOCK}.mlp.fc1.weight", "blocks.{n}.mlp.expand.weight"),
        rule(f"{_BLOCK}.mlp.fc2.weight", "blocks.{n}.mlp.contract.weight"),
        *with_bias("trunk.post_trunk_norm", "final_norm"),
    ),
    signature="preprocessor.patchifier.proj.weight",
    ignored=(r"head\..*",),
    parts={"": Part(((), ("state_dict",), ("model",)))},
)
LAYER_OF_THE_PAPER = 18


def _aim(name: str, size: str, sizes: tuple[int, int, int], file: str, hub_id: str) -> Baseline:
    return Baseline(
        name=name,
        title="AIM",
        size=size,
        data="DFN-2B+",
        architecture=vit(
            *sizes,
            14,
            class_token=False,
            positions="sincos",
            patch_norm=True,
            query_bias=False,
            key_bias=False,
            value_bias=False,
            output_bias=False,
            mlp_bias=False,
            blocks_used=LAYER_OF_THE_PAPER + 1,
        ),
        layout=LAYOUT,
        source="apple/ml-aim, aim-v1",
        file=f"{file}_attnprobe_backbone.pth",
        licence="Apple's own, see the LICENSE of apple/ml-aim",
        hub_id=f"apple/{hub_id}",
        note="features after the block with number 18, counted from 0, without a norm, as in facebookresearch/capi",
    )


BASELINES = (
    _aim("aim_600m", "ViT-600M/14", (1536, 24, 12), "aim_600m_2bimgs", "aim-600M"),
    _aim("aim_1b", "ViT-1B/14", (2048, 24, 16), "aim_1b_5bimgs", "aim-1B"),
    _aim("aim_3b", "ViT-3B/14", (3072, 24, 24), "aim_3b_5bimgs", "aim-3B"),
    _aim("aim_7b", "ViT-7B/14", (4096, 32, 32), "aim_7b_5bimgs", "aim-7B"),
)
