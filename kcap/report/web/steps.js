// One profiled step as a strip of its kernels, with the gaps in which the GPU waited.

const ZOOMS = [1, 4, 16, 64];
const LANE = 34;
const MOST_LANES = 4;
const SHOWN_GAPS = 6;
const LEAST_WIDTH = 0.6; // pixels of a kernel
const LONG_GAP = 0.02; // of the step's span; longer ones are cut short
const MOST_CUTS = 12;
const CUT = 26; // pixels of a gap that is cut short
const LEAST_GAP = 0.5; // microseconds between two kernels that follow one another at once

function Steps({ model, openCall }) {
  const { strips } = model.report;
  const [chosen, setChosen] = useState(0);
  const [zoom, setZoom] = useState(1);
  const [cut, setCut] = useState(true);
  const [ref, width] = useWidth();
  const strip = strips[chosen];
  return html`<${Section} id="steps" title="What does the GPU do in one step?"
    note=${strip ? "A step that torch's profiler saw, of the middle GPU time of its kind. The profiler itself makes gaps between eager kernels longer." : null}>
    <div ref=${ref}>
      ${!strip
        ? html`<p>Not known: no step was profiled with the starts of its kernels (kcap record --check-coverage profiles some).</p>`
        : html`<div class="filters">
            <label>Step <select value=${chosen} onChange=${(event) => setChosen(Number(event.target.value))}>
              ${strips.map((one, place) => html`<option value=${place}>${stepName(one)}</option>`)}
            </select></label>
            <span role="group" aria-label="Zoom">${ZOOMS.map((times) => html`<button type="button" class="plain" aria-pressed=${String(times === zoom)} onClick=${() => setZoom(times)}>${times}×</button>`)}</span>
            <button type="button" class="plain" aria-pressed=${String(!cut)} onClick=${() => setCut(!cut)}>Gaps to scale</button>
          </div>
          <${StripFigure} model=${model} strip=${strip} width=${width} zoom=${zoom} cut=${cut} openCall=${openCall} />
          <${Gaps} strip=${strip} />`}
    </div>
  <//>`;
}

function stepName(strip) {
  const mode = strip.mode === "eager" ? "eager" : `${strip.mode} graph${strip.padded ? ` padded to ${strip.padded}` : ""}`;
  return `${strip.phase}, ${plural(strip.sequences, "sequence")}, ${plural(strip.tokens, "token")}, ${mode}`;
}

function StripFigure({ model, strip, width, zoom, cut, openCall }) {
  const long = width * zoom;
  const first = Math.min(...strip.start_us);
  const cuts = useMemo(() => (cut ? longGaps(strip) : []), [strip, cut]);
  const axis = axisOf(strip.span_us, cuts, long - 2);
  const lanes = useMemo(() => lanesOf(strip), [strip]);
  const height = Math.max(...lanes) * LANE + LANE + 26;
  const click = (event) => {
    const at = event.target.dataset ? event.target.dataset.kernel : undefined;
    const place = at === undefined ? undefined : model.placeOfCall.get(strip.call[at]);
    if (place !== undefined) openCall(place);
  };
  const said = `${stepName(strip)}: ${plural(strip.us.length, "kernel")} in ${formatTime(strip.span_us)}`;
  return html`<div class="wide" tabindex="0" role="region" aria-label=${said}>
    <svg class="strip" width=${long} height=${height} viewBox=${`0 0 ${long} ${height}`} role="img" aria-label=${said} onClick=${click}>
      ${ticksOf(strip.span_us, axis).map((at) => html`<g class="tick"><line x1=${axis.x(at)} x2=${axis.x(at)} y1="0" y2=${height - 20} />
        <text x=${axis.x(at) + 3} y=${height - 6}>${formatTime(at)}</text></g>`)}
      ${cuts.map((gap) => html`<g class="cut"><rect x=${axis.x(gap.at) + 3} y="2" width=${CUT - 6} height=${LANE - 6}><title>${`The GPU waited ${formatTime(gap.us)}; not to scale`}</title></rect>
        <text x=${axis.x(gap.at) + CUT / 2} y="20" text-anchor="middle">⋯</text></g>`)}
      ${drawn(strip, axis, lanes, first).map((at) => html`<${StripKernel} model=${model} strip=${strip} at=${at} from=${strip.start_us[at] - first} lane=${lanes[at]} axis=${axis} />`)}
    </svg>
  </div>`;
}

/** The kernels that have a pixel of their own: of those too narrow to tell apart only the first. */
function drawn(strip, axis, lanes, first) {
  const taken = lanes.map(() => -Infinity);
  return [...strip.us.keys()].filter((at) => {
    const x = axis.x(strip.start_us[at] - first);
    const end = x + strip.us[at] * axis.scale;
    if (end < taken[lanes[at]] + LEAST_WIDTH) return false;
    taken[lanes[at]] = end;
    return true;
  });
}

function StripKernel({ model, strip, at, from, lane, axis }) {
  const us = strip.us[at];
  const place = model.placeOfCall.get(strip.call[at]);
  const kernel = strip.names[strip.name[at]];
  const [x, wide] = [axis.x(from), Math.max(us * axis.scale, LEAST_WIDTH)];
  const name = place === undefined ? kernel : model.key("kernel", place);
  const color = place === undefined ? "var(--c-rest)" : model.colorOfCall(place);
  const text = `${name}: ${formatTime(us)} at ${formatTime(from)}${place === undefined ? "" : `; kernel ${kernel}`}`;
  const shown = name.length * 6.6 < wide - 6 ? name : place === undefined ? "" : model.key(model.top, place);
  return html`<g><rect data-kernel=${at} x=${x} y=${lane * LANE + 2} width=${wide} height=${LANE - 6} style=${{ fill: color }}><title>${text}</title></rect>
    ${shown.length * 6.6 < wide - 6 && html`<text class="in" x=${x + 4} y=${lane * LANE + 20}>${shown}</text>`}</g>`;
}

/** The longest gaps, which would leave little room for kernels, in the order of time. */
function longGaps(strip) {
  return gapsOf(strip).filter((gap) => gap.us > LONG_GAP * strip.span_us).slice(0, MOST_CUTS).sort((a, b) => a.at - b.at);
}

/** From microseconds to pixels: to scale but for `cuts`, each of which takes CUT pixels. */
function axisOf(span, cuts, width) {
  const left = span - cuts.reduce((sum, gap) => sum + gap.us, 0);
  const scale = Math.max(width - CUT * cuts.length, 40) / left;
  const x = (us) => {
    let at = us * scale;
    for (const gap of cuts) if (us > gap.at) at += CUT - Math.min(us - gap.at, gap.us) * scale - (us < gap.at + gap.us ? CUT * (1 - (us - gap.at) / gap.us) : 0);
    return at;
  };
  const inCut = (us) => cuts.some((gap) => us > gap.at && us < gap.at + gap.us);
  return { x, scale, inCut };
}

/** Kernels that overlap lie below one another. */
function lanesOf(strip) {
  const ends = [];
  return strip.us.map((us, at) => {
    let lane = ends.findIndex((end) => end <= strip.start_us[at] + 0.002);
    if (lane < 0) lane = Math.min(ends.length, MOST_LANES - 1);
    ends[lane] = strip.start_us[at] + us;
    return lane;
  });
}

function ticksOf(span, axis) {
  const rough = 90 / axis.scale;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
  const ticks = [];
  for (let at = 0; at < span; at += step) {
    const free = ticks.length === 0 || axis.x(at) - axis.x(ticks[ticks.length - 1]) > 64;
    if (!axis.inCut(at) && free) ticks.push(at);
  }
  return ticks;
}

function Gaps({ strip }) {
  const gaps = gapsOf(strip);
  const idle = strip.span_us - strip.busy_us;
  const rows = gaps.slice(0, SHOWN_GAPS).map((gap) => ({ cells: [strip.names[strip.name[gap.before]], strip.names[strip.name[gap.after]], formatTime(gap.us), formatTime(gap.at)] }));
  return html`<p><b>${formatTime(strip.busy_us)}</b> of <b>${formatTime(strip.span_us)}</b> the GPU was busy, with ${plural(strip.us.length, "kernel")}; ${formatTime(idle)} (${formatShare(idle / strip.span_us)}) it waited${gaps.length ? `, in ${plural(gaps.length, "gap")} of more than ${LEAST_GAP} µs` : ""}.
      ${strip.steps > 1 ? ` ${plural(strip.steps, "step")} of this kind were profiled.` : ""}</p>
    ${rows.length > 0 && html`<${PlainTable} caption="The longest gaps" columns=${[["after", ""], ["before", ""], ["gap", "n"], ["at", "n"]]} rows=${rows} />`}`;
}

function gapsOf(strip) {
  const order = strip.start_us.map((start, at) => at).sort((a, b) => strip.start_us[a] - strip.start_us[b]);
  const gaps = [];
  let [end, before] = [strip.start_us[order[0]], order[0]];
  for (const at of order) {
    const us = strip.start_us[at] - end;
    if (us > LEAST_GAP) gaps.push({ us, before, after: at, at: end - strip.start_us[order[0]] });
    if (strip.start_us[at] + strip.us[at] > end) [end, before] = [strip.start_us[at] + strip.us[at], at];
  }
  return gaps.sort((a, b) => b.us - a.us);
}
