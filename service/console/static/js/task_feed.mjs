// The tasks of the server, kept up to date on every page: polls the list and follows running tasks by events.

import { get, streamEvents } from "./api.mjs";
import { toast } from "./components/notices.mjs";
import { joinNames, percent } from "./format.mjs";

const RUNNING = new Set(["learning", "evaluating"]);
export const ENDED = new Set(["published", "rejected", "failed", "cancelled"]);

const POLL_MILLISECONDS = 5000;
const MAX_TASKS = 100;
const MAX_STREAMS = 2; // a browser opens six connections to a server; pages need the others

/** Dispatches "change" after an update of the tasks, and "phase" (detail: text) when a task enters a new phase. */
class TaskFeed extends EventTarget {
  #tasks = new Map(); // id -> task
  #streams = new Map(); // id -> AbortController
  #timer = null;
  #running = false;
  #lastCounts = null; // the counts by state of the last poll, as JSON
  paused = false; // whether learning is paused
  problem = null; // the error of the last poll
  loaded = false;

  /** All tasks, newest first. */
  all() {
    return [...this.#tasks.values()].sort((a, b) => (a.created < b.created ? 1 : -1));
  }

  /** The task that is being learned, or else one that is queued. */
  get current() {
    const tasks = this.all();
    return tasks.find((task) => RUNNING.has(task.state)) ?? tasks.find((task) => task.state === "queued");
  }

  /** The newest version that a task has published, or 0. */
  get newestVersion() {
    return Math.max(0, ...this.all().map((task) => task.version ?? 0));
  }

  start() {
    if (this.#running) return;
    this.#running = true;
    document.addEventListener("visibilitychange", this.#visibilityChanged);
    this.poll();
  }

  stop() {
    this.#running = false;
    this.#pause();
    document.removeEventListener("visibilitychange", this.#visibilityChanged);
    this.#tasks.clear();
    this.#lastCounts = null;
    this.loaded = false;
  }

  #visibilityChanged = () => (document.hidden ? this.#pause() : this.poll());

  #pause() {
    clearTimeout(this.#timer);
    for (const stream of this.#streams.values()) stream.abort();
    this.#streams.clear();
  }

  /** Reads the list if the counts have changed, and schedules the next poll. */
  async poll() {
    clearTimeout(this.#timer);
    try {
      // The counts alone, because a full list with all losses is large.
      const page = await get("tasks?limit=1");
      const counts = JSON.stringify(page.counts);
      this.paused = page.paused;
      if (counts !== this.#lastCounts) await this.#readList();
      this.#lastCounts = counts;
      this.problem = null;
    } catch (error) {
      this.problem = error;
    }
    this.loaded = true;
    if (!this.#running) return;
    this.#openStreams();
    this.dispatchEvent(new Event("change"));
    if (this.problem?.code === "no_queue") return; // a server without a queue never gets one
    this.#timer = setTimeout(() => this.poll(), this.problem ? 4 * POLL_MILLISECONDS : POLL_MILLISECONDS);
  }

  async #readList() {
    const { tasks } = await get(`tasks?limit=${MAX_TASKS}`);
    const ids = new Set(tasks.map((task) => task.id));
    for (const id of this.#tasks.keys()) if (!ids.has(id)) this.#tasks.delete(id);
    for (const task of tasks) this.#store(task);
  }

  /** Adds or updates one task. */
  update(task) {
    this.#store(task);
    this.dispatchEvent(new Event("change"));
    this.#openStreams();
  }

  #store(task) {
    const before = this.#tasks.get(task.id);
    if (before && before.updated > task.updated) return; // an event was faster than this response
    this.#tasks.set(task.id, task);
    if (before) this.#announceChange(before, task);
  }

  #announceChange(before, task) {
    const names = joinNames(Object.keys(task.counts));
    if (before.state !== task.state && task.state === "published") {
      const what = task.result?.stage === "provisional" ? "answers with" : "has learned";
      toast(`Version ${task.version} ${what} ${names}.`, {
        action: { text: "Show version", href: `#/versions/${task.version}` },
      });
    } else if (!before.provisional && task.provisional) {
      toast(`Version ${task.provisional} answers with ${names}; learning goes on.`, {
        action: { text: "Try it", href: "#/try" },
      });
    } else if (before.state !== task.state && ENDED.has(task.state)) {
      toast([`Task for ${names} ${task.state}`, task.reason].filter(Boolean).join(": "), {
        error: task.state !== "cancelled",
        action: { text: "Show task", href: "#/tasks" },
      });
    } else if (task.progress && before.progress?.phase !== task.progress.phase) {
      const text = `Learning ${names}: ${task.progress.phase}, ${percent(task.progress.progress)}`;
      this.dispatchEvent(new CustomEvent("phase", { detail: text }));
    }
  }

  /** Follows the running tasks first, then the oldest queued ones. */
  #openStreams() {
    if (document.hidden) return;
    const active = this.all()
      .filter((task) => !ENDED.has(task.state))
      .reverse()
      .sort((a, b) => RUNNING.has(b.state) - RUNNING.has(a.state));
    for (const { id } of active.slice(0, MAX_STREAMS))
      if (!this.#streams.has(id) && this.#streams.size < MAX_STREAMS) this.#follow(id);
  }

  async #follow(id) {
    const stream = new AbortController();
    this.#streams.set(id, stream);
    try {
      for await (const task of streamEvents(`tasks/${id}/events`, stream.signal)) {
        this.#store(task);
        this.dispatchEvent(new Event("change"));
      }
    } catch {
      // The next poll opens the stream again if the task has not ended.
    } finally {
      if (this.#streams.get(id) === stream) this.#streams.delete(id);
    }
  }
}

export const taskFeed = new TaskFeed();
