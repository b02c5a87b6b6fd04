// Numbers and times as people read them.

export const percent = (share, digits = 0) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;

export const fixed = (value, digits = 2) =>
  value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−");

/** Three significant digits, whatever the size. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return fixed(value, size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
};

export const milliseconds = (seconds) =>
  seconds === null || seconds === undefined ? "–" : seconds < 1 ? `${short(1000 * seconds)} ms` : `${short(seconds)} s`;

export function ago(time) {
  const seconds = (Date.now() - new Date(time)) / 1000;
  if (seconds < 10) return "just now";
  if (seconds < 86400) return `${duration(seconds)} ago`;
  return new Date(time).toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" });
}

export const clock = (time) => new Date(time).toLocaleTimeString("en-GB");

export const moment = (time) =>
  new Date(time).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

/** "a, b and c", and no more than `most` of them. */
export function listed(names, most = 4) {
  const shown = names.length > most ? [...names.slice(0, most - 1), `${names.length - most + 1} more`] : names;
  return shown.length < 2 ? shown.join("") : `${shown.slice(0, -1).join(", ")} and ${shown.at(-1)}`;
}
