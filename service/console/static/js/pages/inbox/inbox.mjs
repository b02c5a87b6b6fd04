// The inbox: novel images, grouped by likeness, to be named, put aside, and taught.

import { ask, post } from "../../api.mjs";
import { Dock } from "./label_panel.mjs";
import { button, h, labelled, put } from "../../dom.mjs";
import { lookCloser } from "./group_card.mjs";
import { GroupList } from "./group_list.mjs";
import { tasks } from "../../task_feed.mjs";
import { plural } from "../../format.mjs";
import { complain, empty, problemBox, toast } from "../../components/notices.mjs";
import { focusPick, listen, mark, selection } from "./selection.mjs";

const LOOK = 10000; // milliseconds between two looks for new images

// What the reader chose, for when they come back.
const chosen = { state: "new", order: "largest" };

const STATES = { new: "New", dismissed: "Dismissed", labelled: "Labelled" };
const ORDERS = { largest: "Largest groups first", newest: "Newest first" };
// What d does in each state: where to, and what to say.
const ASIDE = {
  new: { path: "novelties/dismiss", back: "novelties/restore", button: "Dismiss", done: "dismissed" },
  dismissed: { path: "novelties/restore", back: "novelties/dismiss", button: "Bring back", done: "brought back" },
};

export async function show(body, { signal }) {
  let { version, classes } = await ask("classes", { signal });
  let list = null;
  let over = new AbortController(); // of the list that is shown
  signal.addEventListener("abort", () => over.abort());

  const box = h("div", { class: "list" });
  const news = h("div", { class: "news", "aria-live": "polite" });
  const dock = new Dock(
    classes,
    {
      named: (ids) => take(ids),
      putAside: () => putAside(),
      back: () => focusPick(box.querySelector("button.pick")),
      changed: reload,
    },
    signal,
  );
  put(
    body,
    h(
      "p",
      { class: "lead" },
      "Images that were like nothing learned so far. Name what belongs together, and teach it.",
    ),
    controls(reload),
    dock.element,
    news,
    box,
    help(),
  );

  function reload() {
    over.abort();
    over = new AbortController();
    dock.offer(ASIDE[chosen.state]?.button);
    put(news);
    list = new GroupList(box, {
      ...chosen,
      signal: over.signal,
      on: { version, all, look: lookCloser, failed, changed },
    });
    return list.more();
  }

  function changed() {
    if (list.empty)
      put(box, chosen.state === "new" ? nothing(classes) : h("p", { class: "empty" }, `Nothing is ${chosen.state}.`));
    mark(box);
  }

  function failed(error) {
    put(box, problemBox(error, reload));
  }

  async function all(group) {
    const ids = await list.allIds(group);
    selection.set(ids, !ids.every((id) => selection.ids.has(id)));
  }

  /** They leave the list; the focus goes to what comes after them. */
  async function take(ids) {
    const picks = [...box.querySelectorAll("button.pick")];
    const gone = new Set(ids);
    const first = picks.findIndex((pick) => gone.has(pick.dataset.id));
    const next = picks.slice(Math.max(first, 0)).find((pick) => !gone.has(pick.dataset.id))?.dataset.id;
    await list.remove(ids);
    focusPick(box.querySelector(next ? `button.pick[data-id="${next}"]` : "button.pick"));
  }

  async function putAside(pick = null) {
    const way = ASIDE[chosen.state];
    const ids = selection.ids.size ? [...selection.ids] : pick ? [pick.dataset.id] : [];
    if (!way || !ids.length) return;
    try {
      const { changed: moved, missing } = await post(way.path, { ids });
      selection.set(ids, false);
      await take([...moved, ...missing]);
      const undo = async () => {
        await post(way.back, { ids: moved }).catch(complain);
        await reload();
      };
      toast(`${plural(moved.length, "image")} ${way.done}.`, { action: { text: "Undo", run: undo } });
    } catch (error) {
      complain(error);
    }
  }

  listen(
    box,
    {
      order: () => list.order(),
      name: () => dock.focus(),
      all: (pick) => all(list.groupOf(pick.dataset.id)),
      dismiss: putAside,
      look: (id) => lookCloser(list.find(id)),
    },
    signal,
  );
  let learned = tasks.newestVersion;
  tasks.addEventListener(
    "change",
    async () => {
      if (tasks.newestVersion === learned) return;
      learned = tasks.newestVersion;
      ({ version, classes } = await ask("classes", { signal }));
      dock.learn(classes);
    },
    { signal },
  );
  await reload();
  watchForNews(() => list, news, reload, signal);
}

function controls(changed) {
  const choose = (name) => (event) => {
    chosen[name] = event.target.value;
    if (name === "state") selection.clear();
    changed();
  };
  const choice = (label, name, values) =>
    labelled(
      label,
      h(
        "select",
        { onchange: choose(name) },
        Object.entries(values).map(([value, text]) => h("option", { value, selected: chosen[name] === value }, text)),
      ),
    );
  return h("div", { class: "row controls" }, choice("Show", "state", STATES), choice("Order", "order", ORDERS));
}

/** New images do not move what somebody is looking at; they are offered. */
function watchForNews(list, news, reload, signal) {
  let newest;
  const look = async () => {
    if (document.hidden || chosen.state !== "new") return;
    const page = await ask("novelties?limit=1", { signal }).catch(() => null);
    const seen = page?.items[0]?.first_seen ?? null;
    if (page && newest !== undefined && seen !== null && seen > (newest ?? "")) {
      if (list().empty) await reload();
      else put(news, button("New images have come: show them", reload));
    }
    if (page) newest = seen > (newest ?? "") ? seen : (newest ?? null);
  };
  look();
  const timer = setInterval(look, LOOK);
  signal.addEventListener("abort", () => clearInterval(timer));
}

const nothing = (classes) =>
  empty(
    "Nothing novel here",
    h(
      "p",
      {},
      classes.length
        ? "All that was asked lately is known, or has been named or dismissed. What is novel next appears here by itself."
        : "Nothing has been learned yet, so every image that is sent is novel and appears here, to be named and taught.",
    ),
    h("p", {}, "Send some:"),
    h("pre", {}, `curl --data-binary @photo.jpg ${location.origin}/predict`),
    h("p", {}, h("a", { class: "button main", href: "#/try" }, "Try some pictures")),
  );

const KEYS = {
  arrows: "to the next image",
  Tab: "to the next group",
  Space: "select",
  Shift: "with a click or an arrow: a range",
  a: "all of the group",
  d: "dismiss",
  i: "look closer",
  Enter: "name",
  Esc: "select nothing",
};

const help = () =>
  h(
    "details",
    { class: "help" },
    h("summary", {}, "Keys"),
    h(
      "dl",
      {},
      Object.entries(KEYS).map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]),
    ),
  );
