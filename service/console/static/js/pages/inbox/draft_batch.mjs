// The batch that the user is labelling: class name -> ids of novelties. Stored in the tab until it is submitted.

const STORAGE = "openworld.draft_batch";
const RECOMMENDED_IMAGES = 10;

class DraftBatch extends EventTarget {
  #classes = new Map(); // name -> Set of ids

  constructor() {
    super();
    try {
      for (const [name, ids] of JSON.parse(sessionStorage.getItem(STORAGE) ?? "[]"))
        this.#classes.set(name, new Set(ids));
    } catch {
      sessionStorage.removeItem(STORAGE); // written by another release
    }
  }

  /** The number of images. */
  get size() {
    return [...this.#classes.values()].reduce((sum, ids) => sum + ids.size, 0);
  }

  entries() {
    return [...this.#classes].map(([name, ids]) => ({ name, ids: [...ids] }));
  }

  has(id) {
    return [...this.#classes.values()].some((ids) => ids.has(id));
  }

  /** Labels images; a label that they had in this batch is replaced. */
  add(name, ids) {
    for (const others of this.#classes.values()) for (const id of ids) others.delete(id);
    this.#classes.set(name, new Set([...(this.#classes.get(name) ?? []), ...ids]));
    this.#changed();
  }

  removeClass(name) {
    this.#classes.delete(name);
    this.#changed();
  }

  removeImages(ids) {
    for (const own of this.#classes.values()) for (const id of ids) own.delete(id);
    this.#changed();
  }

  clear() {
    this.#classes.clear();
    this.#changed();
  }

  /** The body of POST /tasks. */
  toRequest() {
    return { classes: Object.fromEntries(this.entries().map(({ name, ids }) => [name, ids])) };
  }

  #changed() {
    for (const [name, ids] of this.#classes) if (!ids.size) this.#classes.delete(name);
    sessionStorage.setItem(STORAGE, JSON.stringify(this.entries().map(({ name, ids }) => [name, ids])));
    this.dispatchEvent(new Event("change"));
  }
}

export const draftBatch = new DraftBatch();

/** Checks a class name: { error } if it cannot be used, { hint } for information, `known` if the class is learned. */
export function checkName(name, classes) {
  if (!name) return {};
  if (/[/\\]|^\.|^[A-Za-z]:/.test(name))
    return { error: "A class name must not contain a slash or begin with a dot or a drive letter." };
  if (name.toLowerCase() === "ood") return { error: "“ood” is reserved: choose another name." };
  const same = classes.find((entry) => entry.name === name);
  if (same?.state === "merged") return { error: `“${name}” was merged into “${same.merged_into}”: use that name.` };
  if (same?.state === "retired")
    return { error: `“${name}” is retired: restore it on the page Versions, or choose another name.` };
  if (same?.state === "draft") return { hint: `“${name}” is in this batch: the images will be added to it.` };
  if (same) return { hint: `“${name}” is learned already: the images will extend it.`, known: true };
  // The server also compares spaces and look-alike letters; this check finds the common case.
  const similar = classes.find((entry) => entry.name.toLowerCase() === name.toLowerCase());
  if (similar) return { error: `There is a class “${similar.name}”: use the same spelling, or choose another name.` };
  return {};
}

/** A remark on the number of images of a class, or undefined. */
export function remarkOnCount(count, known) {
  if (known || count >= RECOMMENDED_IMAGES) return undefined;
  const weak = count === 1 ? "One image makes a weak class: " : "";
  return `${weak}${RECOMMENDED_IMAGES} or more images are recommended.`;
}
