// Live: what this server answered in the last minutes, and whether that looks healthy.

import { ask } from "../api.mjs";
import { barChart, legend, lineChart } from "../components/charts.mjs";
import { h, labelled, put } from "../dom.mjs";
import { clock, milliseconds, moment, percent, plural, short } from "../format.mjs";
import { empty, problemBox } from "../components/notices.mjs";

const LOOK = 5000; // milliseconds; as long as a bucket
const chosen = { minutes: 15 };

export async function show(body, { signal }) {
  const box = h("div", {});
  const choose = (event) => {
    chosen.minutes = Number(event.target.value);
    look();
  };
  const minutes = h(
    "select",
    { onchange: choose },
    [1, 5, 15].map((value) => h("option", { value, selected: value === chosen.minutes }, plural(value, "minute"))),
  );
  let timer = null;
  const look = async () => {
    clearTimeout(timer);
    if (signal.aborted) return;
    try {
      if (!document.hidden) put(box, draw(await ask(`pulse?minutes=${chosen.minutes}`, { signal })));
    } catch (error) {
      if (signal.aborted) return;
      put(box, problemBox(error, look));
    }
    timer = setTimeout(look, LOOK);
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  document.addEventListener("visibilitychange", look, { signal });
  put(body, h("div", { class: "row controls" }, labelled("The last", minutes)), box);
  await look();
}

function draw(pulse) {
  const images = pulse.known + pulse.novel;
  if (!pulse.buckets.length) return quiet(pulse);
  const now = Date.parse(pulse.now),
    step = 1000 * pulse.seconds;
  const last = Math.floor(now / step) * step,
    first = last - 60000 * chosen.minutes + step;
  const at = new Map(pulse.buckets.map((bucket) => [Date.parse(bucket.time), bucket]));
  const times = [...Array((last - first) / step + 1).keys()].map((place) => first + place * step);
  const axis = {
    x: [first, last + step],
    xTicks: [
      { at: first, text: clock(first) },
      { at: last + step, text: clock(last + step) },
    ],
  };
  const marks = pulse.swaps.map((swap) => ({
    at: Math.max(first, Date.parse(swap.time)),
    text: `version ${swap.version}`,
  }));
  const shared = { ...axis, marks, height: 150 };
  const line = (value) => times.map((time) => [time + step / 2, at.has(time) ? value(at.get(time)) : null]);
  return [
    h(
      "dl",
      { class: "figures" },
      figure("Flagged as novel", images ? percent(pulse.novel / images, 1) : "–"),
      figure("Images", images.toLocaleString("en"), `${short(images / 60 / chosen.minutes)} a second`),
      figure("Half answered within", milliseconds(pulse.p50)),
      figure("99 % answered within", milliseconds(pulse.p99)),
      figure(
        "Answering",
        pulse.version ? `version ${pulse.version}` : "nothing learned",
        `since ${moment(pulse.since)}`,
      ),
    ),
    h(
      "div",
      { class: "grid" },
      plot(
        "Images in five seconds",
        traffic(pulse, shared, step),
        legend([
          { name: "known", kind: "known" },
          { name: "novel", kind: "novel" },
          ...(pulse.errors ? [{ name: "unreadable", kind: "errors" }] : []),
        ]),
      ),
      plot(
        "Share flagged as novel",
        lineChart({
          label: `Share of images flagged as novel, ${images ? percent(pulse.novel / images, 1) : "none asked"} over all`,
          series: [
            { points: line((one) => (one.known + one.novel ? one.novel / (one.known + one.novel) : null)), kind: "s0" },
          ],
          y: [0, 1],
          yTicks: [0, 0.5, 1],
          yFormat: percent,
          ...shared,
        }),
      ),
      plot(
        "Time to answer",
        latency(pulse, line, shared),
        legend([
          { name: "half", kind: "s0" },
          { name: "99 %", kind: "s1" },
        ]),
      ),
      plot("Scores against the calibration", scores(pulse)),
    ),
  ];
}

const figure = (name, value, more = null) =>
  h("div", {}, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, more)));

const plot = (title, drawn, ...more) => h("figure", { class: "card" }, h("figcaption", {}, title), drawn, more);

function traffic(pulse, shared, step) {
  const bars = pulse.buckets.map((one) => ({
    at: Date.parse(one.time),
    parts: [
      { value: one.known, kind: "known" },
      { value: one.novel, kind: "novel" },
      { value: one.errors, kind: "errors" },
    ],
  }));
  return barChart({
    label: `${pulse.known} known, ${pulse.novel} novel and ${pulse.errors} unreadable images`,
    bars,
    step,
    ...shared,
  });
}

function latency(pulse, line, shared) {
  const highest = Math.max(0.001, ...pulse.buckets.map((one) => one.p99 ?? 0));
  return lineChart({
    label: `Half of the requests answered within ${milliseconds(pulse.p50)}, 99 % within ${milliseconds(pulse.p99)}`,
    series: [
      { points: line((one) => one.p50), kind: "s0" },
      { points: line((one) => one.p99), kind: "s1" },
    ],
    y: [0, highest],
    yFormat: (value) => (value ? milliseconds(value) : "0"),
    ...shared,
  });
}

/** A calibrated score is a quantile: if all images were of known classes, each bar would be as high as the line. */
function scores(pulse) {
  const total = pulse.scores.reduce((sum, count) => sum + count, 0);
  if (!total) return h("p", { class: "quiet" }, "No image was scored.");
  const step = 1 / pulse.scores.length;
  const shares = pulse.scores.map((count) => count / total);
  return [
    barChart({
      label: `Calibrated scores of ${plural(total, "image")}: ${percent(shares[0])} in the lowest twentieth, where 5 % are expected of known images`,
      bars: shares.map((value, bin) => ({ at: bin * step, parts: [{ value, kind: "known" }] })),
      step,
      x: [0, 1],
      y: [0, Math.max(0.1, ...shares)],
      yFormat: percent,
      height: 150,
      xTicks: [
        { at: 0, text: "0" },
        { at: 0.5, text: "0.5" },
        { at: 1, text: "1" },
      ],
      level: { value: step, text: "" },
    }),
    h(
      "p",
      { class: "quiet" },
      "Known images are spread evenly, along the dashed line. A heap on the left is novelty; a slope is drift.",
    ),
  ];
}

const quiet = (pulse) =>
  empty(
    `Nothing was asked in the last ${plural(chosen.minutes, "minute")}`,
    h(
      "p",
      {},
      pulse.version ? `Version ${pulse.version} is ready.` : "Nothing has been learned yet, so everything is novel.",
    ),
    h("pre", {}, `curl --data-binary @photo.jpg ${location.origin}/predict`),
  );
