// What a model said, for readers: Markdown without HTML or images. Links show where they lead.
import { h, useRef } from "../vendor/preact.js";
import { blocksOf, codeOf, headingOf, itemsOf, quoted, rowsOf, spansOf } from "../lib/markdown.js";
import { Copy } from "./copy.js";

/** @param {string} text @returns {any[]} */
const spans = (text) => spansOf(text).map(({ kind, text: said, href }) => {
  if (kind === "text") return said;
  if (kind === "link") return [h("a", { href, rel: "noopener noreferrer", target: "_blank" }, said), said === href ? "" : ` (${href})`];
  return h(kind, null, kind === "code" ? said : spans(said));
});

/** @param {import("../lib/markdown.js").Block} block @returns {any} */
function drawn({ kind, source }) {
  if (kind === "rule") return h("hr", null);
  if (kind === "quote") return h("blockquote", null, spans(quoted(source)));
  if (kind === "heading") {
    const { level, text } = headingOf(source);
    // the page's own headings stand above those of an answer
    return h("p", { role: "heading", "aria-level": Math.min(9, level + 2), class: level < 3 ? "said-head large" : "said-head" }, spans(text));
  }
  if (kind === "code") {
    const { language, text } = codeOf(source);
    return h("div", { class: "code-block" },
      h("div", { class: "code-head" }, h("span", null, language || "code"), h(Copy, { text: () => text, label: "Copy", about: " this code" })),
      h("pre", { tabIndex: 0 }, h("code", null, text)));
  }
  if (kind === "list") {
    return h("ul", { class: "said-list" }, itemsOf(source).map(({ depth, mark, text }, i) =>
      h("li", { key: i, class: `depth${depth}` }, h("span", { class: "mark-of-item" }, mark), h("span", null, spans(text)))));
  }
  if (kind === "table") {
    const [head, ...rows] = rowsOf(source);
    return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table of the answer" }, h("table", null,
      h("thead", null, h("tr", null, head.map((cell, i) => h("th", { key: i, scope: "col" }, spans(cell))))),
      h("tbody", null, rows.map((row, i) => h("tr", { key: i }, row.map((cell, j) => h("td", { key: j }, spans(cell))))))));
  }
  return h("p", null, spans(source));
}

/** @param {{ text: { value: string } }} props */
export function Said({ text }) {
  /** Blocks that were drawn; while an answer grows, only its last one changes. @type {{ current: { source: string, node: any }[] }} */
  const kept = useRef([]);
  const blocks = blocksOf(text.value);
  kept.current = blocks.map((block, i) => (kept.current[i]?.source === block.source ? kept.current[i] : { source: block.source, node: h("div", { key: i }, drawn(block)) }));
  return h("div", { class: "said marked" }, kept.current.map(({ node }) => node));
}
