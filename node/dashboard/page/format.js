// Numbers as text, as node/telemetry/format.py prints them. A number and its unit stay on one line.

function scaled(value, units, space) {
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = Math.abs(value) < 999.5 && !Number.isInteger(value) ? trimmed(value, 3) : value.toFixed(0);
  return digits + (unit || units[unit] ? space : "") + units[unit];
}

// Significant digits without an exponent and without trailing zeros.
function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

export const count = (value) => (value == null ? "–" : scaled(value, ["", "k", "M", "G", "T"], ""));
export const bytes = (value) => (value == null ? "–" : scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], "\u00a0"));
export const percent = (share) => (share == null ? "–" : `${Math.round(100 * share)}\u00a0%`);
export const mbit = (value) => (value >= 99.5 ? value.toFixed(0) : trimmed(value, 2));
export const bits = (value) => value.toFixed(2);
export const loss = (value) => (value == null ? "–" : value.toFixed(4));
export const integer = (value) => value.toLocaleString("en");

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds > 0 && seconds < 0.9995) return `${trimmed(1000 * seconds, 3)}\u00a0ms`;
  if (seconds < 59.5) return `${trimmed(seconds, 3)}\u00a0s`;
  let minutes = Math.floor(Math.round(seconds) / 60);
  const rest = Math.round(seconds) % 60;
  if (minutes < 60) return `${minutes}m${String(rest).padStart(2, "0")}s`;
  const hours = Math.floor(minutes / 60);
  minutes %= 60;
  return hours < 48 ? `${hours}h${String(minutes).padStart(2, "0")}m` : `${Math.floor(hours / 24)}d${String(hours % 24).padStart(2, "0")}h`;
}

// Whole seconds, so that a growing age does not flicker between units.
export const age = (seconds) => duration(Math.max(0, Math.round(seconds)));

export function clock(at, now) {
  const date = new Date(1000 * at);
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date(1000 * now).toDateString() ? time : `${date.toLocaleDateString("en-CA")} ${time.slice(0, 5)}`;
}
