"""Paths of the project and of the optional folder `../shared`."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
DEIT_WEIGHTS = SHARED / "weights" / "deit_tiny_patch16_224.safetensors"

requires_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared: real DeiT weights and CIFAR-10")
