// What would help: labels to check, confused classes, and classes that need more images.

import { post, session } from "../api.mjs";
import { button, h } from "../dom.mjs";
import { percent, plural } from "../format.mjs";
import { taskFeed } from "../task_feed.mjs";
import { storedThumbnail } from "./images.mjs";
import { confirmDialog, showError, toast } from "./notices.mjs";

/** The box with advice; null when there is none. `stored`: the image store has every image whose label looks wrong. */
export function adviceBox(advice, { stored }) {
  if (!advice) return null;
  const { wrong_labels: wrong, confused, weak } = advice;
  if (!wrong.length && !confused.length && !weak.length) return null;
  const kept = session.me.keep === "images";
  const shown = stored && kept && session.hasRole("label");
  return h(
    "section",
    { class: "advice" },
    h("h3", {}, "What would help"),
    h(
      "ul",
      {},
      wrong.map((entry) => wrongLabel(entry, shown, kept)),
      confused.map(confusedPair),
      weak.map(weakClass),
    ),
  );
}

const wrongLabel = ({ image, label, looks_like: other, share }, shown, kept) =>
  h(
    "li",
    {},
    shown && storedThumbnail(image, 192),
    h(
      "span",
      {},
      "Check the label of ",
      h("code", { title: image }, image.slice(0, 12)),
      `: it is labelled ${label}, but looks like ${other} (${percent(share)}).`,
      !kept && " The image is not kept in this mode: to correct it, submit it again under its right label.",
    ),
    shown && button(`Label it ${other}`, () => correct(image, label, other)),
  );

/** Submits the image again, under another label. */
async function correct(image, label, other) {
  const confirmed = await confirmDialog({
    title: `Label this image ${other}?`,
    text: `It is removed from ${label} and learned as ${other}, in a new task.`,
    action: `Label it ${other}`,
  });
  if (!confirmed) return;
  try {
    taskFeed.update(await post("tasks", { classes: { [other]: [image] } }));
    toast("The correction is queued.", { action: { text: "Show task", href: "#/tasks" } });
  } catch (error) {
    showError(error, "The label was not corrected");
  }
}

const confusedPair = ({ classes: [one, other], images }) =>
  h(
    "li",
    {},
    `${one} and ${other} are confused: ${plural(images, "image")} of one ${images === 1 ? "is" : "are"} answered as the other.`,
  );

const weakClass = ({ name, images, more, scenes }, rank) =>
  h(
    "li",
    {},
    `${more} more images of ${name}${scenes ? ", taken elsewhere," : ""} would help${rank ? "" : " most"} `,
    `(it has ${images}${scenes ? `, of ${plural(scenes, "scene")}` : ""}).`,
  );
