"""Loading and writing the released layout."""

import math
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from capi.errors import CapiError
from capi.models.encoder import Encoder
from capi.models.features import CapiEncoder
from capi.models.heads import LinearHead
from capi.models.predictor import CrossPredictor
from capi.types import Statistics
from capi.zoo.released import from_released, load_released, read_state, to_released


def random_model(rope="released", *, registers: int = 8, predictor_width: int = 48, head: bool = True) -> CapiEncoder:
    encoder = Encoder(
        width=32, depth=3, heads=2, patch_size=7, registers=registers, channels=2, mlp_width=80, positions=rope
    )
    predictor = CrossPredictor(width=predictor_width, depth=2, heads=6, context_width=32, mlp_width=96, positions=rope)
    model = CapiEncoder(
        encoder=encoder, predictor=predictor, head=LinearHead(width=predictor_width, outputs=11) if head else None
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def released_attention(
    state: dict[str, Tensor], prefix: str, x: Tensor, context: Tensor, at: Tensor, context_at: Tensor
):
    """An independent attention in the released layout: angles are coordinates times the table of the file."""
    table = state[f"{prefix}.rope.freqs"]
    width = table.shape[1]

    def rope(value: Tensor, positions: Tensor) -> Tensor:
        angle = (positions @ table)[:, :, None]
        first, second = value.chunk(2, dim=-1)
        return value * angle.cos() + torch.cat([-second, first], -1) * angle.sin()

    query = rope(F.linear(x, state[f"{prefix}.q_proj.weight"]).unflatten(-1, (-1, width)), at)
    key = rope(F.linear(context, state[f"{prefix}.k_proj.weight"]).unflatten(-1, (-1, width)), context_at)
    value = F.linear(context, state[f"{prefix}.v_proj.weight"]).unflatten(-1, (-1, width))
    weights = torch.softmax(torch.einsum("bqhw,bkhw->bhqk", query, key) / math.sqrt(width), -1)
    mixed = torch.einsum("bhqk,bkhw->bqhw", weights, value).flatten(2)
    return F.linear(mixed, state[f"{prefix}.proj.weight"])


def released_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return normed if weight is None else normed * weight


def released_feature_map(state: dict[str, Tensor], images: Tensor) -> Tensor:
    """The evaluation forward, written from the description of the layout alone."""
    weight, registers = state["backbone.patch_embed.weight"], state["backbone.registers"]
    patches = F.conv2d(images, weight, state["backbone.patch_embed.bias"], stride=weight.shape[-1])
    rows, columns = patches.shape[-2:]
    grid = torch.stack(
        torch.meshgrid(torch.linspace(0, 1, rows), torch.linspace(0, 1, columns), indexing="ij"), -1
    ).view(1, -1, 2)
    side = torch.arange(registers.shape[1] // 4) / max(registers.shape[1] // 4, 1)
    zero, ones = torch.zeros_like(side), torch.ones_like(side)
    border = torch.cat(
        [torch.stack(pair, -1) for pair in ((side, zero), (ones, side), (1 - side, ones), (zero, 1 - side))]
    )[None]
    at = torch.cat([border, grid], 1)
    x = torch.cat([registers.expand(len(images), -1, -1), patches.flatten(2).transpose(1, 2)], 1)
    depth = len([key for key in state if key.startswith("backbone.encoder") and key.endswith("q_proj.weight")])
    for number in range(depth):
        block = f"backbone.encoder.blocks.{number}"
        normed = released_norm(x, state[f"{block}.residual1.norm.weight"])
        x = x + released_attention(state, f"{block}.residual1.fn", normed, normed, at, at)
        normed = released_norm(x, state[f"{block}.residual2.norm.weight"])
        hidden = F.gelu(F.linear(normed, state[f"{block}.residual2.fn.fc1.weight"]))
        x = x + F.linear(hidden, state[f"{block}.residual2.fn.fc2.weight"])
    return released_norm(x)[:, registers.shape[1] :].unflatten(1, (rows, columns))


@pytest.mark.parametrize("rope", ["released", "axial"])
@pytest.mark.parametrize("registers", [0, 4, 16])
def test__what_is_written_computes_the_same_under_the_released_formula(rope, registers: int) -> None:
    model, images = random_model(rope, registers=registers), torch.randn(2, 2, 21, 35)
    expected = released_feature_map(to_released(model), images)
    torch.testing.assert_close(model(images, pooled=False).feature_map, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("rope", ["released", "axial"])
@pytest.mark.parametrize("registers", [0, 3, 8])
def test__writing_and_loading_give_the_same_weights_and_features(rope, registers: int) -> None:
    model, images = random_model(rope, registers=registers), torch.randn(2, 2, 14, 21)
    loaded = from_released(to_released(model))
    assert loaded.encoder.positions.kind == loaded.predictor.positions.kind == rope
    for (name, ours), (other, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(model(images), loaded(images), strict=True):
        assert torch.equal(ours, theirs)


def test__reference_checkpoint_survives_a_round_trip(reference_checkpoint: Path) -> None:
    state = read_state(reference_checkpoint)
    written = to_released(from_released(state))
    assert written.keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(written[key], value, rtol=1e-6, atol=0)


def test__loaded_models_are_frozen_and_in_evaluation_mode(reference_checkpoint: Path) -> None:
    model = load_released(reference_checkpoint)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test__safetensors_and_files_without_a_head_load_too(tmp_path: Path) -> None:
    model = random_model(head=False)
    save_file(to_released(model), tmp_path / "model.safetensors")
    # The contents tell what a file is, not its name.
    save_file(to_released(model), tmp_path / "misnamed.pth")
    assert load_released(tmp_path / "misnamed.pth").head is None
    loaded = load_released(tmp_path / "model.safetensors")
    assert loaded.head is None
    images = torch.randn(1, 2, 14, 14)
    assert torch.equal(loaded(images).pooled, model(images).pooled)


KEYS = sorted(to_released(random_model()))


@pytest.mark.parametrize("key", KEYS)
def test__a_missing_key_is_named(key: str) -> None:
    state = to_released(random_model())
    del state[key]
    with pytest.raises(CapiError) as caught:
        from_released(state)
    assert key in str(caught.value)


# One tensor alone says how many registers and channels there are.
FREE = {("backbone.registers", 1), ("backbone.patch_embed.weight", 1)}


@pytest.mark.parametrize("key", KEYS)
def test__a_misshapen_key_is_named_and_no_other_is_blamed(key: str) -> None:
    state = to_released(random_model())
    value = state[key]
    for axis in range(value.ndim):
        for size in (0, value.shape[axis] - 1, value.shape[axis] + 1, 2 * value.shape[axis]):
            if (key, axis) in FREE:
                continue
            shape = list(value.shape)
            shape[axis] = size
            with pytest.raises(CapiError) as caught:
                from_released(state | {key: torch.randn(shape)})
            assert f'"{key}"' in str(caught.value), shape


def test__a_key_without_values_is_named() -> None:
    key = "backbone.patch_embed.bias"
    with pytest.raises(CapiError, match=f'no real numbers in "{key}"'):
        from_released(to_released(random_model()) | {key: torch.zeros(32, device="meta")})


@pytest.mark.parametrize(
    "key", ["backbone.cls_token", "epoch", "head.mlp.weight", "backbone.encoder.blocks.0.residual1.fn.q_proj.bias"]
)
def test__an_extra_key_is_named(key: str) -> None:
    with pytest.raises(CapiError, match=key):
        from_released(to_released(random_model()) | {key: torch.zeros(32)})


def test__a_gap_in_the_blocks_is_named() -> None:
    state = {key: value for key, value in to_released(random_model()).items() if "encoder.blocks.1." not in key}
    with pytest.raises(CapiError, match=r"nothing of \"backbone\.encoder\.blocks\.1\."):
        from_released(state)


@pytest.mark.parametrize("number", ["3000", "03", "02"])
def test__a_stray_block_is_named(number: str) -> None:
    key = f"backbone.encoder.blocks.{number}.residual1.norm.weight"
    with pytest.raises(CapiError, match=key):
        from_released(to_released(random_model()) | {key: torch.ones(32)})


def test__tensors_that_hold_no_real_numbers_are_named() -> None:
    state = to_released(random_model())
    for dtype in (torch.complex64, torch.int64):
        with pytest.raises(CapiError, match=r"backbone\.registers"):
            from_released(state | {"backbone.registers": state["backbone.registers"].to(dtype)})
    key = "backbone.decoder.blocks.0.residual1.fn.rope.freqs"
    with pytest.raises(CapiError, match=f'no real numbers in "{key}"'):
        from_released(state | {key: state[key].to(torch.complex64)})


def test__channels_that_are_not_three_have_statistics_of_their_own_number(caplog: pytest.LogCaptureFixture) -> None:
    model = from_released(to_released(random_model()), "two.pth")
    assert model.statistics == Statistics((0.5, 0.5), (0.5, 0.5))
    assert "two.pth does not say which mean and std its 2 channels had" in caplog.text


def test__an_unknown_rotary_table_is_named() -> None:
    state = to_released(random_model())
    key = "backbone.encoder.blocks.2.residual1.fn.rope.freqs"
    state[key] = state[key] * 2
    with pytest.raises(CapiError, match=key):
        from_released(state)


@pytest.mark.parametrize("number", [0, 1])
def test__a_rotary_table_of_another_head_width_is_named(number: int) -> None:
    state = to_released(random_model())
    key = f"backbone.encoder.blocks.{number}.residual1.fn.rope.freqs"
    state[key] = to_released(random_model(predictor_width=192))["backbone.decoder.blocks.0.residual1.fn.rope.freqs"]
    with pytest.raises(CapiError, match=f'"{key}" of shape'):
        from_released(state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test__other_precisions_load_as_float32(dtype: torch.dtype) -> None:
    state = {key: value.to(dtype) for key, value in to_released(random_model("axial")).items()}
    model = from_released(state)
    assert model.encoder.positions.kind == "axial"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test__mixed_rotary_variants_are_refused() -> None:
    released, axial = to_released(random_model()), to_released(random_model("axial"))
    key = "backbone.encoder.blocks.2.residual1.fn.rope.freqs"
    with pytest.raises(CapiError, match="both rotary variants"):
        from_released(released | {key: axial[key]})


class RunsCode:
    def __init__(self, witness: str) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (self.witness,)


def test__a_pickle_that_runs_code_is_refused_and_does_not(tmp_path: Path) -> None:
    witness, path = tmp_path / "witness", tmp_path / "evil.pth"
    for contents in ({"student": to_released(random_model()), "args": RunsCode(str(witness))}, RunsCode(str(witness))):
        torch.save(contents, path)
        with pytest.raises(CapiError, match="could not be opened"):
            load_released(path)
    path.write_bytes(pickle.dumps(RunsCode(str(witness))))
    with pytest.raises(CapiError, match="could not be opened"):
        load_released(path)
    assert not witness.exists()


def test__a_model_can_be_saved_over_the_file_it_came_from(tmp_path: Path) -> None:
    path, images = tmp_path / "file.pth", torch.randn(1, 2, 14, 14)
    torch.save(to_released(random_model()), path)
    model = load_released(path)
    expected = model(images).pooled
    torch.save(to_released(model), path)
    assert torch.equal(load_released(path)(images).pooled, expected)
    path.write_bytes(b"")
    assert torch.equal(model(images).pooled, expected)


def test__weights_can_be_trained_and_leave_the_file_as_it_is(tmp_path: Path) -> None:
    torch.save(to_released(random_model()), tmp_path / "file.pth")
    before = (tmp_path / "file.pth").read_bytes()
    model = load_released(tmp_path / "file.pth").requires_grad_(True)
    model(torch.randn(1, 2, 14, 14)).pooled.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert (tmp_path / "file.pth").read_bytes() == before
    assert not torch.equal(model.encoder.registers, load_released(tmp_path / "file.pth").encoder.registers)


@pytest.mark.parametrize("name", ["broken.pth", "broken.safetensors"])
def test__files_that_are_no_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a checkpoint")
    with pytest.raises(CapiError, match="is no checkpoint: expected a state dict"):
        load_released(tmp_path / name)


def test__a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.pth", tmp_path):
        with pytest.raises(CapiError, match="is not a file"):
            load_released(path)


def test__other_contents_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(2)}}, tmp_path / "nested.pth")
    with pytest.raises(CapiError, match="lacks the names of the released layout"):
        load_released(tmp_path / "nested.pth")
    torch.save({3: torch.zeros(2)}, tmp_path / "numbers.pth")
    with pytest.raises(CapiError, match="flat dict of tensors"):
        load_released(tmp_path / "numbers.pth")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pth")
    with pytest.raises(CapiError, match="lacks"):
        load_released(tmp_path / "other.pth")


def test__a_training_checkpoint_gives_the_model_in_it(tmp_path: Path) -> None:
    model, images = random_model(), torch.randn(1, 2, 14, 14)
    wrapped = {f"module.{name}": value for name, value in to_released(model).items()}
    torch.save({"student": wrapped, "epoch": 3, "optimizer": {"state": {}}}, tmp_path / "checkpoint.pth")
    assert torch.equal(load_released(tmp_path / "checkpoint.pth")(images).pooled, model(images).pooled)
