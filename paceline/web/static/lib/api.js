// All requests to the server: they carry the API key in a header, and every failure is thrown as an ApiError.
import { signal } from "../vendor/preact.js";
import { lines } from "./format.js";
import { tab } from "./storage.js";

/** The server's address, which may be a path below a host's root: this module is ROOT/ui/v/VERSION/lib/api.js. */
export const root = new URL("../../../..", import.meta.url).href.replace(/\/$/, "");

const STORED = "paceline-key";
const SESSION = "paceline-session";

/** The API key in use: in memory, and in this tab's sessionStorage if the reader ticked that. */
export const key = signal(tab.getItem(STORED) ?? "");
/** True once the server answered 401: it wants a key, or does not know this one. */
export const keyWanted = signal(false);

/** A random name of this tab, under which the server keeps what-if traces and runs. It outlives a reload. */
function session() {
  let name = tab.getItem(SESSION);
  if (!name) {
    name = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    tab.setItem(SESSION, name);
  }
  return name;
}

/** @param {string} value @param {boolean} keep */
export function setKey(value, keep) {
  key.value = value;
  keyWanted.value = false;
  if (keep && value) tab.setItem(STORED, value);
  else tab.removeItem(STORED);
}

/** An answer with an error status, in the server's own words. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message @param {string | null} param @param {number} retryAfter */
  constructor(status, message, param, retryAfter) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

/**
 * @param {string} path
 * @param {{ method?: string, body?: string | Blob, signal?: AbortSignal, headers?: Record<string, string> }} [options] a string body is sent as JSON
 * @returns {Promise<Response>} an answer with a status below 300; rejects with ApiError for others, with TypeError where none came
 */
export async function call(path, options = {}) {
  /** @type {Record<string, string>} */
  const headers = { ...options.headers }, sent = key.value;
  if (sent) headers.Authorization = `Bearer ${sent}`;
  if (typeof options.body === "string") headers["Content-Type"] = "application/json";
  const response = await fetch(root + path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (response.ok) return response;
  const text = await response.text();
  let told = { message: text || response.statusText, param: null };
  try {
    const parsed = JSON.parse(text);
    if (parsed.error?.message) told = parsed.error;
  } catch {
    // not JSON, for instance a proxy's error page: its text is shown
  }
  // a late answer to the key before says nothing of this one
  if (response.status === 401 && sent === key.value) keyWanted.value = true;
  const wait = Number(response.headers.get("retry-after")) || 0;
  throw new ApiError(response.status, told.message.slice(0, 2000), told.param, wait);
}

/** As `call`, with the name of this tab: for what the server keeps of this tab and key alone. @param {string} path @param {Parameters<typeof call>[1]} [options] */
export const callAsTab = (path, options) => call(path, { ...options, headers: { "X-Paceline-Session": session() } });

/** @param {string} path @returns {Promise<any>} */
export const getJson = async (path) => (await call(path)).json();

/**
 * The JSON of each server-sent event of a stream, until [DONE] or its end.
 * @param {Response} response
 * @returns {AsyncGenerator<any>}
 */
export async function* events(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const split = lines();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    for (const line of split(value)) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      // a keep-alive of some proxy
      if (data === "") continue;
      yield JSON.parse(data);
    }
  }
}
