"""A training step of many attentive probes at once against the same probes one after the other.

    python benchmarks/attentive.py

The plain head projects every token to keys and values and attends with torch's own attention; each has an AdamW of its
own. The third row walks over the heads as well, but each of them is computed and stepped as ours are: what is left is
what comes of the batching alone. All of them run interleaved, under the same allocator settings.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from measure import Work, interleaved_best
from torch import Tensor, nn

from capi.evals.probes import (
    BETAS,
    EPS,
    PAPER_GRID,
    AttentiveProbes,
    ProbeSchedule,
    ProbeSetting,
    ProbeTrainer,
    head_width,
)
from capi.runtime.devices import keep_freed_memory

Batch = tuple[Tensor, Tensor]


class PlainHead(nn.Module):
    """An attentive probe in the words of torch."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.heads = width // head_width(width)
        self.query = nn.Parameter(torch.empty(width))
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.query.view(1, self.heads, 1, -1).expand(len(tokens), -1, -1, -1)
        key, value = (layer(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.key, self.value))
        logits: Tensor = self.classifier(F.scaled_dot_product_attention(query, key, value).flatten(1))
        return logits


class PlainLoop:
    """Plain heads, each with torch's fused AdamW."""

    def __init__(self, settings: Sequence[ProbeSetting], schedule: ProbeSchedule, start: AttentiveProbes) -> None:
        self.schedule = schedule
        self.heads = [PlainHead(start.width, start.classes) for _ in settings]
        for head in self.heads:
            head.load_state_dict({name: value[0] for name, value in start.state_dict().items()})
        self.optimizers = [optimizer(head, setting) for head, setting in zip(self.heads, settings, strict=True)]

    def step(self, batch: Batch, number: int) -> Tensor:
        tokens, labels = batch
        losses = []
        for head, adam in zip(self.heads, self.optimizers, strict=True):
            for group in adam.param_groups:
                group["lr"] = self.schedule.learning_rate(number, peak=group["peak"])
            loss = F.cross_entropy(head(tokens), labels)
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.detach())
        return torch.stack(losses)


def optimizer(head: PlainHead, setting: ProbeSetting) -> torch.optim.AdamW:
    named = list(head.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": setting.weight_decay},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]
    for group in groups:
        group["peak"] = setting.learning_rate
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, fused=True)


class FastLoop:
    """Probes of one setting each, by the same formula as all at once."""

    def __init__(self, settings: Sequence[ProbeSetting], schedule: ProbeSchedule, start: AttentiveProbes) -> None:
        self.trainers = []
        for setting in settings:
            probes = AttentiveProbes(settings=1, width=start.width, classes=start.classes)
            probes.load_state_dict({name: value[:1] for name, value in start.state_dict().items()})
            self.trainers.append(ProbeTrainer(probes, [setting], schedule))

    def step(self, batch: Batch, number: int) -> Tensor:
        return torch.cat([trainer.step([batch], number) for trainer in self.trainers])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("images", 64), ("tokens", 196), ("width", 384), ("classes", 100), ("settings", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check-steps", type=int, default=3, help="steps after which the losses are compared")
    arguments = parser.parse_args(words)
    keep_freed_memory()
    torch.manual_seed(0)
    tokens = torch.randn(arguments.images, arguments.tokens, arguments.width)
    compare((tokens, torch.randint(arguments.classes, (arguments.images,))), arguments)


def compare(batch: Batch, arguments: argparse.Namespace) -> None:
    # Every so many settings of the grid, so that few of them still differ.
    settings = [PAPER_GRID[number * len(PAPER_GRID) // arguments.settings] for number in range(arguments.settings)]
    # Without a warm-up, so that the few steps before the losses are compared move the heads.
    schedule = ProbeSchedule(warmup_steps=0, batch_size=arguments.images)
    probes = AttentiveProbes(settings=len(settings), width=arguments.width, classes=arguments.classes)
    plain, fast = PlainLoop(settings, schedule, probes), FastLoop(settings, schedule, probes)
    trainer = ProbeTrainer(probes, settings, schedule)
    works: dict[str, Work] = {
        "at once": lambda: trainer.step([batch], 0),
        "plain loop": lambda: plain.step(batch, 0),
        "fast loop": lambda: fast.step(batch, 0),
    }
    for number in range(arguments.check_steps):
        losses = [trainer.step([batch], number), plain.step(batch, number), fast.step(batch, number)]
    differences = [((other - losses[0]).abs().max() / losses[0].abs().max()).item() for other in losses[1:]]
    print(f"losses differ by {differences[0]:.1e} (plain loop) and {differences[1]:.1e} (fast loop)")
    seconds = interleaved_best(works, arguments.rounds)
    sizes = f"{arguments.images} images of {arguments.tokens} tokens of width {arguments.width}"
    print(f"a step of {len(settings)} attentive probes on {sizes}, {arguments.classes} classes")
    for name, value in seconds.items():
        print(f"  {name:12} {value * 1e3:8.1f} ms   {value / seconds['at once']:6.1f} x")


if __name__ == "__main__":
    main()
