"""What every baseline keeps to: strict names, what is left out, the parts of a checkpoint, parity with transformers."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from capi.errors import CapiError
from capi.types import Features
from capi.zoo.baselines.load import load_baseline
from capi.zoo.baselines.registry import BASELINES, PAPER_BASELINES, Baseline, baseline_named, list_baselines
from capi.zoo.released import StateDict
from tests.zoo.baseline_checkpoints import (
    assert_same,
    images,
    original,
    random_model,
    read_back,
    save,
    small,
    through_the_original_layout,
    transformers_model,
)

ZERO = torch.zeros(2, 2)
_IMAGE = "modality_encoders.IMAGE"


def _behind(prefix: str, state: StateDict) -> StateDict:
    return {prefix + name: value for name, value in state.items()}


def _chunked(state: StateDict) -> StateDict:
    """Blocks as DINOv2's training names them: blocks.CHUNK.NUMBER, two to a chunk."""
    chunk = {name: int(name.split(".")[1]) // 2 for name in state if name.startswith("blocks.")}
    return {
        name.replace("blocks.", f"blocks.{chunk[name]}.", 1) if name in chunk else name: value
        for name, value in state.items()
    }


def _leading(state: StateDict) -> StateDict:
    """As in fairseq's config of the base size, whose first two blocks belong to the context encoder."""
    moved = {}
    for name, value in state.items():
        if not name.startswith("blocks."):
            moved[name] = value
            continue
        _, number, rest = name.split(".", 2)
        block = f"{_IMAGE}.context_encoder.blocks.{number}" if int(number) < 2 else f"blocks.{int(number) - 2}"
        moved[f"{block}.{rest}"] = value
    return moved


class Checkpoint(NamedTuple):
    """A file as the source's code writes it: around the state dict of the part that is taken, and of another part."""

    name: str
    wrap: Callable[[StateDict, StateDict], Any]
    other: str | None = None


CHECKPOINTS = [
    Checkpoint("dino_vitb16", lambda own, _: own),
    Checkpoint(
        "dino_vitb16",
        lambda own, other: {
            "teacher": _behind("backbone.", own) | {"head.mlp.0.weight": ZERO},
            "student": _behind("module.backbone.", other) | {"module.head.mlp.0.weight": ZERO},
            "args": Namespace(arch="vit_base"),
        },
        "student",
    ),
    Checkpoint(
        "mocov3_vitb16",
        lambda own, other: {
            "state_dict": _behind("module.base_encoder.", own | {"head.0.weight": ZERO})
            | _behind("module.momentum_encoder.", other | {"head.0.weight": ZERO})
            | {"module.predictor.0.weight": ZERO},
            "epoch": 300,
        },
        "momentum_encoder",
    ),
    # A file of linear probing.
    Checkpoint("mocov3_vitb16", lambda own, _: {"state_dict": _behind("module.", own | {"head.weight": ZERO})}),
    Checkpoint(
        "msn_vitl16",
        lambda own, other: {
            name: _behind("module.", state | {"fc.fc1.weight": ZERO, "pred.weight": ZERO})
            for name, state in (("encoder", other), ("target_encoder", own))
        },
        "encoder",
    ),
    Checkpoint(
        "ibot_vitl16",
        lambda own, _: {"state_dict": own | {"masked_embed": ZERO, "head.last_layer.weight": ZERO}},
    ),
    Checkpoint("dbot_refined_vitl16", lambda own, _: {"state_dict": own}),
    Checkpoint("data2vec2_refined_vitl16", lambda own, _: {"state_dict": own}),
    Checkpoint(
        "ijepa_vith14_in1k",
        lambda own, other: {
            "encoder": _behind("module.", other),
            "predictor": {"module.predictor_embed.weight": ZERO},
            "target_encoder": _behind("module.", own),
            "opt": {},
        },
        "encoder",
    ),
    Checkpoint(
        "mae_vitl16",
        lambda own, _: {
            "model": own | {"mask_token": ZERO, "decoder_blocks.0.attn.qkv.weight": ZERO},
            "args": Namespace(mask_ratio=0.75),
        },
    ),
    Checkpoint(
        "data2vec2_vitl16",
        lambda own, other: {"model": {**own, f"{_IMAGE}.decoder.proj.weight": ZERO, "_ema": other}, "cfg": {}},
        "_ema",
    ),
    Checkpoint("data2vec2_vitb16", lambda own, _: {"model": _leading(own)}),
    Checkpoint(
        "dinov2_reg_vitl14",
        lambda own, _: {
            "teacher": _behind("backbone.", _chunked(own) | {"mask_token": ZERO}) | {"dino_head.mlp.0.weight": ZERO}
        },
    ),
    Checkpoint("dinov2_reg_vitg14", lambda own, _: own),
    Checkpoint(
        "beit_vitl16",
        lambda own, _: {
            "model": own
            | {"mask_token": ZERO, "lm_head.weight": ZERO, "rel_pos_bias.relative_position_index": ZERO.long()}
        },
    ),
    Checkpoint("aim_600m", lambda own, _: own | {"head.linear.weight": ZERO}),
    Checkpoint("dinov3_vitl16", lambda own, _: own | {"mask_token": ZERO, "local_cls_norm.weight": ZERO}),
    Checkpoint("dinov3_vith16plus", lambda own, _: own),
]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda each: each.name)
def test__the_encoder_of_a_checkpoint_is_read_and_the_rest_left_out(checkpoint: Checkpoint, tmp_path: Path) -> None:
    baseline, x = small(checkpoint.name), images()
    own, other = random_model(baseline), random_model(baseline)
    path = save(checkpoint.wrap(original(baseline, own), original(baseline, other)), tmp_path / "checkpoint.pth")
    assert_same(load_baseline(baseline, path)(x), own(x))
    if checkpoint.other is not None:
        assert_same(load_baseline(baseline, path, checkpoint.other)(x), other(x))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda each: each.name)
def test__a_name_that_is_missing_or_not_known_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    baseline = small(checkpoint.name)
    state = original(baseline, random_model(baseline))
    lost = next(name for name in state if "norm" in name and "blocks." in name)
    for changed, message in (
        (state | {"stranger.weight": ZERO}, 'has "stranger.weight", which the layout of'),
        ({name: value for name, value in state.items() if name != lost}, f'lacks "{lost}" of the layout of'),
    ):
        place = baseline.layout.part(None).places[0]
        path = save({place[0]: changed} if place else changed, tmp_path / "changed.pth")
        with pytest.raises(CapiError, match=message):
            load_baseline(baseline, path)


def test__every_layout_has_a_checkpoint_here() -> None:
    tried = {BASELINES[each.name].layout.method for each in CHECKPOINTS}
    assert {each.layout.method for each in BASELINES.values() if each.layout.rules} == tried


class Theirs(NamedTuple):
    """A model of transformers: how it is built, on which grids it is compared, and its tokens."""

    name: str
    model: str
    config: str
    options: Mapping[str, Any] = MappingProxyType({})
    changes: Mapping[str, Any] = MappingProxyType({})
    grids: Iterable[tuple[int, int]] = ((5, 5),)
    tokens: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x).last_hidden_state
    both: bool = True
    """Whether the source's own layout is tried with the same weights."""


def _interpolated(model: Any, x: Tensor) -> Tensor:
    return model(x, interpolate_pos_encoding=True).last_hidden_state


def _unmasked(model: Any, x: Tensor) -> Tensor:
    """Of MAE: nothing is masked, but patches are shuffled unless the noise is in order."""
    noise = torch.arange(x.shape[2] * x.shape[3] // 16).float().expand(len(x), -1)
    return model.vit(x, noise=noise, interpolate_pos_encoding=True).last_hidden_state


def _normed(model: Any, x: Tensor) -> Tensor:
    return model.layernorm(model.beit(x).last_hidden_state)


_SAME_EPS = {"layer_norm_eps": 1e-6}
_DECODER = {f"decoder_{each}": 4 for each in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
_SHAPES = ((5, 5), (8, 8), (3, 7))
_BEIT = ("beit_vitl16", "BeitForMaskedImageModeling", "BeitConfig")
_BEIT_OPTIONS = _SAME_EPS | {"use_mask_token": True, "vocab_size": 7}
_DINOV2 = ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig")
_DINOV3 = ("DINOv3ViTModel", "DINOv3ViTConfig")
_REGISTERS = {"num_register_tokens": 4}
PARITY = [
    Theirs("dino_vitb16", "ViTModel", "ViTConfig", _SAME_EPS),
    # Their code leaves out the 0.1 that DINO's authors add.
    Theirs("dino_vitb16", "ViTModel", "ViTConfig", _SAME_EPS, {"resampling": "bicubic"}, _SHAPES, _interpolated, False),
    Theirs("msn_vitl16", "ViTMSNModel", "ViTMSNConfig", {}, {}, _SHAPES, _interpolated),
    Theirs(
        "mae_vitl16",
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        _SAME_EPS | _DECODER | {"mask_ratio": 0.0},
        {},
        _SHAPES,
        _unmasked,
    ),
    Theirs("ijepa_vith14_in1k", "IJepaModel", "IJepaConfig", _SAME_EPS, {}, _SHAPES, _interpolated),
    Theirs(*_BEIT, _BEIT_OPTIONS | {"use_shared_relative_position_bias": True}, tokens=_normed),
    Theirs(*_BEIT, _BEIT_OPTIONS | {"use_relative_position_bias": True}, tokens=_normed),
    Theirs(
        "data2vec1_vitl16",
        "Data2VecVisionModel",
        "Data2VecVisionConfig",
        {"use_shared_relative_position_bias": True},
        both=False,
    ),
    Theirs("dinov2_reg_vitl14", *_DINOV2, _REGISTERS | {"mlp_ratio": 2}, {"mlp_width": 48}, ((5, 5), (3, 3), (8, 6))),
    Theirs(
        "dinov2_reg_vitg14",
        *_DINOV2,
        _REGISTERS | {"mlp_ratio": 3, "use_swiglu_ffn": True},
        {"mlp_width": 48},
        ((5, 5), (3, 3), (8, 6)),
    ),
    Theirs("dinov2_vitl14", "Dinov2Model", "Dinov2Config", {"mlp_ratio": 2}, {"mlp_width": 48}),
    Theirs("dinov3_vitl16", *_DINOV3, _REGISTERS, grids=((5, 5), (8, 6))),
    Theirs("dinov3_vith16plus", *_DINOV3, _REGISTERS | {"use_gated_mlp": True}, grids=((5, 5), (8, 6))),
]


def _use_silu(model: Any) -> None:
    """As the published files of gated models have it, and the library's default has not."""
    model.config.hidden_act = "silu"
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = torch.nn.SiLU()


def _features(baseline: Baseline, tokens: Tensor, grid: tuple[int, int]) -> Features:
    """Tokens are [class token, registers, patches in rows]; without a class token patches are averaged."""
    first = int(baseline.architecture.class_token)
    patches = first + baseline.architecture.registers
    pooled = tokens[:, 0] if first else tokens.mean(1)
    return Features(pooled, tokens[:, first:patches], tokens[:, patches:].unflatten(1, grid))


@pytest.mark.parametrize("case", PARITY, ids=lambda each: each.name)
def test__features_are_those_of_transformers_in_both_layouts(case: Theirs, tmp_path: Path) -> None:
    theirs = transformers_model(case.model, case.config, **case.options)
    if "use_gated_mlp" in case.options:
        _use_silu(theirs)
    baseline = small(case.name, **case.changes)
    encoder = read_back(baseline, theirs, tmp_path / "folder")
    encoders = [encoder]
    if case.both:
        place = baseline.layout.part(None).places[0]
        wrap = (lambda state: {place[0]: state}) if place else None
        encoders.append(through_the_original_layout(baseline, encoder, tmp_path / "original.pth", wrap))
    for grid in case.grids:
        x = images(*grid)
        expected = _features(baseline, case.tokens(theirs, x), grid)
        for each in encoders:
            assert_same(each(x), expected)


def test__what_transformers_has_is_compared_with_it_and_nothing_else_says_so() -> None:
    compared = {BASELINES[each.name].model_type for each in PARITY}
    for baseline in BASELINES.values():
        assert (baseline.model_type in compared) == ("implementation in transformers" in baseline.verified)
        assert (baseline.model_type is None) == ("layout from documentation" in baseline.verified)


SIZES = {
    "dino_vitb16": {"width": 768, "heads": 12, "parameters": 85_798_656},
    "dino_vits16": {"width": 384, "heads": 6, "parameters": 21_665_664},
    "mocov3_vits16": {"heads": 12, "resampling": "rows"},
    "mocov3_vitb16": {"heads": 12},
    "msn_vitl16": {"grid": 14},
    "msn_vitb4": {"grid": 56},
    "msn_vitl7": {"grid": 32},
    "ibot_vitl16_in22k": {"depth": 24, "resampling": "offset"},
    "data2vec2_refined_vith14": {"post_norm": True, "final_norm": False},
    "mae_refined_vit2b14": {"width": 2560, "post_norm": False, "final_norm": True},
    "crossmae_refined_vitl16": {"width": 1024},
    "ijepa_vith14_in1k": {"grid": 16, "patch_size": 14},
    "ijepa_vith16_448": {"grid": 28, "patch_size": 16},
    "ijepa_vitg16_in22k": {"width": 1408, "depth": 40, "heads": 16, "mlp_width": 6144},
    "mae_vitl16": {"depth": 24, "heads": 16, "parameters": 303_301_632},
    "mae_vith14": {"depth": 32, "heads": 16, "parameters": 630_764_800},
    "dinov2_reg_vitl14": {"native_size": 518, "parameters": 304_372_736 - 1024},
    "dinov2_reg_vitg14": {"width": 1536, "depth": 40, "heads": 24, "mlp_width": 4096, "registers": 4},
    "dinov2_vitg14": {"registers": 0, "resampling": "offset"},
    "aim_600m": {"width": 1536, "heads": 12, "blocks_used": 19},
    "aim_3b": {"width": 3072, "heads": 24, "blocks_used": 19},
    "aim_7b": {"width": 4096, "depth": 32, "heads": 32},
    "dinov3_vits16plus": {"mlp_width": 1536, "eps": 1e-5},
    "dinov3_vit7b16": {"depth": 40, "mlp_width": 8192, "eps": 1e-5, "query_bias": False},
}


@pytest.mark.parametrize("name", SIZES)
def test__the_sizes_are_those_of_the_authors(name: str) -> None:
    baseline = BASELINES[name]
    for key, value in SIZES[name].items():
        assert getattr(baseline if key == "parameters" else baseline.architecture, key) == value, key


def test__shapes_are_those_of_the_model() -> None:
    shapes = BASELINES["dino_vitb16"].shapes()
    assert shapes["positions"] == (1, 197, 768)
    assert shapes["blocks.11.mlp.expand.weight"] == (3072, 768)


def test__each_has_a_license_a_source_and_a_file_and_beit_images_as_in_its_training() -> None:
    for baseline in BASELINES.values():
        assert baseline.licence
        assert "/" in baseline.source
        assert baseline.file
        halves = baseline.statistics.mean == (0.5, 0.5, 0.5) == baseline.statistics.std
        assert halves == baseline.name.startswith(("beit", "data2vec1"))


def test__msn_is_non_commercial_and_refined_models_are_mit() -> None:
    named = {(each.source, each.licence) for each in BASELINES.values()}
    assert {licence for source, licence in named if source == "facebookresearch/msn"} == {
        "CC-BY-NC-4.0 (non-commercial)"
    }
    assert {licence for source, licence in named if source == "ml-jku/MIM-Refiner"} == {"MIT"}


def test__the_papers_encoders_are_listed_first_and_each_once() -> None:
    names = [each.name for each in list_baselines()]
    assert tuple(names[: len(PAPER_BASELINES)]) == PAPER_BASELINES
    assert sorted(names) == sorted(BASELINES)


def test__a_misspelt_name_finds_its_neighbor() -> None:
    assert baseline_named("mae_vitl16").title == "MAE"
    with pytest.raises(CapiError, match='no baseline "mae_vit_l16"; did you mean "mae_vitl16"'):
        baseline_named("mae_vit_l16")


def test__the_documentation_lists_every_baseline_with_its_license_and_how_it_was_verified() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "baselines.md").read_text(encoding="utf-8")
    lines = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for name, baseline in BASELINES.items():
        assert baseline.licence in lines[name]
        assert f"| {'transformers' if baseline.model_type else 'documentation'} |" in lines[name]
        assert f"| {baseline.parameters / 1e6:.0f} |" in lines[name]
