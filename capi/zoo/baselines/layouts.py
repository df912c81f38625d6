"""How each source names its tensors, with where the facts come from.

Most are timm's names with a few of their own. `baseline:NAME@PART` asks for one of a layout's parts; the first one is
taken where none is named.
"""

from capi.zoo.baselines.keys import KeyRule, Layout, Subnetwork, rule, with_bias

_BLOCK = "blocks.{n}"
_ATTENTION = f"{_BLOCK}.attention"
_PATCHES = "patch_embed.proj.weight"
_MLP = (
    *with_bias(f"{_BLOCK}.mlp.fc1", f"{_BLOCK}.mlp.expand"),
    *with_bias(f"{_BLOCK}.mlp.fc2", f"{_BLOCK}.mlp.contract"),
)


def _timm_block(mlp: tuple[KeyRule, ...] = _MLP) -> tuple[KeyRule, ...]:
    """The names of a block that timm's vision transformer has, and most that descend from it."""
    return (
        *with_bias(f"{_BLOCK}.norm1", f"{_BLOCK}.attention_norm"),
        *with_bias(f"{_BLOCK}.attn.qkv", f"{_ATTENTION}.query", f"{_ATTENTION}.key", f"{_ATTENTION}.value"),
        *with_bias(f"{_BLOCK}.attn.proj", f"{_ATTENTION}.output"),
        *with_bias(f"{_BLOCK}.norm2", f"{_BLOCK}.mlp_norm"),
        *mlp,
    )


def _timm(mlp: tuple[KeyRule, ...] = _MLP) -> tuple[KeyRule, ...]:
    """The names of timm's vision transformer."""
    return (
        rule("cls_token", "class_token"),
        rule("pos_embed", "positions"),
        *with_bias("patch_embed.proj", "patch_embedding"),
        *_timm_block(mlp),
        *with_bias("norm", "final_norm"),
    )


def _layer_scale(attention: str, mlp: str) -> tuple[KeyRule, KeyRule]:
    return rule(f"{_BLOCK}.{attention}", f"{_BLOCK}.attention_scale"), rule(f"{_BLOCK}.{mlp}", f"{_BLOCK}.mlp_scale")


# A ViT with a class token and learned positions. Facts from facebookresearch/dino, vision_transformer.py (names, eps
# 1e-6, exact GELU, q scaled by the root of a head's width; positions resampled bicubically by the ratio (grid + 0.1) /
# own grid unless the image is square and of the own size; get_intermediate_layers gives tokens after the final norm)
# and hubconf.py (sizes; a flat state dict of the backbone). A checkpoint of main_dino.py has `student` and `teacher`,
# with `backbone.` and `head.` in front of names. In transformers it is `ViTModel`, with an eps of its own in
# config.json, and positions resampled without the 0.1.
DINO = Layout(
    method="DINO",
    rules=_timm(),
    signature=_PATCHES,
    ignored=(r"head\..*",),
    parts={
        "teacher": Subnetwork(((), ("teacher",)), ("", "backbone.")),
        "student": Subnetwork((("student",),), ("", "backbone.")),
    },
    positions="learned",
)

# Timm's ViT with fixed sines and cosines as positions, of the row first and then of the column. Facts from
# facebookresearch/moco-v3, vits.py (sizes, where ViT-S has 12 heads; eps 1e-6; the table, in which the class token has
# a row of zeros, laid out for square grids), main_lincls.py (`state_dict` with `module.base_encoder.`, which linear
# probing uses; its `head` is the projection) and moco/builder.py (`momentum_encoder`, `predictor`). The original takes
# one size only; a model of its code for another square size computes the same table there, which is done here.
MOCOV3 = Layout(
    method="MoCo v3",
    rules=_timm(),
    signature=_PATCHES,
    ignored=(r"head\..*", r"predictor\..*", r"(base|momentum)_encoder\..*"),
    parts={
        # A file of linear probing has the encoder alone, without a name in front.
        "base_encoder": Subnetwork((("state_dict",), ()), ("base_encoder.", "")),
        "momentum_encoder": Subnetwork((("state_dict",), ()), ("momentum_encoder.",)),
    },
    positions="row",
)

# DINO's ViT, with positions resampled by the plain ratio of the grids. Facts from facebookresearch/msn, src/deit.py
# (names, sizes, eps 1e-6, bicubic resampling; the projection head is `fc`, the prediction head `pred`) and
# src/msn_train.py (`encoder` and `target_encoder`, with `module.` in front of names). The target encoder is used, as
# the conversion for transformers does (`ViTMSNModel`).
MSN = Layout(
    method="MSN",
    rules=_timm(),
    signature=_PATCHES,
    ignored=(r"fc\..*", r"pred\..*"),
    parts={"target_encoder": Subnetwork((("target_encoder",), ())), "encoder": Subnetwork((("encoder",),))},
    positions="learned",
)

# DINO's ViT; its mask token and heads are left out. Facts from bytedance/ibot, models/vision_transformer.py (names,
# sizes, eps 1e-6, positions resampled as in DINO, the mask token `masked_embed`) and its README (backbones under
# `state_dict` in checkpoint_teacher.pth or checkpoint_student.pth).
IBOT = Layout(
    method="iBOT",
    rules=_timm(),
    signature=_PATCHES,
    ignored=(r"head\d?\..*", r"masked_embed"),
    parts={
        "teacher": Subnetwork((("state_dict",), ("teacher",), ()), ("", "backbone.")),
        "student": Subnetwork((("student",),), ("", "backbone.")),
    },
    positions="learned",
)

# MAE, data2vec 2.0, dBOT and CrossMAE, refined by contrastive heads. Facts from ml-jku/MIM-Refiner, hubconf.py (names,
# sizes, the dict is under `state_dict`), hub/prenorm_vit.py (a final norm over all tokens, which torch hub's model
# gives), hub/postnorm_vit.py (of data2vec 2.0: a norm of all tokens first, norms after the sums, none at the end; eps
# 1e-6), and from BenediktAlkin/KappaModules, vit/vit_pos_embed.py and functional/pos_embed.py (a table (1, rows,
# columns, width) on patches alone, resampled bicubically), vit/vit_class_tokens.py (`cls_tokens.tokens`).
MIM_REFINER = Layout(
    method="MIM-Refiner",
    rules=(
        rule("cls_tokens.tokens", "class_token"),
        rule("pos_embed.embed", "positions", as_grid=True),
        *with_bias("patch_embed.proj", "patch_embedding"),
        *with_bias("embed_norm", "input_norm"),
        *_timm_block(),
        *with_bias("norm", "final_norm"),
    ),
    signature=_PATCHES,
    parts={"state_dict": Subnetwork((("state_dict",), ()))},
)

# A ViT without a class token, with a fixed table of sines and cosines. Facts from facebookresearch/ijepa,
# src/models/vision_transformer.py (names, sizes, eps 1e-6, the table), src/train.py (`encoder`, `predictor`,
# `target_encoder`, with `module.` in front of names) and README.md (the files). The original code that would resample
# positions counts a class token that the model lacks, so it takes its own size only; here they are resampled
# bicubically, as the loader of facebookresearch/capi and transformers (`IJepaModel`) do. The target encoder is used, as
# in the evaluations of the I-JEPA paper; the loader of facebookresearch/capi and the files on the Hub have the other
# one: `@encoder` asks for it.
IJEPA = Layout(
    method="I-JEPA",
    rules=_timm(),
    signature=_PATCHES,
    parts={"target_encoder": Subnetwork((("target_encoder",), ())), "encoder": Subnetwork((("encoder",),))},
    positions="column",
)

# Timm's ViT with a fixed table of sines and cosines; the decoder is left out. Facts from facebookresearch/mae,
# models_mae.py (names, sizes, eps 1e-6, the decoder), models_vit.py (linear probing reads tokens after the final norm),
# util/pos_embed.py (bicubic resampling) and main_pretrain.py (the dict is under `model`). In transformers it is
# `ViTMAEModel`.
MAE = Layout(
    method="MAE",
    rules=_timm(),
    signature=_PATCHES,
    ignored=(r"mask_token", r"decoder_.*"),
    parts={"model": Subnetwork((("model",), ()))},
    positions="column",
)

# Positions on patches alone, a norm of all tokens, then blocks with their norms after the sums. Facts from
# facebookresearch/fairseq, examples/data2vec: models/data2vec2.py (blocks; no norm after them, as `layer_norm_first` is
# off; the moving average under `_ema`), models/modalities/images.py and base.py (a fixed table of sines and cosines,
# added before the class token, `extra_tokens`, comes; no ALiBi for images), modules.py (`AltBlock`, `BlockEncoder`,
# whose norm is applied first) and config/v2 (eps 1e-6, sizes). The student is used, as fairseq's fine-tuning and the
# loader of facebookresearch/capi do; `@_ema` asks for the teacher. Some configs (base) count their first two blocks to
# the context encoder, which changes names alone. The README there has the license of the vision models. The original
# takes its own size only; elsewhere the table is resampled as by the loader of facebookresearch/capi: bicubically with
# antialiasing.
_IMAGE = "modality_encoders.IMAGE"
DATA2VEC2 = Layout(
    method="data2vec 2.0",
    rules=(
        rule(f"{_IMAGE}.extra_tokens", "class_token"),
        rule(f"{_IMAGE}.fixed_positional_encoder.positions", "positions"),
        *with_bias(f"{_IMAGE}.local_encoder.proj", "patch_embedding"),
        *with_bias(f"{_IMAGE}.context_encoder.norm", "input_norm"),
        *_timm_block(),
    ),
    signature=f"{_IMAGE}.local_encoder.proj.weight",
    ignored=(rf"{_IMAGE}\.decoder\..*", r"recon_proj\..*", r"shared_decoder\..*"),
    parts={"model": Subnetwork((("model",), ())), "_ema": Subnetwork((("model", "_ema"), ("_ema",)))},
    leading_blocks=f"{_IMAGE}.context_encoder.blocks",
    positions="column",
)

# data2vec 1 is another architecture, BEiT's, and another model. It is read in the format of transformers alone
# (`Data2VecVisionModel`), which does not have data2vec 2.0; it has no norm at the end.
DATA2VEC1 = Layout(method="data2vec 1", rules=(), signature="(the format of transformers alone)")


def _dinov2(mlp: tuple[KeyRule, ...]) -> Layout:
    return Layout(
        method="DINOv2",
        rules=(*_timm(mlp), rule("register_tokens", "registers"), *_layer_scale("ls1.gamma", "ls2.gamma")),
        signature=_PATCHES,
        ignored=(r"mask_token", r"head\..*", r"(dino|ibot)_head\..*"),
        parts={"teacher": Subnetwork(((), ("teacher",), ("model",)), ("", "backbone.", "teacher.backbone."))},
        # Training keeps blocks in chunks: blocks.CHUNK.NUMBER.
        renamed=((r"blocks\.\d+\.(\d+\.)", r"blocks.\1"),),
        positions="learned",
    )


# With and without registers: layer scale, learned positions for 518 pixels, SwiGLU in ViT-g. Facts from
# facebookresearch/dinov2, dinov2/models/vision_transformer.py (names, sizes, eps 1e-6, registers between class token
# and patches, which have no positions; blocks may come in chunks), dinov2/layers/swiglu_ffn.py (w12 is gate and up, one
# after the other; the hidden width is two thirds, rounded up to a multiple of 8) and dinov2/hub/backbones.py: positions
# of models with registers are resampled bicubically with antialiasing and without offset, those of the others without
# antialiasing by the ratio (grid + 0.1) / own grid. In transformers they are `Dinov2WithRegistersModel` and
# `Dinov2Model`; the latter has no offset.
DINOV2 = _dinov2(_MLP)
DINOV2_GATED = _dinov2(
    (
        *with_bias(f"{_BLOCK}.mlp.w12", f"{_BLOCK}.mlp.gate", f"{_BLOCK}.mlp.expand"),
        *with_bias(f"{_BLOCK}.mlp.w3", f"{_BLOCK}.mlp.contract"),
    )
)

# A number for each head and offset between patches in place of positions, shared by all blocks; no bias of keys. Facts
# from microsoft/unilm, beit/modeling_pretrain.py (names, sizes, eps 1e-6, the final norm, `lm_head` and `mask_token`),
# beit/modeling_finetune.py (`q_bias` and `v_bias` with a bias of zero for keys, `gamma_1` and `gamma_2`, the order of
# the table), beit/run_beit_pretraining.py (the dict is under `model`; images are normalized with mean and std 0.5 by
# default). The model refuses other sizes than its own; fine-tuning at another one changes the table before, which is
# not done here. In transformers it is `BeitForMaskedImageModeling`.
BEIT = Layout(
    method="BEiT",
    rules=(
        *(each for each in _timm() if not each.theirs.endswith("qkv.bias")),
        rule(f"{_BLOCK}.attn.q_bias", f"{_ATTENTION}.query.bias"),
        rule(f"{_BLOCK}.attn.v_bias", f"{_ATTENTION}.value.bias"),
        *_layer_scale("gamma_1", "gamma_2"),
        rule("rel_pos_bias.relative_position_bias_table", "relative_bias.table"),
        rule(f"{_BLOCK}.attn.relative_position_bias_table", f"{_BLOCK}.relative_bias.table"),
    ),
    signature=_PATCHES,
    ignored=(r"mask_token", r"lm_head\..*", r".*relative_position_index"),
    parts={"model": Subnetwork((("model",), ("module",), ()))},
)

# No class token, no biases in blocks, a norm of embedded patches, computed positions. Facts from apple/ml-aim,
# aim-v1/aim/v1/torch/models.py (sizes; a trunk without biases, whose norms have them; eps 1e-6; attention without a
# mask where none is given, so among all patches), layers.py (`SinCosPosEmbed`: sines and cosines of the column, then of
# the row, for the grid of each image) and README.md (the files). Images are normalized as ImageNet.
AIM = Layout(
    method="AIM",
    rules=(
        *with_bias("preprocessor.patchifier.proj", "patch_embedding"),
        *with_bias("preprocessor.patchifier.norm", "patch_norm"),
        *with_bias(f"trunk.{_BLOCK}.norm_1", f"{_BLOCK}.attention_norm"),
        rule(
            f"trunk.{_BLOCK}.attn.qkv.weight",
            f"{_ATTENTION}.query.weight",
            f"{_ATTENTION}.key.weight",
            f"{_ATTENTION}.value.weight",
        ),
        rule(f"trunk.{_BLOCK}.attn.proj.weight", f"{_ATTENTION}.output.weight"),
        *with_bias(f"trunk.{_BLOCK}.norm_2", f"{_BLOCK}.mlp_norm"),
        rule(f"trunk.{_BLOCK}.mlp.fc1.weight", f"{_BLOCK}.mlp.expand.weight"),
        rule(f"trunk.{_BLOCK}.mlp.fc2.weight", f"{_BLOCK}.mlp.contract.weight"),
        *with_bias("trunk.post_trunk_norm", "final_norm"),
    ),
    signature="preprocessor.patchifier.proj.weight",
    ignored=(r"head\..*",),
    parts={"": Subnetwork(((), ("state_dict",), ("model",)))},
)


def _dinov3(mlp: tuple[KeyRule, ...]) -> Layout:
    return Layout(
        method="DINOv3",
        rules=(
            *(each for each in _timm(mlp) if not each.theirs.endswith("qkv.bias")),
            rule(f"{_BLOCK}.attn.qkv.bias", f"{_ATTENTION}.query.bias", None, f"{_ATTENTION}.value.bias"),
            rule("storage_tokens", "registers"),
            *_layer_scale("ls1.gamma", "ls2.gamma"),
        ),
        signature=_PATCHES,
        ignored=(r"mask_token", r".*\.qkv\.bias_mask", r"local_cls_norm\..*", r"head\..*"),
        periods="rope_embed.periods",
        parts={"teacher": Subnetwork(((), ("teacher",)), ("", "backbone."))},
    )


# Rotary positions on patches, registers, layer scale, no bias of keys; SwiGLU in some sizes. Not in the paper. Facts
# from facebookresearch/dinov3, dinov3/hub/backbones.py (sizes; eps 1e-5; the bias of keys is masked, in ViT-7B queries
# and values have none either), dinov3/models/vision_transformer.py (names; a norm of its own for class tokens of local
# crops, which is not used here) and dinov3/layers (w1 is the gate, w2 up, w3 down; the hidden width is two thirds). The
# `periods` of rotary positions come from the file, since published ones are rounded to bfloat16, and so does the mask
# of biases. In transformers, which computes the periods, it is `DINOv3ViTModel`.
DINOV3 = _dinov3(_MLP)
DINOV3_GATED = _dinov3(
    (
        *with_bias(f"{_BLOCK}.mlp.w1", f"{_BLOCK}.mlp.gate"),
        *with_bias(f"{_BLOCK}.mlp.w2", f"{_BLOCK}.mlp.expand"),
        *with_bias(f"{_BLOCK}.mlp.w3", f"{_BLOCK}.mlp.contract"),
    )
)
