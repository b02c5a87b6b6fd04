"""The prior of both decisions: what the weights are before a version has images enough to fit its own.

Computed on training images of CIFAR-10, Tiny-ImageNet, Grocery and Caltech, where the classes that are not learned yet
are really novel, by `python -m benchmarks.accuracy.prior`, and, where the refined feature counts, by
`python -m benchmarks.accuracy.refined_prior` (their result: benchmarks/accuracy/priors.json).
"""

from pydantic import BaseModel, ConfigDict, Field

KNOWN = "known"  # the constant of a novelty score: the log-odds of being known for the mean known image
FROZEN = "frozen"
APART = "apart"  # how far from the line of known images the refined score of a novel one is, given its frozen score


class Prior(BaseModel):
    """Weights for standardised evidence, and how many images it takes to move them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: dict[str, float] = Field(
        default_factory=lambda: {
            "probability": 0.623,
            "coefficient": 0.0,
            "task_cosine": 0.241,
            "frozen_distance": 0.295,
            "frozen_cosine": 0.0,
            "output_cosine": 0.808,
            "ridge": 0.717,
        }
    )
    novelty: dict[str, float] = Field(
        default_factory=lambda: {
            "distance": 0.0,
            "span_distance": 0.438,
            "output_distance": 0.594,
            "cosine": 0.061,
            "cosine_gap": 0.242,
            "ridge": 0.37,
            "ridge_gap": 0.0,
            KNOWN: 0.981,
        }
    )
    # Where the refined feature counts: the rule of the frozen terms and its own, and the novelty score, a sum of the
    # frozen evidence's and of the two summaries of the refined feature.
    refined_rule: dict[str, float] = Field(
        default_factory=lambda: {
            "frozen_distance": 0.107,
            "frozen_cosine": 0.0,
            "output_cosine": 0.0,
            "ridge": 0.528,
            "refined_cosine": 1.969,
        }
    )
    refined_novelty: dict[str, float] = Field(
        default_factory=lambda: {
            FROZEN: 0.266,
            "refined_cosine": 0.723,
            "refined_distance": 0.448,
            KNOWN: 1.22,
            APART: -0.195,
        }
    )
    rule_strength: float = Field(10.0, ge=0)  # of a quadratic penalty, against the log-likelihood of all images
    output_strength: float = Field(100.0, ge=0)  # of the penalty that draws (alpha_k, beta_k) toward (1, 0)
    novelty_strength: float = Field(20.0, ge=0)
