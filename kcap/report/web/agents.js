// An agent trace: what the prefix cache had, sessions as timelines of turns and tool calls, and of a turn its messages and kernels.

const SESSIONS = 20; // shown at once
const SESSION_ROW = 26;
const SESSION_LABEL = 96; // pixels
const TURN_HEIGHT = 16;
const LEAST_TURN = 2; // pixels
const TURN_KERNELS = 12;
const TURN_FAMILIES = 4; // columns
const TURN_COUNTS = [["prompt", "prompt"], ["cached", "found"], ["computed", "computed"], ["missed", "missed"], ["again", "again"], ["generated", "generated"], ["steps", "steps"]];

function Agents({ model, agents, openCall, onKernel }) {
  const [words, setWords] = useState("");
  const [most, setMost] = useState(SESSIONS);
  const [chosen, setChosen] = useState(0);
  const [turn, setTurn] = useState(null);
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const holds = (session) => {
    const text = [session.row.name, ...session.turns.map((one) => one.row.name)].join("\n").toLowerCase();
    return wanted.every((word) => text.includes(word));
  };
  const places = useMemo(() => [...agents.sessions.keys()].filter((place) => holds(agents.sessions[place])), [words]);
  const shown = places.slice(0, most);
  const session = places.includes(chosen) ? agents.sessions[chosen] : agents.sessions[places[0]];
  const turns = agents.sessions.reduce((sum, one) => sum + one.turns.length, 0);
  return html`<${Section} id="agents" title="What did each turn of the agents cost?" note=${`${plural(agents.sessions.length, "session")} of ${plural(turns, "turn")}, ${plural(agents.total.requests, "request")}.`}>
    ${agents.total.prompt > 0 && html`<${PrefixCache} total=${agents.total} />`}
    <ul class="notes">${agents.notes.map((line) => html`<li>${line}</li>`)}</ul>
    <div class="filters"><label>Search <input type="search" value=${words} onInput=${(event) => { setWords(event.target.value); setMost(SESSIONS); }} placeholder="a tool, or how a turn ended" /></label></div>
    ${shown.length === 0 ? html`<p>No session holds these words.</p>` : html`<${Timelines} sessions=${shown.map((place) => agents.sessions[place])} onTurn=${setTurn} />
      <${PlainTable} caption="Sessions" columns=${turnColumns("session", agents)} rows=${shown.map((place) => turnCells(agents, agents.sessions[place].row, () => setChosen(place)))} />
      ${places.length > shown.length && html`<p><button type="button" class="plain" onClick=${() => setMost(most + SESSIONS)}>More sessions</button> ${formatCount(places.length - shown.length)} are not shown.</p>`}
      <h3 data-session=${session.row.number}>Turns of session ${session.row.name}</h3>
      <${PlainTable} caption="Turns of the session" columns=${turnColumns("turn", agents)} rows=${session.turns.map((one) => turnCells(agents, one.row, () => setTurn(one)))} />`}
    ${turn && html`<${TurnDialog} model=${model} agents=${agents} turn=${turn} openTurn=${setTurn} openCall=${openCall} onKernel=${onKernel} />`}
  <//>`;
}

/** What of the prompts the cache had, and what was computed twice. */
function PrefixCache({ total }) {
  const most = Math.max(total.prompt, total.computed);
  const rows = [
    ["prompts", total.prompt, "tokens"],
    ["found in the prefix cache", total.cached, "need not be computed"],
    ["missed", total.missed, "an earlier prompt began with them, and the cache did not have them"],
    ["computed", total.computed, "of prompts"],
    ["again", total.again, "computed a second time, after an interruption"],
  ];
  return html`<div class="wide" tabindex="0" role="region" aria-label="Tokens of prompts"><table class="pairs"><tbody>
    ${rows.map(([name, tokens, what]) => html`<tr data-tokens=${name}><th scope="row">${name}</th><td><span class="line a"><span class="fill" style=${{ width: `${(50 * tokens) / most}%` }} aria-hidden="true"></span>
      <span><b>${formatCount(tokens)}</b> (${formatShare(tokens / total.prompt)}) ${what}</span></span></td></tr>`)}
  </tbody></table></div>`;
}

/** The columns of a table of sessions or turns: only those of which any has something. */
function turnColumns(first, agents) {
  const counts = TURN_COUNTS.filter(([name]) => agents.total[name]).map(([, title]) => [title, "n"]);
  const families = agents.families.slice(0, TURN_FAMILIES).map((name) => [name, "n"]);
  return [[first, ""], ...counts, ...(agents.timed ? [["steps, whole", "n"], ["its share", "n"], ...families] : [])];
}

function turnCells(agents, row, onClick) {
  const counts = TURN_COUNTS.filter(([name]) => agents.total[name]).map(([name]) => (row[name] ? formatCount(row[name]) : "·"));
  const families = agents.families.slice(0, TURN_FAMILIES).map((name) => familyTime(row, name));
  const times = agents.timed ? [row.steps_us, row.gpu_us, ...families].map((us) => (us ? formatTime(us) : "·")) : [];
  return { cells: [html`<button type="button" class="link" onClick=${onClick}>${row.name}</button>`, ...counts, ...times] };
}

function familyTime(row, name) {
  return Object.hasOwn(row.families, name) ? row.families[name] : 0;
}

/** A line a session: bars of its turns, light until the first bytes of the answer, and below them the tools between. */
function Timelines({ sessions, onTurn }) {
  const [ref, width] = useWidth();
  const [together, setTogether] = useState(false);
  const startOf = (session) => Math.min(...session.turns.map((turn) => turn.sent));
  const endOf = (session) => session.turns.reduce((end, turn) => Math.max(end, turn.ended), 0);
  const first = Math.min(...sessions.map(startOf));
  const span = Math.max(...sessions.map((session) => endOf(session) - (together ? startOf(session) : first)), 1e-6);
  const axis = axisOf(span * 1e6, [], width - SESSION_LABEL - 8);
  const height = sessions.length * SESSION_ROW + 24;
  const said = `${plural(sessions.length, "session")} in ${formatTime(span * 1e6)}; the tables below have the same turns`;
  return html`<div ref=${ref}>
    <div class="filters"><button type="button" class="plain" aria-pressed=${String(together)} onClick=${() => setTogether(!together)}>Each from its start</button>
      <span class="dim">A turn is light until the answer begins; the line below is the time that its tools had.</span></div>
    <svg class="figure timelines" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${said}>
      ${ticksOf(span * 1e6, axis).map((at) => html`<g class="tick"><line x1=${SESSION_LABEL + axis.x(at)} x2=${SESSION_LABEL + axis.x(at)} y1="0" y2=${height - 20} />
        <text x=${SESSION_LABEL + axis.x(at) + 3} y=${height - 6}>${formatTime(at)}</text></g>`)}
      ${sessions.map((session, place) => html`<${Timeline} session=${session} y=${place * SESSION_ROW} from=${together ? startOf(session) : first} axis=${axis} onTurn=${onTurn} />`)}
    </svg></div>`;
}

function Timeline({ session, y, from, axis, onTurn }) {
  const x = (seconds) => SESSION_LABEL + axis.x((seconds - from) * 1e6);
  const bar = (begin, end, color, opacity) => html`<rect x=${x(begin)} y=${y + 2} width=${Math.max(x(end) - x(begin), 0)} height=${TURN_HEIGHT} style=${{ fill: color, fillOpacity: opacity }} />`;
  return html`<g><text class="axis" x="0" y=${y + TURN_HEIGHT - 2}>session ${session.row.number}</text>
    ${session.turns.map((turn, place) => {
      const next = session.turns[place + 1];
      const color = turn.sound ? "var(--c-0)" : "var(--bad)";
      const answer = turn.first === null ? turn.ended : Math.min(Math.max(turn.first, turn.sent), turn.ended);
      return html`<g>
        ${next && turn.tools.length > 0 && next.sent > turn.ended && html`<rect data-tools=${turn.row.number} x=${x(turn.ended)} y=${y + TURN_HEIGHT + 3} width=${Math.max(x(next.sent) - x(turn.ended), LEAST_TURN)} height="4" style=${{ fill: "var(--c-1)" }}><title>${turn.tools.join(", ")}: ${formatTime((next.sent - turn.ended) * 1e6)}</title></rect>`}
        <g class="turn" data-turn=${turn.row.number} onClick=${() => onTurn(turn)}><title>${turnTitle(turn)}</title>
          ${bar(turn.sent, Math.max(turn.ended, turn.sent + LEAST_TURN / (axis.scale * 1e6)), color, 0.45)}${bar(answer, turn.ended, color, 1)}</g>
      </g>`;
    })}</g>`;
}

function turnClock(turn) {
  const begins = turn.first === null ? "" : `, the answer begins after ${formatTime((turn.first - turn.sent) * 1e6)}`;
  return `${formatTime((turn.ended - turn.sent) * 1e6)} at ${formatTime(turn.sent * 1e6)}${begins}`;
}

function turnTitle(turn) {
  const facts = [turnClock(turn)];
  if (turn.row.prompt) facts.push(`${plural(turn.row.prompt, "token")} of the prompt, ${formatCount(turn.row.cached)} found in the cache, ${formatCount(turn.row.generated)} generated`);
  return `${turn.row.name}: ${facts.join("; ")}`;
}

function TurnDialog({ model, agents, turn, openTurn, openCall, onKernel }) {
  const [details, setDetails] = useState(null);
  useEffect(() => {
    model.detail().then(setDetails);
  }, []);
  const text = details && details.agents.turns[turn.row.number];
  const leave = (then) => {
    openTurn(null);
    then();
  };
  const facts = [["time", turnClock(turn)], ...TURN_COUNTS.map(([name, title]) => [name === "steps" ? title : `tokens, ${title}`, turn.row[name] ? formatCount(turn.row[name]) : ""]), ["calls tools", turn.tools.join(", ")], ...(text ? text.facts : [])];
  return html`<${Dialog} title=${turn.row.name} onClose=${() => openTurn(null)}>
    <dl>${facts.filter(([, fact]) => fact).map(([name, fact]) => html`<div><dt>${name}</dt><dd>${fact}</dd></div>`)}</dl>
    ${agents.timed && html`<${TurnTimes} model=${model} agents=${agents} row=${turn.row} onFamily=${(name) => leave(() => onKernel(name))} />`}
    ${!text ? html`<p role="status">Unpacking…</p>` : html`<${TurnSteps} key=${turn.row.number} model=${model} row=${turn.row} text=${text} programs=${details.agents.programs} onCall=${(place) => leave(() => openCall(place))} />
      <h3>What it was sent</h3><${TurnParent} agents=${agents} text=${text} openTurn=${openTurn} />
      ${text.messages.map((message) => html`<${TurnMessage} message=${message} />`)}
      <h3>What it answered</h3>${text.answers.map((message) => html`<${TurnMessage} message=${message} />`)}
      ${text.answers.length === 0 && html`<p>Nothing that was read.</p>`}
      ${![...text.messages, ...text.answers].some((message) => message.texts.length) && html`<p class="dim">Texts were not kept: kcap record --keep-text keeps them.</p>`}`}
  <//>`;
}

/** Its share of its steps by family; a family that the kernels have leads to them. */
function TurnTimes({ model, agents, row, onFamily }) {
  const families = Object.entries(row.families).filter(([, us]) => us > 0).sort((a, b) => b[1] - a[1]);
  const most = families.length ? families[0][1] : 1;
  const known = new Set(model.calls.kernels.map((kernel) => kernel.family));
  return html`<h3>Its time by family: ${formatTime(row.gpu_us)} of ${formatTime(row.steps_us)} that its steps took, whole</h3>
    <table class="bars"><tbody>${families.map(([name, us]) => html`<tr data-family=${name}><th scope="row">${known.has(name) ? html`<button type="button" class="link" onClick=${() => onFamily(name)}>${name}</button>` : name}</th>
      <td><span class="line"><span class="fill" style=${{ width: `${(70 * us) / most}%` }} aria-hidden="true"></span><span>${formatTime(us)}</span></span></td></tr>`)}</tbody></table>
    <ul class="notes">${agents.notes.map((line) => html`<li>${line}</li>`)}</ul>`;
}

/** The kernels of the listed steps that it was in, which ran for all requests of their batches. */
function TurnSteps({ model, row, text, programs, onCall }) {
  const [all, setAll] = useState(false);
  const steps = text.programs.reduce((sum, [, count]) => sum + count, 0);
  const counts = new Map();
  for (const [program, times] of text.programs) {
    for (const [call, count] of programs[program]) counts.set(call, (counts.get(call) || 0) + count * times);
  }
  const rows = [...counts].map(([call, count]) => [model.placeOfCall.get(call), count]).filter(([place]) => place !== undefined).sort((a, b) => a[0] - b[0]);
  if (rows.length === 0) return null;
  const shown = rows.slice(0, all ? rows.length : TURN_KERNELS).map(([place, count]) => ({
    cells: [html`<button type="button" class="link" onClick=${() => onCall(place)}>${model.key("kernel", place)}</button>`, model.family(place), model.calls.signature[place], formatCount(count)],
  }));
  return html`<h3>Kernels of its steps</h3>
    <p class="dim">Of ${formatCount(steps)} of its ${plural(row.steps, "step")}, those that the Recording lists; each ran for its whole batch.</p>
    <${PlainTable} caption="Kernels of its steps" columns=${[["kernel", ""], ["family", ""], ["on", ""], ["invocations", "n"]]} rows=${shown} />
    ${rows.length > TURN_KERNELS && html`<button type="button" class="plain" onClick=${() => setAll(!all)}>${all ? "Fewer" : `All ${formatCount(rows.length)}`}</button>`}`;
}

function TurnParent({ agents, text, openTurn }) {
  const parent = text.parent !== null && agents.sessions.flatMap((session) => session.turns).find((turn) => turn.row.number === text.parent);
  if (!parent) return null;
  return html`<p>It goes on with ${plural(text.shared, "message")} of <button type="button" class="link" onClick=${() => openTurn(parent)}>${parent.row.name}</button></p>`;
}

function TurnMessage({ message }) {
  return html`<div class="message"><p><b>${message.role}</b> <span class="dim">${message.facts}</span></p>
    ${message.texts.map(([name, text]) => html`<${Fragment}>${name !== "content" && html`<p class="dim">${name}</p>`}<${Code} label=${`${name} of ${message.role}`} text=${text} /><//>`)}</div>`;
}
