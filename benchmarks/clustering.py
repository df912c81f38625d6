"""Time and peak memory of the clustering (targets, loss and gradient) against a plain version.

    python benchmarks/clustering.py

The plain version holds all assignments at once. It is vectorised, works in place where that is natural, and runs under
the same allocator settings in the same interleaved run.
"""

import argparse
import sys
from functools import partial

import torch
import torch.nn.functional as F
from measure import Work, interleaved_best, peak_extra_bytes
from torch import Tensor

from capi.method.bounded import ClusteringSettings
from capi.method.clustering import OnlineClustering
from capi.runtime.devices import LARGEST_KEPT_BLOCK, keep_freed_memory


def plain(clustering: OnlineClustering, tokens: Tensor, predict_index: Tensor) -> tuple[Tensor, Tensor]:
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


def chunked(clustering: OnlineClustering, tokens: Tensor, predict_index: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and targets in bounded memory."""
    clustering.zero_grad()
    loss, (targets,) = clustering([tokens], [predict_index])
    loss.backward()
    return loss.detach(), targets


def compare(sinkhorn: str, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(arguments.images, arguments.positions, arguments.width)
    predict_index = torch.rand(tokens.shape[:2]).argsort(1)[:, : arguments.predictions]
    settings = ClusteringSettings(sinkhorn=sinkhorn)  # type: ignore[arg-type]
    clustering = OnlineClustering(width=arguments.width, prototypes=arguments.prototypes, settings=settings)
    works: dict[str, Work] = {
        "plain": partial(plain, clustering, tokens, predict_index),
        "chunked": partial(chunked, clustering, tokens, predict_index),
    }
    plain_loss, plain_targets = plain(clustering, tokens, predict_index)
    loss, targets = chunked(clustering, tokens, predict_index)
    print(f"{sinkhorn}: loss differs by {abs(loss - plain_loss) / plain_loss:.1e}, ", end="")
    print(f"targets by {(targets - plain_targets).abs().max():.1e}")
    del plain_targets, targets
    memory = {name: peak_extra_bytes(work) for name, work in works.items()}
    seconds = interleaved_best(works, arguments.rounds)
    for name in works:
        print(f"  {name:8} {seconds[name]:6.2f} s   {memory[name] / 2**20:7.0f} MiB")
    print(f"  speed {seconds['plain'] / seconds['chunked']:.2f} x, memory 1/{memory['plain'] / memory['chunked']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("images", 64), ("positions", 196), ("width", 384), ("prototypes", 16384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--predictions", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--keep-mib", type=int, default=LARGEST_KEPT_BLOCK // 2**20, help="largest block the allocator keeps"
    )
    parser.add_argument("--without-numba", action="store_true", help="as where the extra `cpu` is not installed")
    arguments = parser.parse_args()
    if arguments.without_numba:
        sys.modules["numba"] = None  # type: ignore[assignment]
    keep_freed_memory(arguments.keep_mib * 2**20)
    for sinkhorn in ("positionwise", "standard"):
        compare(sinkhorn, arguments)


if __name__ == "__main__":
    main()
