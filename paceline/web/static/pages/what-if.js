// What if: other policies, budgets and loads on this server's last minutes or on a trace, simulated by the server beside its
// work; what is asked, how far it is, and results as a table.
import { h, signal, useEffect } from "../vendor/preact.js";
import { ApiError, callAsTab, key } from "../lib/api.js";
import { duration, visible } from "../lib/format.js";
import { forgetPair, nameOf, onKey, Pair, seen, sides } from "./what-if-pair.js";

/** @type {{ value: any }} what the server says */
const told = signal(null);
const failed = signal("");
const sending = signal("");
/** why the trace's times may be in another unit */
const doubt = signal("");
/** @type {{ value: { param: string | null, message: string } | null }} why the last job was refused */
const bad = signal(null);
/** @type {{ value: any }} what the form holds */
const form = signal({ workload: "minutes", minutes: "10", policies: null, budgets: "", loads: "1", max_num_seqs: "", times: "server", hardware: "", model: "", ttft_ms: "", tpot_ms: "" });
/** @type {File | null} */
let file = null;
/** @type {File | null} the one that the server has */
let sent = null;
let refused = false;
let askedWith = "";
// questions that were asked, and the last that was answered: what comes behind a later question's answer is not shown
let asked = 0, answered = 0;

const running = () => told.value?.job.status === "running";

async function look() {
  if (refused && askedWith === key.value) return;
  // what was done with another key is not this one's
  if (askedWith !== key.value) forget();
  askedWith = key.value;
  const of = key.value, turn = ++asked;
  const isLate = () => of !== key.value || turn < answered;
  try {
    const found = await (await callAsTab("/ui/api/what-if")).json();
    if (isLate()) return;
    answered = turn;
    take(found);
    failed.value = "";
    refused = false;
  } catch (error) {
    if (isLate()) return;
    answered = turn;
    refused = error instanceof ApiError && [401, 403, 404].includes(error.status);
    failed.value = error instanceof ApiError ? error.message : "The server does not answer.";
  }
}

function forget() {
  sent = null;
  forgetPair();
}

/** @param {any} found */
function take(found) {
  told.value = found;
  // the server gave it up for somebody else's
  if (found.trace_bytes === null) sent = null;
  const { policies, workload } = form.value;
  // as this server is, and another one to compare it with
  if (!policies) {
    const own = found.server.policy;
    const other = found.choices.policies.find((/** @type {string} */ name) => name !== own);
    form.value = { ...form.value, policies: [own, other].filter(Boolean), workload: found.minutes ? workload : "trace", times: found.minutes ? "server" : "card",
      hardware: found.choices.hardware[0], model: found.choices.models[0] };
  }
  const done = found.job.results ?? [];
  if (done.length && sides.value.job !== found.job.number) sides.value = { job: found.job.number, a: done[0].run, b: done[0].run };
  // the second run, once it is there
  if (sides.value.a === sides.value.b && done.length > 1 && !sides.value.chosen) sides.value = { ...sides.value, b: done[1].run };
}

/** @param {string} text @returns {(number | string)[]} numbers where they are numbers: the server says what is wrong with the rest */
const list = (text) => text.split(/[,;\s]+/).filter(Boolean).map((part) => (Number.isNaN(Number(part)) ? part : Number(part)));
/** @param {string} text */
const number = (text) => (text.trim() === "" ? undefined : list(text)[0]);

async function run() {
  bad.value = null;
  const { workload, minutes, policies, budgets, loads, max_num_seqs, times, hardware, model, ttft_ms, tpot_ms } = form.value;
  const body = {
    workload, policies, minutes: workload === "minutes" ? number(minutes) : undefined, budgets: budgets.trim() ? list(budgets) : undefined, loads: list(loads),
    max_num_seqs: number(max_num_seqs), hardware: times === "card" ? hardware : undefined, model: times === "card" ? model : undefined,
    ttft_ms: number(ttft_ms), tpot_ms: number(tpot_ms),
  };
  try {
    if (workload === "trace" && file && file !== sent) {
      sending.value = `Sending ${visible(file.name)}.`;
      const { trace_bytes, doubt: said } = await (await callAsTab("/ui/api/what-if/trace", { method: "PUT", body: file })).json();
      told.value = { ...told.value, trace_bytes };
      doubt.value = said ?? "";
      sent = file;
    }
    sending.value = "Asking the server.";
    const job = await (await callAsTab("/ui/api/what-if", { method: "POST", body: JSON.stringify(body) })).json();
    // how an earlier job is may still be under way
    answered = ++asked;
    forgetPair();
    take({ ...told.value, job });
  } catch (error) {
    bad.value = { param: error instanceof ApiError ? error.param : null, message: error instanceof Error ? error.message : String(error) };
  } finally {
    sending.value = "";
  }
}

async function cancel() {
  try {
    await callAsTab("/ui/api/what-if", { method: "DELETE" });
  } catch (error) {
    failed.value = error instanceof Error ? error.message : String(error);
  }
  await look();
}

// ------------------------------------------------------------------ the form

/** Its words, and beneath it what the server has against it. @param {{ name: string, label: string, children: any, hint?: string }} props */
function Field({ name, label, children, hint }) {
  const wrong = bad.value?.param === name;
  return h("div", { class: "what-if-field" },
    h("label", null, h("span", null, label), children),
    hint && h("p", { class: "quiet hint-line" }, hint),
    wrong && h("p", { class: "bad", id: `bad-${name}`, role: "alert" }, visible(bad.value?.message ?? "")));
}

/** @param {string} name */
const about = (name) => ({
  name, value: form.value[name], "aria-invalid": bad.value?.param === name ? "true" : undefined, "aria-describedby": bad.value?.param === name ? `bad-${name}` : undefined,
  onInput: (/** @type {any} */ event) => (form.value = { ...form.value, [name]: event.target.value }),
});

/** @param {string} name @param {string} value @param {string} label @param {boolean} [off] */
const radio = (name, value, label, off) => h("label", { class: "tick" },
  h("input", { type: "radio", name, value, checked: form.value[name] === value, disabled: off, onChange: () => (form.value = { ...form.value, [name]: value }) }), label);

function Form() {
  const { choices, server, minutes, most_runs: most } = told.value;
  const { workload, policies, budgets, loads, times } = form.value;
  const runs = (policies?.length ?? 0) * Math.max(1, list(budgets).length) * Math.max(1, list(loads).length);
  const select = (/** @type {string} */ name, /** @type {string[]} */ names) => h("select", about(name), names.map((each) => h("option", { value: each }, each)));
  return h("form", { class: "what-if-form", onSubmit: (/** @type {Event} */ event) => { event.preventDefault(); if (!running()) run(); } },
    h("fieldset", null, h("legend", null, "Workload"),
      radio("workload", "minutes", "This server's last minutes", !minutes),
      h("p", { class: "quiet hint-line" }, minutes ? `It remembers ${minutes.requests} requests of the last ${Math.max(1, Math.round(minutes.seconds / 60))} min.` : "This server keeps no timeline (--no-timeline)."),
      workload === "minutes" && h(Field, { name: "minutes", label: "Minutes" }, h("input", { ...about("minutes"), inputMode: "decimal" })),
      radio("workload", "trace", "A trace"),
      workload === "trace" && h(Field, { name: "trace", label: "File: CSV or JSON lines with times and lengths, up to 32 MiB", hint: "Formats: docs/understand/simulator.md. It is deleted when the server ends." },
        h("input", { type: "file", accept: ".csv,.jsonl,.json,.txt", "aria-invalid": bad.value?.param === "trace" ? "true" : undefined, "aria-describedby": bad.value?.param === "trace" ? "bad-trace" : undefined, onChange: (/** @type {any} */ event) => { file = event.target.files[0] ?? null; doubt.value = ""; } })),
      workload === "trace" && doubt.value && h("p", { class: "notice" }, `Of this trace, ${doubt.value}: convert them if so.`),
      bad.value?.param === "workload" && h("p", { class: "bad", id: "bad-workload", role: "alert" }, visible(bad.value.message))),
    h("fieldset", null, h("legend", null, "Policies"),
      choices.policies.map((/** @type {string} */ name) => h("label", { class: "tick", key: name },
        h("input", { type: "checkbox", checked: policies?.includes(name), onChange: (/** @type {any} */ event) => {
          const rest = (form.value.policies ?? []).filter((/** @type {string} */ each) => each !== name);
          form.value = { ...form.value, policies: event.target.checked ? [...rest, name] : rest };
        } }), name, name === server.policy && h("span", { class: "quiet" }, "(this server's)"))),
      bad.value?.param === "policies" && h("p", { class: "bad", id: "bad-policies", role: "alert" }, visible(bad.value.message))),
    h("fieldset", null, h("legend", null, "Budgets and loads"),
      h(Field, { name: "budgets", label: "Tokens in a step, several with commas" }, h("input", { ...about("budgets"), placeholder: server.max_num_batched_tokens })),
      h(Field, { name: "loads", label: "Loads, several with commas", hint: "2: twice as many requests a second" }, h("input", about("loads"))),
      h(Field, { name: "max_num_seqs", label: "Requests running at once" }, h("input", { ...about("max_num_seqs"), placeholder: server.max_num_seqs, inputMode: "numeric" }))),
    h("fieldset", null, h("legend", null, "Step times and targets"),
      radio("times", "server", "As this server's steps were", !minutes),
      radio("times", "card", "Of a hardware and a model"),
      times === "card" && [h(Field, { name: "hardware", label: "Hardware" }, select("hardware", choices.hardware)), h(Field, { name: "model", label: "Model" }, select("model", choices.models))],
      bad.value?.param === "hardware" && times === "server" && h("p", { class: "bad", role: "alert" }, visible(bad.value.message)),
      h("div", { class: "fields" },
        h(Field, { name: "ttft_ms", label: "First token, ms" }, h("input", { ...about("ttft_ms"), inputMode: "decimal", placeholder: "none" })),
        h(Field, { name: "tpot_ms", label: "Each token, ms" }, h("input", { ...about("tpot_ms"), inputMode: "decimal", placeholder: "none" }))),
      h("p", { class: "quiet hint-line" }, "Targets of requests that have none.")),
    h("div", { class: "what-if-run" },
      running() ? h("button", { type: "button", onClick: cancel }, "Cancel") : h("button", { type: "submit", class: "main", disabled: !runs || runs > most || sending.value !== "" }, runs === 1 ? "Simulate" : `Simulate ${runs} runs`),
      h("span", { class: "quiet", role: "status" }, sending.value || (runs > most ? `At most ${most} runs at once.` : told.value.busy ? "Another caller's simulation is running: yours can begin when it has ended." : "")),
      bad.value && !["workload", "trace", "minutes", "policies", "budgets", "loads", "max_num_seqs", "hardware", "model", "ttft_ms", "tpot_ms"].includes(bad.value.param ?? "") &&
        h("div", { class: "error", role: "alert" }, visible(bad.value.message))));
}

function Progress() {
  const { job } = told.value;
  if (job.status === "idle") return h("p", { class: "quiet" }, "Nothing was simulated yet. It runs when nothing else wants the processor, for two minutes of it at most.");
  const doing = { starting: "Starting.", reading: "Reading the workload.", fitting: "Learning how long steps take.", simulating: `Simulating ${job.requests ?? ""} requests, run ${Math.min((job.results?.length ?? 0) + 1, job.runs ?? 1)} of ${job.runs ?? ""}.` };
  if (job.status === "running") {
    return h("div", { class: "what-if-progress" },
      h("label", { for: "what-if-done" }, doing[/** @type {keyof typeof doing} */ (job.doing)] ?? job.doing), h("progress", { id: "what-if-done", max: 1, value: job.done }));
  }
  const said = { done: `Done in ${duration(1e3 * job.seconds)}.`, cancelled: `Cancelled${job.error ? `: ${job.error}` : ""}.`, failed: `It failed: ${job.error}.` };
  return [
    h("p", { class: job.status === "failed" ? "notice bad" : "quiet", role: "status" }, visible(said[/** @type {keyof typeof said} */ (job.status)] ?? job.status)),
    job.left_out > 0 && h("p", { class: "notice" }, `The first ${job.requests} requests were simulated; ${job.left_out} more were left out.`),
  ];
}

// ------------------------------------------------------------------ results

/** @param {any} distribution @param {string} name */
const at = (distribution, name) => (distribution ? duration(1e3 * distribution[name]) : "–");
/** @param {number} share */
const percent = (share) => `${(100 * share).toFixed(1)} %`;
/** @param {number} value */
const plain = (value) => String(Number(value.toPrecision(3)));

function Results() {
  const { results } = told.value.job;
  if (!results?.length) return null;
  const classes = [...new Set(results.flatMap((/** @type {any} */ result) => Object.keys(result.by_class)))].sort();
  const names = ["Policy", "Tokens in a step", "Load", "Offered, requests/s", "First token, p50", "p99", "Each token, p50", "p99", "Met", "Goodput, requests/s", "Refused", "Preempted", "Busy"];
  // among those of the same load
  const best = (/** @type {any} */ result) => results.every((/** @type {any} */ other) => other.load !== result.load || other.goodput <= result.goodput);
  const side = (/** @type {"a" | "b"} */ name, /** @type {any} */ result) => h("td", null, h("input", { type: "radio", name: `side-${name}`, checked: sides.value[name] === result.run,
    "aria-label": `${name === "a" ? "First" : "Second"} timeline: ${nameOf(result)}`, onChange: () => (sides.value = { ...sides.value, [name]: result.run, chosen: true }) }));
  return h("section", { class: "what-if-results", "aria-labelledby": "compared" },
    h("h2", { id: "compared" }, "Compared"),
    h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Results" }, h("table", { class: "compared" },
      h("thead", null, h("tr", null, names.map((name, i) => h("th", { scope: "col", class: i ? "num" : undefined }, name)),
        classes.length > 1 && classes.map((name) => h("th", { scope: "col", class: "num" }, `Met, ${visible(name)}`)), h("th", { scope: "col" }, "First below"), h("th", { scope: "col" }, "Second below"))),
      h("tbody", null, results.map((/** @type {any} */ result) => h("tr", { key: result.run, class: best(result) && results.length > 1 ? "best" : undefined },
        h("th", { scope: "row" }, visible(result.policy)),
        [result.budget, `${result.load}×`, plain(result.offered_rate), at(result.ttft, "p50"), at(result.ttft, "p99"), at(result.tpot, "p50"), at(result.tpot, "p99"), percent(result.attainment),
          best(result) && results.length > 1 ? h("b", null, `${plain(result.goodput)} ★`) : plain(result.goodput), result.refused, result.preemptions, percent(result.busy)].map((value, i) => h("td", { key: i, class: "num" }, value)),
        classes.length > 1 && classes.map((name) => h("td", { class: "num", key: name }, result.by_class[name] ? percent(result.by_class[name].attainment) : "–")),
        side("a", result), side("b", result)))))),
    results.length > 1 && h("p", { class: "quiet" }, "★: the most goodput of its load. Attainment and goodput count requests within all their targets."),
    h(Pair, { results }));
}

// ------------------------------------------------------------------ the page

/** @param {{ shown: boolean }} props */
export function WhatIf({ shown }) {
  const busy = running();
  useEffect(() => {
    if (!shown) return;
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [shown]);
  useEffect(() => {
    // a job without a viewer is ended, so another tab of this page asks for it too
    if (!shown && !busy) return;
    look();
    const timer = setInterval(look, busy ? 1000 : 5000);
    return () => clearInterval(timer);
  }, [shown, busy, key.value]);
  return h("div", { class: "page what-if" },
    h("h1", null, "What if"),
    failed.value && h("div", { class: "error", role: "alert" }, visible(failed.value)),
    told.value && !refused ? [h(Form, null), h(Progress, null), h(Results, null)] : !failed.value && h("p", { class: "quiet" }, "Asking the server."));
}

// for tests and for the console
/** @type {any} */ (globalThis).pacelineWhatIf = { told, ...seen };
