// What the page computes, as pure functions: tested with `node --test`, and know no document.
"use strict";

// -- curves ----------------------------------------------------------------------------------------------------------

/** Return the points of a series of a run; `axis` is what lies on the x axis: step, samples or seconds. */
function pointsOf(run, name, axis) {
  const series = run.series[name];
  if (!series) return { steps: [], x: [], y: [] };
  const steps = series.x || run.steps;
  return { steps, x: steps.map((step) => place(run, step, axis)), y: series.y };
}

/** Return where a step lies on the x axis. Seconds between two known steps are interpolated. */
function place(run, step, axis) {
  if (axis === "samples") return step * (run.per_step || 1);
  if (axis !== "seconds" || run.steps.length === 0) return step;
  const after = lowerBound(run.steps, step);
  if (after >= run.steps.length) return run.seconds[run.seconds.length - 1];
  if (run.steps[after] === step || after === 0) return run.seconds[after];
  const share = (step - run.steps[after - 1]) / (run.steps[after] - run.steps[after - 1]);
  return run.seconds[after - 1] + share * (run.seconds[after] - run.seconds[after - 1]);
}

/** Return the index of the first of the sorted values that is not below `value`. */
function lowerBound(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

/** Return the index of the nearest of the sorted values, -1 if there are none. */
function nearest(values, value) {
  if (values.length === 0) return -1;
  const after = lowerBound(values, value);
  if (after === 0) return 0;
  if (after === values.length) return after - 1;
  return value - values[after - 1] <= values[after] - value ? after - 1 : after;
}

/** Return an exponential moving average that does not lag at its start; 0 changes nothing. */
function smooth(values, amount) {
  if (amount <= 0) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    mean = amount * mean + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return mean / weight;
  });
}

/** Return round numbers in a range, about four of them. */
function ticks(low, high, whole) {
  const span = high - low || 1;
  const size = 10 ** Math.floor(Math.log10(span / 4));
  let step = [1, 2, 5, 10].map((factor) => factor * size).find((one) => span / one <= 5);
  if (whole) step = Math.max(step, 1);
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.min(Math.max(count, 0), 12) }, (_, index) => (first + index) * step);
}

/** Return a number as an axis shows it: 12k, 0.25, 3e-6. */
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size && size < 1e-3) return `${+value.toPrecision(3)}`;
  return `${+value.toPrecision(4)}`;
}

/** Return a number for reading: three or four digits. */
function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  return `${+value.toPrecision(size < 1 ? 3 : 4)}`;
}

/** Return the ends of an axis with some room, from 0 where that loses little; of a log scale the exponents. */
function range(values, log) {
  const usable = log ? values.filter((value) => value > 0).map(Math.log10) : values;
  if (usable.length === 0) return null;
  let low = Infinity, high = -Infinity;
  for (const value of usable) { if (value < low) low = value; if (value > high) high = value; }
  if (!log && low >= 0 && low < 0.6 * high) low = 0;
  const size = Math.max(Math.abs(low), Math.abs(high));
  const room = high - low > 1e-6 * size ? 0.06 * (high - low) : size * 0.1 || 1; // rounding is no difference
  return [low === 0 && !log ? 0 : low - room, high + room];
}

/** Return the lines of a panel: each of one run, of several runs the first line of each. */
function linesOf(panel, runs) {
  if (runs.length === 1) return panel.lines.map((line) => ({ ...line, run: 0 }));
  if (panel.kind === "stack") {
    return runs.map((run, index) => ({ series: "timing_s/step", label: run.name, axis: "left", band: null, color: `r${index}`, run: index }));
  }
  return runs.map((run, index) => {
    const line = panel.lines.find((one) => run.series[one.series]) || panel.lines[0];
    return { ...line, label: run.name, axis: "left", band: null, color: `r${index}`, run: index };
  });
}

/** Return what a panel is drawn of: shapes in pixels, and functions from steps to places and back; null without values. */
function picture(panel, runs, options) {
  const lines = linesOf(panel, runs).map((line) => {
    const points = pointsOf(runs[line.run], line.series, options.axis);
    const bands = line.band && !options.log ? line.band.map((name) => pointsOf(runs[line.run], name, options.axis)) : [];
    return { ...line, points, bands, y: smooth(points.y, options.amount) };
  }).filter((line) => line.points.x.length > 0);
  if (lines.length === 0) return null;
  const stacked = panel.kind === "stack" && runs.length === 1;
  const layers = stacked ? stack(lines) : [];
  const frame = frameOf(lines, layers, stacked ? { ...options, log: false } : options);
  if (!frame) return null;
  const drawn = stacked ? layerShapes(frame, lines, layers) : lines.flatMap((line) => lineShapes(frame, line, options.amount > 0));
  return { ...frame, lines, shapes: [...axisShapes(frame), ...markShapes(frame, runs), ...drawn] };
}

/** Return where values lie in a picture; null if none can be shown. */
function frameOf(lines, layers, options) {
  const { width, height, axis, log } = options;
  const valuesOf = (side) => lines.filter((line) => line.axis === side)
    .flatMap((line) => [...(line.least ? [line.least] : []), ...line.points.y, ...line.bands.flatMap((band) => band.y)]);
  let left = range(layers.length ? [0, ...layers[layers.length - 1].y] : valuesOf("left"), log);
  let right = range(valuesOf("right"), log);
  if (!left) { left = right; right = null; }
  if (!left) return null;
  const begin = 46, end = width - (right ? 46 : 14), top = 10, bottom = height - 24;
  const xs = lines.flatMap((line) => [line.points.x[0], line.points.x[line.points.x.length - 1]]);
  const first = Math.min(...xs), last = Math.max(...xs);
  const up = (at, [low, high]) => bottom - (bottom - top) * (at - low) / (high - low || 1);
  return {
    axis, log, begin, end, top, bottom, first, last, left, right, up, foot: height - 7,
    x: (value) => begin + (end - begin) * (value - first) / (last - first || 1),
    y: (value, side) => up(log ? (value > 0 ? Math.log10(value) : NaN) : value, side === "right" && right ? right : left),
    value: (pixel) => first + (last - first) * (pixel - begin) / (end - begin || 1),
  };
}

function axisShapes(frame) {
  const shapes = [];
  const label = (at) => short(frame.log ? 10 ** at : at);
  for (const at of ticks(...frame.left, frame.log)) {
    const y = frame.up(at, frame.left);
    shapes.push({ tag: "line", class: "grid", x1: frame.begin, x2: frame.end, y1: y, y2: y });
    shapes.push({ tag: "text", class: "tick end", x: frame.begin - 7, y: y + 3.5, text: label(at) });
  }
  for (const at of frame.right ? ticks(...frame.right, frame.log) : []) {
    shapes.push({ tag: "text", class: "tick", x: frame.end + 7, y: frame.up(at, frame.right) + 3.5, text: label(at) });
  }
  for (const at of ticks(frame.first, frame.last, frame.axis !== "seconds")) {
    shapes.push({ tag: "text", class: "tick mid", x: frame.x(at), y: frame.foot, text: short(at) });
  }
  return shapes;
}

function markShapes(frame, runs) {
  return runs.flatMap((run) => run.marks
    .map(([step, kind, text]) => [place(run, step, frame.axis), kind, runs.length > 1 ? `${run.name}: ${text}` : text])
    .filter(([at]) => at >= frame.first && at <= frame.last)
    .map(([at, kind, title]) => ({ tag: "line", class: `mark ${kind}`, x1: frame.x(at), x2: frame.x(at), y1: frame.top, y2: frame.bottom, title })));
}

function layerShapes(frame, lines, layers) {
  const twice = (values) => values.flatMap((value) => [value, value]);
  return layers.map((layer, index) => {
    const below = index ? layers[index - 1].y : layer.y.map(() => 0);
    return area(barEdges(layer.x), twice(below), twice(layer.y), `area ${lines[index].color}`, frame.x, frame.y);
  });
}

function lineShapes(frame, line, smoothed) {
  const shapes = [];
  const y = (value) => frame.y(value, line.axis);
  const [low, high] = line.bands;
  if (low && high && low.x.length > 1) shapes.push(area(low.x, low.y, high.y, `band ${line.color}`, frame.x, frame.y));
  if (smoothed) shapes.push(polyline(line.points.x, line.points.y, `line raw ${line.color}`, frame.x, y));
  const side = line.axis === "right" && frame.right ? " right" : "";
  shapes.push(polyline(line.points.x, line.y, `line ${line.color}${side}`, frame.x, y));
  if (line.points.x.length > 40) return shapes;
  const dots = line.points.x.map((at, index) => ({ tag: "circle", class: `dot ${line.color}`, cx: frame.x(at), cy: y(line.y[index]), r: 2.2 }));
  return [...shapes, ...dots.filter((dot) => !Number.isNaN(dot.cy))];
}

/** Return the upper edges of areas on top of each other; a layer keeps its value until its next point. */
function stack(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.points.x))].sort((a, b) => a - b);
  const total = xs.map(() => 0);
  return lines.map((line) => {
    const values = new Map(line.points.x.map((x, index) => [x, line.y[index]]));
    let last = 0;
    xs.forEach((x, index) => { last = values.has(x) ? values.get(x) : last; total[index] += last; });
    return { x: xs, y: [...total] };
  });
}

/** Return the left and the right edge of each bar; bars meet half-way between two places. */
function barEdges(xs) {
  const middle = (index) => (xs[index - 1] + xs[index]) / 2;
  return xs.flatMap((x, index) => [index ? middle(index) : x, index < xs.length - 1 ? middle(index + 1) : x]);
}

function polyline(xs, ys, name, x, y) {
  const parts = [];
  let open = false;
  xs.forEach((at, index) => {
    const height = y(ys[index]);
    if (Number.isNaN(height)) { open = false; return; }
    parts.push(`${open ? "L" : "M"}${x(at).toFixed(1)} ${height.toFixed(1)}`);
    open = true;
  });
  return { tag: "path", class: name, d: parts.join("") };
}

function area(xs, low, high, name, x, y) {
  const up = xs.map((at, index) => `${x(at).toFixed(1)},${y(high[index]).toFixed(1)}`);
  const down = xs.map((at, index) => `${x(at).toFixed(1)},${y(low[index]).toFixed(1)}`).reverse();
  return { tag: "polygon", class: name, points: [...up, ...down].join(" ") };
}

/** Return the value of a line at the known place nearest to `at` on an axis; null if it has none, and beyond the run. */
function valueAt(run, name, at, axis) {
  const points = pointsOf(run, name, axis);
  const index = nearest(points.x, at);
  return index < 0 || at > lastPlace(run, axis) ? null : points.y[index];
}

/** Return where the last step of a run lies on the x axis. */
function lastPlace(run, axis) {
  return run.steps.length ? place(run, run.steps[run.steps.length - 1], axis) : -Infinity;
}

/** Return the run that reaches furthest on the x axis: its steps are those that one points at. */
function longestRun(runs, axis) {
  return runs.reduce((one, other) => (lastPlace(other, axis) > lastPlace(one, axis) ? other : one));
}

/** Return the names that contain every word of a query, those that begin with it first. */
function searchNames(names, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return [];
  const fits = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  const rank = (name) => (name.toLowerCase().startsWith(words[0]) ? 0 : 1);
  return fits.sort((a, b) => rank(a) - rank(b) || a.length - b.length || (a < b ? -1 : 1));
}

// -- samples ---------------------------------------------------------------------------------------------------------

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Split a text into pieces `[text, hidden]`: characters that are invisible, or would reorder the text around them, are
 *  pieces of their own, with their number. */
function visible(text) {
  const pieces = [];
  let last = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > last) pieces.push([text.slice(last, match.index), false]);
    pieces.push([`U+${match[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`, true]);
    last = match.index + 1;
  }
  if (last < text.length) pieces.push([text.slice(last), false]);
  return pieces;
}

/** Split a response into `[text, reasoning]` pieces at <think> tags; one that is not closed reaches to the end. */
function splitReasoning(text) {
  const pieces = [];
  let rest = text;
  const early = rest.indexOf("</think>"), first = rest.indexOf("<think>");
  if (early >= 0 && (first < 0 || early < first)) {
    pieces.push([rest.slice(0, early), true]);
    rest = rest.slice(early + 8);
  }
  for (;;) {
    const begin = rest.indexOf("<think>");
    if (begin < 0) break;
    if (begin > 0) pieces.push([rest.slice(0, begin), false]);
    const end = rest.indexOf("</think>", begin);
    pieces.push([rest.slice(begin + 7, end < 0 ? undefined : end), true]);
    rest = end < 0 ? "" : rest.slice(end + 8);
  }
  if (rest) pieces.push([rest, false]);
  return pieces.filter(([piece]) => piece.trim() !== "");
}

/** Split the text of a prompt, `role: text` by line, into messages; of any other text one message. */
function splitPrompt(text) {
  const messages = [];
  for (const line of text.split("\n")) {
    const match = /^(system|user|assistant|tool|developer): ?(.*)$/s.exec(line);
    if (match) messages.push({ role: match[1], text: match[2] });
    else if (messages.length) messages[messages.length - 1].text += `\n${line}`;
    else messages.push({ role: "prompt", text: line });
  }
  return messages;
}

/** Say why a sample had its advantage, in a sentence. */
function explain(sample, group) {
  if (sample.fault) return `It could not be graded (${sample.fault}), so it is left out of its group and not trained on.`;
  if (sample.score === undefined) return "It has no reward.";
  const reward = `Reward ${number(sample.score)}`;
  if (sample.kind === "validation") return group.size > 1 ? `${reward}; mean ${number(group.mean)} of ${group.size} responses to this prompt.` : `${reward}.`;
  if (group.size < 2 || group.mean === null) {
    return sample.advantage === undefined ? `${reward}; it has no group to compare with.` : `${reward}, advantage ${signed(sample.advantage)}.`;
  }
  const text = `${reward}; the ${group.size} responses to this prompt have the mean ${number(group.mean)}`;
  if (!group.deviation) {
    const lesson = sample.advantage ? `so its advantage of ${signed(sample.advantage)} comes from elsewhere` : "so there is nothing to learn from them";
    return `${text}, all the same, ${sample.stored ? lesson : "from which a group estimator such as GRPO learns nothing"}.`;
  }
  const deviation = `${text} and the standard deviation ${number(group.deviation)}`;
  const byDeviation = (sample.score - group.mean) / group.deviation, byMean = sample.score - group.mean;
  if (!sample.stored) return `${deviation}. Compared within the group its advantage is ${signed(byDeviation)}; the one it was trained with was not stored.`;
  const near = (value) => Math.abs(value - sample.advantage) <= 0.02 * Math.max(1, Math.abs(value));
  const how = near(byDeviation) ? `(${number(sample.score)} − ${number(group.mean)}) / ${number(group.deviation)} = `
    : near(byMean) ? `${number(sample.score)} − ${number(group.mean)} = ` : "";
  return `${deviation}: advantage ${how}${signed(sample.advantage)}${sample.trained === false ? ", not trained on" : ""}.`;
}

function signed(value) {
  return `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value)) || 0}`;
}

/** Return the samples that fit the filters: run, kind, why, source, faults, step (the nearest one with samples), text. */
function filterSamples(samples, filters, prompts) {
  const words = (filters.text || "").toLowerCase();
  return samples.filter((one) =>
    (filters.run === undefined || filters.run === "" || one.run === Number(filters.run)) &&
    (!filters.kind || one.kind === filters.kind) &&
    (!filters.why || one.why.some((why) => why.startsWith(filters.why))) &&
    (!filters.source || one.source === filters.source) &&
    (filters.step === null || filters.step === undefined || one.step === filters.step) &&
    (!words || (one.output || "").toLowerCase().includes(words) || (prompts[one.prompt] || "").toLowerCase().includes(words)));
}

/** Return the step with samples that is nearest to a step, null if there are none. */
function nearestStep(samples, step) {
  const steps = [...new Set(samples.map((one) => one.step))].sort((a, b) => a - b);
  const index = nearest(steps, step);
  return index < 0 ? null : steps[index];
}

/** Return the samples in the order of a column; those without a value come last. */
function sortSamples(samples, key, down) {
  const valueOf = (one) => (key === "text" ? one.output || "" : key === "why" ? one.why.join() : one[key]);
  return [...samples].sort((a, b) => {
    const one = valueOf(a), other = valueOf(b);
    if (one === undefined || other === undefined) return (one === undefined) - (other === undefined);
    const order = one < other ? -1 : one > other ? 1 : 0;
    return (down ? -order : order) || a.step - b.step;
  });
}

/** Return samples of the same prompt, by step, of the same run or of several. */
function overSteps(samples, sample) {
  return samples.filter((one) => one.prompt === sample.prompt && one.kind === sample.kind)
    .sort((a, b) => a.step - b.step || a.run - b.run || (a.number || 0) - (b.number || 0));
}

/** Return the samples of the same group in their order. */
function groupOf(samples, sample) {
  return samples.filter((one) => one.group === sample.group).sort((a, b) => (a.number || 0) - (b.number || 0));
}

/** Add samples that were loaded later; prompts and groups get numbers of their own. */
function merge(data, more) {
  const prompts = new Map(data.prompts.map((text, index) => [text, index]));
  const numbers = more.prompts.map((text) => {
    if (!prompts.has(text)) { prompts.set(text, data.prompts.length); data.prompts.push(text); }
    return prompts.get(text);
  });
  const groups = data.groups.length;
  data.groups.push(...more.groups);
  Object.assign(data.pictures, more.pictures);
  const added = more.samples.map((one) => ({ ...one, prompt: numbers[one.prompt], group: one.group + groups }));
  const places = new Set(added.map((one) => `${one.run} ${one.kind} ${one.step}`));
  data.samples = [...data.samples.filter((one) => !places.has(`${one.run} ${one.kind} ${one.step}`)), ...added];
  return data;
}

// -- tokens ----------------------------------------------------------------------------------------------------------

/** What tokens can be colored by, of those that a sample has. */
function tokenModes(tokens) {
  const modes = [];
  if (tokens.log_probs || tokens.train_log_probs) modes.push("probability");
  if (tokens.entropies) modes.push("entropy");
  if (tokens.log_probs && tokens.train_log_probs) modes.push("engine − trainer");
  if (tokens.train_log_probs && tokens.teacher_log_probs) modes.push("policy − teacher");
  if (tokens.advantages) modes.push("advantage");
  return modes;
}

const LEAST_DIFFERENCE = 0.01; // of log-probs, at full strength: what is smaller is rounding, and looks faint

/** Return `[strength from 0 to 1, class]` of a token. Unlikely tokens are strong; 3 nats of entropy are full strength;
 *  a difference or an advantage is relative to the largest of the sample. */
function tokenColor(tokens, index, mode) {
  if (tokens.sampled && !tokens.sampled[index]) return [0, "observed"];
  if (mode === "probability") {
    const value = (tokens.log_probs || tokens.train_log_probs)[index];
    return value === null ? [0, ""] : [1 - Math.exp(value), "warm"];
  }
  if (mode === "entropy") return [Math.min((tokens.entropies[index] || 0) / 3, 1), ""];
  const [left, right] = mode === "policy − teacher" ? ["train_log_probs", "teacher_log_probs"] : ["log_probs", "train_log_probs"];
  const valueOf = mode === "advantage" ? (at) => tokens.advantages[at] || 0
    : (at) => (tokens[left][at] || 0) - (tokens[right][at] || 0);
  let most = 0;
  for (let at = 0; at < tokens.ids.length; at += 1) most = Math.max(most, Math.abs(valueOf(at)));
  if (mode !== "advantage") most = Math.max(most, LEAST_DIFFERENCE);
  const value = valueOf(index);
  return [most ? Math.abs(value) / most : 0, value < 0 ? "negative" : ""];
}

/** Return everything that is known of a token, as a line. */
function tokenLine(tokens, index) {
  const parts = [`#${index}`, `id ${tokens.ids[index]}`];
  const add = (name, label, convert) => {
    const value = tokens[name] && tokens[name][index];
    if (value !== null && value !== undefined) parts.push(`${label} ${convert ? convert(value) : number(value)}`);
  };
  add("log_probs", "engine", (value) => `${number(value)} (${(100 * Math.exp(value)).toPrecision(3)}%)`);
  add("train_log_probs", "trainer");
  const [engine, trainer] = ["log_probs", "train_log_probs"].map((name) => tokens[name] && tokens[name][index]);
  if (typeof engine === "number" && typeof trainer === "number") parts.push(`difference ${signed(engine - trainer)}`);
  add("teacher_log_probs", "teacher");
  add("entropies", "entropy");
  add("advantages", "advantage", signed);
  if (tokens.sampled && !tokens.sampled[index]) parts.push("observed, not trained on");
  return parts.join("  ·  ");
}

/** Return the text of a token with its line ends and outer spaces visible. */
function tokenText(text) {
  return (text === "" ? "∅" : text).replace(/\n/g, "↵\n").replace(/\t/g, "→\t");
}

if (typeof module !== "undefined") {
  module.exports = {
    area, barEdges, explain, filterSamples, groupOf, lastPlace, linesOf, longestRun, lowerBound, merge, nearest, nearestStep, number, overSteps, picture, place,
    pointsOf, range, searchNames, short, signed, smooth, sortSamples, splitPrompt, splitReasoning, stack, ticks, tokenColor,
    tokenLine, tokenModes, tokenText, valueAt, visible,
  };
}
