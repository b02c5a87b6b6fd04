"""Every error that openworld raises on purpose, as one tree.

    OpenWorldError
    ├── ImageError                the bytes are not a picture we read
    │   ├── UnsupportedImage        not JPEG, PNG or WebP
    │   ├── ImageTooLarge           more bytes or pixels than the limit
    │   └── BrokenImage             the right format, but it cannot be decoded
    ├── BackboneError             no backbone could be loaded, or it is not the recorded one
    ├── UnknownClass              no class has this name
    ├── ClassConflict             an edit that the classes as they are do not allow
    └── StoreError                the version store
        ├── CorruptVersion          a file is missing, changed, half written or from a newer schema
        ├── StaleParent             somebody else published first (compare-and-set lost)
        └── NothingLearned          there is no current version yet

Each message says what is wrong and what to do about it; callers turn the type into an exit code or an HTTP status.
"""

from typing import Literal


class OpenWorldError(Exception):
    """The root of the tree; catch it to catch everything that is not a bug."""


class ImageError(OpenWorldError):
    """The bytes are not a picture that we read."""


class UnsupportedImage(ImageError):
    """Not JPEG, PNG or WebP."""


class ImageTooLarge(ImageError):
    """More bytes or pixels than the limit."""


class BrokenImage(ImageError):
    """The right format, but it cannot be decoded."""


class BackboneError(OpenWorldError):
    """No backbone could be loaded, or it is not the one that the data folder records."""


class UnknownClass(OpenWorldError):
    """No class has this name."""


class ClassConflict(OpenWorldError):
    """An edit that the classes as they are do not allow."""


class StoreError(OpenWorldError):
    """The version store could not do what was asked."""


Damage = Literal["missing", "changed", "backbone", "schema", "invalid", "runtime"]


class CorruptVersion(StoreError):
    """A version's file is missing, changed, half written, or from a newer schema; `damage` says which, for metrics."""

    def __init__(self, message: str, damage: Damage = "invalid") -> None:
        super().__init__(message)
        self.damage: Damage = damage


class StaleParent(StoreError):
    """The current version is no longer the one that this work started from."""


class NothingLearned(StoreError):
    """There is no current version yet."""
