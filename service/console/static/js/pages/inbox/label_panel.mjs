// Beside the images: the name for what is selected, and the basket of what was named.

import { ask, post } from "../../api.mjs";
import { basket, judgeCount, judgeName } from "./draft_batch.mjs";
import { button, fresh, h, labelled, put } from "../../dom.mjs";
import { tasks } from "../../task_feed.mjs";
import { plural } from "../../format.mjs";
import { problemBox, toast } from "../../components/notices.mjs";
import { thumbnail } from "../../components/images.mjs";
import { selection } from "./selection.mjs";

const wide = matchMedia("(min-width: 60rem)");

export class Dock {
  #classes;
  #on;
  #field;
  #note;
  #count;
  #add;
  #aside;
  #none;
  #basket;
  #names;
  #problem = null;
  element;

  /** `classes` are those of GET /classes; `on` has named(ids), putAside(), back(), changed(). */
  constructor(classes, on, signal) {
    this.#on = on;
    this.#names = h("datalist", { id: fresh("names") });
    this.#field = h("input", {
      list: this.#names.id,
      autocomplete: "off",
      maxlength: "64",
      enterkeyhint: "done",
      oninput: () => this.#judge(),
    });
    this.#field.addEventListener("keydown", (event) => event.key === "Escape" && on.back());
    this.#note = h("p", { class: "note", "aria-live": "polite" });
    this.#field.setAttribute("aria-describedby", (this.#note.id = fresh("note")));
    this.#count = h("p", { class: "selected", "aria-live": "polite" });
    this.#add = h("button", { type: "submit", class: "main" }, "Put into the basket");
    this.#none = button("Clear", () => selection.clear(), { class: "plain", "aria-label": "Clear the selection" });
    this.#aside = button("", on.putAside, { class: "plain" });
    const submit = (event) => {
      event.preventDefault();
      this.#take();
    };
    this.#basket = h("details", { class: "basket", open: wide.matches });
    this.element = h(
      "aside",
      { class: "dock", "aria-label": "Naming and basket" },
      h(
        "form",
        { onsubmit: submit },
        h("div", { class: "row between" }, this.#count, this.#none),
        labelled("Name of the class", this.#field),
        this.#names,
        this.#note,
        h("div", { class: "row" }, this.#add, this.#aside),
      ),
      this.#basket,
    );
    selection.addEventListener("change", () => this.draw(), { signal });
    basket.addEventListener("change", () => this.draw(), { signal });
    wide.addEventListener(
      "change",
      () => {
        this.#basket.open = wide.matches;
      },
      { signal },
    );
    this.learn(classes);
  }

  /** These are the classes by now. */
  learn(classes) {
    this.#classes = classes;
    this.draw();
  }

  focus() {
    this.#field.focus();
    this.#field.select();
  }

  /** What else can be done with a selection: dismiss it, bring it back, or nothing. */
  offer(text) {
    this.#aside.hidden = !text;
    this.#aside.textContent = text ?? "";
  }

  #judge() {
    const name = this.#field.value.trim();
    const named = basket.entries().map((entry) => ({ name: entry.name, state: "basket" }));
    const { refuse, note } = judgeName(name, [...this.#classes, ...named]);
    this.#note.textContent = refuse ?? note ?? "";
    this.#note.classList.toggle("warn", Boolean(refuse));
    this.#add.disabled = !name || Boolean(refuse) || !selection.ids.size;
  }

  #take() {
    const name = this.#field.value.trim().normalize("NFC");
    if (this.#add.disabled) return;
    const ids = [...selection.ids];
    basket.add(name, ids);
    selection.clear();
    this.#field.value = "";
    this.#on.named(ids);
    this.draw();
  }

  draw() {
    const count = selection.ids.size;
    this.#count.textContent = count ? `${plural(count, "image")} selected` : "Select images to name them.";
    this.element.classList.toggle("idle", !count && !basket.size);
    this.element.classList.toggle("nothing-selected", !count);
    this.element.classList.toggle("nothing-named", !basket.size);
    this.#aside.disabled = !count;
    this.#none.hidden = !count;
    this.#judge();
    this.#drawBasket();
  }

  #drawBasket() {
    const entries = basket.entries();
    const judged = entries.map(({ name, ids }) => ({
      ...judgeCount(ids.length, judgeName(name, this.#classes).known),
      name,
    }));
    const refused = judged.filter((one) => one.refuse);
    const active = this.#classes.filter((one) => one.state === "active");
    put(
      this.#names,
      [...new Set([...entries, ...active].map(({ name }) => name))].map((value) => h("option", { value })),
    );
    put(
      this.#basket,
      h(
        "summary",
        {},
        h("h2", {}, "Basket"),
        h(
          "span",
          { class: "quiet" },
          entries.length ? `${plural(entries.length, "class", "classes")}, ${plural(basket.size, "image")}` : "empty",
        ),
      ),
      !entries.length && h("p", { class: "quiet" }, "What you name is collected here, and then taught together."),
      h(
        "ul",
        {},
        entries.map((entry, place) => this.#line(entry, judged[place])),
      ),
      this.#problem && problemBox(this.#problem),
      this.#problem?.status === 422 && button("Take out images that are gone", () => this.#dropMissing()),
      entries.length > 0 &&
        button(`Teach ${plural(entries.length, "class", "classes")}`, () => this.#teach(), {
          class: "main wide",
          disabled: refused.length > 0,
        }),
    );
  }

  #line({ name, ids }, { refuse, note }) {
    const known = judgeName(name, this.#classes).known;
    return h(
      "li",
      {},
      h(
        "div",
        { class: "row between" },
        h("strong", {}, name),
        h("span", { class: "quiet" }, plural(ids.length, "image"), known && ", extends it"),
        button(
          "✕",
          () => {
            basket.remove(name);
            this.#problem = null;
            this.#on.changed();
          },
          { class: "plain", "aria-label": `Take ${name} out of the basket` },
        ),
      ),
      h(
        "div",
        { class: "strip" },
        ids.slice(0, 5).map((id) => thumbnail(id, "", 64)),
      ),
      (refuse ?? note) && h("p", { class: refuse ? "warn" : "note" }, refuse ?? note),
    );
  }

  async #teach() {
    this.#problem = null;
    try {
      const task = await post("tasks", basket.batch());
      basket.clear();
      tasks.add(task);
      const text = task.fresh
        ? "Handed in: it will be learned next."
        : "This very batch was handed in before; here it is.";
      toast(text, { action: { text: "Follow it", href: "#/teaching" } });
    } catch (error) {
      this.#problem = error;
    }
    this.draw();
  }

  /** Images age out of the inbox, also while somebody names them. */
  async #dropMissing() {
    const ids = basket.entries().flatMap((entry) => entry.ids);
    const gone = [];
    for (const id of ids) await ask(`novelties/${id}`).catch((error) => error.status === 404 && gone.push(id));
    this.#problem = null;
    basket.drop(gone);
    toast(gone.length ? `${plural(gone.length, "image")} had gone from the inbox.` : "All of them are still there.");
    this.draw();
  }
}
