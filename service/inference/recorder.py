"""What the server keeps of an answer: metrics and score drift, the recent prediction, and a novel image in the inbox.

`Pulse` needs no call here, it samples the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from models.files import sha256_bytes
from models.inference.predictor import Scored
from service.inbox import AddResult, InboxWriter, NoveltySink, Sighting
from service.inference.metrics import Metrics
from service.inference.recent_predictions import RecentPredictions


class Recorder:
    """Records answers without blocking: a thread writes the inbox."""

    def __init__(self, metrics: Metrics, recent: RecentPredictions, *, keep_novelties: bool = True) -> None:
        self._metrics, self._recent, self._keep_novelties = metrics, recent, keep_novelties
        self._inbox_writer: InboxWriter | None = None
        self._erased: dict[str, float] = {}  # image -> until when, by the monotonic clock, it is not kept

    def use_inbox(self, sink: NoveltySink) -> None:
        """Offer the novel images from now on to this inbox."""
        self._inbox_writer = InboxWriter(
            sink,
            on_added=self.count_added,
            on_drop=lambda reason: self._metrics.novelties_dropped.labels(reason).inc(),
        )

    def count_added(self, result: AddResult) -> None:
        """Count what became of a sighting."""
        self._metrics.novelties_folded.inc(result.outcome == "folded")
        if result.reason is not None:
            self._metrics.novelties_dropped.labels(result.reason).inc()

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
        if self.is_erased(image):
            if answer.novel and self._keep_novelties:
                self._metrics.novelties_dropped.labels("erased").inc()
            return
        self._recent.put(sighting)
        if answer.novel and self._inbox_writer is not None:
            self._inbox_writer.offer(sighting)
        elif answer.novel and self._keep_novelties:
            self._metrics.novelties_dropped.labels("no_inbox").inc()

    def erase(self, sha256s: Collection[str], seconds: float) -> None:
        """Do not keep these images for so many seconds: requests that have begun may still record them."""
        until = time.monotonic() + seconds
        self._erased |= dict.fromkeys(sha256s, until)

    def discard(self, sha256s: Collection[str]) -> None:
        """Drop what is queued for the inbox of these images. Call it in a thread."""
        if self._inbox_writer is not None:
            self._inbox_writer.discard(sha256s)

    def is_erased(self, image: bytes) -> bool:
        """Whether the image was erased a short time ago."""
        if not self._erased:
            return False
        now = time.monotonic()
        self._erased = {sha256: until for sha256, until in self._erased.items() if until > now}
        return sha256_bytes(image) in self._erased

    def is_erased_sha256(self, sha256: str) -> bool:
        """The same by its hash; threads may call it."""
        return self._erased.get(sha256, 0.0) > time.monotonic()

    def record_unreadable(self, version: int, client: str) -> None:
        """Record an image that could not be decoded."""
        self._metrics.count_prediction("error", version, client)

    def close(self, timeout: float) -> None:
        """Write what is queued for the inbox, for at most `timeout` seconds."""
        if self._inbox_writer is not None:
            self._inbox_writer.close(timeout)
