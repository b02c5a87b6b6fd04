// One group of novelties that look alike, and one image of it.

import { button, fresh, h } from "../../dom.mjs";
import { ago, fixed, moment, percent, plural } from "../../format.mjs";
import { thumbnail, wholePicture } from "../../components/images.mjs";
import { selection } from "./selection.mjs";

const likeness = ({ nearest: [near] }) =>
  near ? `looks like ${near.label}, ${fixed(near.share)}` : "like nothing known";

/** What most of them look like. */
function commonest(items) {
  const counts = new Map();
  for (const {
    nearest: [near],
  } of items)
    if (near) counts.set(near.label, (counts.get(near.label) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0]?.[0];
}

/** The children of a group's section. `on` has all(group), more(group), look(novelty), and `version`, which answers now. */
export function groupCard(group, on) {
  const title = fresh("group");
  const hidden = group.size - group.items.length;
  const like = commonest(group.items);
  const older = group.items.every((item) => item.version < on.version); // it may know them by now
  return [
    h(
      "header",
      { class: group.size > 1 ? "row between" : "unseen" },
      h(
        "h2",
        { id: title },
        group.size > 1 ? `${plural(group.size, "image")} alike` : "One image",
        h("span", { class: "quiet" }, like && `, look like ${like}`, older && `, asked before version ${on.version}`),
      ),
      button("Select all", () => on.all(group), { class: "plain", "aria-describedby": title }),
    ),
    h(
      "div",
      { class: "tiles" },
      group.items.map((novelty, place) => tile(novelty, place, on)),
      hidden > 0 && button(`${hidden.toLocaleString("en")} more`, () => on.more(group), { class: "more" }),
    ),
  ];
}

function tile(novelty, place, on) {
  const {
    id,
    count,
    label,
    calibrated_score: score,
    nearest: [near],
  } = novelty;
  const said = [
    likeness(novelty),
    `score ${fixed(score)}`,
    label && `was called ${label}`,
    count > 1 && `seen ${count} times`,
  ];
  return h(
    "figure",
    { class: "tile" },
    h(
      "button",
      {
        class: "pick",
        type: "button",
        "data-id": id,
        "aria-pressed": String(selection.ids.has(id)),
        "aria-label": `Image, ${said.filter(Boolean).join(", ")}`,
        tabindex: place === 0 ? "0" : "-1", // Tab goes from group to group, the arrows from image to image
      },
      thumbnail(id),
      count > 1 && h("span", { class: "count", "aria-hidden": "true" }, `×${count}`),
    ),
    button("⤢", () => on.look(novelty), {
      class: "look",
      tabindex: "-1",
      "aria-label": "Look closer",
      title: "Look closer (i)",
    }),
    h(
      "figcaption",
      {},
      h(
        "span",
        {},
        h("span", { class: "like", title: near?.label }, near ? `≈ ${near.label}` : "like nothing"),
        near && fixed(near.share),
      ),
      h("span", {}, label ? `called ${label}` : "score", label ? null : h("span", {}, fixed(score))),
    ),
  );
}

/** The picture as it was sent, and what was said of it. */
export function lookCloser(novelty) {
  const title = fresh("title");
  const facts = {
    "Looks like": novelty.nearest.map(({ label, share }) => `${label} ${percent(share)}`).join(", ") || "nothing known",
    "Calibrated score": `${fixed(novelty.calibrated_score, 3)} (known images are spread evenly over 0 to 1)`,
    "Probability of being novel": percent(novelty.p_novel, 1),
    "Was called": novelty.label,
    Note: novelty.note,
    Seen: `${plural(novelty.count, "time")}, first ${moment(novelty.first_seen)}, last ${ago(novelty.last_seen)}`,
    "Sent by": novelty.client,
    "Answered by": novelty.version ? `version ${novelty.version}` : "nobody: nothing was learned",
    Size: `${novelty.width} × ${novelty.height}, ${Math.ceil(novelty.bytes / 1024)} kB`,
  };
  const close = () => dialog.remove();
  const dialog = h(
    "dialog",
    { class: "closer", "aria-labelledby": title, onclose: close },
    h(
      "div",
      { class: "row between" },
      h("h2", { id: title }, "A closer look"),
      button("Close", () => dialog.close(), { class: "plain", autofocus: true }),
    ),
    wholePicture(novelty.id, `The image, ${likeness(novelty)}`),
    h(
      "dl",
      {},
      Object.entries(facts)
        .filter(([, value]) => value)
        .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}
