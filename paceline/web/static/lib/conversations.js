// Conversations, kept in this browser alone. What is kept is what was said: no keys, no times, no settings but the system prompt.
import { signal } from "../vendor/preact.js";
import { local, tab } from "./storage.js";

/** @typedef {{ id: string, at: number, title: string, system: string, turns: { role: string, content: string }[] }} Kept */

const STORED = "paceline-conversations", OPEN = "paceline-conversation";
export const MOST = 50;
const TITLE = 60;

/** @param {any} each @returns {boolean} whether it is a conversation: other pages of this address may keep anything under its name */
const isKept = (each) => [each?.id, each?.title, each?.system].every((told) => typeof told === "string") && Number.isFinite(each.at)
  && Array.isArray(each.turns) && each.turns.every((/** @type {any} */ turn) => typeof turn?.role === "string" && typeof turn.content === "string");

/** @returns {Kept[]} */
function read() {
  try {
    const found = JSON.parse(local.getItem(STORED) ?? "[]");
    return Array.isArray(found) ? found.filter(isKept) : [];
  } catch {
    // another program's, or an earlier version's: it is written over by the next answer
    return [];
  }
}

/** @type {{ value: Kept[] }} the newest first */
export const kept = signal(read());

/** @param {Kept[]} list */
function write(list) {
  kept.value = list.slice(0, MOST);
  for (let count = kept.value.length; ; count = Math.floor(count / 2)) {
    try {
      local.setItem(STORED, JSON.stringify(kept.value.slice(0, count)));
      kept.value = kept.value.slice(0, count);
      return;
    } catch {
      // the browser's room is used up: the oldest go, but not for one that does not fit by itself
      if (count <= 1) return;
    }
  }
}

/** Keep a conversation as it is now. @param {string} id @param {string} system @param {{ role: string, content: string }[]} turns */
export function keep(id, system, turns) {
  // another tab may have kept others meanwhile
  const others = read().filter((each) => each.id !== id);
  const title = (turns.find(({ role }) => role === "user")?.content ?? "").trim().replace(/\s+/gu, " ").slice(0, TITLE);
  write([{ id, at: Date.now(), title, system, turns }, ...others]);
}

/** @param {string} id */
export const forget = (id) => write(read().filter((each) => each.id !== id));
export const forgetAll = () => write([]);

/** The conversation that this tab shows: a reload finds it again. */
export const openHere = () => kept.value.find(({ id }) => id === tab.getItem(OPEN));
/** @param {string} id "" for none */
export const setOpen = (id) => (id ? tab.setItem(OPEN, id) : tab.removeItem(OPEN));
