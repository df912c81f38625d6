"""The clustering as an independent reference: everything at once, in float64, with autograd for the gradient."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from capi.method.clustering.walk import ClusteringSettings, cluster, rebuild
from capi.types import OneProcess, Reduction


class Results(NamedTuple):
    loss: Tensor
    assignments: Tensor
    prototype_gradient: Tensor
    bias_gradient: Tensor | None


def slow(
    tokens: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    settings: ClusteringSettings,
    earlier: Tensor | None = None,
) -> Results:
    """Loss, assignments of all patches and gradients, as the formulas say."""
    weight = prototypes.detach().double().requires_grad_()
    offset = None if bias is None else bias.detach().double().requires_grad_()
    everything = tokens.double() if earlier is None else torch.cat([tokens.double(), earlier.double()])
    logits = F.linear(F.normalize(everything, dim=-1, eps=1e-7), weight, offset)
    samples = (0,) if settings.sinkhorn == "positionwise" else (0, 1)
    with torch.no_grad():
        assignments = torch.exp((logits - logits.amax(samples, keepdim=True)) / settings.target_temperature)
        for _ in range(settings.iterations):
            assignments /= assignments.sum(samples, keepdim=True) + 1e-8
            assignments /= assignments.sum(-1, keepdim=True) + 1e-8
    logits, assignments = logits[: len(tokens)], assignments[: len(tokens)]
    loss = -(assignments * F.log_softmax(logits / settings.prediction_temperature, -1)).sum(-1).mean()
    loss.backward()
    return Results(loss.detach(), assignments, weight.grad, None if offset is None else offset.grad)


def ours(
    tokens: Tensor,
    prototypes: Tensor,
    bias: Tensor | None,
    settings: ClusteringSettings,
    earlier: Tensor | None = None,
    reduction: Reduction | None = None,
) -> Results:
    """The same by the walk, with all targets rebuilt."""
    results = cluster(tokens, prototypes, bias, settings, reduction or OneProcess(), earlier)
    everywhere = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    targets = rebuild(tokens, everywhere, prototypes, bias, settings, results.factors)
    return Results(results.loss, targets, results.prototype_gradient, None if bias is None else results.bias_gradient)


def assert_close(results: Results, expected: Results, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for name, value, other in zip(Results._fields, results, expected, strict=True):
        if value is not None:
            torch.testing.assert_close(
                value.double(), other, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )
