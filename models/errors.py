"""The errors of models, as one tree; tasks/errors.py and service/errors.py add theirs below OpenWorldError.

    OpenWorldError
    ├── ImageError            the bytes are not an image that can be used
    │   ├── UnsupportedImage    not JPEG, PNG or WebP
    │   ├── ImageTooLarge       more bytes or pixels than the limit
    │   ├── LargeImage          decodes slowly, where only small images are decoded: decode it elsewhere
    │   └── BrokenImage         a supported format, but it cannot be decoded
    ├── BackboneError         no backbone can be loaded, or it is not the recorded one
    ├── KeepError             the data folder keeps more or less of its images than asked for
    ├── MethodError           the data folder was made with another method
    ├── UnknownClass          no class has this name
    ├── ClassConflict         the edit is not allowed by the present classes
    └── StoreError            the version store
        ├── FormatError         the data folder has a format that this release does not support
        ├── CorruptVersion      a file is missing, changed, incomplete or of a newer schema
        ├── StaleParent         another version became current first (compare-and-set failed)
        └── NothingLearned      there is no current version yet

A message says what is wrong and what to do; callers turn the type into an exit code or an HTTP status.
"""

from typing import Literal


class OpenWorldError(Exception):
    """The base of all errors that are not bugs."""


class ImageError(OpenWorldError):
    """The bytes are not an image that can be used."""


class UnsupportedImage(ImageError):
    """Not JPEG, PNG or WebP."""


class ImageTooLarge(ImageError):
    """More bytes or pixels than the limit."""


class LargeImage(ImageError):
    """The image decodes slowly, and the caller decodes small images only."""


class BrokenImage(ImageError):
    """A supported format, but it cannot be decoded."""


class BackboneError(OpenWorldError):
    """No backbone can be loaded, or it is not the one that the data folder records."""


class KeepError(OpenWorldError):
    """The data folder keeps more or less of its images than asked for."""


class MethodError(OpenWorldError):
    """The data folder was made with another method than the one that is set."""


class UnknownClass(OpenWorldError):
    """No class has this name."""


class ClassConflict(OpenWorldError):
    """The edit is not allowed by the present classes."""


class StoreError(OpenWorldError):
    """The version store cannot be read or written."""


class FormatError(StoreError):
    """The data folder has a format that this release does not support."""


Damage = Literal["missing", "changed", "backbone", "schema", "invalid", "runtime"]


class CorruptVersion(StoreError):
    """A file of a version is missing, changed, incomplete or of a newer schema; `damage` is a label for metrics."""

    def __init__(self, message: str, damage: Damage = "invalid") -> None:
        super().__init__(message)
        self.damage: Damage = damage


class StaleParent(StoreError):
    """The current version is not the expected one: another version became current first."""


class NothingLearned(StoreError):
    """There is no current version yet."""
