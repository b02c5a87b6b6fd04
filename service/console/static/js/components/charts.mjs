// SVG charts that redraw themselves when their width changes.

import { h, svg } from "../dom.mjs";

// Margins in pixels. `.threshold input` in css/pages.css depends on LEFT and RIGHT.
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 12, 10, 22];
const MARK_ROW = 14; // for the texts of marks, above the highest grid line

/** `label` describes the chart to screen readers. `draw(width)` returns the SVG elements. */
function chart(label, height, draw) {
  const box = h("div", { class: "chart", role: "img", "aria-label": label });
  box.style.height = `${height}px`;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width > 0) box.replaceChildren(svg("svg", { width, height, "aria-hidden": "true" }, draw(width)));
  }).observe(box);
  return box;
}

const linearScale =
  ([low, high], [from, to]) =>
  (value) =>
    from + ((value - low) / (high - low || 1)) * (to - from);

/** Maps values to pixels and draws grid lines, tick labels and vertical marks. */
function axes({ x, y, xTicks = [], yTicks = y, yFormat = String, marks = [] }, width, height) {
  const toX = linearScale(x, [LEFT, width - RIGHT]);
  const toY = linearScale(y, [height - BOTTOM, marks.length ? TOP + MARK_ROW : TOP]);
  const rows = yTicks.map((value) => [
    svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: toY(value), y2: toY(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: toY(value) + 4, "text-anchor": "end" }, yFormat(value)),
  ]);
  const columns = xTicks.map(({ at, text }, index) => {
    const anchor =
      xTicks.length === 1 ? "middle" : index === 0 ? "start" : index === xTicks.length - 1 ? "end" : "middle";
    return svg("text", { class: "tick", x: toX(at), y: height - 6, "text-anchor": anchor }, text);
  });
  const textWidth = (text) => 7 * text.length;
  const flipped = ({ at, text }) => toX(at) > width - RIGHT - textWidth(text); // no room for the text on the right
  const verticals = marks.map((mark, index) => {
    const x = toX(mark.at);
    const next = marks[index + 1];
    const needed = textWidth(mark.text) * (next && flipped(next) ? 2 : 1);
    const crowded = next && toX(next.at) - x < needed; // the texts would overlap
    const left = flipped(mark);
    return [
      svg("line", { class: "mark", x1: x, x2: x, y1: TOP - 6, y2: height - BOTTOM }),
      !crowded &&
        svg(
          "text",
          { class: "tick mark-text", x: x + (left ? -4 : 4), y: TOP + 4, "text-anchor": left ? "end" : "start" },
          mark.text,
        ),
    ];
  });
  return { toX, toY, background: [rows, columns], verticals };
}

/**
 * A line chart. `series` is [{ points: [[x, y | null]], kind }], where null breaks the line and `kind` is the CSS class
 * of its colour. `x` and `y` are [low, high]; `xTicks` and `marks` are [{ at, text }].
 */
export function lineChart({ label, series, height = 160, dots = false, ...scales }) {
  return chart(label, height, (width) => {
    const { toX, toY, background, verticals } = axes(scales, width, height);
    const lines = series.map(({ points, kind = "s0" }) => {
      const drawn = points.filter(([, value]) => value !== null);
      const withDots = dots || drawn.length === 1;
      return [
        svg("path", { class: `line ${kind}`, d: linePath(points, toX, toY) }),
        withDots && drawn.map(([x, y]) => svg("circle", { class: `dot ${kind}`, cx: toX(x), cy: toY(y), r: 3 })),
      ];
    });
    return [background, verticals, lines];
  });
}

function linePath(points, toX, toY) {
  let command = "M";
  return points
    .map(([x, y]) => {
      const step = y === null ? "" : `${command}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`;
      command = y === null ? "M" : "L";
      return step;
    })
    .join("");
}

/**
 * A chart of stacked bars. `bars` is [{ at, parts: [{ value, kind }] }], `step` the width of a bar on the x axis.
 * `level` draws a dashed horizontal line at a value.
 */
export function barChart({ label, bars, step, level = null, height = 160, ...scales }) {
  const highest = Math.max(1, ...bars.map(({ parts }) => parts.reduce((sum, part) => sum + part.value, 0)));
  return chart(label, height, (width) => {
    const { toX, toY, background, verticals } = axes({ y: [0, highest], ...scales }, width, height);
    const drawn = bars.map(({ at, parts }) => {
      const left = toX(at);
      const barWidth = Math.max(1, toX(at + step) - left - 1);
      let base = 0;
      return parts
        .filter(({ value }) => value > 0)
        .map(({ value, kind }) => {
          const [bottom, top] = [toY(base), toY(base + value)];
          base += value;
          return svg("rect", { class: `bar ${kind}`, x: left, y: top, width: barWidth, height: bottom - top });
        });
    });
    const line =
      level !== null && svg("line", { class: "level", x1: LEFT, x2: width - RIGHT, y1: toY(level), y2: toY(level) });
    return [background, drawn, line, verticals];
  });
}

export const legend = (entries) =>
  h(
    "ul",
    { class: "legend" },
    entries.map(({ name, kind }) => h("li", {}, h("span", { class: `swatch ${kind}` }), name)),
  );
