// A slider that shows how many held-out known images another threshold would flag as novel.

import { barChart } from "../../components/charts.mjs";
import { h, render, uniqueId } from "../../dom.mjs";
import { fixed, percent } from "../../format.mjs";

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
  const numbers = h("p", {});
  const id = uniqueId("threshold");
  const slider = h("input", { type: "range", id, min: low, max: high, step, oninput: draw });
  slider.value = own;

  function draw() {
    // At first the slider is at the step next to the version's own threshold, which is what it shows then.
    const chosen = Math.abs(slider.value - own) < step ? own : Number(slider.value);
    const text = `${percent(flaggedShare(reference, chosen), 1)} of known images would be flagged as novel`;
    slider.setAttribute("aria-valuetext", text);
    render(
      result,
      h("strong", {}, text),
      ` at the chosen threshold. This version flags ${percent(flaggedShare(reference, own), 1)}.`,
    );
    render(numbers, `As log-scores: chosen ${fixed(chosen, 1)}, this version ${fixed(own, 1)}.`);
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
      accept && `This version flags what scores below ${percent(accept)} of them. `,
      "To change this share for the next version, set ",
      h("code", {}, "OPENWORLD_TRAIN_ACCEPT"),
      " for the trainer.",
    ),
    h("details", { class: "muted" }, h("summary", {}, "Details for experts"), numbers),
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
    label: `Scores of ${scores.length} held-out known images; low ones are flagged as novel`,
    bars,
    step,
    x: [low, high],
    height: 120,
    marks: [{ at: threshold, text: "threshold" }],
    xTicks: [
      { at: low, text: "fits worst" },
      { at: high, text: "fits best" },
    ],
  });
}
