"""A typed Python client, for programs and for asyncio. Install `openworld[client]`.

    with Client("http://127.0.0.1:8000") as openworld:
        answer = openworld.predict(Path("photo.jpg"))
        print("novel" if answer.novel else answer.label)

A server that is busy or about to be replaced says so (429, 503) and when to come back (`Retry-After`); both clients
wait that long and try again, as they do when a connection breaks, until `timeout` has passed. Asking twice does no
harm: a prediction changes nothing, and the same batch is the same task.
"""

from service.client.aio import AsyncClient
from service.client.calls import ApiError, ClientError, Image, Unreachable
from service.client.sync import Client
from service.wire.predictions import Failure, Prediction
from service.wire.tasks import TaskAnswer
from service.wire.versions import Versions

__all__ = [
    "ApiError",
    "AsyncClient",
    "Client",
    "ClientError",
    "Failure",
    "Image",
    "Prediction",
    "TaskAnswer",
    "Unreachable",
    "Versions",
]
