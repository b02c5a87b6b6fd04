// The inbox: groups of novelties to label, teach or dismiss.

import { get, post, session } from "../../api.mjs";
import { emptyState, problemBox, showError, toast } from "../../components/notices.mjs";
import { button, h, render, select } from "../../dom.mjs";
import { plural } from "../../format.mjs";
import { taskFeed } from "../../task_feed.mjs";
import { showDetails } from "./group_card.mjs";
import { GroupList } from "./group_list.mjs";
import { LabelPanel } from "./label_panel.mjs";
import { focusImage, handleSelection, imageButtons, markSelected, selection } from "./selection.mjs";

const POLL_MILLISECONDS = 10000; // for new images

const filter = { state: "new", order: "largest" }; // kept while the tab is open

const STATES = { new: "New", dismissed: "Dismissed", labelled: "Labelled" };
const ORDERS = { largest: "Largest groups first", newest: "Newest first" };
// From which state images can be moved, and how.
const MOVES = {
  new: { path: "novelties/dismiss", undo: "novelties/restore", button: "Dismiss", done: "dismissed" },
  dismissed: { path: "novelties/restore", undo: "novelties/dismiss", button: "Restore", done: "restored" },
};
const KEYS = {
  "Arrow keys": "go to the next image",
  Tab: "go to the next group",
  Space: "select",
  Shift: "with a click or an arrow key: select a range",
  a: "select the whole group",
  d: "dismiss or restore",
  i: "show details",
  Enter: "enter the class name",
  Esc: "clear the selection",
};

export async function show(body, { signal }) {
  let { version, classes } = await get("classes", { signal });
  let list = null;
  let listController = new AbortController();
  signal.addEventListener("abort", () => listController.abort());

  const box = h("div", { class: "list" });
  const news = h("div", { class: "news", "aria-live": "polite" });
  const panel = new LabelPanel(
    classes,
    {
      labelled: removeFromList,
      unlabelled: reload,
      move: () => moveSelected(),
      cancelled: () => focusImage(imageButtons(box)[0]),
    },
    signal,
  );
  render(
    body,
    h(
      "p",
      { class: "lead" },
      "Images that match no learned class. Select images of one class, label them and teach them.",
    ),
    filterControls(reload),
    panel.element,
    news,
    box,
    keyHelp(),
  );

  function reload() {
    listController.abort();
    listController = new AbortController();
    panel.setMoveAction(MOVES[filter.state]?.button);
    render(news);
    const on = { version, selectGroup, failed: (error) => render(box, problemBox(error, reload)), changed };
    list = new GroupList(box, { ...filter, signal: listController.signal, on });
    return list.loadMore();
  }

  function changed() {
    if (list.empty) render(box, filter.state === "new" ? emptyInbox(classes) : emptyState(`No ${filter.state} images`));
    markSelected(box);
  }

  async function selectGroup(group) {
    const ids = await list.allIds(group);
    selection.set(ids, !ids.every((id) => selection.ids.has(id)));
  }

  /** Removes images from the list and focuses the image after them. */
  async function removeFromList(ids) {
    const removed = new Set(ids);
    const order = imageButtons(box).map((image) => image.dataset.id);
    const first = Math.max(
      order.findIndex((id) => removed.has(id)),
      0,
    );
    const next = order.slice(first).find((id) => !removed.has(id));
    await list.remove(ids);
    const left = imageButtons(box);
    focusImage(left.find((image) => image.dataset.id === next) ?? left[0]);
  }

  /** Dismisses or restores the selection, or the given image if nothing is selected. */
  async function moveSelected(id = null) {
    const move = MOVES[filter.state];
    const ids = selection.ids.size ? [...selection.ids] : id ? [id] : [];
    if (!move || !ids.length) return;
    try {
      const { changed: moved, missing } = await post(move.path, { ids });
      selection.set(ids, false);
      await removeFromList([...moved, ...missing]);
      const undo = async () => {
        await post(move.undo, { ids: moved }).catch(showError);
        await reload();
      };
      toast(`${plural(moved.length, "image")} ${move.done}.`, { action: { text: "Undo", run: undo } });
    } catch (error) {
      showError(error);
    }
  }

  handleSelection(
    box,
    {
      order: () => list.order(),
      label: () => panel.focus(),
      selectGroup: (id) => selectGroup(list.groupOf(id)),
      move: moveSelected,
      showDetails: (id) => showDetails(list.find(id)),
    },
    signal,
  );

  let newestVersion = taskFeed.newestVersion;
  taskFeed.addEventListener(
    "change",
    async () => {
      if (taskFeed.newestVersion === newestVersion) return;
      newestVersion = taskFeed.newestVersion;
      ({ version, classes } = await get("classes", { signal }));
      panel.setClasses(classes);
    },
    { signal },
  );
  await reload();
  watchForNewImages(() => (list.empty ? reload() : render(news, button("Show new images", reload))), signal);
}

/** Calls `arrived` when the inbox has newer images. The list is not changed while the user looks at it. */
function watchForNewImages(arrived, signal) {
  let newest;
  const poll = async () => {
    if (document.hidden || filter.state !== "new") return;
    const page = await get("novelties?limit=1", { signal }).catch(() => null);
    if (!page) return;
    const seen = page.items[0]?.first_seen ?? "";
    if (newest !== undefined && seen > newest) await arrived();
    if (newest === undefined || seen > newest) newest = seen;
  };
  poll();
  const timer = setInterval(poll, POLL_MILLISECONDS);
  signal.addEventListener("abort", () => clearInterval(timer));
}

function filterControls(changed) {
  const choose = (name) => (value) => {
    filter[name] = value;
    if (name === "state") selection.clear();
    changed();
  };
  return h(
    "div",
    { class: "row controls" },
    select("Show", STATES, filter.state, choose("state")),
    select("Order", ORDERS, filter.order, choose("order")),
  );
}

const emptyInbox = (classes) =>
  emptyState(
    "No novel images",
    h(
      "p",
      {},
      classes.length
        ? "Novel images appear here when they arrive."
        : "Nothing has been learned yet, so every image is novel. Images appear here when they arrive.",
    ),
    h("p", {}, "Send an image:"),
    h("pre", {}, `curl --data-binary @image.jpg ${location.origin}/predict`),
    session.hasRole("predict") && h("p", {}, h("a", { class: "button primary", href: "#/try" }, "Try an image")),
  );

const keyHelp = () =>
  h(
    "details",
    { class: "help" },
    h("summary", {}, "Keyboard shortcuts"),
    h(
      "dl",
      {},
      Object.entries(KEYS).map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)]),
    ),
  );
