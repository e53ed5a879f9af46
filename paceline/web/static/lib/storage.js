// The browser's storage, or memory where it has none for this page: cookies are blocked, or the frame is sandboxed.

/** @param {"localStorage" | "sessionStorage"} name @returns {Pick<Storage, "getItem" | "setItem" | "removeItem">} */
function storage(name) {
  try {
    const own = globalThis[name];
    own.getItem("");
    return own;
  } catch {
    /** @type {Map<string, string>} */
    const held = new Map();
    return { getItem: (key) => held.get(key) ?? null, setItem: (key, value) => void held.set(key, value), removeItem: (key) => void held.delete(key) };
  }
}

/** Of this browser. */
export const local = storage("localStorage");
/** Of this tab. */
export const tab = storage("sessionStorage");
