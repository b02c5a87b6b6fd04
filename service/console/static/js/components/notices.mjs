// What the page says to people: toasts, problems, empty states, and questions before something is done.

import { button, byId, fresh, h, labelled } from "../dom.mjs";

const STAYS = 8000; // milliseconds; a toast with something to do, or a problem, stays twice as long

/** A short notice. `action` is { text, run } or { text, href }. */
export function toast(text, { kind = "good", action = null } = {}) {
  const close = () => box.remove();
  const box = h(
    "div",
    { class: `toast ${kind}` },
    h("p", {}, text),
    action?.href && h("a", { href: action.href, onclick: close }, action.text),
    action?.run &&
      button(
        action.text,
        () => {
          close();
          action.run();
        },
        { class: "plain" },
      ),
    button("✕", close, { class: "plain", "aria-label": "Close this notice" }),
  );
  byId("toasts").append(box);
  setTimeout(close, kind === "good" && !action ? STAYS : 2 * STAYS);
}

/** A problem as a toast, for what was done by a button. */
export function complain(problem, title = problem.title) {
  if (problem.name === "AbortError") return;
  const id = problem.requestId ? ` (request ${problem.requestId})` : "";
  toast(`${title ?? "Something went wrong"}: ${problem.detail ?? problem.message}${id}`, { kind: "bad" });
}

/** A problem in the page, with its way out. */
export function problemBox(problem, retry = null) {
  const lines =
    problem.errors?.length > 1 ? problem.errors.map((one) => one.detail) : [problem.detail ?? problem.message];
  return h(
    "div",
    { class: "problem", role: "alert" },
    h("h2", {}, problem.title ?? "Something went wrong"),
    lines.length > 1
      ? h(
          "ul",
          {},
          lines.map((line) => h("li", {}, line)),
        )
      : h("p", {}, lines[0]),
    problem.requestId &&
      h("p", { class: "quiet" }, "Request ", h("code", {}, problem.requestId), ", as in the server's log."),
    retry && button("Try again", retry),
  );
}

/** Nothing here yet, and what to do about it. */
export const empty = (title, ...children) => h("div", { class: "empty" }, h("h2", {}, title), children);

/**
 * Ask before something is done; answers null when it is not to be done, otherwise the fields' values by name.
 * A field is { name, label, control }.
 */
export function confirm({ title, text, action, danger = false, fields = [] }) {
  return new Promise((resolve) => {
    const heading = fresh("title");
    const values = () => Object.fromEntries(fields.map(({ name, control }) => [name, control.value.trim()]));
    const end = (value) => {
      dialog.close();
      dialog.remove();
      resolve(value);
    };
    const form = h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          end(values());
        },
      },
      h("h2", { id: heading }, title),
      h("p", {}, text),
      fields.map(({ label, control }) => labelled(label, control)),
      h(
        "div",
        { class: "row end" },
        button("Leave it", () => end(null), { class: "plain" }),
        h("button", { type: "submit", class: danger ? "danger" : "main" }, action),
      ),
    );
    const dialog = h(
      "dialog",
      {
        "aria-labelledby": heading,
        oncancel: (event) => {
          event.preventDefault();
          end(null);
        },
      },
      form,
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}
