// The page's logic, run by `node --test` (tests/report/test_script.py).
const test = require("node:test");
const assert = require("node:assert/strict");
const path = require("node:path");
const logic = require(path.join(__dirname, "../../hybridrl/report/logic.js"));

const RUN = {
  name: "one", per_step: 8, steps: [0, 1, 2, 4], seconds: [1, 3, 5, 9], marks: [[2, "resume", "resumed at step 2"]],
  series: { "critic/score/mean": { y: [0.1, 0.2, 0.4, 0.8] }, "val/x": { x: [0, 4], y: [0, 1] } },
};
const PANEL = { title: "Reward", kind: "lines", lines: [{ series: "critic/score/mean", label: "mean", axis: "left", band: null, color: "s0" }] };

test("the nearest of sorted values is found, and of two equally near ones the first", () => {
  assert.equal(logic.nearest([1, 3, 7], 4.9), 1);
  assert.equal(logic.nearest([1, 3, 7], 5), 1);
  assert.equal(logic.nearest([1, 3, 7], 99), 2);
  assert.equal(logic.nearest([], 1), -1);
});

test("a step lies at its samples or at its seconds, between two known steps in proportion", () => {
  assert.equal(logic.place(RUN, 3, "step"), 3);
  assert.equal(logic.place(RUN, 3, "samples"), 24);
  assert.equal(logic.place(RUN, 3, "seconds"), 7);
  assert.equal(logic.place(RUN, 99, "seconds"), 9);
});

test("a series without steps of its own has those of the run", () => {
  assert.deepEqual(logic.pointsOf(RUN, "critic/score/mean", "step").x, [0, 1, 2, 4]);
  assert.deepEqual(logic.pointsOf(RUN, "val/x", "samples"), { steps: [0, 4], x: [0, 32], y: [0, 1] });
  assert.deepEqual(logic.pointsOf(RUN, "missing", "step").x, []);
});

test("smoothing does not lag at its start and 0 changes nothing", () => {
  assert.deepEqual(logic.smooth([1, 2], 0), [1, 2]);
  assert.deepEqual(logic.smooth([3, 3, 3], 0.9).map((value) => +value.toFixed(9)), [3, 3, 3]);
  // (0.5 * 0.5 * 1 + 0.5 * 4) / 0.75
  assert.equal(+logic.smooth([1, 4], 0.5)[1].toFixed(6), 3);
});

test("ticks are round numbers inside the range", () => {
  assert.deepEqual(logic.ticks(0, 1).map((value) => +value.toFixed(3)), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(logic.ticks(1, 3, true), [1, 2, 3]);
});

test("values that differ by rounding only have an axis with few ticks", () => {
  const [low, high] = logic.range([1e-4, 1.0000000000001e-4]);
  assert.ok(low < 0.95e-4 && high > 1.05e-4);
  assert.ok(logic.ticks(low, high).length <= 6);
  assert.ok(logic.ticks(1e16, 1e16 + 2).length <= 12);
});

test("numbers are short on an axis and keep their digits in a readout", () => {
  assert.deepEqual([12000, 2.5e-7, 0.25, 3e6].map(logic.short), ["12k", "2.5e-7", "0.25", "3M"]);
  assert.deepEqual([0.96875, 12345, 2e-7, null].map(logic.number), ["0.969", "12,345", "2.0e-7", ""]);
  assert.deepEqual([1.5, -1.5, 0].map(logic.signed), ["+1.5", "−1.5", "0"]);
});

test("an axis begins at 0 where that loses little, and a log scale leaves out what is not positive", () => {
  assert.equal(logic.range([0.1, 1])[0], 0);
  assert.ok(logic.range([0.9, 1])[0] > 0.8);
  assert.deepEqual(logic.range([0, -1], true), null);
  const [low, high] = logic.range([0, 1, 100], true);
  assert.ok(low < 0 && low > -0.2 && high > 2 && high < 2.2);
});

test("a picture has its line in the frame, its marks, and finds steps by pixels", () => {
  const made = logic.picture(PANEL, [RUN], { width: 300, height: 190, axis: "step", amount: 0, log: false });
  const line = made.shapes.find((shape) => shape.class === "line s0");
  assert.match(line.d, /^M46\.0 \d/);
  assert.equal(made.shapes.filter((shape) => shape.class === "mark resume").length, 1);
  assert.equal(Math.round(made.value(made.x(2))), 2);
});

test("noise of rounding does not fill an axis that has a least value", () => {
  const y = [1.7e-7, 1.8e-7, 1.72e-7, 1.79e-7];
  const run = { ...RUN, marks: [], series: { kl: { y }, gap: { y } } };
  const line = { ...PANEL.lines[0], series: "kl", least: 0.01 };
  const lines = [line, { ...line, series: "gap", axis: "right", least: 1e-4 }];
  const made = logic.picture({ ...PANEL, lines }, [run], { width: 300, height: 190, axis: "step", amount: 0, log: false });
  const labels = made.shapes.filter((shape) => /^tick( end)?$/.test(shape.class)).map((shape) => Number(shape.text));
  assert.ok(Math.max(...labels) >= 0.005 && Math.min(...labels.filter(Boolean)) >= 1e-5);
  const heights = made.shapes.filter((shape) => shape.tag === "circle").map((shape) => shape.cy);
  assert.ok(heights.length === 8 && Math.max(...heights) - Math.min(...heights) < 1); // of 190
});

test("a panel without values has no picture, and one of several runs a line for each", () => {
  const options = { width: 300, height: 190, axis: "step", amount: 0, log: false };
  assert.equal(logic.picture({ ...PANEL, lines: [{ ...PANEL.lines[0], series: "missing" }] }, [RUN], options), null);
  const made = logic.picture(PANEL, [RUN, { ...RUN, name: "two" }], options);
  assert.deepEqual(made.lines.map((line) => [line.label, line.color]), [["one", "r0"], ["two", "r1"]]);
});

test("a run has no value beyond its last step, and one points at the steps of the longest", () => {
  const long = { ...RUN, steps: [0, 10, 20], seconds: [1, 2, 3], series: { x: { y: [1, 2, 3] } } };
  assert.equal(logic.longestRun([RUN, long], "step"), long);
  assert.equal(logic.longestRun([RUN, long], "seconds"), RUN);
  assert.equal(logic.valueAt(RUN, "critic/score/mean", 20, "step"), null);
  assert.equal(logic.valueAt(RUN, "critic/score/mean", 3.9, "step"), 0.8);
  assert.equal(logic.valueAt(long, "x", 9, "step"), 2);
});

test("layers are stacked and bars meet half-way", () => {
  const lines = [{ points: { x: [1, 2] }, y: [1, 2] }, { points: { x: [1, 2] }, y: [10, 20] }];
  assert.deepEqual(logic.stack(lines).map((layer) => layer.y), [[1, 2], [11, 22]]);
  assert.deepEqual(logic.barEdges([1, 2, 4]), [1, 1.5, 1.5, 3, 3, 4]);
});

test("metrics are found by all words of a query", () => {
  const names = ["actor/entropy", "timing_s/gen", "actor/entropy_loss", "perf/entropy"];
  assert.deepEqual(logic.searchNames(names, "entropy actor"), ["actor/entropy", "actor/entropy_loss"]);
  assert.deepEqual(logic.searchNames(names, " "), []);
});

test("invisible and reordering characters and half surrogates become visible pieces", () => {
  assert.deepEqual(logic.visible("a\u202eb"), [["a", false], ["U+202E", true], ["b", false]]);
  assert.deepEqual(logic.visible("\x00\ud800"), [["U+0000", true], ["U+D800", true]]);
  assert.deepEqual(logic.visible("one\ntwo \u{1f600}"), [["one\ntwo \u{1f600}", false]]);
});

test("reasoning is split off, closed or not, also where only its end is there", () => {
  assert.deepEqual(logic.splitReasoning("<think>a</think>b"), [["a", true], ["b", false]]);
  assert.deepEqual(logic.splitReasoning("x<think>a"), [["x", false], ["a", true]]);
  assert.deepEqual(logic.splitReasoning("a</think>b"), [["a", true], ["b", false]]);
});

test("a prompt's text is split by role", () => {
  assert.deepEqual(logic.splitPrompt("system: s\nuser: a\nb"), [{ role: "system", text: "s" }, { role: "user", text: "a\nb" }]);
  assert.deepEqual(logic.splitPrompt("2+2="), [{ role: "prompt", text: "2+2=" }]);
});

test("an advantage is explained by the group, in the form that gives it", () => {
  const group = { size: 4, mean: 0.25, deviation: 0.5, scores: [1, 0, 0, 0] };
  const sample = { kind: "training", score: 1, advantage: 1.5, stored: true };
  assert.equal(logic.explain(sample, group), "Reward 1; the 4 responses to this prompt have the mean 0.25 and the standard deviation 0.5: advantage (1 − 0.25) / 0.5 = +1.5.");
  assert.match(logic.explain({ ...sample, advantage: 0.75 }, group), /advantage 1 − 0.25 = \+0.75\.$/);
  assert.match(logic.explain({ ...sample, advantage: 0.1 }, group), /: advantage \+0.1\.$/);
  assert.match(logic.explain({ ...sample, stored: false }, group), /was not stored/);
  assert.match(logic.explain({ ...sample, advantage: 0 }, { ...group, deviation: 0 }), /nothing to learn/);
  assert.match(logic.explain({ fault: "timeout" }, group), /could not be graded \(timeout\)/);
});

const SAMPLES = [
  { run: 0, kind: "training", step: 1, score: 0, why: ["worst"], output: "no", prompt: 0, group: 0, number: 1 },
  { run: 0, kind: "training", step: 3, score: 1, why: ["best"], output: "Yes", prompt: 1, group: 1, number: 0 },
  { run: 1, kind: "validation", step: 3, why: ["fault: timeout"], output: "", prompt: 1, group: 2 },
];

test("samples are filtered by kind, reason, step and text", () => {
  const filter = (filters) => logic.filterSamples(SAMPLES, filters, ["two", "three"]).map((one) => one.output);
  assert.deepEqual(filter({ kind: "training" }), ["no", "Yes"]);
  assert.deepEqual(filter({ why: "fault" }), [""]);
  assert.deepEqual(filter({ step: 1 }), ["no"]);
  assert.deepEqual(filter({ text: "THREE" }), ["Yes", ""]);
  assert.deepEqual(filter({ run: "1" }), [""]);
  assert.equal(logic.nearestStep(SAMPLES, 9), 3);
});

test("samples are sorted, and those without a value come last both ways", () => {
  assert.deepEqual(logic.sortSamples(SAMPLES, "score", true).map((one) => one.score), [1, 0, undefined]);
  assert.deepEqual(logic.sortSamples(SAMPLES, "score", false).map((one) => one.score), [0, 1, undefined]);
});

test("samples of a step that are loaded replace those that were chosen of it", () => {
  const data = { prompts: ["a", "b"], groups: [{}, {}, {}], samples: SAMPLES, pictures: { a: "first" } };
  const more = { pictures: { b: "second" }, prompts: ["b", "c"], groups: [{ size: 2 }], samples: [{ run: 0, kind: "training", step: 3, prompt: 1, group: 0, why: [] }] };
  const merged = logic.merge(data, more);
  assert.deepEqual(merged.prompts, ["a", "b", "c"]);
  assert.deepEqual(merged.pictures, { a: "first", b: "second" });
  assert.deepEqual(merged.samples.map((one) => [one.step, one.kind, one.prompt, one.group]),
    [[1, "training", 0, 0], [3, "validation", 1, 2], [3, "training", 2, 3]]);
});

test("tokens are colored by what is known of them, and observed ones are not", () => {
  const tokens = { ids: [1, 2], log_probs: [0, Math.log(0.25)], train_log_probs: [0, -1.5], entropies: [0, 6], advantages: [2, -1], sampled: [1, 1] };
  assert.deepEqual(logic.tokenModes(tokens), ["probability", "entropy", "engine − trainer", "advantage"]);
  assert.deepEqual(logic.tokenColor(tokens, 1, "probability"), [0.75, "warm"]);
  assert.deepEqual(logic.tokenColor(tokens, 1, "entropy"), [1, ""]);
  assert.deepEqual(logic.tokenColor(tokens, 1, "advantage"), [0.5, "negative"]);
  assert.deepEqual(logic.tokenColor({ ...tokens, sampled: [1, 0] }, 1, "probability"), [0, "observed"]);
  const close = { ...tokens, train_log_probs: [0.001, Math.log(0.25) + 0.005] };
  assert.deepEqual(logic.tokenColor(close, 0, "engine − trainer").map((one) => (one.toFixed ? +one.toFixed(6) : one)), [0.1, "negative"]);
  assert.match(logic.tokenLine(close, 1), /difference −0\.005 /);
  assert.match(logic.tokenLine(tokens, 1), /id 2 .* engine -1.386 \(25.0%\)/);
  const taught = { ...tokens, teacher_log_probs: [-1, -3.5] };
  assert.deepEqual(logic.tokenModes(taught)[3], "policy − teacher");
  assert.deepEqual(logic.tokenColor(taught, 0, "policy − teacher"), [0.5, ""]);
  assert.match(logic.tokenLine(taught, 1), /teacher -3.5/);
  assert.equal(logic.tokenText("a\n"), "a↵\n");
});
