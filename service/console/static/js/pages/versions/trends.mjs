// How accuracy, AUC, forgetting and capacity went from version to version, up to the one that answers.

import { legend, lineChart } from "../../components/charts.mjs";
import { h } from "../../dom.mjs";
import { fixed, listed, percent } from "../../format.mjs";

const LONGEST = 30; // versions
const COLOURS = 6;

const kindOf = (task) => `s${task % COLOURS}`;

/** `line`: the versions from the first to the serving one; `detailOf(n)` has the gate's reports. */
export async function trends(line, detailOf) {
  const details = await Promise.all(line.slice(-LONGEST).map(({ version }) => detailOf(version).catch(() => null)));
  const judged = details.filter((one) => one?.reports.length);
  if (judged.length < 2)
    return [
      h("h2", {}, "Over the versions"),
      h("p", { class: "quiet" }, "Plots appear with the second version that the gate has judged."),
    ];
  const count = Math.max(...judged.map((one) => one.reports.length));
  const tasks = [...Array(count).keys()];
  const names = tasks.map((task) => judged.at(-1).reports[task]?.classes ?? []);
  const of = (task, name) => judged.map(({ reports }, place) => [place, reports[task]?.[name] ?? null]);
  const xTicks = judged
    .map(({ version }, at) => ({ at, text: String(version) }))
    .filter(({ at }) => spaced(at, judged.length));
  const plot = (title, series, y, said) =>
    h(
      "figure",
      {},
      h("figcaption", {}, title),
      lineChart({ label: said, series, y, yTicks: y, xTicks, x: [0, judged.length - 1], yFormat: percent, dots: true }),
    );
  const byTask = (name) =>
    tasks.map((task) => ({ name: `task ${task + 1}`, points: of(task, name), kind: kindOf(task) }));
  const accuracy = byTask("accuracy_after"),
    auc = byTask("auc_after");
  const low = (series) => floor(series.flatMap((one) => one.points.map((point) => point[1])));
  const lost = judged.map((one, place) => [place, forgetting(judged, place)]);
  const taken = judged.map((one, place) => [place, one.capacity.used_max ?? null]);
  const now = lost.at(-1)[1];
  return [
    h("h2", {}, "Over the versions"),
    legend(tasks.map((task) => ({ name: `task ${task + 1}: ${listed(names[task], 3)}`, kind: kindOf(task) }))),
    h(
      "div",
      { class: "grid" },
      plot("Accuracy on held-out images", accuracy, [low(accuracy), 1], told("Accuracy", accuracy)),
      plot("AUC on held-out images", auc, [low(auc), 1], told("AUC", auc)),
      plot(
        `Forgetting${now === null ? "" : `, ${percent(now, 1)} now`}`,
        [{ points: lost, kind: "s0" }],
        [0, Math.max(0.1, ...lost.map((p) => p[1] ?? 0))],
        `Mean loss of accuracy of earlier tasks against their best: ${percent(now, 1)} now`,
      ),
      plot(
        `Capacity taken, ${percent(taken.at(-1)[1])} now`,
        [{ points: taken, kind: "s0" }],
        [0, 1],
        `Share of the fullest adapter that is taken: ${percent(taken.at(-1)[1])} now`,
      ),
    ),
  ];
}

/** At most some eight of the numbers under an axis, the last one among them. */
const spaced = (place, count) => (count - 1 - place) % Math.ceil(count / 8) === 0;

/** A round share below all of them, so that small differences are seen. */
function floor(values) {
  const least = Math.min(1, ...values.filter((value) => value !== null));
  return Math.max(0, Math.floor(10 * least - 0.5) / 10);
}

/** How much accuracy the earlier tasks have lost against their best, on average; null for the first version. */
export function forgetting(judged, place) {
  const lost = judged[place].reports.flatMap(({ accuracy_after: now }, task) => {
    const before = judged
      .slice(0, place)
      .map(({ reports }) => reports[task]?.accuracy_after ?? null)
      .filter((value) => value !== null);
    return now === null || !before.length ? [] : [Math.max(...before) - now];
  });
  return lost.length ? Math.max(0, lost.reduce((sum, one) => sum + one, 0) / lost.length) : null;
}

const told = (what, series) =>
  `${what} over the versions: ${series.map(({ name, points }) => `${name} ${fixed(points.at(-1)[1])} now`).join(", ")}`;
