"""Finding the released layout in what a file holds, and telling other methods."""

import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch

from capi.errors import CapiError
from capi.zoo.released import find_released

STATE = {
    "backbone.patch_embed.weight": torch.zeros(4, 3, 2, 2),
    "backbone.encoder.blocks.0.residual1.norm.weight": torch.ones(4),
    "head.last_layer.weight_g": torch.ones(5, 1),
}


def in_front(prefix: str, state: dict[str, Any] = STATE) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in state.items()}


@pytest.mark.parametrize(
    ("contents", "place"),
    [
        (STATE, None),
        (in_front("module."), None),
        (in_front("_orig_mod.module."), None),
        ({"student": STATE, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}, "epoch": 3}, "student"),
        ({"model": {"state_dict": in_front("module.")}}, "model.state_dict"),
        ({"teacher": in_front("module._orig_mod."), "args": object()}, "teacher"),
        (in_front("student.") | {"step": torch.tensor(3)}, "student"),
        (in_front("module.student."), "student"),
        (OrderedDict(model=OrderedDict(STATE)), "model"),
        ({"my own name": STATE}, "my own name"),
    ],
)
def test__the_released_layout_is_found_and_named(
    contents: Any, place: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "capi"):
        layout = find_released(contents, "file.pth")
    assert list(layout) == list(STATE)
    assert all(layout[name].data_ptr() == value.data_ptr() for name, value in STATE.items())
    assert caplog.messages == ([] if place is None else [caplog.messages[0]])
    assert place is None or f'the weights under "{place}" are taken' in caplog.text


@pytest.mark.parametrize(
    ("contents", "names"),
    [
        ({"student": STATE, "teacher": in_front("module.", dict(STATE))}, '"student" and "teacher"'),
        (in_front("student.") | in_front("teacher."), '"student" and "teacher"'),
        ({"model": {"ema": dict(STATE), "now": STATE}}, '"model.ema" and "model.now"'),
    ],
)
def test__several_are_named_and_none_is_taken(contents: Any, names: str) -> None:
    with pytest.raises(CapiError, match=f"holds several models, under {names}: save the state dict of the one"):
        find_released(contents, "file.pth")


def test__the_same_dict_under_two_names_is_one() -> None:
    assert list(find_released({"model": STATE, "state_dict": STATE}, "file.pth")) == list(STATE)


def test__a_dict_that_holds_itself_ends() -> None:
    endless: dict[str, Any] = {"a": {}, "weight": torch.zeros(2)}
    endless["a"]["b"] = endless
    with pytest.raises(CapiError, match="lacks the names"):
        find_released(endless, "file.pth")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"epoch": 3}, 'holds "epoch" beside its weights, which is no plain tensor: expected a flat dict of tensors'),
        ({3: torch.zeros(2)}, 'holds "3" beside its weights'),
        ({"sparse": torch.zeros(2, 2).to_sparse()}, 'holds "sparse" beside its weights'),
        ({"args": object()}, 'holds "args" beside'),
        ({"module.head.last_layer.weight_g": torch.ones(5, 1)}, "twice"),
    ],
)
def test__what_lies_among_the_weights_is_reported(extra: dict[Any, Any], message: str) -> None:
    with pytest.raises(CapiError, match=message):
        find_released({**STATE, **extra}, "file.pth")


VIT = ["cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "norm.weight"]
OTHERS = {
    "MAE": [*VIT, "mask_token", "decoder_pos_embed", "decoder_blocks.0.attn.qkv.weight"],
    "DINOv2": [*VIT, "register_tokens", "mask_token", "blocks.0.ls1.gamma"],
    "DINOv3": ["cls_token", "storage_tokens", "rope_embed.periods", "blocks.0.ls1.gamma"],
    "DINO": [*VIT, "head.mlp.0.weight", "head.last_layer.weight_g"],
    "iBOT": [*VIT, "masked_embed"],
    "BEiT": [*VIT, "blocks.0.gamma_1"],
    "CLIP": ["visual.class_embedding", "visual.transformer.resblocks.0.ln_1.weight", "logit_scale"],
    "of the transformers library": ["vit.embeddings.patch_embeddings.projection.weight"],
    "a plain vision transformer": [*VIT, "head.weight"],
    "a ResNet": ["conv1.weight", "layer1.0.conv1.weight"],
    "this package in its own layout": ["encoder.patch_embedding.weight", "predictor.mask_token"],
}


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize("wrapping", ["", "module.", "backbone.", "teacher"])
def test__another_method_is_named(method: str, wrapping: str) -> None:
    state: Any = {name: torch.zeros(1) for name in OTHERS[method]}
    contents = {"teacher": in_front("module.backbone.", state)} if wrapping == "teacher" else in_front(wrapping, state)
    with pytest.raises(CapiError, match=f"^file.pth looks like a checkpoint of .*{method}.* \\(it has") as caught:
        find_released(contents, "file.pth")
    assert "\n" not in str(caught.value)


def test__i_jepa_is_recognized_by_its_predictor() -> None:
    encoder = {name: torch.zeros(1) for name in VIT}
    predictor = {"module.predictor_blocks.0.attn.qkv.weight": torch.zeros(1)}
    with pytest.raises(CapiError, match="looks like a checkpoint of I-JEPA"):
        find_released({"target_encoder": in_front("module.", encoder), "predictor": predictor}, "file.pth")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"weight": torch.zeros(2)}, 'lacks the names of the released layout of CAPI.* it has "weight"'),
        ({"epoch": 3, "model": {}}, 'holds no flat dict of tensors, but a dict with "epoch", "model"'),
        ({}, "nothing in it"),
        ([torch.zeros(2)], "holds no flat dict of tensors, but a list"),
        (torch.zeros(2), "but a Tensor"),
        ({3: torch.zeros(2)}, 'a dict with "3"'),
    ],
)
def test__anything_else_is_described(contents: Any, message: str) -> None:
    with pytest.raises(CapiError, match=message):
        find_released(contents, "file.pth")
