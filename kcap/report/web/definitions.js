// A dataset's Definitions: how much there is of each; one opens into its reference and the sizes of its Workloads.

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
