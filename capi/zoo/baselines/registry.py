"""Every baseline: one table, a row for each published model, by the source that publishes it.

The sizes follow from how a size is called ("ViT-L/16"); a row says what differs from them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from capi.errors import CapiError, nearest
from capi.models.plain_vit import PlainArchitecture, PlainViT, count_parameters, vit
from capi.models.weightless import without_weights
from capi.types import IMAGENET, Statistics
from capi.zoo.baselines import layouts
from capi.zoo.baselines.keys import Layout


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One model of a source: what it is, how its file is laid out, whose it is."""

    name: str
    title: str
    """The method, as tables print it."""
    size: str
    """The architecture, as tables print it."""
    data: str = "ImageNet-1k"
    architecture: PlainArchitecture
    layout: Layout
    source: str
    """The repository that publishes it."""
    file: str
    """What the file is called there."""
    licence: str
    statistics: Statistics = IMAGENET
    model_type: str | None = None
    """What transformers calls the architecture, where it has it."""
    hub_id: str | None = None
    note: str = ""
    """What a reader of its scores should know."""

    @property
    def verified(self) -> str:
        """How far it is certain that its features are the authors'."""
        if self.model_type is None:
            return "layout from documentation, not verified with real weights"
        return (
            "random weights give the same features as the implementation in transformers; "
            "not tried with the published file"
        )

    @property
    def parameters(self) -> int:
        return count_parameters(self.architecture)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each of our tensors."""
        return shapes_of(self.architecture)


@lru_cache(maxsize=128)
def shapes_of(architecture: PlainArchitecture) -> Mapping[str, tuple[int, ...]]:
    """Our names and their shapes for an architecture."""
    with without_weights():
        model = PlainViT(architecture)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


# Width, depth and heads.
_SIZES = {
    "S": (384, 12, 6),
    "S+": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "H": (1280, 32, 16),
    "H+": (1280, 32, 20),
    "g": (1536, 40, 24),
    "600M": (1536, 24, 12),
    "1B": (2048, 24, 16),
    "2B": (2560, 24, 32),
    "3B": (3072, 24, 24),
    "7B": (4096, 32, 32),
}


def _models(layout: Layout, shared: dict[str, Any], *rows: tuple[Any, ...]) -> list[Baseline]:
    """The models of one source. A row is (name, size, file, id on the Hub[, what differs]).

    What is shared and what differs are facts of `Baseline` or options of `PlainArchitecture`.
    """
    baselines = []
    for name, size, file, hub_id, *differing in rows:
        options = {**shared, **(differing[0] if differing else {})}
        facts: dict[str, Any] = {key: options.pop(key) for key in Baseline.__dataclass_fields__ if key in options}
        letter, patch_size = re.match(r"ViT-(.+)/(\d+)", size).groups()  # type: ignore[union-attr]
        width, depth, heads = _SIZES[letter]
        sizes = {"width": width, "depth": depth, "heads": heads, "patch_size": int(patch_size)}
        facts.setdefault("layout", layout)
        architecture = vit(**(sizes | options))
        baselines.append(Baseline(name=name, size=size, architecture=architecture, file=file, hub_id=hub_id, **facts))
    return baselines


_NON_COMMERCIAL = "CC-BY-NC-4.0 (non-commercial)"
_IN22K = {"data": "ImageNet-22k"}
_HALF = Statistics((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_RELATIVE = {"positions": "none", "relative_bias": "shared", "key_bias": False, "layer_scale": True}
_POST_NORM = {"input_norm": True, "post_norm": True, "final_norm": False}
_D2V2_REFINED = {"title": "Data2Vec 2.0-refined", **_POST_NORM}
_WITH = "facebook/dinov2-with-registers"
_REGISTERS = {"title": "DINOv2+reg", "registers": 4, "resampling": "antialias", "model_type": "dinov2_with_registers"}
_GATED2 = {"layout": layouts.DINOV2_GATED, "gated_mlp": True, "mlp_width": 4096}
_GATED3 = {"layout": layouts.DINOV3_GATED, "gated_mlp": True}
_NO_BIAS = {"query_bias": False, "value_bias": False}
_D2V1_FILE = "model.safetensors, with config.json, in the format of transformers"

# The paper takes AIM's features after layer 18. In the loader of facebookresearch/capi that is the output of the block
# with number 18, counted from 0, so after 19 of 24 blocks and without a norm; it does so for every size, and so it is
# here.
_LAYER_OF_THE_PAPER = 18

# fmt: off
_ALL = [
    *_models(
        layouts.DINO,
        {
            "title": "DINO",
            "source": "facebookresearch/dino",
            "licence": "Apache-2.0",
            "model_type": "vit",
            "resampling": "offset",
        },
        ("dino_vits16", "ViT-S/16", "dino_deitsmall16_pretrain.pth", "facebook/dino-vits16"),
        ("dino_vits8", "ViT-S/8", "dino_deitsmall8_pretrain.pth", "facebook/dino-vits8"),
        ("dino_vitb16", "ViT-B/16", "dino_vitbase16_pretrain.pth", "facebook/dino-vitb16"),
        ("dino_vitb8", "ViT-B/8", "dino_vitbase8_pretrain.pth", "facebook/dino-vitb8"),
    ),
    *_models(
        layouts.MOCOV3,
        {"title": "MoCov3", "source": "facebookresearch/moco-v3", "licence": _NON_COMMERCIAL, "resampling": "rows"},
        ("mocov3_vits16", "ViT-S/16", "vit-s-300ep.pth.tar", None, {"heads": 12}),
        ("mocov3_vitb16", "ViT-B/16", "vit-b-300ep.pth.tar", None),
    ),
    *_models(
        layouts.MSN,
        {"title": "MSN", "source": "facebookresearch/msn", "licence": _NON_COMMERCIAL, "model_type": "vit_msn"},
        ("msn_vits16", "ViT-S/16", "vits16_800ep.pth.tar", "facebook/vit-msn-small"),
        ("msn_vitb16", "ViT-B/16", "vitb16_600ep.pth.tar", "facebook/vit-msn-base"),
        ("msn_vitl16", "ViT-L/16", "vitl16_600ep.pth.tar", "facebook/vit-msn-large"),
        ("msn_vitb4", "ViT-B/4", "vitb4_300ep.pth.tar", "facebook/vit-msn-base-4"),
        ("msn_vitl7", "ViT-L/7", "vitl7_200ep.pth.tar", "facebook/vit-msn-large-7"),
    ),
    *_models(
        layouts.IBOT,
        {"title": "iBOT", "source": "bytedance/ibot", "licence": "Apache-2.0", "resampling": "offset"},
        ("ibot_vits16", "ViT-S/16", "checkpoint_teacher.pth of vits_16", None),
        ("ibot_vitb16", "ViT-B/16", "checkpoint_teacher.pth of vitb_16_rand_mask", None),
        ("ibot_vitl16", "ViT-L/16", "checkpoint_teacher.pth of vitl_16_rand_mask", None),
        ("ibot_vitb16_in22k", "ViT-B/16", "checkpoint_student.pth of vitb_16_pt22k", None, _IN22K),
        ("ibot_vitl16_in22k", "ViT-L/16", "checkpoint_student.pth of vitl_16_pt22k", None, _IN22K),
    ),
    *_models(
        layouts.MIM_REFINER,
        {"title": "MAE-refined", "source": "ml-jku/MIM-Refiner", "licence": "MIT", "class_position": False},
        ("dbot_refined_vitl16", "ViT-L/16", "dbotrefined_l16.th", None, {"title": "dBOT-refined"}),
        ("dbot_refined_vith14", "ViT-H/14", "dbotrefined_h14.th", None, {"title": "dBOT-refined"}),
        ("mae_refined_vitl16", "ViT-L/16", "maerefined_l16.th", None),
        ("mae_refined_vith14", "ViT-H/14", "maerefined_h14.th", None),
        ("mae_refined_vit2b14", "ViT-2B/14", "maerefined_twob14.th", None),
        ("data2vec2_refined_vitl16", "ViT-L/16", "d2v2refined_l16.th", None, _D2V2_REFINED),
        ("data2vec2_refined_vith14", "ViT-H/14", "d2v2refined_h14.th", None, _D2V2_REFINED),
        ("crossmae_refined_vitl16", "ViT-L/16", "crossmaerefined_l16.th", None, {"title": "CrossMAE-refined"}),
    ),
    *_models(
        layouts.IJEPA,
        {
            "title": "I-JEPA",
            "source": "facebookresearch/ijepa",
            "licence": _NON_COMMERCIAL,
            "model_type": "ijepa",
            "class_token": False,
            "note": "the target encoder; the file on the Hub and the loader of facebookresearch/capi have the context "
            "encoder",
        },
        ("ijepa_vith14_in1k", "ViT-H/14", "IN1K-vit.h.14-300e.pth.tar", "facebook/ijepa_vith14_1k"),
        ("ijepa_vith14_in22k", "ViT-H/14", "IN22K-vit.h.14-900e.pth.tar", "facebook/ijepa_vith14_22k", _IN22K),
        (
            "ijepa_vith16_448", "ViT-H/16 at 448 px", "IN1K-vit.h.16-448px-300e.pth.tar", "facebook/ijepa_vith16_1k",
            {"image_size": 448},
        ),
        (
            "ijepa_vitg16_in22k", "ViT-g/16", "IN22K-vit.g.16-600e.pth.tar", "facebook/ijepa_vitg16_22k",
            {"width": 1408, "heads": 16, "mlp_width": 6144, **_IN22K},
        ),
    ),
    *_models(
        layouts.MAE,
        {"title": "MAE", "source": "facebookresearch/mae", "licence": _NON_COMMERCIAL, "model_type": "vit_mae"},
        ("mae_vitb16", "ViT-B/16", "mae_pretrain_vit_base.pth", "facebook/vit-mae-base"),
        ("mae_vitl16", "ViT-L/16", "mae_pretrain_vit_large.pth", "facebook/vit-mae-large"),
        ("mae_vith14", "ViT-H/14", "mae_pretrain_vit_huge.pth", "facebook/vit-mae-huge"),
    ),
    *_models(
        layouts.DATA2VEC2,
        {
            "title": "Data2Vec 2.0",
            "source": "facebookresearch/fairseq, examples/data2vec",
            "licence": "CC-BY-NC (non-commercial)",
            "class_position": False,
            "resampling": "antialias",
            **_POST_NORM,
        },
        ("data2vec2_vitb16", "ViT-B/16", "base_imagenet.pt", None),
        ("data2vec2_vitl16", "ViT-L/16", "large_imagenet.pt", None),
        ("data2vec2_vith14", "ViT-H/14", "huge_imagenet.pt", None),
    ),
    *_models(
        layouts.DATA2VEC1,
        {
            "title": "Data2Vec",
            "source": "facebookresearch/data2vec_vision",
            "licence": "Apache-2.0 by its page on the Hub",
            "statistics": _HALF,
            "model_type": "data2vec-vision",
            "note": "data2vec 1, which is not in the paper: another model than data2vec 2.0",
            "final_norm": False,
            **_RELATIVE,
        },
        ("data2vec1_vitb16", "ViT-B/16", _D2V1_FILE, "facebook/data2vec-vision-base"),
        ("data2vec1_vitl16", "ViT-L/16", _D2V1_FILE, "facebook/data2vec-vision-large"),
    ),
    *_models(
        layouts.DINOV2,
        {
            "title": "DINOv2",
            "data": "LVD-142M",
            "source": "facebookresearch/dinov2",
            "licence": "Apache-2.0",
            "model_type": "dinov2",
            "image_size": 518,
            "layer_scale": True,
            "resampling": "offset",
        },
        ("dinov2_reg_vits14", "ViT-S/14", "dinov2_vits14_reg4_pretrain.pth", f"{_WITH}-small", _REGISTERS),
        ("dinov2_vits14", "ViT-S/14", "dinov2_vits14_pretrain.pth", "facebook/dinov2-small"),
        ("dinov2_reg_vitb14", "ViT-B/14", "dinov2_vitb14_reg4_pretrain.pth", f"{_WITH}-base", _REGISTERS),
        ("dinov2_vitb14", "ViT-B/14", "dinov2_vitb14_pretrain.pth", "facebook/dinov2-base"),
        ("dinov2_reg_vitl14", "ViT-L/14", "dinov2_vitl14_reg4_pretrain.pth", f"{_WITH}-large", _REGISTERS),
        ("dinov2_vitl14", "ViT-L/14", "dinov2_vitl14_pretrain.pth", "facebook/dinov2-large"),
        (
            "dinov2_reg_vitg14", "ViT-g/14", "dinov2_vitg14_reg4_pretrain.pth", f"{_WITH}-giant",
            {**_REGISTERS, **_GATED2},
        ),
        ("dinov2_vitg14", "ViT-g/14", "dinov2_vitg14_pretrain.pth", "facebook/dinov2-giant", _GATED2),
    ),
    *_models(
        layouts.BEIT,
        {
            "title": "BeiT",
            "data": "ImageNet-22k",
            "source": "microsoft/unilm, beit",
            "licence": "MIT",
            "statistics": _HALF,
            "model_type": "beit",
            "note": "normalised with mean and std 0.5, as it was trained; the paper normalises all models as ImageNet",
            **_RELATIVE,
        },
        ("beit_vitb16", "ViT-B/16", "beit_base_patch16_224_pt22k.pth", "microsoft/beit-base-patch16-224-pt22k"),
        ("beit_vitl16", "ViT-L/16", "beit_large_patch16_224_pt22k.pth", "microsoft/beit-large-patch16-224-pt22k"),
    ),
    *_models(
        layouts.AIM,
        {
            "title": "AIM",
            "data": "DFN-2B+",
            "source": "apple/ml-aim, aim-v1",
            "licence": "Apple's own, see the LICENSE of apple/ml-aim",
            "note": "features after the block with number 18, counted from 0, without a norm, as in "
            "facebookresearch/capi",
            "class_token": False,
            "positions": "sincos",
            "patch_norm": True,
            **{f"{each}_bias": False for each in ("query", "key", "value", "output", "mlp")},
            "blocks_used": _LAYER_OF_THE_PAPER + 1,
            "causal": True,
        },
        ("aim_600m", "ViT-600M/14", "aim_600m_2bimgs_attnprobe_backbone.pth", "apple/aim-600M"),
        ("aim_1b", "ViT-1B/14", "aim_1b_5bimgs_attnprobe_backbone.pth", "apple/aim-1B"),
        ("aim_3b", "ViT-3B/14", "aim_3b_5bimgs_attnprobe_backbone.pth", "apple/aim-3B"),
        ("aim_7b", "ViT-7B/14", "aim_7b_5bimgs_attnprobe_backbone.pth", "apple/aim-7B"),
    ),
    *_models(
        layouts.DINOV3,
        {
            "title": "DINOv3",
            "data": "LVD-1689M",
            "source": "facebookresearch/dinov3",
            "licence": "DINOv3 License",
            "model_type": "dinov3_vit",
            "note": "not in the paper",
            "positions": "none",
            "rotary": True,
            "registers": 4,
            "layer_scale": True,
            "key_bias": False,
            "eps": 1e-5,
        },
        *(
            (
                f"dinov3_{name}", size, f"the file of dinov3_{name} there",
                f"facebook/dinov3-{name}-pretrain-lvd1689m", *own,
            )
            for name, size, *own in (
                ("vits16", "ViT-S/16"),
                ("vits16plus", "ViT-S+/16", {"mlp_width": 1536, **_GATED3}),
                ("vitb16", "ViT-B/16"),
                ("vitl16", "ViT-L/16"),
                ("vith16plus", "ViT-H+/16", {"mlp_width": 5120, **_GATED3}),
                ("vit7b16", "ViT-7B/16", {"depth": 40, "mlp_width": 8192, **_NO_BIAS, **_GATED3}),
            )
        ),
    ),
]
# fmt: on
BASELINES: dict[str, Baseline] = {each.name: each for each in _ALL}
# The encoders of the paper's tables and figures.
PAPER_BASELINES = (
    "dino_vitb16",
    "mocov3_vitb16",
    "msn_vitl16",
    "ibot_vitl16",
    "dbot_refined_vitl16",
    "ijepa_vith14_in1k",
    "ijepa_vith14_in22k",
    "ijepa_vith16_448",
    "mae_vitl16",
    "mae_vith14",
    "data2vec2_vitl16",
    "dinov2_reg_vitl14",
    "dinov2_reg_vitg14",
    "beit_vitl16",
    "aim_600m",
    "aim_3b",
)


def baseline_named(name: str) -> Baseline:
    """The baseline of a name; another name is an error with the closest one."""
    if name not in BASELINES:
        raise CapiError(f'there is no baseline "{name}"{nearest(name, list(BASELINES))}: `capi models` lists them')
    return BASELINES[name]


def list_baselines() -> list[Baseline]:
    """Those of the paper first, the others in the order of their sources."""
    others = [each for name, each in BASELINES.items() if name not in PAPER_BASELINES]
    return [BASELINES[name] for name in PAPER_BASELINES] + others
