"""Ask the service about each frame of a camera, and print what it sees.

    python examples/camera_loop.py frames/                          a folder with images, in the order of their names
    python examples/camera_loop.py http://camera.local/snapshot.jpg an address that returns one image per request
    python examples/camera_loop.py rtsp://camera.local/stream       a video stream; needs OpenCV
    python examples/camera_loop.py 0                                the first camera of this machine; needs OpenCV

The client retries when the server is busy or restarting. If a frame still has no answer after one second, the loop
reports that and continues with the next frame: an old frame is of no use to a robot.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from service.client import ApiError, Client, Unreachable

ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}


def frames(source: str) -> Iterator[bytes]:
    """Encoded images from a folder, a snapshot address, or anything that OpenCV opens."""
    folder = Path(source)
    if folder.is_dir():
        yield from (path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix.lower() in ENDINGS)
    elif source.startswith(("http://", "https://")):
        while True:
            try:
                with urllib.request.urlopen(source, timeout=5) as response:
                    yield response.read()
            except OSError as error:
                print(f"no frame from '{source}': {error}", file=sys.stderr, flush=True)
                time.sleep(1)
    else:
        yield from _video(source)


def _video(source: str) -> Iterator[bytes]:
    try:
        import cv2
    except ModuleNotFoundError:
        sys.exit(f"'{source}' is not a folder, and a video needs OpenCV: pip install opencv-python-headless")
    camera = cv2.VideoCapture(int(source) if source.isdecimal() else source)
    if not camera.isOpened():
        sys.exit(f"cannot open the camera '{source}': check the number or the address")
    while True:
        read, frame = camera.read()
        if not read:
            return
        yield cv2.imencode(".jpg", frame)[1].tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what the service sees in each frame of a camera.")
    parser.add_argument("source", help="a folder, a snapshot address, a stream's address, or a camera's number")
    parser.add_argument("--fps", type=float, default=5.0, help="frames per second at most (default 5)")
    parser.add_argument("--url", default=os.environ.get("OPENWORLD_URL", "http://127.0.0.1:8000"))
    arguments = parser.parse_args()
    with Client(arguments.url, os.environ.get("OPENWORLD_KEY"), timeout=1.0) as client:
        for number, frame in enumerate(frames(arguments.source)):
            started = time.monotonic()
            try:
                print(f"frame {number}: {client.predict(frame).in_words()}", flush=True)
            except (ApiError, Unreachable) as error:
                print(f"frame {number}: no answer: {error}", file=sys.stderr, flush=True)
            time.sleep(max(0.0, 1 / arguments.fps - (time.monotonic() - started)))


if __name__ == "__main__":
    main()
