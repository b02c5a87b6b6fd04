# Two images from one wheel. `server` has ONNX Runtime and no PyTorch; `trainer` has PyTorch.
#
#   docker build --target server -t openworld-server .
#   docker build --target trainer -t openworld-trainer .
#
# BuildKit is needed for the mounts: it is the default since Docker 23. `make images` builds both with buildah.

# This image, a mirror of it, or another one with Debian's tools and Python 3.11 or newer.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# A mirror, or an index with CPU wheels of PyTorch. No credentials: build arguments are in the history of an image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# ONNX Runtime: the CPU wheel, or onnxruntime-gpu[cuda,cudnn] with the CUDA libraries that it needs. Both write to the same
# folder: this one replaces what pyproject.toml asks for, in its range of versions.
ARG ONNX_RUNTIME=onnxruntime
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY pyproject.toml ./
# Dependencies in their own layer: several gigabytes, installed again only when this list changes.
RUN for extra in serve train; do \
        python -c "import re, sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
            extras = project['optional-dependencies']; \
            names = ('inference', 'scale', sys.argv[1]); \
            lines = project['dependencies'] + [line for name in names for line in extras[name]]; \
            lines = [re.sub('^onnxruntime[^<>=]*([^;]*).*', sys.argv[2] + r'\1', line) for line in lines]; \
            print(*sorted({line for line in lines if not line.startswith('openworld[')}), sep='\n')" \
        "$extra" "$ONNX_RUNTIME" > "$extra.txt" || exit 1; \
    done
COPY LICENSE ./
COPY models models
COPY tasks tasks
COPY trainer trainer
COPY service service
COPY openworld openworld
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --no-deps --wheel-dir wheels .

FROM ${BASE} AS base
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# Python files belong to root and are compiled at installation: nothing is written at run time.
# ONNX Runtime sends telemetry unless ORT_DISABLE_TELEMETRY is set (its Privacy.md).
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    OPENWORLD_DATA=/data
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="The openworld authors"
# A fixed user id: server and trainer, also of the next release, can write to the same volume.
RUN groupadd --gid 10001 openworld \
    && useradd --uid 10001 --gid openworld --create-home --shell /usr/sbin/nologin openworld \
    && install --directory --owner=openworld --group=openworld /data
WORKDIR /home/openworld
VOLUME /data
STOPSIGNAL SIGTERM
ENTRYPOINT ["openworld"]

FROM base AS server
LABEL org.opencontainers.image.title="openworld server" \
      org.opencontainers.image.description="Answers POST /predict: a learned class, or novel"
COPY --from=build /build/serve.txt /opt/openworld/requirements.txt
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -r /opt/openworld/requirements.txt
# The list above is complete: with its dependencies the wheel would install the other ONNX Runtime as well.
RUN --mount=type=bind,from=build,source=/build/wheels,target=/wheels \
    pip install --no-deps /wheels/*.whl && pip check
# Set here, not in CMD: the health check needs it as well.
ENV OPENWORLD_PORT=8000
EXPOSE 8000
USER 10001:10001
# /livez: a server that is not ready must not be restarted. http.client: urllib might use a proxy.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-I", "-c", "import http.client, os, sys; \
        server = http.client.HTTPConnection('127.0.0.1', int(os.environ['OPENWORLD_PORT']), timeout=4); \
        server.request('GET', '/livez'); \
        sys.exit(server.getresponse().status != 200)"]
# Needs OPENWORLD_KEYS: the server refuses to listen on other addresses than loopback without keys.
CMD ["serve", "--host", "0.0.0.0"]

FROM base AS trainer
LABEL org.opencontainers.image.title="openworld trainer" \
      org.opencontainers.image.description="Learns submitted tasks one after the other and publishes versions"
COPY --from=build /build/train.txt /opt/openworld/requirements.txt
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -r /opt/openworld/requirements.txt
# The list above is complete: with its dependencies the wheel would install the other ONNX Runtime as well.
RUN --mount=type=bind,from=build,source=/build/wheels,target=/wheels \
    pip install --no-deps /wheels/*.whl && pip check
ENV OPENWORLD_TRAIN_METRICS_HOST=0.0.0.0 \
    OPENWORLD_TRAIN_METRICS_PORT=8001 \
    HF_HUB_DISABLE_TELEMETRY=1
EXPOSE 8001
USER 10001:10001
# openworld_train_alive is the worker's heartbeat: /metrics alone answers also while the worker hangs.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "-I", "-c", "import http.client, os, sys; \
        trainer = http.client.HTTPConnection('127.0.0.1', int(os.environ['OPENWORLD_TRAIN_METRICS_PORT']), timeout=9); \
        trainer.request('GET', '/metrics'); \
        sys.exit(b'openworld_train_alive 1.0' not in trainer.getresponse().read().splitlines())"]
CMD ["train"]
