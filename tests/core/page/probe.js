// Runs after the page's own script, and reports what it saw.
const seen = {};
const at = (id) => document.getElementById(id);
const until = async (what, test) => {
  for (let i = 0; i < 600; i++) {
    const found = test();
    if (found) return found;
    await new Promise((go) => setTimeout(go, 50));
  }
  throw new Error(`waited in vain for ${what}: ${at("chat").textContent}`);
};
const answers = () => [...document.querySelectorAll("#chat .assistant")];
const idle = () => at("send").textContent === "Send";
const say = (text) => { at("text").value = text; at("send").click(); };
const told = (box) => box.querySelector(":scope > .text")?.textContent ?? "";
(async () => {
  try {
    await until("the model", () => at("model").textContent === "fake-model");
    seen.title = document.title;
    seen.facts = at("facts").textContent;

    say("one");
    const one = await until("the first piece", () => answers()[0] && told(answers()[0]).startsWith("Hel") && answers()[0]);
    seen.streaming = [told(one), at("send").textContent];
    await fetch("go", { method: "POST" });
    await until("the end", idle);
    seen.answer = told(one);
    seen.reasoning = one.querySelector("details .text").textContent;
    seen.meta = one.querySelector(".meta").textContent;
    seen.bars = [...one.querySelectorAll(".bars i")].map((bar) => bar.style.height);

    at("tools").value = '[{"name": "look", "parameters": {}}]';
    say("two");
    const form = await until("the form of a call", () => document.querySelector(".call form"));
    seen.call = [...document.querySelectorAll(".call")].map((call) => [call.children[0].textContent, JSON.parse(call.children[1].textContent)]);
    form.querySelector("input").value = "a result";
    form.requestSubmit();
    await until("the answer to a result", () => answers().length === 3 && idle() && told(answers()[2]));
    seen.after = told(answers()[2]);
    seen.result = document.querySelector(".tool .text").textContent;

    const file = new File([Uint8Array.from(atob(window.PIXEL), (c) => c.charCodeAt(0))], "p.png", { type: "image/png" });
    const carried = new DataTransfer();
    carried.items.add(file);
    at("files").files = carried.files;
    at("files").dispatchEvent(new Event("change"));
    await until("the image", () => document.querySelector("#shots img"));
    say("three");
    await until("its answer", () => answers().length === 4 && idle());
    const image = document.querySelector(".user .shots img");
    await until("its pixels", () => image.complete);
    seen.image = [image.src.slice(0, 22), image.naturalWidth];

    say("endless");
    await until("a piece", () => answers().length === 5 && told(answers()[4]));
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    await until("the stop", idle);
    seen.stopped = answers()[4].querySelector(".meta").textContent;

    say("bad");
    await until("the refusal", () => document.querySelector(".failed"));
    seen.failed = document.querySelector("#chat .failed").textContent;
    await until("the end of it", idle);
    seen.restored = at("text").value;

    await until("metrics", () => at("live").textContent.includes("tokens a step"));
    seen.live = at("live").textContent;
    seen.dot = at("dot").getAttribute("aria-label");
    document.querySelector("[data-tab=start]").click();
    seen.start = at("start").textContent;
    seen.hidden = [at("live").hidden, at("start").hidden, at("settings").hidden];
    const before = getComputedStyle(document.body).backgroundColor;
    at("theme").click();
    seen.theme = before !== getComputedStyle(document.body).backgroundColor;
    at("clear").click();
    seen.cleared = at("chat").children.length;
    seen.injected = window.injected === true;
    seen.unnamed = [...document.querySelectorAll("button, input, textarea, select")].filter((e) =>
      !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length)).map((e) => e.id);
    seen.elsewhere = performance.getEntriesByType("resource").map((e) => e.name).filter((name) => !name.startsWith(location.origin) && !name.startsWith("data:"));
  } catch (error) { seen.error = String(error.stack); }
  await fetch("seen", { method: "POST", body: JSON.stringify(seen) });
})();
