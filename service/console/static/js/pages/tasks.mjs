// Teaching: what is being learned, how far it is, and what the gate said in the end.

import { post, session } from "../api.mjs";
import { lineChart } from "../components/charts.mjs";
import { button, h, put, table } from "../dom.mjs";
import { ENDED, taught, tasks } from "../task_feed.mjs";
import { ago, duration, fixed, percent, short } from "../format.mjs";
import { complain, confirm, empty, problemBox } from "../components/notices.mjs";

const PHASES = {
  reading: "Reading the images",
  "back-updating": "Teaching the earlier heads",
  evaluating: "Judging on held-out images",
};

export async function show(body, { signal }) {
  const cards = new Map(); // id -> { card, task }: only what changed is drawn again, so that nothing loses its focus
  const draw = () => {
    if (!tasks.loaded) return put(body, h("p", { class: "quiet" }, "Looking…"));
    if (tasks.problem)
      return put(
        body,
        problemBox(tasks.problem, () => tasks.look()),
      );
    const all = tasks.all();
    if (!all.length) return put(body, nothing());
    for (const task of all) {
      const known = cards.get(task.id);
      if (known && JSON.stringify(known.task) === JSON.stringify(task)) continue;
      const card = known?.card ?? h("article", { class: "card task" });
      cards.set(task.id, { card, task });
      drawTask(card, task);
    }
    const wanted = all.map((task) => cards.get(task.id).card);
    if (wanted.length !== body.children.length || wanted.some((card, place) => card !== body.children[place]))
      put(body, wanted);
  };
  tasks.addEventListener("change", draw, { signal });
  draw();
}

const nothing = () =>
  empty(
    "Nothing has been taught yet",
    h("p", {}, "Name novel images in the inbox and teach them; or hand in a folder with a sub-folder a class:"),
    h("pre", {}, `openworld teach fruit/ --url ${location.origin}`),
    h("p", {}, "Two classes with ten images each are a good start."),
    session.may("label") && h("a", { class: "button main", href: "#/inbox" }, "Open the inbox"),
  );

function drawTask(card, task) {
  const names = Object.keys(task.counts);
  put(
    card,
    h(
      "header",
      {},
      h("h2", {}, names.join(", ")),
      h(
        "span",
        { class: `badge ${task.state}` },
        task.cancel_requested && !ENDED.has(task.state) ? "stopping" : task.state,
      ),
    ),
    h(
      "p",
      { class: "quiet" },
      `${taught(task)}, by ${task.submitted_by}, ${ago(task.created)}`,
      task.attempts > 1 && `, attempt ${task.attempts}`,
    ),
    task.reason && h("p", { class: task.state === "queued" ? "quiet" : "warn" }, task.reason),
    !ENDED.has(task.state) && progressOf(task),
    ENDED.has(task.state) && task.progress?.losses.length > 1 && curve(task),
    task.result?.tasks?.length > 0 && gateTable(task.result.tasks),
    h(
      "div",
      { class: "row" },
      task.version && h("a", { class: "button", href: `#/versions/${task.version}` }, `Version ${task.version}`),
      session.may("label") && !ENDED.has(task.state) && !task.cancel_requested && button("Cancel", () => cancel(task)),
      session.may("label") &&
        ["failed", "rejected", "cancelled"].includes(task.state) &&
        button("Try again", () => retry(task)),
    ),
  );
}

function progressOf(task) {
  const progress = task.progress;
  if (!progress) return h("p", {}, task.state === "queued" ? "Waiting for its turn." : "Beginning.");
  const phase = PHASES[progress.phase] ?? `Learning ${progress.phase}`;
  const unit = PHASES[progress.phase] ? "" : "epoch ";
  const epoch = progress.epochs > 1 ? `, ${unit}${progress.epoch} of ${progress.epochs}` : "";
  const left = progress.seconds_left === null ? "" : `about ${duration(progress.seconds_left)} left`;
  return h(
    "div",
    { class: "progressing" },
    h("div", { class: "row between" }, h("span", {}, phase, epoch), h("span", { class: "quiet" }, left)),
    h(
      "progress",
      { max: "1", value: progress.progress, "aria-label": "How much of the task is done" },
      percent(progress.progress),
    ),
    progress.losses.length > 1 && curve(task),
  );
}

function curve(task) {
  const losses = task.progress.losses;
  const points = losses.map((loss, place) => [place, loss]);
  return h(
    "figure",
    {},
    lineChart({
      label: `Loss over ${losses.length} reports: from ${short(losses[0])} to ${short(losses.at(-1))}`,
      series: [{ name: "loss", points }],
      y: [0, Math.max(...losses)],
      yFormat: short,
      height: 90,
    }),
    h(
      "figcaption",
      {},
      `Loss, ${short(losses.at(-1))} ${ENDED.has(task.state) ? "at the end" : "now"}. It starts afresh with every fold.`,
    ),
  );
}

/** What the gate found: each task on held-out images, before and after. */
export function gateTable(reports) {
  const change = (before, after) => [{ n: percent(before) }, { n: percent(after) }];
  const rows = reports.map((row) => [
    `${row.task + 1}: ${row.classes.join(", ")}`,
    { n: row.images },
    ...change(row.accuracy_before, row.accuracy_after),
    { n: fixed(row.auc_before, 3) },
    { n: fixed(row.auc_after, 3) },
  ]);
  const head = [
    "Task",
    { n: "Held out" },
    { n: "Accuracy before" },
    { n: "after" },
    { n: "AUC before" },
    { n: "after" },
  ];
  return table("Held-out images, before and after", head, rows);
}

async function cancel(task) {
  const question = {
    title: "Stop learning this?",
    text: "What was learned of it so far is dropped; the version that answers stays. You can try it again later.",
    action: "Stop it",
    danger: true,
  };
  if (!(await confirm(question))) return;
  try {
    tasks.add(await post(`tasks/${task.id}/cancel`));
  } catch (error) {
    complain(error, "It was not cancelled");
  }
}

async function retry(task) {
  try {
    tasks.add(await post(`tasks/${task.id}/retry`));
  } catch (error) {
    complain(error, "It was not queued again");
  }
}
