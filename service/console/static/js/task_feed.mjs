// Every task that is being learned, followed from wherever the reader is: no page holds what another one needs.

import { ask, events } from "./api.mjs";
import { listed, plural } from "./format.mjs";
import { toast } from "./components/notices.mjs";

export const WORKING = new Set(["learning", "evaluating"]);
export const ENDED = new Set(["published", "rejected", "failed", "cancelled"]);

const LOOK = 5000; // milliseconds between two looks at the list, for tasks that others hand in
const KEPT = 100;
const STREAMS = 2; // a browser has six connections to a server, and pages need some of them

class Tasks extends EventTarget {
  #tasks = new Map(); // by id
  #streams = new Map(); // id -> AbortController
  #timer = null;
  #running = false;
  #seenCounts = null; // tasks by state at the last look, as text
  problem = null; // why there is no list
  loaded = false;

  /** Newest first. */
  all() {
    return [...this.#tasks.values()].sort((a, b) => (a.created < b.created ? 1 : -1));
  }

  /** The newest version that a task has become; 0 for none. */
  get newestVersion() {
    return Math.max(0, ...[...this.#tasks.values()].map((task) => task.version ?? 0));
  }

  start() {
    if (this.#running) return;
    this.#running = true;
    document.addEventListener("visibilitychange", this.#seen);
    this.look();
  }

  stop() {
    this.#running = false;
    this.#quiet();
    document.removeEventListener("visibilitychange", this.#seen);
    this.#tasks.clear();
    this.#seenCounts = null;
    this.loaded = false;
  }

  #seen = () => (document.hidden ? this.#quiet() : this.look());

  #quiet() {
    clearTimeout(this.#timer);
    for (const stream of this.#streams.values()) stream.abort();
    this.#streams.clear();
  }

  /** Look for tasks that have come or changed their state, now and again after a while. */
  async look() {
    clearTimeout(this.#timer);
    try {
      // A glance, because a hundred tasks with their losses are much to ask for every few seconds.
      const { counts } = await ask("tasks?limit=1");
      const seen = JSON.stringify(counts);
      if (seen !== this.#seenCounts) await this.#read();
      this.#seenCounts = seen;
      this.problem = null;
    } catch (error) {
      this.problem = error;
    }
    this.loaded = true;
    if (!this.#running) return;
    this.#open();
    this.dispatchEvent(new Event("change"));
    if (this.problem?.code === "no_queue") return; // it never gets one while it runs
    this.#timer = setTimeout(() => this.look(), this.problem ? 4 * LOOK : LOOK);
  }

  async #read() {
    const page = await ask(`tasks?limit=${KEPT}`);
    const there = new Set(page.tasks.map((task) => task.id));
    for (const id of this.#tasks.keys()) if (!there.has(id)) this.#tasks.delete(id);
    for (const task of page.tasks) this.#heard(task, false);
  }

  /** A task that was just handed in, or has just changed. */
  add(task) {
    this.#heard(task);
    this.#open();
  }

  #heard(task, tell = true) {
    const before = this.#tasks.get(task.id);
    if (before && before.updated > task.updated) return; // an answer that was overtaken by an event
    this.#tasks.set(task.id, task);
    if (before) this.#announce(before, task);
    if (tell) this.dispatchEvent(new Event("change"));
  }

  #announce(before, task) {
    const names = listed(Object.keys(task.counts));
    if (before.state !== task.state && ENDED.has(task.state)) {
      if (task.state === "published") {
        toast(`Version ${task.version} has learned ${names}.`, {
          action: { text: "See it", href: `#/versions/${task.version}` },
        });
      } else {
        const kind = task.state === "cancelled" ? "good" : "bad";
        toast(`${names}: ${task.state}. ${task.reason ?? ""}`, {
          kind,
          action: { text: "See why", href: "#/teaching" },
        });
      }
    } else if (before.progress?.phase !== task.progress?.phase && task.progress) {
      const said = `Learning ${names}: ${task.progress.phase}, ${Math.round(100 * task.progress.progress)} percent`;
      this.dispatchEvent(new CustomEvent("phase", { detail: said }));
    }
  }

  #open() {
    const wanted = this.all()
      .filter((task) => !ENDED.has(task.state))
      .reverse();
    wanted.sort((a, b) => WORKING.has(b.state) - WORKING.has(a.state));
    for (const task of wanted.slice(0, STREAMS)) {
      if (!this.#streams.has(task.id) && this.#streams.size < STREAMS && !document.hidden) this.#follow(task.id);
    }
  }

  async #follow(id) {
    const stream = new AbortController();
    this.#streams.set(id, stream);
    try {
      for await (const task of events(`tasks/${id}/events`, stream.signal)) this.#heard(task);
    } catch {
      // The next look at the list opens it again, if there is still something to follow.
    } finally {
      if (this.#streams.get(id) === stream) this.#streams.delete(id);
    }
  }
}

export const tasks = new Tasks();

/** What a task teaches, in a line. */
export function taught(task) {
  const images = Object.values(task.counts).reduce((sum, count) => sum + count, 0);
  return `${plural(images, "image")} of ${plural(Object.keys(task.counts).length, "class", "classes")}`;
}
