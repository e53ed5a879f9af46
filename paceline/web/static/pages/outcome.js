// What became of a request: its times as a bar and in sentences, its tokens with their alternatives.
import { h, useSignal } from "../vendor/preact.js";
import { duration, story, visible, waterfall } from "../lib/format.js";

/** @param {{ told: any }} props */
export function Outcome({ told }) {
  const { usage, total, first, finish, target } = told;
  const timeline = usage?.timeline?.[0];
  const facts = [
    finish && `finished: ${finish}`,
    usage && `${usage.completion_tokens} tokens`,
    first !== null && `first after ${duration(first)} here`,
    `${duration(total)} in all`,
  ].filter(Boolean);
  return h("div", { class: "facts" },
    h("p", null, facts.join(" · ")),
    timeline && h(Waterfall, { timeline, total, target }),
    timeline && h("p", { class: "story" }, story(timeline, usage, target).join(" ")));
}

/** @param {{ timeline: any, total: number, target: number | null }} props */
function Waterfall({ timeline, total, target }) {
  const { parts, marks } = waterfall(timeline, total, target);
  return [
    h("div", { class: "bar waterfall", "aria-hidden": "true" },
      parts.map(({ kind, ms }) => ms > 0 && h("span", { class: kind, style: { flex: `${ms} 0 0` } })),
      marks.map(({ kind, at }) => h("i", { class: `mark ${kind}`, style: { left: `${100 * at}%` } }))),
    h("div", { class: "legend" },
      parts.map(({ kind, name, ms }) => h("span", null, h("span", { class: `tick-sample ${kind}`, "aria-hidden": "true" }), `${name} ${duration(ms)}`)),
      marks.map(({ kind, name, ms }) => h("span", null, h("span", { class: `mark-sample ${kind}`, "aria-hidden": "true" }), `${name} ${duration(ms)}`))),
  ];
}

const percent = (/** @type {number} */ logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
/** How much of a surprise a token was: 0 to 3, the wider the line below it. @param {number} logprob */
const surprise = (logprob) => (logprob > Math.log(0.9) ? 0 : logprob > Math.log(0.5) ? 1 : logprob > Math.log(0.1) ? 2 : 3);

/** Blanks that end a line, and tokens without text, need a sign to be seen. @param {string} token */
const shownToken = (token) => visible(token).replaceAll("\n", "\u23ce\n") || "\u2400";

/** @param {{ tokens: any[], goOn?: (index: number, other: any) => void }} props */
export function Tokens({ tokens, goOn }) {
  const chosen = useSignal(0);
  const move = (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    chosen.value = Math.min(tokens.length - 1, Math.max(0, chosen.value + step));
    /** @type {HTMLElement} */ (event.currentTarget).querySelectorAll("button")[chosen.value]?.focus();
  };
  const { token, logprob, top_logprobs: others } = tokens[chosen.value] ?? tokens[0];
  return [
    h("div", { class: "said", role: "group", "aria-label": "Tokens of the answer", onKeyDown: move }, tokens.map((each, i) =>
      h("button", { type: "button", class: `token p${surprise(each.logprob)}`, tabIndex: i === chosen.value ? 0 : -1,
        "aria-pressed": String(i === chosen.value), onClick: () => (chosen.value = i),
        "aria-label": each.token.trim() ? undefined : `token ${JSON.stringify(each.token)}` }, shownToken(each.token)))),
    h("table", { class: "alternatives" },
      h("caption", null, `Token ${chosen.value + 1} of ${tokens.length}: `, h("span", { class: "code" }, JSON.stringify(visible(token))), `, ${percent(logprob)}`),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Could have been"), h("th", { scope: "col", class: "num" }, "Probability"), goOn && h("th", { scope: "col" }, h("span", { class: "hidden" }, "Actions")))),
      h("tbody", null, others.map((/** @type {any} */ each) =>
        h("tr", null, h("td", { class: "code" }, JSON.stringify(visible(each.token))), h("td", { class: "num" }, percent(each.logprob)),
          goOn && h("td", null, each.token !== token && h("button", { type: "button", "aria-label": `Go on from ${JSON.stringify(visible(each.token))}`,
            onClick: () => goOn(chosen.value, { token: each.token, logprob: each.logprob }) }, "Go on from it")))))),
  ];
}
