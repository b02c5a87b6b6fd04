// What would help: labels to check, confused classes, and classes that need more images.

import { get, session } from "../api.mjs";
import { h } from "../dom.mjs";
import { percent, plural } from "../format.mjs";
import { thumbnail } from "./images.mjs";

/** The box with the advice of a version; null when there is none. */
export function adviceBox(advice) {
  if (!advice) return null;
  const { wrong_labels: wrong, confused, weak } = advice;
  if (!wrong.length && !confused.length && !weak.length) return null;
  const images = wrong.map((entry) => ({ id: entry.image, item: wrongLabel(entry) }));
  if (images.length && session.hasRole("label")) addThumbnails(images);
  return h(
    "section",
    { class: "advice" },
    h("h3", {}, "What would help"),
    h(
      "ul",
      {},
      images.map(({ item }) => item),
      confused.map(confusedPair),
      weak.map(weakClass),
    ),
  );
}

const wrongLabel = ({ image, label, looks_like: other, share }) =>
  h(
    "li",
    {},
    h(
      "span",
      {},
      "Check the label of ",
      h("code", { title: image }, image.slice(0, 12)),
      `: it is labelled ${label}, but looks like ${other} (${percent(share)}).`,
    ),
  );

const confusedPair = ({ classes: [one, other], images }) =>
  h(
    "li",
    {},
    `${one} and ${other} are confused: ${plural(images, "image")} of one ${images === 1 ? "is" : "are"} answered as the other.`,
  );

const weakClass = ({ name, images, more }, rank) =>
  h("li", {}, `${more} more images of ${name} would help${rank ? "" : " most"} (it has ${images}).`);

/** Adds the thumbnails of images that the inbox still holds: it is asked first, because browsers log every 404. */
async function addThumbnails(images) {
  let labelled;
  try {
    labelled = await get("novelties?state=labelled&limit=200");
  } catch {
    return; // this server has no inbox
  }
  const held = new Set(labelled.items.map(({ id }) => id));
  for (const { id, item } of images) if (held.has(id)) item.prepend(thumbnail(id, 96));
}
