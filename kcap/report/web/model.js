// The data: unpacked, added up by what the reader chooses, and as text. No number is made here that the report did not hold.

const PACKED = { report: "data", details: "details" };
const REST = "rest"; // the colour of what is too small, or of no family
const COLORS = 8;
const NO_FAMILY = "(none)";

/** The JSON that the element holds as base64 of gzip. */
async function unpack(id) {
  const text = document.getElementById(id).textContent;
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class Model {
  constructor(report) {
    this.report = report;
    this.calls = report.calls;
    this.size = this.calls.id.length;
    this.phases = Object.keys(this.calls.phases);
    this.timed = report.mix_unit === "us";
    this.placeOfCall = new Map(this.calls.id.map((id, place) => [id, place]));
    this.references = report.judged ? report.judged.references : {};
    const families = new Set(this.calls.kernels.map((kernel) => kernel.family));
    this.top = families.size > 1 || !families.has(NO_FAMILY) ? "family" : "source";
    this.totals = this.sum([...this.calls.id.keys()]);
    this.colors = new Map();
    const known = this.group(this.top).filter((group) => group.name !== NO_FAMILY && group.us > 0);
    known.slice(0, COLORS).forEach((group, place) => this.colors.set(group.name, place));
    this.details = null;
  }

  /** What a Call is grouped by. */
  key(by, place) {
    const { calls } = this;
    switch (by) {
      case "family": return calls.kernels[calls.kernel[place]].family;
      case "kernel": return calls.kernels[calls.kernel[place]].name;
      case "operator": return calls.names[calls.operator[place]];
      case "source": return calls.names[calls.source[place]];
      default: return String(place);
    }
  }

  family(place) {
    return this.key("family", place);
  }

  color(name) {
    const place = this.colors.get(name);
    return `var(--c-${place === undefined ? REST : place})`;
  }

  colorOfCall(place) {
    return this.color(this.key(this.top, place));
  }

  /** Counts and times of these Calls, in one phase or in all. */
  sum(places, phase = null) {
    const { calls } = this;
    const phases = phase === null ? this.phases : [phase];
    const sum = { count: 0, graph: 0, gpu: 0, us: 0, floor: 0, known: true, timed: false };
    for (const place of places) {
      if (phase === null) {
        sum.graph += calls.graph[place];
        sum.gpu += calls.gpu_us[place];
      }
      for (const name of phases) {
        const column = calls.phases[name];
        sum.count += column.count[place];
        if (column.us[place] === null) continue;
        sum.timed = true;
        sum.us += column.us[place];
        if (column.floor_us[place] === null) sum.known = false;
        else sum.floor += column.floor_us[place];
      }
    }
    sum.overFloor = sum.known && sum.floor > 0 ? sum.us / sum.floor : null;
    return sum;
  }

  /** The chosen Calls in groups, the costliest first; without `places` all Calls. */
  group(by, places = null, phase = null) {
    const groups = new Map();
    for (const place of places || this.calls.id.keys()) {
      const key = this.key(by, place);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(place);
    }
    return [...groups]
      .map(([name, of]) => ({ name, places: of, ...this.sum(of, phase) }))
      .sort((a, b) => b.us - a.us || b.count - a.count || (a.name < b.name ? -1 : 1));
  }

  /** What one search looks through, in lower case. */
  text(place) {
    if (!this.texts) this.texts = new Array(this.size);
    if (this.texts[place] === undefined) {
      const parts = ["operator", "kernel", "family", "source"].map((by) => this.key(by, place));
      this.texts[place] = [...parts, this.calls.signature[place]].join("\n").toLowerCase();
    }
    return this.texts[place];
  }

  /** The places of the Calls that hold each word of `query`, and ran in `phase`. */
  find(query, phase = null) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (let place = 0; place < this.size; place += 1) {
      if (phase !== null && !this.calls.phases[phase].count[place]) continue;
      if (words.every((word) => this.text(place).includes(word))) found.push(place);
    }
    return found;
  }

  /** What only one Call's page shows; unpacked at the first call. */
  async detail() {
    if (this.details === null) this.details = unpack(PACKED.details);
    return this.details;
  }
}

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
  if (times === null) return "?";
  return `${times < 10 ? times.toFixed(2) : times < 1e4 ? digits(times) : formatShort(times)}×`;
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
