"""The dashboard of those who keep the two programs running."""

from __future__ import annotations

from parts import Json, Query, board, graph, number, steps, table

LOOKING = 'route!~"/livez|/readyz|/metrics|/v2/health/.*"'


def quantile(share: float, bucket: str, by: str = "le", window: str = "$__rate_interval") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate({bucket}[{window}])))"


READY_NOW = number(
    "Servers that are ready",
    "Loaded, warm and not draining.",
    Query("sum(openworld_ready)"),
    unit="none",
    thresholds=(("red", None), ("green", 1)),
)
RATE_NOW = number(
    "Requests a second",
    "Over the last five minutes, without probes.",
    Query("sum(job:openworld_requests:rate5m)"),
    unit="reqps",
)
ERRORS_NOW = number(
    "Errors of the server",
    "Share of requests that ended with 5xx, over five minutes, without probes.",
    Query("max(job:openworld_errors:ratio_rate5m)"),
    unit="percentunit",
    thresholds=steps(0.01, 0.05),
)
P99_NOW = number(
    "Slowest answers (p99)",
    "One in a hundred requests to /predict takes longer than this, over five minutes.",
    Query('max(job_route:openworld_request_duration_seconds:p99_rate5m{route="/predict"})'),
    unit="s",
    thresholds=steps(1, 5),
)
REQUESTS = graph(
    "Requests by route and code",
    "Without probes. 499 is a client that went away before its answer.",
    Query(
        f"sum by (route, code) (rate(openworld_requests_total{{{LOOKING}}}[$__rate_interval]))", "{{route}} {{code}}"
    ),
    unit="reqps",
    stacked=True,
)
LATENCY = graph(
    "Latency of /predict",
    "From a request's first byte to its answer's last, so a slow network is in it.",
    *(
        Query(quantile(share, 'openworld_request_duration_seconds_bucket{route="/predict"}'), name)
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    ),
    unit="s",
    thresholds=steps(1, 5),
)
STAGES = graph(
    "Latency by stage (p95)",
    "Where the time goes: reading a body, decoding an image, waiting for the engine, scoring a batch. Much waiting: "
    "the engine is the limit, so more servers help.",
    Query(quantile(0.95, "openworld_stage_duration_seconds_bucket", "le, stage"), "{{stage}}"),
    unit="s",
    thresholds=steps(1, 5),
)
BATCH = graph(
    "Batch size",
    "Images computed at once. A batch is what queued while the engine was busy: near OPENWORLD_SERVE_BATCH_SIZE it "
    "always is.",
    Query(
        "sum(rate(openworld_batch_size_sum[$__rate_interval]))"
        " / sum(rate(openworld_batch_size_count[$__rate_interval]))",
        "mean",
    ),
    Query(quantile(0.95, "openworld_batch_size_bucket"), "p95"),
    unit="short",
)
INSIDE = graph(
    "Images inside",
    "In flight: read, decoded, waiting or computed; at OPENWORLD_SERVE_IMAGES_IN_FLIGHT (256) the server answers 429. "
    "Queue: decoded and waiting.",
    Query("sum by (instance) (openworld_in_flight_images)", "in flight, {{instance}}"),
    Query("sum by (instance) (openworld_queue_depth)", "queue, {{instance}}"),
    unit="short",
    thresholds=steps(128, 256),
)
REJECTS = graph(
    "Requests without an answer",
    "By reason: the server is full, a key sends too much, no version is loaded, a deadline passed, a client went away.",
    Query("sum by (reason) (rate(openworld_rejected_total[$__rate_interval]))", "{{reason}}"),
    unit="reqps",
    stacked=True,
)
CLIENTS = graph(
    "Images by client",
    "Of the chosen clients, a second, whatever the outcome.",
    Query('sum by (client) (rate(openworld_predictions_total{client=~"$client"}[$__rate_interval]))', "{{client}}"),
    unit="cps",
    stacked=True,
)
VERSIONS = table(
    "Who answers with which version",
    "Every server has one. The sha256 is that of the version's manifest: two servers with one number and two hashes do "
    "not share a data folder.",
    Query("openworld_model_info"),
)
SWAPS = graph(
    "Swaps and load failures",
    "In the last five minutes. A failure leaves the version before in place; GET /versions says why.",
    Query("sum by (instance) (increase(openworld_model_swaps_total[5m]))", "swaps, {{instance}}"),
    Query("sum by (instance, reason) (increase(openworld_model_load_failures_total[5m]))", "{{reason}}, {{instance}}"),
    unit="short",
)
LOADING = graph(
    "Time to load a version",
    "To verify, load and warm it, over the last day; the version before answers meanwhile.",
    Query(
        "sum(increase(openworld_model_load_duration_seconds_sum[1d]))"
        " / sum(increase(openworld_model_load_duration_seconds_count[1d]))",
        "mean",
    ),
    Query(quantile(0.95, "openworld_model_load_duration_seconds_bucket", window="1d"), "p95"),
    unit="s",
)
TASKS = graph(
    "Tasks by state",
    "All that Redis keeps: those that wait, the one that is being learned, and what became of the others.",
    Query("max by (state) (openworld_task_queue_depth)", "{{state}}"),
    unit="short",
)
AGE = graph(
    "Age of the oldest unfinished task",
    "Grows while a task is learned, too: compare it with the progress. 0: nothing waits.",
    Query("max(openworld_task_age_seconds)", "age"),
    unit="s",
    thresholds=steps(bad=1800),
)
PROGRESS = graph(
    "Progress of the task that is learned",
    "0 while idle. Flat for half an hour beside an old task: the queue is stalled.",
    Query("max by (instance) (openworld_train_progress)", "{{instance}}"),
    unit="percentunit",
    top=1,
)
DURATION = graph(
    "Time to learn a task",
    "Whatever became of it, over the last day.",
    Query(quantile(0.5, "openworld_train_duration_seconds_bucket", window="1d"), "p50"),
    Query(quantile(0.95, "openworld_train_duration_seconds_bucket", window="1d"), "p95"),
    unit="s",
)
MEMORY = graph(
    "Memory",
    "Resident, of each program. A server holds up to OPENWORLD_SERVE_BODY_MEMORY of bodies beside its versions.",
    Query('process_resident_memory_bytes{job=~"openworld-.*"}', "{{job}} {{instance}}"),
    unit="bytes",
)
CPU = graph(
    "CPU",
    "Cores that each program keeps busy.",
    Query('rate(process_cpu_seconds_total{job=~"openworld-.*"}[$__rate_interval])', "{{job}} {{instance}}"),
    unit="none",
)


def serving() -> Json:
    return board(
        "openworld-serving",
        "Service and trainer",
        "Requests, the model that answers them, and the tasks that become the next one.",
        [
            ("Now", [READY_NOW, RATE_NOW, ERRORS_NOW, P99_NOW]),
            ("Requests", [REQUESTS, LATENCY, STAGES, BATCH, INSIDE, REJECTS, CLIENTS]),
            ("Versions", [VERSIONS, SWAPS, LOADING]),
            ("Trainer", [TASKS, AGE, PROGRESS, DURATION]),
            ("Processes", [MEMORY, CPU]),
        ],
    )
