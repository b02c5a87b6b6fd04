"""`python -m benchmarks.scaling.limit`: the limit of every server, one frozen forward pass per image by ONNX Runtime.

One loop per core, each with one thread and batches as the server computes them: the trunk and the frozen feature, no
HTTP, no decoding, no task.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from models.inference.predictor import Predictor


def images_per_second(data: Path, cores: int, batch: int, warm: float, seconds: float) -> float:
    predictor = Predictor.open(data, device="cpu", threads=1)
    crop = predictor.preprocessing.crop
    pixels = np.random.default_rng(0).standard_normal((batch, 3, crop, crop)).astype(np.float32)

    def loop(begins: float) -> int:
        done = 0
        while (now := time.perf_counter()) < begins + seconds:
            predictor.runtime.frozen_features(predictor.runtime.tokens(pixels))
            done += batch if now >= begins else 0
        return done

    begins = time.perf_counter() + warm
    with ThreadPoolExecutor(cores) as pool:
        done = sum(pool.map(loop, [begins] * cores))
    return done / (time.perf_counter() - begins)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.limit", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--warm", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    rate = images_per_second(args.data, args.cores, args.batch, args.warm, args.seconds)
    print(json.dumps({"images_per_second": round(rate, 2)}))


if __name__ == "__main__":
    main()
