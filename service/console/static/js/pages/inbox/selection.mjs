// Which images are selected, and the keys and clicks that select them.

class Selection extends EventTarget {
  ids = new Set();
  anchor = null; // where a range begins

  set(ids, on) {
    for (const id of ids) on ? this.ids.add(id) : this.ids.delete(id);
    this.dispatchEvent(new Event("change"));
  }

  toggle(id) {
    this.anchor = id;
    this.set([id], !this.ids.has(id));
  }

  /** All from the last one that was clicked to this one, in the order of the page. */
  extendTo(id, order) {
    const [from, to] = [order.indexOf(this.anchor), order.indexOf(id)];
    if (from < 0) return this.toggle(id);
    this.set(order.slice(Math.min(from, to), Math.max(from, to) + 1), true);
  }

  clear() {
    this.set([...this.ids], false);
    this.anchor = null;
  }
}

export const selection = new Selection();

const picksOf = (box) => [...box.querySelectorAll("button.pick")];

/** The image that an arrow leads to from the one that has the focus. */
function neighbour(pick, key, box) {
  const picks = picksOf(box);
  if (key === "ArrowRight") return picks[picks.indexOf(pick) + 1];
  if (key === "ArrowLeft") return picks[picks.indexOf(pick) - 1];
  const here = pick.getBoundingClientRect();
  const down = key === "ArrowDown";
  const distance = (there) => {
    const rows = down ? there.top - here.bottom : here.top - there.bottom;
    return rows < -8 ? Infinity : rows * 4 + Math.abs(there.left - here.left); // the next row first, then the nearest in it
  };
  const best = picks
    .map((one) => ({ one, far: distance(one.getBoundingClientRect()) }))
    .filter(({ one, far }) => one !== pick && far < Infinity)
    .sort((a, b) => a.far - b.far)[0];
  return best?.one;
}

/** Move the focus to an image, into view. */
export function focusPick(pick) {
  pick?.focus({ preventScroll: true });
  pick?.scrollIntoView({ block: "nearest" });
}

/**
 * Listen in `box`. `on` has: order() -> ids as shown, name(), all(pick), dismiss(), look(id).
 */
export function listen(box, on, signal) {
  box.addEventListener(
    "click",
    (event) => {
      const pick = event.target.closest("button.pick");
      if (!pick) return;
      if (event.shiftKey) selection.extendTo(pick.dataset.id, on.order());
      else selection.toggle(pick.dataset.id);
    },
    { signal },
  );

  box.addEventListener(
    "keydown",
    (event) => {
      const pick = event.target.closest("button.pick");
      if (!pick || event.ctrlKey || event.metaKey || event.altKey) return;
      const { key } = event;
      if (key.startsWith("Arrow")) {
        const next = neighbour(pick, key, box);
        if (next && event.shiftKey) {
          selection.anchor ??= pick.dataset.id;
          selection.set([pick.dataset.id, next.dataset.id], true);
        }
        focusPick(next);
      } else if (key === "Enter") on.name();
      else if (key === "a") on.all(pick);
      else if (key === "d") on.dismiss(pick);
      else if (key === "i") on.look(pick.dataset.id);
      else if (key === "Escape") selection.clear();
      else return;
      event.preventDefault();
    },
    { signal },
  );

  selection.addEventListener("change", () => mark(box), { signal });
}

/** Show what is selected; only what is drawn at all has to change. */
export function mark(box) {
  for (const pick of picksOf(box)) pick.setAttribute("aria-pressed", selection.ids.has(pick.dataset.id));
}
