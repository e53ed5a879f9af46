/** A streaming client for any OpenAI-compatible server (docs/client.md). */

export { Client } from "./client.js";
export {
  ClientError,
  NoAnswerError,
  RefusedError,
  StreamInterruptedError,
} from "./errors.js";
export { DEFAULT_POLICY, RetryBudget } from "./policy.js";
