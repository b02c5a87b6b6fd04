"""The prior of both decisions: what the weights are before a version has images enough to fit its own.

Rounded values of trials on training images of CIFAR-10, Grocery and Caltech, where the classes that are not learned yet
are really novel. `python -m benchmarks.accuracy.prior` computes such values for any data sets.
"""

from pydantic import BaseModel, ConfigDict, Field


class Prior(BaseModel):
    """Weights for standardised evidence, and how many images it takes to move them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: dict[str, float] = Field(
        default_factory=lambda: {
            "probability": 0.2,
            "coefficient": 0.1,
            "task_cosine": 0.2,
            "frozen_distance": 1.6,
            "frozen_cosine": 1.4,
            "ridge": 0.9,
        }
    )
    novelty: dict[str, float] = Field(
        default_factory=lambda: {
            "distance": 1.0,
            "cosine": 0.3,
            "cosine_gap": 0.1,
            "ridge": 0.8,
            "ridge_gap": 0.0,
            "known": 2.0,  # the log-odds of being known for the mean known image
        }
    )
    rule_strength: float = Field(100.0, ge=0)  # of a quadratic penalty, against the log-likelihood of all images
    output_strength: float = Field(100.0, ge=0)  # of the penalty that draws (alpha_k, beta_k) toward (1, 0)
    novelty_strength: float = Field(20.0, ge=0)
