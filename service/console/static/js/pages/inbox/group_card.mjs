// One group of similar novelties, its images, and the details of one image.

import { fullImage, thumbnail } from "../../components/images.mjs";
import { openDialog } from "../../components/notices.mjs";
import { factList } from "../../components/tables.mjs";
import { button, h, uniqueId } from "../../dom.mjs";
import { dateTime, inWords, percent, plural, probability, timeAgo } from "../../format.mjs";
import { selection } from "./selection.mjs";

/** The inbox keeps novel images, and known ones that were reported, of which it knows no certainty. */
const describe = ({ label, nearest }) => (label ? `answered as ${label}` : inWords({ label, nearest }));

/** The class that most images of a group look like. */
function commonNearest(novelties) {
  const counts = new Map();
  for (const { nearest } of novelties)
    if (nearest.length) counts.set(nearest[0].label, (counts.get(nearest[0].label) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0]?.[0];
}

/** The content of a group's section. `on` has selectGroup(group), showMore(group) and the active `version`. */
export function groupCard(group, on) {
  const titleId = uniqueId("group");
  const hidden = group.size - group.items.length;
  const nearest = commonNearest(group.items);
  const outdated = group.items.every((item) => item.version < on.version); // the active version may know them
  return [
    h(
      "header",
      { class: group.size > 1 ? "row between" : "visually-hidden" },
      h(
        "h2",
        { id: titleId },
        group.size > 1 ? plural(group.size, "similar image") : "One image",
        h("span", { class: "muted" }, nearest && `, closest to ${nearest}`, outdated && ", answered by an older version"),
      ),
      button("Select all", () => on.selectGroup(group), { class: "plain", "aria-describedby": titleId }),
    ),
    h(
      "div",
      { class: "tiles" },
      group.items.map((novelty, index) => tile(novelty, index === 0)),
      hidden > 0 && button(`${hidden.toLocaleString("en")} more`, () => on.showMore(group), { class: "more" }),
    ),
  ];
}

function tile(novelty, first) {
  const { id, count, label } = novelty;
  const [best] = novelty.nearest;
  const description = [describe(novelty), count > 1 && `sent ${count} times`];
  return h(
    "figure",
    { class: "tile" },
    h(
      "button",
      {
        class: "image-button",
        type: "button",
        "data-id": id,
        "aria-pressed": String(selection.ids.has(id)),
        "aria-label": `Image, ${description.filter(Boolean).join(", ")}`,
        tabindex: first ? "0" : "-1", // Tab moves between groups, the arrow keys between images
      },
      thumbnail(id),
      count > 1 && h("span", { class: "count", "aria-hidden": "true" }, `×${count}`),
    ),
    button("⤢", () => showDetails(novelty), {
      class: "details-button",
      tabindex: "-1",
      "aria-label": "Show details",
      title: "Show details (i)",
    }),
    h(
      "figcaption",
      {},
      h("span", { class: "words" }, label ? `answered as ${label}` : "never seen"),
      best &&
        h(
          "span",
          {},
          h("span", { class: "nearest", title: best.label }, `≈ ${best.label}`),
          best.share >= 0.01 && percent(best.share),
        ),
    ),
  );
}

/** Opens a dialog with the full image and everything that is known about it. */
export function showDetails(novelty) {
  const facts = {
    Answer: describe(novelty),
    "Similar classes": novelty.nearest.map(({ label, share }) => `${label} (${probability(share)})`).join(", "),
    Fit: novelty.version ? `better than ${percent(novelty.calibrated_score)} of known images` : null,
    Note: novelty.note,
    Sent: `${plural(novelty.count, "time")}, first ${dateTime(novelty.first_seen)}, last ${timeAgo(novelty.last_seen)}`,
    "Sent by": novelty.client,
    "Answered by": novelty.version ? `version ${novelty.version}` : "no version, nothing was learned",
    Size: `${novelty.width} × ${novelty.height} pixels, ${Math.ceil(novelty.bytes / 1024)} KiB`,
  };
  const content = (close) => [
    button("Close", close, { class: "plain close", autofocus: true }),
    fullImage(novelty.id, `The image, ${describe(novelty)}`),
    factList(facts),
  ];
  openDialog("Image details", content, { name: "image-dialog" });
}
