"""Model training of Algorithm 1: learn one task's network, with the method of the settings."""

from models.inference.shared_adapters import SharedAdapters
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.methods import TaskData, TrainedTask, method_of
from trainer.learning.methods.network import passes
from trainer.learning.progress import Progress
from trainer.learning.reproducibility import random_stream
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


def image_passes(data: TaskData, settings: LearnerSettings) -> int:
    """Images that pass through the network in one training, for the progress."""
    per_image = settings.epochs * passes(len(data.keys), settings) * method_of(settings).objective.rows(data)
    return per_image * len(data.keys)


def train_task(
    tokens: TokenCache,
    shared: SharedAdapters,
    data: TaskData,
    settings: LearnerSettings,
    phase: str,
    checkpoint: Checkpoint,
    progress: Progress,
) -> TrainedTask:
    """Train the network of the task that `phase` names, resuming from the checkpoint of that phase."""
    method = method_of(settings)
    network = method.open(tokens, shared, data, settings, phase)
    finished, state = checkpoint.load(phase)
    if finished:
        network.restore(state)
    per_epoch = image_passes(data, settings) / settings.epochs
    progress.skip(finished * per_epoch)
    for epoch in range(finished, settings.epochs):
        loss = network.epoch(data, random_stream(settings.seed, phase, "epoch", epoch), progress.tick)
        checkpoint.save(phase, epoch + 1, network.state())
        progress.report(phase, epoch + 1, settings.epochs, per_epoch, loss, saved=True)
    trained = network.finish()
    head = method.objective.head(tokens, trained.tensors, data, network.parameters, settings)
    return TrainedTask(trained, head)
