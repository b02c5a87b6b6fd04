"""Errors of a request; `service/http/problems.py` turns them into HTTP responses.

OpenWorldError
├── ServiceError
│   ├── BadRequest            the request is malformed
│   │   ├── NoImages            it contains no image
│   │   ├── BodyTooLarge        more bytes or images than one request may have
│   │   ├── UnsupportedBody     not a content type of a batch
│   │   └── InvalidName         not a name of a class
│   ├── Unauthorized          no key, or an unknown one
│   ├── Forbidden             the key lacks the role
│   ├── NotFound              no such resource
│   ├── RetryLater            try again after `retry_after` seconds
│   │   ├── Overloaded          the server has as many images in progress as it admits
│   │   ├── RateLimited         the key sends more images per second than it may
│   │   ├── NotReady            no version is loaded
│   │   └── NoQueue             the server runs without a task queue
│   ├── DeadlinePassed        no answer before the request's deadline
│   ├── ClientDisconnected    the client closed the connection
│   ├── VersionUnusable       the version exists but cannot be loaded
│   └── ImageInUse            versions or unfinished tasks depend on the image
└── ImageError
    └── BadBase64             the text of an image is not base64
"""

from __future__ import annotations

from models.errors import ImageError, OpenWorldError


class ServiceError(OpenWorldError):
    """Base class."""


class BadRequest(ServiceError):
    """The request is malformed."""


class NoImages(BadRequest):
    """The request contains no image."""


class BodyTooLarge(BadRequest):
    """The request has more bytes or images than allowed."""


class UnsupportedBody(BadRequest):
    """A batch cannot be sent with this content type."""


class InvalidName(BadRequest):
    """A class cannot have this name."""


class Unauthorized(ServiceError):
    """The request has no key, or an unknown one."""


class Forbidden(ServiceError):
    """The key lacks the role."""


class NotFound(ServiceError):
    """There is no such resource."""


class RetryLater(ServiceError):
    """The client should try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(RetryLater):
    """The server has as many images in progress as it admits."""


class RateLimited(RetryLater):
    """The key sends more images per second than it may."""


class NotReady(RetryLater):
    """No version is loaded."""


class NoQueue(RetryLater):
    """The server runs without a task queue."""


class DeadlinePassed(ServiceError):
    """There is no answer before the request's deadline."""


class ClientDisconnected(ServiceError):
    """The client closed the connection; the error is logged and counted only."""


class VersionUnusable(ServiceError):
    """The version exists but cannot be loaded."""


class ImageInUse(ServiceError):
    """Versions or unfinished tasks depend on the image; `dependents` names them, one per line."""

    def __init__(self, message: str, dependents: list[str]) -> None:
        super().__init__(message)
        self.dependents = dependents


class BadBase64(ImageError):
    """The text of an image is not base64."""
