"""The report's style sheet, and its script: tables that are too wide say so, columns sort."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --page: #ffffff;
  --box: #f6f8fa; --line: #d0d7de; --link: #0a58ca; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9da7b3; --page: #0d1117;
  --box: #161b22; --line: #30363d; --link: #6cb6ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  overflow-wrap: anywhere; }
a { color: var(--link); }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 2.5rem 0 .5rem; padding-top: .75rem;
  border-top: 2px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .25rem; }
p, ul, ol { margin: .4rem 0; max-width: 46rem; }
nav ol { padding-left: 1.4rem; }
nav ol ol { list-style: none; padding-left: .8rem; font-size: .95em; }
.meta, figcaption, caption, .notes { color: var(--soft); font-size: .9rem; }
.meta dt { font-weight: 600; } .meta dd { margin: 0 0 .4rem; }
code { font: .9em/1.5 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; }
.scrolls::before { content: "scroll sideways \\2192"; display: block; position: sticky; left: 0;
  padding: .2rem .7rem; text-align: right; color: var(--link); font-size: .85rem;
  border-bottom: 1px solid var(--line); }
.box:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .92rem;
  overflow-wrap: normal; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; padding: .5rem .7rem; position: sticky; left: 0;
  max-width: min(46rem, calc(100vw - 3rem)); overflow-wrap: anywhere; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
td.text { white-space: normal; min-width: 9rem; }
thead th { background: var(--box); vertical-align: bottom; line-height: 1.25; min-width: 5.2rem; }
th:first-child, td:first-child, .text, .word { text-align: left; }
tbody th { font-weight: 600; background: var(--page); position: sticky; left: 0; }
@media (min-width: 40rem) { tbody th { white-space: nowrap; } }
tbody tr:hover > * { background: var(--box); }
thead button { all: unset; cursor: pointer; }
thead button:focus-visible { outline: 2px solid var(--link); }
thead button::after { content: " \\2195"; color: var(--soft); }
th[aria-sort=ascending] button::after { content: " \\2191"; color: var(--link); }
th[aria-sort=descending] button::after { content: " \\2193"; color: var(--link); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr));
  gap: 1rem; }
figure { margin: 0; min-width: 0; }
figure svg { display: block; max-width: 100%; height: auto; margin: 0 auto;
  font-family: "DejaVu Sans", Verdana, sans-serif; }
svg.adaptive { color: var(--ink); }
svg.paper { background: #ffffff; color: #000000; }
figure .box { padding: .5rem; }
figcaption strong { color: var(--ink); }
@media print {
  :root { --ink: #000000; --soft: #444444; --page: #ffffff; --box: #f2f2f2; --line: #bbbbbb;
    --link: #000000; color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .box { overflow: visible; border: 0; padding: 0; }
  table { font-size: 7.5pt; } th, td { padding: .2rem .3rem; } thead th { min-width: 0; }
  tbody th { position: static; } td.text { min-width: 0; }
  .scrolls::before { display: none; }
  thead { display: table-header-group; } thead button::after { content: ""; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .figures { display: block; } figure svg { min-width: 0 !important; max-height: 12cm; }
  a { text-decoration: none; }
}
"""

SCRIPT = """
const boxes = [...document.querySelectorAll(".box")];
const mark = () => boxes.forEach(
  box => box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1));
addEventListener("resize", mark);
mark();
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const value = (row, i) => {
    const text = row.cells[i].textContent.trim().replace(/\\u2212/g, "-");
    const number = parseFloat(text.replace(/^[^\\d.+-]+/, ""));
    return [text, /^[<>~\\u2248]?\\s*[-+]?\\.?\\d/.test(text) ? number : NaN];
  };
  heads.forEach((head, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.title = "Sort by this column";
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up === 1 ? "ascending" : "descending");
      const rows = [...body.rows].map(row => [row, ...value(row, i)]);
      const empty = text => text === "" || text === "\\u2013";
      rows.sort((a, b) => (empty(a[1]) - empty(b[1])) || up * (
        Number.isNaN(a[2]) || Number.isNaN(b[2]) ? a[1].localeCompare(b[1]) : a[2] - b[2]));
      body.append(...rows.map(entry => entry[0]));
    });
  });
}
"""
