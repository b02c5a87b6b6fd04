"""The methods: how a task's network is trained, what it needs of earlier tasks, and which evidence it gives.

| method | network | objective | needs of earlier tasks |
| --- | --- | --- | --- |
| `more` | HAT | cross-entropy with `ood` | replayed images, and it updates earlier heads |
| `hat-csi` | HAT | CSI | nothing |
| `sup-csi` | supermasks | CSI | nothing |

All else is shared: backbone, frozen evidence, both decisions, gate, versions, serving.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.inference.rotations import ROTATIONS
from models.inference.shared_adapters import SharedAdapters
from trainer.learning.adapter_units import grow_adapters, initial_adapters
from trainer.learning.forward_passes import turned_view
from trainer.learning.methods.csi import CsiObjective
from trainer.learning.methods.hat import HatNetwork
from trainer.learning.methods.network import Objective, TaskData, TaskNetwork, TrainedNetwork, TrainedTask
from trainer.learning.methods.replay import PlainObjective, ReplayObjective
from trainer.learning.methods.supermask import SupermaskNetwork
from trainer.learning.settings import DEFAULT_METHOD, LearnerSettings
from trainer.learning.tokens import TokenCache

__all__ = ["METHODS", "Method", "TaskData", "TaskNetwork", "TrainedNetwork", "TrainedTask", "method_of"]


@dataclass(frozen=True)
class Method:
    """A network and an objective."""

    network: type[HatNetwork | SupermaskNetwork]
    objective: Objective
    replays: bool  # whether earlier images are trained on again, as `ood` and in earlier heads
    rotates: bool  # whether a head has outputs for turned images

    def kept_views(self, settings: LearnerSettings, held_out: bool) -> Sequence[int]:
        """The views of an image that later tasks need, where features are kept in place of images."""
        if self.rotates:
            return [turned_view(0, turns) for turns in range(ROTATIONS)]  # to fit the rule
        return range(1 if held_out else settings.views)

    def initial(self, adapters: int, dimensions: int, settings: LearnerSettings) -> SharedAdapters:
        """The shared adapters before the first task; supermasks share none."""
        if self.network is SupermaskNetwork:
            return SharedAdapters.empty(adapters, dimensions)
        return initial_adapters(adapters, dimensions, settings)

    def grown(self, shared: SharedAdapters, settings: LearnerSettings) -> SharedAdapters:
        """The shared adapters with free units for a task."""
        return shared if self.network is SupermaskNetwork else grow_adapters(shared, settings)

    def open(
        self, tokens: TokenCache, shared: SharedAdapters, data: TaskData, settings: LearnerSettings, name: str
    ) -> TaskNetwork:
        """The network of a new task, before training."""
        return self.network(tokens, shared, data, settings, name, self.objective)


METHODS = {
    "more": Method(HatNetwork, ReplayObjective(), replays=True, rotates=False),
    "hat-csi": Method(HatNetwork, CsiObjective(), replays=False, rotates=True),
    "sup-csi": Method(SupermaskNetwork, CsiObjective(), replays=False, rotates=True),
}


def method_of(settings: LearnerSettings) -> Method:
    """The method of the settings; without what sets it apart, plain HAT or SupSup, for benchmarks."""
    method, recipe = METHODS[settings.method or DEFAULT_METHOD], settings.recipe
    if (method.rotates and not recipe.contrastive) or (method.replays and not recipe.replay):
        return replace(method, objective=PlainObjective(), replays=False, rotates=False)
    return method
