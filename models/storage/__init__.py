"""Where versions and images are stored: the interface, local files, and object stores."""

from models.storage.interface import Observer, Operation, Outcome, Storage, Stored, StoreUnavailable, is_unavailable
from models.storage.local_files import LocalFiles
from models.storage.places import DataFolder, open_storage, storage_of
