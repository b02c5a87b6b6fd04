// Elements without a framework: h("p", { class: "quiet" }, "text", child).

// The page's own drawing says what an SVG element is, so that no address of another host stands in these files.
const SVG = document.querySelector("svg").namespaceURI;
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "indeterminate"]);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Put these children into a node, in place of what was there. */
export function put(node, ...children) {
  node.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}

export const byId = (id) => document.getElementById(id);

let count = 0;

/** An id of its own, to tie a label to its control. */
export const fresh = (name) => `${name}-${++count}`;

export const button = (text, onclick, attributes) => h("button", { type: "button", onclick, ...attributes }, text);

/** A label above its control. */
export function labelled(text, control, attributes) {
  control.id ||= fresh("field");
  return h("div", { class: "field", ...attributes }, h("label", { for: control.id }, text), control);
}

/** A table; numbers are cells that are given as { n: text }. */
export function table(caption, head, rows) {
  const cell = (tag, value) =>
    h(tag, { class: value?.n !== undefined ? "n" : null, scope: tag === "th" ? "col" : null }, value?.n ?? value);
  return h(
    "div",
    { class: "scroll", role: "group", "aria-label": caption, tabindex: "0" },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map((value) => cell("th", value)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((value) => cell("td", value)),
          ),
        ),
      ),
    ),
  );
}

/** Say it to those who listen instead of looking. */
export function say(text) {
  byId("spoken").textContent = text;
}
