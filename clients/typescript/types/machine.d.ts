/**
 * One call as a value: what happened goes in, what to do comes out. No sockets, clocks or chance.
 *
 * Inputs and actions are plain objects with a `type`: those of paceline/client/steps.py, and
 * tests/client/vectors holds both machines to the same answers. Times are seconds.
 */
export type Action = import("../types/types.js").Action;
export type ClientEvent = import("../types/types.js").ClientEvent;
export type Head = import("../types/types.js").Head;
export type Input = import("../types/types.js").Input;
export type Json = import("../types/types.js").Json;
export type Policy = import("../types/types.js").Policy;
export type Request = import("../types/types.js").Request;
export type Target = import("../types/types.js").Target;
/**
 * @typedef {import("../types/types.js").Action} Action
 * @typedef {import("../types/types.js").ClientEvent} ClientEvent
 * @typedef {import("../types/types.js").Head} Head
 * @typedef {import("../types/types.js").Input} Input
 * @typedef {import("../types/types.js").Json} Json
 * @typedef {import("../types/types.js").Policy} Policy
 * @typedef {import("../types/types.js").Request} Request
 * @typedef {import("../types/types.js").Target} Target
 */
export declare class Machine {
    #private;
    /**
     * @param {Request} request
     * @param {Target[]} targets in order of preference
     * @param {Policy} policy
     * @param {import("./policy.js").RetryBudget} budget shared by all calls of a client
     * @param {() => number} draw from 0 up to 1, for jitter
     * @param {Set<string>[]} leftOut for each target the fields that its server refuses; added to
     */
    constructor(request: Request, targets: Target[], policy: Policy, budget: import("./policy.js").RetryBudget, draw: () => number, leftOut: Set<string>[]);
    get over(): boolean;
    /** When a Tick is due, in the time of `handle`. */
    get deadline(): number;
    /**
     * What to do, in order.
     * @param {Input} event
     * @param {number} now
     * @returns {Action[]}
     */
    handle(event: Input, now: number): Action[];
}
