// The groups of the inbox, loaded page by page. A group that is far from the viewport is removed from the page and
// leaves an empty box of its size, so that thousands of images stay cheap.

import { get, withQuery } from "../../api.mjs";
import { h, render } from "../../dom.mjs";
import { draftBatch } from "./draft_batch.mjs";
import { groupCard } from "./group_card.mjs";
import { imageButtons } from "./selection.mjs";

const GROUPS_PER_PAGE = 24;
const SAMPLES = 8; // images of a group that the server sends with the group
const MORE_IMAGES = 100; // images that "more" adds
const MAX_LIMIT = 200; // of GET /novelties
const MARGIN = "1200px 0px"; // around the viewport

export class GroupList {
  #filter;
  #signal;
  #on;
  #entries = new Map(); // group id -> { group, element }
  #groupOfElement = new WeakMap();
  #cursor = null;
  #ended = false;
  #loading = null;
  #visibility;
  #endReached;
  #groups = h("div", { class: "groups" });
  #sentinel = h("div", { class: "sentinel", "aria-hidden": "true" });

  /** `on` has selectGroup(group), failed(error), changed() and the active `version`. */
  constructor(box, { state, order, signal, on }) {
    this.#filter = { state, order };
    this.#signal = signal;
    this.#on = { ...on, showMore: (group) => this.#showMore(group) };
    const options = { rootMargin: MARGIN };
    this.#visibility = new IntersectionObserver((entries) => entries.forEach(this.#visibilityChanged), options);
    this.#endReached = new IntersectionObserver((entries) => entries.at(-1).isIntersecting && this.loadMore(), options);
    signal.addEventListener("abort", () => {
      this.#visibility.disconnect();
      this.#endReached.disconnect();
    });
    render(box, this.#groups, this.#sentinel);
  }

  get empty() {
    return this.#ended && this.#entries.size === 0;
  }

  #shown() {
    return [...this.#entries.values()].map(({ group }) => group);
  }

  /** The ids of the images that are shown, in their order. */
  order() {
    return this.#shown().flatMap((group) => group.items.map((item) => item.id));
  }

  find(id) {
    return this.groupOf(id)?.items.find((item) => item.id === id);
  }

  groupOf(id) {
    return this.#shown().find((group) => group.items.some((item) => item.id === id));
  }

  /** Loads the next page of groups; calls during a load share it. */
  loadMore() {
    if (!this.#ended)
      this.#loading ??= this.#load().finally(() => {
        this.#loading = null;
      });
    return this.#loading;
  }

  async #load() {
    const parameters = { ...this.#filter, limit: GROUPS_PER_PAGE, before: this.#cursor };
    try {
      const page = await get(withQuery("novelties/groups", parameters), { signal: this.#signal });
      this.#cursor = page.next_cursor;
      this.#ended = page.next_cursor === null;
      for (const { samples, ...group } of page.items) this.#add({ ...group, items: samples });
      this.#on.changed();
    } catch (error) {
      this.#ended = true;
      if (error.name !== "AbortError") this.#on.failed(error);
    }
    // Observe again: an observer reports changes only, and after a short page the sentinel may still be visible.
    this.#endReached.unobserve(this.#sentinel);
    if (!this.#ended) this.#endReached.observe(this.#sentinel);
  }

  #add(group) {
    const labelled = group.ids.filter((id) => draftBatch.has(id)).length;
    group.items = group.items.filter((item) => !draftBatch.has(item.id));
    group.size -= labelled;
    if (group.size <= 0 || this.#entries.has(group.id)) return;
    const element = h("section", {});
    this.#entries.set(group.id, { group, element });
    this.#groupOfElement.set(element, group);
    this.#draw(group);
    this.#groups.append(element);
    this.#visibility.observe(element);
    if (labelled) this.#refill(group);
  }

  #visibilityChanged = ({ target, isIntersecting, boundingClientRect: size }) => {
    if (isIntersecting && !target.firstChild) this.#draw(this.#groupOfElement.get(target));
    else if (!isIntersecting && target.firstChild && !target.contains(document.activeElement)) {
      target.style.width = `${size.width}px`;
      target.style.height = `${size.height}px`;
      render(target);
    }
  };

  #draw(group) {
    const { element } = this.#entries.get(group.id);
    element.style.width = element.style.height = "";
    element.className = group.size === 1 ? "group single" : "group";
    render(element, groupCard(group, this.#on));
  }

  #removeGroup(group) {
    const { element } = this.#entries.get(group.id);
    this.#visibility.unobserve(element);
    element.remove();
    this.#entries.delete(group.id);
  }

  /** Removes images that were labelled, dismissed or restored. */
  async remove(ids) {
    const gone = new Set(ids);
    for (const group of this.#shown()) {
      const items = group.items.filter((item) => !gone.has(item.id));
      const groupIds = group.ids.filter((id) => !gone.has(id));
      const removed = Math.max(group.items.length - items.length, group.ids.length - groupIds.length);
      if (!removed) continue;
      Object.assign(group, { items, ids: groupIds, size: group.size - removed });
      if (group.size <= 0) {
        this.#removeGroup(group);
        continue;
      }
      this.#draw(group);
      this.#refill(group);
    }
    if (!this.#entries.size) await this.loadMore();
    this.#on.changed();
  }

  /** Loads images of a group that shows fewer than it could. */
  async #refill(group) {
    if (group.items.length >= Math.min(SAMPLES, group.size)) return;
    const items = await this.#fetchItems(group, SAMPLES);
    if (items === null || !this.#entries.has(group.id)) return;
    group.items = items;
    if (items.length) this.#draw(group);
    else this.#removeGroup(group);
    this.#on.changed();
  }

  async #showMore(group) {
    const before = group.items.length;
    const items = await this.#fetchItems(group, before + MORE_IMAGES);
    if (items === null || !this.#entries.has(group.id)) return;
    group.items = items;
    if (items.length === before) group.size = before; // the others have left the inbox
    this.#draw(group);
    imageButtons(this.#entries.get(group.id).element)[before]?.focus();
  }

  /** Up to `count` images of a group that are not in the draft batch, newest first; null after an error. */
  async #fetchItems(group, count) {
    const items = [];
    const limit = Math.min(MAX_LIMIT, count + draftBatch.size);
    let before = null;
    try {
      do {
        const path = withQuery("novelties", { state: this.#filter.state, group: group.id, limit, before });
        const page = await get(path, { signal: this.#signal });
        items.push(...page.items.filter((item) => !draftBatch.has(item.id)));
        before = page.next_cursor;
      } while (before !== null && items.length < count);
    } catch (error) {
      if (error.name !== "AbortError") this.#on.failed(error);
      return null;
    }
    return items.slice(0, count);
  }

  /** The ids of all images of a group, also of those that are not shown. */
  async allIds(group) {
    if (group.ids.length >= group.size) return group.ids.filter((id) => !draftBatch.has(id));
    return (await this.#fetchItems(group, Infinity))?.map((item) => item.id) ?? [];
  }
}
