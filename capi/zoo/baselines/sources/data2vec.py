"""data2vec 2.0: positions on patches alone, a norm of all tokens, then blocks with their norms after the sums.

Facts from facebookresearch/fairseq, examples/data2vec: models/data2vec2.py (blocks; no norm after them, as
`layer_norm_first` is off; the moving average under `_ema`), models/modalities/images.py and base.py (a fixed table of
sines and cosines, added before the class token, `extra_tokens`, comes; no ALiBi for images), modules.py (`AltBlock`,
`BlockEncoder`, whose norm is applied first) and config/v2 (eps 1e-6, sizes). The student is used, as fairseq's
fine-tuning and the loader of facebookresearch/capi do; `@_ema` asks for the teacher. Some configs (base) count their
first two blocks to the context encoder, which changes names alone. The README there has the licence of the vision
models. The original takes its own size
only; elsewhere the table is resampled as by the loader of facebookresearch/capi: bicubically with antialiasing.

data2vec 1 is another architecture, BEiT's, and another model. It is read in the format of transformers
(`Data2VecVisionModel`), which does not have data2vec 2.0; it has no norm at the end.
"""

from capi.models.plain_architecture import vit
from capi.types import Statistics
from capi.zoo.baselines.baseline import WITH_TRANSFORMERS, Baseline, timm_block_rules
from capi.zoo.baselines.keys import Layout, Part, rule, with_bias

_IMAGE = "modality_encoders.IMAGE"
LAYOUT = Layout(
    method="data2vec 2.0",
    rules=(
        rule(f"{_IMAGE}.extra_tokens", "class_token"),
        rule(f"{_IMAGE}.fixed_positional_encoder.positions", "positions"),
        *with_bias(f"{_IMAGE}.local_encoder.proj", "patch_embedding"),
        *with_bias(f"{_IMAGE}.context_encoder.norm", "input_norm"),
        *timm_block_rules(),
    ),
    signature=f"{_IMAGE}.local_encoder.proj.weight",
    ignored=(rf"{_IMAGE}\.decoder\..*", r"recon_proj\..*", r"shared_decoder\..*"),
    parts={"model": Part((("model",), ())), "_ema": Part((("model", "_ema"), ("_ema",)))},
    leading_blocks=f"{_IMAGE}.context_encoder.blocks",
)
# Only transformers' format is known of data2vec 1.
FIRST = Layout(method="data2vec 1", rules=(), signature="(the format of transformers alone)")


def _second(name: str, size: str, sizes: tuple[int, int, int, int], file: str) -> Baseline:
    return Baseline(
        name=name,
        title="Data2Vec 2.0",
        size=size,
        data="ImageNet-1k",
        architecture=vit(
            *sizes, class_position=False, resampling="antialias", input_norm=True, post_norm=True, final_norm=False
        ),
        layout=LAYOUT,
        source="facebookresearch/fairseq, examples/data2vec",
        file=file,
        licence="CC-BY-NC (non-commercial)",
    )


def _first(name: str, size: str, sizes: tuple[int, int, int, int], word: str) -> Baseline:
    return Baseline(
        name=name,
        title="Data2Vec",
        size=size,
        data="ImageNet-1k",
        architecture=vit(
            *sizes, positions="none", relative_bias="shared", key_bias=False, layer_scale=True, final_norm=False
        ),
        layout=FIRST,
        source="facebookresearch/data2vec_vision",
        file="model.safetensors, with config.json, in the format of transformers",
        licence="Apache-2.0 by its page on the Hub",
        verified=WITH_TRANSFORMERS,
        statistics=Statistics((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        model_type="data2vec-vision",
        hub_id=f"facebook/data2vec-vision-{word}",
        note="data2vec 1, which is not in the paper: another model than data2vec 2.0",
    )


BASELINES = (
    _second("data2vec2_vitb16", "ViT-B/16", (768, 12, 12, 16), "base_imagenet.pt"),
    _second("data2vec2_vitl16", "ViT-L/16", (1024, 24, 16, 16), "large_imagenet.pt"),
    _second("data2vec2_vith14", "ViT-H/14", (1280, 32, 16, 14), "huge_imagenet.pt"),
    _first("data2vec1_vitb16", "ViT-B/16", (768, 12, 12, 16), "base"),
    _first("data2vec1_vitl16", "ViT-L/16", (1024, 24, 16, 16), "large"),
)
