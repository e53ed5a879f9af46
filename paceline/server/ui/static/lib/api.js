// Every request to the server passes here: the key goes in a header, an error comes back as one shape.
import { signal } from "../vendor/preact.js";
import { lines } from "./format.js";

const STORED = "paceline-key";
const SESSION = "paceline-session";

/** The reader's API key: in memory, and in this tab's storage if asked to be kept. */
export const key = signal(sessionStorage.getItem(STORED) ?? "");
/** True once an answer said that a key is wanted. */
export const keyWanted = signal(false);

/** Names this tab to the server, where something is kept for it: nobody else can guess it, and a reload does not change it. */
function session() {
  let name = sessionStorage.getItem(SESSION);
  if (!name) {
    name = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    sessionStorage.setItem(SESSION, name);
  }
  return name;
}

/** @param {string} value @param {boolean} keep */
export function setKey(value, keep) {
  key.value = value;
  keyWanted.value = false;
  if (keep && value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
}

/** What the server refused, in its own words. */
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
 * @param {{ method?: string, body?: string | Blob, signal?: AbortSignal, headers?: Record<string, string> }} [options] a text is JSON
 * @returns {Promise<Response>} only of answers that are no errors
 */
export async function call(path, options = {}) {
  /** @type {Record<string, string>} */
  const headers = { ...options.headers };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  if (typeof options.body === "string") headers["Content-Type"] = "application/json";
  const response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (response.ok) return response;
  const text = await response.text();
  let told = { message: text || response.statusText, param: null };
  try {
    const parsed = JSON.parse(text);
    if (parsed.error?.message) told = parsed.error;
  } catch {
    // a proxy's page: its text is all there is
  }
  if (response.status === 401) keyWanted.value = true;
  const wait = Number(response.headers.get("retry-after")) || 0;
  throw new ApiError(response.status, told.message.slice(0, 2000), told.param, wait);
}

/** What is kept for this tab and this key alone. @param {string} path @param {Parameters<typeof call>[1]} [options] */
export const callAsTab = (path, options) => call(path, { ...options, headers: { "X-Paceline-Session": session() } });

/** @param {string} path @returns {Promise<any>} */
export const getJson = async (path) => (await call(path)).json();

/**
 * The events of a stream of server-sent events, parsed; [DONE] ends it.
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
      yield JSON.parse(data);
    }
  }
}
