"""Time and peak memory of the clustering (targets, loss and gradient) against a plain version.

    python benchmarks/clustering.py
    python benchmarks/clustering.py --precision

The plain version holds all assignments at once. It is vectorised, works in place where that is natural, and runs under
the same allocator settings in the same interleaved run.

With --precision: what rounding the factors of its two products does to targets, loss and gradient, against the same
formulas in float64, for prototypes as they are drawn at first and for longer ones. `tf32` is the package's: logits in
TF32, gradient in bfloat16.
"""

import argparse
import time
from functools import partial

import torch
import torch.nn.functional as F
from measure import Work, interleaved_best, peak_extra_bytes
from torch import Tensor

from capi.method.clustering import OnlineClustering, plain
from capi.method.clustering.walk import ClusteringSettings
from capi.runtime.devices import LARGEST_KEPT_BLOCK, keep_freed_memory
from capi.types import OneProcess


def at_once(clustering: OnlineClustering, tokens: Tensor, predict_index: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and targets as the formulas say, with autograd for the gradient."""
    clustering.zero_grad()
    settings = clustering.settings
    logits = F.linear(F.normalize(tokens, dim=-1, eps=1e-7), clustering.prototypes, clustering.bias)
    samples = (0,) if settings.sinkhorn == "positionwise" else (0, 1)
    with torch.no_grad():
        assignments = logits.detach() - logits.detach().amax(samples, keepdim=True)
        assignments.div_(settings.target_temperature).exp_()
        for _ in range(settings.iterations):
            assignments /= assignments.sum(samples, keepdim=True) + 1e-8
            assignments /= assignments.sum(-1, keepdim=True) + 1e-8
    log_probabilities = F.log_softmax(logits / settings.prediction_temperature, dim=-1)
    loss = -(assignments * log_probabilities).sum(-1).mean()
    loss.backward()
    index = predict_index[..., None].expand(-1, -1, assignments.shape[-1])
    return loss.detach(), assignments.gather(1, index)


def bounded(clustering: OnlineClustering, tokens: Tensor, predict_index: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and targets in bounded memory."""
    clustering.zero_grad()
    loss, (targets,) = clustering([tokens], [predict_index])
    loss.backward()
    return loss.detach(), targets


def compare(sinkhorn: str, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(arguments.images, arguments.positions, arguments.width)
    predict_index = torch.rand(tokens.shape[:2]).argsort(1)[:, : arguments.predictions]
    budget = None if arguments.chunk_mib is None else arguments.chunk_mib * 2**20
    settings = ClusteringSettings(sinkhorn=sinkhorn, chunk_bytes=budget)  # type: ignore[arg-type]
    clustering = OnlineClustering(width=arguments.width, prototypes=arguments.prototypes, settings=settings)
    works: dict[str, Work] = {
        "plain": partial(at_once, clustering, tokens, predict_index),
        "bounded": partial(bounded, clustering, tokens, predict_index),
    }
    plain_loss, plain_targets = at_once(clustering, tokens, predict_index)
    loss, targets = bounded(clustering, tokens, predict_index)
    print(f"{sinkhorn}: loss differs by {abs(loss - plain_loss) / plain_loss:.1e}, ", end="")
    print(f"targets by {(targets - plain_targets).abs().max():.1e}")
    del plain_targets, targets
    memory = {name: peak_extra_bytes(work) for name, work in works.items()}
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    seconds = interleaved_best(works, arguments.rounds, clock)
    for name in works:
        print(f"  {name:8} {seconds[name]:6.2f} s   {memory[name] / 2**20:7.0f} MiB")
    print(f"  speed {seconds['plain'] / seconds['bounded']:.2f} x, memory 1/{memory['plain'] / memory['bounded']:.0f}")


# Bits of the fraction that are stored, of the factors of the logits and of the gradient.
FRACTIONS = {"float32": (23, 23), "tf32 twice": (10, 10), "tf32": (10, 7), "bfloat16": (7, 7)}


def rounded(values: Tensor, fraction: int) -> Tensor:
    """Round to nearest, with so many bits of the fraction; those of float64 stay as they are."""
    drop = 23 - fraction
    if values.dtype == torch.float64 or not drop:
        return values
    bits = values.view(torch.int32)
    bits = bits + (2 ** (drop - 1) - 1 + (bits >> drop & 1))
    return (bits & -(2**drop)).view(torch.float32)


def balanced(samples: Tensor, prototypes: Tensor, of_logits: int, of_gradient: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assignments, loss and gradient, with the factors of both products rounded."""
    settings = ClusteringSettings()
    logits = plain.logits_of(rounded(samples, of_logits), rounded(prototypes, of_logits), None)
    kernel = plain.kernel_of(logits, logits.amax(1, keepdim=True), settings.target_temperature)
    u, v = plain.sinkhorn(kernel, settings.iterations, OneProcess())
    assignments, totals = plain.assign(kernel, u, v)
    loss, difference = plain.cross_entropy(logits, assignments, totals, settings.prediction_temperature)
    gradient = rounded(difference, of_gradient).flatten(0, 1).t() @ rounded(samples, of_gradient).flatten(0, 1)
    return assignments, loss, gradient


def compare_precisions(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    samples = plain.normalized(torch.randn(4, arguments.images, arguments.width))
    drawn = torch.randn(arguments.prototypes, arguments.width)
    for scale in (1.0, 2.0, 4.0):
        prototypes = scale * drawn
        assignments, loss, gradient = balanced(samples.double(), prototypes.double(), 23, 23)
        entropy = torch.special.entr(assignments).sum(-1).mean()
        print(f"prototypes of std {scale:g}: targets have an entropy of {entropy:.2f} nat")
        for name, fractions in FRACTIONS.items():
            ours = balanced(samples, prototypes, *fractions)
            change = (ours[0] - assignments).abs()
            moved, turned = change.sum(-1).mean() / 2, (ours[2] - gradient).norm() / gradient.norm()
            print(
                f"  {name:10} one target by {change.max():.1e} at most, of a patch {moved:.1e} is moved on average; "
                f"loss by {abs(ours[1] / loss - 1):.1e}, gradient by {turned:.1e} of their size"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("images", 64), ("positions", 196), ("width", 384), ("prototypes", 16384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--predictions", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk-mib", type=int, help="as clustering.chunk_mib")
    parser.add_argument(
        "--keep-mib", type=int, default=LARGEST_KEPT_BLOCK // 2**20, help="largest block the allocator keeps"
    )
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, where other programs take the cores")
    parser.add_argument("--precision", action="store_true", help="compare precisions, not times")
    arguments = parser.parse_args()
    if arguments.precision:
        compare_precisions(arguments)
        return
    keep_freed_memory(arguments.keep_mib * 2**20)
    for sinkhorn in ("positionwise", "standard"):
        compare(sinkhorn, arguments)


if __name__ == "__main__":
    main()
