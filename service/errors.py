"""What can go wrong between a request and its answer; `service/problems.py` alone turns it into HTTP.

OpenWorldError
└── ServiceError
    ├── BadRequest            the request cannot be understood
    │   ├── NoImages            it is well-formed, but holds no image
    │   └── BodyTooLarge        more bytes or images than one request may have
    ├── Unauthorized          no key, or one that nobody holds
    ├── Forbidden             a key without the role
    ├── NotFound              no such thing
    ├── Busy                  come back later: each says when
    │   ├── QueueIsFull         more images inside the server than it can answer in time
    │   ├── RateLimited         this key sends more than it may
    │   └── NotReady            nothing is loaded yet
    ├── DeadlinePassed        the answer would come too late
    ├── Abandoned             the client has gone
    ├── VersionUnusable       a version that is there, but cannot be loaded
    └── ImageInUse            versions or unfinished tasks need it
"""

from __future__ import annotations

from models.errors import ImageError, OpenWorldError


class ServiceError(OpenWorldError):
    """The root of what the server refuses."""


class BadRequest(ServiceError):
    """The request cannot be understood."""


class NoImages(BadRequest):
    """It is well-formed, but holds no image."""


class BodyTooLarge(BadRequest):
    """More bytes or images than one request may have."""


class UnsupportedBody(BadRequest):
    """Not one of the ways to send a batch."""


class InvalidName(BadRequest):
    """A class cannot be called that."""


class Unauthorized(ServiceError):
    """No key, or one that nobody holds."""


class Forbidden(ServiceError):
    """A key without the role."""


class NotFound(ServiceError):
    """There is no such thing."""


class Busy(ServiceError):
    """Come back in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueIsFull(Busy):
    """More images inside the server than it can answer in time."""


class RateLimited(Busy):
    """This key sends more than it may."""


class NotReady(Busy):
    """Nothing is loaded yet."""


class NoQueue(Busy):
    """This server has no queue of tasks, or cannot reach it."""


class DeadlinePassed(ServiceError):
    """The answer would come too late."""


class Abandoned(ServiceError):
    """The client has gone, so nobody reads this."""


class VersionUnusable(ServiceError):
    """A version that is there, but cannot be loaded."""


class ImageInUse(ServiceError):
    """Somebody needs this image: `dependents` says who, a line each."""

    def __init__(self, message: str, dependents: list[str]) -> None:
        super().__init__(message)
        self.dependents = dependents


class BadBase64(ImageError):
    """The text that stands for an image is not base64."""
