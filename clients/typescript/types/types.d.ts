/**
 * What goes in and out of the client. Written by hand; its neighbours are made from ../src.
 *
 * Names and meanings are those of docs/use/client.md, which the client in Python shares.
 */

/** A server and a model there. */
export interface Target {
  /** Such as `http://127.0.0.1:8000/v1`; a trailing `/v1` may be left out. */
  base_url: string;
  model: string;
  /** Sent as a bearer token. */
  api_key?: string;
}

/** Limits of one call; times in seconds. */
export interface Policy {
  /** Requests in all, whichever targets they go to. */
  attempts: number;
  /** In Python until a connection stands; `fetch` does not tell, and nothing waits for it here. */
  connect_timeout: number;
  /** From the start of an attempt: a queue and the prompt are in it. */
  first_token_timeout: number;
  /** Between two tokens; comments that keep a connection alive are none. */
  gap_timeout: number;
  /** Of the call. */
  total_timeout: number;
  /** The pause before attempt n + 1 is drawn from 0 to base * 2 ** (n - 1), at most max. */
  backoff_base: number;
  backoff_max: number;
  /** A server that asks for a longer wait is not asked again. */
  max_retry_after: number;
  /** What cannot be resumed begins again, after `Restarted`. */
  restart_allowed: boolean;
  max_event_bytes: number;
}

/** An answer begins; `target` is an index into the targets. */
export interface Started {
  type: "Started";
  target: number;
  id: string;
  model: string;
}

/** More text. */
export interface TextDelta {
  type: "TextDelta";
  text: string;
}

/** More of what the model thinks before it answers. */
export interface ReasoningDelta {
  type: "ReasoningDelta";
  text: string;
}

/** A part of a tool call; `id` and `name` come once and are empty afterwards. */
export interface ToolCallDelta {
  type: "ToolCallDelta";
  index: number;
  id: string;
  name: string;
  arguments: string;
}

/** An attempt failed; the next begins in `wait` seconds. */
export interface Retrying {
  type: "Retrying";
  attempt: number;
  reason: string;
  wait: number;
}

/** The next attempt goes to another target. */
export interface FellBack {
  type: "FellBack";
  target: number;
}

/** The stream goes on behind `position` output tokens. */
export interface Resumed {
  type: "Resumed";
  target: number;
  position: number;
}

/** The text so far is void; only with `restart_allowed`. */
export interface Restarted {
  type: "Restarted";
  target: number;
}

/** The whole answer, last. */
export interface Finished {
  type: "Finished";
  reason: string;
  usage: Usage | null;
  text: string;
  tool_calls: ToolCall[];
  reasoning: string;
  target: number;
  /** Of Python's client, which reads answers into types. */
  parsed: null;
}

/** What a call yields; `type` tells them apart. */
export type ClientEvent =
  | Started
  | TextDelta
  | ReasoningDelta
  | ToolCallDelta
  | Retrying
  | FellBack
  | Resumed
  | Restarted
  | Finished;

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
}

export interface ToolCall {
  id: string;
  name: string;
  /** JSON, as the model wrote it. */
  arguments: string;
}

/** One of a conversation, as chat completions have it. */
export interface Message {
  role: string;
  content?: unknown;
  [field: string]: unknown;
}

/** Fields of the body, as they are; `model` and `stream` are the client's to say. */
export interface Options {
  max_tokens?: number;
  max_completion_tokens?: number;
  temperature?: number;
  top_p?: number;
  seed?: number;
  stop?: string | string[];
  tools?: unknown[];
  tool_choice?: unknown;
  response_format?: unknown;
  n?: 1;
  model?: never;
  stream?: never;
  [field: string]: unknown;
}

/** An object that came from elsewhere. */
export type Json = Record<string, any>;

// ---------------------------------------------------------------- of a Machine

export interface Request {
  path: string;
  body: Json;
  seed: number;
}

export interface Head {
  type: "Head";
  status: number;
  /** Names in small letters. */
  headers: Record<string, string>;
  /** Seconds of the wall clock. */
  wall: number;
}

/** What a machine is told. */
export type Input =
  | { type: "Start" }
  | { type: "Connected" }
  | Head
  | { type: "Data"; data: Uint8Array }
  | { type: "Closed" }
  | { type: "Broken"; reason: string }
  | { type: "Tick" };

export interface Open {
  type: "Open";
  target: number;
  path: string;
  body: Json;
}

/** What it answers: to be done in order. */
export type Action =
  | Open
  | { type: "Close" }
  | { type: "Emit"; event: ClientEvent }
  | { type: "Fail"; error: Error };
