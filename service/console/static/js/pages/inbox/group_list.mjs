// The groups of the inbox, page by page. What is far from the screen is taken out of the page and leaves an empty box
// of its size, so that thousands of images cost what some dozens cost.

import { ask, query } from "../../api.mjs";
import { basket } from "./draft_batch.mjs";
import { h, put } from "../../dom.mjs";
import { groupCard } from "./group_card.mjs";

const PAGE = 24; // groups
const SHOWN = 8; // images of a group before somebody asks for more, as many as the server sends along
const MORE = 100; // images that somebody gets who asks
const NEAR = "1200px 0px";

export class GroupList {
  #state;
  #order;
  #signal;
  #on;
  #slots = new Map(); // group id -> { group, element }
  #bySlot = new WeakMap(); // element -> group
  #cursor = null;
  #ended = false;
  #loading = null;
  #near;
  #end;
  #groups;
  #sentinel;

  /** `on` has all(group), look(novelty), failed(error), changed(), and `version`, which answers now. */
  constructor(box, { state, order, signal, on }) {
    [this.#state, this.#order, this.#signal] = [state, order, signal];
    this.#on = { ...on, more: (group) => this.#expand(group) };
    this.#groups = h("div", { class: "groups" });
    this.#sentinel = h("div", { class: "sentinel", "aria-hidden": "true" });
    put(box, this.#groups, this.#sentinel);
    this.#near = new IntersectionObserver((entries) => entries.forEach((entry) => this.#come(entry)), {
      rootMargin: NEAR,
    });
    this.#end = new IntersectionObserver((entries) => entries.at(-1).isIntersecting && this.more(), {
      rootMargin: NEAR,
    });
    signal.addEventListener("abort", () => [this.#near, this.#end].forEach((observer) => observer.disconnect()));
  }

  get empty() {
    return this.#ended && this.#slots.size === 0;
  }

  /** The images that are shown, in their order. */
  order() {
    return [...this.#slots.values()].flatMap(({ group }) => group.items.map((item) => item.id));
  }

  find(id) {
    for (const { group } of this.#slots.values()) for (const item of group.items) if (item.id === id) return item;
    return null;
  }

  groupOf(id) {
    return [...this.#slots.values()].find(({ group }) => group.items.some((item) => item.id === id))?.group;
  }

  /** The next page; one at a time, whoever asks. */
  more() {
    if (!this.#ended)
      this.#loading ??= this.#load().finally(() => {
        this.#loading = null;
      });
    return this.#loading;
  }

  async #load() {
    try {
      const path = query("novelties/groups", {
        state: this.#state,
        order: this.#order,
        limit: PAGE,
        before: this.#cursor,
      });
      const page = await ask(path, { signal: this.#signal });
      this.#cursor = page.next_cursor;
      this.#ended = page.next_cursor === null;
      for (const { samples, ...group } of page.items) this.#add({ ...group, items: samples });
      this.#on.changed();
    } catch (error) {
      this.#ended = true;
      if (error.name !== "AbortError") this.#on.failed(error);
    }
    // Observed anew: an observer tells of changes only, and a short page may leave the end where it was, on the screen.
    this.#end.unobserve(this.#sentinel);
    if (!this.#ended) this.#end.observe(this.#sentinel);
  }

  #add(group) {
    const taken = group.ids.filter((id) => basket.has(id)).length;
    group.items = group.items.filter((item) => !basket.has(item.id));
    group.size -= taken;
    if (group.size <= 0 || this.#slots.has(group.id)) return;
    const element = h("section", { class: group.size === 1 ? "group single" : "group" });
    this.#slots.set(group.id, { group, element });
    this.#bySlot.set(element, group);
    put(element, groupCard(group, this.#on));
    this.#groups.append(element);
    this.#near.observe(element);
    if (taken && group.items.length < Math.min(SHOWN, group.size)) this.#refill(group);
  }

  #come({ target, isIntersecting, boundingClientRect: size }) {
    const group = this.#bySlot.get(target);
    if (isIntersecting && !target.firstChild) {
      target.style.width = target.style.height = "";
      put(target, groupCard(group, this.#on));
    } else if (!isIntersecting && target.firstChild && !target.contains(document.activeElement)) {
      target.style.width = `${size.width}px`;
      target.style.height = `${size.height}px`;
      put(target);
    }
  }

  #draw(group) {
    const { element } = this.#slots.get(group.id);
    element.style.width = element.style.height = "";
    element.className = group.size === 1 ? "group single" : "group";
    put(element, groupCard(group, this.#on));
  }

  /** Take images away that were dismissed, or named. */
  async remove(ids) {
    const gone = new Set(ids);
    for (const { group, element } of [...this.#slots.values()]) {
      const before = group.items.length;
      group.items = group.items.filter((item) => !gone.has(item.id));
      const left = group.ids.filter((id) => !gone.has(id));
      const fewer = Math.max(before - group.items.length, group.ids.length - left.length);
      if (!fewer) continue;
      group.ids = left;
      group.size -= fewer;
      if (group.size <= 0) {
        this.#near.unobserve(element);
        element.remove();
        this.#slots.delete(group.id);
        continue;
      }
      this.#draw(group);
      if (group.items.length < Math.min(SHOWN, group.size)) this.#refill(group);
    }
    if (!this.#slots.size) await this.more();
    this.#on.changed();
  }

  async #refill(group) {
    const found = await this.#items(group, SHOWN + basket.size, SHOWN);
    if (found === null || !this.#slots.has(group.id)) return;
    group.items = found;
    if (!found.length) {
      this.#slots.get(group.id).element.remove();
      this.#slots.delete(group.id);
    } else this.#draw(group);
    this.#on.changed();
  }

  async #expand(group) {
    const found = await this.#items(group, group.items.length + MORE + basket.size, group.items.length + MORE);
    if (found === null) return;
    const first = group.items.length;
    group.items = found;
    if (found.length === first) group.size = first; // the others have gone meanwhile
    this.#draw(group);
    this.#slots.get(group.id).element.querySelectorAll("button.pick")[first]?.focus();
  }

  /** So many images of a group that are not in the basket, newest first; null when they could not be had. */
  async #items(group, look, most) {
    const found = [];
    let before = null;
    try {
      do {
        const path = query("novelties", { state: this.#state, group: group.id, limit: Math.min(200, look), before });
        const page = await ask(path, { signal: this.#signal });
        found.push(...page.items.filter((item) => !basket.has(item.id)));
        before = page.next_cursor;
      } while (before !== null && found.length < most);
    } catch (error) {
      if (error.name !== "AbortError") this.#on.failed(error);
      return null;
    }
    return found.slice(0, most);
  }

  /** Every id of a group, also of those that are not shown. */
  async allIds(group) {
    if (group.ids.length >= group.size) return group.ids.filter((id) => !basket.has(id));
    return (await this.#items(group, 200, Infinity))?.map((item) => item.id) ?? [];
  }
}
