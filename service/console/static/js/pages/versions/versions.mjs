// Versions: their lineage, details and evaluation, and activating another one.

import { get, post, session, withQuery } from "../../api.mjs";
import { adviceBox } from "../../components/advice.mjs";
import { confirmDialog, emptyState, problemBox, showError, toast } from "../../components/notices.mjs";
import { estimate, factList, gateTable, showsAuc } from "../../components/tables.mjs";
import { button, h, render } from "../../dom.mjs";
import { bytes, dateTime, duration, fixed, joinNames, percent, timeAgo } from "../../format.mjs";
import { taskFeed } from "../../task_feed.mjs";
import { classTable } from "./class_table.mjs";
import { thresholdExplorer } from "./threshold.mjs";
import { trends } from "./trends.mjs";

const details = new Map(); // number -> promise of GET /versions/{number}; a version never changes

function detailOf(number, signal) {
  if (!details.has(number)) {
    const request = get(`versions/${number}`, { signal });
    details.set(number, request);
    request.catch(() => details.delete(number));
  }
  return details.get(number);
}

export async function show(body, { signal, rest }) {
  let data;
  let chosen = Number(rest[0]) || null;
  const list = h("ol", { class: "lineage" });
  const detail = h("div", { class: "detail" });
  const charts = h("div", { class: "trends" });
  const classes = h("div", {});

  const load = async () => {
    data = await get("versions", { signal });
    if (!data.versions.length) return render(body, noVersions());
    if (!data.versions.some(({ version }) => version === chosen)) chosen = data.serving || data.versions.at(-1).version;
    render(
      body,
      data.problem && loadProblem(data),
      h("div", { class: "columns" }, h("section", {}, h("h2", {}, "Lineage"), list), detail),
      charts,
      classes,
      data.disk && h("p", { class: "muted", id: "disk" }, diskUsage(data.disk)),
    );
    drawList();
    render(classes, classTable((await get("classes", { signal })).classes, load));
    await Promise.all([
      drawDetail(),
      trends(lineageOf(data), (number) => detailOf(number, signal)).then((drawn) => render(charts, drawn)),
    ]);
  };

  const drawList = () => {
    const lineage = new Set(lineageOf(data));
    const entries = data.versions.map((version) =>
      listEntry(version, {
        history: data.history,
        active: lineage.has(version),
        current: version.version === chosen,
        choose,
      }),
    );
    render(list, entries.reverse());
  };

  const choose = (number) => {
    chosen = number;
    history.replaceState(null, "", `#/versions/${number}`);
    drawList();
    list.querySelector("[aria-current]").focus();
    drawDetail().then(() => detail.scrollIntoView({ block: "nearest" }));
  };

  const drawDetail = async () => {
    try {
      const version = await detailOf(chosen, signal);
      if (version.version === chosen) render(detail, versionDetail(version, data, load));
    } catch (error) {
      if (!signal.aborted) render(detail, problemBox(error, drawDetail));
    }
  };

  taskFeed.addEventListener(
    "change",
    () => {
      const newest = Math.max(0, ...(data?.versions ?? []).map(({ version }) => version));
      if (data && taskFeed.newestVersion > newest) load().catch(showError);
    },
    { signal },
  );
  await load();
}

const noVersions = () =>
  emptyState(
    "Nothing has been learned yet",
    h(
      "p",
      {},
      "Every published task makes a version. Teach the first task from a folder with one sub-folder per class:",
    ),
    h("pre", {}, `openworld teach fruit/ --url ${location.origin}`),
    session.hasRole("label") && h("p", {}, "Or label images in the ", h("a", { href: "#/inbox" }, "inbox"), "."),
  );

/** The versions from the first to the active one. */
function lineageOf({ versions, serving }) {
  const byNumber = new Map(versions.map((version) => [version.version, version]));
  const lineage = [];
  for (let one = byNumber.get(serving); one && !lineage.includes(one); one = byNumber.get(one.parent))
    lineage.unshift(one);
  return lineage;
}

/** What the data folder holds, in one line. */
const diskUsage = (disk) =>
  `On disk: ${Object.entries(disk)
    .map(([kind, size]) => `${kind} ${bytes(size)}`)
    .join(", ")}.`;

const loadProblem = ({ problem, serving }) =>
  h(
    "div",
    { class: "problem", role: "alert" },
    h("h2", {}, `Version ${problem.version ?? "?"} cannot be loaded`),
    h("p", {}, `${problem.reason}. Version ${serving} stays active. Next attempt: ${dateTime(problem.next_try)}.`),
  );

/** What a version changed, in a few words. */
function summary({ version, task_id: taskId, pending, reason, added, learned, edit }, history) {
  if (reason || edit) return reason || edit; // the reason: why it is damaged or discarded
  const isPending = pending.includes(taskId); // it answers with its classes and has not learned them
  const verb = isPending ? "answers with" : "learned";
  const extended = Object.keys(learned).filter((name) => !added.includes(name));
  const parts = [
    added.length && `${verb} ${joinNames(added)}`,
    extended.length && `${verb} more ${isPending ? "images " : ""}of ${joinNames(extended)}`,
  ].filter(Boolean);
  return parts.join("; ") || (history.find((entry) => entry.version === version)?.reason ?? "");
}

function listEntry(version, { history, active, current, choose }) {
  const { version: number, state, created, parent, accuracy, novelty_auc: auc } = version;
  const click = (event) => {
    event.preventDefault();
    choose(number);
  };
  return h(
    "li",
    { class: active ? "active" : null },
    h(
      "a",
      {
        href: `#/versions/${number}`,
        "data-version": number,
        "aria-current": current ? "true" : null,
        onclick: click,
      },
      h(
        "span",
        { class: "row between" },
        h("strong", {}, `Version ${number}`),
        version.stage === "provisional" && h("span", { class: "badge" }, "provisional"),
        state !== "available" && h("span", { class: `badge ${state}` }, state === "serving" ? "active" : state),
      ),
      h("span", {}, summary(version, history)),
      h(
        "span",
        { class: "muted" },
        created && timeAgo(created),
        parent && parent !== number - 1 && `, from version ${parent}`,
        accuracy !== null && `, accuracy ${percent(accuracy)}`,
        showsAuc(auc, version.tasks.flat().length) && `, novelty AUC ${fixed(auc)}`,
      ),
    ),
  );
}

function versionDetail(version, data, load) {
  const { version: number, seconds, parent, learned, tasks, capacity, reports } = version;
  const expected = estimate(version, tasks.flat().length);
  const facts = {
    Created: `${dateTime(version.created)}${seconds ? `, trained in ${duration(seconds)}` : ""}`,
    Parent: parent ? `version ${parent}` : "none",
    Edit: version.edit,
    Stage: version.stage === "provisional" ? "provisional: some classes answer before they are learned" : null,
    "Fresh images": expected && `estimate: ${expected}`,
    Learned: Object.entries(learned)
      .map(([name, count]) => `${name} (${count} images)`)
      .join(", "),
    Classes: tasks.map((names, index) => `task ${index + 1}: ${names.join(", ")}`).join("; "),
    Capacity: capacity.used_max === undefined ? null : `${percent(capacity.used_max)} of the fullest adapter is used`,
    Rule: version.rule,
    Backbone: version.backbone,
    Method: version.rotations > 1 ? `${version.method}, ${version.rotations} rotations per image` : version.method,
    "Kept of taught images": version.keep,
    "Fitted on": version.drawn ? `images of its task, and ${version.drawn} draws from class statistics` : null,
  };
  const { state } = data.versions.find((entry) => entry.version === number);
  const activateButton = () =>
    button(
      number < data.serving ? "Roll back to this version" : "Activate this version",
      () => activate(number, data, load),
      { class: "primary" },
    );
  return [
    h(
      "header",
      { class: "row between" },
      h("h2", {}, `Version ${number}`),
      number === data.serving
        ? h("span", { class: "badge serving" }, `active since ${dateTime(data.since)}`)
        : session.hasRole("operate") && state === "available" && activateButton(),
    ),
    factList(facts),
    reports.length > 0 && gateTable(reports),
    adviceBox(version.advice, { stored: true }),
    version.reference.length > 0 && thresholdExplorer(version),
  ];
}

async function activate(number, { serving, current }, load) {
  const control = h("input", { maxlength: "200", autocomplete: "off" });
  const answer = await confirmDialog({
    title: `Activate version ${number}?`,
    text: `Version ${serving} is active now and is kept. The change takes effect at once, no request is lost, and you can undo it.`,
    action: `Activate version ${number}`,
    fields: [{ name: "reason", label: "Reason, for the history (optional)", control }],
  });
  if (!answer) return;
  try {
    await post(withQuery(`versions/${number}/activate`, { reason: answer.reason || null, replacing: current }));
    toast(`Version ${number} is active.`);
    await load();
  } catch (error) {
    showError(error, `Version ${number} was not activated`);
  }
}
