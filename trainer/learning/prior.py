"""The prior of both decisions: what the weights are before a version has images enough to fit its own.

Computed on training images of CIFAR-10, Tiny-ImageNet, Grocery and Caltech, where the classes that are not learned yet
are really novel, by `python -m benchmarks.accuracy.prior` (its result: benchmarks/accuracy/priors.json).
"""

from pydantic import BaseModel, ConfigDict, Field


class Prior(BaseModel):
    """Weights for standardised evidence, and how many images it takes to move them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: dict[str, float] = Field(
        default_factory=lambda: {
            "probability": 0.346,
            "coefficient": 0.169,
            "task_cosine": 0.58,
            "frozen_distance": 0.589,
            "frozen_cosine": 0.414,
            "ridge": 0.686,
        }
    )
    novelty: dict[str, float] = Field(
        default_factory=lambda: {
            "distance": 0.577,
            "span_distance": 0.247,
            "cosine": 0.276,
            "cosine_gap": 0.152,
            "ridge": 0.347,
            "ridge_gap": 0.006,
            "known": 1.14,  # the log-odds of being known for the mean known image
        }
    )
    rule_strength: float = Field(10.0, ge=0)  # of a quadratic penalty, against the log-likelihood of all images
    output_strength: float = Field(100.0, ge=0)  # of the penalty that draws (alpha_k, beta_k) toward (1, 0)
    novelty_strength: float = Field(20.0, ge=0)
