// The selected images of the inbox, and selecting by mouse and keyboard.

class Selection extends EventTarget {
  ids = new Set();
  anchor = null; // the image where a range begins

  set(ids, selected) {
    for (const id of ids) selected ? this.ids.add(id) : this.ids.delete(id);
    this.dispatchEvent(new Event("change"));
  }

  toggle(id) {
    this.anchor = id;
    this.set([id], !this.ids.has(id));
  }

  /** Selects the range from the anchor to an image. `order` lists the ids as they are shown. */
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

/** The buttons of the images that are drawn. */
export const imageButtons = (box) => [...box.querySelectorAll("button.image-button")];

export function focusImage(button) {
  button?.focus({ preventScroll: true });
  button?.scrollIntoView({ block: "nearest" });
}

/** The image button that an arrow key leads to. */
function neighbour(button, key, box) {
  const buttons = imageButtons(box);
  if (key === "ArrowRight") return buttons[buttons.indexOf(button) + 1];
  if (key === "ArrowLeft") return buttons[buttons.indexOf(button) - 1];
  const here = button.getBoundingClientRect();
  const distance = (there) => {
    const vertical = key === "ArrowDown" ? there.top - here.bottom : here.top - there.bottom;
    // The next row first, then the nearest column.
    return vertical < -8 ? Infinity : vertical * 4 + Math.abs(there.left - here.left);
  };
  return buttons
    .map((other) => ({ other, away: distance(other.getBoundingClientRect()) }))
    .filter(({ other, away }) => other !== button && away < Infinity)
    .sort((a, b) => a.away - b.away)[0]?.other;
}

/** Handles clicks and keys in `box`. `on` has order() -> ids, label(), selectGroup(id), move(id), showDetails(id). */
export function handleSelection(box, on, signal) {
  box.addEventListener(
    "click",
    (event) => {
      const button = event.target.closest("button.image-button");
      if (!button) return;
      if (event.shiftKey) selection.extendTo(button.dataset.id, on.order());
      else selection.toggle(button.dataset.id);
    },
    { signal },
  );

  box.addEventListener(
    "keydown",
    (event) => {
      const button = event.target.closest("button.image-button");
      if (!button || event.ctrlKey || event.metaKey || event.altKey) return;
      const { key } = event;
      const { id } = button.dataset;
      if (key.startsWith("Arrow")) {
        const next = neighbour(button, key, box);
        if (next && event.shiftKey) {
          selection.anchor ??= id;
          selection.set([id, next.dataset.id], true);
        }
        focusImage(next);
      } else if (key === "Enter") on.label();
      else if (key === "a") on.selectGroup(id);
      else if (key === "d") on.move(id);
      else if (key === "i") on.showDetails(id);
      else if (key === "Escape") selection.clear();
      else return;
      event.preventDefault();
    },
    { signal },
  );

  selection.addEventListener("change", () => markSelected(box), { signal });
}

/** Updates the state of the buttons that are drawn. */
export function markSelected(box) {
  for (const button of imageButtons(box)) button.setAttribute("aria-pressed", selection.ids.has(button.dataset.id));
}
