"""The LitServe peer. No `from __future__ import annotations`: LitServe reads the annotation of `decode_request`.

The image is the request's body, as in the service: a form, or base64 in JSON as in most examples, would be slower.
"""

from typing import Annotated, Any

import litserve  # type: ignore[import-not-found]
from fastapi import Body

from benchmarks.serving.apps.recogniser import PeerSettings, open_recogniser


class Api(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        self.recogniser = open_recogniser(PeerSettings.read())

    def decode_request(self, request: Annotated[bytes, Body(media_type="image/jpeg")]) -> bytes:
        return request

    def predict(self, images: Any) -> Any:
        if isinstance(images, bytes):  # without batching: one image, one answer
            return self.recogniser.answers([images])[0]
        return self.recogniser.answers(images)

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    settings = PeerSettings.read()
    api = Api(max_batch_size=settings.batch, batch_timeout=settings.wait_ms / 1000 if settings.batch > 1 else 0.0)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=settings.workers, fast_queue=True)
    server.run(host="127.0.0.1", port=settings.port, log_level="warning", access_log=False, generate_client_file=False)
