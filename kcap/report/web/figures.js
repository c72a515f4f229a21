// Figures of many numbers: bars by value, and the roofline.

const MOST_BARS = 12;

/** Values with counts as bars; many values are put together between powers of two. */
function Bars({ values, unit, of }) {
  const bars = values.length <= MOST_BARS ? values.map(([value, count]) => [formatCount(value), count]) : byPowersOfTwo(values);
  const most = Math.max(...bars.map(([, count]) => count));
  const total = bars.reduce((sum, [, count]) => sum + count, 0);
  return html`<table class="bars">
    <tbody>
      ${bars.map(([name, count]) => html`<tr>
        <th scope="row">${name}${unit ? html`<span class="unseen"> ${unit}</span>` : ""}</th>
        <td title=${`${formatCount(count)} ${of}, ${formatShare(count / total)}`}>
          <span class="line"><span class="fill" style=${{ width: `${(84 * count) / most}%` }} aria-hidden="true"></span><span>${formatCount(count)}</span></span>
        </td>
      </tr>`)}
    </tbody>
  </table>`;
}

function byPowersOfTwo(values) {
  const bins = new Map();
  for (const [value, count] of values) {
    const power = value < 1 ? -1 : Math.floor(Math.log2(value));
    bins.set(power, (bins.get(power) || 0) + count);
  }
  const name = (power) => (power < 0 ? "0" : power === 0 ? "1" : `${formatCount(2 ** power)} to ${formatCount(2 ** (power + 1) - 1)}`);
  return [...bins].sort((a, b) => a[0] - b[0]).map(([power, count]) => [name(power), count]);
}

function Histograms({ model }) {
  const { histograms } = model.report;
  if (histograms.length === 0) return null;
  return html`<${Section} id="batches" title="How large are batches, how long contexts?">
    <div class="cards">
      ${histograms.map((histogram) => Object.entries(histogram.values).map(([phase, values]) => html`<div class="card">
        <h3>${histogram.title}, ${phase}</h3>
        <${Bars} values=${values} unit=${histogram.unit} of=${histogram.unit === "tokens" ? "times" : "steps"} />
        <p class="dim">${histogram.of}</p>
      </div>`))}
    </div>
  <//>`;
}

const LEAST_DISC = 0.001; // of the time; smaller ones are no disc
const MOST_LABELS = 9;
const MARGIN = { left: 56, right: 16, top: 16, bottom: 44 };

function Roofline({ model, onKernel }) {
  const [ref, width] = useWidth();
  const { rates } = model.report;
  const discs = useMemo(() => discsOf(model), []);
  const computing = discs.filter((disc) => disc.flops > 0);
  const moving = discs.filter((disc) => disc.flops === 0);
  const note = rates && `Roof: ${formatCount(Math.round(rates.memory_gb_s))} GB/s and ${digits(rates.tflop_s)} TFLOP/s, ${rates.source}. A disc is a kernel in one phase, as large as its share of the time.`;
  return html`<${Section} id="roofline" title="Is it memory or arithmetic that holds a kernel back?" note=${model.report.mix_measured ? note : null}>
    <div ref=${ref}>
      ${!model.report.mix_measured || !rates
        ? html`<p>No kernel's time was measured, so that nothing stands under the roof: pass --measurements, or record with --check-coverage.</p>`
        : html`${computing.length > 0 && html`<${RooflineFigure} rates=${rates} discs=${computing} width=${width} onKernel=${onKernel} />`}
            ${moving.length > 0 && html`<h3>Kernels of no arithmetic, or of none that is known, by bandwidth</h3>
              <${BandwidthFigure} rates=${rates} discs=${moving} width=${width} onKernel=${onKernel} />`}`}
    </div>
  <//>`;
}

/** A disc for each kernel in each phase whose time and bytes are known. */
function discsOf(model) {
  const { calls } = model;
  const discs = [];
  for (const phase of model.phases) {
    for (const group of model.group("kernel", null, phase)) {
      const disc = { name: group.name, phase, us: 0, moved: 0, flops: 0, color: model.colorOfCall(group.places[0]) };
      for (const place of group.places) {
        const us = calls.phases[phase].us[place];
        if (us === null || !calls.moved[place]) continue;
        disc.us += us;
        disc.moved += calls.moved[place] * calls.phases[phase].count[place];
        disc.flops += calls.flops[place] * calls.phases[phase].count[place];
      }
      disc.share = disc.us / model.totals.us;
      if (disc.share >= LEAST_DISC) discs.push(disc);
    }
  }
  return discs.sort((a, b) => b.us - a.us);
}

function radius(share) {
  return Math.max(3.5, 62 * Math.sqrt(share));
}

function describe(disc) {
  const arithmetic = disc.flops ? `, ${digits(disc.flops / disc.us / 1e6)} TFLOP/s` : "";
  return `${disc.name}, ${disc.phase}: ${formatShare(disc.share)} of the time, ${digits(disc.moved / disc.us / 1e3)} GB/s${arithmetic}`;
}

function logScale([low, high], [from, to]) {
  const [a, b] = [Math.log10(low), Math.log10(high)];
  return (value) => from + ((Math.log10(value) - a) / (b - a)) * (to - from);
}

function decades(low, high, most = 8) {
  const all = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.floor(Math.log10(high)); power += 1) all.push(10 ** power);
  const step = Math.ceil(all.length / most);
  return all.filter((_, place) => place % step === 0);
}

function RooflineFigure({ rates, discs, width, onKernel }) {
  const height = Math.min(520, Math.max(320, width * 0.5));
  const intensities = discs.map((disc) => disc.flops / disc.moved);
  const achieved = discs.map((disc) => disc.flops / disc.us / 1e6);
  const ridge = (rates.tflop_s * 1e3) / rates.memory_gb_s;
  const x = [Math.min(...intensities, ridge) / 3, Math.max(...intensities, ridge) * 3];
  const y = [Math.min(...achieved, rates.tflop_s / 100) / 2, rates.tflop_s * 2];
  const sx = logScale(x, [MARGIN.left, width - MARGIN.right]);
  const sy = logScale(y, [height - MARGIN.bottom, MARGIN.top]);
  const roof = (intensity) => Math.min(rates.tflop_s, (intensity * rates.memory_gb_s) / 1e3);
  const least = Math.max(x[0], (y[0] * 1e3) / rates.memory_gb_s);
  const points = [least, ridge, x[1]].map((at) => `${sx(at)},${sy(roof(at))}`).join(" ");
  const placed = discs.map((disc, at) => ({ ...disc, x: sx(intensities[at]), y: sy(achieved[at]), r: radius(disc.share) }));
  return html`<svg class="figure" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="group" aria-label="Roofline">
    ${decades(...x, width / 70).map((at) => html`<g class="tick"><line x1=${sx(at)} x2=${sx(at)} y1=${MARGIN.top} y2=${height - MARGIN.bottom} />
      <text x=${sx(at)} y=${height - MARGIN.bottom + 16} text-anchor="middle">${formatShort(at)}</text></g>`)}
    ${decades(...y).map((at) => html`<g class="tick"><line x1=${MARGIN.left} x2=${width - MARGIN.right} y1=${sy(at)} y2=${sy(at)} />
      <text x=${MARGIN.left - 6} y=${sy(at) + 4} text-anchor="end">${formatShort(at)}</text></g>`)}
    <polyline class="roof" points=${points} />
    <text class="name" x=${width - MARGIN.right} y=${sy(rates.tflop_s) - 6} text-anchor="end">arithmetic</text>
    <text class="name" x=${sx(least) + 8} y=${Math.min(sy(roof(least)) - 26, height - MARGIN.bottom - 30)}>memory</text>
    <${Discs} discs=${placed} width=${width} onKernel=${onKernel} />
    <text class="axis" x=${(MARGIN.left + width - MARGIN.right) / 2} y=${height - 6} text-anchor="middle">FLOPs for each byte moved</text>
    <text class="axis" transform=${`translate(12 ${height / 2}) rotate(-90)`} text-anchor="middle">TFLOP/s</text>
  </svg>`;
}

function BandwidthFigure({ rates, discs, width, onKernel }) {
  const height = 170;
  const speeds = discs.map((disc) => disc.moved / disc.us / 1e3);
  const x = [Math.min(...speeds, rates.memory_gb_s / 10) / 2, Math.max(...speeds, rates.memory_gb_s) * 2];
  const sx = logScale(x, [MARGIN.left, width - MARGIN.right]);
  const placed = discs.map((disc, at) => ({ ...disc, x: sx(speeds[at]), y: 58, r: radius(disc.share) }));
  return html`<svg class="figure" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="group" aria-label="Bandwidth">
    ${decades(...x, width / 70).map((at) => html`<g class="tick"><line x1=${sx(at)} x2=${sx(at)} y1="10" y2=${height - MARGIN.bottom} />
      <text x=${sx(at)} y=${height - MARGIN.bottom + 16} text-anchor="middle">${formatShort(at)}</text></g>`)}
    <line class="roof" x1=${sx(rates.memory_gb_s)} x2=${sx(rates.memory_gb_s)} y1="10" y2=${height - MARGIN.bottom} />
    <text class="name" x=${sx(rates.memory_gb_s) - 6} y="20" text-anchor="end">memory</text>
    <${Discs} discs=${placed} width=${width} onKernel=${onKernel} />
    <text class="axis" x=${(MARGIN.left + width - MARGIN.right) / 2} y=${height - 6} text-anchor="middle">GB/s</text>
  </svg>`;
}

/** The discs, the largest below, and the names of as many of the largest as have room. */
function Discs({ discs, width, onKernel }) {
  const labels = labelsOf(discs, width);
  const act = (name) => (event) => {
    if (event.type === "click" || event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      onKernel(name);
    }
  };
  return html`${discs.map((disc) => html`<circle class="disc" cx=${disc.x} cy=${disc.y} r=${disc.r} style=${{ fill: disc.color, stroke: disc.color }}
      tabindex="0" role="button" aria-label=${describe(disc)} onClick=${act(disc.name)} onKeyDown=${act(disc.name)}><title>${describe(disc)}</title></circle>`)}
    ${labels.map((one) => html`<text class="label" x=${one.x} y=${one.y} text-anchor=${one.anchor}>${one.text}</text>`)}`;
}

/** Names that cover neither one another nor the middle of a disc: beside a disc, above it, or below. */
function labelsOf(discs, width) {
  const placed = [];
  const covered = discs.map((disc) => ({ left: disc.x - disc.r * 0.6, right: disc.x + disc.r * 0.6, top: disc.y - disc.r * 0.6, bottom: disc.y + disc.r * 0.6 }));
  const free = (box) => box.left > MARGIN.left && box.right < width && box.top > 0 && [...placed, ...covered].every((other) => box.right < other.left || box.left > other.right || box.bottom < other.top || box.top > other.bottom);
  for (const disc of discs) {
    if (placed.length >= Math.min(MOST_LABELS, width / 120)) break;
    const name = disc.name.length > 30 ? `${disc.name.slice(0, 28)}…` : disc.name;
    const text = `${name}, ${disc.phase}`;
    const box = LABEL_PLACES.map((place) => labelBox(disc, text, place)).find(free);
    if (box) placed.push(box);
  }
  return placed;
}

const LABEL_PLACES = [["start", 0], ["end", 0], ["middle", 1], ["middle", -1], ["start", 1.2], ["start", -1.2], ["end", 1.2], ["end", -1.2], ["middle", 2], ["middle", -2]];

function labelBox(disc, text, [anchor, down]) {
  const long = text.length * 7.2;
  const aside = down === 0 ? disc.r + 4 : 0;
  const x = anchor === "start" ? disc.x + aside : anchor === "end" ? disc.x - aside : disc.x;
  const y = disc.y + 4 + Math.sign(down) * disc.r + down * 12;
  const left = anchor === "start" ? x : anchor === "end" ? x - long : x - long / 2;
  return { text, anchor, x, y, left, right: left + long, top: y - 11, bottom: y + 3 };
}
