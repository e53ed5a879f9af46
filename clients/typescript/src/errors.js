/** What a call can end with instead of an answer. See paceline/client/errors.py. */

export class ClientError extends Error {
  /** @param {string} message */
  constructor(message) {
    super(message);
    this.name = new.target.name;
  }
}

/** The server refused the request, and another attempt would change nothing. */
export class RefusedError extends ClientError {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(`status ${status}: ${message}`);
    this.status = status;
    this.serverMessage = message;
  }
}

/** Nobody answered, and nothing was told. */
export class NoAnswerError extends ClientError {
  /**
   * @param {string} reason
   * @param {number} attempts
   * @param {number} status the last one; 0: there was none
   * @param {number | null} retryAfter seconds that the server asked to wait
   */
  constructor(reason, attempts, status = 0, retryAfter = null) {
    super(`${reason} (attempts: ${attempts})`);
    this.reason = reason;
    this.attempts = attempts;
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** The answer broke off and cannot go on; `partial` is the text that was told. */
export class StreamInterruptedError extends ClientError {
  /**
   * @param {string} reason
   * @param {number} attempts
   * @param {string} partial
   */
  constructor(reason, attempts, partial) {
    super(
      `the stream broke after ${partial.length} characters: ${reason} (attempts: ${attempts})`,
    );
    this.reason = reason;
    this.attempts = attempts;
    this.partial = partial;
  }
}
