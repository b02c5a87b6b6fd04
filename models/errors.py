"""Every error that openworld raises on purpose, as one tree.

    OpenWorldError
    ├── ImageError                the bytes are not a picture we read
    │   ├── UnsupportedImage        not JPEG, PNG or WebP
    │   ├── ImageTooLarge           more bytes or pixels than the limit
    │   └── BrokenImage             the right format, but it cannot be decoded
    ├── BackboneError             no backbone could be loaded, or it is not the recorded one
    ├── BatchError                a labelled batch with problems: all of them, each with its remedy
    └── StoreError                the version store
        ├── CorruptVersion          a file is missing, changed, half written or from a newer schema
        ├── StaleParent             somebody else published first (compare-and-set lost)
        └── NothingLearned          there is no current version yet

Each message says what is wrong and what to do about it; callers turn the type into an exit code or an HTTP status.
"""


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


class BatchError(OpenWorldError):
    """A labelled batch that cannot be learned, with every problem found in it."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class StoreError(OpenWorldError):
    """The version store could not do what was asked."""


class CorruptVersion(StoreError):
    """A version's file is missing, changed, half written, or from a newer schema."""


class StaleParent(StoreError):
    """The current version is no longer the one that this work started from."""


class NothingLearned(StoreError):
    """There is no current version yet."""
