from typing import Any

import pytest
import torch

from capi.method.clustering import OnlineClustering
from capi.method.clustering.walk import Clustered, ClusteringSettings, cluster


def run(clustering: OnlineClustering, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss, (targets,) = clustering([tokens], [torch.arange(tokens.shape[1]).expand(len(tokens), -1)])
    return loss, targets


def test__prototypes_start_normal_and_the_bias_at_zero() -> None:
    clustering = OnlineClustering(width=64, prototypes=2000)
    assert abs(clustering.prototypes.std() - 1) < 0.02
    assert (clustering.bias == 0).all()
    assert OnlineClustering(width=4, prototypes=3, bias=False).bias is None


def test__the_gradient_reaches_the_prototypes_and_nothing_else() -> None:
    clustering = OnlineClustering(width=8, prototypes=6)
    tokens = torch.randn(3, 4, 8, requires_grad=True)
    loss, targets = run(clustering, tokens)
    loss.backward()
    assert tokens.grad is None
    assert not targets.requires_grad
    assert clustering.prototypes.grad.abs().sum() > 0
    assert clustering.bias.grad.abs().sum() > 0


def test__the_length_of_a_token_does_not_matter() -> None:
    clustering = OnlineClustering(width=8, prototypes=6)
    tokens = torch.randn(3, 4, 8)
    scaled = tokens * torch.rand(3, 4, 1).add(0.5)
    for ours, theirs in zip(run(clustering, tokens), run(clustering, scaled), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test__positionwise_targets_carry_no_position() -> None:
    """Tokens that are nothing but their position collapse standard Sinkhorn, and leave positionwise none the wiser."""
    positions = torch.nn.functional.normalize(torch.randn(1, 8, 16), dim=-1)
    tokens = positions + 0.05 * torch.randn(64, 8, 16)
    shared = {}
    for sinkhorn in ("positionwise", "standard"):
        clustering = OnlineClustering(width=16, prototypes=8, settings=ClusteringSettings(sinkhorn=sinkhorn))
        joint = run(clustering, tokens)[1].mean(0) / 8
        marginals = joint.sum(0, keepdim=True) * joint.sum(1, keepdim=True)
        shared[sinkhorn] = float((joint * (joint / marginals).log().nan_to_num()).sum())
    assert shared["positionwise"] < 0.1 * shared["standard"]


def test__autocast_changes_nothing() -> None:
    clustering = OnlineClustering(width=8, prototypes=6)
    tokens = torch.randn(3, 4, 8)
    plain = run(clustering, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = run(clustering, tokens)
    for ours, theirs in zip(plain, under_autocast, strict=True):
        assert torch.equal(ours, theirs)


def test__training_the_prototypes_lowers_their_loss() -> None:
    clustering = OnlineClustering(width=8, prototypes=6)
    tokens = torch.randn(16, 4, 8)
    optimizer = torch.optim.AdamW(clustering.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        loss, _ = run(clustering, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("chunk_bytes", [None, 20_000, 7_100])
@pytest.mark.parametrize("sinkhorn", ["positionwise", "standard"])
def test__micro_batches_are_balanced_as_one_batch(sinkhorn: Any, chunk_bytes: int | None) -> None:
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=chunk_bytes)
    clustering = OnlineClustering(width=16, prototypes=40, settings=settings)
    torch.nn.init.normal_(clustering.bias)
    tokens = torch.randn(9, 20, 16)
    predict_index = torch.rand(9, 20).argsort(1)[:, :3]
    loss, (targets,) = clustering([tokens], [predict_index])
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in clustering.parameters()]
    clustering.zero_grad()
    parts = [slice(0, 4), slice(4, 8), slice(8, 9)]
    split_loss, split_targets = clustering([tokens[part] for part in parts], [predict_index[part] for part in parts])
    split_loss.backward()
    torch.testing.assert_close(split_loss, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.cat(list(split_targets)), targets, rtol=1e-4, atol=1e-7)
    for parameter, gradient in zip(clustering.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-8)


def test__the_targets_of_micro_batches_are_rebuilt_without_autocast() -> None:
    clustering = OnlineClustering(width=8, prototypes=6)
    tokens = [torch.randn(3, 4, 8) for _ in range(2)]
    predict_index = [torch.arange(4).expand(3, -1)] * 2
    expected = list(clustering(tokens, predict_index)[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        targets = list(clustering(tokens, predict_index)[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(targets, expected, strict=True))


@pytest.mark.parametrize("chunk_bytes", [None, 1_000])
def test__nothing_is_rebuilt_of_a_sample_that_no_prototype_reaches(chunk_bytes: int | None) -> None:
    """Its factor has grown with every iteration, and would make something of a kernel that is all but nothing."""
    settings = ClusteringSettings(sinkhorn="standard", iterations=5, chunk_bytes=chunk_bytes)
    clustering = OnlineClustering(width=8, prototypes=2, settings=settings, bias=False)
    with torch.no_grad():
        # The last token is opposite to both prototypes, at a kernel of about 2^-192.
        clustering.prototypes.copy_(torch.eye(2, 8) * 4)
    tokens = torch.eye(2, 8).repeat(2, 1)[:, None]
    tokens[3] = -torch.ones(8)
    predict_index = torch.zeros(4, 1, dtype=torch.int64)
    _, (whole,) = clustering([tokens], [predict_index])
    _, parts = clustering(list(tokens.split(2)), list(predict_index.split(2)))
    rebuilt = torch.cat(list(parts))
    assert whole[3].sum() == rebuilt[3].sum() == 0
    torch.testing.assert_close(rebuilt[:3], whole[:3])


def test__micro_batches_keep_two_vectors_for_a_position_and_a_number_for_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clusterings: list[Clustered] = []
    monkeypatch.setattr(
        "capi.method.clustering.online.cluster", lambda *given: clusterings.append(cluster(*given)) or clusterings[-1]
    )
    tokens, index = torch.randn(2, 50, 4), torch.zeros(2, 7, dtype=torch.int64)
    for sinkhorn, groups in (("positionwise", 50), ("standard", 1)):
        settings = ClusteringSettings(sinkhorn=sinkhorn)  # type: ignore[arg-type]
        OnlineClustering(width=4, prototypes=30, settings=settings)([tokens] * 3, [index] * 3)
        sizes = [factor.untyped_storage().nbytes() for factor in clusterings[-1].factors]
        assert sizes == [4 * groups * 30, 4 * groups * 30, 4 * 50 * 6]
