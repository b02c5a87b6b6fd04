// Try it: send images, see the answers and their evidence, and report wrong answers.

import { post, postImage, session, withQuery } from "../../api.mjs";
import { problemBox, showError, toast } from "../../components/notices.mjs";
import { announce, button, h, render } from "../../dom.mjs";
import { inWords, percent, plural, probability } from "../../format.mjs";
import { evidence } from "./evidence.mjs";

const MAX_TRIALS = 24; // kept while the tab is open

const trials = []; // newest first: { name, url, file, prediction, explanation, problem, reported }
let shown = null;

export async function show(body, { signal }) {
  const result = h("div", {});
  const history = h("div", { class: "history" });
  const draw = () => {
    render(
      history,
      trials.length > 1 &&
        trials.map((trial) => {
          const choose = () => {
            shown = trial;
            draw();
          };
          return button(h("img", { src: trial.url, alt: "" }), choose, {
            "aria-label": `${trial.name}: ${summary(trial)}`,
            "aria-pressed": String(trial === shown),
          });
        }),
    );
    render(result, shown ? trialResult(shown, draw) : hint());
  };
  const tryFiles = async (files) => {
    for (const file of files) {
      if (signal.aborted) return;
      await tryFile(file, draw);
    }
    if (files.length > 1) toast(`${plural(files.length, "image")} tried. Novel ones are in the inbox.`);
  };
  render(
    body,
    h("p", { class: "lead" }, "Send an image: the model names a learned class and says how sure it is, or that it has never seen it."),
    dropZone(tryFiles, signal),
    history,
    result,
  );
  const pasted = (event) => tryFiles([...event.clipboardData.files]);
  document.addEventListener("paste", pasted, { signal });
  draw();
}

const hint = () =>
  h("p", { class: "muted" }, "You can choose several images. Novel images wait in the inbox for a label.");

function dropZone(tryFiles, signal) {
  const fileInput = (attributes) =>
    h("input", {
      type: "file",
      accept: "image/jpeg,image/png,image/webp",
      class: "visually-hidden",
      onchange: (event) => {
        tryFiles([...event.target.files]);
        event.target.value = "";
      },
      ...attributes,
    });
  const zone = h(
    "div",
    { class: "drop-zone" },
    h("p", {}, "Drop images here, paste one, or"),
    h(
      "div",
      { class: "row" },
      h("label", { class: "button primary" }, "Choose images", fileInput({ multiple: true })),
      h("label", { class: "button camera" }, "Use the camera", fileInput({ capture: "environment" })),
    ),
  );
  const highlight = (on) => (event) => {
    event.preventDefault();
    zone.classList.toggle("over", on);
  };
  for (const name of ["dragenter", "dragover"]) document.addEventListener(name, highlight(true), { signal });
  for (const name of ["dragleave", "drop"]) document.addEventListener(name, highlight(false), { signal });
  document.addEventListener("drop", (event) => tryFiles([...event.dataTransfer.files]), { signal });
  return zone;
}

async function tryFile(file, draw) {
  const trial = { name: file.name || "pasted image", url: URL.createObjectURL(file), file };
  trials.unshift(trial);
  for (const old of trials.splice(MAX_TRIALS)) URL.revokeObjectURL(old.url);
  shown = trial;
  draw();
  await predict(trial);
  announce(`${trial.name}: ${summary(trial)}`);
  draw();
}

async function predict(trial) {
  try {
    trial.problem = null;
    [trial.prediction] = (await postImage("predict", trial.file)).predictions;
    // The version that answered: another one can be active by now.
    const path = withQuery("explain", { version: trial.prediction.version || null });
    trial.explanation = await postImage(path, trial.file);
  } catch (error) {
    trial.problem = error;
  }
}

function summary({ prediction, problem }) {
  if (problem) return "no answer";
  if (!prediction) return "waiting for the answer";
  return inWords(prediction);
}

function trialResult(trial, draw) {
  const { prediction, explanation, problem } = trial;
  const retry = async () => {
    await predict(trial);
    draw();
  };
  const unreadable = problem?.status === 415 || problem?.status === 422; // trying again does not help
  return h(
    "div",
    { class: "trial" },
    h(
      "figure",
      {},
      h("img", { class: "full-image", src: trial.url, alt: "The image" }),
      h("figcaption", {}, trial.name),
    ),
    h(
      "div",
      {},
      problem && problemBox(problem, unreadable ? null : retry),
      !problem && !prediction && h("p", { class: "muted" }, "Waiting for the answer…"),
      prediction && answer(prediction, explanation),
      prediction && report(trial, draw),
    ),
    explanation && evidence(explanation),
  );
}

function answer(prediction, explanation) {
  const { certainty, novel, nearest, version, p_novel: pNovel } = prediction;
  // The shares of all classes add up to this, see `nearest` in docs/api.md.
  const known = novel ? Math.min(1 - pNovel, 0.5) : Math.max(1 - pNovel, 0.5);
  const others = nearest.reduce((rest, { share }) => rest - share, known);
  return [
    h("h2", { class: `answer ${certainty}` }, inWords(prediction)),
    h("p", {}, nearest.length ? "The most similar classes:" : "Nothing has been learned yet."),
    nearest.length > 0 &&
      h(
        "ul",
        { class: "shares" },
        nearest.map((entry) => shareBar(entry.label, entry.share)),
        others >= 0.01 && shareBar("other classes", others),
        shareBar("never seen", 1 - known),
      ),
    explanation && explanation.threshold !== null && scoreScale(explanation),
    version > 0 &&
      h("p", { class: "muted" }, "Answered by ", h("a", { href: `#/versions/${version}` }, `version ${version}`), "."),
  ];
}

function shareBar(name, share) {
  const bar = h("span", { class: "fill" });
  bar.style.width = `${100 * share}%`;
  return h(
    "li",
    {},
    h("span", {}, name),
    h("span", { class: "meter", "aria-hidden": "true" }, bar),
    h("span", { class: "number" }, probability(share)),
  );
}

/** How the image compares with known images: the calibrated score and the threshold on a scale from 0 to 1. */
function scoreScale({ calibrated_score: score, calibrated_threshold: threshold }) {
  const mark = (value, name) => {
    const element = h("span", { class: name });
    element.style.left = `${100 * value}%`;
    return element;
  };
  const text = `Fits better than ${percent(score)} of known images`;
  const limit = `Below the mark at ${percent(threshold)}, an image counts as never seen`;
  return h(
    "div",
    { class: "score-scale" },
    h(
      "div",
      { class: "track", role: "img", "aria-label": `${text}. ${limit}` },
      mark(threshold, "threshold-mark"),
      mark(score, "score-mark"),
    ),
    h("p", {}, `${text}. `, h("span", { class: "muted" }, `${limit}.`)),
  );
}

/** Buttons to report a wrong answer, shown to users with the role "label". */
function report(trial, draw) {
  if (!session.hasRole("label")) return null;
  const { novel, label, version } = trial.prediction;
  if (trial.reported || (novel && version === 0))
    return h("p", {}, "The image is in the ", h("a", { href: "#/inbox" }, "inbox"), " and waits for a label.");
  const reportButton = (text, note) => button(text, () => sendToInbox(trial, note, draw));
  return h(
    "div",
    { class: "row" },
    novel && h("a", { class: "button", href: "#/inbox" }, "Label it in the inbox"),
    novel && reportButton("Report as known", "reported as known"),
    !novel && reportButton("Report as wrong", `reported as not ${label}`),
    !novel && reportButton("Report as never seen", "reported as novel"),
  );
}

async function sendToInbox(trial, note, draw) {
  try {
    await post("novelties", { prediction_ids: [trial.prediction.id], note });
    trial.reported = true;
    toast("The image is in the inbox.", { action: { text: "Open the inbox", href: "#/inbox" } });
  } catch (error) {
    showError(error, "The image was not sent to the inbox");
  }
  draw();
}
