/** Drives a Machine with fetch: works in Node, Deno, Bun, workers and browsers. */
import { RetryBudget } from "./policy.js";
export type ClientEvent = import("../types/types.js").ClientEvent;
export type Finished = import("../types/types.js").Finished;
export type Input = import("../types/types.js").Input;
export type Json = import("../types/types.js").Json;
export type Message = import("../types/types.js").Message;
export type Open = import("../types/types.js").Open;
export type Options = import("../types/types.js").Options;
export type Policy = import("../types/types.js").Policy;
export type Target = import("../types/types.js").Target;
export type Fetch = (url: string, init: RequestInit) => Promise<Response>;
export declare class Client {
    #private;
    /**
     * @param {Target[]} targets in order of preference
     * @param {{policy?: Partial<Policy>, budget?: RetryBudget, fetch?: Fetch}} [settings]
     */
    constructor(targets: Target[], { policy, budget, fetch }?: {
        policy?: Partial<Policy>;
        budget?: RetryBudget;
        fetch?: Fetch;
    });
    /**
     * The events of an answer to a conversation; leaving the loop closes the connection.
     * @param {Message[]} messages
     * @param {Options} [options]
     */
    chat(messages: Message[], options?: Options): AsyncGenerator<import("../types/types.js").ClientEvent, void, void>;
    /**
     * The events of what follows a prompt, which is text or token ids.
     * @param {string | number[]} prompt
     * @param {Options} [options]
     */
    complete(prompt: string | number[], options?: Options): AsyncGenerator<import("../types/types.js").ClientEvent, void, void>;
    /**
     * Reads such events to the end, and returns the Finished one.
     * @param {AsyncIterable<ClientEvent>} events
     * @returns {Promise<Finished>}
     */
    static result(events: AsyncIterable<ClientEvent>): Promise<Finished>;
}
