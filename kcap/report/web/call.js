// One Call, or the shapes of one kernel, in a dialog.

const MOST_ARGUMENTS = 400;

function CallDialog({ model, place, onClose }) {
  const { calls } = model;
  const [details, setDetails] = useState(null);
  useEffect(() => {
    model.detail().then(setDetails);
  }, []);
  const kernel = calls.kernels[calls.kernel[place]];
  const parent = calls.names[calls.parent[place]];
  const facts = [
    ["kernel", kernel.definition ? `${kernel.name} (${referenceOf(model, kernel)})` : `${kernel.name} (no Definition)`],
    ["family", kernel.family],
    ["source", calls.names[calls.source[place]]],
    ["seam", calls.names[calls.seam[place]] || "none: nobody can put another kernel there"],
    ["inside", parent],
    ["bytes moved at least", calls.moved[place] ? `${formatShort(calls.moved[place])}B` : ""],
    ["arithmetic", calls.flops[place] ? `${formatShort(calls.flops[place])}FLOP` : ""],
    ["signatures", calls.shapes[place] > 1 ? `one of ${formatCount(calls.shapes[place])} of about this size` : ""],
  ];
  return html`<${Dialog} title=${calls.names[calls.operator[place]]} onClose=${onClose}>
    <p class="signature">${calls.signature[place]}</p>
    <dl>${facts.filter(([, text]) => text).map(([name, text]) => html`<div><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>
    <h3>How often, how long</h3>
    <${CallPhases} model=${model} place=${place} />
    ${details === null ? html`<p role="status">Unpacking…</p>` : html`<${CallDetails} details=${details} place=${place} id=${calls.id[place]} />`}
  <//>`;
}

function CallPhases({ model, place }) {
  const rows = model.phases
    .map((name) => [name, model.sum([place], name)])
    .filter(([, sum]) => sum.count)
    .map(([name, sum]) => ({
      cells: [
        name,
        formatCount(sum.count),
        sum.timed && model.timed ? formatTime(sum.us) : "",
        sum.timed && model.timed ? formatTime(sum.us / sum.count) : "",
        sum.timed && model.report.mix_measured ? formatTimes(sum.overFloor) : "",
      ],
    }));
  const columns = [["phase", ""], ["invocations", "n"], ["time", "n"], ["each", "n"], ["× floor", "n"]];
  return html`<${PlainTable} caption="Counts and times by phase" columns=${columns} rows=${rows} />`;
}

function CallDetails({ details, place, id }) {
  const samples = Object.hasOwn(details.samples, id) ? details.samples[id] : [];
  const more = details.more_samples[id];
  const launch = details.launch[place] < 0 ? null : details.launches[details.launch[place]];
  return html`<h3>Arguments</h3>
    <${Arguments} details=${details} numbers=${details.args[place]} />
    <h3>Samples</h3>
    ${samples.length === 0 && html`<p>None: no invocation's values were kept, or none matter to this Call.</p>`}
    <ul class="samples">
      ${samples.map((sample) => html`<li>
        <b>${sample.phase}${sample.step === null ? "" : `, step ${sample.step}`}${sample.rank ? `, rank ${sample.rank}` : ""}</b>
        ${sample.holds.length ? html`<ul>${sample.holds.map((text) => html`<li>${text}</li>`)}</ul>` : " holds nothing that varies"}
      </li>`)}
    </ul>
    ${more && html`<p>${plural(more, "more Sample")} in the Recording.</p>`}
    ${launch && html`<${LaunchDetails} details=${details} launch=${launch} />`}`;
}

function Arguments({ details, numbers }) {
  const rows = [];
  for (let at = 0; at < Math.min(numbers.length, 4 * MOST_ARGUMENTS); at += 4) {
    const [name, value, memory, flags] = numbers.slice(at, at + 4);
    const kinds = ["by keyword", "default", "written"].filter((_, bit) => flags & (1 << bit));
    rows.push({ cells: [details.texts[name] || String(at / 4), details.texts[value], details.texts[memory], kinds.join(", ")], kind: flags & 2 ? "dim" : "" });
  }
  if (rows.length === 0) return html`<p>It takes none.</p>`;
  return html`<${PlainTable} caption="Arguments" columns=${[["argument", ""], ["value", ""], ["memory", ""], ["passed", ""]]} rows=${rows} />`;
}

function LaunchDetails({ details, launch }) {
  const text = (name) => (name !== null && Object.hasOwn(details.sources, name) ? details.sources[name] : null);
  const [source, fragment] = [text(launch.source), text(launch.fragment)];
  return html`<h3>Launch</h3>
    <p><code>${launch.function}</code>, grid ${launch.grid.join(" × ") || "not known"}${launch.options ? `, ${launch.options}` : ""}</p>
    ${fragment && html`<h3>ATen operators that it stands for</h3><${Code} label="ATen operators" text=${fragment} />`}
    <h3>Source</h3>
    ${source ? html`<${Code} label="Source" text=${source} />` : html`<p>Not recorded: ${launch.unread || "it could not be read"}</p>`}`;
}

/** The shapes of a kernel's Calls by count: of each size that varies, how often it had which value. */
function GroupDialog({ model, row, onClose }) {
  const [details, setDetails] = useState(null);
  useEffect(() => {
    model.detail().then(setDetails);
  }, []);
  return html`<${Dialog} title=${`Shapes of ${row.name}`} onClose=${onClose}>
    <p>${plural(row.places.length, "Call")}, ${plural(row.count, "invocation")}.</p>
    ${details === null ? html`<p role="status">Unpacking…</p>` : html`<${Shapes} model=${model} details=${details} row=${row} />`}
  <//>`;
}

const MOST_SIZES = 3;

function Shapes({ model, details, row }) {
  const sizes = varyingSizes(model, details, row.places);
  if (sizes.length === 0) return html`<p>All its Calls have the same sizes.</p>`;
  return html`${sizes.slice(0, MOST_SIZES).map(
    ([name, counts]) => html`<h3>${name}</h3><${Bars} values=${[...counts].sort((a, b) => a[0] - b[0])} unit="" of="invocations" />`,
  )}
    ${sizes.length > MOST_SIZES && html`<p>${plural(sizes.length - MOST_SIZES, "more size")} vary.</p>`}`;
}

/** [name of a size, count by value], those with most values first: `input[0]` of `bf16[64, 4096]` is 64. */
function varyingSizes(model, details, places) {
  const sizes = new Map();
  for (const place of places) {
    const numbers = details.args[place];
    for (let at = 0; at < numbers.length; at += 4) {
      const found = /^\w+\[([\d, ]*)\]/.exec(details.texts[numbers[at + 1]]);
      if (!found || details.texts[numbers[at + 2]] === "") continue;
      found[1].split(", ").filter(Boolean).forEach((size, dim) => {
        const name = `${details.texts[numbers[at]] || `argument ${at / 4}`}[${dim}]`;
        if (!sizes.has(name)) sizes.set(name, new Map());
        const counts = sizes.get(name);
        counts.set(Number(size), (counts.get(Number(size)) || 0) + model.calls.count[place]);
      });
    }
  }
  const alike = new Set();
  return [...sizes]
    .filter(([, counts]) => counts.size > 1)
    .sort((a, b) => b[1].size - a[1].size)
    .filter(([, counts]) => {
      const key = JSON.stringify([...counts].sort((a, b) => a[0] - b[0]));
      return !alike.has(key) && alike.add(key);
    });
}
