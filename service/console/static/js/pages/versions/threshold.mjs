// A slider that shows how many held-out known images another threshold would flag as novel.

import { barChart } from "../../components/charts.mjs";
import { h, render, uniqueId } from "../../dom.mjs";
import { percent, short } from "../../format.mjs";

const BINS = 32;
const STEPS = 200; // of the slider

const flaggedShare = (scores, threshold) => scores.filter((score) => score < threshold).length / scores.length;

/** `reference` are the sorted scores of held-out known images; `accept` is the share that the version should accept. */
export function thresholdExplorer({ reference, threshold, accept }) {
  const margin = 0.05 * (reference.at(-1) - reference[0]) || 1;
  const [low, high] = [reference[0] - margin, reference.at(-1) + margin];
  const own = threshold ?? low;
  const step = (high - low) / STEPS;
  const result = h("p", {});
  const plot = h("div", {});
  const id = uniqueId("threshold");
  const slider = h("input", { type: "range", id, min: low, max: high, step, oninput: draw });
  slider.value = own;

  function draw() {
    // At first the slider is at the step next to the version's own threshold, which is what it shows then.
    const chosen = Math.abs(slider.value - own) < step ? own : Number(slider.value);
    const text = `${percent(flaggedShare(reference, chosen), 1)} of known images would be flagged as novel`;
    slider.setAttribute("aria-valuetext", `${short(chosen)}: ${text}`);
    render(
      result,
      h("strong", {}, text),
      ` at the threshold ${short(chosen)}. This version's threshold is ${short(own)}`,
      ` and flags ${percent(flaggedShare(reference, own), 1)}.`,
    );
    render(plot, histogram(reference, [low, high], chosen));
  }

  draw();
  return h(
    "section",
    { class: "threshold" },
    h("h3", {}, "Effect of another threshold"),
    plot,
    h("label", { for: id, class: "visually-hidden" }, "Threshold"),
    slider,
    result,
    h(
      "p",
      { class: "muted" },
      `Measured on ${reference.length} scores of held-out known images. `,
      accept && `The threshold was set to accept ${percent(accept)} of them. `,
      "To change this share for the next version, set ",
      h("code", {}, "OPENWORLD_TRAIN_ACCEPT"),
      " for the trainer.",
    ),
  );
}

function histogram(scores, [low, high], threshold) {
  const step = (high - low) / BINS;
  const bars = Array.from({ length: BINS }, (_, bin) => {
    const at = low + bin * step;
    const inside = scores.filter((score) => score >= at && score < at + step);
    const flagged = inside.filter((score) => score < threshold).length;
    return {
      at,
      parts: [
        { value: flagged, kind: "novel" },
        { value: inside.length - flagged, kind: "known" },
      ],
    };
  });
  return barChart({
    label: `Scores of held-out known images, from ${short(scores[0])} to ${short(scores.at(-1))}`,
    bars,
    step,
    x: [low, high],
    height: 120,
    marks: [{ at: threshold, text: "threshold" }],
    xTicks: [low, high].map((at) => ({ at, text: short(at) })),
  });
}
