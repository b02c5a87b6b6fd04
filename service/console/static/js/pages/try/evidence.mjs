// The evidence behind an answer: every task's probabilities and distances, and how the rule weighs them.

import { h, table } from "../../dom.mjs";
import { percent, short } from "../../format.mjs";

const RULES = {
  paper: "probability times coefficient (the paper's equation)",
  product: "probability times coefficient times the frozen backbone's likelihood",
  plain: "the probabilities alone",
  frozen: "the frozen backbone's likelihood alone",
  logits: "the heads' outputs as they are",
};

export function evidence(explanation) {
  const { tasks, rule, constants, threshold, score } = explanation;
  if (!tasks.length) return null;
  const best = Math.max(...tasks.flatMap((task) => task.classes.map((one) => one.score)));
  const fitted = Object.entries(constants).map(([name, value]) => `${name.replaceAll("_", " ")} ${short(value)}`);
  return h(
    "details",
    { class: "evidence card", open: true },
    h("summary", {}, h("h2", {}, "Why")),
    h(
      "p",
      {},
      `The rule is ${RULES[rule] ?? rule}`,
      fitted.length ? ` (${fitted.join(", ")}).` : ".",
      ` The best score is ${short(score)}; below ${short(threshold)} an image is novel.`,
    ),
    table(
      "Every task's network",
      ["Task", { n: "Coefficient" }, { n: "Of this task" }, { n: "Of none of its classes" }],
      tasks.map((task) => [
        `${task.task + 1}: ${task.classes.map((one) => one.name).join(", ")}`,
        { n: short(task.coefficient) },
        { n: percent(task.p_known, 1) },
        { n: percent(task.p_ood, 1) },
      ]),
    ),
    table(
      "Every class",
      ["Class", "Task", { n: "Probability" }, { n: "Distance" }, { n: "Frozen distance" }, { n: "Log-score" }],
      tasks
        .flatMap((task) => task.classes.map((one) => ({ task, one })))
        .sort((a, b) => b.one.score - a.one.score)
        .map(({ task, one }) => [
          h("span", { class: one.score === best ? "best" : null }, called(one)),
          String(task.task + 1),
          { n: percent(one.probability, 1) },
          { n: short(one.distance) },
          { n: short(one.frozen_distance) },
          { n: short(one.score) },
        ]),
    ),
    h(
      "p",
      { class: "quiet" },
      "Distances are Mahalanobis distances, in the task's own features and in the frozen backbone's.",
    ),
  );
}

const called = ({ name, label }) =>
  label === name ? name : label === null ? `${name} (retired)` : `${name} (now ${label})`;
