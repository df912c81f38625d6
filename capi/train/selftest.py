"""Does a machine train as it should? Seven checks of what tests elsewhere cannot know: devices, compiler, network.

The same checks run on a CPU, at sizes of seconds. What is compared, with what, and how much may differ stands in each
check; whoever has a GPU pastes the last paragraph, or the file, into an issue.
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from capi.config.files import dump_config, load_config
from capi.config.schema import Config
from capi.errors import CapiError, counted, nearest
from capi.method.masking import PatchGrid
from capi.runtime.devices import as_on_accelerator, choose_device, is_accelerator
from capi.runtime.privacy import hide_path
from capi.runtime.processes import joined
from capi.runtime.progress import TaskProgress, default_console
from capi.runtime.summary import Summary
from capi.train import run
from capi.train.build import build_learner, mask_sampler, masked_batch
from capi.train.checkpoint import Checkpoints
from capi.train.compilation import compile_networks, compiler_warning
from capi.train.cost.hardware import Gpu, gpu_of_device, this_machine
from capi.train.cost.measure import Measured, measure
from capi.train.cost.plan import plan_run
from capi.train.cost.step import measure_step, memory_of, random_batch
from capi.train.distribute import distribute
from capi.train.step import Learner, train_step
from capi.zoo.checkpoint_files import StoredTensors
from capi.zoo.run_folder import versions

CHECKS = ("install", "exactness", "step", "memory", "compile", "resume", "processes")
CheckStatus = Literal["passed", "failed", "skipped"]
# Of how far the weights moved in a few steps, and of a loss: sums in another order, of which Adam makes steps of the
# same length however small a gradient is.
WEIGHTS_APART, LOSSES_APART = 0.02, 1e-3
# Of a loss in bfloat16 from the one in float32.
ROUNDED_APART = 0.02
# Measured memory from the planned one: an allocator's blocks and what libraries keep are no part of a plan.
MEMORY_APART = 0.3
_STEPS, _SECONDS = 3, 900
_TINY = ["model.width=64", "model.depth=2", "clustering.prototypes=64", "data.image_size=32", "masking.predict=5"]
_RUN = ["optimization.batch_size=8", "optimization.steps=6", "checkpoint.every_steps=3", "run.precision=float32"]
_RUN += ["data.workers=0"]
_QUIET = [
    "data.workers=0",
    "run.compile=off",
    "run.loggers=[]",
    "run.report=false",
    "run.snapshots=0",
    "run.log_steps=1",
]


@dataclass(frozen=True)
class CheckOutcome:
    """The result of one check: a sentence for people, numbers for programs."""

    name: str
    status: CheckStatus
    sentence: str
    seconds: float
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class SelfTest(Summary):
    """All outcomes, and what they were found on."""

    machine: dict[str, Any]
    outcomes: list[CheckOutcome]

    @property
    def passed(self) -> bool:
        return all(outcome.status != "failed" for outcome in self.outcomes)

    def summary(self) -> tuple[str, dict[str, str]]:
        machine, verdict = self.machine, "passed" if self.passed else "FAILED"
        rows = {each.name: f"{each.status}: {each.sentence}" for each in self.outcomes}
        return f"capi {machine['capi']} selftest {verdict} on {machine['devices']} x {machine['device']}", rows

    def json(self) -> str:
        record = {"machine": self.machine, "passed": self.passed, "checks": [asdict(each) for each in self.outcomes]}
        return json.dumps(record, indent=1) + "\n"

    def paragraph(self) -> str:
        machine = self.machine
        cuda = f", CUDA {machine['cuda']}" if machine["cuda"] else ""
        on = f"{machine['devices']} x {machine['device']}{cuda}, torch {machine['torch']}, Python {machine['python']}"
        details = " ".join(f"{each.name} {each.status}: {each.sentence}." for each in self.outcomes)
        return f"capi {machine['capi']} selftest {'passed' if self.passed else 'FAILED'} on {on}. {details}"


class _Skipped(Exception):  # noqa: N818 - no error
    """A check that this machine has no use for; the message says why."""


SentenceAndNumbers = tuple[str, dict[str, Any]]


def selftest(
    *, only: Sequence[str] = (), device: torch.device | str | None = None, console: Console | None = None
) -> SelfTest:
    """Check on this machine what training needs: install, exactness, speed, memory, compiler, resume, all GPUs.

    Nothing is left on the disk. A check that fails does not keep the others from running; `only` names those to run.
    """
    for name in only:
        if name not in CHECKS:
            raise CapiError(f'there is no check "{name}"{nearest(name, CHECKS)} (there are {", ".join(CHECKS)})')
    chosen, console = choose_device(device), console or default_console()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="capi_selftest_") as folder:
        machine = _CheckedMachine(chosen, Path(folder))
        names = [name for name in CHECKS if name in (only or CHECKS)]
        with TaskProgress("selftest", len(names), console) as progress:
            for name in names:
                outcomes.append(_outcome(name, getattr(machine, name)))
                if console:
                    line = outcomes[-1]
                    console.print(f"{line.status:8} {line.name}: {line.sentence} ({line.seconds:.1f} s)", markup=False)
                progress.advance()
        return SelfTest(machine.described(), outcomes)


def _outcome(name: str, check: Callable[[], SentenceAndNumbers]) -> CheckOutcome:
    start, status = time.perf_counter(), "passed"
    numbers: dict[str, Any] = {}
    try:
        sentence, numbers = check()
    except _Skipped as reason:
        status, sentence = "skipped", str(reason)
    except Exception as error:
        # Whatever goes wrong belongs into the report, and the other checks are worth running.
        status, sentence = "failed", hide_path(" ".join(str(error).split()))[-600:]
        if not isinstance(error, CapiError):
            sentence, numbers = f"{type(error).__name__}: {sentence}", {"where": _where(error)}
    return CheckOutcome(name, status, sentence, round(time.perf_counter() - start, 2), numbers)  # type: ignore[arg-type]


def _where(error: BaseException) -> list[str]:
    """The lines of this package that an error came through."""
    lines, trace, package = [], error.__traceback__, Path(__file__).parents[1]
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.is_relative_to(package):
            lines.append(f"capi/{file.relative_to(package)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return lines


class _CheckedMachine:
    """The checks of one device, and where they may write."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.large = device.type == "cuda"
        self.count = torch.cuda.device_count() if self.large else 1

    def described(self) -> dict[str, Any]:
        releases = versions()
        return {
            "capi": releases["capi"],
            "torch": torch.__version__,
            "python": releases["python"],
            "cuda": torch.version.cuda if self.large else None,
            "system": f"{platform.system()} {platform.machine()}",
            "device": torch.cuda.get_device_name(self.device) if self.large else self.device.type,
            "devices": self.count,
            "memory": memory_of(self.device),
            "threads": torch.get_num_threads(),
            "versions": releases,
            "date": time.strftime("%Y-%m-%d"),
        }

    def install(self) -> SentenceAndNumbers:
        """Packages in the range they are tested in, and a product on the device beside one in float64 on the CPU."""
        if wrong := [line for line in metadata.requires("capi") or [] if "extra" not in line and not _is_met(line)]:
            raise CapiError(f"installed are other releases than {', '.join(wrong)}: install the package again")
        left, right = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        there = (left.to(self.device, torch.float32) @ right.to(self.device, torch.float32)).cpu().double()
        apart = float((there - left @ right).norm() / (left @ right).norm())
        if not apart < LOSSES_APART:
            raise CapiError(f"a product on {self.device} is {apart:.1e} from that on the CPU in float64")
        rounded = self.large and torch.cuda.is_bf16_supported(including_emulation=False)
        gib = memory_of(self.device) / 2**30
        said = f"torch {torch.__version__}, {gib:.0f} GiB, bfloat16 {'yes' if rounded else 'no'}"
        return said, {"product_apart": apart, "bfloat16": rounded}

    def exactness(self) -> SentenceAndNumbers:
        """Steps on the device beside the same on the CPU; a CPU goes the way of an accelerator instead."""
        config = load_config("mini", [*_TINY, "optimization.batch_size=16", *_RUN[2:], "clustering.precision=float32"])
        wanted, weights = _trained(config, torch.device("cpu"))
        with nullcontext() if is_accelerator(self.device) else as_on_accelerator():
            losses, ours = _trained(config, self.device)
        start = _weights(build_learner(config))
        apart = float((ours - weights).norm() / (weights - start).norm())
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        numbers = {"weights_apart": apart, "losses_apart": worst, "steps": _STEPS}
        if not (apart < WEIGHTS_APART and worst < LOSSES_APART):
            raise CapiError(f"after {_STEPS} steps the weights are {apart:.1e} apart and the losses {worst:.1e}")
        said = f"{_STEPS} steps in float32 leave the weights {apart:.1e} apart and the losses {worst:.1e}"
        if not (self.large and torch.cuda.is_bf16_supported(including_emulation=False)):
            return said, numbers
        rounded = config.model_copy(update={"run": config.run.model_copy(update={"precision": "bfloat16"})})
        numbers["bfloat16_apart"] = abs(_trained(rounded, self.device, 1)[0][0] / wanted[0] - 1)
        if not numbers["bfloat16_apart"] < ROUNDED_APART:
            raise CapiError(f"in bfloat16 the first loss is {numbers['bfloat16_apart']:.1e} from that in float32")
        return f"{said}; in bfloat16 the loss is {numbers['bfloat16_apart']:.1e} apart", numbers

    @cached_property
    def gpu(self) -> Gpu:
        """The device with the peak of its data sheet, where there is one."""
        name = torch.cuda.get_device_name(self.device) if self.large else ""
        gpu = gpu_of_device(name, memory_of(self.device))
        # Two boards of one name may differ in memory.
        return replace(gpu, memory=float(memory_of(self.device))) if gpu else this_machine(self.device)

    @cached_property
    def measured(self) -> dict[str, Measured]:
        """Real steps, by recipe: on a GPU with as many images as fit, 256 at most."""
        if not self.large:
            small = ["optimization.batch_size=48", "model.width=192", "model.heads=3", "model.depth=6"]
            return {"mini": measure(load_config("mini", small), lambda: self.gpu, self.device)}
        measurements = {}
        for recipe in ("vits16", "vitl14"):
            room = plan_run(load_config(recipe, ["optimization.batch_size=8"]), self.gpu).largest_images
            if images := min(room * 3 // 4, 256) // 8 * 8:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
                config = load_config(recipe, [f"optimization.batch_size={images}"])
                measurements[recipe] = measure(config, lambda: self.gpu, self.device, rounds=5)
        if not measurements:
            raise _Skipped("8 images of no recipe fit the memory")
        return measurements

    def step(self) -> SentenceAndNumbers:
        """The best of a few steps without torch.compile, and the share of the peak that their required FLOP are."""
        peak = "a large product" if self.gpu.measured else "the data sheet"
        numbers = {
            name: {"images": each.plan.batch_size, "seconds": each.seconds, "mfu": each.mfu}
            for name, each in self.measured.items()
        }
        said = "; ".join(
            f"{name} {each['images'] / each['seconds']:.0f} images/s with {each['images']} at once, "
            f"{each['mfu']:.0%} of the peak of {peak}"
            for name, each in numbers.items()
        )
        return said, numbers

    def memory(self) -> SentenceAndNumbers:
        """The peak of those steps beside `capi plan`."""
        numbers = {
            name: {"measured": each.peak_bytes, "planned": each.plan.memory.peak}
            for name, each in self.measured.items()
            if each.peak_bytes is not None
        }
        if not numbers:
            raise _Skipped("the system does not tell the peak of a process")
        said = "; ".join(
            f"{name} took {each['measured'] / 2**30:.2f} GiB where {each['planned'] / 2**30:.2f} were planned"
            for name, each in numbers.items()
        )
        if any(abs(each["measured"] / each["planned"] - 1) > MEMORY_APART for each in numbers.values()):
            raise CapiError(f"{said}: more than {MEMORY_APART:.0%} apart")
        return said, numbers

    def compile(self) -> SentenceAndNumbers:
        """Compiled networks beside plain ones: the same losses, and how much faster they are."""
        if warning := compiler_warning(self.device):
            if self.large:
                raise CapiError(warning)
            raise _Skipped(warning)
        recipe = ["vits16", "optimization.batch_size=64"] if self.large else ["mini", *_TINY, *_RUN[:1]]
        config = load_config(recipe[0], [*recipe[1:], "model.stochastic_depth=0.0"])
        learners = [build_learner(config, self.device) for _ in range(2)]
        start = time.perf_counter()
        compile_networks(learners[1])
        batch = _batch(config, self.device)
        plain, compiled = ([_loss(learner, batch, step) for step in range(_STEPS)] for learner in learners)
        ready = time.perf_counter() - start
        worst = max(abs(a - b) / abs(b) for a, b in zip(compiled, plain, strict=True))
        allowed = ROUNDED_APART if learners[0].precision == torch.bfloat16 else LOSSES_APART
        if not worst < allowed:
            raise CapiError(f"compiled networks lose {worst:.1e} more or less than plain ones")
        times = [
            measure_step(learner, [batch], PatchGrid(*config.grid).size, 3, lambda: None).seconds
            for learner in learners
        ]
        numbers = {"losses_apart": worst, "speedup": times[0] / times[1], "seconds_to_compile": ready}
        return f"{numbers['speedup']:.2f} times as fast after {ready:.0f} s, losses {worst:.1e} apart", numbers

    @cached_property
    def images(self) -> Path:
        folder, generator = self.folder / "images", np.random.default_rng(0)
        folder.mkdir()
        for number in range(24):
            Image.fromarray(generator.integers(0, 255, (40, 36, 3), dtype=np.uint8)).save(folder / f"{number:02d}.png")
        return folder

    @cached_property
    def straight(self) -> Tensor:
        """The state of a run of one process that nothing interrupts."""
        out = self.folder / "straight"
        run.pretrain(load_config("mini", [*_TINY, *_RUN, *_QUIET]), data=self.images, out=out, device=self.device)
        return _state(out)

    def resume(self) -> SentenceAndNumbers:
        """A run that is stopped half-way and resumed, beside one that was not."""
        out, config = self.folder / "resumed", load_config("mini", [*_TINY, *_RUN, *_QUIET])

        def stop(record: Mapping[str, float | int | None]) -> None:
            if record["step"] == 4:
                raise CapiError("stopped")

        try:
            run.pretrain(config, data=self.images, out=out, device=self.device, loggers=[stop])
        except CapiError as error:
            if error.args != ("stopped",):
                raise
        done = run.pretrain(config, data=self.images, out=out, device=self.device, resume=True)
        apart = _apart(_state(done.path), self.straight)
        # A CPU computes the same bits; on a GPU sums over indices may come in any order.
        if apart > (LOSSES_APART if self.large else 0):
            raise CapiError(f"a run that was resumed at step 4 of 6 ends {apart:.1e} from one that was not stopped")
        same = "bit by bit" if not apart else f"but for {apart:.1e}"
        return f"a run resumed at step 4 of 6 is the uninterrupted one {same}", {"apart": apart}

    def processes(self) -> SentenceAndNumbers:
        """A sharded run over all GPUs (two processes of a CPU) beside one process: its weights, and its speed."""
        if self.device.type == "mps" or (self.large and self.count == 1):
            raise _Skipped("there is one device, and each process needs its own")
        many, out = (self.count if self.large else 2), self.folder / "together"
        overrides = [*_TINY, *_RUN, *_QUIET, f"optimization.batch_size={-(-8 // many) * many}"]
        if many > 2:
            # The other check's run has another batch.
            alone = self.folder / "alone"
            run.pretrain(load_config("mini", overrides), data=self.images, out=alone, device=self.device)
            wanted = _state(alone)
        else:
            wanted = self.straight
        command = ["capi", "pretrain", "mini", *overrides, f"--data={self.images}", f"--out={out}"]
        self._together(many, [*command, f"--device={self.device.type}"])
        apart = _apart(_state(out), wanted)
        if apart > LOSSES_APART:
            raise CapiError(f"the weights of {many} processes are {apart:.1e} from those of one")
        recipe = ["vits16"] if self.large else ["mini", *_TINY]
        images = 64 if self.large else 8
        config = load_config(recipe[0], [*recipe[1:], f"optimization.batch_size={images * many}"])
        file, kind = self.folder / "speed.yaml", self.device.type
        file.write_text(dump_config(config), encoding="utf-8")
        # The gloo of torch 2.9 prints while it connects.
        speeds = [
            float(self._together(number, ["capi.train.selftest", str(file), kind, str(images * number)]).split()[-1])
            for number in (1, many)
        ]
        efficiency = speeds[1] / speeds[0] / many
        numbers = {"processes": many, "apart": apart, "images_per_second": speeds, "efficiency": efficiency}
        return (
            f"the weights of {many} processes are {apart:.1e} from those of one; "
            f"{speeds[1]:.0f} images/s in place of {speeds[0]:.0f}, {efficiency:.0%} of {many} times as many",
            numbers,
        )

    def _together(self, processes: int, arguments: list[str]) -> str:
        """What a module prints that so many processes run."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        try:
            done = subprocess.run(  # noqa: S603 - our own command
                [*launcher, "-m", *arguments], capture_output=True, text=True, check=False, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise CapiError(f"{counted(processes, 'process')} gave no result in {_SECONDS} s") from None
        if done.returncode:
            said = re.findall(r"^.*Error: .*$", done.stderr, re.MULTILINE) or [done.stderr[-300:]]
            raise CapiError(f"{counted(processes, 'process')} ended with code {done.returncode}: {said[0]}")
        return done.stdout


def _is_met(requirement: str) -> bool:
    """Whether a package is installed in the range that stands behind its name, as `torch>=2.9,<3`."""
    name, bounds = re.match(r"[\w.-]+", requirement)[0], re.findall(r"(>=|<)([\d.]+)", requirement)  # type: ignore[index]
    installed = _release(metadata.version(name))
    return all((installed >= _release(limit)) == (sign == ">=") for sign, limit in bounds)


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _batch(config: Config, device: torch.device) -> Any:
    height, width = config.data.height_and_width
    shape = (config.optimization.batch_size, config.model.channels, height, width)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return masked_batch(config, images.to(device), 0)


def _loss(learner: Learner, batch: Any, step: int) -> float:
    return float(train_step(learner, [batch], step).student_loss)


def _trained(config: Config, device: torch.device, steps: int = _STEPS) -> tuple[list[float], Tensor]:
    """The losses of a few steps, and the weights after them."""
    learner, batch = build_learner(config, device), _batch(config, device)
    losses = [_loss(learner, batch, config.optimization.warmup_steps + step) for step in range(steps)]
    return losses, _weights(learner)


def _weights(learner: Learner) -> Tensor:
    parameters = (*learner.student.parameters(), *learner.target.parameters())
    return torch.cat([value.detach().flatten().cpu() for value in parameters])


def _state(path: Path) -> Tensor:
    """All numbers of the newest checkpoint, in one order."""
    checkpoints = Checkpoints(path / "checkpoints")
    stored = StoredTensors(checkpoints.path(max(checkpoints.steps())))
    return torch.cat([value.float().flatten() for _, value in sorted(stored.take(stored.weightless).items())])


def _apart(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


def main(path: str, device: str, images: str) -> None:
    """Started once for each process: images a second of all of them together."""
    config, chosen = load_config(path, [f"optimization.batch_size={images}"]), choose_device(device)
    with joined(chosen) as processes:
        whole = build_learner(config, chosen) if processes.is_main else None
        learner = distribute(config, whole, processes, chosen) if processes.size > 1 else whole
        assert learner is not None
        grid = PatchGrid(*config.grid)
        batch = random_batch(
            masks=mask_sampler(config),
            grid=grid,
            image_shape=(config.model.channels, *config.data.height_and_width),
            batch_size=config.optimization.batch_size // processes.size,
            seed=processes.rank,
            device=chosen,
        )
        seconds = measure_step(learner, [batch], grid.size, 5, lambda: None).seconds
        if processes.is_main:
            print(config.optimization.batch_size / seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
