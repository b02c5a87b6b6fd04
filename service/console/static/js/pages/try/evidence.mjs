// The evidence behind an answer: the values of every task and class, and the rule that combines them.

import { factList, table } from "../../components/tables.mjs";
import { h } from "../../dom.mjs";
import { fixed, percent, short } from "../../format.mjs";

const RULES = {
  paper: "probability × coefficient, as in the paper",
  fitted: "a weighted sum of the evidence, with weights fitted on left-out images",
};

const logScore = (value) => fixed(value, 1);

/** The evidence of POST /explain, or null while nothing is learned. */
export function evidence(explanation) {
  const { tasks, rule, weights, threshold, score, p_novel: pNovel, novel_above: novelAbove } = explanation;
  if (!tasks.length) return null;
  const classes = tasks
    .flatMap(({ task, classes }) => classes.map((entry) => ({ task, ...entry })))
    .sort((a, b) => b.score - a.score);
  const fitted = Object.entries(weights).map(([name, value]) => `${name.replaceAll("_", " ")} ${short(value)}`);
  return h(
    "details",
    { class: "evidence card" },
    h("summary", {}, h("h2", {}, "Details for experts")),
    h(
      "p",
      {},
      "A log-score says how well a class fits, on a logarithmic scale: the highest one wins. Whether the image is novel",
      " is decided apart from it, by the novelty score. Both have a meaning within a version only.",
    ),
    factList({
      "Novelty score": `${fixed(score, 2)}, higher for known images`,
      Threshold: threshold === null ? null : `${fixed(threshold, 2)}; an image that scores lower is novel`,
      "Probability of novel": `${percent(pNovel, 1)}, from the novelty score; novel above ${percent(novelAbove, 1)}`,
      Rule: `${RULES[rule] ?? rule}${fitted.length ? ` (${fitted.join(", ")})` : ""}`,
    }),
    table(
      "Tasks",
      ["Task", { number: "Coefficient" }, { number: "Probability of ood" }],
      tasks.map((task) => [
        `${task.task + 1}: ${task.classes.map(({ name }) => name).join(", ")}`,
        { number: short(task.coefficient) },
        { number: percent(task.p_ood, 1) },
      ]),
    ),
    table(
      "Classes",
      [
        "Class",
        "Task",
        { number: "Probability" },
        { number: "Distance" },
        { number: "Frozen distance" },
        { number: "Frozen cosine" },
        { number: "Output cosine" },
        { number: "Ridge" },
        { number: "Log-score" },
      ],
      classes.map((entry) => [
        h("span", { class: entry === classes[0] ? "best" : null }, className(entry)),
        String(entry.task + 1),
        { number: percent(entry.probability, 1) },
        { number: short(entry.distance) },
        { number: short(entry.frozen_distance) },
        { number: fixed(entry.frozen_cosine, 2) },
        { number: fixed(entry.output_cosine, 2) },
        { number: fixed(entry.ridge, 2) },
        { number: logScore(entry.score) },
      ]),
    ),
    h(
      "p",
      { class: "muted" },
      "Distances are Mahalanobis distances in the features of the task and of the frozen backbone; the cosines are taken",
      " in the whitened frozen features, all of them or the backbone's output alone, and ridge regression gives about 1 for the right class. The ood output of a",
      " task's head means none of its classes.",
    ),
  );
}

const className = ({ name, label }) =>
  label === name ? name : label === null ? `${name} (retired)` : `${name} (now ${label})`;
