"""Messages between two ranks of a process group: JSON values and tensors, each tensor on its own device.

Tensors in main memory travel by gloo, those on GPUs by NCCL.
"""

import json
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.learning.processes import Tensors


class Message(NamedTuple):
    values: dict[str, Any]
    tensors: Tensors


def send(message: Message, rank: int) -> None:
    shapes = {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type)
        for name, tensor in message.tensors.items()
    }
    header = torch.tensor(list(json.dumps([message.values, shapes]).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([len(header)]), rank)
    dist.send(header, rank)
    for tensor in message.tensors.values():
        if tensor.numel():
            dist.send(tensor.detach().contiguous(), rank)


def receive(rank: int) -> Message:
    header = _received(torch.empty(int(_received(torch.empty(1, dtype=torch.int64), rank)), dtype=torch.uint8), rank)
    values, shapes = json.loads(header.numpy().tobytes())
    tensors = {}
    for name, (kind, shape, device) in shapes.items():
        tensor = torch.empty(shape, dtype=getattr(torch, kind), device=device)
        tensors[name] = _received(tensor, rank) if tensor.numel() else tensor
    return Message(values, tensors)


def _received(target: Tensor, rank: int) -> Tensor:
    dist.recv(target, rank)
    return target
