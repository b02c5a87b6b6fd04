// What another threshold would do: how many of the held-out known images it would flag as novel.

import { barChart } from "../../components/charts.mjs";
import { fresh, h, put } from "../../dom.mjs";
import { percent, short } from "../../format.mjs";

const BINS = 32,
  STEPS = 200;

/** The share of known images that a threshold flags. `reference` is sorted. */
export const flagged = (reference, threshold) =>
  reference.filter((score) => score < threshold).length / reference.length;

export function thresholdExplorer({ reference, threshold, accept }) {
  const margin = 0.05 * (reference.at(-1) - reference[0]) || 1;
  const [low, high] = [reference[0] - margin, reference.at(-1) + margin];
  const own = threshold ?? low;
  const said = h("p", { "aria-live": "off" });
  const plot = h("div", {});
  const id = fresh("threshold");
  const slider = h("input", { type: "range", id, min: low, max: high, step: (high - low) / STEPS, oninput: draw });
  slider.value = own;

  function draw() {
    // Where the slider stands at first is the version's own threshold, not the step next to it.
    const chosen = Math.abs(slider.value - own) < (high - low) / STEPS ? own : Number(slider.value);
    const share = flagged(reference, chosen);
    const text = `${percent(share, 1)} of known images would be flagged as novel`;
    slider.setAttribute("aria-valuetext", `${short(chosen)}: ${text}`);
    put(
      said,
      h("strong", {}, text),
      ` at ${short(chosen)}. This version's own threshold is ${short(own)}, which flags ${percent(flagged(reference, own), 1)}.`,
    );
    put(plot, histogram(reference, [low, high], chosen));
  }

  draw();
  return h(
    "section",
    { class: "threshold" },
    h("h3", {}, "What another threshold would do"),
    plot,
    h("label", { for: id, class: "unseen" }, "Threshold"),
    slider,
    said,
    h(
      "p",
      { class: "quiet" },
      `Measured on ${reference.length} scores of held-out known images. `,
      accept && `This version was set to accept ${percent(accept)} of them. `,
      "To change it for good, give the trainer ",
      h("code", {}, "OPENWORLD_ACCEPT"),
      ": the next version is set to it.",
    ),
  );
}

function histogram(reference, [low, high], threshold) {
  const step = (high - low) / BINS;
  const bars = [...Array(BINS).keys()].map((bin) => {
    const [from, to] = [low + bin * step, low + (bin + 1) * step];
    const inside = reference.filter((score) => score >= from && score < to);
    const below = inside.filter((score) => score < threshold).length;
    return {
      at: from,
      parts: [
        { value: below, kind: "novel" },
        { value: inside.length - below, kind: "known" },
      ],
    };
  });
  return barChart({
    label: `Scores of held-out known images from ${short(reference[0])} to ${short(reference.at(-1))}`,
    bars,
    step,
    x: [low, high],
    height: 120,
    marks: [{ at: threshold, text: "threshold" }],
    xTicks: [
      { at: low, text: short(low) },
      { at: high, text: short(high) },
    ],
  });
}
