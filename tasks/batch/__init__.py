"""Labelled batches: open one from a folder or a zip (`open_batch`), or collect and check its images (`BatchCheck`)."""

from tasks.batch.check import BatchCheck, BatchLimits, LabelledBatch, LabelledImage, shortened
from tasks.batch.class_names import canonical, confusion_problems, name_problems
from tasks.batch.sources import open_batch
