"""Stored images: `ImageStore` keeps their bytes, `Retention` removes them, `erasures` logs the removals."""

from tasks.images.erasures import ErasureFollower, erased_at, erased_images, record_erasure
from tasks.images.retention import Expired, ImageReferences, Retention
from tasks.images.store import ImageStore, StoredImage
