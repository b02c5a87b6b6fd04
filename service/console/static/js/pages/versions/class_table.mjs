// What has been learned, and taking mistakes back: rename, merge, retire, restore. Each makes a version of its own.

import { patch, session } from "../../api.mjs";
import { button, h, table } from "../../dom.mjs";
import { confirm, complain, toast } from "../../components/notices.mjs";

/** The section with all classes; `changed` is called after an edit. */
export function classTable(classes, changed) {
  const edits = session.may("label");
  const active = classes.filter((one) => one.state === "active");
  const state = (one) => (one.state === "merged" ? `merged into ${one.merged_into}` : one.state);
  const run = (title, body) => async () => {
    const wanted = await body();
    if (wanted) await edit(title, wanted, changed);
  };
  const actions = (one) =>
    h(
      "div",
      { class: "row tight" },
      one.state === "active"
        ? [
            button(
              "Rename",
              run(one.name, () => rename(one)),
              { "aria-label": `Rename ${one.name}` },
            ),
            active.length > 1 &&
              button(
                "Merge",
                run(one.name, () => merge(one, active)),
                { "aria-label": `Merge ${one.name} into another class` },
              ),
            button(
              "Retire",
              run(one.name, () => retire(one)),
              { "aria-label": `Retire ${one.name}` },
            ),
          ]
        : button(
            "Restore",
            run(one.name, () => ({ retired: false })),
            { "aria-label": `Restore ${one.name}` },
          ),
    );
  const head = ["Class", "Task", "State", ...(edits ? ["Change it"] : [])];
  const rows = classes.map((one) => [one.name, String(one.task + 1), state(one), ...(edits ? [actions(one)] : [])]);
  return h(
    "section",
    { class: "classes" },
    h("h2", {}, "Classes"),
    edits &&
      h(
        "p",
        { class: "quiet" },
        "People mislabel. Every change makes a version without training, and can be rolled back like any other.",
      ),
    table("What has been learned, in its order", head, rows),
  );
}

async function edit(name, change, changed) {
  try {
    const { version } = await patch(`classes/${encodeURIComponent(name)}`, change);
    toast(`Done: version ${version} answers now.`);
    await changed();
  } catch (error) {
    complain(error, `${name} was not changed`);
  }
}

async function rename({ name }) {
  const control = h("input", { value: name, required: true, maxlength: "64", autocomplete: "off" });
  const answer = await confirm({
    title: `Rename ${name}`,
    text: "The class is called so from now on, in answers and in batches.",
    action: "Rename it",
    fields: [{ name: "rename", label: "New name", control }],
  });
  return answer && answer.rename !== name ? { rename: answer.rename } : null;
}

async function merge({ name }, active) {
  const others = active.filter((one) => one.name !== name);
  const control = h(
    "select",
    {},
    others.map((one) => h("option", { value: one.name }, one.name)),
  );
  const answer = await confirm({
    title: `Merge ${name}`,
    text: "What is recognised as this class is answered as the other one. Restoring it takes that back.",
    action: "Merge it",
    fields: [{ name: "into", label: "Into", control }],
  });
  return answer && { merge_into: answer.into };
}

async function retire({ name }) {
  const answer = await confirm({
    title: `Retire ${name}?`,
    text: "Images of it are answered as novel from now on. Restoring it takes that back.",
    action: "Retire it",
    danger: true,
  });
  return answer && { retired: true };
}
