/** A streaming client for any OpenAI-compatible server (docs/use/client.md). */
export { Client } from "./client.js";
export { ClientError, NoAnswerError, RefusedError, StreamInterruptedError, } from "./errors.js";
export { DEFAULT_POLICY, RetryBudget } from "./policy.js";
export type ClientEvent = import("../types/types.js").ClientEvent;
export type Finished = import("../types/types.js").Finished;
export type Message = import("../types/types.js").Message;
export type Options = import("../types/types.js").Options;
export type Policy = import("../types/types.js").Policy;
export type Target = import("../types/types.js").Target;
export type ToolCall = import("../types/types.js").ToolCall;
export type Usage = import("../types/types.js").Usage;
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
