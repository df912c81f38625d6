"""Baselines as the transformers library writes them: a folder with config.json and model.safetensors.

config.json says what the model is; its sizes must be those of the baseline. Its eps is taken as it stands, also where
it differs from that of the original code (1e-12 and 1e-6 for DINO, say), since it belongs to the file. The files of the
Hub and those that transformers 5 writes have the same names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from capi.errors import CapiError
from capi.models.plain_vit import PlainArchitecture
from capi.runtime.documents import read_object
from capi.zoo.baselines.keys import KeyRule, Layout, Subnetwork, rule, with_bias
from capi.zoo.baselines.registry import Baseline
from capi.zoo.files import read_contents
from capi.zoo.huggingface.files import CONFIG, WEIGHTS

INDEX, PICKLE = "model.safetensors.index.json", "pytorch_model.bin"
_LAYER, _BLOCK = "encoder.layer.{n}", "blocks.{n}"
_BIAS_TABLE = "relative_position_bias.relative_position_bias_table"
# What stands in front of names in files of models with heads.
_PREFIXES = (
    "",
    *(f"{name}." for name in ("vit", "beit", "ijepa", "dinov2_with_registers", "dinov2", "data2vec_vision", "model")),
)
_IGNORED = (
    r"(.*\.)?(pooler|classifier|decoder|lm_head|fpn\d|decode_head|auxiliary_head)\..*",
    r"(.*\.)?mask_token",
    r".*relative_position_index",
)


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says; an empty dict where there is none that can be read."""
    try:
        return read_object(folder / CONFIG)
    except CapiError:
        return {}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, in one file or in several that an index lists."""
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        return _read_shards(folder)
    for name in (WEIGHTS, PICKLE):
        if (folder / name).is_file():
            contents: dict[str, Tensor] = read_contents(folder / name)
            return contents
    raise CapiError(f"{folder} holds neither {WEIGHTS} nor {PICKLE}: download the whole folder")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    try:
        names = set(map(str, read_object(folder / INDEX)["weight_map"].values()))
    except (CapiError, KeyError, AttributeError) as error:
        raise CapiError(f"{folder / INDEX} cannot be read as an index of weights: download it again") from error
    state: dict[str, Tensor] = {}
    for name in sorted(names):
        if Path(name).name != name:
            raise CapiError(f"{folder / INDEX} names a file outside its folder ({name!r}): it is not read")
        state |= read_contents(folder / name)
    return state


def layout_for(architecture: PlainArchitecture, model_type: str) -> Layout:
    """The names of transformers for a model of these options."""
    rules = _dinov3_rules(architecture) if model_type == "dinov3_vit" else _vit_rules(architecture)
    signature = "embeddings.patch_embeddings.weight" if model_type == "dinov3_vit" else _PATCHES
    return Layout(
        method=f'transformers\' "{model_type}"',
        rules=rules,
        signature=signature,
        ignored=_IGNORED,
        parts={"": Subnetwork(((),), _PREFIXES)},
    )


_PATCHES = "embeddings.patch_embeddings.projection.weight"


def _vit_rules(of: PlainArchitecture) -> tuple[KeyRule, ...]:
    attention = f"{_LAYER}.attention.attention"
    norms = (("norm1", "norm2"), ("layernorm_before", "layernorm_after"))[not _is_dinov2(of)]
    scales = (("layer_scale1.lambda1", "layer_scale2.lambda1"), ("lambda_1", "lambda_2"))[not _is_dinov2(of)]
    projections = (with_bias(f"{attention}.{each}", f"{_BLOCK}.attention.{each}") for each in ("query", "key", "value"))
    return (
        rule("embeddings.cls_token", "class_token"),
        rule("embeddings.register_tokens", "registers"),
        rule("embeddings.position_embeddings", "positions"),
        *with_bias("embeddings.patch_embeddings.projection", "patch_embedding"),
        *(each for pair in projections for each in pair),
        *with_bias(f"{_LAYER}.attention.output.dense", f"{_BLOCK}.attention.output"),
        *with_bias(f"{_LAYER}.{norms[0]}", f"{_BLOCK}.attention_norm"),
        *with_bias(f"{_LAYER}.{norms[1]}", f"{_BLOCK}.mlp_norm"),
        rule(f"{_LAYER}.{scales[0]}", f"{_BLOCK}.attention_scale"),
        rule(f"{_LAYER}.{scales[1]}", f"{_BLOCK}.mlp_scale"),
        *_mlp_rules(of),
        rule(f"encoder.{_BIAS_TABLE}", "relative_bias.table"),
        rule(f"{attention}.{_BIAS_TABLE}", f"{_BLOCK}.relative_bias.table"),
        *with_bias("layernorm", "final_norm"),
    )


def _is_dinov2(of: PlainArchitecture) -> bool:
    """The others with layer scale are BEiT and data2vec 1, which have no positions of their own."""
    return of.layer_scale and of.positions == "table"


def _mlp_rules(of: PlainArchitecture) -> tuple[KeyRule, ...]:
    if of.gated_mlp:
        gate = with_bias(f"{_LAYER}.mlp.weights_in", f"{_BLOCK}.mlp.gate", f"{_BLOCK}.mlp.expand")
        return (*gate, *with_bias(f"{_LAYER}.mlp.weights_out", f"{_BLOCK}.mlp.contract"))
    expand, contract = ("mlp.fc1", "mlp.fc2") if _is_dinov2(of) else ("intermediate.dense", "output.dense")
    return (
        *with_bias(f"{_LAYER}.{expand}", f"{_BLOCK}.mlp.expand"),
        *with_bias(f"{_LAYER}.{contract}", f"{_BLOCK}.mlp.contract"),
    )


def _dinov3_rules(of: PlainArchitecture) -> tuple[KeyRule, ...]:
    maps = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
    pairs = [
        with_bias(f"layer.{{n}}.attention.{theirs}", f"{_BLOCK}.attention.{ours}") for theirs, ours in maps.items()
    ]
    pairs += [with_bias("layer.{n}.mlp.gate_proj", f"{_BLOCK}.mlp.gate")] if of.gated_mlp else []
    return (
        rule("embeddings.cls_token", "class_token"),
        rule("embeddings.register_tokens", "registers"),
        *with_bias("embeddings.patch_embeddings", "patch_embedding"),
        *(each for pair in pairs for each in pair),
        *with_bias("layer.{n}.norm1", f"{_BLOCK}.attention_norm"),
        *with_bias("layer.{n}.norm2", f"{_BLOCK}.mlp_norm"),
        rule("layer.{n}.layer_scale1.lambda1", f"{_BLOCK}.attention_scale"),
        rule("layer.{n}.layer_scale2.lambda1", f"{_BLOCK}.mlp_scale"),
        *with_bias("layer.{n}.mlp.up_proj", f"{_BLOCK}.mlp.expand"),
        *with_bias("layer.{n}.mlp.down_proj", f"{_BLOCK}.mlp.contract"),
        *with_bias("norm", "final_norm"),
    )


# What the library's own class is called, by the type; BEiT's norm at the end is that of its pretraining model.
_CLASSES = {
    "vit": "ViTModel",
    "vit_msn": "ViTMSNModel",
    "vit_mae": "ViTMAEModel",
    "ijepa": "IJepaModel",
    "beit": "BeitForMaskedImageModeling",
    "data2vec-vision": "Data2VecVisionModel",
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "dinov3_vit": "DINOv3ViTModel",
}


def config_of(of: PlainArchitecture, model_type: str) -> dict[str, Any]:
    """What config.json says of a model: the opposite of `architecture_in`."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [_CLASSES[model_type]],
        "hidden_size": of.width,
        "num_hidden_layers": of.depth,
        "num_attention_heads": of.heads,
        "patch_size": of.patch_size,
        "num_channels": of.channels,
        "image_size": of.native_size,
        "layer_norm_eps": of.eps,
        "hidden_act": "gelu",
        "intermediate_size": of.mlp_width,
    }
    if of.registers:
        config["num_register_tokens"] = of.registers
    if of.relative_bias != "none":
        kinds = {"use_relative_position_bias": "block", "use_shared_relative_position_bias": "shared"}
        config |= {name: of.relative_bias == kind for name, kind in kinds.items()}
    if model_type == "beit":
        config["use_mask_token"] = True
    if model_type in ("dinov2", "dinov2_with_registers"):
        ratio = of.mlp_width / of.width * (1.5 if of.gated_mlp else 1)
        config |= {"mlp_ratio": int(ratio) if ratio == int(ratio) else ratio, "use_swiglu_ffn": of.gated_mlp}
        del config["intermediate_size"]
    if model_type == "dinov3_vit":
        biases = {f"{name}_bias": getattr(of, f"{name}_bias") for name in ("query", "key", "value", "mlp")}
        config |= biases | {"use_gated_mlp": of.gated_mlp, "hidden_act": "silu" if of.gated_mlp else "gelu"}
    return config


def written_name(name: str, model_type: str) -> str:
    """The name of a tensor as the library writes it."""
    return f"beit.{name}" if model_type == "beit" and not name.startswith("layernorm") else name


def architecture_in(config: Mapping[str, Any], baseline: Baseline, source: str) -> PlainArchitecture:
    """The baseline's architecture with what config.json adds to it; a model of another kind or size raises."""
    kind = config.get("model_type")
    if kind != baseline.model_type:
        expected = f'"{baseline.model_type}"' if baseline.model_type else "no type that transformers has"
        raise CapiError(f'{source} is a model of type "{kind}", but {baseline.name} is of {expected}')
    sizes = _sizes(config, baseline.architecture, source)
    own = {name: getattr(baseline.architecture, name) for name in sizes}
    other = [name for name in sizes if sizes[name] != own[name] and name not in ("eps", "relative_bias")]
    if other:
        name = other[0]
        raise CapiError(
            f"{source} has {name.replace('_', ' ')} {sizes[name]}, but {baseline.name} has {own[name]}: it is "
            "another size of the model"
        )
    return baseline.architecture.changed(**sizes)


def _sizes(config: Mapping[str, Any], of: PlainArchitecture, source: str) -> dict[str, Any]:
    """The options that config.json speaks of."""
    try:
        width, patch_size = int(config["hidden_size"]), int(config["patch_size"])
        sizes: dict[str, Any] = {
            "width": width,
            "depth": int(config["num_hidden_layers"]),
            "heads": int(config["num_attention_heads"]),
            "patch_size": patch_size,
            "mlp_width": _mlp_width(config, width),
            "eps": float(config["layer_norm_eps"]),
        }
        if of.positions == "table" or of.relative_bias != "none":
            sizes["grid"] = int(config["image_size"]) // patch_size
        if of.relative_bias != "none":
            sizes["relative_bias"] = "block" if config.get("use_relative_position_bias") else "shared"
        if of.registers:
            sizes["registers"] = int(config["num_register_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise CapiError(
            f"{source} has no usable {CONFIG} ({type(error).__name__}: {error}): download it again"
        ) from error
    return sizes


def _mlp_width(config: Mapping[str, Any], width: int) -> int:
    """DINOv2 gives a ratio; its SwiGLU has two thirds of that, rounded up to a multiple of 8."""
    if config.get("model_type") not in ("dinov2", "dinov2_with_registers"):
        return int(config["intermediate_size"])
    hidden = int(width * config["mlp_ratio"])
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if config.get("use_swiglu_ffn") else hidden
