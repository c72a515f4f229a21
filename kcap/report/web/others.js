// What other commands found out: a second Recording, judged Solutions, replay against the engine; and what is not known.

const FIRST_LINES = 15;

function Against({ against }) {
  return html`<${Section} id="against" title="What is different in the other Recording?" note=${`A: ${against.a}. B: ${against.b}. Counts and times are of one step and one rank.`}>
    ${against.warnings.map((text) => html`<p class="warn">${text}</p>`)}
    ${against.phases.map((phase) => html`<${AgainstPhase} phase=${phase} />`)}
    ${Object.entries(against.phases_of_one).map(([phase, steps]) => html`<p class="warn">${phase}: ${plural(steps.a, "step")} in A, ${formatCount(steps.b)} in B: not compared.</p>`)}
    ${against.equal && html`<p>Both run the same kernels as often.</p>`}
  <//>`;
}

function AgainstPhase({ phase }) {
  const [all, setAll] = useState(false);
  const timed = phase.a.us_per_step !== null && phase.b.us_per_step !== null;
  const size = (side) => (side ? (timed ? side.us_per_step || 0 : side.per_step) : 0);
  const families = new Map();
  for (const line of phase.lines) {
    const name = line.purpose || "of no family";
    const sum = families.get(name) || { a: 0, b: 0, lines: [] };
    sum.a += size(line.a);
    sum.b += size(line.b);
    sum.lines.push(line);
    families.set(name, sum);
  }
  for (const [side, letter] of [[phase.a, "a"], [phase.b, "b"]]) {
    for (const [name, us] of timed ? Object.entries(side.us_within) : []) {
      if (!families.has(name)) families.set(name, { a: 0, b: 0, lines: [] });
      families.get(name)[letter] += us;
    }
  }
  const groups = [...families].sort((x, y) => Math.max(y[1].a, y[1].b) - Math.max(x[1].a, x[1].b));
  const most = Math.max(...groups.map(([, sum]) => Math.max(sum.a, sum.b)), 1e-9);
  const text = (value) => (timed ? formatTime(value) : digits(value));
  const lines = groups.flatMap(([name, sum]) => sum.lines.map((line) => [name, line]));
  const rows = lines.slice(0, all ? lines.length : FIRST_LINES).map(([name, line]) => ({
    cells: [line.name, name, ...[line.a, line.b].flatMap((side) => [side ? digits(side.per_step) : "·", ...(timed ? [side && side.us_per_step !== null ? formatTime(side.us_per_step) : "·"] : [])]), whoRuns(line)],
  }));
  const numbers = timed ? [["A a step", "n"], ["A time", "n"], ["B a step", "n"], ["B time", "n"]] : [["A a step", "n"], ["B a step", "n"]];
  return html`<h3>${phase.phase}: ${plural(phase.a.steps, "step")} in A${timed ? `, ${formatTime(phase.a.us_per_step)} each` : ""}; ${formatCount(phase.b.steps)} in B${timed ? `, ${formatTime(phase.b.us_per_step)} each` : ""}</h3>
    ${!phase.same_batches && html`<p class="warn">Batches differ: counts of a step compare, times and shapes do not.</p>`}
    <div class="wide" tabindex="0" role="region" aria-label=${`Families of ${phase.phase} in both`}><table class="pairs">
      <thead><tr><th scope="col">family</th><th scope="col">${timed ? "time" : "invocations"} of a step</th></tr></thead>
      <tbody>${groups.map(([name, sum]) => html`<tr><th scope="row">${name}</th><td>
        <span class="line a">A <span class="fill" style=${{ width: `${(66 * sum.a) / most}%` }} aria-hidden="true"></span><span>${text(sum.a)}</span></span>
        <span class="line b">B <span class="fill" style=${{ width: `${(66 * sum.b) / most}%` }} aria-hidden="true"></span><span>${text(sum.b)}</span></span>
      </td></tr>`)}</tbody>
    </table></div>
    <${PlainTable} caption=${`Kernels of ${phase.phase} in both`} columns=${[["kernel", ""], ["family", ""], ...numbers, ["who runs it", ""]]} rows=${rows} />
    ${lines.length > FIRST_LINES && html`<button type="button" class="plain" onClick=${() => setAll(!all)}>${all ? "Fewer" : `All ${lines.length}`}</button>`}`;
}

function whoRuns(line) {
  if (line.a === null) return "only B";
  return line.b === null ? "only A" : "both";
}

/** Two Recordings, trace files or datasets compared Call by Call. */
function AgainstCalls({ against }) {
  const rows = against.names.slice(0, FIRST_LINES).map((row) => ({ cells: [row.name, formatCount(row.a), formatCount(row.b), `${row.b > row.a ? "+" : ""}${formatCount(row.b - row.a)}`] }));
  return html`<${Section} id="against" title="What is different in the other one?" note=${`A: ${against.a}. B: ${against.b}.`}>
    ${against.equal ? html`<p>Nothing: both hold the same, as often.</p>` : html`<${PlainTable} caption="Invocations in both" columns=${[["name", ""], ["A", "n"], ["B", "n"], ["B - A", "n"]]} rows=${rows} />
      <p>${plural(against.only_a.length, "entry")} only in A, ${formatCount(against.only_b.length)} only in B, ${formatCount(against.changed.length)} in both but different.</p>`}
  <//>`;
}

function JudgedSection({ model, judged }) {
  return html`<${Section} id="judged" title="How did the judged Solutions do?" note=${judged.machine}>
    ${judged.solutions.map((solution) => html`<${JudgedSolution} model=${model} solution=${solution} />`)}
    ${judged.solutions.length === 0 && html`<p>None was judged.</p>`}
    ${judged.refused.length > 0 && html`<h3>Refused</h3><ul>${judged.refused.map((text) => html`<li>${text}</li>`)}</ul>`}
  <//>`;
}

/** The engine's own kernel, where the Recording has one of this Definition and its time: the mean of its invocations. */
function engineTime(model, definition) {
  const engine = model.timed && model.report.mix_measured && model.group("kernel").find((group) => group.name === definition);
  return engine && engine.timed && engine.count ? `; the engine's kernel takes ${formatTime(engine.us / engine.count)} on average` : "";
}

function JudgedSolution({ model, solution }) {
  const times = solution.weighted === null ? "not ranked" : `${solution.weighted.toFixed(2)}× its reference by count, ${solution.geometric_mean.toFixed(2)}× by Workload`;
  const most = Math.max(...solution.workloads.flatMap((one) => [one.us || 0, one.reference_us || 0]), 1e-9);
  const bar = (kind, us) => us !== null && html`<span class=${`line ${kind}`}><span class="fill" style=${{ width: `${(76 * us) / most}%` }} aria-hidden="true"></span><span>${formatTime(us)}</span></span>`;
  return html`<details open class="solution"><summary><b>${solution.name}</b> for ${solution.definition}: ${solution.passed} of ${solution.workloads.length} passed, ${times}${engineTime(model, solution.definition)}</summary>
    <div class="wide" tabindex="0" role="region" aria-label=${`Workloads of ${solution.name}`}><table class="pairs">
      <thead><tr><th scope="col">Workload</th><th scope="col">Solution above, reference below</th><th scope="col" class="n">floor</th><th scope="col" class="n">count</th><th scope="col">verdict</th></tr></thead>
      <tbody>${solution.workloads.map((one) => html`<tr><th scope="row">${one.workload}</th>
        <td>${bar("a", one.us)}${bar("b", one.reference_us)}</td>
        <td class="n">${formatTime(one.floor_us)}</td>
        <td class="n">${one.count === null ? "" : formatCount(one.count)}</td>
        <td><b class=${one.status === "PASSED" ? "good" : "bad"}>${one.status}</b> ${one.reason}
          ${one.log && html`<details><summary>what it printed</summary><${Code} label="What it printed" text=${one.log} /></details>`}</td></tr>`)}</tbody>
    </table></div></details>`;
}

/** A change of a step's time, as a share of it, with half of its interval. */
function formatChange(us, half, of) {
  const sign = us > 0 ? "+" : us < 0 ? "−" : "";
  return `${sign}${formatShare(Math.abs(us) / of)}${half === null ? "" : ` ± ${formatShare(half / of)}`}`;
}

const MIDDLE = 110, REACH = 100; // px, of the figure of one change

function AppliedSection({ applied }) {
  const rows = applied.plans.flatMap((plan) => plan.compared.filter((one) => one.solutions !== null).map((one) => ({ plan, one })));
  const useless = applied.plans.filter((plan) => !plan.compared.some((one) => one.held));
  const most = reachOf(rows.map(({ one }) => one));
  return html`<${Section} id="applied" title="What did Solutions change in the engine?" note="The time of a step with Solutions against one with the engine's own kernels: left of the line it is faster. A dot with its 95 % interval is what was measured, a diamond what the judge's times predict; the grey band is the engine against itself.">
    ${rows.length > 0 && html`<div class="wide" tabindex="0" role="region" aria-label="What each plan changed"><table class="pairs changes">
      <thead><tr><th scope="col">plan</th><th scope="col">faster · slower, up to ${formatShare(most)}</th><th scope="col" class="n">measured</th><th scope="col" class="n">predicted</th><th scope="col" class="n">control</th><th scope="col">step</th><th scope="col" class="n">steps</th><th scope="col" class="n">engine's own</th><th scope="col" class="n">ran a Solution</th><th scope="col" class="n">KL of logits</th></tr></thead>
      <tbody>${rows.map(({ plan, one }) => html`<tr><th scope="row" title=${Object.keys(plan.solutions).join(", ")}>${fileName(plan.plan)}</th>
        <td><${ChangeFigure} one=${one} most=${most} /></td>
        <td class="n">${formatChange(one.solutions.us, one.solutions.half_interval_us, one.engine_us)}</td>
        <td class="n">${one.held ? formatChange(one.predicted_us, null, one.engine_us) : "–"}</td>
        <td class="n">${one.control ? formatChange(one.control.us, one.control.half_interval_us, one.engine_us) : "–"}</td>
        <td class="kind">${one.phase}, ${plural(one.sequences, "sequence")}</td><td class="n">${formatCount(one.steps)}</td>
        <td class="n">${formatTime(one.engine_us)}</td><td class="n">${formatShare(one.held)}</td><td class="n">${divergence(applied.quality[plan.plan])}</td></tr>`)}</tbody>
    </table></div>`}
    ${rows.length === 0 && html`<p class="warn">No kind of step was measured with and without a plan.</p>`}
    ${useless.map((plan) => html`<p class="warn">${fileName(plan.plan)}: no Solution ran in any step: nothing was measured of it.</p>`)}
    ${applied.fresh && html`<p>Engines started anew, ${plural(applied.fresh.engine_us.length, "pair")}: a decode step takes ${formatChange(applied.fresh.median_ratio - 1, applied.fresh.half_interval, 1)}${applied.fresh.tokens ? `, and ${formatShare(applied.fresh.tokens.same)} of ${plural(applied.fresh.tokens.requests, "request")} had the same tokens` : ""}${applied.fresh.control ? ` (${formatShare(applied.fresh.control.same)} without the plan)` : ""}.</p>`}
    ${applied.plans.length > 0 && html`<details><summary>Solutions of each plan</summary><ul>${applied.plans.map((plan) => html`<li>${plan.plan}: ${Object.keys(plan.solutions).join(", ")}</li>`)}</ul></details>`}
    ${applied.problems.length > 0 && html`<h3>What did not run as planned</h3><ul>${applied.problems.map((text) => html`<li>${text}</li>`)}</ul>`}
  <//>`;
}

/** The change that a figure reaches to: one that is far beyond the others is at its edge. */
function reachOf(compared) {
  const shares = compared.flatMap((one) => [one.solutions.us, one.predicted_us].map((us) => Math.abs(us) / one.engine_us)).sort((a, b) => a - b);
  return Math.max(Math.min(shares.at(-1) || 0, 4 * (shares[Math.floor(shares.length / 2)] || 0)), 1e-3);
}

function ChangeFigure({ one, most }) {
  const x = (us) => MIDDLE + REACH * Math.max(-1, Math.min(1, us / one.engine_us / most));
  const spread = (of) => [x(of.us - (of.half_interval_us || 0)), x(of.us + (of.half_interval_us || 0))];
  const [low, high] = spread(one.solutions);
  const band = one.control && spread(one.control);
  const at = x(one.predicted_us);
  const said = `measured ${formatChange(one.solutions.us, one.solutions.half_interval_us, one.engine_us)}, predicted ${formatChange(one.predicted_us, null, one.engine_us)}`;
  return html`<svg class="change" width=${2 * MIDDLE} height="22" viewBox=${`0 0 ${2 * MIDDLE} 22`} role="img" aria-label=${said}>
    ${band && html`<rect class="band" x=${band[0]} width=${Math.max(band[1] - band[0], 1)} y="1" height="20" />`}
    <line class="zero" x1=${MIDDLE} x2=${MIDDLE} y1="0" y2="22" />
    ${one.held > 0 && html`<path class="predicted" d=${`M ${at} 5 l 6 6 l -6 6 l -6 -6 z`} />`}
    <line class="interval" x1=${low} x2=${high} y1="11" y2="11" /><circle class="measured" cx=${x(one.solutions.us)} cy="11" r="4" />
  </svg>`;
}

function divergence(quality) {
  if (!quality) return "–";
  return quality.kl === null ? "not finite" : digits(Math.max(quality.kl, 0));
}

const fileName = (path) => path.split("/").pop().replace(/(\.plan)?\.json$/, "");

function FidelitySection({ fidelity }) {
  const rows = fidelity.kinds.flatMap((kind) => Object.entries(kind.states).map(([state, one]) => ({
    cells: [`${kind.phase}, ${plural(kind.sequences, "sequence")}, ${plural(kind.tokens, "token")}, ${kind.mode}`, state, formatTime(one.engine_us), formatTime(one.replayed_us), formatTime(one.missing_us), formatShare(one.error)],
  })));
  const outside = fidelity.kinds.flatMap((kind) => kind.outside);
  return html`<${Section} id="fidelity" title="Does replay add up to the engine's GPU time?" note=${`${formatTime(fidelity.replayed_us)} replayed for ${formatTime(fidelity.engine_us)} of the engine's, ${formatShare(fidelity.error)} off. Times below are of one step.`}>
    <${PlainTable} caption="Kinds of steps" columns=${[["step", ""], ["caches", ""], ["engine", "n"], ["replayed", "n"], ["missing", "n"], ["off", "n"]]} rows=${rows} />
    ${outside.length > 0 && html`<h3>Outside the bounds</h3><ul>${outside.map((text) => html`<li>${text}</li>`)}</ul>`}
  <//>`;
}

function Unknown({ words }) {
  return html`<${Section} id="unknown" title="What is dropped, partial or not known?">
    <div class="cards">${words.map((one) => html`<div class="card"><h3>${one.title}</h3><ul>${one.lines.map((line) => html`<li>${line}</li>`)}</ul></div>`)}</div>
  <//>`;
}
