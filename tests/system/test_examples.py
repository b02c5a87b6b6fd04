"""The scripts of examples/, each in a process of its own, against a real server and a real trainer."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2 as httpx
import pytest

from service.client import Client
from tests.support.learning_loop import Loop, batch, loop
from tests.support.paths import ROOT
from tests.support.servers import IMAGES, known_image, novel_image, wait_until

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with loop(tmp_path_factory.mktemp("examples")) as running:
        running.start("serve")
        running.start("train")
        yield running


def environment(url: str, *search: Path) -> dict[str, str]:
    """No settings of this machine, but the address of the service."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENWORLD_")}
    return kept | {"OPENWORLD_URL": url, "PYTHONPATH": os.pathsep.join(map(str, [*search, ROOT]))}


def run(script: str, *arguments: object, url: str, search: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", f"examples/{script}", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment(url, *search), capture_output=True, text=True, timeout=120, check=False
    )


def words(service: Loop, image: bytes, label: str | None) -> str:
    """The service's answer in words; its label must be `label`."""
    with Client(service.url) as client:
        answer = client.predict(image)
    assert answer.label == label
    return answer.in_words()


def write(folder: Path, **images: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in images.items():
        (folder / f"{name}.png").write_bytes(data)
    return folder


# The camera loop


def test_the_camera_loop_names_known_frames_and_reports_novel_ones(service: Loop, tmp_path: Path) -> None:
    frames = write(
        tmp_path / "frames", a=known_image("class 0"), b=b"not an image", c=novel_image(1), d=known_image("class 3")
    )
    (frames / "notes.txt").write_text("not a frame")
    done = run("camera_loop.py", frames, "--fps", "100", url=service.url)
    assert done.returncode == 0, done.stderr
    expected = {
        0: (known_image("class 0"), "class 0"),
        2: (novel_image(1), None),
        3: (known_image("class 3"), "class 3"),
    }
    assert done.stdout.splitlines() == [f"frame {n}: {words(service, *one)}" for n, one in expected.items()]
    assert "frame 1: no answer" in done.stderr
    assert "unsupported_image" in done.stderr


def test_the_camera_loop_reads_a_snapshot_address(service: Loop) -> None:
    with _snapshots(known_image("class 2")) as address:
        command = [sys.executable, "examples/camera_loop.py", address, "--fps", "100"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment(service.url))
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
        finally:
            process.kill()
            process.communicate()
    answer = words(service, known_image("class 2"), "class 2")
    assert lines == [f"frame {n}: {answer}\n" for n in range(3)]


def test_the_camera_loop_without_opencv_says_what_to_install(service: Loop, tmp_path: Path) -> None:
    (tmp_path / "cv2.py").write_text("raise ModuleNotFoundError('no cv2 here', name='cv2')")
    done = run("camera_loop.py", "0", url=service.url, search=(tmp_path,))
    assert done.returncode == 1
    assert "pip install opencv-python-headless" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def _snapshots(image: bytes) -> Iterator[str]:
    """A camera that answers every GET with one image."""

    class Camera(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(image)))
            self.end_headers()
            self.wfile.write(image)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Camera) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/snapshot.jpg"
        server.shutdown()
        thread.join()


# A folder to CSV


def test_a_folder_is_predicted_to_csv_with_one_row_per_image(service: Loop, tmp_path: Path) -> None:
    photos = write(tmp_path / "photos", first=known_image("class 1"), second=novel_image(2), third=b"broken")
    write(photos / "more", fourth=known_image("class 4"))
    target = tmp_path / "answers.csv"
    done = run("predict_folder.py", photos, target, url=service.url)
    assert done.returncode == 1, done.stderr
    assert "4 images, 1 of them unreadable" in done.stdout
    with target.open(newline="") as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["first.png", "more/fourth.png", "second.png", "third.png"]
    assert rows["first.png"]["answer"] == words(service, known_image("class 1"), "class 1")
    assert rows["first.png"]["label"] == "class 1"
    assert rows["first.png"]["certainty"] in ("sure", "unsure")
    assert (rows["second.png"]["label"], rows["second.png"]["certainty"]) == ("", "novel")
    assert rows["second.png"]["answer"].startswith("never seen; nearest: class ")
    assert rows["second.png"]["looks_like"].startswith("class ")
    assert rows["third.png"]["error"] == "unsupported_image"
    assert rows["more/fourth.png"]["label"] == "class 4"


def test_a_folder_without_a_readable_image_still_gives_its_rows(service: Loop, tmp_path: Path) -> None:
    photos = write(tmp_path / "photos", first=b"broken", second=known_image("class 1")[:60])
    target = tmp_path / "answers.csv"
    done = run("predict_folder.py", photos, target, url=service.url)
    assert done.returncode == 1, done.stderr
    with target.open(newline="") as file:
        assert [row["error"] for row in csv.DictReader(file)] == ["unsupported_image", "broken_image"]


# Teaching


def test_a_folder_is_taught_and_then_known(service: Loop, tmp_path: Path) -> None:
    for name in ("quince", "medlar"):
        write(tmp_path / "fruit" / name, **{f"i{n}": IMAGES.read(f"{name}/{n}") for n in range(6)})
    done = run("teach_folder.py", tmp_path / "fruit", url=service.url)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.endswith("12 images of medlar, quince")
    version = int(last.removeprefix("version ").removesuffix(" answers"))
    classes = httpx.get(f"{service.url}/classes", timeout=30).json()
    assert classes["version"] == version
    assert {"quince", "medlar"} <= {entry["name"] for entry in classes["classes"]}

    again = run("teach_folder.py", tmp_path / "fruit", url=service.url)
    assert again.stdout.splitlines() == [first, last]  # the same folder is the same task


def test_a_refused_folder_names_its_problems(service: Loop, tmp_path: Path) -> None:
    write(tmp_path / "fruit" / "plum", good=IMAGES.read("plum/0"), bad=b"not an image")
    done = run("teach_folder.py", tmp_path / "fruit", url=service.url)
    assert done.returncode == 1
    assert "the batch was refused" in done.stderr
    assert "plum" in done.stderr


def test_novelties_are_exported_named_and_submitted(service: Loop, tmp_path: Path) -> None:
    for number in range(6):
        answer = httpx.post(f"{service.url}/predict", content=novel_image(number), timeout=30).json()["predictions"][0]
        assert answer["novel"], "the test needs novel images"
    wait_until(lambda: len(httpx.get(f"{service.url}/novelties?limit=200", timeout=30).json()["items"]) >= 1)
    exported = tmp_path / "novel"
    done = run("label_inbox.py", "export", exported, "--minimum", "2", url=service.url)
    assert done.returncode == 0, done.stderr
    assert (exported / "group-1").is_dir(), done.stdout

    nothing = run("label_inbox.py", "submit", exported, url=service.url)
    assert nothing.returncode == 1
    assert "no named folders" in nothing.stderr

    (exported / "group-1").rename(exported / "kiwi")
    done = run("label_inbox.py", "submit", exported, url=service.url)
    assert done.returncode == 0, done.stderr
    count = len(list((exported / "kiwi").iterdir()))
    assert done.stdout.strip().endswith(f"kiwi ({count})")
    assert service.wait_until_ended(done.stdout.split()[1].rstrip(":"))["state"] == "published"


# Watching


def test_a_task_is_watched_until_it_is_published(service: Loop) -> None:
    task = service.submit(batch("cherry")).json()["id"]
    done = run("watch_task.py", task, url=service.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"published as version {service.task(task)['version']}"


def test_watching_an_unknown_task_ends_with_the_servers_message(service: Loop) -> None:
    done = run("watch_task.py", "no-such-task", url=service.url)
    assert done.returncode == 1
    assert "the server refused: " in done.stderr
    assert "no-such-task" in done.stderr


# All of them


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_documented_and_listed(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) <= 80
    assert f"python examples/{example.name} " in text.partition('"""')[2].partition('"""')[0]
    assert f"({example.name})" in (ROOT / "examples" / "README.md").read_text()
    done = run(example.name, "--help", url="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr


def test_there_are_at_least_five_examples() -> None:
    assert len(EXAMPLES) >= 5
