"""`python -m benchmarks.accuracy.from_scratch`: HAT+CSI against HAT without pre-training, C10-5T shortened.

A ResNet-18 for 32x32 images learns CIFAR-10 in five tasks of two classes, with the losses and masks of the product.
Both methods make the same number of steps, with the same number of augmented rows each. Shortened against the paper:
narrow layers, few images and few steps, so that it runs on one core in minutes: the figures compare two methods.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.accuracy.cells import commit
from benchmarks.accuracy.data import ImageSet
from benchmarks.accuracy.metrics import Floats, Step, measure
from benchmarks.machine import machine
from models.images import read_image
from models.inference.model import Head
from models.inference.rotations import ROTATIONS
from models.network import hat
from trainer.learning.head_solver import HeadProblem, solve_heads
from trainer.learning.methods.csi import contrastive_loss, shifted
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings, Recipe

TASKS, CLASSES = 5, 2
TEST_IMAGES = 100  # per class
PROJECTION = 64
MOMENTUM, RIDGE = 0.9, 0.1
SPARSITY = Recipe().sparsity  # lambda of Eq. hat_reg
ROWS = 128  # of a step: 16 images x 2 views x 4 rotations with CSI


class MaskedConv(nn.Module):
    """A convolution whose output channels the masks of the tasks choose; every task has its own norm."""

    def __init__(self, sources: Sequence[MaskedConv], inputs: int, outputs: int, size: int, stride: int) -> None:
        """`sources` are those whose outputs it reads; none: the image."""
        super().__init__()
        self.sources, self.stride = list(sources), stride
        self.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty(outputs, inputs, size, size)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(TASKS))
        self.embeddings = nn.ParameterList(torch.randn(outputs) for _ in range(TASKS))
        self.used = torch.zeros(outputs)

    def mask(self, task: int, s: float | None) -> Tensor:
        """With the temperature s; hard without it."""
        embedding = self.embeddings[task]
        return hat.hard_mask(embedding) if s is None else hat.soft_mask(embedding, s)

    def forward(self, x: Tensor, task: int, s: float | None) -> Tensor:
        y = F.conv2d(x, self.weight, stride=self.stride, padding=self.weight.shape[-1] // 2)
        out: Tensor = self.norms[task](y) * self.mask(task, s)[:, None, None]
        return out

    @property
    def protected(self) -> Tensor:
        """The weights between a used input and a used output (Eq. grad_mod): (outputs, inputs, 1, 1)."""
        read = torch.stack([source.used for source in self.sources]).amax(0) if self.sources else torch.ones(1)
        return ((self.used[:, None] * read) > 0)[:, :, None, None]


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, stream: Sequence[MaskedConv], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = MaskedConv(stream, inputs, outputs, 3, stride)
        self.second = MaskedConv([self.first], outputs, outputs, 3, 1)
        self.shortcut = MaskedConv(stream, inputs, outputs, 1, stride) if inputs != outputs else None
        self.stream = [self.second, self.shortcut] if self.shortcut else [*stream, self.second]

    def forward(self, x: Tensor, task: int, s: float | None) -> Tensor:
        y = self.second(F.relu(self.first(x, task, s)), task, s)
        return F.relu(y + (self.shortcut(x, task, s) if self.shortcut else x))


class ResNet18(nn.Module):
    """(n, 3, 32, 32) -> features (n, 8 width) under the masks of a task."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = MaskedConv([], 3, width, 3, 1)
        stream, inputs, blocks = [self.stem], width, []
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            for step in (stride, 1):
                blocks.append(Block(stream, inputs, outputs, step))
                stream, inputs = blocks[-1].stream, outputs
        self.blocks, self.dimensions = nn.ModuleList(blocks), inputs

    def forward(self, x: Tensor, task: int, s: float | None = None) -> Tensor:
        x = F.relu(self.stem(x, task, s))
        for block in self.blocks:
            x = block(x, task, s)
        return x.mean(dim=(2, 3))

    @property
    def convolutions(self) -> list[MaskedConv]:
        return [module for module in self.modules() if isinstance(module, MaskedConv)]


class Images(NamedTuple):
    pixels: Tensor  # (n, 3, 32, 32)
    labels: NDArray[np.int64]


class Budget(NamedTuple):
    """Of a task, the same for both methods."""

    epochs: int
    steps: int  # per epoch
    rate: float


def augmented(x: Tensor, rng: torch.Generator) -> Tensor:
    """Random crops of 54 to 100 % of the area, mirrored half of the time, with other brightness and contrast."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(x), generator=rng)

    size = uniform(0.54, 1.0).sqrt()
    mirrored = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    place = torch.zeros(len(x), 2, 3)
    place[:, 0, 0], place[:, 1, 1] = size * mirrored, size
    place[:, 0, 2], place[:, 1, 2] = (1 - size) * uniform(-1, 1), (1 - size) * uniform(-1, 1)
    cut = F.grid_sample(x, F.affine_grid(place, list(x.shape), align_corners=False), align_corners=False)
    mean = cut.mean(dim=(1, 2, 3), keepdim=True)
    return (cut - mean) * uniform(0.6, 1.4)[:, None, None, None] + mean + uniform(-0.3, 0.3)[:, None, None, None]


def turned(x: Tensor) -> Tensor:
    """The rows in all rotations: first the upright ones, then those turned once, ..."""
    return torch.cat([torch.rot90(x, turns, (2, 3)) for turns in range(ROTATIONS)])


def train(network: ResNet18, task: int, images: Images, contrastive: bool, budget: Budget, seed: int) -> Head:
    """Learn the task without changing what earlier ones use; returns its head."""
    rng = torch.Generator().manual_seed(seed + task)
    outputs = PROJECTION if contrastive else CLASSES
    top = nn.Linear(network.dimensions, outputs)
    convolutions = network.convolutions
    own = [p for conv in convolutions for p in (conv.weight, conv.embeddings[task], *conv.norms[task].parameters())]
    optimiser = torch.optim.SGD([*own, *top.parameters()], lr=budget.rate, momentum=MOMENTUM)
    rows = ROWS // (2 * ROTATIONS) if contrastive else ROWS
    network.train()
    for _ in range(budget.epochs):
        for step in range(budget.steps):
            chosen = torch.randint(len(images.labels), (rows,), generator=rng)
            x, y = images.pixels[chosen], torch.from_numpy(images.labels)[chosen]
            if contrastive:
                x = turned(torch.cat([augmented(x, rng), augmented(x, rng)]))
                y = torch.cat([y + shifted(0, turns, CLASSES) for turns in range(ROTATIONS) for _ in range(2)])
            else:
                x = augmented(x, rng)
            s = hat.temperature(step, budget.steps)
            out = top(network(x, task, s))
            loss = contrastive_loss(out, y, Recipe().contrast_temperature) if contrastive else F.cross_entropy(out, y)
            masks, used = [conv.mask(task, s) for conv in convolutions], [conv.used for conv in convolutions]
            optimiser.zero_grad()
            torch.autograd.backward(loss + SPARSITY * hat.sparsity(masks, used))
            before = [conv.weight.detach().clone() for conv in convolutions]
            optimiser.step()
            with torch.no_grad():
                for conv, old in zip(convolutions, before, strict=True):
                    conv.weight.copy_(torch.where(conv.protected, old, conv.weight))
                    conv.embeddings[task].clamp_(-hat.E_CLIP, hat.E_CLIP)
    for conv in convolutions:
        conv.used = torch.maximum(conv.used, conv.mask(task, None).detach())
    _fit_norms(network, task, turned(images.pixels) if contrastive else images.pixels)
    if not contrastive:
        return Head(top.weight.detach().numpy(), top.bias.detach().numpy())
    return step_two(network, task, images, rng)


def _fit_norms(network: ResNet18, task: int, pixels: Tensor) -> None:
    """Mean and variance of the norms under the hard masks; those of the training are of soft ones."""
    for conv in network.convolutions:
        norm = conv.norms[task]
        assert isinstance(norm, nn.BatchNorm2d)
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all rows
    network.train()
    with torch.no_grad():
        for part in torch.split(pixels, 256):
            network(part, task)


def step_two(network: ResNet18, task: int, images: Images, rng: torch.Generator) -> Head:
    """A linear classifier over classes and rotations, on the features of plain and augmented images."""
    views = [turned(images.pixels), turned(augmented(images.pixels, rng))]
    z = np.concatenate([features(network, view, task) for view in views])
    y = np.array(
        [shifted(label, turns, CLASSES) for _ in views for turns in range(ROTATIONS) for label in images.labels]
    )
    outputs, length = ROTATIONS * CLASSES, float((z**2).sum(axis=1).mean())
    start = Head(np.zeros((outputs, z.shape[1]), np.float32), np.zeros(outputs, np.float32))
    ridge = RIDGE * length / len(images.labels)
    (head,) = solve_heads([HeadProblem(start, z, y, np.full(len(y), 1 / len(y)), ridge)])
    return head


def features(network: ResNet18, pixels: Tensor, task: int) -> NDArray[np.float32]:
    """Under the hard masks of a learned task."""
    network.eval()
    with torch.inference_mode():
        out: NDArray[np.float32] = torch.cat([network(part, task) for part in torch.split(pixels, 256)]).numpy()
    return out


def scores(network: ResNet18, heads: Sequence[Head], pixels: Tensor, contrastive: bool) -> Floats:
    """The logits of all tasks side by side; with CSI, the mean over the rotations (Eq. ensemblelogit)."""
    columns = []
    for task, head in enumerate(heads):
        if not contrastive:
            columns.append(features(network, pixels, task) @ head.weight.T + head.bias)
            continue
        own = [
            features(network, torch.rot90(pixels, turns, (2, 3)), task) @ weight.T + bias
            for turns, (weight, bias) in enumerate(
                zip(np.split(head.weight, ROTATIONS), np.split(head.bias, ROTATIONS), strict=True)
            )
        ]
        columns.append(np.mean(own, axis=0))
    return np.concatenate(columns, axis=1).astype(np.float64)


def load(path: Path, per_class: int, seed: int) -> tuple[list[Images], Images]:
    """(the training images of each task, test images of all classes in learning order)"""
    source, rng = ImageSet.load(path), np.random.default_rng(seed)
    order = rng.permutation(len(source.classes)).tolist()

    def read(keys: Sequence[str]) -> Tensor:
        pixels = np.stack([np.asarray(read_image(source.read(key), hint=32), np.float32) for key in keys])
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous() / 127.5 - 1

    def of(split: str, classes: Sequence[int], count: int) -> Images:
        keys = [key for c in classes for key in source.pick(split, c, count, rng)]
        return Images(read(keys), np.repeat(np.arange(len(classes)), count))

    tasks = [of("train", order[start : start + CLASSES], per_class) for start in range(0, len(order), CLASSES)]
    return tasks, of("test", order, TEST_IMAGES)


def run(
    tasks: Sequence[Images], test: Images, contrastive: bool, width: int, budget: Budget, seed: int
) -> dict[str, Any]:
    """Learn all tasks; what the paper reports of a method, in percent."""
    torch.manual_seed(seed)
    network, heads, started = ResNet18(width), list[Head](), time.process_time()
    for number, images in enumerate(tasks):
        heads.append(train(network, number, images, contrastive, budget, seed))
        print(f"contrastive {contrastive}: task {number + 1}, {time.process_time() - started:.0f} s", file=sys.stderr)
    seconds = time.process_time() - started
    every, task_of_class = scores(network, heads, test.pixels, contrastive), np.repeat(np.arange(len(tasks)), CLASSES)
    steps = []  # no task changes another one, so the scores after each task are the first columns of the last ones
    for learned in range(CLASSES, len(task_of_class) + 1, CLASSES):
        own = every[:, :learned]
        steps.append(Step(own, task_of_class[:learned], own.max(axis=1)))
    result = measure(steps, test.labels)
    figures = result.figures()
    chosen = {name: figures[name] for name in ("last", "aia", "ai_auc", "within_task")}
    chosen["task_auc"] = float(np.mean([auc for auc in result.task_auc if auc is not None]))
    used = float(np.mean([conv.used.mean() for conv in network.convolutions]))
    return {name: round(100 * (value or 0.0), 1) for name, value in chosen.items()} | {
        "used_channels": round(100 * used, 1),
        "seconds": round(seconds),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.from_scratch", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage (paper: 64)")
    parser.add_argument("--per-class", type=int, default=200, help="training images per class (paper: 5000)")
    parser.add_argument("--epochs", type=int, default=2, help="rises of the masks' temperature per task")
    parser.add_argument("--steps", type=int, default=20, help=f"steps of {ROWS} rows per epoch")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    configure_torch(LearnerSettings(threads=1))
    tasks, test = load(args.data / "cifar10.safetensors", args.per_class, args.seed)
    budget = Budget(args.epochs, args.steps, args.rate)
    found = {
        name: run(tasks, test, contrastive, args.width, budget, args.seed)
        for name, contrastive in (("hat", False), ("hat-csi", True))
    }
    leads = {name: round(found["hat-csi"][name] - found["hat"][name], 1) for name in ("last", "task_auc", "ai_auc")}
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "settings": {"width": args.width, "per_class": args.per_class, **budget._asdict(), "seed": args.seed},
        "methods": found,
        "claims": {f"HAT+CSI above HAT, {name}": {"lead": lead, "held": lead > 0} for name, lead in leads.items()},
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(args.out.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
