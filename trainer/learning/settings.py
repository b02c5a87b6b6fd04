"""Settings of learning: the paper's values where they suit tens of images per class, measured ones elsewhere."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from models.versions.keep import SETTING as KEEP_SETTING
from models.versions.keep import Keep
from tasks.settings import KEEP, Device, Settings, shared
from trainer.learning.prior import Prior

MethodName = Literal["more", "hat-csi", "sup-csi"]
DEFAULT_METHOD: MethodName = "more"
CASCADE = 2  # networks per image: with 20 tasks within 0.5 points of all (benchmarks/accuracy/cascade.py)
REPLAYING_METHODS: tuple[MethodName, ...] = ("more",)  # need features of earlier tasks; known here without torch


class Recipe(BaseModel):
    """Hyperparameters without an environment variable; benchmarks and tests pass them to the constructor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    windowed: bool = True  # a task chooses from `bottleneck` free units and as many used ones; paper: from all
    grow_when_used: float = Field(0.8, gt=0, le=1)  # otherwise: grow when a layer has this share of units in use
    # Per epoch: a task of few images is passed over more than once. None: 5 with replay, 20 without; paper: 20.
    min_steps: int | None = Field(None, ge=1)
    # Where MORE's network starts, and how it is trained: at the closed form by Adam, or at random by SGD. None: that of
    # a transformer at the closed form, that of a CNN at random; paper: at random.
    start: Literal["closed form", "random"] | None = None
    adam_rate: float = Field(0.002, gt=0)
    sgd_rate: float = Field(0.005, gt=0)
    start_ridge: float = Field(0.1, gt=0)  # of the head in closed form, as `back_ridge`
    momentum: float = Field(0.9, ge=0, lt=1)  # of SGD
    weight_decay: float = Field(0.0, ge=0)
    sparsity: float = Field(0.01, ge=0)  # lambda of HAT's sparsity loss; paper: 0.75
    mask_rate: float = Field(30.0, gt=0)  # learning rate of the masks, relative to that of the weights; paper: 1
    anneal: Literal["linear", "geometric"] = "linear"  # how the masks' s rises within an epoch, as in the paper
    replay: bool = True  # train with the replay memory as `ood`; off is plain HAT
    back_update: bool = True  # train earlier heads on the new task's images as `ood`
    contrastive: bool = True  # CSI, of the methods that have it; off is plain HAT or SupSup, with cross-entropy
    contrast_temperature: float = Field(0.5, gt=0)  # tau of the contrastive loss
    contrast_rate: float = Field(60.0, gt=0)  # learning rate of the contrastive loss, relative to cross-entropy
    csi_ridge: float = Field(0.03, gt=0)  # of the heads of CSI, over the number of images and per squared length
    supermask_units: int = Field(64, ge=1)  # bottleneck units of the fixed weights
    supermask_kept: float = Field(0.32, gt=0, lt=1)  # share of the weights that a mask keeps, as in the paper
    supermask_scale: float = Field(0.1, gt=0)  # of the fixed weights of an adapter's second layer; paper: 1
    score_rate: float = Field(30.0, gt=0)  # learning rate of Edge Popup's scores, relative to that of the weights
    back_heads: int | None = Field(4, ge=4)  # heads that a new task updates at most, one of them in turn; paper: all
    back_solver: Literal["convex", "sgd"] = "convex"  # paper: sgd, with the next two and `back_epochs`
    back_learning_rate: float = Field(0.01, gt=0)
    back_batch: int = Field(16, ge=2)
    # Convex: the ridge toward the previous head, over the number of images and per squared length of a feature.
    back_ridge: float = Field(0.1, gt=0)
    back_drawn: float = Field(0.5, ge=0, le=1)  # share of a head's own images drawn from its class Gaussians
    # Of kept images, per back-update of a head and to fit the rule: every network may run for each of them. Paper: all.
    network_images: int | None = Field(300, ge=1)
    # The refined feature of a CNN (trainer/learning/refinement.py): its adapters, and the bounds of its training.
    refine: bool = True
    refined_units: int = Field(32, ge=1)
    refined_start: float = Field(0.7, gt=0)  # deviation of the first layers, times the root of their inputs
    refined_rate: float = Field(0.0015, gt=0)
    refined_decay: float = Field(0.001, ge=0)
    refined_epochs: int = Field(20, ge=1)  # passes over the kept images at most
    refined_passes: int = Field(1000, ge=1)  # images in all of them at most
    refined_smoothing: float = Field(0.1, ge=0, lt=1)  # of the labels
    refined_window: float = Field(0.7, gt=0, le=1)  # least side of a step's window of the maps, by their shorter side
    refined_images: int = Field(2000, ge=1)  # kept images at most, as many of each class
    hold_out: float = Field(0.2, gt=0, lt=0.5)  # share of a class that no network is trained on, for calibration
    networks: Literal["if they pay", "always"] = "if they pay"  # whether what was trained counts in the rule
    cascade_share: float = Field(0.99, gt=0, le=1)  # of left-out images, whose own network the cascade's margin runs
    sure_share: float = Field(0.98, gt=0, le=1)  # of left-out images that run no network, whose class is right
    calibration_images: int = Field(1000, ge=1)  # used in one calibration at most, the same number of each class
    prior: Prior = Prior()


# The paper's method exactly: rule and training, with a replay memory of a fixed total size.
PAPER: dict[str, Any] = {
    "rule": "paper",
    "epochs": 20,
    "bottleneck": 64,
    "replay_size": 200,
    "recipe": Recipe(
        windowed=False,
        start="random",
        min_steps=20,
        sparsity=0.75,
        mask_rate=1.0,
        anneal="linear",
        back_heads=None,
        back_solver="sgd",
        back_drawn=0.0,
    ),
}


class LearnerSettings(Settings):
    """How tasks are learned. Those that change what is learned are recorded in every version."""

    model_config = SettingsConfigDict(env_prefix="OPENWORLD_TRAIN_")

    preset: Literal["default", "paper"] = Field(
        "default", description="paper: the paper's rule, training and fixed total of replayed images"
    )
    method: MethodName | None = Field(
        None,
        description="how a new data folder learns: more replays earlier images; hat-csi and sup-csi need none, see "
        "[method.md](method.md); empty: what the folder records, more in a new one",
    )
    backbone: str | None = shared(
        "OPENWORLD_BACKBONE", None, "timm model name; empty: DeiT-S from the hub, else EfficientNet-Lite0"
    )
    backbone_weights: Path | None = shared(
        "OPENWORLD_BACKBONE_WEIGHTS", None, "safetensors file with that model's weights"
    )
    device: Device = shared("OPENWORLD_DEVICE", "auto", "where to compute; cuda refuses to start without a GPU")
    threads: int = Field(
        default_factory=lambda: os.cpu_count() or 1,
        ge=1,
        description="CPU threads of the trainer; of each process, if there are several: their share of the cores",
    )
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that learn one task together on this machine; on several machines torchrun starts them, "
        "see [scaling.md](scaling.md#one-task-over-several-processes)",
    )
    keep: Keep | None = shared(KEEP_SETTING, None, KEEP)
    cache_bytes: int = Field(
        2 * 2**30, ge=0, description="disk for features of images that are kept, computed once; 0: none"
    )
    adapted_blocks: int | None = Field(
        None, ge=1, description="blocks with adapters; empty: all (transformer), 1 (CNN)"
    )
    bottleneck: int = Field(
        32, ge=1, description="free bottleneck units of an adapter that a task chooses from, beside as many used ones"
    )
    keep_per_class: int = Field(
        20, ge=2, description="images kept of each class, for replay and for calibration; draws, if statistics are kept"
    )
    replay_size: int | None = Field(None, ge=1, description="limit of the replay memory in total; empty: none")
    epochs: int = Field(10, ge=1, description="passes over a new task's images")
    back_epochs: int = Field(10, ge=1, description="passes of a back-update by SGD (preset paper)")
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="learning rate of a new task; empty: 0.002 with Adam (method more on a transformer), otherwise "
        "0.005 with SGD",
    )
    batch_size: int = Field(16, ge=1, description="new images per step; as many replayed ones join them")
    views: int = Field(1, ge=1, le=8, description="views of each training image: the plain one and augmented ones")
    rotations: int = Field(
        4,
        description="rotations of an image that answer with hat-csi and sup-csi, 4 or 1; "
        "four cost four passes of the trunk; 1 if statistics are kept",
    )
    rule: Literal["fitted", "paper", "paper+c"] = Field(
        "fitted", description="which class: weights fitted, the paper's, or the paper's with calibrated outputs"
    )
    cascade: Literal["off"] | Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="networks of a transformer that run per image at most, the best by frozen evidence; off: all; "
        "empty: 2 with the method more and the fitted rule, otherwise all",
    )
    accept: float = Field(0.95, gt=0.5, lt=1, description="share of known images that the threshold accepts")
    flag: float | None = Field(
        None, gt=0, lt=1, description="set the threshold to flag this share of simulated novel images instead"
    )
    gate_accuracy: float = Field(0.15, ge=0, le=1, description="largest accepted loss of old tasks' accuracy")
    gate_auc: float = Field(0.10, ge=0, le=1, description="largest accepted loss of old tasks' AUC")
    seed: int = Field(0, description="the same seed, batch and parent give the same version")
    recipe: Recipe = Recipe()

    @field_validator("rotations")
    @classmethod
    def _one_or_all(cls, value: int) -> int:
        if value not in (1, 4):
            raise ValueError("must be 1 or 4: a head has outputs for the upright image and for all four rotations")
        return value

    @property
    def draws(self) -> bool:
        """Whether draws from class statistics stand for images of earlier tasks (trainer/learning/draws.py)."""
        return self.keep == "statistics"

    @property
    def weighs_frozen_evidence(self) -> bool:
        """The paper's rule does not: its classes are known only once they are learned."""
        return self.rule == "fitted"

    @property
    def replays(self) -> bool:
        """Whether the method learns earlier images again."""
        return (self.method or DEFAULT_METHOD) in REPLAYING_METHODS

    @property
    def min_steps(self) -> int:
        """The least number of steps of an epoch. CSI was measured with 20 only."""
        return self.recipe.min_steps or (5 if self.replays else 20)

    @property
    def networks_per_image(self) -> int | None:
        """The limit of the cascade; None: all networks run, as in the paper."""
        if self.cascade is None:
            return CASCADE if self.weighs_frozen_evidence and self.replays else None
        return None if self.cascade == "off" else self.cascade

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A value that is given explicitly takes precedence over that of the preset."""
        return {**PAPER, **given} if given.get("preset") == "paper" else given

    @model_validator(mode="before")
    @classmethod
    def _divide_cores(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Processes of one machine share its cores."""
        processes = str(given.get("processes", 1))
        if "threads" in given or not processes.isdecimal() or int(processes) <= 1:
            return given
        return {**given, "threads": max(1, (os.cpu_count() or 1) // int(processes))}
