// Small charts, drawn at the width that they get: lines and bars, with marks where another version began to answer.

import { h, svg } from "../dom.mjs";

const LEFT = 52,
  RIGHT = 12,
  TOP = 10,
  BOTTOM = 22;

/** A box that draws itself again when its width changes. `label` says in words what the picture shows. */
function chart(label, height, draw) {
  const box = h("div", { class: "chart", role: "img", "aria-label": label });
  box.style.height = `${height}px`;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width > 0) box.replaceChildren(svg("svg", { width, height, "aria-hidden": "true" }, draw(width, height)));
  }).observe(box);
  return box;
}

const scale =
  ([low, high], [from, to]) =>
  (value) =>
    from + ((value - low) / (high - low || 1)) * (to - from);

/** The range of values, or of what is there. */
function range(given, values) {
  if (given) return given;
  return values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
}

function frame({ x, y, xTicks = [], yTicks, yFormat }, width, height) {
  const across = scale(x, [LEFT, width - RIGHT]);
  const up = scale(y, [height - BOTTOM, TOP]);
  const lines = (yTicks ?? [y[0], y[1]]).map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(value), y2: up(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: up(value) + 4, "text-anchor": "end" }, yFormat(value)),
  ]);
  const ticks = xTicks.map(({ at, text }, place) => {
    const anchor = place === 0 ? "start" : place === xTicks.length - 1 ? "end" : "middle";
    return svg(
      "text",
      { class: "tick", x: across(at), y: height - 6, "text-anchor": xTicks.length > 1 ? anchor : "middle" },
      text,
    );
  });
  return { across, up, parts: [lines, ticks] };
}

const drawMarks = (marks, across, width, height) =>
  marks.map(({ at, text }) => {
    const x = across(at);
    const late = x > width - RIGHT - 7 * text.length; // no room to its right
    return [
      svg("line", { class: "mark", x1: x, x2: x, y1: TOP - 4, y2: height - BOTTOM }),
      svg(
        "text",
        { class: "tick marked", x: late ? x - 4 : x + 4, y: TOP + 4, "text-anchor": late ? "end" : "start" },
        text,
      ),
    ];
  });

/**
 * Lines. `series`: [{ name, points: [[x, y | null]], kind }]; a null breaks the line. `kind` is a class for its colour.
 * `marks` are [{ at, text }] on the x axis, `xTicks` likewise.
 */
export function lineChart({
  label,
  series,
  x,
  y,
  xTicks,
  yTicks,
  yFormat = String,
  marks = [],
  height = 160,
  dots = false,
}) {
  const points = series.flatMap((one) => one.points).filter(([, value]) => value !== null);
  const spread = {
    x: range(
      x,
      points.map((p) => p[0]),
    ),
    y: range(
      y,
      points.map((p) => p[1]),
    ),
    xTicks,
    yTicks,
    yFormat,
  };
  return chart(label, height, (width) => {
    const { across, up, parts } = frame(spread, width, height);
    const lines = series.map(({ points: own, kind = "s0" }) => {
      const shown = own.filter(([, value]) => value !== null);
      const few = dots || shown.length === 1;
      return [
        svg("path", { class: `line ${kind}`, d: path(own, across, up) }),
        few && shown.map(([a, b]) => svg("circle", { class: `dot ${kind}`, cx: across(a), cy: up(b), r: 3 })),
      ];
    });
    return [parts, drawMarks(marks, across, width, height), lines];
  });
}

function path(points, across, up) {
  let pen = "M";
  return points
    .map(([a, b]) => {
      if (b === null) {
        pen = "M";
        return "";
      }
      const step = `${pen}${across(a).toFixed(1)} ${up(b).toFixed(1)}`;
      pen = "L";
      return step;
    })
    .join("");
}

/**
 * Bars, stacked. `bars`: [{ at, parts: [{ value, kind }] }]; `step` is a bar's width on the x axis.
 * `level` is a dashed line across, as { value, text }.
 */
export function barChart({
  label,
  bars,
  step,
  x,
  y,
  xTicks,
  yTicks,
  yFormat = String,
  marks = [],
  level = null,
  height = 160,
}) {
  const tallest = Math.max(1, ...bars.map(({ parts }) => parts.reduce((sum, part) => sum + part.value, 0)));
  const spread = { x, y: y ?? [0, tallest], xTicks, yTicks, yFormat };
  return chart(label, height, (width) => {
    const { across, up, parts } = frame(spread, width, height);
    const drawn = bars.map(({ at, parts: stack }) => {
      let base = 0;
      const left = across(at),
        wide = Math.max(1, across(at + step) - left - 1);
      return stack
        .filter((part) => part.value > 0)
        .map(({ value, kind }) => {
          const top = up(base + value);
          const bar = svg("rect", {
            class: `bar ${kind}`,
            x: left,
            y: top,
            width: wide,
            height: Math.max(0, up(base) - top),
          });
          base += value;
          return bar;
        });
    });
    const line = level && [
      svg("line", { class: "level", x1: LEFT, x2: width - RIGHT, y1: up(level.value), y2: up(level.value) }),
      svg("text", { class: "tick", x: width - RIGHT, y: up(level.value) - 5, "text-anchor": "end" }, level.text),
    ];
    return [parts, drawn, line, drawMarks(marks, across, width, height)];
  });
}

/** What the colours mean. */
export const legend = (entries) =>
  h(
    "ul",
    { class: "legend" },
    entries.map(({ name, kind }) => h("li", {}, h("span", { class: `swatch ${kind}` }), name)),
  );
