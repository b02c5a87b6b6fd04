// Tables and lists of facts.

import { h } from "../dom.mjs";
import { fixed, percent } from "../format.mjs";

/** A table that scrolls sideways when it is too wide. A cell { number: text } is aligned to the right. */
export function table(caption, head, rows) {
  const row = (tag, values) =>
    h(
      "tr",
      {},
      values.map((value) =>
        h(
          tag,
          { class: value?.number === undefined ? null : "number", scope: tag === "th" ? "col" : null },
          value?.number ?? value,
        ),
      ),
    );
  return h(
    "div",
    { class: "scroll", role: "group", "aria-label": caption, tabindex: "0" },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h("thead", {}, row("th", head)),
      h(
        "tbody",
        {},
        rows.map((values) => row("td", values)),
      ),
    ),
  );
}

/** A list of names and values; entries without a value are left out. */
export const factList = (facts) =>
  h(
    "dl",
    {},
    Object.entries(facts)
      .filter(([, value]) => value)
      .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );

const LEAST_CLASSES_FOR_AUC = 5; // as in service/wire/versions.py

/** Whether the estimate of the AUC is worth showing. */
export const showsAuc = (auc, classes) => auc !== null && classes >= LEAST_CLASSES_FOR_AUC;

/** What a version with so many classes, or the result of a task, should reach on fresh images; null if it does not say. */
export function estimate({ accuracy = null, novelty_auc: auc = null }, classes) {
  if (accuracy === null && auc === null) return null;
  const parts = [accuracy !== null && `accuracy ${percent(accuracy, 1)}`];
  if (showsAuc(auc, classes)) parts.push(`novelty AUC ${fixed(auc, 3)}`);
  if (classes < LEAST_CLASSES_FOR_AUC) parts.push("too few classes to estimate how well novel images are recognised");
  return parts.filter(Boolean).join(", ");
}

/** The gate's report: each task on its held-out images, before and after a version was trained. */
export const gateTable = (reports) =>
  table(
    "Evaluation on held-out images",
    [
      "Task",
      { number: "Images" },
      { number: "Accuracy before" },
      { number: "after" },
      { number: "AUC before" },
      { number: "after" },
    ],
    reports.map((report) => [
      `${report.task + 1}: ${report.classes.join(", ")}`,
      { number: report.images },
      { number: percent(report.accuracy_before) },
      { number: percent(report.accuracy_after) },
      { number: fixed(report.auc_before, 3) },
      { number: fixed(report.auc_after, 3) },
    ]),
  );
