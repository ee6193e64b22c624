// Runs after the page's own script, and leaves what it saw in an element of the dump.
const seen = {};
const press = (key, target) => (target || document.activeElement).dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const rows = () => [...document.querySelectorAll("#matrix tbody tr th[scope=row]")].map((e) => e.textContent);
const chip = (text) => [...document.querySelectorAll(".chips button")].find((e) => e.dataset.value === text);
const detail = document.getElementById("detail");
try {
  seen.linked = detail.hidden ? null : detail.textContent;
  press("Escape");
  seen.closed = detail.hidden;
  seen.cards = [...document.querySelectorAll(".card")].map((e) => e.textContent);
  seen.rows = rows();
  seen.cells = [...document.querySelectorAll(".cell[data-check]")].map((e) => [e.dataset.check, e.className]);
  seen.ops = [...document.querySelectorAll("#errors tbody tr")].map((e) => e.textContent);
  seen.over = document.querySelectorAll("#errors .gauge.over").length;
  seen.unnamed = [...document.querySelectorAll("button, input")].filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label"))).length;
  press("/", document.body);
  seen.focus = document.activeElement.id;
  document.activeElement.value = "rope"; document.activeElement.dispatchEvent(new Event("input"));
  seen.searched = rows();
  document.getElementById("reset").click();
  chip("FAIL").click();
  seen.failing = rows();
  seen.pressed = chip("FAIL").getAttribute("aria-pressed");
  document.getElementById("reset").click();
  chip("other").click();
  seen.columns = document.querySelectorAll("#matrix thead th").length - 1;
  document.getElementById("reset").click();
  const first = document.querySelector("#matrix tbody td button");
  first.focus(); press("ArrowRight");
  seen.right = document.activeElement !== first && document.activeElement.closest("td").cellIndex;
  press("ArrowDown");
  seen.down = document.activeElement.closest("tr") !== first.closest("tr");
  const cell = document.querySelector(".cell.FAIL[data-check]");
  cell.focus(); cell.click();
  seen.opened = detail.textContent;
  seen.hash = location.hash;
  press("Escape");
  seen.back = document.activeElement === cell;
  const before = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  seen.theme = before !== getComputedStyle(document.body).backgroundColor;
  seen.injected = window.injected === true;
  seen.fetched = performance.getEntriesByType("resource").length;
} catch (error) { seen.error = String(error.stack); }
const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen);
document.body.append(out);
