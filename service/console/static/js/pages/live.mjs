// Live: the traffic, novelty, latency and scores of the last minutes.

import { get } from "../api.mjs";
import { barChart, legend, lineChart } from "../components/charts.mjs";
import { emptyState, problemBox } from "../components/notices.mjs";
import { h, render, select } from "../dom.mjs";
import { clockTime, dateTime, latency, percent, plural, short } from "../format.mjs";

const POLL_MILLISECONDS = 5000;
const MINUTES = { 1: "1 minute", 5: "5 minutes", 15: "15 minutes" };
let minutes = "15"; // kept while the tab is open

export async function show(body, { signal }) {
  const box = h("div", {});
  let timer = null;
  const poll = async () => {
    clearTimeout(timer);
    if (signal.aborted) return;
    try {
      if (!document.hidden) render(box, overview(await get(`pulse?minutes=${minutes}`, { signal })));
    } catch (error) {
      if (signal.aborted) return;
      render(box, problemBox(error, poll));
    }
    timer = setTimeout(poll, POLL_MILLISECONDS);
  };
  const choose = (value) => {
    minutes = value;
    poll();
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  document.addEventListener("visibilitychange", poll, { signal });
  render(body, h("div", { class: "row controls" }, select("Period", MINUTES, minutes, choose)), box);
  await poll();
}

function overview(pulse) {
  if (!pulse.buckets.length) return noTraffic(pulse);
  const images = pulse.known + pulse.novel;
  const novelShare = images ? percent(pulse.novel / images, 1) : "–";
  const axis = timeAxis(pulse);
  return [
    h(
      "dl",
      { class: "stats" },
      stat("Never seen", novelShare),
      stat("Images", images.toLocaleString("en"), `${short(images / 60 / minutes)} per second`),
      stat("Median latency", latency(pulse.p50)),
      stat("99th percentile latency", latency(pulse.p99)),
      stat(
        "Active version",
        pulse.version ? `version ${pulse.version}` : "none",
        pulse.version ? `since ${dateTime(pulse.since)}` : "nothing was learned",
      ),
    ),
    h(
      "div",
      { class: "grid" },
      card(`Images per ${pulse.seconds} seconds`, trafficChart(pulse, axis)),
      card("Share of images that were never seen", noveltyChart(axis, novelShare)),
      card("Latency", latencyChart(pulse, axis)),
      card("Fit, compared with known images", fitChart(pulse)),
    ),
  ];
}

const stat = (name, value, note = null) =>
  h("div", {}, h("dt", {}, name), h("dd", {}, value, note && h("small", {}, note)));

const card = (title, content) => h("figure", { class: "card" }, h("figcaption", {}, title), content);

/** The options that the charts over time share, and `points(valueOf)`: one point per bucket, null without traffic. */
function timeAxis({ now, seconds, buckets, swaps }) {
  const step = 1000 * seconds;
  const end = (Math.floor(Date.parse(now) / step) + 1) * step;
  const start = end - 60000 * minutes;
  const byTime = new Map(buckets.map((bucket) => [Date.parse(bucket.time), bucket]));
  const times = Array.from({ length: (end - start) / step }, (_, index) => start + index * step);
  return {
    step,
    points: (valueOf) => times.map((time) => [time + step / 2, byTime.has(time) ? valueOf(byTime.get(time)) : null]),
    options: {
      x: [start, end],
      xTicks: [start, end].map((at) => ({ at, text: clockTime(at) })),
      marks: swaps.map(({ time, version }) => ({ at: Math.max(start, Date.parse(time)), text: `version ${version}` })),
      height: 150,
    },
  };
}

function trafficChart({ known, novel, errors, buckets }, { step, options }) {
  const kinds = ["known", "novel", "errors"];
  const bars = buckets.map((bucket) => ({
    at: Date.parse(bucket.time),
    parts: kinds.map((kind) => ({ value: bucket[kind], kind })),
  }));
  return [
    barChart({ label: `${known} known, ${novel} never seen and ${errors} unreadable images`, bars, step, ...options }),
    legend([
      { name: "known", kind: "known" },
      { name: "never seen", kind: "novel" },
      ...(errors ? [{ name: "unreadable", kind: "errors" }] : []),
    ]),
  ];
}

const noveltyChart = ({ points, options }, novelShare) =>
  lineChart({
    label: `Share of images that were never seen over time, ${novelShare} in total`,
    series: [{ points: points(({ known, novel }) => (known + novel ? novel / (known + novel) : null)) }],
    y: [0, 1],
    yTicks: [0, 0.5, 1],
    yFormat: percent,
    ...options,
  });

function latencyChart({ p50, p99, buckets }, { points, options }) {
  return [
    lineChart({
      label: `Median latency ${latency(p50)}, 99th percentile ${latency(p99)}`,
      series: [
        { points: points((bucket) => bucket.p50), kind: "s0" },
        { points: points((bucket) => bucket.p99), kind: "s1" },
      ],
      y: [0, Math.max(0.001, ...buckets.map((bucket) => bucket.p99 ?? 0))],
      yFormat: (value) => (value ? latency(value) : "0"),
      ...options,
    }),
    legend([
      { name: "median", kind: "s0" },
      { name: "99th percentile", kind: "s1" },
    ]),
  ];
}

/** The calibrated scores. They are quantiles: if all images were known, every bar would reach the dashed line. */
function fitChart({ scores }) {
  const total = scores.reduce((sum, count) => sum + count, 0);
  if (!total) return h("p", { class: "muted" }, "No image was compared.");
  const step = 1 / scores.length;
  const shares = scores.map((count) => count / total);
  return [
    barChart({
      label: `Fit of ${plural(total, "image")}: ${percent(shares[0])} are in the lowest bar, where ${percent(step)} of known images are expected`,
      bars: shares.map((value, bin) => ({ at: bin * step, parts: [{ value, kind: "known" }] })),
      step,
      x: [0, 1],
      y: [0, Math.max(0.1, ...shares)],
      yFormat: percent,
      height: 150,
      xTicks: [
        { at: 0, text: "fits worst" },
        { at: 1, text: "fits best" },
      ],
      level: step,
    }),
    h(
      "p",
      { class: "muted" },
      "Known images follow the dashed line. A peak on the left: images that were never seen. A slope: known things look different now.",
    ),
  ];
}

const noTraffic = ({ version }) =>
  emptyState(
    `No images in the last ${MINUTES[minutes]}`,
    h("p", {}, version ? `Version ${version} is active.` : "Nothing has been learned yet, so every image is novel."),
    h("pre", {}, `curl --data-binary @image.jpg ${location.origin}/predict`),
  );
