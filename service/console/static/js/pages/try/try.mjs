// Try it: show a picture, see the answer and everything that led to it, and say when it is wrong.

import { post, query, send, session } from "../../api.mjs";
import { button, h, put, say } from "../../dom.mjs";
import { evidence } from "./evidence.mjs";
import { fixed, percent, plural } from "../../format.mjs";
import { complain, problemBox, toast } from "../../components/notices.mjs";

const KEPT = 24; // pictures that were tried, for when the reader comes back

const tried = []; // newest first: { name, url, prediction, explanation, problem, sent }
let shown = null;

export async function show(body, { signal }) {
  const result = h("div", { class: "result" });
  const strip = h("div", { class: "tried" });
  const draw = () => {
    put(
      strip,
      tried.length > 1 &&
        tried.map((one) =>
          button(
            [h("img", { src: one.url, alt: "" })],
            () => {
              shown = one;
              draw();
            },
            { "aria-label": `${one.name}: ${summary(one)}`, "aria-pressed": String(one === shown) },
          ),
        ),
    );
    put(result, shown ? answer(shown, draw) : hint());
  };
  const take = async (files) => {
    for (const file of files) {
      if (signal.aborted) return;
      await tryOne(file, draw);
    }
    if (files.length > 1) toast(`${plural(files.length, "picture")} tried. What is novel is in the inbox.`);
  };
  put(
    body,
    h("p", { class: "lead" }, "Show it a picture. It says what it is, or that it has never learned this."),
    dropZone(take, signal),
    strip,
    result,
  );
  document.addEventListener(
    "paste",
    (event) => {
      const files = [...event.clipboardData.files];
      if (files.length) take(files);
    },
    { signal },
  );
  draw();
}

const hint = () =>
  h("p", { class: "quiet" }, "Several at once are fine: those that are novel wait in the inbox to be named.");

function dropZone(take, signal) {
  const input = (attributes) =>
    h("input", {
      type: "file",
      accept: "image/jpeg,image/png,image/webp",
      class: "unseen",
      onchange: (event) => {
        take([...event.target.files]);
        event.target.value = "";
      },
      ...attributes,
    });
  const zone = h(
    "div",
    { class: "drop" },
    h("p", {}, "Drop pictures here, paste one, or"),
    h(
      "div",
      { class: "row" },
      h("label", { class: "button main" }, "Choose pictures", input({ multiple: true })),
      h("label", { class: "button camera" }, "Take a picture", input({ capture: "environment" })),
    ),
  );
  const over = (on) => (event) => {
    event.preventDefault();
    zone.classList.toggle("over", on);
  };
  for (const name of ["dragenter", "dragover"]) document.addEventListener(name, over(true), { signal });
  for (const name of ["dragleave", "drop"]) document.addEventListener(name, over(false), { signal });
  document.addEventListener("drop", (event) => take([...event.dataTransfer.files]), { signal });
  return zone;
}

async function tryOne(file, draw) {
  const one = { name: file.name || "a pasted picture", url: URL.createObjectURL(file), file };
  tried.unshift(one);
  for (const old of tried.splice(KEPT)) URL.revokeObjectURL(old.url);
  shown = one;
  draw();
  await judge(one);
  say(`${one.name}: ${summary(one)}`);
  draw();
}

async function judge(one) {
  try {
    one.problem = null;
    [one.prediction] = (await send("predict", one.file)).predictions;
    // By the version that answered: another one may have come meanwhile.
    one.explanation = await send(query("explain", { version: one.prediction.version || null }), one.file);
  } catch (error) {
    one.problem = error;
  }
}

function summary({ prediction, problem }) {
  if (problem) return "could not be answered";
  if (!prediction) return "being looked at";
  return prediction.novel ? "novel" : prediction.label;
}

function answer(one, draw) {
  const { prediction, explanation, problem } = one;
  const again = async () => {
    await judge(one);
    draw();
  };
  return h(
    "div",
    { class: "answer" },
    h(
      "figure",
      {},
      h("img", { class: "whole", src: one.url, alt: "The picture that was tried" }),
      h("figcaption", {}, one.name),
    ),
    h(
      "div",
      {},
      problem && problemBox(problem, problem.status === 415 || problem.status === 422 ? null : again),
      !problem && !prediction && h("p", { class: "quiet" }, "Looking…"),
      prediction && verdict(prediction, explanation),
      prediction && corrections(one, draw),
    ),
    explanation && evidence(explanation),
  );
}

function verdict(prediction, explanation) {
  const near = prediction.nearest;
  return [
    h("h2", { class: prediction.novel ? "verdict novel" : "verdict" }, prediction.novel ? "novel" : prediction.label),
    h(
      "p",
      {},
      prediction.novel
        ? near.length
          ? "Like nothing it has learned. It comes closest to:"
          : "Nothing has been learned yet, so everything is novel."
        : "The classes that it looks like:",
    ),
    h(
      "ul",
      { class: "shares" },
      near.map(({ label, share }) =>
        h("li", {}, h("span", {}, label), meter(share), h("span", { class: "n" }, percent(share, 1))),
      ),
    ),
    explanation && explanation.threshold !== null && scoreScale(explanation),
    h(
      "p",
      { class: "quiet" },
      `Probability of being novel ${percent(prediction.p_novel, 1)}. Answered by `,
      prediction.version
        ? h("a", { href: `#/versions/${prediction.version}` }, `version ${prediction.version}`)
        : "nobody yet",
      ".",
    ),
  ];
}

function meter(share) {
  const bar = h("span", { class: "fill" });
  bar.style.width = percent(share, 1).replace(" ", "");
  return h("span", { class: "meter", "aria-hidden": "true" }, bar);
}

/** The calibrated score on 0..1, with the place below which an image is novel. */
function scoreScale({ calibrated_score: score, calibrated_threshold: threshold }) {
  const at = (value, kind) => {
    const mark = h("span", { class: kind });
    mark.style.left = `${100 * value}%`;
    return mark;
  };
  const text = `Calibrated score ${fixed(score, 3)}; below ${fixed(threshold, 3)} is novel`;
  return h(
    "div",
    { class: "scale" },
    h("div", { class: "track", role: "img", "aria-label": text }, at(threshold, "limit"), at(score, "here")),
    h("p", {}, text, h("span", { class: "quiet" }, ". Of known images, half score above 0.5.")),
  );
}

function corrections(one, draw) {
  if (!session.may("label")) return null;
  const { prediction } = one;
  if (one.sent || (prediction.novel && prediction.version === 0)) {
    return h("p", {}, "It is in the ", h("a", { href: "#/inbox" }, "inbox"), ", to be named.");
  }
  if (prediction.novel) {
    return h(
      "div",
      { class: "row" },
      h("a", { class: "button", href: "#/inbox" }, "Name it in the inbox"),
      button("That is wrong", () => tell(one, "said to be known", draw)),
    );
  }
  return h(
    "div",
    { class: "row" },
    button("That is wrong", () => tell(one, `said not to be ${prediction.label}`, draw)),
    button("That is novel", () => tell(one, "said to be novel", draw)),
  );
}

async function tell(one, note, draw) {
  try {
    await post("novelties", { prediction_ids: [one.prediction.id], note });
    one.sent = true;
    toast("It is in the inbox, to be named.", { action: { text: "Open it", href: "#/inbox" } });
  } catch (error) {
    complain(error, "It could not be put into the inbox");
  }
  draw();
}
