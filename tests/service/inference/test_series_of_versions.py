"""The number of series is bounded: those of the last versions, and of versions in use."""

from service.inference.metrics import KEPT_VERSIONS, OUTCOMES, Metrics
from tests.support.metrics import families, series


def test_twelve_versions_leave_the_series_of_the_last_eight() -> None:
    metrics = Metrics()
    for version in range(1, 13):
        metrics.set_active_version(version, f"sha of {version}")
        for client in ("robot", "app"):
            for outcome in OUTCOMES:
                metrics.count_prediction(outcome, version, client, None if outcome == "error" else 0.5)
    text = metrics.text().decode()
    kept = {str(version) for version in range(5, 13)}
    assert len(kept) == KEPT_VERSIONS
    predictions = series(text, "openworld_predictions_total")
    assert predictions == {(c, o, v): 1 for c in ("robot", "app") for o in OUTCOMES for v in kept}
    assert {one.labels["version"] for one in families(text)["openworld_calibrated_score"].samples} == kept
    assert series(text, "openworld_model_info") == {("sha of 12", "12"): 1}


def test_a_version_in_use_keeps_its_series() -> None:
    metrics = Metrics()
    for version in range(1, 40):
        metrics.count_prediction("known", 1, "robot", 0.5)
        metrics.count_prediction("novel", version, "app", 0.1)
    predictions = series(metrics.text().decode(), "openworld_predictions_total")
    assert predictions["robot", "known", "1"] == 39
    assert len({version for _, _, version in predictions}) == KEPT_VERSIONS
