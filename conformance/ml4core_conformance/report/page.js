"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const GLYPHS = { "PASS": "✓", "FAIL": "✗", "ERROR": "!", "UNSUPPORTED": "–", "WAIVED": "w", "NOT-RUN": "○" };
  const MEANINGS = {
    "PASS": "judged and right", "FAIL": "wrong", "ERROR": "raised what it should not",
    "UNSUPPORTED": "undeclared, and refused", "WAIVED": "a known fault that still shows", "NOT-RUN": "says nothing",
  };
  const WORST = ["ERROR", "FAIL", "NOT-RUN", "WAIVED", "UNSUPPORTED", "PASS"];
  const FIRST = ["device", "kind", "plugin", "suite", "asked for", "run"];
  const BOUND_AT = 0.8; // where the bound stands in a gauge; beyond it there is room for 1.25 times
  const state = { text: "", status: new Set(), profile: new Set(), backend: new Set(), open: new Map() };
  const byId = (id) => document.getElementById(id);

  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "onclick") element.addEventListener("click", value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  const cellOf = (column, row) => column.cells[row.id];
  const statusOf = (column, row) => (cellOf(column, row) || { status: "NOT-RUN" }).status;
  const shownNumber = (value) => {
    const number = Number(value);
    if (Number.isNaN(number)) return "NaN";
    if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
    return number !== 0 && (Math.abs(number) < 0.001 || Math.abs(number) >= 1000) ? number.toExponential(1) : number.toPrecision(2);
  };
  const badness = (ratio) => (Number.isNaN(Number(ratio)) ? Infinity : Number(ratio));

  function columns() {
    return data.columns.filter((column) => !state.backend.size || state.backend.has(column.backend));
  }

  function matches(row) {
    if (state.profile.size && !state.profile.has(row.profile)) return false;
    if (state.status.size && !columns().some((column) => state.status.has(statusOf(column, row)))) return false;
    if (!state.text) return true;
    const reasons = columns().map((column) => (cellOf(column, row) || {}).reason || "");
    const text = [row.id, row.profile, ...row.bugs, ...reasons].join(" ").toLowerCase();
    return state.text.split(/\s+/).every((word) => text.includes(word));
  }

  function counts(column, rows) {
    const found = Object.fromEntries(data.statuses.map((status) => [status, 0]));
    for (const row of rows) found[statusOf(column, row)] += 1;
    return found;
  }

  function stack(found, total) {
    const parts = data.statuses.filter((status) => found[status]).map((status) =>
      h("i", { class: status, style: `width:${(100 * found[status]) / total}%` }));
    return h("span", { class: "stack", "aria-hidden": "true" }, ...parts);
  }

  const said = (found) => data.statuses.filter((status) => found[status]).map((status) => `${found[status]} ${status}`).join(", ");

  function gauge(ratio) {
    const value = badness(ratio);
    const width = Math.min(100, 100 * BOUND_AT * value);
    return h("span", { class: value > 1 ? "gauge over" : "gauge", role: "img", "aria-label": `error is ${shownNumber(ratio)} of the bound` },
      h("i", { style: `width:${Math.max(width, value > 0 ? 1 : 0)}%` }), h("u"));
  }

  function drawCards() {
    const rows = data.rows.filter((row) => row.known);
    byId("cards").replaceChildren(...columns().map((column) => {
      const found = counts(column, rows);
      const facts = Object.entries(column.facts);
      const listed = (chosen) => h("dl", {}, ...chosen.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
      const good = column.verdict.startsWith("conformant");
      return h("article", { class: "card" },
        h("h3", {}, column.name, column.stale ? h("span", { class: "tag NOT-RUN" }, `stale: ${Math.floor(column.ageDays)} days`) : null),
        h("div", { class: `verdict ${good ? (column.verdict === "conformant" ? "PASS" : "WAIVED") : column.verdict === "not conformant" ? "FAIL" : "NOT-RUN"}` },
          column.verdict, column.complete ? null : h("span", { class: "tag" }, "interrupted")),
        stack(found, rows.length || 1),
        h("div", { class: "muted" }, said(found)),
        ...column.problems.map((problem) => h("div", { class: "FAIL" }, problem)),
        listed(facts.filter(([name]) => FIRST.includes(name))),
        h("details", {}, h("summary", {}, "Versions and conditions"), listed(facts.filter(([name]) => !FIRST.includes(name)))));
    }));
    if (!data.columns.length) byId("cards").append(h("p", { class: "empty" }, "No result was given."));
  }

  function cellButton(column, row) {
    const cell = cellOf(column, row);
    const status = statusOf(column, row);
    const label = `${row.id} on ${column.name}: ${status}${cell && cell.ratio !== undefined ? `, error ${shownNumber(cell.ratio)} of the bound` : ""}${column.stale ? ", stale" : ""}`;
    return h("button", {
      type: "button", class: `cell ${status}${column.stale && cell ? " stale" : ""}${cell && cell.old ? " old" : ""}`,
      "aria-label": label, title: label, onclick: () => openDetail(column, row), "data-check": row.id,
    }, h("b", {}, GLYPHS[status]), h("em", {}, cell && cell.ratio !== undefined ? `${shownNumber(cell.ratio)} ×` : status === "PASS" ? "" : status));
  }

  function sumButton(column, rows, toggle) {
    const found = counts(column, rows);
    const worst = WORST.find((status) => found[status]);
    const label = `${rows[0].family} on ${column.name}: ${said(found)}`;
    return h("button", { type: "button", class: "cell sum", title: label, "aria-label": label, onclick: toggle },
      h("b", { class: worst }, `${GLYPHS[worst]} ${worst === "PASS" ? "" : found[worst]}`), stack(found, rows.length), h("em", {}, String(rows.length)));
  }

  function redFirst(rows, shownColumns) {
    const rank = (row) => Math.min(...shownColumns.map((column) => WORST.indexOf(statusOf(column, row))));
    const red = (row) => (rank(row) < WORST.indexOf("NOT-RUN") ? 0 : 1);
    return [...rows].sort((a, b) => red(a) - red(b));
  }

  function families(rows) {
    const found = new Map();
    for (const row of rows) {
      const key = `${row.profile} ${row.family}`;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(row);
    }
    return found;
  }

  function drawMatrix() {
    const shownColumns = columns();
    const rows = data.rows.filter(matches);
    byId("shown").textContent = `${rows.length} of ${data.rows.length}`;
    const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Check"),
      ...shownColumns.map((column) => h("th", { scope: "col" }, column.name,
        h("div", { class: "muted", style: "font-weight:normal;font-size:11.5px" }, `suite ${column.suite || "?"} · ${column.created}`, column.stale ? h("span", { class: "tag NOT-RUN" }, "stale") : null)))));
    const body = h("tbody", {});
    let profile = "";
    for (const [key, members] of families(rows)) {
      const family = members[0].family;
      if (members[0].profile !== profile) {
        profile = members[0].profile;
        body.append(h("tr", { class: "profile" }, h("th", { scope: "rowgroup", colspan: shownColumns.length + 1 }, profile)));
      }
      const single = members.length === 1;
      const red = members.some((row) => shownColumns.some((column) => ["FAIL", "ERROR"].includes(statusOf(column, row))));
      const open = state.open.has(key) ? state.open.get(key) : red || Boolean(state.text) || state.status.size > 0;
      const toggle = () => { state.open.set(key, !open); drawMatrix(); refocus(key); };
      const name = single ? h("button", { type: "button", class: "fold single", onclick: () => openDetail(shownColumns[0], members[0]) }, members[0].id)
        : h("button", { type: "button", class: "fold", "aria-expanded": String(open), onclick: toggle, "data-family": key }, family);
      body.append(h("tr", {}, h("th", { scope: "row" }, name),
        ...shownColumns.map((column) => h("td", {}, single ? cellButton(column, members[0]) : sumButton(column, members, toggle)))));
      if (open && !single) for (const row of redFirst(members, shownColumns)) {
        body.append(h("tr", { class: "variant" },
          h("th", { scope: "row" }, row.variant || row.id, row.provisional ? h("span", { class: "tag muted" }, "provisional") : null, row.known ? null : h("span", { class: "tag muted" }, "no longer in the suite")),
          ...shownColumns.map((column) => h("td", {}, cellButton(column, row)))));
      }
    }
    byId("matrix").replaceChildren(head, body);
    if (!rows.length) body.append(h("tr", {}, h("td", { class: "empty" }, "No check is like that.")));
  }

  function refocus(key) {
    const found = [...document.querySelectorAll("[data-family]")].find((element) => element.dataset.family === key);
    if (found) found.focus();
  }

  function drawErrors() {
    const shownColumns = columns();
    const ops = new Map();
    for (const row of data.rows.filter(matches)) {
      for (const column of shownColumns) {
        const cell = cellOf(column, row);
        if (!cell || cell.ratio === undefined) continue;
        const op = row.op || row.family;
        if (!ops.has(op)) ops.set(op, new Map());
        const best = ops.get(op).get(column);
        if (!best || badness(cell.ratio) > badness(best.cell.ratio)) ops.get(op).set(column, { cell, row });
      }
    }
    const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Op"), ...shownColumns.map((column) => h("th", { scope: "col" }, column.name))));
    const body = h("tbody", {}, ...[...ops.keys()].sort().map((op) => h("tr", {}, h("th", { scope: "row" }, op),
      ...shownColumns.map((column) => {
        const worst = ops.get(op).get(column);
        if (!worst) return h("td", { class: "muted" }, "not measured");
        return h("td", {}, h("button", { type: "button", title: worst.row.id, onclick: () => openDetail(column, worst.row) }, gauge(worst.cell.ratio), shownNumber(worst.cell.ratio)));
      }))));
    if (!ops.size) body.append(h("tr", {}, h("td", { class: "empty" }, "Nothing was measured.")));
    byId("errors").replaceChildren(head, body);
  }

  let opener = null;
  function openDetail(column, row) {
    if (!column) return;
    const cell = cellOf(column, row);
    const status = statusOf(column, row);
    const panel = byId("detail");
    if (panel.hidden) opener = document.activeElement;
    const reason = cell ? cell.reason || "" : "No result of this check was given for this device.";
    const measures = ((cell && cell.measures) || []).map((one) => h("div", { class: "measure" }, gauge(one.ratio),
      h("div", {}, h("b", {}, one.what), ` error ${shownNumber(one.error)} of ${shownNumber(one.bound)} (${shownNumber(one.ratio)} times) at ${one.where}`)));
    const facts = [["on", column.name], ["profile", row.profile]];
    if (cell) facts.push(["run", cell.created + (column.stale ? ", stale" : "") + (cell.old ? ", an earlier run" : "")], ["took", `${cell.seconds.toFixed(2)} s`]);
    if (row.bugs.length) facts.push(["guards against", row.bugs.join(", ")]);
    if (cell && cell.waiver) facts.push(["waived", cell.waiver]);
    if (row.provisional) facts.push(["provisional", "reported, and gates nothing yet"]);
    panel.replaceChildren(
      h("button", { type: "button", class: "quiet close", "aria-label": "Close", onclick: closeDetail }, "Esc ✕"),
      h("h2", { id: "detail-title" }, row.id),
      h("div", { class: `verdict ${status}` }, `${GLYPHS[status]} ${status}`, h("span", { class: "muted" }, ` ${MEANINGS[status]}`)),
      h("dl", {}, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      reason ? h("pre", { id: "reason" }, reason) : null,
      ...measures,
      row.doc ? h("p", { class: "muted" }, row.doc) : null,
      h("p", { class: "muted" }, "Run it again:"),
      h("pre", {}, `ml4 conformance run --backend ${column.backend} -k '${row.id}'`));
    panel.hidden = false;
    panel.focus();
    history.replaceState(null, "", `#${encodeURIComponent(data.columns.indexOf(column))}/${encodeURIComponent(row.id)}`);
  }

  function closeDetail() {
    byId("detail").hidden = true;
    history.replaceState(null, "", location.pathname + location.search);
    if (opener && opener.isConnected) opener.focus();
    opener = null;
  }

  function openLinked() {
    const [index, id] = location.hash.slice(1).split(/\/(.*)/s).map(decodeURIComponent);
    const row = data.rows.find((each) => each.id === id);
    if (row && data.columns[index]) openDetail(data.columns[index], row);
  }

  function chips(name, values, label) {
    byId(`by-${name}`).replaceChildren(...values.map(([value, count]) => h("button", {
      type: "button", "aria-pressed": String(state[name].has(value)), disabled: count === 0,
      "data-value": value,
      onclick: () => { if (!state[name].delete(value)) state[name].add(value); draw(); focusChip(name, value); },
    }, label(value, count))));
  }

  function focusChip(name, value) {
    const chip = [...byId(`by-${name}`).children].find((element) => element.dataset.value === value);
    if (chip) chip.focus();
  }

  function drawChips() {
    const totals = Object.fromEntries(data.statuses.map((status) => [status, 0]));
    for (const column of columns()) for (const row of data.rows) totals[statusOf(column, row)] += 1;
    chips("status", data.statuses.map((status) => [status, totals[status]]), (value, count) => `${GLYPHS[value]} ${value} ${count}`);
    const profiles = data.profiles.map((profile) => [profile, data.rows.filter((row) => row.profile === profile).length]);
    chips("profile", profiles.filter(([, count]) => count), (value) => value);
    chips("backend", [...new Set(data.columns.map((column) => column.backend))].map((name) => [name, 1]), (value) => value);
  }

  function draw() { drawChips(); drawCards(); drawMatrix(); drawErrors(); }

  function moveInTable(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    const cell = event.target.closest("td, th");
    if (!step || !cell || event.target.tagName !== "BUTTON") return;
    const row = cell.parentElement;
    const rows = [...row.parentElement.children].filter((each) => each.querySelector("button"));
    const next = step[0] ? (rows[rows.indexOf(row) + step[0]] || row).children[cell.cellIndex] : row.children[cell.cellIndex + step[1]];
    const button = next && next.querySelector("button");
    if (button) { event.preventDefault(); button.focus(); }
  }

  byId("generated").textContent = `written ${data.generated}; stale after ${data.staleDays} days`;
  byId("legend").replaceChildren(...data.statuses.map((status) => h("span", {}, h("b", { class: status }, GLYPHS[status]), ` ${status}: ${MEANINGS[status]}`)), h("span", {}, "n ×: worst error / bound"), h("span", {}, "dashed: stale, or from an earlier run"));
  byId("search").addEventListener("input", (event) => { state.text = event.target.value.trim().toLowerCase(); drawMatrix(); drawErrors(); });
  byId("reset").addEventListener("click", () => {
    state.text = ""; byId("search").value = "";
    for (const name of ["status", "profile", "backend"]) state[name].clear();
    state.open.clear(); draw();
  });
  byId("theme").addEventListener("click", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("detail").hidden) closeDetail();
    else if (event.key === "/" && event.target.tagName !== "INPUT") { event.preventDefault(); byId("search").focus(); }
    else moveInTable(event);
  });
  addEventListener("hashchange", openLinked);
  draw();
  openLinked();
})();
