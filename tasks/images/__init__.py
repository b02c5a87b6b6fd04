"""Stored images: `ImageStore` keeps their bytes, `Retention` removes them, `erasures` logs the removals.

`FeatureCache` keeps what was computed from them, `FeatureStore` what is kept in their place.
"""

from tasks.images.discarding import discard_images
from tasks.images.erasures import (
    ErasureFollower,
    KeptImages,
    erase_copies,
    erased_at,
    erased_images,
    record_erasure,
)
from tasks.images.feature_cache import FeatureCache, cache_files, erase_cached
from tasks.images.feature_store import FeatureStore, KeptFeatures
from tasks.images.retention import Expired, ImageReferences, Retention
from tasks.images.store import NOVELTIES, ImageStore, StoredImage
