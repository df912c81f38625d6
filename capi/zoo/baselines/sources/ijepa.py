"""I-JEPA: a ViT without a class token, with a fixed table of sines and cosines.

Facts from facebookresearch/ijepa, src/models/vision_transformer.py (names, sizes, eps 1e-6, the table), src/train.py
(`encoder`, `predictor`, `target_encoder`, with `module.` in front of names) and README.md (the files). The original
code that would resample positions counts a class token that the model lacks, so it takes its own size only; here they
are resampled bicubically, as the loader of facebookresearch/capi and transformers (`IJepaModel`) do.

The target encoder is used, as in the evaluations of the I-JEPA paper. The loader of facebookresearch/capi and the
files on the Hub have the other one: `@encoder` asks for it.
"""

from capi.models.plain_architecture import vit
from capi.zoo.baselines.baseline import PATCHES, WITH_TRANSFORMERS, Baseline, timm_rules
from capi.zoo.baselines.keys import Layout, Part

LAYOUT = Layout(
    method="I-JEPA",
    rules=timm_rules(),
    signature=PATCHES,
    parts={"target_encoder": Part((("target_encoder",), ())), "encoder": Part((("encoder",),))},
)
_HUGE = (1280, 32, 16)


def _ijepa(
    name: str, size: str, sizes: tuple[int, int, int], patch_size: int, data: str, file: str, hub_id: str, **more: int
) -> Baseline:
    return Baseline(
        name=name,
        title="I-JEPA",
        size=size,
        data=data,
        architecture=vit(*sizes, patch_size, class_token=False, **more),
        layout=LAYOUT,
        source="facebookresearch/ijepa",
        file=f"{file}.pth.tar",
        licence="CC-BY-NC-4.0 (non-commercial)",
        verified=WITH_TRANSFORMERS,
        model_type="ijepa",
        hub_id=f"facebook/{hub_id}",
        note="the target encoder; the file on the Hub and the loader of facebookresearch/capi have the context encoder",
    )


_IN1K, _IN22K = "ImageNet-1k", "ImageNet-22k"
BASELINES = (
    _ijepa("ijepa_vith14_in1k", "ViT-H/14", _HUGE, 14, _IN1K, "IN1K-vit.h.14-300e", "ijepa_vith14_1k"),
    _ijepa("ijepa_vith14_in22k", "ViT-H/14", _HUGE, 14, _IN22K, "IN22K-vit.h.14-900e", "ijepa_vith14_22k"),
    _ijepa(
        "ijepa_vith16_448",
        "ViT-H/16 at 448 px",
        _HUGE,
        16,
        _IN1K,
        "IN1K-vit.h.16-448px-300e",
        "ijepa_vith16_1k",
        image_size=448,
    ),
    _ijepa(
        "ijepa_vitg16_in22k",
        "ViT-g/16",
        (1408, 40, 16),
        16,
        _IN22K,
        "IN22K-vit.g.16-600e",
        "ijepa_vitg16_22k",
        mlp_width=6144,
    ),
)
