"""Errors of a request; `service/http/problems.py` turns them into HTTP responses.

OpenWorldError
├── ServiceError
│   ├── BadRequest            the request is malformed
│   │   ├── NoImages            it contains no image
│   │   ├── BodyTooLarge        more bytes or images than one request may have
│   │   ├── BodyTooSlow         the body arrives too slowly
│   │   ├── UnsupportedBody     not a content type that the route reads
│   │   └── InvalidName         not a name of a class
│   ├── Unauthorized          no key, or an unknown one
│   ├── Forbidden             the key lacks the role
│   ├── ForeignOrigin         a page of another site sent the request
│   ├── UnknownHost           the request is for a name that the server does not have
│   ├── NotFound              no such resource
│   ├── ImagesDiscarded       the images that the request needs were discarded, as the data folder promises
│   ├── RetryLater            try again after `retry_after` seconds
│   │   ├── Overloaded          the server has as many images in progress as it admits
│   │   │   └── KeyBusy           one key has as much in progress as a key may have
│   │   ├── RateLimited         the key sends more images per second than it may
│   │   ├── TooManyStreams      the key follows as many tasks as it may
│   │   ├── NotReady            no version is loaded
│   │   ├── InboxMoved          another server takes over the inbox
│   │   └── NoQueue             the server runs without a task queue
│   ├── DeadlinePassed        no answer before the request's deadline
│   ├── ClientDisconnected    the client closed the connection
│   ├── StorageUnavailable    the data folder is full or cannot be used
│   ├── ObjectStoreDown       the object store does not answer
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


class BodyTooSlow(BadRequest):
    """The body arrives too slowly."""


class UnsupportedBody(BadRequest):
    """The route does not read this content type."""


class InvalidName(BadRequest):
    """A class cannot have this name."""


class Unauthorized(ServiceError):
    """The request has no key, or an unknown one."""


class Forbidden(ServiceError):
    """The key lacks the role."""


class ForeignOrigin(ServiceError):
    """A page of another site sent the request."""


class UnknownHost(ServiceError):
    """The request is for a host name that the server does not have."""


class NotFound(ServiceError):
    """There is no such resource."""


class ImagesDiscarded(ServiceError):
    """The images that the request needs were discarded: the data folder does not keep images."""


class RetryLater(ServiceError):
    """The client should try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(RetryLater):
    """The server has as many images in progress as it admits."""


class KeyBusy(Overloaded):
    """One key has as much in progress as a key may have."""


class RateLimited(RetryLater):
    """The key sends more images per second than it may."""


class TooManyStreams(RetryLater):
    """The key follows as many tasks as it may."""


class NotReady(RetryLater):
    """No version is loaded."""


class InboxMoved(RetryLater):
    """Another server takes over the inbox that the servers share."""


class NoQueue(RetryLater):
    """The server runs without a task queue."""


class DeadlinePassed(ServiceError):
    """There is no answer before the request's deadline."""


class ClientDisconnected(ServiceError):
    """The client closed the connection; the error is logged and counted only."""


class StorageUnavailable(ServiceError):
    """The data folder is full or cannot be used."""


class ObjectStoreDown(ServiceError):
    """The object store does not answer."""


class VersionUnusable(ServiceError):
    """The version exists but cannot be loaded."""


class ImageInUse(ServiceError):
    """Versions or unfinished tasks depend on the image; `dependents` names them, one per line."""

    def __init__(self, message: str, dependents: list[str]) -> None:
        super().__init__(message)
        self.dependents = dependents


class BadBase64(ImageError):
    """The text of an image is not base64."""
