// Audit: who changed what, newest first.

import { get, withQuery } from "../api.mjs";
import { emptyState, showError } from "../components/notices.mjs";
import { table } from "../components/tables.mjs";
import { button, h, render } from "../dom.mjs";
import { dateTime } from "../format.mjs";

// Actions of GET /audit; one that is not listed is shown as it is.
const ACTIONS = {
  "task.submit": "submitted task",
  "task.cancel": "cancelled task",
  "task.retry": "queued again task",
  "class.edit": "edited class",
  "version.activate": "activated version",
  "novelty.report": "reported predictions",
  "novelty.dismiss": "dismissed novelties",
  "novelty.restore": "restored novelties",
  "novelty.erase": "erased novelty",
  "image.erase": "erased image",
  "image.erase_expired": "erased images by age",
  "key.create": "created key",
  "key.revoke": "revoked key",
};
const SHOWN_LETTERS = 160;

export async function show(body, { signal }) {
  const entries = [];
  let cursor = null;
  const load = async () => {
    const page = await get(withQuery("audit", { before: cursor }), { signal });
    entries.push(...page.items);
    cursor = page.next_cursor;
    draw();
  };
  const loadMore = async () => {
    try {
      await load();
    } catch (error) {
      if (!signal.aborted) showError(error, "Older entries were not loaded");
    }
  };
  const draw = () =>
    render(
      body,
      entries.length
        ? table("Changes", ["Time", "By", "Action", "Target", "Details", "Address"], entries.map(row))
        : emptyState("No changes yet", h("p", {}, "Tasks, activations, edits and erasures appear here.")),
      cursor !== null && h("div", { class: "row" }, button("Show older entries", loadMore)),
    );
  await load();
}

const row = (entry) => [
  h("time", { datetime: entry.time }, dateTime(entry.time)),
  entry.by,
  (ACTIONS[entry.action] ?? entry.action) + (entry.status >= 500 ? " (may be incomplete)" : ""),
  cut(entry.target ?? "–"),
  cut(
    Object.entries(entry.detail)
      .map(([name, value]) => `${name}: ${typeof value === "object" ? JSON.stringify(value) : value}`)
      .join(", ") || "–",
  ),
  entry.address ?? "–",
];

const cut = (text) => (text.length > SHOWN_LETTERS ? `${text.slice(0, SHOWN_LETTERS)}…` : text);
