"""CSI's objective (contrasting shifted instances): learn a task without any image of another one.

Step 1: supervised contrastive loss over two views of each image, each turned by 0, 90, 180 and 270 degrees. A turned
image has another class than the upright one (Eq. modsupclr), so the network must know what an upright image of the task
looks like. Step 2: on the features of the finished network, a linear classifier over classes and rotations.

Differences from the paper: the views of an image are drawn once per task, because the trunk is frozen and its outputs
are kept; one of the two is the plain image; step 2 is solved as a convex problem; the projection is linear.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.inference.model import Head
from models.inference.rotations import ROTATIONS
from models.network.adapted_blocks import TaskTensors
from models.network.backbone import Backbone
from trainer.learning.adapter_units import truncated_normal
from trainer.learning.forward_passes import turned_view
from trainer.learning.head_solver import solved_head
from trainer.learning.methods.network import Batch, TaskData
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

VIEWS = (0, 1)  # the plain image and an augmented one
PROJECTION = 128  # dimensions of the contrastive representation


class CsiObjective:
    """The output of class y of an image that is turned r times is number r c + y, for a task of c classes."""

    separable = False  # each row of a batch is compared with all others

    def views(self, settings: LearnerSettings) -> Sequence[int]:
        return [turned_view(view, turns) for view in VIEWS for turns in range(ROTATIONS)]

    def rows(self, data: TaskData) -> int:
        return len(VIEWS) * ROTATIONS

    def start(
        self, tokens: TokenCache, data: TaskData, settings: LearnerSettings, rng: np.random.Generator
    ) -> dict[str, NDArray[np.floating]]:
        """The projection g, linear: with a hidden layer, g learns in place of the network."""
        dimensions = tokens.backbone.spec.dimensions
        return {
            "projection_w": truncated_normal(rng, (PROJECTION, dimensions), dimensions**-0.5),
            "projection_b": np.zeros(PROJECTION),
        }

    def starts_at_closed_form(self, backbone: Backbone, settings: LearnerSettings) -> bool:
        return False

    def rate(self, settings: LearnerSettings) -> float:
        """The gradient of normalised rows is small: with the rate of cross-entropy, the features hardly move."""
        return settings.recipe.contrast_rate

    def batch(
        self, data: TaskData, chosen: NDArray[np.int64], rng: np.random.Generator, settings: LearnerSettings
    ) -> Batch:
        """Both views of each image in all rotations: 8 rows per image."""
        rows = [(i, view, turns) for i in chosen.tolist() for view in VIEWS for turns in range(ROTATIONS)]
        return Batch(
            [data.keys[i] for i, _, _ in rows],
            [turned_view(view, turns) for _, view, turns in rows],
            [shifted(data.labels[i], turns, data.classes) for i, _, turns in rows],
        )

    def loss(self, z: Tensor, labels: Tensor, parameters: dict[str, Tensor], settings: LearnerSettings) -> Tensor:
        projected = F.linear(z, parameters["projection_w"], parameters["projection_b"])
        return contrastive_loss(projected, labels, settings.recipe.contrast_temperature)

    def head(
        self,
        tokens: TokenCache,
        tensors: TaskTensors,
        data: TaskData,
        parameters: dict[str, Tensor],
        settings: LearnerSettings,
    ) -> Head:
        """Step 2. All views of an image weigh the same, and all classes do."""
        views = [(view, turns) for view in VIEWS for turns in range(ROTATIONS)]
        features = np.concatenate(
            [tokens.features(data.keys, tensors, view=turned_view(*own), store=False) for own in views]
        )
        labels = np.array([shifted(y, turns, data.classes) for _, turns in views for y in data.labels], np.int64)
        ridge = settings.recipe.csi_ridge / len(data.keys)
        return rotation_head(solved_head(features, labels, ROTATIONS * data.classes, ridge))


def shifted(label: int, turns: int, classes: int) -> int:
    """The class of an image that is turned: each turn has its own classes."""
    return turns * classes + label


def contrastive_loss(projected: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Eq. modsupclr, over rows (m, p): each row against all others, those with its label being its positives."""
    z = F.normalize(projected)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(itself, -torch.inf)
    log_shares = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    positive = (labels[:, None] == labels) & ~itself
    per_row = torch.where(positive, log_shares, 0.0).sum(dim=1) / positive.sum(dim=1).clamp(min=1)
    return -per_row.mean()


def rotation_head(solved: Head) -> Head:
    """From the outputs of all rotations, number r c + y, to those of the upright image without `ood`, and of others."""
    weight = solved.weight.reshape(ROTATIONS, -1, solved.weight.shape[1])
    bias = solved.bias.reshape(ROTATIONS, -1)
    return Head.without_ood(weight[0], bias[0], weight[1:].copy(), bias[1:].copy())
