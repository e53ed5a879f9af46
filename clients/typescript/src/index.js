/** A streaming client for any OpenAI-compatible server (docs/use/client.md). */

export { Client } from "./client.js";
export {
  ClientError,
  NoAnswerError,
  RefusedError,
  StreamInterruptedError,
} from "./errors.js";
export { DEFAULT_POLICY, RetryBudget } from "./policy.js";

/**
 * @typedef {import("../types/types.js").ClientEvent} ClientEvent
 * @typedef {import("../types/types.js").Finished} Finished
 * @typedef {import("../types/types.js").Message} Message
 * @typedef {import("../types/types.js").Options} Options
 * @typedef {import("../types/types.js").Policy} Policy
 * @typedef {import("../types/types.js").Target} Target
 * @typedef {import("../types/types.js").ToolCall} ToolCall
 * @typedef {import("../types/types.js").Usage} Usage
 */
