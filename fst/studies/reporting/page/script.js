const boxes = [...document.querySelectorAll(".box")];
const mark = () => boxes.forEach(
  box => box.classList.toggle("scrolls", box.scrollWidth > box.clientWidth + 1));
addEventListener("resize", mark);
mark();
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const value = (row, i) => {
    const text = row.cells[i].textContent.trim().replace(/\u2212/g, "-");
    const number = parseFloat(text.replace(/^[^\d.+-]+/, ""));
    return [text, /^[<>~\u2248]?\s*[-+]?\.?\d/.test(text) ? number : NaN];
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
      const empty = text => text === "" || text === "\u2013";
      rows.sort((a, b) => (empty(a[1]) - empty(b[1])) || up * (
        Number.isNaN(a[2]) || Number.isNaN(b[2]) ? a[1].localeCompare(b[1]) : a[2] - b[2]));
      body.append(...rows.map(entry => entry[0]));
    });
  });
}
