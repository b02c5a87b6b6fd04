"""`python -m benchmarks.serving.bare`: the same model, images and threads without a server.

The reference for the servers. Model and machine decide which of two loops is faster; the faster one is the bar:

    sequential   decode a batch, score it, repeat
    overlapped   a thread pool decodes the next images while a batch is scored, as the service does

A third loop is reported for comparison: `parallel`, one loop per thread, each with one ONNX Runtime thread and one
image at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

from benchmarks.serving.figures import Measured
from benchmarks.serving.load import EXPECTED
from models.inference.evidence import Array
from models.inference.predictor import Predictor

Rate = dict[str, float]  # images_per_second and cpu_ms_per_image

AHEAD = 2  # batches decoded in advance, so that scoring never waits


def one_by_one(predictor: Predictor, images: Sequence[bytes], warm: float, seconds: float) -> Measured:
    """Latency of decode and score, one image at a time."""
    begins = time.perf_counter() + warm
    latencies: list[float] = []
    for image in cycle(images):
        started = time.perf_counter()
        if started >= begins + seconds:
            break
        predictor.score([predictor.decode(image)])
        if started >= begins:
            latencies.append(time.perf_counter() - started)
    return Measured.of(latencies, seconds)


def sequential(predictor: Predictor, images: Sequence[bytes], batch: int, warm: float, seconds: float) -> Rate:
    endless = cycle(images)
    return _rate(lambda: predictor.score([predictor.decode(next(endless)) for _ in range(batch)]), batch, warm, seconds)


def overlapped(
    predictor: Predictor, images: Sequence[bytes], batch: int, decoders: int, warm: float, seconds: float
) -> Rate:
    endless = cycle(images)
    waiting: deque[Future[Array]] = deque()
    with ThreadPoolExecutor(decoders) as pool:

        def step() -> None:
            while len(waiting) < (1 + AHEAD) * batch:
                waiting.append(pool.submit(predictor.decode, next(endless)))
            predictor.score([waiting.popleft().result() for _ in range(batch)])

        rate = _rate(step, batch, warm, seconds)
        pool.shutdown(cancel_futures=True)
    return rate


def parallel(predictor: Predictor, images: Sequence[bytes], loops: int, warm: float, seconds: float) -> Rate:
    """Single-threaded loops side by side. They synchronise after each pass, so that every image is counted."""
    with ThreadPoolExecutor(loops) as pool:

        def step() -> None:
            list(pool.map(lambda image: predictor.score([predictor.decode(image)]), images))

        return _rate(step, len(images), warm, seconds)


def _rate(step: Callable[[], object], images: int, warm: float, seconds: float) -> Rate:
    begins = time.perf_counter() + warm
    while time.perf_counter() < begins:
        step()
    started, cpu, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() < started + seconds:
        step()
        done += images
    rate = done / (time.perf_counter() - started)
    return {
        "images_per_second": round(rate, 2),
        "cpu_ms_per_image": round(1000 * (time.process_time() - cpu) / done, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.bare", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--decoders", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--warm", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    predictor = Predictor.open(args.data, threads=args.threads)
    images = [(args.images / name).read_bytes() for name in json.loads((args.images / EXPECTED).read_bytes())]
    timing = args.warm, args.seconds
    idle = one_by_one(predictor, images, *timing)
    rates = {
        "sequential": sequential(predictor, images, args.batch, *timing),
        "overlapped": overlapped(predictor, images, args.batch, args.decoders, *timing),
        "parallel": parallel(Predictor.open(args.data, threads=1), images, args.threads, *timing),
    }
    print(json.dumps({"idle": idle.to_dict(), **rates}))


if __name__ == "__main__":
    main()
