// Accuracy, AUC, forgetting and capacity over the versions that led to the active one.

import { legend, lineChart } from "../../components/charts.mjs";
import { h } from "../../dom.mjs";
import { fixed, joinNames, percent } from "../../format.mjs";

const MAX_VERSIONS = 30;
const MAX_TICKS = 8;
const COLOURS = 6; // .s0 to .s5 in css/figures.css

/** `lineage` are the versions from the first to the active one; `detailOf(number)` fetches GET /versions/{number}. */
export async function trends(lineage, detailOf) {
  const recent = lineage.slice(-MAX_VERSIONS);
  const details = await Promise.all(recent.map(({ version }) => detailOf(version).catch(() => null)));
  const evaluated = details.filter((detail) => detail?.reports.length);
  const heading = h("h2", {}, "Trends over the versions");
  if (evaluated.length < 2)
    return [heading, h("p", { class: "muted" }, "Charts appear when two versions have been evaluated.")];

  const last = evaluated.length - 1;
  const xTicks = evaluated
    .map(({ version }, at) => ({ at, text: String(version) }))
    .filter(({ at }) => (last - at) % Math.ceil(evaluated.length / MAX_TICKS) === 0);
  const chart = (title, series, y, label) =>
    h(
      "figure",
      {},
      h("figcaption", {}, title),
      lineChart({ label, series, x: [0, last], y, xTicks, yFormat: percent, dots: true }),
    );

  const taskCount = Math.max(...evaluated.map(({ reports }) => reports.length));
  const tasks = Array.from({ length: taskCount }, (_, task) => ({
    name: `task ${task + 1}`,
    classes: evaluated[last].reports[task]?.classes ?? [],
    kind: `s${task % COLOURS}`,
  }));
  const taskChart = (name, field) => {
    const series = tasks.map((entry, task) => ({
      ...entry,
      points: evaluated.map(({ reports }, index) => [index, reports[task]?.[field] ?? null]),
    }));
    const values = series.map(({ name: task, points }) => `${task} ${fixed(points[last][1])}`);
    return chart(
      `${name} on held-out images`,
      series,
      [lowerLimit(series.flatMap(({ points }) => points.map((point) => point[1]))), 1],
      `${name} over the versions, now ${values.join(", ")}`,
    );
  };
  const forgotten = evaluated.map((_, index) => [index, forgetting(evaluated, index)]);
  const capacity = evaluated.map((detail, index) => [index, detail.capacity.used_max ?? null]);
  const forgottenNow = percent(forgotten[last][1], 1);
  const capacityNow = percent(capacity[last][1]);
  return [
    heading,
    legend(tasks.map(({ name, classes, kind }) => ({ name: `${name}: ${joinNames(classes, 3)}`, kind }))),
    h(
      "div",
      { class: "grid" },
      taskChart("Accuracy", "accuracy_after"),
      taskChart("AUC", "auc_after"),
      chart(
        `Forgetting, now ${forgottenNow}`,
        [{ points: forgotten }],
        [0, Math.max(0.1, ...forgotten.map(([, share]) => share ?? 0))],
        `Mean loss of accuracy of earlier tasks, compared with their best: now ${forgottenNow}`,
      ),
      chart(
        `Used capacity, now ${capacityNow}`,
        [{ points: capacity }],
        [0, 1],
        `Used share of the fullest adapter: now ${capacityNow}`,
      ),
    ),
  ];
}

/** A multiple of 10 % below all values, so that small differences are visible. */
function lowerLimit(values) {
  const lowest = Math.min(1, ...values.filter((value) => value !== null));
  return Math.max(0, Math.floor(10 * lowest - 0.5) / 10);
}

/** The mean loss of accuracy of the earlier tasks, compared with their best; null for the first version. */
function forgetting(evaluated, index) {
  const losses = evaluated[index].reports.flatMap(({ accuracy_after: now }, task) => {
    const before = evaluated
      .slice(0, index)
      .map(({ reports }) => reports[task]?.accuracy_after ?? null)
      .filter((value) => value !== null);
    return now === null || !before.length ? [] : [Math.max(...before) - now];
  });
  return losses.length ? Math.max(0, losses.reduce((sum, loss) => sum + loss, 0) / losses.length) : null;
}
