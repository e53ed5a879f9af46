/** What compiles, and what does not: read by tsc alone. The package is imported as users do. */

import {
  Client,
  type ClientEvent,
  DEFAULT_POLICY,
  type Finished,
  NoAnswerError,
  type Policy,
  RefusedError,
  RetryBudget,
  StreamInterruptedError,
  type Target,
} from "paceline-client";

const targets: Target[] = [
  { base_url: "http://127.0.0.1:8000/v1", model: "smollm2-135m", api_key: "none" },
  { base_url: "http://127.0.0.1:8001/v1", model: "a-smaller-model" },
];
const client = new Client(targets, {
  policy: { attempts: 2, gap_timeout: 10 },
  budget: new RetryBudget({ ratio: 0.1, minimum: 10 }),
  fetch: globalThis.fetch,
});

export async function words(): Promise<string> {
  let said = "";
  for await (const event of client.chat([{ role: "user", content: "Hi" }], { max_tokens: 32 })) {
    if (event.type === "TextDelta") said += event.text;
    // @ts-expect-error: only some events have text
    said += event.text;
  }
  const finished: Finished = await Client.result(client.complete([1, 2, 3], { top_k: 5 }));
  const used: number | undefined = finished.usage?.completion_tokens;
  // @ts-expect-error: a server may count nothing
  const counted: number = finished.usage.completion_tokens;
  return `${said} ${used} ${counted} ${finished.tool_calls.map((call) => call.arguments).join()}`;
}

/** Every kind of event is known: one that is added is missed here. */
export function told(event: ClientEvent): string {
  switch (event.type) {
    case "Started":
      return event.model;
    case "TextDelta":
    case "ReasoningDelta":
      return event.text;
    case "ToolCallDelta":
      return event.name + event.arguments;
    case "Retrying":
      return `${event.attempt} ${event.reason} ${event.wait}`;
    case "FellBack":
    case "Restarted":
      return `${event.target}`;
    case "Resumed":
      return `${event.position}`;
    case "Finished":
      return event.text;
    default: {
      const none: never = event;
      return none;
    }
  }
}

export function why(error: unknown): string | number | null {
  if (error instanceof RefusedError) return error.status;
  if (error instanceof StreamInterruptedError) return error.partial;
  if (error instanceof NoAnswerError) return error.retryAfter;
  return null;
}

const policy: Policy = { ...DEFAULT_POLICY, restart_allowed: true };
// @ts-expect-error: nobody changes what all share
DEFAULT_POLICY.attempts = policy.attempts;
// @ts-expect-error: the client says which model
client.chat([], { model: "other" });
// @ts-expect-error: a stream has one answer
client.chat([], { n: 2 });
// @ts-expect-error: text or ids
client.complete([{ role: "user" }]);
// @ts-expect-error: a target names its model
new Client([{ base_url: "http://127.0.0.1:8000" }]);
// @ts-expect-error: a policy's names are known
new Client(targets, { policy: { atempts: 2 } });
