// The kernels as a table that keeps in the document only the rows in sight; a kernel opens into its Calls.

const ROW = 30; // pixels
const SPARE = 8; // rows above and below those in sight
const GROUPINGS = [["kernel", "Definition, else operator"], ["operator", "operator"], ["family", "family"], ["source", "source"], ["call", "Call"]];

const COLUMNS = [
  { id: "name", title: "kernel", width: "minmax(300px, 5fr)", text: true, value: (row) => row.name },
  { id: "share", title: "share", width: "84px", value: (row) => row.us },
  { id: "us", title: "time", width: "80px", value: (row) => row.us },
  { id: "count", title: "invocations", width: "100px", value: (row) => row.count },
  { id: "mean", title: "each", width: "80px", value: (row) => (row.count ? row.us / row.count : 0) },
  { id: "floor", title: "× floor", width: "76px", value: (row) => row.overFloor ?? -1 },
  { id: "graph", title: "in graphs", width: "86px", value: (row) => row.graph },
  { id: "gpu", title: "profiled", width: "84px", value: (row) => row.gpu },
  { id: "source", title: "source", width: "minmax(110px, 1fr)", text: true, value: (row) => row.source },
  { id: "family", title: "family", width: "minmax(110px, 1fr)", text: true, value: (row) => row.family },
  { id: "seam", title: "seam", width: "88px", text: true, value: (row) => row.seam },
  { id: "reference", title: "reference", width: "100px", text: true, value: (row) => row.reference },
];
const TEMPLATE = COLUMNS.map((column) => column.width).join(" ");

function Kernels({ model, query, setQuery, openCall, openGroup }) {
  const [by, setBy] = useState("kernel");
  const [phase, setPhase] = useState("");
  const [sort, setSort] = useState({ column: "us", down: true });
  const [opened, setOpened] = useState(new Set());
  const chosen = phase === "" ? null : phase;
  const places = useMemo(() => model.find(query, chosen), [query, chosen]);
  const groups = useMemo(() => groupRows(model, by, places, chosen), [by, places, chosen]);
  const rows = useMemo(() => flatten(model, sorted(groups, sort), opened, by, chosen, sort), [groups, sort, opened]);
  const sum = useMemo(() => model.sum(places, chosen), [places, chosen]);
  const whole = useMemo(() => model.sum(model.calls.id.keys(), chosen).us, [chosen]);
  const toggle = (key, open) => {
    const next = new Set(opened);
    if (open ?? !next.has(key)) next.add(key);
    else next.delete(key);
    setOpened(next);
  };
  const changeSort = (column) => setSort({ column: column.id, down: sort.column === column.id ? !sort.down : !column.text });
  const shown = { grid: { rows, whole, toggle, openCall, openGroup }, sort, changeSort };
  return html`<${Section} id="kernels" title="Which kernels, on what, how far from the floor?"
    note="The floor is the least that the device could take for a kernel's bytes and FLOPs. A seam is where the engine lets itself be given another kernel.">
    <div class="filters">
      <label>Search <input type="search" value=${query} onInput=${(event) => setQuery(event.target.value)} placeholder="gemm bf16 4096" /></label>
      <label>Rows are <select value=${by} onChange=${(event) => setBy(event.target.value)}>
        ${GROUPINGS.map(([value, text]) => html`<option value=${value}>${text}</option>`)}
      </select></label>
      <label>Phase <select value=${phase} onChange=${(event) => setPhase(event.target.value)}>
        <option value="">all</option>
        ${model.phases.map((name) => html`<option value=${name}>${name}</option>`)}
      </select></label>
    </div>
    <${Grid} model=${model} ...${shown} />
    <p class="sum" role="status">
      ${plural(groups.length, by === "call" ? "Call" : "kernel")}${by === "call" ? "" : `, ${plural(places.length, "Call")}`},
      <span> </span><b data-sum="count">${formatCount(sum.count)}</b> invocations${model.timed && whole ? html`, <b data-sum="us">${formatTime(sum.us)}</b>, ${formatShare(sum.us / whole)} of ${chosen || "all"} time` : ""}
    </p>
    <p class="keys">Keys in the table: ↑ ↓ Page Home End move, → opens a kernel or a Call, ← closes, i shows a kernel's shapes.</p>
  <//>`;
}

/** Rows of kernels: the group's sums, and in words what its Calls have in common. */
function groupRows(model, by, places, phase) {
  const { calls } = model;
  return model.group(by, places, phase).map((group) => {
    const several = (texts) => [...new Set(texts)].filter(Boolean).sort().join(", ");
    const kernels = [...new Set(group.places.map((place) => calls.kernel[place]))].map((place) => calls.kernels[place]);
    const first = group.places[0];
    return {
      ...group,
      key: `${by} ${group.name}`,
      name: by === "call" ? calls.names[calls.operator[first]] : group.name,
      call: by === "call" ? first : null,
      source: several(group.places.map((place) => calls.names[calls.source[place]])),
      family: several(kernels.map((kernel) => kernel.family)),
      seam: several(group.places.map((place) => calls.names[calls.seam[place]])) || "none",
      reference: several(kernels.map((kernel) => referenceOf(model, kernel))),
    };
  });
}

function referenceOf(model, kernel) {
  if (!kernel.definition) return "";
  return Object.hasOwn(model.references, kernel.name) ? model.references[kernel.name] : "unchecked";
}

function sorted(rows, sort) {
  const column = COLUMNS.find((one) => one.id === sort.column);
  const sign = sort.down ? -1 : 1;
  const order = (a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (column.text) return sign * String(x).localeCompare(String(y));
    return sign * (x - y);
  };
  return [...rows].sort((a, b) => order(a, b) || b.us - a.us);
}

/** Kernels, each that is open followed by its Calls. */
function flatten(model, groups, opened, by, phase, sort) {
  const rows = [];
  groups.forEach((group, place) => {
    const isOpen = group.call === null && opened.has(group.key);
    rows.push({ ...group, depth: 1, isOpen, set: groups.length, position: place + 1 });
    if (!isOpen) return;
    const inside = sorted(groupRows(model, "call", group.places, phase), sort);
    inside.forEach((row, at) => rows.push({ ...row, key: `${group.key} ${row.call}`, depth: 2, isOpen: false, set: inside.length, position: at + 1, parent: rows.length }));
  });
  return rows;
}

function Grid({ model, grid, sort, changeSort }) {
  const { rows } = grid;
  const ref = useRef(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(480);
  const [active, setActive] = useState(0);
  const here = Math.min(active, Math.max(rows.length - 1, 0));
  useLayoutEffect(() => setHeight(ref.current.clientHeight), []);
  const go = (row) => {
    const next = Math.max(0, Math.min(rows.length - 1, row));
    setActive(next);
    const box = ref.current;
    const [above, below] = [next * ROW, (next + 2) * ROW - box.clientHeight];
    if (box.scrollTop > above) box.scrollTop = above;
    else if (box.scrollTop < below) box.scrollTop = below;
  };
  const first = Math.max(0, Math.floor(top / ROW) - SPARE);
  const last = Math.min(rows.length, Math.ceil((top + height) / ROW) + SPARE);
  const onKey = (event) => {
    if (event.target !== ref.current || event.ctrlKey || event.metaKey || event.altKey) return;
    if (press(event.key, rows, here, go, grid, Math.floor(height / ROW) - 2)) event.preventDefault();
  };
  return html`<div class="grid" ref=${ref} tabindex="0" role="treegrid" aria-label="Kernels" aria-rowcount=${rows.length + 1}
    aria-colcount=${COLUMNS.length} aria-activedescendant=${here >= first && here < last ? `row-${here}` : null} onKeyDown=${onKey}
    onScroll=${(event) => { setTop(event.target.scrollTop); setHeight(event.target.clientHeight); }}>
    <div class="row head" role="row" aria-rowindex="1" style=${{ gridTemplateColumns: TEMPLATE }}>
      ${COLUMNS.map((column) => html`<div role="columnheader" class=${column.text ? "" : "n"}
        aria-sort=${sort.column === column.id ? (sort.down ? "descending" : "ascending") : "none"}>
        <button type="button" onClick=${() => changeSort(column)}>${column.title}${sort.column === column.id ? (sort.down ? " ↓" : " ↑") : ""}</button>
      </div>`)}
    </div>
    <div class="rows" role="rowgroup" style=${{ height: `${rows.length * ROW}px` }}>
      ${rows.slice(first, last).map((row, place) => html`<${GridRow} key=${row.key} model=${model} row=${row} place=${first + place}
        whole=${grid.whole} onShapes=${() => grid.openGroup(row)} active=${first + place === here} onClick=${() => { setActive(first + place); activate(row, grid); }} />`)}
    </div>
    ${rows.length === 0 && html`<p class="none">No kernel holds these words.</p>`}
  </div>`;
}

function activate(row, grid) {
  if (row.call !== null) grid.openCall(row.call);
  else grid.toggle(row.key);
}

/** What a key does; false for one that the table does not know. */
function press(key, rows, here, go, grid, page) {
  const row = rows[here];
  if (!row) return false;
  const moves = { ArrowDown: here + 1, ArrowUp: here - 1, PageDown: here + page, PageUp: here - page, Home: 0, End: rows.length - 1 };
  if (key in moves) go(moves[key]);
  else if (key === "Enter" || key === " ") activate(row, grid);
  else if (key === "ArrowRight" && !row.isOpen) activate(row, grid);
  else if (key === "ArrowRight") go(here + 1);
  else if (key === "ArrowLeft" && row.isOpen) grid.toggle(row.key, false);
  else if (key === "ArrowLeft" && row.depth === 2) go(here - row.position);
  else if (key === "i") grid.openGroup(row);
  else return false;
  return true;
}

function GridRow({ model, row, place, whole, active, onClick, onShapes }) {
  const share = row.us / whole;
  const shapes = (event) => {
    event.stopPropagation();
    onShapes();
  };
  const signature = row.call === null ? "" : model.calls.signature[row.call];
  const cells = {
    name: html`<span class="mark" aria-hidden="true">${row.call !== null ? "" : row.isOpen ? "▾" : "▸"}</span>
      <${Swatch} color=${model.colorOfCall(row.places[0])} /><span>${row.depth === 2 ? signature || "no arguments" : row.name}</span>
      <span class="dim"> ${row.call === null ? plural(row.places.length, "Call") : row.depth === 2 ? row.name : signature}</span>
      ${row.call === null && html`<button type="button" tabindex="-1" class="shapes" onClick=${shapes}>shapes</button>`}`,
    share: html`<span class="fill" style=${{ width: `${100 * share}%` }} aria-hidden="true"></span><span>${row.timed ? formatShare(share) : ""}</span>`,
    us: row.timed && model.timed ? formatTime(row.us) : "",
    count: formatCount(row.count),
    mean: row.timed && model.timed && row.count ? formatTime(row.us / row.count) : "",
    floor: row.timed && model.report.mix_measured ? formatTimes(row.overFloor) : "",
    graph: row.graph ? formatShare(row.graph / row.count) : "·",
    gpu: row.gpu ? formatTime(row.gpu) : "·",
    source: row.source,
    family: row.family,
    seam: row.seam,
    reference: row.reference,
  };
  return html`<div id=${`row-${place}`} role="row" class=${`row depth-${row.depth}${active ? " active" : ""}`} aria-rowindex=${place + 2} aria-level=${row.depth}
    aria-setsize=${row.set} aria-posinset=${row.position} aria-expanded=${row.call === null ? String(row.isOpen) : null}
    style=${{ gridTemplateColumns: TEMPLATE, top: `${place * ROW}px` }} onClick=${onClick}>
    ${COLUMNS.map((column) => html`<div role="gridcell" data-column=${column.id} class=${column.text ? "" : "n"}
      title=${column.id === "name" ? `${row.name} ${signature}` : null}>${cells[column.id]}</div>`)}
  </div>`;
}

// In place of kernels: a dataset's Definitions: how much there is of each; one opens into its reference and the sizes of its Workloads.

const DEFINITION_COLUMNS = [["definition", ""], ["type", ""], ["invocations", "n"], ["Workloads", "n"], ["Solutions", "n"], ["Traces", "n"], ["reference", ""], ["axes", ""]];

function Definitions({ model }) {
  const { definitions } = model.report;
  const [words, setWords] = useState("");
  const [chosen, setChosen] = useState(null);
  const found = definitions.filter((one) => words.toLowerCase().split(/\s+/).every((word) => `${one.name} ${one.op_type}`.toLowerCase().includes(word)));
  const axes = (one) => Object.entries(one.axes).map(([name, size]) => `${name}=${size ?? "·"}`).join(", ");
  const rows = found.map((one) => ({
    cells: [html`<button type="button" class="link" onClick=${() => setChosen(one)}>${one.name}</button>`, one.op_type, one.count ? formatCount(one.count) : "·", formatCount(one.workloads), one.solutions || "·", one.traces || "·", one.reference, axes(one)],
  }));
  return html`<${Section} id="definitions" title="Which Definitions, on how many Workloads?" note="An axis of · varies from Workload to Workload.">
    <div class="filters"><label>Search <input type="search" value=${words} onInput=${(event) => setWords(event.target.value)} placeholder="gemm" /></label></div>
    <${PlainTable} caption="Definitions" columns=${DEFINITION_COLUMNS} rows=${rows} />
    <p class="sum" role="status">${plural(found.length, "Definition")}, <b data-sum="workloads">${formatCount(found.reduce((sum, one) => sum + one.workloads, 0))}</b> Workloads</p>
    ${chosen && html`<${DefinitionDialog} key=${chosen.name} model=${model} definition=${chosen} onClose=${() => setChosen(null)} />`}
  <//>`;
}

function DefinitionDialog({ model, definition, onClose }) {
  const [details, setDetails] = useState(null);
  useEffect(() => {
    model.detail().then(setDetails);
  }, []);
  const text = details && details.definitions[definition.name];
  return html`<${Dialog} title=${definition.name} onClose=${onClose}>
    ${!text ? html`<p role="status">Unpacking…</p>` : html`<p>${text.description}</p>
        <ul>${[...text.tensors, ...text.constraints].map((line) => html`<li>${line}</li>`)}</ul>
        <h3>Reference, ${definition.reference}</h3><${Code} label="Reference" text=${text.reference} />`}
    ${Object.entries(definition.sizes).map(([axis, values]) => html`<h3>${axis}, by Workloads</h3><${Bars} values=${values} unit="" of="Workloads" />`)}
  <//>`;
}
