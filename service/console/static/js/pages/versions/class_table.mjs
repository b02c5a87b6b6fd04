// The learned classes, with the actions to rename, merge, retire and restore them. Each action makes a new version.

import { patch, session } from "../../api.mjs";
import { confirmDialog, showError, toast } from "../../components/notices.mjs";
import { table } from "../../components/tables.mjs";
import { button, h } from "../../dom.mjs";

/** The section with all classes; `changed` is called after an action. */
export function classTable(classes, changed) {
  const mayEdit = session.hasRole("label");
  const active = classes.filter((entry) => entry.state === "active");
  // `choose` asks for the change to PATCH /classes/{name}; null means no change.
  const action = (text, name, choose, description = `${text} ${name}`) => {
    const run = async () => {
      const change = await choose();
      if (change) await applyChange(name, change, changed);
    };
    return button(text, run, { "aria-label": description });
  };
  const actions = ({ name, state }) =>
    h(
      "div",
      { class: "row tight" },
      state === "active"
        ? [
            action("Rename", name, () => rename(name)),
            active.length > 1 && action("Merge", name, () => merge(name, active), `Merge ${name} into another class`),
            action("Retire", name, () => retire(name)),
          ]
        : action("Restore", name, () => ({ retired: false })),
    );
  const rows = classes.map((entry) => [
    entry.name,
    String(entry.task + 1),
    entry.state === "merged" ? `merged into ${entry.merged_into}` : entry.state,
    ...(mayEdit ? [actions(entry)] : []),
  ]);
  return h(
    "section",
    { class: "classes" },
    h("h2", {}, "Classes"),
    mayEdit && h("p", { class: "muted" }, "A change makes a new version without training. You can roll it back."),
    table("Learned classes, oldest first", ["Class", "Task", "State", ...(mayEdit ? ["Actions"] : [])], rows),
  );
}

async function applyChange(name, change, changed) {
  try {
    const { version } = await patch(`classes/${encodeURIComponent(name)}`, change);
    toast(`Version ${version} is active.`);
    await changed();
  } catch (error) {
    showError(error, `The class ${name} was not changed`);
  }
}

async function rename(name) {
  const control = h("input", { value: name, required: true, maxlength: "64", autocomplete: "off" });
  const answer = await confirmDialog({
    title: `Rename ${name}`,
    text: "Answers and new batches use the new name.",
    action: "Rename",
    fields: [{ name: "rename", label: "New name", control }],
  });
  return answer && answer.rename !== name ? answer : null;
}

async function merge(name, active) {
  const others = active.filter((entry) => entry.name !== name);
  const control = h(
    "select",
    {},
    others.map((entry) => h("option", { value: entry.name }, entry.name)),
  );
  return confirmDialog({
    title: `Merge ${name}`,
    text: `Images of ${name} are answered with the other class. You can restore ${name} later.`,
    action: "Merge",
    fields: [{ name: "merge_into", label: "Into", control }],
  });
}

async function retire(name) {
  const confirmed = await confirmDialog({
    title: `Retire ${name}?`,
    text: `Images of ${name} are answered with novel. You can restore ${name} later.`,
    action: "Retire",
    danger: true,
  });
  return confirmed && { retired: true };
}
