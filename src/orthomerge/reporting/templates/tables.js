(() => {
  // Sorting: every column header becomes a button.
  const key = (row, place, text) => {
    const cell = row.cells[place];
    if (text) return cell.textContent.trim().toLowerCase();
    return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
  };
  const sort = (table, place, head, text) => {
    const now = head.getAttribute("aria-sort");
    const order = now ? (now === "ascending" ? "descending" : "ascending") : text ? "ascending" : "descending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows].map((row) => [key(row, place, text), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return sign * (text ? a.localeCompare(b) : a - b);
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(table, place, head, head.dataset.kind === "text"));
    });
  }

  // Filtering: every word must be there, a word after a minus must not.
  const form = document.getElementById("filters");
  const find = document.getElementById("find");
  const access = document.getElementById("access");
  const count = document.getElementById("count");
  const boards = [...document.querySelectorAll(".board")];
  const texts = new Map();
  for (const row of document.querySelectorAll("table.accuracy tbody tr")) {
    texts.set(row, `${row.cells[0].firstChild.textContent} ${row.cells[1].textContent}`.toLowerCase());
  }
  const filter = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
    let shown = 0;
    for (const board of boards) {
      let own = 0;
      const asked = !access.value || board.dataset.access === access.value;
      for (const row of board.querySelectorAll("tbody tr")) {
        const text = texts.get(row);
        const fits = words.every((word) => (word[0] === "-" ? !text.includes(word.slice(1)) : text.includes(word)));
        row.hidden = !fits;
        own += fits;
      }
      board.hidden = !asked || own === 0;
      shown += asked ? own : 0;
    }
    count.textContent = `${shown} of ${texts.size} rows`;
    document.getElementById("nothing").hidden = shown > 0;
  };
  form.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  filter();

  // Tips: what stands in `title` without a script, shown at once and on touch too.
  const tip = document.getElementById("tip");
  const said = new WeakMap();
  for (const cell of document.querySelectorAll("table.accuracy td[title]")) {
    said.set(cell, cell.title);
    cell.removeAttribute("title");
  }
  const place = (cell) => {
    const text = cell && said.get(cell);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = cell.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 6;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
  };
  for (const name of ["pointerover", "click"]) {
    document.addEventListener(name, (event) => place(event.target instanceof Element ? event.target.closest("td") : null));
  }
  addEventListener("scroll", () => place(null), { capture: true, passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") place(null); });
})();
