// The page itself: draws the panels in their width, and lets one look through the samples. Every text of a run becomes a
// text node; nothing is parsed as HTML.
(function () {
  if (typeof document === "undefined") return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs;
  let pool = { prompts: [], groups: [], samples: [], pictures: {} };
  const state = {
    axis: "step", amount: 0, log: false, step: null, hover: null, extra: [], filters: { step: null }, sort: "step", down: true,
    selected: null, tab: "sample", mode: "",
  };
  const SVG = "http://www.w3.org/2000/svg";

  function el(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === false || value === null || value === undefined) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "class") element.className = value;
      else if (name.startsWith("--")) element.style.setProperty(name, value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  }

  function svg(shape) {
    const element = document.createElementNS(SVG, shape.tag);
    for (const [name, value] of Object.entries(shape)) {
      if (name === "tag" || name === "text" || name === "title") continue;
      element.setAttribute(name, typeof value === "number" ? +value.toFixed(1) : value);
    }
    if (shape.text !== undefined) element.textContent = shape.text;
    if (shape.title) { const title = document.createElementNS(SVG, "title"); title.textContent = shape.title; element.append(title); }
    return element;
  }

  /** A text of a run, with what is invisible in it made visible. */
  function shown(text) {
    return visible(text).map(([piece, hidden]) => (hidden ? el("span", { class: "hidden-char" }, piece) : document.createTextNode(piece)));
  }
  const line = (text) => visible(text).map(([piece]) => piece).join("");
  const pre = (text) => el("pre", { dir: "auto" }, shown(text));

  // -- curves --------------------------------------------------------------------------------------------------------

  const grid = document.getElementById("panels");
  let drawn = [];

  function drawPanels() {
    if (!grid) return;
    const panels = [...data.panels, ...state.extra];
    while (grid.children.length > panels.length) grid.lastChild.remove();
    while (grid.children.length < panels.length) grid.append(el("figure", { class: "panel" }));
    drawn = panels.map((panel, index) => drawPanel(panel, grid.children[index])).filter(Boolean);
    updateCursor();
  }

  function drawPanel(panel, figure) {
    const width = Math.max(figure.clientWidth - 34, 200), height = width < 300 ? 165 : 190;
    const made = picture(panel, runs, { width, height, axis: state.axis, amount: state.amount, log: state.log });
    const close = panel.added && el("button", { class: "close", type: "button", "aria-label": "Remove", onclick: () => removePanel(panel) }, "×");
    const caption = el("figcaption", {}, panel.title, panel.unit ? el("small", {}, panel.unit) : null, close);
    figure.replaceChildren(caption);
    if (!made) { figure.append(el("p", { class: "note" }, "No values that can be shown.")); return null; }
    const image = document.createElementNS(SVG, "svg");
    image.setAttribute("viewBox", `0 0 ${width} ${height}`);
    image.setAttribute("role", "img");
    image.setAttribute("aria-label", `${panel.title} by ${state.axis}`);
    image.append(...made.shapes.map(svg));
    const cursor = svg({ tag: "line", class: "cursor", x1: 0, x2: 0, y1: made.top, y2: made.bottom });
    const chosen = svg({ tag: "line", class: "cursor selected", x1: 0, x2: 0, y1: made.top, y2: made.bottom });
    image.append(chosen, cursor);
    const stepAt = (event) => {
      const box = image.getBoundingClientRect();
      const value = made.value(((event.clientX - box.left) * width) / box.width);
      const run = longestRun(runs, state.axis);
      const index = nearest(run.steps.map((step) => place(run, step, state.axis)), value);
      return index < 0 ? null : run.steps[index];
    };
    image.addEventListener("pointermove", (event) => { state.hover = stepAt(event); updateCursor(); });
    image.addEventListener("pointerleave", () => { state.hover = null; updateCursor(); });
    image.addEventListener("click", (event) => selectStep(stepAt(event)));
    const values = made.lines.map((line) => [line, el("b", {})]);
    const key = el("ul", { class: "key" }, values.map(([line, value]) => el("li", {}, el("i", { class: line.color }), line.label, value)));
    figure.append(image, key);
    if (panel.note && runs.length === 1) figure.append(el("p", { class: "note" }, panel.note));
    if (panel.meaning) figure.append(el("p", { class: "meaning" }, panel.meaning));
    return { made, cursor, chosen, values };
  }

  function updateCursor() {
    const run = longestRun(runs, state.axis);
    for (const { made, cursor, chosen, values } of drawn) {
      for (const [line, step] of [[cursor, state.hover], [chosen, state.step]]) {
        line.style.display = step === null ? "none" : "";
        if (step === null) continue;
        const x = made.x(place(run, step, state.axis));
        line.setAttribute("x1", x);
        line.setAttribute("x2", x);
      }
      const step = state.hover !== null ? state.hover : state.step;
      for (const [line, value] of values) {
        const y = line.points.y;
        value.textContent = number(step === null ? y[y.length - 1] : valueAt(runs[line.run], line.series, place(run, step, state.axis), state.axis));
      }
    }
    const readout = document.getElementById("at-step");
    if (readout) readout.textContent = state.hover !== null ? `step ${state.hover}` : "";
  }

  function selectStep(step) {
    state.step = step;
    state.filters.step = step === null ? null : nearestStep(filterSamples(pool.samples, { ...state.filters, step: null }, pool.prompts), step);
    drawToolbarStep();
    updateCursor();
    drawBrowser();
  }

  function moveStep(by) {
    const steps = longestRun(runs, state.axis).steps.filter((step) => step > 0);
    if (!steps.length) return;
    const index = state.step === null ? (by > 0 ? -1 : steps.length) : nearest(steps, state.step);
    selectStep(steps[Math.min(Math.max(index + by, 0), steps.length - 1)]);
  }

  function addPanel(name) {
    const meaning = (data.meanings[name] || []).filter(Boolean);
    const text = meaning.length ? `${meaning[0]}.${meaning[1] ? ` Healthy: ${meaning[1]}.` : ""}` : "No entry in the glossary of metrics.";
    if (!state.extra.some((panel) => panel.title === name)) {
      const line = { series: name, label: "value", axis: "left", band: null, color: "s0" };
      state.extra.push({ title: name, kind: "lines", unit: "", note: "", lines: [line], meaning: text, added: true });
    }
    drawPanels();
    grid.lastChild.scrollIntoView({ block: "nearest" });
  }

  function removePanel(panel) {
    state.extra = state.extra.filter((one) => one !== panel);
    drawPanels();
  }

  function drawToolbarStep() {
    const place_ = document.getElementById("step-chip");
    if (!place_) return;
    place_.replaceChildren(state.step === null ? "" : el("span", { class: "chip" }, `step ${state.step}`,
      el("button", { type: "button", "aria-label": "Clear the step", onclick: () => selectStep(null) }, "×")));
  }

  function drawToolbar() {
    const bar = document.getElementById("toolbar");
    if (!bar) return;
    const axes = ["step", ...(runs.some((run) => run.per_step) ? ["samples"] : []), ...(runs.some((run) => lastPlace(run, "seconds") > 0) ? ["seconds"] : [])];
    const buttons = axes.map((axis) => el("button", { type: "button", "aria-pressed": String(axis === state.axis), onclick: (event) => {
      state.axis = axis;
      for (const button of event.target.parentNode.children) button.setAttribute("aria-pressed", String(button === event.target));
      drawPanels();
    } }, axis));
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].filter((name) => name.includes("/") && !/^(phase|groups|interval)\//.test(name)).sort();
    const found = el("ul", { class: "found", hidden: true });
    const search = el("input", { type: "search", id: "metric-search", placeholder: `Search ${names.length} metrics`, "aria-label": "Search metrics", autocomplete: "off" });
    const list = () => {
      const fits = searchNames(names, search.value).slice(0, 12);
      found.replaceChildren(...fits.map((name) => el("li", {}, el("button", { type: "button", onclick: () => { addPanel(name); search.value = ""; list(); } },
        name, data.meanings[name] ? el("small", {}, data.meanings[name][0]) : null))));
      found.hidden = fits.length === 0;
    };
    search.addEventListener("input", list);
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && found.querySelector("button")) found.querySelector("button").click();
      if (event.key === "Escape") { search.value = ""; list(); search.blur(); }
      if (event.key === "ArrowDown" && found.querySelector("button")) { event.preventDefault(); found.querySelector("button").focus(); }
    });
    search.addEventListener("blur", () => setTimeout(() => { if (!found.contains(document.activeElement)) found.hidden = true; }, 150));
    bar.className = "toolbar";
    bar.replaceChildren(
      el("span", { class: "segments", role: "group", "aria-label": "x axis" }, buttons),
      el("label", {}, "smooth", el("input", { type: "range", min: 0, max: 0.97, step: 0.01, value: 0, oninput: (event) => { state.amount = Number(event.target.value); drawPanels(); } })),
      el("label", {}, el("input", { type: "checkbox", onchange: (event) => { state.log = event.target.checked; drawPanels(); } }), "log scale"),
      el("span", { id: "step-chip" }), el("span", { id: "at-step", class: "faint" }),
      el("span", { class: "grow" }, search, found));
    drawToolbarStep();
  }

  // -- samples -------------------------------------------------------------------------------------------------------

  const browser = document.getElementById("browser");
  const COLUMNS = [["step", "step", true], ["why", "why"], ["score", "reward", true], ["advantage", "adv.", true], ["length", "length", true], ["stop", "stop"], ["text", "response"]];

  function listed() {
    return sortSamples(filterSamples(pool.samples, state.filters, pool.prompts), state.sort, state.down);
  }

  function choose(name, label, values) {
    const options = values.map(([value, text]) => el("option", { selected: state.filters[name] === value }, line(text)));
    const change = (event) => { const index = event.target.selectedIndex; state.filters[name] = index ? values[index - 1][0] : ""; drawBrowser(); };
    return el("select", { "aria-label": label, onchange: change }, el("option", {}, label), options);
  }

  function drawFilters() {
    const values = (pick) => [...new Set(pool.samples.flatMap(pick))].filter(Boolean).sort().map((value) => [value, value]);
    const kinds = values((one) => [one.kind]), sources = values((one) => [one.source]);
    const whys = values((one) => one.why.map((why) => (why.startsWith("fault") ? "fault" : why)));
    const search = el("input", { type: "search", id: "sample-search", placeholder: "Search prompts and responses", "aria-label": "Search samples",
      value: state.filters.text || "", oninput: (event) => { state.filters.text = event.target.value; drawBrowser(); } });
    search.addEventListener("keydown", (event) => { if (event.key === "Escape") search.blur(); });
    const other = state.step !== null && state.filters.step !== null && state.filters.step !== state.step;
    const chip = state.filters.step !== null && el("span", { class: "chip" }, other ? `no samples of step ${state.step} in this page; these: step ${state.filters.step}` : `step ${state.filters.step}`,
      el("button", { type: "button", "aria-label": "All steps", onclick: () => selectStep(null) }, "×"));
    return [
      kinds.length > 1 && choose("kind", "Training and validation", kinds),
      whys.length > 1 && choose("why", "Any reason", whys),
      sources.length > 1 && choose("source", "All sources", sources),
      runs.length > 1 && choose("run", "All runs", runs.map((run, index) => [String(index), run.name])),
      chip, el("span", { class: "grow" }, search), data.served && loader(),
    ].filter(Boolean);
  }

  /** Loads all samples of a step from the server. */
  function loader() {
    const input = el("input", { type: "number", min: 0, "aria-label": "step", value: state.step === null ? 1 : state.step });
    const message = el("span", { class: "faint" });
    const load = async (kind) => {
      message.textContent = "loading";
      const run = Number(state.filters.run || 0);
      const response = await fetch(`samples?run=${run}&kind=${kind}&step=${Number(input.value)}`);
      if (!response.ok) { message.textContent = "no such step"; return; }
      pool = merge(pool, await response.json());
      state.filters = { step: Number(input.value), kind };
      state.step = Number(input.value);
      buildBrowser();
      updateCursor();
    };
    return el("span", { class: "chip" }, "all of step", input,
      el("button", { type: "button", onclick: () => load("training") }, "training"),
      el("button", { type: "button", onclick: () => load("validation") }, "validation"), message);
  }

  function buildBrowser() {
    if (!browser) return;
    if (!pool.samples.length) { browser.replaceChildren(el("p", { class: "empty" }, "No samples.")); return; }
    browser.replaceChildren(el("div", { class: "toolbar", id: "filters" }), el("div", { class: "browser" },
      el("div", { class: "list", id: "list", tabindex: "-1" }), el("div", { class: "detail", id: "detail", "aria-live": "polite" })));
    document.getElementById("filters").replaceChildren(...drawFilters());
    drawBrowser();
  }

  function drawBrowser() {
    const list = document.getElementById("list");
    if (!list) return;
    const filters = document.getElementById("filters");
    if (!filters.contains(document.activeElement) || document.activeElement.tagName === "SELECT") filters.replaceChildren(...drawFilters());
    const samples = listed();
    if (!samples.includes(state.selected)) state.selected = mostToShow(samples);
    const columns = COLUMNS.filter(([key]) => key === "step" || key === "text" || key === "why" || samples.some((one) => one[key] !== undefined && (key !== "stop" || one.fault || one.stop !== "completed")));
    const head = columns.map(([key, label, right]) => el("th", { class: right ? "num" : "", "aria-sort": state.sort === key ? (state.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", onclick: () => { state.down = state.sort === key ? !state.down : Boolean(right) && key !== "step"; state.sort = key; drawBrowser(); } },
        label, state.sort === key ? (state.down ? " ↓" : " ↑") : "")));
    const rows = samples.map((one) => el("tr", { tabindex: 0, "aria-selected": String(one === state.selected), onclick: () => selectSample(one), onkeydown: (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); selectSample(one); }
    } }, columns.map(([key]) => cell(one, key))));
    list.replaceChildren(rows.length ? el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)) : el("p", { class: "empty" }, "No sample fits these filters."));
    drawDetail();
  }

  /** The sample of the first step of a list of which most is known. */
  function mostToShow(samples) {
    const first = samples.filter((one) => one.step === samples[0].step);
    return first.find((one) => one.tokens) || first.find((one) => one.why.includes("whole group")) || samples[0] || null;
  }

  function cell(one, key) {
    if (key === "text") return el("td", { class: "text" }, shown((one.output || "").replace(/\s+/g, " ").slice(0, 120)));
    if (key === "why") return el("td", { class: "why" }, runs.length > 1 ? el("i", { class: `swatch r${one.run}` }) : null, shown(one.why[0]), one.why.length > 1 ? ` +${one.why.length - 1}` : "");
    if (key === "step") return el("td", { class: "num" }, `${one.kind === "validation" ? "val " : ""}${one.step}`);
    if (key === "stop") return el("td", { class: "stop" }, one.fault ? el("span", { class: "fault" }, shown(one.fault)) : el("span", { class: "faint" }, shown(one.stop === "completed" ? "" : one.stop || "")));
    if (key === "advantage") return el("td", { class: "num" }, one.advantage === undefined ? "" : signed(one.advantage));
    return el("td", { class: "num" }, number(one[key]));
  }

  function selectSample(sample, scroll) {
    state.selected = sample;
    state.mode = state.mode || "";
    const list = document.getElementById("list"), samples = listed();
    list.querySelectorAll("tbody tr").forEach((row, index) => {
      const chosen = samples[index] === sample;
      row.setAttribute("aria-selected", String(chosen));
      if (chosen && scroll) row.scrollIntoView({ block: "nearest" });
    });
    drawDetail();
  }

  function moveSample(by) {
    const samples = listed();
    if (!samples.length) return;
    const index = samples.indexOf(state.selected);
    selectSample(samples[Math.min(Math.max(index + by, 0), samples.length - 1)], true);
  }

  function drawDetail() {
    const detail = document.getElementById("detail"), one = state.selected;
    if (!one) { detail.replaceChildren(el("p", { class: "empty" }, "No sample is selected.")); return; }
    const group = pool.groups[one.group], members = groupOf(pool.samples, one), later = overSteps(pool.samples, one);
    const tabs = [["sample", "Sample"]];
    if (members.length > 1) tabs.push(["group", `Group of ${group.size}`]);
    if (new Set(later.map((other) => `${other.run} ${other.step}`)).size > 1) tabs.push(["steps", "Same prompt over steps"]);
    if (one.tokens) tabs.push(["tokens", "Tokens"]);
    const tab = tabs.some(([name]) => name === state.tab) ? state.tab : "sample";
    const parts = [one.kind, one.source, one.row !== undefined && `row ${one.row}`, one.number !== undefined && `sample ${one.number}`,
      `${number(one.length)} ${one.unit}`, one.stop && `stop: ${one.stop}`, runs.length > 1 && runs[one.run].name];
    const body = { sample: sampleTab, group: groupTab, steps: stepsTab, tokens: tokensTab }[tab];
    detail.replaceChildren(
      el("h3", {}, shown(`Step ${one.step}: ${one.why.join(", ")}`)), el("p", { class: "place" }, shown(parts.filter(Boolean).join(" · "))),
      el("p", { class: `explain${one.fault ? " fault" : ""}` }, shown(explain(one, group)), one.detail ? shown(` ${one.detail}`) : null),
      el("div", { class: "tabs", role: "tablist" }, tabs.map(([name, label]) => el("button", { type: "button", role: "tab", "aria-selected": String(name === tab), onclick: () => { state.tab = name; drawDetail(); } }, label))),
      ...body(one, group, members, later));
  }

  function message(role, text, reasoning, calls) {
    const pieces = splitReasoning(text).map(([piece, thought]) => (thought ? el("details", {}, el("summary", {}, `reasoning, ${piece.length.toLocaleString("en")} characters`), pre(piece)) : pre(piece)));
    return el("div", { class: `message ${role === "assistant" || role === "response" ? "assistant" : ""}` }, el("b", {}, shown(role || "message")),
      reasoning ? el("details", {}, el("summary", {}, "reasoning"), pre(reasoning)) : null, pieces,
      (calls || []).map(([name, inside]) => pre(`→ ${name}(${inside})`)));
  }

  /** The pictures of a prompt, to be shown above it. */
  function seen(one) {
    return (one.images || []).map((name) => el("img", { class: "seen", src: pool.pictures[name], alt: "picture of the prompt" }));
  }

  function sampleTab(one) {
    const conversation = one.messages ? one.messages.map((each) => message(each.role, each.text, each.reasoning, each.calls))
      : [...splitPrompt(pool.prompts[one.prompt]).map((each) => message(each.role, each.text)), message("response", one.output || "")];
    const facts = Object.entries(one.parts || {}).map(([name, value]) => el("span", {}, el("code", {}, shown(name)), shown(typeof value === "number" ? number(value) : String(value))));
    return [
      ...seen(one), ...conversation,
      one.truth ? el("div", { class: "message" }, el("b", {}, "ground truth"), pre(one.truth)) : null,
      one.teacher ? el("div", { class: "message" }, el("b", {}, "its teacher reads"), pre(one.teacher)) : null,
      facts.length ? el("span", { class: "label" }, "reward components") : null, facts.length ? el("div", { class: "parts" }, facts) : null,
      ...(one.turns || []).map(turn),
    ].filter(Boolean);
  }

  function turn(one, index) {
    const seconds = (one.seconds || []).filter((value) => value !== null);
    const facts = [`turn ${index + 1}`, one.sampled_tokens !== null && `${one.sampled_tokens} tokens sampled`, one.observed_tokens && `${one.observed_tokens} observed`,
      seconds.length === 2 && `${seconds[0]} s model, ${seconds[1]} s tools`, one.reward && `reward ${number(one.reward)}`, one.stop && `stop: ${one.stop}`];
    return el("div", { class: "turn" }, el("p", {}, shown(facts.filter(Boolean).join(" · "))), (one.calls || []).map((call) => el("details", { open: call.outcome !== "" && call.outcome !== "ok" },
      el("summary", {}, shown(`${call.name} · ${call.outcome || "called"}${call.seconds === null ? "" : ` · ${call.seconds} s`}`)), pre(`${call.arguments}\n\n${call.result}`))));
  }

  function card(one, chosen, title) {
    return el("div", { class: `card${chosen ? " selected" : ""}` }, el("button", { type: "button", onclick: () => { if (!listed().includes(one)) state.filters = { step: null }; state.selected = one; drawBrowser(); } },
      el("b", {}, title), [`reward ${one.score === undefined ? "none" : number(one.score)}`, one.advantage !== undefined && one.kind === "training" && `adv. ${signed(one.advantage)}`,
        `${number(one.length)} ${one.unit}`].filter(Boolean).map((fact) => el("span", {}, fact))), pre(one.output || ""));
  }

  function groupTab(one, group, members) {
    const low = Math.min(...group.scores), high = Math.max(...group.scores);
    const bars = group.scores.map((score) => el("span", { "--v": high > low ? (score - low) / (high - low) : 0 }, number(score)));
    return [
      ...seen(one), message("prompt", pool.prompts[one.prompt]), el("span", { class: "label" }, `rewards of ${group.scores.length < group.size ? `${group.scores.length} of the` : "all"} ${group.size} responses`), el("div", { class: "scores" }, bars),
      el("div", { class: "cards" }, members.map((other, index) => card(other, other === one, `#${other.number === undefined ? index : other.number}`))),
    ];
  }

  function stepsTab(one, group, members, later) {
    const titleOf = (other) => `step ${other.step}${runs.length > 1 ? ` · ${runs[other.run].name}` : ""}`;
    return [...seen(one), message("prompt", pool.prompts[one.prompt]), one.truth ? el("p", { class: "place" }, "ground truth: ", shown(one.truth)) : null,
      el("div", { class: "cards down" }, later.map((other) => card(other, other === one, titleOf(other))))].filter(Boolean);
  }

  function tokensTab(one) {
    const tokens = one.tokens, modes = tokenModes(tokens);
    const mode = modes.includes(state.mode) ? state.mode : modes[0];
    const readout = el("div", { class: "readout" }, "Point at a token.");
    const buttons = modes.map((name) => el("button", { type: "button", "aria-pressed": String(name === mode), onclick: () => { state.mode = name; drawDetail(); } }, name));
    const legends = { probability: "Strong: the engine gave this token a low probability.", entropy: "Strong: many tokens were likely here (3 nats or more).",
      "engine − trainer": "Blue: the engine's log-prob is higher, red: the trainer's. Full strength: the largest difference here, or 0.01.", advantage: "Blue: made more likely, red: less likely.",
      "policy − teacher": "Blue: the policy's log-prob is higher, red: the teacher's. Full strength: the largest difference here." };
    const spans = tokens.ids.map((id, index) => {
      const [strength, name] = tokenColor(tokens, index, mode);
      return el("span", { class: name, "--v": strength.toFixed(3), "data-index": index }, shown(tokenText(tokens.texts[index] || (tokens.texts.some(Boolean) ? "" : `[${id}] `))));
    });
    const box = el("div", { class: "tokens", dir: "auto", onpointerover: (event) => {
      const token = event.target.closest("[data-index]");
      if (token) readout.textContent = tokenLine(tokens, Number(token.dataset.index));
    } }, spans);
    const rest = tokens.count > tokens.ids.length ? el("p", { class: "place" }, `The first ${tokens.ids.length} of ${tokens.count} tokens.`) : null;
    return [el("span", { class: "segments" }, buttons), readout, box, el("p", { class: "place" }, `${legends[mode] || ""} Grey: observed, not trained on.`), rest].filter(Boolean);
  }

  // -- all of it -----------------------------------------------------------------------------------------------------

  function onKey(event) {
    // AltGr, with which many keyboards write [ and ], counts as control and alt.
    const modified = event.ctrlKey || event.metaKey || event.altKey;
    if ((modified && !event.getModifierState("AltGraph")) || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const actions = { j: () => moveSample(1), k: () => moveSample(-1), "[": () => moveStep(-1), "]": () => moveStep(1), "/": focusSearch };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  }

  function focusSearch() {
    const samples = document.getElementById("sample-search"), metrics = document.getElementById("metric-search");
    const near = samples && document.getElementById("samples").getBoundingClientRect().top < 0.6 * innerHeight;
    (near || !metrics ? samples || metrics : metrics)?.focus();
  }

  async function unpack() {
    if (data.rest) return data.rest;
    const bytes = Uint8Array.from(atob(data.packed), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    return JSON.parse(await new Response(stream).text());
  }

  /** Load the page again when the server has a newer one; the place in it is kept. */
  function follow() {
    if (!data.live) return;
    setInterval(async () => {
      try {
        const version = await (await fetch("version")).text();
        if (version === data.live) return;
        sessionStorage.setItem("view", JSON.stringify({ axis: state.axis, step: state.step, tab: state.tab, extra: state.extra.map((one) => one.title), top: scrollY }));
        location.reload();
      } catch (error) { /* the server has ended; the page stays as it is */ }
    }, 5000);
  }

  function restore() {
    if (!data.live) return;
    const view = JSON.parse(sessionStorage.getItem("view") || "null");
    sessionStorage.removeItem("view");
    if (!view) return;
    state.axis = view.axis;
    state.step = view.step;
    state.tab = view.tab;
    view.extra.forEach(addPanel);
    drawPanels();
    requestAnimationFrame(() => scrollTo(0, view.top));
  }

  function fromAddress() {
    const match = /^#step-(\d+)$/.exec(location.hash);
    if (match) { selectStep(Number(match[1])); document.getElementById("curves").scrollIntoView(); }
  }

  document.addEventListener("keydown", onKey);
  document.addEventListener("click", (event) => {
    if (event.target.matches(".copy")) navigator.clipboard?.writeText(event.target.previousSibling.textContent).then(() => { event.target.textContent = "Copied"; });
  });
  addEventListener("hashchange", fromAddress);
  drawToolbar();
  drawPanels();
  if (grid) new ResizeObserver(((width) => () => { if (grid.clientWidth !== width) { width = grid.clientWidth; drawPanels(); } })(grid.clientWidth)).observe(grid);
  unpack().then((rest) => {
    pool = rest.samples;
    rest.series.forEach((series, index) => Object.assign(runs[index].series, series));
    restore();
    drawToolbar();
    buildBrowser();
    fromAddress();
    follow();
    document.body.dataset.ready = "true";
  }, (error) => { if (browser) browser.replaceChildren(el("p", { class: "empty" }, `The samples cannot be read in this browser (${error}); a newer one can.`)); });
})();
