"""p_novel falls in the score, whatever the simulated novelty is: the threshold is a bound of both."""

import numpy as np
import pytest

from models.inference.evidence import FrozenScores
from models.inference.novelty import FROZEN_SUMMARIES
from models.inference.rules import Rule
from tests.support.evidence import frozen_evidence
from trainer.learning.novelty_fit import Target, falling_p_novel, fit_novelty, paper_novelty
from trainer.learning.prior import Prior

PRIOR = np.array([1.0, 2.0])


@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0, 90.0])
def test_p_novel_falls_also_where_simulated_novel_images_score_above_known_ones(shift: float) -> None:
    rng = np.random.default_rng(0)
    left_out = FrozenScores(
        rng.uniform(1, 3, (40, 3)),
        rng.uniform(-1, 1, (40, 3)),
        rng.normal(0, 1, (40, 3)),
        rng.uniform(1, 2, (40, 3)),
        rng.uniform(1, 3, (40, 3)),
        rng.uniform(-1, 1, (40, 3)),
    )
    size = (40, len(FROZEN_SUMMARIES))
    known, novel = rng.normal(0, 1, size), rng.normal(shift, 1, size)
    novelty = fit_novelty(left_out, [(known, novel)], Prior(), Target())
    assert novelty.logistic[0] > 0
    scores = np.sort(rng.normal(0, 5, 200))
    assert (np.diff(novelty.p_novel(scores)) <= 0).all()
    assert ((novelty.p_novel(scores) > novelty.novel_above) == (scores < novelty.threshold[0])).all()


def test_informative_novelty_fits_the_slope() -> None:
    rng = np.random.default_rng(0)
    scores, known = np.concatenate([rng.normal(0, 1, 500), rng.normal(-3, 1, 500)]), np.repeat([1.0, 0.0], 500)
    slope, intercept = falling_p_novel(scores, known, PRIOR, np.ones(2), 1000.0)
    # Two normals at distance 3: the log-odds are 3 x + 4.5.
    assert (slope, intercept) == (pytest.approx(3, rel=0.2), pytest.approx(4.5, rel=0.2))


def test_without_simulated_novelty_the_prior_stays() -> None:
    assert falling_p_novel(np.zeros(0), np.zeros(0), PRIOR, np.ones(2), 1.0).tolist() == PRIOR.tolist()


def test_p_novel_falls_under_the_papers_rule() -> None:
    evidence = frozen_evidence(np.ones((4, 2)), [1, 1])
    evidence.distances[0][:] = 5.0  # images of task 1, all of them nearer to task 2
    novelty = paper_novelty(Rule(), evidence, np.zeros(4, np.int64), Target())
    assert novelty.logistic[0] > 0
