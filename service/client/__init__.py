"""A typed Python client, synchronous and for asyncio. Install `openworld[client]`.

    with Client("http://127.0.0.1:8000") as openworld:
        answer = openworld.predict(Path("photo.jpg"))
        print(answer.in_words())  # sure: apple (86 %)

Both clients repeat a request when the connection breaks, and when the server is busy or restarting (429, 503): after
the time in `Retry-After`, until `timeout` has passed. Repeating is safe: a prediction changes nothing, and the same
batch is the same task.

ClientError
├── ApiError       the server refused the request
└── Unreachable    no server answered before the timeout
"""

from service.client.aio import AsyncClient
from service.client.calls import ApiError, ClientError, Image, Unreachable
from service.client.sync import Client
from service.wire.predictions import Failure, Prediction
from service.wire.tasks import TaskAnswer
from service.wire.versions import Versions
