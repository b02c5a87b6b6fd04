// The frame of every page: routing by URL fragment, sign-in, the current task and the theme.

import { get, onUnauthorized, session } from "./api.mjs";
import { problemBox } from "./components/notices.mjs";
import { announce, button, byId, field, h, render } from "./dom.mjs";
import { joinNames, percent } from "./format.mjs";
import { taskFeed } from "./task_feed.mjs";
import { toggleTheme } from "./theme.mjs";

// A page module exports show(body, { signal, rest }): `signal` aborts when the user leaves, `rest` is the path after
// the page's name.
const PAGES = {
  inbox: { title: "Inbox", role: "label", load: () => import("./pages/inbox/inbox.mjs") },
  tasks: { title: "Tasks", load: () => import("./pages/tasks.mjs") },
  try: { title: "Try it", role: "predict", load: () => import("./pages/try/try.mjs") },
  versions: { title: "Versions", load: () => import("./pages/versions/versions.mjs") },
  live: { title: "Live", load: () => import("./pages/live.mjs") },
  audit: { title: "Audit", role: "operate", load: () => import("./pages/audit.mjs") },
};

const main = byId("main");
let pageController = new AbortController();

const allowedPages = () => Object.keys(PAGES).filter((name) => session.hasRole(PAGES[name].role));

async function showPage() {
  pageController.abort();
  pageController = new AbortController();
  const { signal } = pageController;
  document.querySelector("dialog")?.close();
  if (session.me === null) return signIn();
  const [, name, ...rest] = location.hash.split("/");
  if (!allowedPages().includes(name)) return location.replace(`#/${allowedPages()[0]}`);
  const page = PAGES[name];
  document.title = `${page.title} · openworld`;
  drawHeader(name);
  const body = h("div", { class: `page ${name}` });
  render(main, h("h1", { tabindex: "-1" }, page.title), body);
  try {
    const { show } = await page.load();
    if (!signal.aborted) await show(body, { signal, rest });
  } catch (error) {
    if (!signal.aborted) render(body, problemBox(error, showPage));
  }
}

function drawHeader(current) {
  render(
    byId("nav"),
    allowedPages().map((name) =>
      h("a", { href: `#/${name}`, "aria-current": name === current ? "page" : null }, PAGES[name].title),
    ),
  );
  render(
    byId("user"),
    session.me.keys_needed && [
      h("span", { title: `Roles: ${session.me.roles.join(", ")}` }, session.me.name),
      button("Sign out", signOut, { class: "plain" }),
    ],
  );
}

// Sign-in

async function signIn() {
  try {
    session.me = await get("me");
  } catch (error) {
    if (error.status === 401) return; // askForKey has drawn the form
    return render(main, h("h1", {}, "openworld"), problemBox(error, showPage));
  }
  taskFeed.start();
  return showPage();
}

function signOut() {
  session.key = null;
  location.reload(); // drops everything that was loaded with the key
}

function askForKey() {
  if (byId("key")) return; // several requests can fail at once
  const rejected = session.key !== null;
  session.key = null;
  session.me = null;
  pageController.abort();
  taskFeed.stop();
  render(byId("nav"));
  render(byId("user"));
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
    render(main, h("h1", {}, "Signing in…"));
    showPage();
  };
  render(
    main,
    h("h1", {}, "Sign in"),
    h(
      "form",
      { class: "card narrow", onsubmit: submit },
      h("p", {}, "This server requires a key. Your key decides which pages you see. It is stored in this tab only."),
      rejected && h("p", { class: "warning", role: "alert" }, "The server does not accept this key."),
      field("Key", input),
      h("div", { class: "row end" }, h("button", { type: "submit", class: "primary" }, "Sign in")),
    ),
  );
  input.focus();
}

onUnauthorized(askForKey);

// The current task, shown on every page

function drawCurrentTask() {
  const link = byId("current-task");
  const task = taskFeed.current;
  link.hidden = !task;
  if (!task) return;
  const names = joinNames(Object.keys(task.counts), 2);
  const progress = task.progress ? ` ${percent(task.progress.progress)}` : "";
  const text = task.state === "queued" ? `Queued: ${names}` : `Learning ${names}${progress}`;
  render(link, h("span", { class: "pulse", "aria-hidden": "true" }), text);
}

taskFeed.addEventListener("change", drawCurrentTask);
taskFeed.addEventListener("phase", (event) => announce(event.detail));

byId("theme").addEventListener("click", toggleTheme);
byId("skip").addEventListener("click", () => main.focus());
addEventListener("hashchange", async () => {
  await showPage();
  // Keyboard and screen reader users continue at the top of the new page.
  main.querySelector("h1")?.focus({ preventScroll: true });
  scrollTo(0, 0);
});

if (!location.hash) history.replaceState(null, "", "#/");
showPage();
