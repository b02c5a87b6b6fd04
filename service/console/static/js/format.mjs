// Numbers, times and lists as text. A missing number is an en dash; a percent sign stays on the line of its number.

export const percent = (share, digits = 0) => (share == null ? "–" : `${(100 * share).toFixed(digits)}\u00a0%`);

/** A probability as a whole percentage; never 0 % for one that is only small. */
export const probability = (share) => (share > 0 && share < 0.01 ? "<\u00a01\u00a0%" : percent(share));

const RUNNER_UP_SHARE = 0.05;
const withShare = ({ label, share }) => `${label} (${probability(share)})`;

/** An answer as people read it; the same words as `in_words` in service/wire/predictions.py. */
export function inWords({ certainty, label, nearest, p_novel: pNovel }) {
  if (label === null) return ["never seen", ...nearest.slice(0, 1).map(withShare)].join("; nearest: ");
  const best = nearest.find((entry) => entry.label === label) ?? { label, share: 0 };
  if (certainty === "sure") return `sure: ${withShare(best)}`;
  if (pNovel > best.share) return `unsure: looks like ${withShare(best)}, or never seen`;
  const others = nearest.filter((entry) => entry !== best && entry.share >= RUNNER_UP_SHARE);
  return `unsure: looks like ${[best, ...others.slice(0, 1)].map(withShare).join(", ")}`;
}

export const fixed = (value, digits = 2) => (value == null ? "–" : value.toFixed(digits).replace("-", "−"));

/** About three significant digits. */
export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value ?? 0);
  return fixed(value, size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

export function bytes(count) {
  const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, one]) => count >= one) ?? ["bytes", 1];
  return `${size === 1 ? count : short(count / size)}\u00a0${unit}`;
}

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** A latency that is given in seconds. */
export const latency = (seconds) =>
  seconds == null ? "–" : seconds < 1 ? `${fixed(1000 * seconds, seconds < 0.01 ? 1 : 0)} ms` : `${short(seconds)} s`;

export function timeAgo(time) {
  const seconds = (Date.now() - new Date(time)) / 1000;
  if (seconds < 10) return "just now";
  if (seconds < 86400) return `${duration(seconds)} ago`;
  return new Date(time).toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" });
}

export const clockTime = (time) => new Date(time).toLocaleTimeString("en-GB");

export const dateTime = (time) =>
  new Date(time).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

/** "a, b and c", or "a, b and 7 more" when there are more than `limit` names. */
export function joinNames(names, limit = 4) {
  const shown = names.length > limit ? [...names.slice(0, limit - 1), `${names.length - limit + 1} more`] : names;
  return shown.length < 2 ? shown.join("") : `${shown.slice(0, -1).join(", ")} and ${shown.at(-1)}`;
}
