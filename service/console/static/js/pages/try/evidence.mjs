// The evidence behind an answer: the values of every task and class, and the rule that combines them.

import { table } from "../../components/tables.mjs";
import { h } from "../../dom.mjs";
import { percent, short } from "../../format.mjs";

const RULES = {
  paper: "probability × coefficient, as in the paper",
  product: "probability × coefficient × likelihood under the frozen backbone",
  plain: "probability",
  frozen: "likelihood under the frozen backbone",
  logits: "outputs of the heads",
};

/** The evidence of POST /explain, or null while nothing is learned. */
export function evidence({ tasks, rule, constants, threshold, score }) {
  if (!tasks.length) return null;
  const classes = tasks
    .flatMap(({ task, classes }) => classes.map((entry) => ({ task, ...entry })))
    .sort((a, b) => b.score - a.score);
  const fitted = Object.entries(constants).map(([name, value]) => `${name.replaceAll("_", " ")} ${short(value)}`);
  return h(
    "details",
    { class: "evidence card", open: true },
    h("summary", {}, h("h2", {}, "Evidence")),
    h(
      "p",
      {},
      `Rule: ${RULES[rule] ?? rule}${fitted.length ? ` (${fitted.join(", ")})` : ""}. `,
      `The best score is ${short(score)}. Below the threshold ${short(threshold)}, an image is novel.`,
    ),
    table(
      "Tasks",
      ["Task", { number: "Coefficient" }, { number: "Probability of this task" }, { number: "Probability of ood" }],
      tasks.map((task) => [
        `${task.task + 1}: ${task.classes.map(({ name }) => name).join(", ")}`,
        { number: short(task.coefficient) },
        { number: percent(task.p_known, 1) },
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
        { number: "Log-score" },
      ],
      classes.map((entry) => [
        h("span", { class: entry === classes[0] ? "best" : null }, className(entry)),
        String(entry.task + 1),
        { number: percent(entry.probability, 1) },
        { number: short(entry.distance) },
        { number: short(entry.frozen_distance) },
        { number: short(entry.score) },
      ]),
    ),
    h(
      "p",
      { class: "muted" },
      "Distances are Mahalanobis distances in the features of the task and of the frozen backbone. The ood output of a",
      " task's head means none of its classes.",
    ),
  );
}

const className = ({ name, label }) =>
  label === name ? name : label === null ? `${name} (retired)` : `${name} (now ${label})`;
