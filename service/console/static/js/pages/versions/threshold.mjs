// A slider over the threshold: which share of known images it accepts, and of simulated novel images it flags.

import { legend, lineChart } from "../../components/charts.mjs";
import { h, render, uniqueId } from "../../dom.mjs";
import { fixed, percent } from "../../format.mjs";

const STEPS = 200; // of the slider and of the curves
const OUTLIERS = 0.02; // of the simulated scores at either end are not shown: they would squeeze the rest

const below = (scores, threshold) => scores.filter((score) => score < threshold).length / scores.length;
const quantile = (scores, share) => scores[Math.round(share * (scores.length - 1))];

/**
 * `reference` are the sorted novelty scores of left-out known images, `simulated` those of simulated novel images;
 * `accept` and `flag` are the trainer's targets.
 */
export function thresholdExplorer({ reference, simulated, threshold, novel_above: novelAbove, accept, flag }) {
  const ends = [reference[0], reference.at(-1), threshold ?? reference[0]];
  if (simulated.length) ends.push(quantile(simulated, OUTLIERS), quantile(simulated, 1 - OUTLIERS));
  const [lowest, highest] = [Math.min(...ends), Math.max(...ends)];
  const margin = 0.05 * (highest - lowest) || 1;
  const [low, high] = [lowest - margin, highest + margin];
  const own = threshold ?? low;
  const step = (high - low) / STEPS;
  const result = h("p", {});
  const plot = h("div", {});
  const target = h("p", { class: "muted" });
  const numbers = h("p", {});
  const id = uniqueId("threshold");
  const slider = h("input", { type: "range", id, min: low, max: high, step, oninput: draw });
  slider.value = own;

  const points = (share) => Array.from({ length: STEPS + 1 }, (_, n) => [low + n * step, share(low + n * step)]);
  const curves = [
    { name: "known images accepted", kind: "s1", points: points((at) => 1 - below(reference, at)) },
    simulated.length && {
      name: "simulated novel images flagged",
      kind: "novel",
      points: points((at) => below(simulated, at)),
    },
  ].filter(Boolean);

  function draw() {
    // At first the slider is at the step next to the version's own threshold, which is what it shows then.
    const chosen = Math.abs(slider.value - own) < step ? own : Number(slider.value);
    const accepted = 1 - below(reference, chosen);
    const flagged = simulated.length ? below(simulated, chosen) : null;
    const text = inWords(accepted, flagged);
    slider.setAttribute("aria-valuetext", text);
    render(
      result,
      h("strong", {}, `At this setting: ${text}.`),
      chosen === own ? " This is the version's own threshold." : ` This version ${ownWords()}.`,
    );
    render(target, "To give the next version this threshold, set ", settings(accepted, flagged), " for the trainer.");
    render(numbers, `As novelty scores: chosen ${fixed(chosen, 2)}, this version ${fixed(own, 2)}.`);
    const marks = [{ at: own, text: "this version" }];
    if (chosen !== own) marks.push({ at: chosen, text: "chosen" });
    marks.sort((a, b) => a.at - b.at);
    render(plot, chart(curves, [low, high], marks));
  }

  const ownWords = () => inWords(1 - below(reference, own), simulated.length ? below(simulated, own) : null);

  draw();
  return h(
    "section",
    { class: "threshold" },
    h("h3", {}, "Effect of another threshold"),
    legend(curves),
    plot,
    h("label", { for: id, class: "visually-hidden" }, "Threshold"),
    slider,
    result,
    target,
    h(
      "p",
      { class: "muted" },
      `Measured on ${reference.length} left-out known images and ${simulated.length} simulated novel ones: `,
      "images of known classes that are left out in turn. ",
      flag
        ? `The trainer was set to flag ${percent(flag)} of simulated novel images.`
        : accept && `The trainer was set to accept ${percent(accept)} of known images.`,
    ),
    h(
      "details",
      { class: "muted" },
      h("summary", {}, "Details for experts"),
      numbers,
      h("p", {}, `An image is novel if its p_novel is above ${fixed(novelAbove, 3)}.`),
    ),
  );
}

const inWords = (accepted, flagged) =>
  `accepts ${percent(accepted)} of known images` +
  (flagged === null ? "" : `, flags ${percent(flagged)} of simulated novel ones`);

/** As many digits as `percent` shows, rounded alike. */
const rounded = (share) => ((100 * share).toFixed(0) / 100).toFixed(2);

/** The settings of the trainer that lead to this point; ACCEPT is above 0.5 and below 1. */
function settings(accepted, flagged) {
  const accept = accepted > 0.5 && accepted < 1 && h("code", {}, `OPENWORLD_TRAIN_ACCEPT=${rounded(accepted)}`);
  const flag = flagged > 0 && flagged < 1 && h("code", {}, `OPENWORLD_TRAIN_FLAG=${rounded(flagged)}`);
  if (accept && flag) return [accept, " or ", flag];
  return accept || flag || "OPENWORLD_TRAIN_ACCEPT or OPENWORLD_TRAIN_FLAG to a share between these points";
}

const chart = (series, x, marks) =>
  lineChart({
    label: series.map(({ name }) => `Share of ${name} over the threshold`).join("; "),
    series,
    x,
    y: [0, 1],
    yTicks: [0, 0.5, 1],
    yFormat: percent,
    height: 180,
    marks,
    xTicks: [
      { at: x[0], text: "flag fewer" },
      { at: x[1], text: "flag more" },
    ],
  });
