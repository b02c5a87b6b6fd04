"""What the server keeps of an answer: metrics and score drift, the recent prediction, and a novel image in the inbox.

`Pulse` needs no call here, it samples the metrics.
"""

from __future__ import annotations

from models.inference.predictor import Scored
from service.inbox import Inbox, InboxWriter, Sighting
from service.inference.metrics import Metrics
from service.inference.recent_predictions import RecentPredictions


class Recorder:
    """Records answers without blocking: a thread writes the inbox."""

    def __init__(self, metrics: Metrics, recent: RecentPredictions, inbox: Inbox | None) -> None:
        self._metrics, self._recent = metrics, recent
        self._inbox_writer: InboxWriter | None = None
        if inbox is not None:
            self._inbox_writer = InboxWriter(
                inbox,
                on_added=lambda result: metrics.novelties_folded.inc(result.outcome == "folded"),
                on_drop=lambda reason: metrics.novelties_dropped.labels(reason).inc(),
            )

    def record(self, image: bytes, scored: Scored, prediction_id: str, version: int, client: str) -> None:
        answer = scored.answer
        outcome = "novel" if answer.novel else "known"
        self._metrics.count_prediction(outcome, version, client, answer.calibrated_score)
        sighting = Sighting(
            data=image,
            prediction_id=prediction_id,
            version=version,
            score=answer.score,
            calibrated_score=answer.calibrated_score,
            p_novel=answer.p_novel,
            nearest=answer.nearest,
            embedding=scored.embedding,
            client=client,
            label=answer.label,
        )
        self._recent.put(sighting)
        if answer.novel and self._inbox_writer is not None:
            self._inbox_writer.offer(sighting)

    def record_unreadable(self, version: int, client: str) -> None:
        """Record an image that could not be decoded."""
        self._metrics.count_prediction("error", version, client)

    def close(self, timeout: float) -> None:
        """Write what is queued for the inbox, for at most `timeout` seconds."""
        if self._inbox_writer is not None:
            self._inbox_writer.close(timeout)
