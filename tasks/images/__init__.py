"""Stored images: `ImageStore` keeps their bytes, `Retention` removes them."""

from tasks.images.retention import Expired, ImageReferences, Retention
from tasks.images.store import ImageStore, StoredImage
