// Versions: what was learned from what, how well each did, which one answers, and going back.

import { ask, post, query, session } from "../../api.mjs";
import { classTable } from "./class_table.mjs";
import { button, h, put } from "../../dom.mjs";
import { tasks } from "../../task_feed.mjs";
import { ago, duration, fixed, listed, moment, percent } from "../../format.mjs";
import { complain, confirm, empty, problemBox, toast } from "../../components/notices.mjs";
import { gateTable } from "../tasks.mjs";
import { thresholdExplorer } from "./threshold.mjs";
import { trends } from "./trends.mjs";

const details = new Map(); // a version never changes once it is there

/** GET /versions/{n}, asked once. */
function detailOf(number, signal) {
  if (!details.has(number)) {
    const asked = ask(`versions/${number}`, { signal });
    details.set(number, asked);
    asked.catch(() => details.delete(number));
  }
  return details.get(number);
}

export async function show(body, { signal, rest }) {
  let data;
  let chosen = Number(rest[0]) || null;
  const list = h("ol", { class: "lineage" });
  const detail = h("div", { class: "detail" });
  const plots = h("div", { class: "plots" });
  const classes = h("div", {});

  const load = async () => {
    data = await ask("versions", { signal });
    if (!data.versions.length) return put(body, nothing());
    if (!data.versions.some((one) => one.version === chosen)) chosen = data.serving || data.versions.at(-1).version;
    put(
      body,
      problem(data),
      h("div", { class: "split" }, h("section", {}, h("h2", {}, "Lineage"), list), detail),
      plots,
      classes,
    );
    drawList();
    const told = (await ask("classes", { signal })).classes;
    put(classes, classTable(told, load));
    await Promise.all([
      drawDetail(),
      trends(line(data), (n) => detailOf(n, signal)).then((drawn) => put(plots, drawn)),
    ]);
  };

  const drawList = () => {
    const onLine = new Set(line(data).map((one) => one.version));
    put(
      list,
      data.versions
        .toReversed()
        .map((one) => entry(one, data, one.version === chosen, onLine.has(one.version), choose)),
    );
  };

  const choose = (number) => {
    chosen = number;
    history.replaceState(null, "", `#/versions/${number}`);
    drawList();
    list.querySelector("[aria-current]").focus();
    drawDetail().then(() => detail.scrollIntoView({ block: "nearest" }));
  };

  const drawDetail = async () => {
    const summary = data.versions.find((one) => one.version === chosen);
    try {
      const found = await detailOf(chosen, signal);
      if (found.version === chosen) put(detail, versionDetail(found, summary, data, load));
    } catch (error) {
      if (!signal.aborted) put(detail, problemBox(error, drawDetail));
    }
  };

  tasks.addEventListener(
    "change",
    () => {
      const shown = Math.max(0, ...(data?.versions ?? []).map((one) => one.version));
      if (data && tasks.newestVersion > shown) load().catch(complain);
    },
    { signal },
  );
  await load();
}

const nothing = () =>
  empty(
    "Nothing has been learned yet",
    h(
      "p",
      {},
      "Every task that is learned makes a version, which stays here with what it knew and how well. Teach the first:",
    ),
    h("pre", {}, `openworld teach fruit/ --url ${location.origin}`),
    session.may("label") && h("p", {}, "Or name images in the ", h("a", { href: "#/inbox" }, "inbox"), "."),
  );

/** From the first version to the one that answers. */
function line(data) {
  const byNumber = new Map(data.versions.map((one) => [one.version, one]));
  const found = [];
  for (let one = byNumber.get(data.serving); one && !found.includes(one); one = byNumber.get(one.parent))
    found.unshift(one);
  return found;
}

const problem = ({ problem: found, serving }) =>
  found &&
  h(
    "div",
    { class: "problem", role: "alert" },
    h("h2", {}, `Version ${found.version ?? "?"} cannot be loaded`),
    h("p", {}, `${found.reason}. Version ${serving} goes on answering; the next try is at ${moment(found.next_try)}.`),
  );

/** What a version did, in a few words. */
function deed(one, history) {
  if (one.added.length) return `learned ${listed(one.added)}`;
  if (Object.keys(one.learned).length) return `learned more of ${listed(Object.keys(one.learned))}`;
  return history.find((line) => line.version === one.version)?.reason ?? "";
}

function entry(one, data, current, onLine, choose) {
  const click = (event) => {
    event.preventDefault();
    choose(one.version);
  };
  return h(
    "li",
    { class: onLine ? "on-line" : null },
    h(
      "a",
      {
        href: `#/versions/${one.version}`,
        "data-version": one.version,
        "aria-current": current ? "true" : null,
        onclick: click,
      },
      h(
        "span",
        { class: "row between" },
        h("strong", {}, `Version ${one.version}`),
        one.state !== "available" && h("span", { class: `badge ${one.state}` }, one.state),
      ),
      h("span", {}, one.reason ?? deed(one, data.history)),
      h(
        "span",
        { class: "quiet" },
        one.created && ago(one.created),
        one.parent && one.parent !== one.version - 1 && `, from version ${one.parent}`,
        one.accuracy !== null && `, accuracy ${percent(one.accuracy)}`,
        one.auc !== null && `, AUC ${fixed(one.auc)}`,
      ),
    ),
  );
}

function versionDetail(found, summary, data, load) {
  const facts = {
    Made: `${moment(found.created)}${found.seconds ? `, in ${duration(found.seconds)}` : ""}`,
    From: found.parent ? `version ${found.parent}` : "nothing, it is the first",
    Changed: found.edit,
    Brought: Object.entries(found.learned)
      .map(([name, count]) => `${name} ${count}`)
      .join(", "),
    Knows: found.tasks.map((names, place) => `${place + 1}: ${names.join(", ")}`).join("; "),
    Capacity:
      found.capacity.used_max === undefined
        ? null
        : `${percent(found.capacity.used_max)} of the fullest adapter is taken`,
    Rule: found.rule,
    Backbone: found.backbone,
  };
  const serving = found.version === data.serving;
  return [
    h(
      "header",
      { class: "row between" },
      h("h2", {}, `Version ${found.version}`),
      serving
        ? h("span", { class: "badge serving" }, `answers since ${moment(data.since)}`)
        : session.may("operate") &&
            summary.state !== "damaged" &&
            button(
              found.version < data.serving ? "Roll back to it" : "Activate it",
              () => activate(found.version, data, load),
              { class: "main" },
            ),
    ),
    h(
      "dl",
      {},
      Object.entries(facts)
        .filter(([, text]) => text)
        .map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]),
    ),
    found.reports.length > 0 && gateTable(found.reports),
    found.reference.length > 0 && thresholdExplorer(found),
  ];
}

async function activate(number, data, load) {
  const control = h("input", { maxlength: "200", autocomplete: "off" });
  const answer = await confirm({
    title: `Let version ${number} answer?`,
    text: `Version ${data.serving} answers now, and stays here. The change is immediate, drops no request, and can be undone the same way.`,
    action: `Activate version ${number}`,
    fields: [{ name: "reason", label: "Why, for the history (may stay empty)", control }],
  });
  if (!answer) return;
  try {
    await post(query(`versions/${number}/activate`, { reason: answer.reason || null }));
    toast(`Version ${number} answers now.`);
    await load();
  } catch (error) {
    complain(error, `Version ${number} was not activated`);
  }
}
