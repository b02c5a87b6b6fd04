// Tasks: state, progress and result of every batch.

import { get, post, put, session } from "../api.mjs";
import { adviceBox } from "../components/advice.mjs";
import { lineChart } from "../components/charts.mjs";
import { confirmDialog, emptyState, problemBox, showError } from "../components/notices.mjs";
import { estimate, gateTable } from "../components/tables.mjs";
import { button, h, render } from "../dom.mjs";
import { duration, percent, plural, short, timeAgo } from "../format.mjs";
import { ENDED, taskFeed } from "../task_feed.mjs";

// Other phases are the name of what is trained, such as "task 4".
const PHASES = {
  reading: "Reading the images",
  "back-updating": "Back-updating earlier heads",
  evaluating: "Evaluating on held-out images",
};

export async function show(body, { signal }) {
  let bar = { paused: null, element: null };
  const drawnBar = () => {
    if (bar.paused !== taskFeed.paused) bar = { paused: taskFeed.paused, element: pauseBar() };
    return bar.element;
  };
  const cards = new Map(); // task id -> { card, content }; only changed cards are redrawn, so that the focus stays
  const draw = () => {
    if (!taskFeed.loaded) return render(body, h("p", { class: "muted" }, "Loading…"));
    if (taskFeed.problem)
      return render(
        body,
        problemBox(taskFeed.problem, () => taskFeed.poll()),
      );
    const tasks = taskFeed.all();
    if (!tasks.length) return render(body, pauseBar(), noTasks());
    const topBar = drawnBar();
    const wanted = tasks.map((task) => {
      const drawn = cards.get(task.id);
      const content = JSON.stringify([task, isNewest(task)]);
      if (drawn?.content === content) return drawn.card;
      const card = drawn?.card ?? h("article", { class: "card task" });
      cards.set(task.id, { card, content });
      render(card, taskCard(task));
      return card;
    });
    if (topBar) wanted.unshift(topBar);
    if (wanted.length !== body.children.length || wanted.some((card, index) => card !== body.children[index]))
      render(body, wanted);
  };
  taskFeed.addEventListener("change", draw, { signal });
  draw();
}

/** Says that learning is paused; operators can pause and resume it. */
function pauseBar() {
  const { paused } = taskFeed;
  const mayPause = session.hasRole("operate");
  if (!paused && !mayPause) return null;
  return h(
    "div",
    { class: "row between" },
    h(
      "p",
      { class: paused ? "warning" : "muted" },
      paused
        ? "Learning is paused. New classes answer within seconds, but are not learned further."
        : "New classes answer within seconds, and are learned after that.",
    ),
    mayPause && button(paused ? "Resume learning" : "Pause learning", () => pause(!paused)),
  );
}

async function pause(paused) {
  try {
    await put("refinement", { paused });
    await taskFeed.poll();
  } catch (error) {
    showError(error, paused ? "Learning was not paused" : "Learning was not resumed");
  }
}

const noTasks = () =>
  emptyState(
    "No tasks yet",
    h("p", {}, "Label novel images in the inbox and teach them, or submit a folder with one sub-folder per class:"),
    h("pre", {}, `openworld teach fruit/ --url ${location.origin}`),
    h("p", {}, "Start with two classes of at least ten images each."),
    session.hasRole("label") && h("a", { class: "button primary", href: "#/inbox" }, "Open the inbox"),
  );

function taskCard(task) {
  const names = Object.keys(task.counts);
  const images = Object.values(task.counts).reduce((sum, count) => sum + count, 0);
  const ended = ENDED.has(task.state);
  const mayLabel = session.hasRole("label");
  const expected = task.result && estimate(task.result, classCount(task.result));
  return [
    h(
      "header",
      {},
      h("h2", {}, names.join(", ")),
      h("span", { class: `badge ${task.state}` }, task.cancel_requested && !ended ? "cancelling" : task.state),
    ),
    h(
      "p",
      { class: "muted" },
      `${plural(images, "image")} of ${plural(names.length, "class", "classes")}`,
      `, submitted by ${task.submitted_by}, ${timeAgo(task.created)}`,
      task.attempts > 1 && `, attempt ${task.attempts}`,
    ),
    task.reason && h("p", { class: task.state === "queued" ? "muted" : "warning" }, task.reason),
    task.warnings?.map((line) => h("p", { class: "muted" }, line)),
    stageNote(task, ended),
    ended ? lossCurve(task) : progress(task),
    task.result?.tasks?.length > 0 && gateTable(task.result.tasks),
    expected && h("p", {}, `Estimate for fresh images: ${expected}.`),
    advice(task),
    h(
      "div",
      { class: "row" },
      task.version && h("a", { class: "button", href: `#/versions/${task.version}` }, `Version ${task.version}`),
      mayLabel && !ended && !task.cancel_requested && button("Cancel", () => cancel(task)),
      mayLabel && ended && task.state !== "published" && button("Try again", () => retry(task)),
    ),
  ];
}

/** The classes of the version that a task became; earlier releases did not record their number. */
const classCount = ({ classes, tasks = [] }) => classes ?? tasks.flatMap((report) => report.classes).length;

/** Which version answers with the classes of a task that is not learned. */
function stageNote(task, ended) {
  if (!ended && task.provisional)
    return h("p", {}, `Version ${task.provisional} answers with these classes already; learning makes it better.`);
  if (task.state === "published" && task.result?.stage === "provisional")
    return h("p", {}, "What was learned was rejected: these classes answer as they did right after their submission.");
  return null;
}

const isNewest = (task) => task.state === "published" && task.version === taskFeed.newestVersion;

/** Of a rejected task and of the newest version; the advice of earlier versions is out of date. */
function advice(task) {
  if (task.state === "rejected") return adviceBox(task.result?.advice, { stored: false });
  if (!isNewest(task)) return null;
  const box = h("div", {});
  get(`versions/${task.version}`)
    .then((version) => render(box, adviceBox(version.advice, { stored: true })))
    .catch(() => render(box, adviceBox(task.result?.advice, { stored: false })));
  return box;
}

function progress(task) {
  if (!task.progress) return h("p", {}, task.state === "queued" ? "Waiting in the queue." : "Starting.");
  const { phase, epoch, epochs, progress: share, seconds_left: secondsLeft } = task.progress;
  const text = PHASES[phase] ?? `Learning ${phase}`;
  const step = epochs > 1 ? `, ${PHASES[phase] ? "" : "epoch "}${epoch} of ${epochs}` : "";
  return h(
    "div",
    { class: "progress" },
    h(
      "div",
      { class: "row between" },
      h("span", {}, text, step),
      h("span", { class: "muted" }, secondsLeft !== null && `about ${duration(secondsLeft)} left`),
    ),
    h("progress", { max: "1", value: share, "aria-label": "Progress of the task" }, percent(share)),
    lossCurve(task),
  );
}

function lossCurve(task) {
  const losses = task.progress?.losses ?? [];
  if (losses.length < 2) return null;
  const last = short(losses.at(-1));
  return h(
    "figure",
    {},
    lineChart({
      label: `Training loss in ${losses.length} steps, from ${short(losses[0])} to ${last}`,
      series: [{ points: losses.map((loss, index) => [index, loss]) }],
      x: [0, losses.length - 1],
      y: [0, Math.max(...losses)],
      yFormat: short,
      height: 90,
    }),
    h(
      "figcaption",
      {},
      `Training loss, ${last} ${ENDED.has(task.state) ? "at the end" : "now"}.`,
    ),
  );
}

async function cancel(task) {
  const confirmed = await confirmDialog({
    title: "Cancel this task?",
    text: "The training so far is lost; the active version does not change. You can try the task again later.",
    action: "Cancel task",
    decline: "Keep task",
    danger: true,
  });
  if (!confirmed) return;
  try {
    taskFeed.update(await post(`tasks/${task.id}/cancel`));
  } catch (error) {
    showError(error, "The task was not cancelled");
  }
}

async function retry(task) {
  try {
    taskFeed.update(await post(`tasks/${task.id}/retry`));
  } catch (error) {
    showError(error, "The task was not queued");
  }
}
