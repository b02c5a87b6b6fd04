// What was named and not taught yet: class -> ids of novelties. Kept in the tab, so that going elsewhere loses nothing.

const PLACE = "openworld.basket";
const LEAST_NEW = 2,
  LEAST_KNOWN = 1,
  MANY = 10;

class Basket extends EventTarget {
  #classes = new Map(); // name -> Set of ids

  constructor() {
    super();
    try {
      for (const [name, ids] of JSON.parse(sessionStorage.getItem(PLACE) ?? "[]"))
        this.#classes.set(name, new Set(ids));
    } catch {
      sessionStorage.removeItem(PLACE); // not ours, or of another edition
    }
  }

  get size() {
    return [...this.#classes.values()].reduce((sum, ids) => sum + ids.size, 0);
  }

  entries() {
    return [...this.#classes].map(([name, ids]) => ({ name, ids: [...ids] }));
  }

  has(id) {
    return [...this.#classes.values()].some((ids) => ids.has(id));
  }

  /** An image is in one class: what it was called before counts no more. */
  add(name, ids) {
    for (const others of this.#classes.values()) for (const id of ids) others.delete(id);
    const own = this.#classes.get(name) ?? new Set();
    for (const id of ids) own.add(id);
    this.#classes.set(name, own);
    this.#changed();
  }

  remove(name) {
    this.#classes.delete(name);
    this.#changed();
  }

  drop(ids) {
    for (const own of this.#classes.values()) for (const id of ids) own.delete(id);
    this.#changed();
  }

  clear() {
    this.#classes.clear();
    this.#changed();
  }

  /** As POST /tasks takes it. */
  batch() {
    return { classes: Object.fromEntries(this.entries().map(({ name, ids }) => [name, ids])) };
  }

  #changed() {
    for (const [name, ids] of this.#classes) if (!ids.size) this.#classes.delete(name);
    sessionStorage.setItem(PLACE, JSON.stringify(this.entries().map(({ name, ids }) => [name, ids])));
    this.dispatchEvent(new Event("change"));
  }
}

export const basket = new Basket();

/** What is to be said of a name: { refuse } when it cannot be, { note } when it is worth knowing. */
export function judgeName(name, classes) {
  if (!name) return {};
  if (/[/\\]|^\.|^[A-Za-z]:/.test(name))
    return { refuse: "A name has no slash, no drive and no dot at its beginning." };
  if (name.length > 64) return { refuse: "A name has 64 characters at most." };
  if (name.toLowerCase() === "ood") return { refuse: "“ood” stands for what is not known: choose another name." };
  const same = classes.find((one) => one.name === name);
  if (same?.state === "merged") return { refuse: `“${name}” was merged into “${same.merged_into}”: use that name.` };
  if (same?.state === "retired")
    return { refuse: `“${name}” is retired: restore it under Versions, or choose another name.` };
  if (same?.state === "basket") return { note: `“${name}” is in the basket already: these images join it.` };
  if (same) return { note: `“${name}” is known already: these images will extend it.`, known: true };
  // Spaces and letters that only look different are the server's to judge; this is what people do.
  const like = classes.find((one) => one.name.toLowerCase() === name.toLowerCase());
  if (like) return { refuse: `There is a class “${like.name}”: write it the same way, or choose another name.` };
  return {};
}

/** The same for the number of its images. */
export function judgeCount(count, known) {
  const least = known ? LEAST_KNOWN : LEAST_NEW;
  if (count < least) return { refuse: `needs at least ${least} images` };
  if (count < MANY && !known) return { note: `few: ${MANY} or more are better` };
  return {};
}
