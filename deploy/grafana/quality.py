"""The dashboard of those who ask whether the answers are still good."""

from __future__ import annotations

from parts import Json, Query, board, graph, heatmap, number, steps, table

MINE = 'client=~"$client"'
ANSWERED = f'openworld_predictions_total{{outcome=~"known|novel", {MINE}}}[$__rate_interval]'
NOVEL = f'openworld_predictions_total{{outcome="novel", {MINE}}}[$__rate_interval]'
CHANCE = "22 * (1 / openworld_score_drift_samples + 1 / openworld_score_reference_points)"

OOD_NOW = number(
    "Novel in the last hour",
    "Share of novel among the images that were answered, all clients. Some 5 % of known images are called novel by "
    "design. Without a version that has learned something there is no rate.",
    Query("max(job:openworld_ood:ratio_rate1h)"),
    unit="percentunit",
    thresholds=steps(0.3, 0.5),
)
VERSION_NOW = number(
    "Version that answers",
    "More than one: the servers do not agree, or are just swapping. 0: nothing is learned, everything is novel.",
    Query("max by (version) (openworld_model_info)", "{{version}}"),
    unit="none",
    name=True,
)
DRIFT_NOW = number(
    "Score drift now",
    "Of the server that drifts most. Below 0.1 nothing has changed, above 0.25 much has. Empty while there are too few "
    "scores since the last swap.",
    Query("max(openworld_score_drift_psi)"),
    unit="none",
    thresholds=steps(0.1, 0.25),
)
WAITING_NOW = number(
    "Novelties to look at",
    "Novel images in the inbox that nobody has labelled or dismissed. It holds 5000 by default.",
    Query('sum(openworld_novelties{state="new"})'),
    unit="short",
    thresholds=steps(2500, 4500),
)
OOD = graph(
    "OOD rate",
    "Share of novel among the images that were answered: of the chosen clients now, and of each version over the last "
    "hour (all clients). High: something new, or bad images. Near zero right after a swap: the version accepts what "
    "it does not know.",
    Query(f"(sum(rate({NOVEL})) or vector(0)) / (sum(rate({ANSWERED})) > 0)", "chosen clients"),
    Query("job_version:openworld_ood:ratio_rate1h", "version {{version}}, last hour"),
    unit="percentunit",
    thresholds=steps(bad=0.5),
    top=1,
)
OUTCOMES = graph(
    "Images by outcome",
    "Images of the chosen clients a second: known, novel, or error when one could not be read.",
    Query(
        f"sum by (outcome) (rate(openworld_predictions_total{{{MINE}}}[$__rate_interval]))",
        "{{outcome}}",
    ),
    unit="cps",
    stacked=True,
)
SCORES = heatmap(
    "Calibrated scores against the uniform",
    "How often a score occurs, by what is expected: 1 (pale) everywhere is what the version was calibrated on. Red "
    "below: images that look like nothing known; red at the top: images more typical than the held-out ones.",
    Query(
        "20 * sum by (le) (increase(openworld_calibrated_score_bucket[$__rate_interval]))"
        " / scalar(sum(increase(openworld_calibrated_score_count[$__rate_interval])))",
        "{{le}}",
    ),
    unit="none",
    middle=1,
)
DRIFT = graph(
    "Score drift (PSI)",
    "Distance of the scores of the last hour (2000 at most) from the uniform, each server by itself. An alert needs "
    "more than 0.25, and more than `chance`: below that line an index says nothing, for the version has few held-out "
    "images. It starts again at every swap.",
    Query("openworld_score_drift_psi", "{{instance}}"),
    Query(f"max({CHANCE} < 10)", "chance"),
    unit="none",
    thresholds=steps(0.1, 0.25),
)
ACCURACY = graph(
    "Accuracy a task",
    "Of the held-out images of each task in the last version that was learned, since the trainer was started.",
    Query("max by (task) (openworld_eval_accuracy)", "task {{task}}"),
    unit="percentunit",
    top=1,
)
AUC = graph(
    "AUC a task",
    "How well a task's own score tells its images from all others: 0.5 is guessing. Of the last version learned.",
    Query("max by (task) (openworld_eval_auroc)", "task {{task}}"),
    unit="percentunit",
    top=1,
)
FORGETTING = graph(
    "Forgetting",
    "Accuracy that the old tasks lost with the last version, on average. The gate refuses a version that loses more "
    "than 15 points (OPENWORLD_TRAIN_GATE_ACCURACY).",
    Query("max(openworld_forgetting)", "lost"),
    unit="percentunit",
    thresholds=steps(0.05, 0.15),
)
CAPACITY = graph(
    "Capacity used",
    "Share of the fullest adapter that tasks have taken. From 80 % on the adapters grow, so "
    "this never ends learning; it costs memory and time.",
    Query("max(openworld_capacity_used_ratio)", "used"),
    unit="percentunit",
    thresholds=steps(0.8),
    top=1,
)
NOVELTIES = graph(
    "Novelties by state",
    "Images in the inbox. Many that are new and few that are labelled: nobody looks.",
    Query("sum by (state) (openworld_novelties)", "{{state}}"),
    unit="short",
    stacked=True,
    width=8,
)
BYTES = graph(
    "Bytes in the inbox",
    "Of the images; at OPENWORLD_SERVE_INBOX_BYTES (1 GiB) the least wanted leave.",
    Query("sum(openworld_novelties_bytes)", "images"),
    unit="bytes",
    width=8,
)
INBOX = graph(
    "Novelties that were folded or dropped",
    "Folded: like one that is there. Dropped: not kept, by reason; rate and queue mean that more came than the inbox "
    "takes.",
    Query("sum(rate(openworld_novelties_folded_total[$__rate_interval]))", "folded"),
    Query("sum by (reason) (rate(openworld_novelties_dropped_total[$__rate_interval]))", "dropped: {{reason}}"),
    unit="cps",
    width=8,
)
ALERTS = table(
    "Alerts",
    "What fires or is about to; docs/operations.md has a section for each.",
    Query('ALERTS{alertname=~"Openworld.*"}'),
    hide=("job",),
    width=24,
)


def quality() -> Json:
    return board(
        "openworld-quality",
        "OOD and quality",
        "What the robots see, what of it is new, and how well the versions know the rest.",
        [
            ("Now", [OOD_NOW, VERSION_NOW, DRIFT_NOW, WAITING_NOW]),
            ("What is answered", [OOD, OUTCOMES, SCORES, DRIFT]),
            ("What was learned", [ACCURACY, AUC, FORGETTING, CAPACITY]),
            ("What waits for people", [NOVELTIES, BYTES, INBOX, ALERTS]),
        ],
    )
