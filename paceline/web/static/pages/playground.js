// Chat, completion and raw requests, and what became of each.
import { h, signal, useEffect, useRef } from "../vendor/preact.js";
import { ApiError, call, events, getJson, key, root } from "../lib/api.js";
import { bodyOf, FieldError, FIELDS, fieldOf } from "../lib/fields.js";
import { keep, openHere, setOpen } from "../lib/conversations.js";
import { visible } from "../lib/format.js";
import { repetition } from "../lib/repeats.js";
import { asCurl, asPython } from "../lib/snippets.js";
import { Conversations } from "./conversations.js";
import { Copy } from "./copy.js";
import { Outcome, Tokens } from "./outcome.js";
import { Said } from "./said.js";

const MODES = [["chat", "Chat"], ["completion", "Completion"], ["raw", "Raw request"]];
const mode = signal("chat");
const draft = signal("");
/** @type {{ value: Record<string, any> }} */
const values = signal({ explain: true });
/** @type {{ value: Record<string, string> }} what the server does without a field */
const defaults = signal({});
const model = signal("");
/** @type {{ value: { id: string, parent?: string | null }[] }} models and adapters of the server */
const models = signal([]);
/** @type {{ value: any[] }} */
const turns = signal([]);
/** @type {{ value: AbortController | null }} */
const running = signal(null);
/** @type {{ value: any }} the last refusal: text, field, when to come back */
const refused = signal(null);
/** id of the conversation, from its first answer on */
const conversation = signal("");
const REPEATS = "it repeats itself";
const rawPath = signal("/v1/chat/completions");
const rawBody = signal("");

async function learn() {
  try {
    models.value = (await getJson("/v1/models")).data;
    if (!models.value.some(({ id }) => id === model.value)) model.value = models.value[0].id;
    rawBody.value ||= JSON.stringify(
      { model: model.value, messages: [{ role: "user", content: "Say hello." }], max_tokens: 32 }, null, 2);
    const told = (await getJson("/props")).default_generation_settings?.params ?? {};
    const mapped = { ...told, repetition_penalty: told.repeat_penalty };
    defaults.value = Object.fromEntries(
      FIELDS.filter(({ name, group }) => group === "Sampling" && typeof mapped[name] === "number" && !["seed", "max_tokens"].includes(name))
        .map(({ name }) => [name, String(Number(mapped[name].toPrecision(6)))]));
  } catch {
    // the shell says that the server does not answer; the API's own defaults are shown
  }
}

/** Text that grows at most once a frame, whatever the tokens' rate. */
function growing() {
  const text = signal("");
  let more = "", asked = 0;
  const flush = () => {
    asked = 0;
    if (more) text.value += visible(more);
    more = "";
  };
  return { text, flush, add: (/** @type {string} */ piece) => {
    more += piece;
    // a hidden tab draws no frames, and has no reader
    if (!asked) asked = requestAnimationFrame(flush);
  } };
}

const plainOf = (earlier = turns.value) => earlier.filter((turn) => turn.plain).map(({ role, plain }) => ({ role, content: plain }));
/** What the model is told before what comes next. */
const history = (earlier = turns.value) => {
  const system = values.value.system?.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...plainOf(earlier)];
};

/** @param {string} plain @param {string} [sent] */
const userTurn = (plain, sent = plain) => ({ role: "user", text: signal(visible(sent)), plain, sent: plain });

function startAnew() {
  turns.value = [];
  conversation.value = "";
  setOpen("");
}

/** Show a conversation that was kept. @param {import("../lib/conversations.js").Kept} told */
function open({ id, system, turns: said }) {
  mode.value = "chat";
  values.value = { ...values.value, system };
  turns.value = said.map(({ role, content }) => role === "user" ? userTurn(content)
    : { role, how: "chat", path: "/v1/chat/completions", body: "", text: signal(visible(content)), plain: content, tokens: signal([]), outcome: signal(null) });
  conversation.value = id;
  setOpen(id);
}

function keepNow() {
  const said = plainOf();
  if (mode.value !== "chat" || !said.some(({ role }) => role === "assistant")) return;
  conversation.value ||= crypto.randomUUID?.() ?? String(Date.now());
  keep(conversation.value, values.value.system ?? "", said);
  setOpen(conversation.value);
}

/** Show the error of a field that is not JSON next to it. @param {unknown} error */
function tellOf(error) {
  if (!(error instanceof FieldError)) throw error;
  refused.value = { message: error.message, field: error.param };
}

async function send() {
  if (running.value) return;
  const how = mode.value;
  const text = draft.value;
  if (how !== "raw" && !text.trim()) return;
  refused.value = null;
  let path = how === "chat" ? "/v1/chat/completions" : "/v1/completions";
  let body = "";
  try {
    if (how === "raw") {
      path = rawPath.value;
      body = rawBody.value;
    } else {
      const said = how === "chat" ? [...history(), { role: "user", content: text }] : text;
      body = JSON.stringify(bodyOf(/** @type {any} */ (how), model.value, values.value, said));
    }
  } catch (error) {
    tellOf(error);
    return;
  }
  const asked = { ...userTurn(text, how === "raw" ? `POST ${path}` : text), plain: how === "chat" ? text : "" };
  await ask(how, path, body, [...turns.value, asked], how === "raw" ? "" : text, []);
}

/** Ask once more for the last answer. @param {any} turn */
async function retry(turn) {
  const at = turns.value.indexOf(turn);
  if (running.value || at < 1) return;
  refused.value = null;
  const earlier = turns.value.slice(0, at);
  try {
    const body = JSON.stringify(bodyOf("chat", model.value, values.value, history(earlier)));
    await ask("chat", "/v1/chat/completions", body, earlier, "", []);
  } catch (error) {
    tellOf(error);
  }
}

/** Take a message back to write it anew; what was said since goes. @param {any} turn */
function edit(turn) {
  const at = turns.value.indexOf(turn);
  if (running.value || at < 0) return;
  draft.value = turn.plain;
  turns.value = turns.value.slice(0, at);
  /** @type {HTMLElement | null} */ (document.querySelector(".ask textarea"))?.focus();
}

/** Go on with an answer from its end. @param {any} turn */
async function goOnFromEnd(turn) {
  const at = turns.value.indexOf(turn);
  if (running.value || at < 1) return;
  refused.value = null;
  const earlier = turns.value.slice(0, at);
  try {
    const body = bodyOf("chat", model.value, values.value, [...history(earlier), { role: "assistant", content: turn.plain }]);
    Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
    await ask("chat", "/v1/chat/completions", JSON.stringify(body), earlier, "", [{ token: turn.plain, logprob: 0, top_logprobs: [], whole: true }]);
  } catch (error) {
    tellOf(error);
  }
}

/**
 * Write an answer anew from one of its tokens on, with another one in its place.
 * @param {any} turn the answer @param {number} index of the token @param {any} other with its text and its probability
 */
async function goOn(turn, index, other) {
  const at = turns.value.indexOf(turn);
  if (running.value || at < 1) return;
  refused.value = null;
  const earlier = turns.value.slice(0, at), { how } = turn;
  const known = [...turn.tokens.value.slice(0, index), { ...turn.tokens.value[index], ...other }];
  const begun = known.map(({ token }) => token).join("");
  if (begun.includes("\ufffd") || turn.thought?.value) {
    // a token that is a part of a character has no text, and thoughts are no part of an answer
    refused.value = { message: begun.includes("\ufffd") ? "It cannot go on from here: a token before is a part of a character." : "It cannot go on within an answer that was thought about.", field: null, status: 0, until: 0 };
    return;
  }
  const said = how === "chat" ? [...history(earlier), { role: "assistant", content: begun }] : earlier[at - 1].sent + begun;
  let body;
  try {
    body = bodyOf(how, model.value, { ...values.value, logprobs: true }, said);
  } catch (error) {
    tellOf(error);
    return;
  }
  if (how === "chat") Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
  await ask(how, how === "chat" ? "/v1/chat/completions" : "/v1/completions", JSON.stringify(body), earlier, "", known);
}

/**
 * @param {string} how @param {string} path @param {string} body
 * @param {any[]} earlier turns that stay before the answer
 * @param {string} text what was sent of the draft, which is given back if nothing comes
 * @param {any[]} known tokens with which the answer begins
 */
async function ask(how, path, body, earlier, text, known) {
  const abort = new AbortController();
  running.value = abort;
  const before = turns.value;
  const grown = growing(), thought = growing();
  const begun = known.map(({ token }) => token).join("");
  if (begun) grown.add(begun);
  /** @type {any} */
  const answer = { role: "assistant", how, path, body, text: grown.text, thought: thought.text, plain: "", tokens: signal([]), outcome: signal(null) };
  turns.value = [...earlier, answer];
  following = true;
  if (text) draft.value = "";
  const began = performance.now();
  const outcome = { total: 0, first: null, usage: null, finish: "", target: Number(values.value.ttft_ms) || null };
  try {
    const response = await call(path, { method: "POST", body, signal: abort.signal });
    if (response.headers.get("content-type")?.startsWith("text/event-stream")) await read(response, answer, grown, thought, outcome, began, known);
    else grown.add(JSON.stringify(await response.json(), null, 2));
  } catch (error) {
    fail(error, abort, answer, before, text, outcome, how);
  } finally {
    // one that was stopped before it went on is what it began with
    if (answer.plain || abort.signal.aborted) answer.plain = begun + answer.plain;
    grown.flush();
    thought.flush();
    outcome.total = performance.now() - began;
    answer.outcome.value = outcome;
    running.value = null;
    keepNow();
  }
}

/**
 * @param {Response} response @param {any} answer @param {any} grown @param {any} thought @param {any} outcome
 * @param {number} began @param {any[]} known
 */
async function read(response, answer, grown, thought, outcome, began, known) {
  // an answer that goes on from its end was shown as one piece
  const tokens = known.filter(({ whole }) => !whole);
  const repeats = tokens.length < known.length || answer.how !== "chat" ? () => false : repetition();
  for await (const event of events(response)) {
    if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message, event.error.param, 0);
    if (event.usage) outcome.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    const piece = choice.delta?.content ?? choice.text ?? "";
    const thinks = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    if (piece || thinks) outcome.first ??= performance.now() - began;
    if (thinks) thought.add(thinks);
    for (const made of choice.delta?.tool_calls ?? []) {
      outcome.first ??= performance.now() - began;
      if (made.function?.name) grown.add(`\ncalls ${made.function.name} `);
      grown.add(made.function?.arguments ?? "");
    }
    if (piece) {
      answer.plain += piece;
      grown.add(piece);
      if (repeats(piece)) running.value?.abort(REPEATS);
    }
    for (const each of choice.logprobs?.content ?? []) tokens.push(each);
    const old = choice.logprobs?.tokens ?? [];
    old.forEach((/** @type {string} */ token, /** @type {number} */ i) => {
      const others = Object.entries(choice.logprobs.top_logprobs?.[i] ?? {});
      tokens.push({ token, logprob: choice.logprobs.token_logprobs[i],
        top_logprobs: others.map(([name, logprob]) => ({ token: name, logprob })) });
    });
    if (choice.finish_reason) outcome.finish = choice.finish_reason;
  }
  answer.tokens.value = tokens;
}

/**
 * @param {unknown} error @param {AbortController} abort @param {any} answer @param {any[]} before
 * @param {string} text @param {any} outcome @param {string} how
 */
function fail(error, abort, answer, before, text, outcome, how) {
  if (abort.signal.aborted) {
    outcome.finish = abort.signal.reason === REPEATS ? `stopped, as ${REPEATS}` : "stopped by you";
    return;
  }
  if (!(error instanceof ApiError) && !(error instanceof TypeError) && !(error instanceof SyntaxError)) throw error;
  const garbled = error instanceof SyntaxError;
  const told = error instanceof ApiError ? error
    : new ApiError(0, garbled ? "What came is not JSON: is something between this page and the server that changes it?" : "The server did not answer, or the stream was cut.", null, 0);
  refused.value = { message: told.message, field: how === "raw" ? null : fieldOf(told.param), status: told.status,
    until: told.retryAfter ? Date.now() + 1000 * told.retryAfter : 0 };
  if (!answer.plain) {
    // nothing came of it: the draft is given back, before what was typed since
    turns.value = before;
    draft.value = [text, draft.value].filter(Boolean).join("\n");
  } else outcome.finish = "cut off";
}

const left = signal(0);
function Refusal() {
  const told = refused.value;
  useEffect(() => {
    if (!told?.until) return;
    const tick = () => (left.value = Math.max(0, Math.ceil((told.until - Date.now()) / 1000)));
    tick();
    const timer = setInterval(tick, 250);
    return () => clearInterval(timer);
  }, [told]);
  if (!told || told.field) return null;
  return h("div", { class: "error", role: "alert" },
    h("b", null, told.status === 429 ? "Too many requests. " : told.status ? `Refused (${told.status}). ` : ""),
    visible(told.message),
    told.until ? h("p", { class: "countdown" }, left.value ? `Try again in ${left.value} s.` : "You may try again now.") : null);
}

/** @param {{ field: import("../lib/fields.js").Field }} props */
function Input({ field }) {
  const { name, label, kind = "number", fallback } = field;
  const value = values.value[name] ?? "";
  const set = (/** @type {any} */ told) => (values.value = { ...values.value, [name]: told });
  if (kind === "tick") {
    return h("label", { class: "tick wide" },
      h("input", { type: "checkbox", checked: !!value, onChange: (/** @type {any} */ event) => set(event.target.checked) }), label);
  }
  const at = refused.value?.field === name ? refused.value : null;
  const standard = name === "max_tokens" && mode.value !== "chat" ? "the API's" : defaults.value[name] ?? fallback;
  const changed = value !== "" && value !== standard;
  const shared = { value, placeholder: standard, "aria-invalid": at ? "true" : undefined, "aria-describedby": at ? `bad-${name}` : undefined,
    onInput: (/** @type {any} */ event) => set(event.target.value) };
  const isWide = kind === "code" || kind === "lines";
  return h("div", { class: isWide ? "wide" : undefined },
    h("label", { class: changed ? "changed" : undefined }, h("span", null, label),
      isWide ? h("textarea", { class: kind === "code" ? "code" : undefined, rows: kind === "code" ? 4 : 3, spellcheck: kind === "lines", ...shared })
        : h("input", { type: kind === "number" ? "number" : "text", step: "any", ...shared })),
    at && h("div", { class: "error", role: "alert", id: `bad-${name}` }, visible(at.message)));
}

/** What answers, where there is a choice. */
function Picker() {
  if (models.value.length < 2) return null;
  return h("fieldset", null, h("legend", null, "Model"), h("div", { class: "fields" },
    h("label", { class: model.value === models.value[0].id ? "wide" : "wide changed" }, h("span", null, "What answers"),
      h("select", { value: model.value, onChange: (/** @type {any} */ event) => (model.value = event.target.value) },
        models.value.map(({ id, parent }) => h("option", { value: id, key: id }, visible(parent ? `${id} (adapter of ${parent})` : id)))))));
}

function Settings() {
  const groups = ["Talk", "Sampling", "Promise", "Tell", "Shape"];
  const titles = { Talk: "Conversation", Sampling: "Sampling", Promise: "What this request needs", Tell: "What to tell", Shape: "Tools and shape" };
  return h("aside", { "aria-label": "Settings of the next request" }, h(Picker, null), groups.map((group) => {
    const own = FIELDS.filter((field) => field.group === group && (!field.only || field.only === mode.value));
    return own.length > 0 && h("fieldset", { key: group },
      h("legend", null, titles[/** @type {keyof typeof titles} */ (group)]),
      h("div", { class: "fields" }, own.map((field) => h(Input, { field, key: field.name }))));
  }));
}

/** @param {{ turn: any }} props */
function Turn({ turn }) {
  const tokens = turn.tokens?.value ?? [];
  return h("div", { class: `turn ${turn.role}` },
    h("div", { class: "who" }, turn.role === "user" ? "You" : "Model"),
    turn.thought?.value && h("details", { class: "thought" }, h("summary", null, "Thoughts"), h("div", { class: "said" }, turn.thought)),
    tokens.length ? h(Tokens, { tokens, goOn: turn.how === "raw" ? undefined : (index, other) => goOn(turn, index, other) })
      : turn.role === "assistant" && turn.how === "chat" ? h(Said, { text: turn.text }) : h("div", { class: "said" }, turn.text),
    turn.outcome?.value && h(Outcome, { told: turn.outcome.value }),
    turn.role === "user" ? turn.plain && h("div", { class: "copies" }, h("button", { type: "button", class: "copy", disabled: !!running.value, onClick: () => edit(turn) }, "Edit"))
      : (turn.outcome?.value || !turn.body) && h(Copies, { turn }));
}

/** The answer, and the request that it came of as a program. @param {{ turn: any }} props */
function Copies({ turn }) {
  const { how, path, body } = turn;
  const keyed = key.value !== "";
  const isLast = turns.value.at(-1) === turn && how === "chat" && !running.value;
  const finish = turn.outcome?.value?.finish ?? "";
  return h("div", { class: "copies" },
    isLast && turn.plain && (finish === "length" || finish.startsWith("stopped")) && h("button", { type: "button", class: "copy", onClick: () => goOnFromEnd(turn) }, "Go on"),
    isLast && h("button", { type: "button", class: "copy", onClick: () => retry(turn) }, "Retry"),
    h(Copy, { label: "Copy", about: " the answer", text: () => turn.plain || turn.text.value }),
    body && h(Copy, { label: "As curl", about: ", the request", text: () => asCurl(root, path, body, keyed) }),
    body && how !== "raw" && h(Copy, { label: "As Python", about: ", the request", text: () => asPython(root, path, body, keyed) }));
}

function Ask() {
  const raw = mode.value === "raw";
  const text = raw ? rawBody : draft;
  const keydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.isComposing || (raw ? !event.ctrlKey : event.shiftKey)) return;
    event.preventDefault();
    send();
  };
  return h("form", { class: "ask", onSubmit: (/** @type {Event} */ event) => { event.preventDefault(); send(); } },
    raw && h("label", { class: "row" }, h("span", null, "POST"),
      h("select", { value: rawPath.value, onChange: (/** @type {any} */ event) => (rawPath.value = event.target.value) },
        ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"].map((path) => h("option", { value: path }, path)))),
    h("label", null, h("span", { class: "hidden" }, raw ? "Body, JSON" : mode.value === "chat" ? "Message" : "Text to go on from"),
      h("textarea", { rows: raw ? 10 : 3, class: raw ? "code" : undefined, value: text.value, onKeyDown: keydown,
        placeholder: mode.value === "chat" ? "Write a message" : "Write the beginning of a text",
        onInput: (/** @type {any} */ event) => (text.value = event.target.value) })),
    h("div", { class: "row" },
      running.value
        ? h("button", { type: "button", class: "main", onClick: () => running.value?.abort() }, "Stop")
        : h("button", { type: "submit", class: "main" }, "Send"),
      turns.value.length > 0 && !running.value && h("button", { type: "button", onClick: startAnew }, mode.value === "chat" ? "New" : "Clear"),
      h("span", { class: "quiet" }, running.value ? "Esc stops" : raw ? "Ctrl+Enter sends" : "Enter sends, Shift+Enter begins a line")));
}

/** Whether the end of what was said stays in sight while it grows: until the reader scrolls away from it. */
let following = true;

/** Pixels of the end, or of the field below it, that are out of sight. @param {HTMLElement} said */
function outOfSight(said) {
  const field = said.closest(".talk")?.querySelector(".ask")?.getBoundingClientRect();
  return field ? Math.max(said.getBoundingClientRect().bottom - field.top, field.bottom - innerHeight) : 0;
}

/** @type {{ value: number | null }} pixels from the top at which the question is shown that an answer under way moved out of sight */
const askedAt = signal(null);

/** Shows the question of an answer under way below the header, or no more. @param {HTMLElement} said */
function keepQuestion(said) {
  const asked = running.value && said.querySelector(":scope > .user:nth-last-child(2)");
  const top = Math.max(0, document.querySelector("header")?.getBoundingClientRect().bottom ?? 0);
  askedAt.value = asked && asked.getBoundingClientRect().bottom < top + 8 ? top : null;
}

/** What was said, the end of it in sight. */
function Turns() {
  /** @type {{ current: HTMLElement | null }} */
  const said = useRef(null);
  useEffect(() => {
    const element = /** @type {HTMLElement} */ (said.current);
    const grown = new ResizeObserver(() => {
      const by = outOfSight(element);
      if (following && turns.value.length && by > 0) scrollBy(0, by + 8);
      keepQuestion(element);
    });
    grown.observe(element);
    let before = scrollY;
    const scrolled = () => {
      if (!element.checkVisibility()) return;
      keepQuestion(element);
      // up is away from the end, unless it is still in sight; what grows below moves nothing up
      if (scrollY < before - 2) following = false;
      if (outOfSight(element) < 48) following = true;
      before = scrollY;
    };
    addEventListener("scroll", scrolled, { passive: true });
    return () => {
      grown.disconnect();
      removeEventListener("scroll", scrolled);
    };
  }, []);
  return h("div", { class: "turns" },
    askedAt.value !== null && running.value && h("div", { class: "asked", "aria-hidden": "true", style: { top: `${askedAt.value}px` } }, h("div", null, turns.value.at(-2)?.text)),
    h("div", { ref: said },
    turns.value.length === 0 && h("p", { class: "empty" },
      "Nothing was said yet. Each answer comes with the time it took, why it waited, and, if you tick them, the probabilities of its tokens."),
    turns.value.map((turn, i) => h(Turn, { turn, key: i }))));
}

export function Playground() {
  useEffect(() => {
    learn();
  }, [key.value]);
  useEffect(() => {
    const here = openHere();
    if (here && !turns.value.length) open(here);
  }, []);
  useEffect(() => {
    const stop = (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && running.value?.abort();
    addEventListener("keydown", stop);
    return () => removeEventListener("keydown", stop);
  }, []);
  return h("div", { class: mode.value === "raw" ? "" : "grid" },
    h("div", { class: "talk" },
      h("h1", { class: "hidden" }, "Playground"),
      h("div", { class: "modes", role: "group", "aria-label": "Kind of request" }, MODES.map(([name, title]) =>
        h("button", { type: "button", "aria-pressed": String(mode.value === name), onClick: () => (mode.value = name) }, title))),
      mode.value === "chat" && h(Conversations, { open: conversation.value, choose: open, gone: (id) => id === conversation.value && startAnew(), idle: !running.value }),
      h(Turns, null),
      h(Refusal, null),
      h(Ask, null)),
    mode.value !== "raw" && h(Settings, null));
}
