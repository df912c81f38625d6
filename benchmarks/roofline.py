"""The time of a step on GPUs that are not here, from what it computes and moves: a roofline.

    python benchmarks/roofline.py vitl14 --gpu a100-80g --gpus 32 --images 512
    python benchmarks/roofline.py vitl14 --gpu a100-80g h100 h200 rtx4090 --gpus 32 --images 512 --json roofline.json
    python benchmarks/roofline.py vits16 --images 8 --check

The real `train_step` of one process of many (FSDP2 over a network that is none) runs on tensors without values, on the
way that an accelerator takes. Every operation is counted: FLOP by precision, bytes read and written, kernels,
collectives with their bytes. A copy to the CPU or the value of a tensor would be an error, so nothing waits.

Time of a part = the larger of FLOP / peak and bytes / bandwidth, plus the kernels' launches; where collectives of FSDP
take longer than that they decide, and others are added. Two columns: `eager` takes each operation by itself; `fused`
merges pointwise operations and reductions between two products or collectives, as inductor would: what only the merged
ones read is never written, and a run of them is one kernel for each number of elements. A sum over more than 1024
elements ends a run. What balances assignments is not left to this rule: inductor itself lowers and schedules it for an
A100, and its kernels and bytes are counted (`inductor.py`). `plain` is the same step with all b x n x k assignments at
once and logits in bfloat16, as the released code does it.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import inductor
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from capi.config.files import load_config
from capi.config.schema import Config
from capi.method.clustering import OnlineClustering
from capi.method.clustering.walk import ClusteringSettings
from capi.method.masking import PatchGrid
from capi.method.targets import Targets, at_predicted
from capi.runtime.devices import as_on_accelerator
from capi.train.build import build_learner, mask_sampler, masked_batch
from capi.train.cost.fake_processes import fake_learner
from capi.train.cost.hardware import Gpu, find_gpu
from capi.train.step import Learner, train_step
from capi.types import MaskedBatch, Reduction

PARTS = ("teacher", "clustering", "student", "optimizers", "average")


@dataclass(frozen=True)
class Speeds:
    """What the data sheets say beside memory and peaks: bytes/s of the memory, and FLOP/s with TF32."""

    bandwidth: float
    tf32: float
    # Bytes/s to other GPUs, one way: eight to a machine by 200 Gbit/s each, the cards for desktops by PCIe 4.
    network: float = 25e9
    # Seconds from one kernel to the next, and of a collective without bytes.
    launch: float = 3e-6
    collective: float = 30e-6


SPEEDS = {
    "a100-80g": Speeds(2.039e12, 156e12),
    "h100": Speeds(3.35e12, 494.5e12, network=50e9),
    "h200": Speeds(4.8e12, 494.5e12, network=50e9),
    "rtx4090": Speeds(1.008e12, 82.6e12, network=16e9),
}
# Tensors that one kernel of `foreach` or of a fused optimizer takes, about: torch fills 4 KiB of arguments.
_TENSORS_A_KERNEL = 36
# Elements of a row that a merged kernel keeps on the chip between a sum and what reads it, as inductor does.
_LONGEST_ROW = 1024
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "detach", "set_"}
# Attention has another name on a CPU.
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_AS_COUNTED = {
    _CPU_ATTENTION: "_scaled_dot_product_flash_attention",
    f"{_CPU_ATTENTION}_backward": "_scaled_dot_product_flash_attention_backward",
}
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "dot"}
# They read values, which fake tensors refuse: such a step ends with an error. On a CPU nothing is waited for.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select"}
_BY_FSDP = {"_allgather_base_", "_reduce_scatter_base_", "allgather_", "reduce_scatter_"}


@dataclass
class Part:
    """What one part of a step takes."""

    flop: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    kernels: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    fsdp_collectives: int = 0
    fsdp_bytes: int = 0
    waits: int = 0

    def seconds(self, gpu: Gpu, speeds: Speeds, precision: str) -> float:
        peaks = {"bfloat16": gpu.bfloat16 or gpu.float32, "float32": gpu.float32, "tf32": speeds.tf32}
        products = sum(
            count / peaks[precision if kind == "float32" else kind] for kind, count in self.flop.items() if count
        )
        own = max(products, self.bytes / speeds.bandwidth) + self.kernels * speeds.launch
        fsdp = self.fsdp_bytes / speeds.network + self.fsdp_collectives * speeds.collective
        others = self.collective_bytes / speeds.network + self.collectives * speeds.collective
        return max(own, fsdp) + others


@dataclass
class Operation:
    """One call of the dispatcher: storages with the bytes that were touched, by key."""

    part: str
    merges: bool
    kernels: int
    elements: int
    # How many elements a sum or the like takes together; 1 for pointwise operations.
    row: int
    reads: dict[int, int]
    writes: dict[int, int]
    # The call that it belongs to of what is compiled as a whole.
    call: "Call | None" = None


@dataclass(frozen=True, eq=False)
class Call:
    """A function of one tensor that inductor compiles as a whole."""

    function: Callable[[Tensor], Any]
    shape: torch.Size


class Count(TorchDispatchMode):
    """Counts what it sees. Storages are kept until the end, so that no other takes the number of one."""

    def __init__(self) -> None:
        super().__init__()
        self.part = PARTS[0]
        self.call: Call | None = None
        self.parts: dict[str, Part] = defaultdict(Part)
        self.operations: list[Operation] = []
        self.storages: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, part = func._overloadpacket.__name__, self.parts[self.part]
        part.waits += name in _WAITS
        result = func(*args, **kwargs)
        given = [local(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [local(value) for value in tree_leaves(result) if isinstance(value, Tensor)]
        if func.namespace == "c10d":
            self._add_collective(name, part, given, args)
            self.operations.append(
                Operation(self.part, False, kernels=0, elements=0, row=1, reads={}, writes={}, call=self.call)
            )
            return result
        if func.namespace == "prim" or name in _NO_KERNEL or is_view(func) or not (given or made):
            return result
        reads, writes = self._touched(given), self._touched(made or given)
        # What is computed in place is not registered.
        formula = flop_registry.get(getattr(torch.ops.aten, _AS_COUNTED.get(name, name.removesuffix("_")), None))
        if formula is not None:
            kind = "bfloat16" if torch.bfloat16 in {value.dtype for value in given} else "float32"
            part.flop[kind] += formula(*args, **kwargs, out_val=result)
        many = "_foreach" in name or "_fused" in name or func.namespace == "fsdp"
        kernels = -(-len(given) // _TENSORS_A_KERNEL) if many else 1
        elements = max((value.numel() for value in (*made, *given)), default=0)
        merges = not many and (formula is None and name not in _PRODUCTS)
        row = elements // max(sum(value.numel() for value in made), 1)
        self.operations.append(Operation(self.part, merges, kernels, elements, row, reads, writes, self.call))
        return result

    def _add_collective(self, name: str, part: Part, given: list[Tensor], args: Any) -> None:
        groups = [ProcessGroup.unbox(each) for each in args if is_group(each)]
        size = max((value.numel() * value.element_size() for value in given), default=0)
        if all(group.size() == 1 for group in groups):
            # Replicas where there is only one.
            return
        if name in _BY_FSDP:
            part.fsdp_collectives, part.fsdp_bytes = part.fsdp_collectives + 1, part.fsdp_bytes + size
        elif name != "barrier":
            # A ring sends every byte about twice.
            part.collectives, part.collective_bytes = part.collectives + 1, part.collective_bytes + 2 * size

    def _touched(self, values: list[Tensor]) -> dict[int, int]:
        touched: dict[int, int] = {}
        for value in values:
            storage = value.untyped_storage()
            self.storages.append(storage)
            # A broadcast value is read once.
            size = min(value.numel() * value.element_size(), storage.nbytes())
            touched[storage._cdata] = max(touched.get(storage._cdata, 0), size)
        return touched

    def eager(self) -> dict[str, Part]:
        for operation in self.operations:
            part = self.parts[operation.part]
            part.bytes += sum(operation.reads.values()) + sum(operation.writes.values())
            part.kernels += operation.kernels
        return dict(self.parts)

    def compiled(self, function: Callable[[Tensor], Any], action: Callable[..., Any]) -> Callable[..., Any]:
        """An action on a tensor that inductor compiles as this function."""

        def call(values: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.call = Call(function, values.shape)
            result = action(values, *args, **kwargs)
            self.call = None
            return result

        return call

    def fused(self, gpus: int) -> dict[str, Part]:
        """Runs of operations that merge are taken together."""
        launched = cache(lambda function, shape: inductor.launched(function, torch.empty(shape), processes=gpus))
        last_use = {key: number for number, each in enumerate(self.operations) for key in each.reads}
        parts = {name: Part(**(vars(part) | {"bytes": 0, "kernels": 0})) for name, part in self.parts.items()}
        start = 0
        while start < len(self.operations):
            first, stop = self.operations[start], start + 1
            if first.call:
                while stop < len(self.operations) and self.operations[stop].call is first.call:
                    stop += 1
                kernels, size = launched(first.call.function, first.call.shape)
                parts[first.part].kernels += kernels
                parts[first.part].bytes += size
                start = stop
                continue
            while first.merges and stop < len(self.operations):
                following = self.operations[stop]
                if not following.merges or following.call or following.part != first.part:
                    break
                # A sum over much must be complete before anything else can read it.
                sums = {key for each in self.operations[start:stop] if each.row > _LONGEST_ROW for key in each.writes}
                if sums & following.reads.keys():
                    break
                stop += 1
            group, part = self.operations[start:stop], parts[first.part]
            written: dict[int, int] = {}
            for each in group:
                part.bytes += sum(size for key, size in each.reads.items() if key not in written)
                written |= each.writes
            alive = {key for key in written if last_use.get(key, -1) >= stop or not first.merges}
            part.bytes += sum(size for key, size in written.items() if key in alive)
            part.kernels += len({each.elements for each in group}) if first.merges else first.kernels
            start = stop
        return parts


def local(value: Tensor) -> Tensor:
    """The part of a sharded tensor that lies here."""
    part: Tensor = getattr(value, "_local_tensor", value)
    return part


def is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def is_view(func: Any) -> bool:
    returns = [each.alias_info for each in func._schema.returns]
    return func._overloadpacket.__name__ == "_unsafe_view" or any(
        info is not None and not info.is_write for info in returns
    )


def balanced_at_once(
    logits: Tensor, settings: ClusteringSettings, reduction: Reduction
) -> tuple[Tensor, Tensor, Tensor]:
    """Assignments of all patches, their log-probabilities and the loss, as the released code goes about it."""
    with torch.no_grad():
        assignments = logits.detach() - reduction.max(logits.detach().amax(0))
        assignments.div_(settings.target_temperature).exp_()
        for _ in range(settings.iterations):
            assignments /= reduction.sum(assignments.sum(0)) + 1e-8
            assignments /= assignments.sum(-1, keepdim=True) + 1e-8
    log_probabilities = F.log_softmax(logits / settings.prediction_temperature, dim=-1)
    return assignments, log_probabilities, -(assignments * log_probabilities).sum(-1).mean()


class AtOnce(OnlineClustering):
    """All assignments of the batch together, logits in bfloat16."""

    balanced = staticmethod(balanced_at_once)

    def forward(self, tokens: Any, predict_index: Any, step: int = 0) -> Targets:  # noqa: ARG002 - the contract
        together, index = torch.cat(list(tokens)), torch.cat(list(predict_index))
        with torch.autocast(together.device.type, torch.bfloat16):
            logits = F.linear(F.normalize(together.float(), dim=-1, eps=1e-7), self.prototypes, self.bias).float()
        assignments, _, loss = self.balanced(logits, self.settings, self.reduction)
        return Targets(loss, iter(at_predicted(assignments, index).split([len(part) for part in tokens])))


class Phases:
    """An observer that tells the count which part comes next."""

    def __init__(self, count: Count) -> None:
        self.count = count

    def tokens(self, *_: Any) -> None:
        self.count.part = "clustering"

    def gradients(self, *_: Any) -> None:
        self.count.part = "optimizers"


@contextmanager
def observed(count: Count, learner: Learner) -> Iterator[None]:
    """The parts that no observer sees: the student, and the average at the end."""

    def to(part: str, action: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count.part = part
            return action(*args, **kwargs)

        return call

    follow, target = learner.teacher.follow, learner.target
    if isinstance(target, AtOnce):
        balanced = partial(balanced_at_once, settings=target.settings, reduction=inductor.Exchanges())
        target.balanced = count.compiled(balanced, target.balanced)
    elif isinstance(target, OnlineClustering):
        target.cluster_slice = count.compiled(inductor.slice_function, target.cluster_slice)
    hook = learner.student.register_forward_pre_hook(lambda *_: setattr(count, "part", "student"))
    with patch.object(learner.teacher, "follow", to("average", follow)), count:
        yield
    hook.remove()


def counted(config: Config, gpus: int, *, plain: bool = False) -> Count:
    """One step of the first of so many processes."""
    optimization, grid = config.optimization, PatchGrid(*config.grid)
    visible, _, predicted = mask_sampler(config).counts(grid)
    images = optimization.batch_size // (gpus * optimization.micro_batches)
    with as_on_accelerator(), fake_learner(config, gpus) as learner:
        if plain:
            learner.target.__class__ = AtOnce
        batch = MaskedBatch(
            torch.empty(images, *shape_of(config)),
            torch.empty(images, visible, dtype=torch.int64),
            torch.empty(images, predicted, dtype=torch.int64),
        )
        batches = [batch] * optimization.micro_batches
        # The first step makes what optimizers keep.
        train_step(learner, batches, 1)
        count = Count()
        with observed(count, learner):
            train_step(learner, batches, 2, Phases(count))
    return count


def check(recipe: str, images: int, overrides: list[str]) -> None:
    """A step on this CPU as it was counted, and as it is: in the seconds of one thread, beside other work."""
    config = load_config(recipe, [*overrides, f"optimization.batch_size={images}", "run.precision=float32"])
    learner, batch = build_learner(config), masked_batch(config, torch.randn(images, *shape_of(config)), 0)
    train_step(learner, [batch], 1)
    count = Count()
    with observed(count, learner):
        train_step(learner, [batch], 2, Phases(count))
    left, right = torch.randn(2, 2048, 2048)
    large = torch.randn(2**26)
    other, small = torch.empty_like(large), torch.randn(16)
    peak = 2 * 2048**3 / thread_seconds(lambda: torch.mm(left, right))
    bandwidth = 2 * large.nbytes / thread_seconds(lambda: other.copy_(large))
    launch = thread_seconds(lambda: [small + 1 for _ in range(1000)]) / 1000
    planned = sum(
        max(sum(part.flop.values()) / peak, part.bytes / bandwidth) + part.kernels * launch
        for part in count.eager().values()
    )
    taken = thread_seconds(lambda: train_step(learner, [batch], 3))
    print(
        f"{recipe}, {images} images, one thread of this CPU ({peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s, "
        f"{launch * 1e6:.1f} us a call): counted {planned:.2f} s, taken {taken:.2f} s, {planned / taken:.2f} times"
    )


def thread_seconds(action: Callable[[], Any], rounds: int = 3) -> float:
    best = float("inf")
    for _ in range(rounds + 1):
        start = time.process_time()
        action()
        best = min(best, time.process_time() - start)
    return best


def shape_of(config: Config) -> tuple[int, int, int]:
    return (config.model.channels, *config.data.height_and_width)


def table(parts: dict[str, Part], gpu: Gpu, speeds: Speeds, tf32: bool) -> list[dict[str, Any]]:
    rows = []
    for name in PARTS:
        part = parts.get(name, Part())
        seconds = part.seconds(gpu, speeds, "tf32" if tf32 and name == "clustering" else "float32")
        rows.append({"part": name, "seconds": seconds, **asdict(part), "flop": dict(part.flop)})
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"{title}: {sum(row['seconds'] for row in rows):.3f} s")
    print("  part          TFLOP bf16  float32      GB  kernels  collectives (bytes)  FSDP's (bytes)  waits         s")
    for row in rows:
        rounded, full = (row["flop"].get(kind, 0) / 1e12 for kind in ("bfloat16", "float32"))
        print(
            f"  {row['part']:12} {rounded:11.2f} {full:8.2f} {row['bytes'] / 1e9:7.1f} {row['kernels']:8d} "
            f"{row['collectives']:6d} ({row['collective_bytes'] / 1e6:8.1f} MB) {row['fsdp_collectives']:4d} "
            f"({row['fsdp_bytes'] / 1e9:5.2f} GB) {row['waits']:6d} {row['seconds']:9.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--gpu", choices=SPEEDS, default=["a100-80g"], nargs="+")
    parser.add_argument("--gpus", type=int, default=32)
    parser.add_argument("--images", type=int, default=512, help="for each GPU")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="count a step on this CPU, run it, and compare")
    arguments = parser.parse_args()
    if arguments.check:
        torch.set_num_threads(1)
        check(arguments.recipe, arguments.images, arguments.overrides)
        return
    batch = arguments.images * arguments.gpus
    fixed = [f"optimization.batch_size={batch}", "run.precision=bfloat16"]
    config = load_config(arguments.recipe, [*arguments.overrides, *fixed])
    ours, plain = counted(config, arguments.gpus), counted(config, arguments.gpus, plain=True)
    # A count adds up to the same parts whichever way its bytes are taken.
    columns = {
        "ours, fused": ours.fused(arguments.gpus),
        "ours, eager": ours.eager(),
        "plain, fused": plain.fused(arguments.gpus),
        "plain, eager": plain.eager(),
    }
    tables = {}
    for name in arguments.gpu:
        gpu, speeds = find_gpu(name), SPEEDS[name]
        print(f"{arguments.recipe}, {arguments.images} images on each of {arguments.gpus} x {gpu.title}")
        rows = {title: table(parts, gpu, speeds, tf32=True) for title, parts in columns.items()}
        for title, each in rows.items():
            show(f" {title}", each)
        tables[name] = rows
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(tables, file, indent=1)


if __name__ == "__main__":
    main()
