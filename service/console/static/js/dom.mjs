// DOM helpers: h("p", { class: "muted" }, "text", child).

// Taken from the page, so that no file has to contain the URL of the SVG namespace.
const SVG_NAMESPACE = document.querySelector("svg").namespaceURI;
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "indeterminate"]);

/** Flattens nested arrays and leaves out null, undefined and false. */
const present = (children) => children.flat(Infinity).filter((child) => child != null && child !== false);

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, value);
  }
  element.append(...present(children));
  return element;
}

export const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);

export const svg = (tag, attributes, ...children) =>
  build(document.createElementNS(SVG_NAMESPACE, tag), attributes, children);

/** Replaces the content of a node. */
export const render = (node, ...children) => node.replaceChildren(...present(children));

export const byId = (id) => document.getElementById(id);

let lastId = 0;

export const uniqueId = (prefix) => `${prefix}-${++lastId}`;

export const button = (text, onclick, attributes) => h("button", { type: "button", onclick, ...attributes }, text);

/** A form control with its label above. */
export function field(label, control) {
  control.id ||= uniqueId("field");
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control);
}

/** A labelled <select>. `options` maps each value to its text; `onchange` receives the chosen value. */
export const select = (label, options, chosen, onchange) =>
  field(
    label,
    h(
      "select",
      { onchange: (event) => onchange(event.target.value) },
      Object.entries(options).map(([value, text]) => h("option", { value, selected: value === chosen }, text)),
    ),
  );

/** Tells screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}
