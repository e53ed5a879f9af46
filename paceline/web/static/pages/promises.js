// Whether promises are kept, why requests wait, what steps cost and how well both were predicted. The server computes, as
// `paceline top` does; nothing here does more than spell numbers out.
import { h, signal, useEffect } from "../vendor/preact.js";
import { ApiError, getJson, key } from "../lib/api.js";
import { duration, REASONS, visible } from "../lib/format.js";

const WINDOWS = [[60, "Last minute"], [600, "Last ten minutes"], [0, "Since start"]];
const window_ = signal(60);
/** @type {{ value: any }} */
const told = signal(null);
const failed = signal("");
let askedWith = "";
let refused = false;
// questions that were asked, and the last that was answered
let asked = 0, answered = 0;

async function look() {
  // another key, or none: until then there is no use in asking
  if (refused && askedWith === key.value) return;
  askedWith = key.value;
  const of = key.value, turn = ++asked;
  /** An answer for another key, or to an earlier question than one that was answered, is not shown. */
  const isLate = () => key.value !== of || turn < answered;
  try {
    const found = await getJson(`/ui/api/promises?seconds=${window_.value}`);
    if (isLate()) return;
    answered = turn;
    // what was asked for before the window changed comes late
    if (found.window === window_.value) told.value = found;
    failed.value = "";
    refused = false;
  } catch (error) {
    if (isLate()) return;
    answered = turn;
    refused = error instanceof ApiError && [401, 403, 404].includes(error.status);
    failed.value = error instanceof ApiError ? error.message : "The server does not answer: what is below is old.";
    if (refused) told.value = null;
  }
}

/** @param {number | null | undefined} share */
const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(share > 0.9 && share < 1 ? 2 : 1)} %`);
/** @param {number | null | undefined} value */
const plain = (value) => (value == null ? "–" : String(Number(value.toPrecision(3))));
/** @param {number | null | undefined} seconds */
const time = (seconds) => (seconds == null ? "–" : duration(1e3 * seconds));
/** @param {any} quantiles */
const pair = ({ p50, p99, floor }) => [p50, p99].map((each) => (each != null && each <= floor ? `at most ${time(each)}` : time(each)));
/** @param {number} seconds */
const span = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${plain(seconds / 3600)} h`);

/** @param {{ id: string, title: string, children?: any, wide?: boolean }} props */
const Card = ({ id, title, children, wide }) =>
  h("section", { class: wide ? "card wide" : "card", "aria-labelledby": id }, h("h2", { id }, title), children);

/** @param {{ label: string, names: [string, boolean?][], rows: any[][] }} props `true` in names: numbers */
function Rows({ label, names, rows }) {
  return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": label }, h("table", null,
    h("thead", null, h("tr", null, names.map(([name, number]) => h("th", { scope: "col", class: number ? "num" : undefined }, name)))),
    h("tbody", null, rows.map((row) => h("tr", { key: row[0] }, row.map((cell, i) =>
      i ? h("td", { class: names[i][1] ? "num" : undefined }, cell) : h("th", { scope: "row" }, cell)))))));
}

/** @param {{ facts: [string, any][] }} props */
const Facts = ({ facts }) => h("table", null, h("tbody", null, facts.map(([name, value]) => h("tr", { key: name }, h("th", { scope: "row" }, name), h("td", { class: "num" }, value)))));

/** @param {number | null} share with a word, since a colour alone says nothing to some */
const kept = (share) => h("span", { class: share !== null && share < 0.99 ? "bad" : undefined }, percent(share));

/** Shares of something by reason, as a bar and in words. @param {{ shares: Record<string, number>, say: (value: number) => string, none: string }} props */
function Reasons({ shares, say, none }) {
  const names = Object.keys(REASONS);
  const rows = Object.entries(shares).sort((a, b) => b[1] - a[1]);
  if (!rows.length) return h("p", { class: "quiet" }, none);
  return [
    h("div", { class: "bar", "aria-hidden": "true" }, rows.map(([name, value]) => h("span", { class: `reason${Math.max(0, names.indexOf(name))}`, style: { flex: `${1e6 * value} 0 0` } }))),
    h("table", null, h("tbody", null, rows.map(([name, value]) => h("tr", { key: name },
      h("th", { scope: "row" }, h("span", { class: `tick-sample reason${Math.max(0, names.indexOf(name))}`, "aria-hidden": "true" }), REASONS[/** @type {keyof typeof REASONS} */ (name)] ?? visible(name)),
      h("td", { class: "num" }, say(value)))))),
  ];
}

/** A line of the last hour. @param {{ name: string, title: string, say: (value: any) => string, most?: number }} props */
function Line({ name, title, say, most }) {
  const points = told.value.points.filter((/** @type {any} */ point) => point[name] !== null);
  const high = most ?? Math.max(0, ...points.map((/** @type {any} */ point) => point[name]));
  const oldest = Math.max(60, ...points.map((/** @type {any} */ point) => point.ago));
  const at = (/** @type {any} */ point) => `${(300 * (1 - point.ago / oldest)).toFixed(1)},${(60 - 56 * (high ? Math.min(1, point[name] / high) : 0)).toFixed(1)}`;
  const values = points.map((/** @type {any} */ point) => point[name]);
  // no page was open since, or nothing ended: then it is not the present state
  const newest = points.at(-1)?.ago ?? 0;
  const words = values.length ? `${say(values.at(-1))} ${newest < 30 ? "now" : `${span(newest)} ago`}, ${say(Math.min(...values))} to ${say(Math.max(...values))} in the last ${span(oldest)}` : "nothing to show yet";
  return h("figure", { class: "spark" },
    h("figcaption", null, h("b", null, title), ` ${words}`),
    h("svg", { viewBox: "0 0 300 62", preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${words}` },
      h("path", { d: "M0 60.5H300", class: "ground" }),
      // a gap in what was watched is no line
      segments(points).map((each) => h("polyline", { points: each.map(at).join(" ") }))));
}

/** Cut the points where no page was open for a while. @param {any[]} points @returns {any[][]} */
function segments(points) {
  /** @type {any[][]} */
  const found = [];
  let last = Infinity;
  for (const point of points) {
    if (last - point.ago > 30) found.push([]);
    found.at(-1)?.push(point);
    last = point.ago;
  }
  return found;
}

function Shown() {
  const { frame, uptime, window: asked, tenants_left_out: left, points } = told.value;
  const some = frame.classes.some((/** @type {any} */ row) => row.ended || row.running || row.waiting);
  const [ttft, ttftLong] = pair(frame.ttft);
  const [itl, itlLong] = pair(frame.inter_token);
  const [queued, queuedLong] = pair(frame.queue);
  const [off, offLong] = pair(frame.ttft_error);
  /** @type {[string, any][]} */
  const refused = Object.entries(frame.refused).map(([why, count]) => [`Refused: ${visible(why)}`, count]);
  /** @type {[string, any][]} */
  const wasted = Object.entries(frame.wasted_tokens_per_s).map(([why, rate]) => [`Wasted, tokens/s: ${visible(why)}`, plain(/** @type {number} */ (rate))]);
  const missed = (/** @type {Record<string, number>} */ kinds) => Object.entries(kinds).map(([kind, count]) => `${kind} ${count}`).join(", ") || "–";
  return [
    h("p", { class: "quiet", id: "of-when" }, `Of the last ${span(frame.interval)}.`, asked && frame.interval < asked - 6 && frame.interval < uptime - 6 ? " No page was open before." : "",
      !frame.ready && h("b", { class: "bad" }, " The server is not ready.")),
    h("div", { class: "now" }, h("dl", null, [
      ["met every target", kept(frame.attainment)], ["goodput, requests/s", plain(frame.goodput_per_s)], ["ended, requests/s", plain(frame.requests_per_s)],
      ["running", frame.running], ["waiting", frame.waiting], ["output tokens/s", plain(frame.output_tokens_per_s)],
    ].map(([name, value]) => h("div", { key: name }, h("dt", null, name), h("dd", null, value))))),
    !some && h("p", { class: "notice" }, "No request ended in this time. Send one from the ", h("a", { href: "playground" }, "playground"), ", or look at a longer time."),
    h("div", { class: "cards" },
      h(Card, { id: "kept", title: "Kept, by class", wide: true },
        frame.classes.length ? h(Rows, { label: "Classes", names: [["Class"], ["Running", true], ["Waiting", true], ["Ended", true], ["Met", true], ["Since start", true], ["Missed"]],
          rows: frame.classes.map((/** @type {any} */ row) => [visible(row.name), row.running, row.waiting, row.ended, kept(row.attainment), kept(row.attainment_since_start), missed(row.violations)]) })
          : h("p", { class: "quiet" }, "No request yet.")),
      h(Card, { id: "tenants", title: "Kept, by tenant", wide: true },
        frame.tenants.length ? h(Rows, { label: "Tenants", names: [["Tenant"], ["Open", true], ["Ended", true], ["Refused", true], ["Met", true], ["First token, mean", true], ["Tokens/s", true], ["Share", true]],
          rows: frame.tenants.map((/** @type {any} */ row) => [visible(row.name), row.unfinished, row.ended, row.refused, kept(row.attainment), time(row.mean_ttft), plain(row.tokens_per_s), percent(row.share)]) })
          : h("p", { class: "quiet" }, "Tenants are told apart with API keys, or with --metrics-tenants N."),
        left > 0 && h("p", { class: "quiet" }, `${left} more, which had fewer tokens.`)),
      h(Card, { id: "times", title: "Times" }, h(Rows, { label: "Times", names: [["Time"], ["Half within", true], ["99 % within", true]],
        rows: [["First token", ttft, ttftLong], ["Between tokens", itl, itlLong], ["Waiting to start", queued, queuedLong]] })),
      h(Card, { id: "predicted", title: "Predictions" }, h(Rows, { label: "Predictions", names: [["What was predicted"], ["Off by", true], ["99 % within", true]],
        rows: [["A step's time, on average", percent(frame.step_error), "–"], ["Time to first token", off, offLong]] }),
        h("p", { class: "quiet" }, "The scheduler plans with both. Where they are far off, targets are missed that could be met.")),
      h(Card, { id: "held", title: "What blocks the queue" },
        h("p", null, frame.blocked_by ? `Now: ${REASONS[/** @type {keyof typeof REASONS} */ (frame.blocked_by)] ?? frame.blocked_by}.` : "Now: no request is blocked."),
        h(Reasons, { shares: frame.blocked_share, say: percent, none: "The head of the queue never waited." }), Object.keys(frame.blocked_share).length > 0 && h("p", { class: "quiet" }, "Shares of the time.")),
      h(Card, { id: "waited", title: "What requests waited for" },
        h(Reasons, { shares: frame.waited_seconds, say: time, none: "Those that finished did not wait." }), Object.keys(frame.waited_seconds).length > 0 && h("p", { class: "quiet" }, "All that finished, together.")),
      h(Card, { id: "steps", title: "Steps and what they cost" }, h(Facts, { facts: [
        ["Steps a second", plain(frame.steps_per_s)], ["A step takes", time(frame.step_seconds)], ["predicted", time(frame.predicted_step_seconds)], ["In steps, share of the time", percent(frame.step_share)],
        ["Prompt tokens in a step", plain(frame.prefill_tokens_per_step)], ["Requests with one token in a step", plain(frame.decode_tokens_per_step)],
        ["Price of a million tokens", frame.cost_per_million_tokens === null ? "with --price-per-hour" : plain(frame.cost_per_million_tokens)],
      ] })),
      h(Card, { id: "lost", title: "Refused and wasted" }, h(Facts, { facts: [
        ...refused, ...wasted,
        ["Preemptions a second", plain(frame.preemptions_per_s)], ["Memory-pressure valve", frame.pressure_level ? `open, level ${frame.pressure_level} of 4` : "closed"], ["KV cache in use", percent(frame.kv_usage)],
      ] })),
      h(Card, { id: "hour", title: "The last hour", wide: true },
        points.length ? h("div", { class: "sparks" },
          h(Line, { name: "attainment", title: "Met every target", say: percent, most: 1 }), h(Line, { name: "goodput", title: "Goodput, requests/s", say: plain }),
          h(Line, { name: "ttft_p99", title: "First token, 99 % within", say: time }), h(Line, { name: "step_error", title: "Step time, predicted off by", say: percent }))
          : h("p", { class: "quiet" }, "It begins when somebody looks: a point every 5 s, each of the minute before it."))),
  ];
}

/** @param {{ shown: boolean }} props */
export function Promises({ shown }) {
  useEffect(() => {
    if (!shown) return;
    look();
    const timer = setInterval(() => document.hidden || look(), 2000);
    return () => clearInterval(timer);
  }, [shown, window_.value, key.value]);
  return h("div", { class: "page" },
    h("h1", null, "Promises"),
    h("div", { class: "toolbar", role: "group", "aria-label": "Of which time" }, WINDOWS.map(([seconds, label]) =>
      h("button", { type: "button", "aria-pressed": String(window_.value === seconds), onClick: () => (window_.value = /** @type {number} */ (seconds)) }, label))),
    failed.value && h("div", { class: "error", role: "alert" }, visible(failed.value)),
    told.value ? h(Shown, null) : !failed.value && h("p", { class: "quiet" }, "Asking the server."));
}
