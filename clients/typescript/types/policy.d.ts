/** How often and how long a client tries; names are those of paceline/client/policy.py. */
/** @type {Readonly<import("../types/types.js").Policy>} */
export declare const DEFAULT_POLICY: Readonly<import("../types/types.js").Policy>;
/** A token bucket over all calls of a client. */
export declare class RetryBudget {
    #private;
    ratio: number;
    minimum: number;
    /** @param {{ratio?: number, minimum?: number}} [settings] */
    constructor({ ratio, minimum }?: {
        ratio?: number;
        minimum?: number;
    });
    /** A call begins. */
    deposit(): void;
    /**
     * Whether one more attempt is paid for.
     * @param {number} now seconds
     */
    take(now: number): boolean;
}
