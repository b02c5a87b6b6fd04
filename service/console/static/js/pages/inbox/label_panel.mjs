// The panel beside the images: the class name for the selection, and the draft batch.

import { get, post } from "../../api.mjs";
import { thumbnail } from "../../components/images.mjs";
import { problemBox, toast } from "../../components/notices.mjs";
import { button, field, h, render, uniqueId } from "../../dom.mjs";
import { plural } from "../../format.mjs";
import { taskFeed } from "../../task_feed.mjs";
import { checkName, draftBatch, remarkOnCount } from "./draft_batch.mjs";
import { selection } from "./selection.mjs";

const wideScreen = matchMedia("(min-width: 60rem)");

export class LabelPanel {
  #classes;
  #on;
  #suggestions = h("datalist", { id: uniqueId("suggestions") });
  #message = h("p", { class: "message", id: uniqueId("message"), "aria-live": "polite" });
  #nameInput = h("input", {
    list: this.#suggestions.id,
    autocomplete: "off",
    maxlength: "64",
    enterkeyhint: "done",
    "aria-describedby": this.#message.id,
    oninput: () => this.#checkInput(),
    onkeydown: (event) => event.key === "Escape" && this.#on.cancelled(),
  });
  #count = h("p", { class: "selected", "aria-live": "polite" });
  #addButton = h("button", { type: "submit", class: "primary" }, "Add to batch");
  #clearButton = button("Clear", () => selection.clear(), { class: "plain", "aria-label": "Clear the selection" });
  #moveButton = button("", () => this.#on.move(), { class: "plain" });
  #batch = h("details", { class: "batch", open: wideScreen.matches });
  #problem = null;
  element = h(
    "aside",
    { class: "label-panel", "aria-label": "Labels and batch" },
    h(
      "form",
      { onsubmit: (event) => this.#submit(event) },
      h("div", { class: "row between" }, this.#count, this.#clearButton),
      field("Class name", this.#nameInput),
      this.#suggestions,
      this.#message,
      h("div", { class: "row" }, this.#addButton, this.#moveButton),
    ),
    this.#batch,
  );

  /** `on` has labelled(ids), unlabelled(), move() for the selection, and cancelled() for Escape in the name field. */
  constructor(classes, on, signal) {
    this.#on = on;
    selection.addEventListener("change", () => this.draw(), { signal });
    draftBatch.addEventListener("change", () => this.draw(), { signal });
    const resized = () => {
      this.#batch.open = wideScreen.matches;
    };
    wideScreen.addEventListener("change", resized, { signal });
    this.setClasses(classes);
  }

  /** Sets the classes of GET /classes. */
  setClasses(classes) {
    this.#classes = classes;
    this.draw();
  }

  /** Sets the text of the button that moves the selection to another state; without a text it is hidden. */
  setMoveAction(text) {
    this.#moveButton.hidden = !text;
    this.#moveButton.textContent = text ?? "";
  }

  focus() {
    this.#nameInput.focus();
    this.#nameInput.select();
  }

  draw() {
    const count = selection.ids.size;
    this.#count.textContent = count ? `${plural(count, "image")} selected` : "Select images to label them.";
    this.element.classList.toggle("nothing-selected", !count);
    this.element.classList.toggle("nothing-labelled", !draftBatch.size);
    this.#moveButton.disabled = !count;
    this.#clearButton.hidden = !count;
    this.#checkInput();
    this.#drawBatch();
  }

  #checkInput() {
    const name = this.#nameInput.value.trim();
    const drafts = draftBatch.entries().map((entry) => ({ name: entry.name, state: "draft" }));
    const { error, hint } = checkName(name, [...this.#classes, ...drafts]);
    this.#message.textContent = error ?? hint ?? "";
    this.#message.classList.toggle("warning", Boolean(error));
    this.#addButton.disabled = !name || Boolean(error) || !selection.ids.size;
  }

  #submit(event) {
    event.preventDefault();
    if (this.#addButton.disabled) return;
    const ids = [...selection.ids];
    draftBatch.add(this.#nameInput.value.trim().normalize("NFC"), ids);
    this.#nameInput.value = "";
    selection.clear();
    this.#on.labelled(ids);
  }

  #drawBatch() {
    const entries = draftBatch.entries().map(({ name, ids }) => {
      const { known } = checkName(name, this.#classes);
      return { name, ids, known, remark: remarkOnCount(ids.length, known) };
    });
    const classes = plural(entries.length, "class", "classes");
    const active = this.#classes.filter((entry) => entry.state === "active");
    const names = new Set([...entries, ...active].map(({ name }) => name));
    render(
      this.#suggestions,
      [...names].map((value) => h("option", { value })),
    );
    render(
      this.#batch,
      h(
        "summary",
        {},
        h("h2", {}, "Batch"),
        h("span", { class: "muted" }, entries.length ? `${classes}, ${plural(draftBatch.size, "image")}` : "empty"),
      ),
      !entries.length && h("p", { class: "muted" }, "Labelled images are collected here, to be taught together."),
      h(
        "ul",
        {},
        entries.map((entry) => this.#batchEntry(entry)),
      ),
      this.#problem && problemBox(this.#problem),
      this.#problem?.status === 422 && button("Remove missing images", () => this.#removeMissing()),
      entries.length > 0 &&
        button(`Teach ${classes}`, () => this.#teach(), { class: "primary wide" }),
    );
  }

  #batchEntry({ name, ids, known, remark }) {
    const remove = () => {
      this.#problem = null;
      draftBatch.removeClass(name);
      this.#on.unlabelled();
    };
    return h(
      "li",
      {},
      h(
        "div",
        { class: "row between" },
        h("strong", {}, name),
        h("span", { class: "muted" }, plural(ids.length, known ? "more image" : "image")),
        button("✕", remove, { class: "plain", "aria-label": `Remove ${name} from the batch` }),
      ),
      h(
        "div",
        { class: "thumbnails" },
        ids.slice(0, 5).map((id) => thumbnail(id, 64)),
      ),
      remark && h("p", { class: "message" }, remark),
    );
  }

  async #teach() {
    this.#problem = null;
    try {
      const task = await post("tasks", draftBatch.toRequest());
      draftBatch.clear();
      taskFeed.update(task);
      const text = task.fresh ? "The batch was submitted." : "The same batch was submitted before.";
      toast(text, { action: { text: "Show task", href: "#/tasks" } });
    } catch (error) {
      this.#problem = error;
    }
    this.draw();
  }

  /** Removes images from the batch that the inbox has deleted since they were labelled. */
  async #removeMissing() {
    const missing = [];
    for (const id of draftBatch.entries().flatMap(({ ids }) => ids))
      await get(`novelties/${id}`).catch((error) => error.status === 404 && missing.push(id));
    this.#problem = null;
    draftBatch.removeImages(missing);
    toast(missing.length ? `${plural(missing.length, "image")} removed from the batch.` : "No image is missing.");
  }
}
