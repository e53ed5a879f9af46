// Conversations, kept in this browser alone. What is kept is what was said: no keys, no times, no settings but the system prompt.
import { signal } from "../vendor/preact.js";

/** @typedef {{ id: string, at: number, title: string, system: string, turns: { role: string, content: string }[] }} Kept */

const STORED = "paceline-conversations", OPEN = "paceline-conversation";
export const MOST = 50;
const TITLE = 60;

/** @returns {Kept[]} */
function read() {
  try {
    const found = JSON.parse(localStorage.getItem(STORED) ?? "[]");
    return Array.isArray(found) ? found.filter((each) => typeof each?.id === "string" && Array.isArray(each.turns)) : [];
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
  for (let count = kept.value.length; count >= 0; count = count > 1 ? Math.floor(count / 2) : count - 1) {
    try {
      localStorage.setItem(STORED, JSON.stringify(kept.value.slice(0, count)));
      return;
    } catch {
      // the browser's room is used up: the oldest go
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
export const openHere = () => kept.value.find(({ id }) => id === sessionStorage.getItem(OPEN));
/** @param {string} id "" for none */
export const setOpen = (id) => (id ? sessionStorage.setItem(OPEN, id) : sessionStorage.removeItem(OPEN));
