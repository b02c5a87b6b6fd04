// The frame around the pages: which page, who is asking, what is being learned, light or dark.

import { ask, onUnauthorized, session } from "./api.mjs";
import { button, byId, h, labelled, put, say } from "./dom.mjs";
import { tasks, WORKING } from "./task_feed.mjs";
import { listed, percent } from "./format.mjs";
import { problemBox } from "./components/notices.mjs";
import { toggleTheme } from "./theme.mjs";

const PAGES = {
  inbox: { title: "Inbox", role: "label", load: () => import("./pages/inbox/inbox.mjs") },
  teaching: { title: "Teaching", load: () => import("./pages/tasks.mjs") },
  try: { title: "Try it", role: "predict", load: () => import("./pages/try/try.mjs") },
  versions: { title: "Versions", load: () => import("./pages/versions/versions.mjs") },
  live: { title: "Live", load: () => import("./pages/live.mjs") },
};

const main = byId("main");
let leave = new AbortController(); // tells the page that is shown to let go of whatever it holds

const allowed = () => Object.keys(PAGES).filter((name) => session.may(PAGES[name].role));

function address() {
  const [, name, ...rest] = location.hash.split("/");
  return { name, rest };
}

async function show() {
  leave.abort();
  leave = new AbortController();
  const { signal } = leave;
  if (session.me === null) return start();
  const { name, rest } = address();
  if (!allowed().includes(name)) return location.replace(`#/${allowed()[0]}`);
  const page = PAGES[name];
  document.title = `${page.title} · openworld`;
  drawNav(name);
  const heading = h("h1", { tabindex: "-1" }, page.title);
  const body = h("div", { class: `page ${name}` });
  put(main, heading, body);
  try {
    const { show: draw } = await page.load();
    if (!signal.aborted) await draw(body, { signal, rest });
  } catch (error) {
    if (!signal.aborted) put(body, problemBox(error, show));
  }
}

function drawNav(current) {
  put(
    byId("nav"),
    allowed().map((name) =>
      h("a", { href: `#/${name}`, "aria-current": name === current ? "page" : null }, PAGES[name].title),
    ),
  );
  const who = session.me.keys_needed
    ? [
        h("span", { title: session.me.roles.join(", ") }, session.me.name),
        button("Forget the key", forget, { class: "plain" }),
      ]
    : [];
  put(byId("who"), who);
}

// Keys

async function start() {
  try {
    session.me = await ask("me");
  } catch (error) {
    if (error.status === 401) return; // the form for a key is there by now
    return put(main, h("h1", {}, "openworld"), problemBox(error, show));
  }
  tasks.start();
  return show();
}

function forget() {
  session.key = null;
  location.reload(); // nothing that the key has shown is left
}

function askForKey() {
  if (byId("key")) return; // asked already: several requests may come back at once
  const refused = session.key !== null;
  session.key = null;
  session.me = null;
  leave.abort();
  tasks.stop();
  put(byId("nav"));
  put(byId("who"));
  const input = h("input", {
    id: "key",
    type: "password",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
  });
  const submit = (event) => {
    event.preventDefault();
    session.key = input.value.trim();
    put(main, h("h1", {}, "One moment…"));
    show();
  };
  put(
    main,
    h("h1", {}, "A key, please"),
    h(
      "form",
      { class: "card narrow", onsubmit: submit },
      h("p", {}, "This server has keys. Yours says what you may do here; it is kept in this tab only."),
      refused && h("p", { class: "warn", role: "alert" }, "The server does not know that key."),
      labelled("Key", input),
      h("div", { class: "row end" }, h("button", { type: "submit", class: "main" }, "Come in")),
    ),
  );
  input.focus();
}

onUnauthorized(askForKey);

// What is being learned, on every page

function drawBusy() {
  const busy = byId("busy");
  const task = tasks.all().find((one) => WORKING.has(one.state)) ?? tasks.all().find((one) => one.state === "queued");
  busy.hidden = !task;
  if (!task) return;
  const done = task.progress ? ` ${percent(task.progress.progress)}` : "";
  const verb = task.state === "queued" ? "Waiting:" : "Learning";
  put(
    busy,
    h("span", { class: "pulse", "aria-hidden": "true" }),
    `${verb} ${listed(Object.keys(task.counts), 2)}${done}`,
  );
}

tasks.addEventListener("change", drawBusy);
tasks.addEventListener("phase", (event) => say(event.detail));

// The rest

byId("theme").addEventListener("click", toggleTheme);
byId("skip").addEventListener("click", () => main.focus());
addEventListener("hashchange", async () => {
  await show();
  // Where a link has led: those who use a keyboard or listen start at the top of the new page.
  main.querySelector("h1")?.focus({ preventScroll: true });
  scrollTo(0, 0);
});

if (!location.hash) history.replaceState(null, "", "#/");
show();
