// What several sections share: sections with a heading, a figure that knows its width, the colour scheme, a dialog.

const { h, render, Fragment } = preact;
const { useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useId } = preactHooks;
const html = htm.bind(h);

/** A section of the page: the question as its heading, what to know of the answer below. */
function Section({ id, title, note, children }) {
  return html`<section id=${id} aria-labelledby=${`${id}-title`}>
    <h2 id=${`${id}-title`}>${title}</h2>
    ${note && html`<p class="note">${note}</p>`}
    ${children}
  </section>`;
}

/** The width of an element, kept as it changes. */
function useWidth(initial = 800) {
  const ref = useRef(null);
  const [width, setWidth] = useState(initial);
  useLayoutEffect(() => {
    const measure = () => setWidth(Math.max(ref.current.clientWidth, 240));
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return [ref, width];
}

/** Light, dark, or as the system has it. */
function SchemeButton() {
  const [scheme, setScheme] = useState(null);
  const dark = scheme === null ? matchMedia("(prefers-color-scheme: dark)").matches : scheme === "dark";
  const change = () => {
    const next = dark ? "light" : "dark";
    document.documentElement.dataset.scheme = next;
    setScheme(next);
  };
  return html`<button type="button" class="plain" onClick=${change}>${dark ? "Light" : "Dark"}</button>`;
}

/** A modal dialog: Escape and its button close it. */
function Dialog({ title, onClose, children }) {
  const ref = useRef(null);
  const id = useId();
  useEffect(() => {
    ref.current.showModal();
    return () => ref.current && ref.current.open && ref.current.close();
  }, []);
  return html`<dialog ref=${ref} aria-labelledby=${id} onClose=${onClose}>
    <header>
      <h2 id=${id}>${title}</h2>
      <button type="button" class="plain" onClick=${() => ref.current.close()}>Close</button>
    </header>
    ${children}
  </dialog>`;
}

/** A table of few rows; `columns` are [heading, class] pairs, cells are texts or nodes. */
function PlainTable({ caption, columns, rows }) {
  return html`<div class="wide" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <thead><tr>${columns.map(([name, kind]) => html`<th scope="col" class=${kind}>${name}</th>`)}</tr></thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr class=${row.kind || ""}>
            ${row.cells.map((cell, place) =>
              place === 0
                ? html`<th scope="row" class=${columns[0][1]}>${cell}</th>`
                : html`<td class=${columns[place][1]}>${cell}</td>`,
            )}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** A swatch in the colour of a family. */
function Swatch({ color }) {
  return html`<span class="swatch" style=${{ background: color }} aria-hidden="true"></span>`;
}

/** Lines of one text, and where it is longer than a screen, in a box that scrolls. */
function Code({ label, text }) {
  return html`<pre class="code" tabindex="0" role="region" aria-label=${label}>${text}</pre>`;
}
