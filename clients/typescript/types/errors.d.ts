/** What a call can end with instead of an answer. See paceline/client/errors.py. */
export declare class ClientError extends Error {
    /** @param {string} message */
    constructor(message: string);
}
/** The server refused the request, and another attempt would change nothing. */
export declare class RefusedError extends ClientError {
    status: number;
    serverMessage: string;
    /**
     * @param {number} status
     * @param {string} message
     */
    constructor(status: number, message: string);
}
/** Nobody answered, and nothing was told. */
export declare class NoAnswerError extends ClientError {
    reason: string;
    attempts: number;
    status: number;
    retryAfter: number | null;
    /**
     * @param {string} reason
     * @param {number} attempts
     * @param {number} status the last one; 0: there was none
     * @param {number | null} retryAfter seconds that the server asked to wait
     */
    constructor(reason: string, attempts: number, status?: number, retryAfter?: number | null);
}
/** The answer broke off and cannot go on; `partial` is the text that was told. */
export declare class StreamInterruptedError extends ClientError {
    reason: string;
    attempts: number;
    partial: string;
    /**
     * @param {string} reason
     * @param {number} attempts
     * @param {string} partial
     */
    constructor(reason: string, attempts: number, partial: string);
}
