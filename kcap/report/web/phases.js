// Where the GPU's time goes: a bar for each phase, cut into families; a family opens into its kernels.

const LEAST_SEGMENT = 0.004; // of a bar; smaller ones are one segment together
const WIDTH = 8; // pixels of a character
const LEAST_LABEL = 46; // pixels

function Phases({ model, onKernel }) {
  const [family, setFamily] = useState(null);
  const places = useMemo(() => [...model.calls.id.keys()].filter((p) => family === null || model.key(model.top, p) === family), [family]);
  const by = family === null ? model.top : "kernel";
  const shown = ["all", ...model.phases].map((phase) => phaseOf(model, phase, by, places)).filter((phase) => phase.total > 0);
  const choose = (name) => (family === null ? setFamily(name) : onKernel(name));
  const what = model.timed ? "time" : "invocations";
  const title = model.timed ? "Where does the GPU's time go?" : "What runs how often?";
  return html`<${Section} id="phases" title=${title} note=${model.report.mix_source}>
    <p class="path">
      ${family === null
        ? `All ${model.top === "family" ? "families" : "sources"}: choose one to see its kernels.`
        : html`<button type="button" class="plain" onClick=${() => setFamily(null)}>← all</button>
            <span> <b>${family}</b>: choose a kernel to see its Calls.</span>`}
    </p>
    ${shown.length > 2 || shown.length === 0
      ? shown.map((phase) => html`<${PhaseBar} model=${model} phase=${phase} family=${family} onChoose=${choose} />`)
      : html`<${PhaseBar} model=${model} phase=${shown[shown.length - 1]} family=${family} onChoose=${choose} />`}
    <${PhaseTable} model=${model} shown=${shown} by=${by} family=${family} what=${what} onChoose=${choose} />
  <//>`;
}

/** A phase's groups. `total`: of these Calls; `whole`: of all Calls in the phase; `everything`: in all phases. */
function phaseOf(model, name, by, places) {
  const phase = name === "all" ? null : name;
  const ran = phase === null ? places : places.filter((place) => model.calls.phases[phase].count[place]);
  const groups = model.group(by, ran, phase).filter((group) => group.us > 0);
  const total = groups.reduce((sum, group) => sum + group.us, 0);
  const whole = phase === null ? model.totals.us : model.sum(model.calls.id.keys(), phase).us;
  const steps = phase === null ? Object.values(model.report.steps).reduce((a, b) => a + b, 0) : model.report.steps[phase] || 0;
  return { name, groups, total, whole, steps };
}

function amount(model, value) {
  return model.timed ? formatTime(value) : plural(value, "invocation");
}

function PhaseBar({ model, phase, family, onChoose }) {
  const [ref, width] = useWidth();
  const large = phase.groups.filter((group) => group.us >= LEAST_SEGMENT * phase.total);
  const rest = phase.groups.slice(large.length);
  const restUs = rest.reduce((sum, group) => sum + group.us, 0);
  const facts = [plural(phase.steps, "step"), amount(model, phase.total)];
  if (family !== null) facts.push(`${formatShare(phase.total / phase.whole)} of ${phase.name === "all" ? "everything" : phase.name}`);
  else if (phase.name !== "all") facts.push(`${formatShare(phase.total / model.totals.us)} of everything`);
  if (phase.steps && model.timed) facts.push(`${formatTime(phase.total / phase.steps)} a step`);
  return html`<div class="phase" data-phase=${phase.name}>
    <h3>${phase.name === "all" ? "all phases" : phase.name} <span>${facts.join(" · ")}</span></h3>
    <div class="bar" ref=${ref} role="list" aria-label=${`${phase.name}, ${facts.join(", ")}`}>
      ${large.map((group, place) => {
        const share = group.us / phase.total;
        const text = `${group.name}: ${amount(model, group.us)}, ${formatShare(share)} of ${phase.name}`;
        const color = family === null ? model.color(group.name) : model.color(family);
        const shade = family !== null && place % 2 ? `color-mix(in srgb, ${color}, var(--shade) 22%)` : color;
        return html`<div role="listitem" style=${{ flex: `${share} 1 0` }}>
          <button type="button" title=${text} aria-label=${text} style=${{ background: shade }} onClick=${() => onChoose(group.name)}>
            ${label(group.name, share, width)}
          </button>
        </div>`;
      })}
      ${rest.length > 0 &&
      html`<div role="listitem" class="small" style=${{ flex: `${restUs / phase.total} 1 0` }}
        title=${`${rest.length} smaller ones: ${amount(model, restUs)}`}>
        <span class="unseen">${rest.length} smaller ones: ${amount(model, restUs)}</span>
      </div>`}
    </div>
  </div>`;
}

/** What fits into a segment: name and share, the name, or nothing. */
function label(name, share, width) {
  const room = share * width - 10;
  const text = `${name} ${formatShare(share)}`;
  if (text.length * WIDTH < room) return text;
  if (name.length * WIDTH < room) return name;
  return room > LEAST_LABEL ? `${name.slice(0, Math.floor(room / WIDTH) - 1)}…` : "";
}

const FIRST_ROWS = 12;

function PhaseTable({ model, shown, by, family, what, onChoose }) {
  const [all, setAll] = useState(false);
  const phases = shown.length > 2 || shown.length === 0 ? shown : shown.slice(-1);
  if (phases.length === 0) return html`<p>Nothing was recorded.</p>`;
  const shares = phases.map((phase) => new Map(phase.groups.map((group) => [group.name, group.us])));
  const groups = phases[0].groups;
  const rows = groups.slice(0, all ? groups.length : FIRST_ROWS).map((group) => ({
    cells: [
      html`<${Swatch} color=${model.color(family === null ? group.name : family)} />
        <button type="button" class="link" onClick=${() => onChoose(group.name)}>${group.name}</button>`,
      amount(model, group.us),
      ...phases.map((phase, place) => (shares[place].has(group.name) ? formatShare(shares[place].get(group.name) / phase.total) : "·")),
      formatCount(group.count),
      group.timed && model.report.mix_measured ? formatTimes(group.overFloor) : "",
    ],
  }));
  const columns = [[by === "kernel" ? "kernel" : by, ""], [what, "n"], ...phases.map((phase) => [`of ${phase.name}`, "n"]), ["invocations", "n"], ["× floor", "n"]];
  return html`<${PlainTable} caption="The same in numbers" columns=${columns} rows=${rows} />
    ${groups.length > FIRST_ROWS &&
    html`<button type="button" class="plain" onClick=${() => setAll(!all)}>${all ? "Fewer" : `All ${groups.length}`}</button>`}`;
}
