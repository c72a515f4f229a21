// The page: what was recorded in a few numbers, then its sections in the order of a reader's questions.

function App({ model }) {
  const { report } = model;
  const [query, setQuery] = useState("");
  const [call, setCall] = useState(null);
  const [group, setGroup] = useState(null);
  const onKernel = (name) => {
    setQuery(name);
    document.getElementById("kernels").scrollIntoView();
    document.querySelector("#kernels input").focus({ preventScroll: true });
  };
  const dataset = report.kind === "dataset";
  const sections = [
    dataset && ["definitions", "Definitions", html`<${Definitions} model=${model} />`],
    !dataset && ["phases", "time", html`<${Phases} model=${model} onKernel=${onKernel} />`],
    !dataset && ["kernels", "kernels", html`<${Kernels} model=${model} query=${query} setQuery=${setQuery} openCall=${setCall} openGroup=${setGroup} />`],
    !dataset && ["roofline", "roofline", html`<${Roofline} model=${model} onKernel=${onKernel} />`],
    report.histograms.length && ["batches", "batches", html`<${Histograms} model=${model} />`],
    !dataset && ["steps", "one step", html`<${Steps} model=${model} openCall=${setCall} />`],
    report.agents && ["agents", "agents", html`<${Agents} model=${model} agents=${report.agents} openCall=${setCall} onKernel=${onKernel} />`],
    report.against && ["against", "comparison", html`<${report.against.phases ? Against : AgainstCalls} against=${report.against} />`],
    report.judged && ["judged", "judged", html`<${JudgedSection} model=${model} judged=${report.judged} />`],
    report.applied && ["applied", "gain", html`<${AppliedSection} applied=${report.applied} />`],
    report.fidelity && ["fidelity", "fidelity", html`<${FidelitySection} fidelity=${report.fidelity} />`],
    ["unknown", "not known", html`<${Unknown} words=${report.words} />`],
  ].filter(Boolean);
  return html`<${Fragment}>
    <header class="top">
      <div><h1>${report.identity}</h1><p>${report.header[1] || ""}</p></div>
      <nav aria-label="Sections">${sections.map(([id, text]) => html`<a href=${`#${id}`}>${text}</a>`)}<${SchemeButton} /></nav>
    </header>
    ${!dataset && html`<${Facts} model=${model} />`}
    ${sections.map(([id, , section]) => html`<${Fragment} key=${id}>${section}<//>`)}
    <footer>
      <p>${report.source}, drawn by kcap ${report.kcap}.</p>
      <details><summary>Licences of the libraries in this file</summary><${Code} label="Licences" text=${document.getElementById("licences").textContent} /></details>
    </footer>
    ${call !== null && html`<${CallDialog} key=${call} model=${model} place=${call} onClose=${() => setCall(null)} />`}
    ${group !== null && html`<${GroupDialog} key=${group.key} model=${model} row=${group} onClose=${() => setGroup(null)} />`}
  <//>`;
}

/** The sums that `kcap show` prints. */
function Facts({ model }) {
  const { report } = model;
  const times = [
    report.gpu_us && ["profiled", formatTime(report.gpu_us), "GPU time of the profiled steps"],
    report.mix_measured && ["mix", formatTime(model.totals.us), "of all counted steps, by these times"],
    !report.mix_measured && report.estimated_us && ["estimated", formatTime(report.estimated_us), "estimated time of all invocations"],
  ].filter(Boolean);
  const facts = [
    ["total", formatCount(report.total), "invocations of kernels"],
    ["distinct", formatCount(report.distinct), "distinct Calls"],
    ...times,
    ...(report.coverage === null ? [] : [["coverage", formatShare(report.coverage), "of the profiled GPU time is of these Calls"]]),
    ["steps", Object.entries(report.steps).map(([phase, n]) => `${formatCount(n)} ${phase}`).join(", ") || "–", "steps"],
  ];
  return html`<dl class="facts">${facts.map(([name, value, what]) => html`<div data-fact=${name}><dt>${what}</dt><dd>${value}</dd></div>`)}</dl>`;
}

async function start() {
  const root = document.getElementById("report");
  try {
    const report = await unpack(PACKED.report);
    document.title = `${report.identity} · kcap report`;
    root.textContent = "";
    render(html`<${App} model=${new Model(report)} />`, root);
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    root.textContent = `This report cannot be drawn here: ${error}. A browser of 2023 or newer draws it.`;
    throw error;
  }
}

start();
