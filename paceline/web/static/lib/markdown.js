// Markdown as models write it, as plain data: paragraphs, headings, lists, code, quotes, tables. No HTML, no images; what is not
// understood stays text. Nothing here needs a browser.

/**
 * @typedef {{ kind: "text" | "code" | "strong" | "em" | "link", text: string, href?: string }} Span
 * @typedef {{ kind: "text" | "heading" | "quote" | "code" | "rule" | "list" | "table", source: string }} Block
 */

// as CommonMark has them: nothing behind three backticks has another one, and nothing but blanks stands behind the closing fence
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})\s*([\w+#.-]*)/;
const CLOSING = /^ {0,3}(`{3,}|~{3,})[ \t]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/s;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/s;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
/** @param {string} line @param {string} fence that the block began with */
const closes = (line, fence) => line.match(CLOSING)?.[1].startsWith(fence) ?? false;

// a table has a cell for each row and column, however few characters its rows have: one with more columns stays text, and so do the
// rows behind so many cells of all tables of an answer
const MOST_COLUMNS = 64;
const MOST_CELLS = 10_000;

/** @param {string} line of a table */
const cellsOf = (line) => line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);

/** A line of marks alone below a head. No pattern here can match one stretch of blanks in two ways: that makes long ones slow. @param {string} line @param {string} next @param {number} columns at most */
const beginsTable = (line, next, columns) => line.includes("|") && next.includes("|") && next.includes("-") && /^[ |:-]+$/.test(next) && cellsOf(line).length <= columns;

/** @param {string} line @param {string} next @param {number} columns at most, of a table @returns {Block["kind"] | ""} the block that begins with a line; "": it is blank */
function kindOf(line, next, columns) {
  if (!line.trim()) return "";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return beginsTable(line, next, columns) ? "table" : "text";
}

/** The blocks of a text; while it grows, all but the last stay as they are. @param {string} text @returns {Block[]} */
export function blocksOf(text) {
  const lines = text.split(/\r\n|\r|\n/);
  /** @type {Block[]} */
  const found = [];
  let cells = MOST_CELLS;
  const kindAt = (/** @type {number} */ i) => kindOf(lines[i] ?? "", lines[i + 1] ?? "", Math.min(MOST_COLUMNS, cells));
  for (let at = 0; at < lines.length;) {
    const kind = kindAt(at);
    if (!kind) { at++; continue; }
    let end = at + 1;
    if (kind === "code") {
      const fence = /** @type {RegExpMatchArray} */ (lines[at].match(FENCE))[1];
      while (end < lines.length && !closes(lines[end], fence)) end++;
      end++;
    } else if (kind !== "heading" && kind !== "rule") {
      // the marks below its head have no cells
      const columns = kind === "table" ? cellsOf(lines[at]).length : 0;
      const most = columns ? Math.min(lines.length, at + 1 + Math.floor(cells / columns)) : lines.length;
      // a list goes on over lines that are indented, and over one blank line before another item
      const goesOn = () => {
        const line = lines[end], next = kindAt(end);
        if (kind === "list") return (next === "" && end + 1 < lines.length && (ITEM.test(lines[end + 1]) || /^ {2,}\S/.test(lines[end + 1]))) || (next !== "" && (next === "list" || /^ {2,}/.test(line)));
        return next === kind || (kind === "table" && line.includes("|"));
      };
      while (end < most && goesOn()) end++;
      cells -= columns * (end - at - 1);
    }
    found.push({ kind, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return found;
}

// bounded, so that no text makes it slow: code, strong, emphasis, links to web addresses
const SPAN = /(`{1,3})([^`\n](?:.{0,400}?[^`])??)\1(?!`)|\*\*(?=\S)(.{1,400}?\S?)\*\*|\*(?=[^\s*])([^*\n]{1,400}?)(?<=\S)\*|(?<!\w)_(?=[^\s_])([^_\n]{1,400}?)(?<=\S)_(?!\w)|(?<!!)\[([^\]\n]{1,400})\]\((https?:\/\/[^\s()<>"]{1,1000})\)/g;
const LONGEST = 8000;

/** The spans of a line or paragraph. @param {string} text @returns {Span[]} */
export function spansOf(text) {
  if (text.length > LONGEST) return [{ kind: "text", text }];
  /** @type {Span[]} */
  const found = [];
  let from = 0;
  for (const match of text.matchAll(SPAN)) {
    if (match.index > from) found.push({ kind: "text", text: text.slice(from, match.index) });
    const [whole, , code, strong, star, under, name, href] = match;
    if (code !== undefined) found.push({ kind: "code", text: code });
    else if (strong !== undefined) found.push({ kind: "strong", text: strong });
    else if (href !== undefined) found.push({ kind: "link", text: name, href });
    else found.push({ kind: "em", text: star ?? under });
    from = match.index + whole.length;
  }
  if (from < text.length) found.push({ kind: "text", text: text.slice(from) });
  return found;
}

/** @param {string} source of a code block */
export function codeOf(source) {
  const [first, ...rest] = source.split("\n");
  const [, fence, language] = /** @type {RegExpMatchArray} */ (first.match(FENCE));
  if (closes(rest.at(-1) ?? "", fence)) rest.pop();
  return { language, text: rest.join("\n") };
}

/** @param {string} source of a heading */
export function headingOf(source) {
  const [, marks, text] = /** @type {RegExpMatchArray} */ (source.match(HEADING));
  return { level: marks.length, text: text.trim() };
}

/** @param {string} source of a quote */
export const quoted = (source) => source.split("\n").map((line) => line.replace(QUOTE, "")).join("\n");

/** The items of a list: how deep each stands, its mark, its text. @param {string} source */
export function itemsOf(source) {
  /** @type {{ depth: number, mark: string, text: string }[]} */
  const found = [];
  /** @type {number[]} */
  const indents = [];
  for (const line of source.split("\n")) {
    const match = line.match(ITEM);
    if (!match) {
      const last = found.at(-1);
      if (last && line.trim()) last.text += `\n${line.trim()}`;
      continue;
    }
    const indent = match[1].length;
    while (indents.length && indent < /** @type {number} */ (indents.at(-1))) indents.pop();
    if (!indents.length || indent >= /** @type {number} */ (indents.at(-1)) + 2) indents.push(indent);
    found.push({ depth: Math.min(indents.length, 6), mark: /\d/.test(match[2]) ? match[2] : "\u2022", text: match[3] });
  }
  return found;
}

/** The rows of a table, its head first, each with as many cells as the head. @param {string} source */
export function rowsOf(source) {
  const rows = source.split("\n").filter((_, i) => i !== 1)
    .map((line) => cellsOf(line).map((cell) => cell.trim().replaceAll("\\|", "|")));
  return rows.map((row) => rows[0].map((_, i) => row[i] ?? ""));
}
