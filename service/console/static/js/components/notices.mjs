// Messages to the user: toasts, problems, empty states and dialogs.

import { button, byId, field, h, uniqueId } from "../dom.mjs";

const TOAST_MILLISECONDS = 8000; // twice as long for errors and for toasts with an action

/** A short message in the corner. `action` is { text, run } or { text, href }. */
export function toast(text, { error = false, action = null } = {}) {
  const close = () => box.remove();
  const run = () => {
    close();
    action.run();
  };
  const box = h(
    "div",
    { class: error ? "toast error" : "toast" },
    h("p", {}, text),
    action?.href && h("a", { href: action.href, onclick: close }, action.text),
    action?.run && button(action.text, run, { class: "plain" }),
    button("✕", close, { class: "plain", "aria-label": "Close this message" }),
  );
  byId("toasts").append(box);
  setTimeout(close, error || action ? 2 * TOAST_MILLISECONDS : TOAST_MILLISECONDS);
}

/** Shows the error of a user's action as a toast. */
export function showError(error, title = error.title) {
  if (error.name === "AbortError") return;
  const request = error.requestId ? ` (request ${error.requestId})` : "";
  toast(`${title ?? "Something went wrong"}: ${error.detail ?? error.message}${request}`, { error: true });
}

/** A problem as part of the page. */
export function problemBox(problem, retry = null) {
  const details = problem.errors?.map((error) => error.detail) ?? [];
  return h(
    "div",
    { class: "problem", role: "alert" },
    h("h2", {}, problem.title ?? "Something went wrong"),
    details.length > 1
      ? h(
          "ul",
          {},
          details.map((detail) => h("li", {}, detail)),
        )
      : h("p", {}, problem.detail ?? problem.message),
    problem.requestId &&
      h("p", { class: "muted" }, "Request ID in the server's log: ", h("code", {}, problem.requestId)),
    retry && button("Try again", retry),
  );
}

export const emptyState = (title, ...children) => h("div", { class: "empty" }, h("h2", {}, title), children);

/** Opens a modal dialog. `content` receives a function that closes it. */
export function openDialog(title, content, { name = null, onclose = null } = {}) {
  const id = uniqueId("title");
  const closed = () => {
    dialog.remove();
    onclose?.();
  };
  const dialog = h(
    "dialog",
    { class: name, "aria-labelledby": id, onclose: closed },
    h("h2", { id }, title),
    content(() => dialog.close()),
  );
  document.body.append(dialog);
  dialog.showModal();
}

/**
 * Asks for confirmation. Resolves to the values of the fields by name, or to null when the user declines.
 * A field is { name, label, control }.
 */
export function confirmDialog({ title, text, action, decline = "Cancel", danger = false, fields = [] }) {
  return new Promise((resolve) => {
    let answer = null;
    const content = (close) => {
      const submit = (event) => {
        event.preventDefault();
        answer = Object.fromEntries(fields.map(({ name, control }) => [name, control.value.trim()]));
        close();
      };
      return h(
        "form",
        { onsubmit: submit },
        h("p", {}, text),
        fields.map(({ label, control }) => field(label, control)),
        h(
          "div",
          { class: "row end" },
          button(decline, close, { class: "plain" }),
          h("button", { type: "submit", class: danger ? "danger" : "primary" }, action),
        ),
      );
    };
    openDialog(title, content, { onclose: () => resolve(answer) });
  });
}
