// Numbers as text, in one way for the whole page.

const number = new Intl.NumberFormat("en-US");

function formatCount(count) {
  return number.format(count);
}

function formatShare(share) {
  if (!Number.isFinite(share)) return "";
  return share > 0 && share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(1)}%`;
}

/** Microseconds with a unit and three digits. */
function formatTime(us) {
  if (us === null || us === undefined) return "";
  for (const [unit, size] of [["s", 1e6], ["ms", 1e3]]) {
    if (us >= size * 0.9995) return `${digits(us / size)} ${unit}`;
  }
  return `${digits(us)} µs`;
}

function digits(value) {
  return value >= 999.5 ? formatCount(Math.round(value)) : String(Number(value.toPrecision(3)));
}

function formatTimes(times) {
  return times === null ? "?" : `${times < 10 ? times.toFixed(2) : digits(times)}×`;
}

/** 1,234,567 as 1.23 M, for axes. */
function formatShort(value) {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return String(Number(value.toPrecision(3)));
}

function plural(count, noun) {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}
