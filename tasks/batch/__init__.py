"""Labelled batches: open a folder or a zip (`open_batch`, `open_zip`), or collect and check images (`BatchCheck`)."""

from tasks.batch.check import (
    LEAST_SUMMED,
    BatchCheck,
    BatchLimits,
    LabelledBatch,
    LabelledImage,
    check_summed,
    shortened,
)
from tasks.batch.class_names import canonical, confusion_problems, name_problems
from tasks.batch.sources import open_batch, open_zip
