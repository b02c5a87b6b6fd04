"""How tasks are learned: the paper's settings where they suit tens of images a class, measured ones elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class LearnerSettings(BaseSettings):
    """Settings of the trainer, each from the environment variable OPENWORLD_<NAME>."""

    model_config = SettingsConfigDict(env_prefix="OPENWORLD_", env_ignore_empty=True, extra="ignore", frozen=True)

    backbone: str | None = Field(
        None, description="timm model name; empty: DeiT-S from the hub, else EfficientNet-Lite0"
    )
    backbone_weights: Path | None = Field(None, description="safetensors file with that model's weights")
    adapted_blocks: int | None = Field(
        None, ge=1, description="blocks with adapters; empty: all (transformer), 1 (CNN)"
    )
    bottleneck: int = Field(64, ge=1, description="bottleneck units an adapter starts with, and grows by")
    grow_when_used: float = Field(0.8, gt=0, le=1, description="grow the adapters when a layer has this share taken")
    memory: int = Field(500, ge=1, description="images kept for replay, shared equally by all classes")
    epochs: int = Field(10, ge=1, description="passes over a new task's images")
    min_steps: int = Field(20, ge=1, description="steps an epoch at least: a small task is passed over more than once")
    learning_rate: float = Field(0.005, gt=0, description="SGD learning rate of a new task")
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    batch: int = Field(16, ge=1, description="new images a step; as many replayed ones join them")
    sparsity: float = Field(0.75, ge=0, description="lambda of HAT's sparsity loss")
    replay: bool = Field(True, description="train with the memory as `ood` (off: plain HAT, for comparison)")
    views: int = Field(1, ge=1, le=8, description="views of each training image: the plain one and augmented ones")
    back_update: bool = Field(True, description="train earlier heads on the new task's images as `ood`")
    back_epochs: int = Field(10, ge=1)
    back_learning_rate: float = Field(0.01, gt=0)
    back_batch: int = Field(16, ge=2)
    back_drawn: float = Field(0.5, ge=0, le=1, description="share of a head's own side drawn from its class Gaussians")
    rule: Literal["paper", "product"] = Field("product", description="how evidence becomes an answer")
    accept: float = Field(0.95, gt=0.5, lt=1, description="share of known images that the threshold accepts")
    hold_out: float = Field(0.1, gt=0, lt=0.5, description="share of a task held out for calibration and the gate")
    hold_out_from: int = Field(50, ge=2, description="with fewer images in a class, cross-fit instead of holding out")
    folds: int = Field(3, ge=2, description="folds of the cross-fit")
    gate_accuracy: float = Field(0.15, ge=0, le=1, description="largest accepted loss of old tasks' accuracy")
    gate_auc: float = Field(0.10, ge=0, le=1, description="largest accepted loss of old tasks' AUC")
    seed: int = Field(0, description="the same seed, batch and parent give the same version")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, description="CPU threads of the trainer")
