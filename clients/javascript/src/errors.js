/** What a call can end with instead of an answer. See paceline/client/errors.py. */

export class ClientError extends Error {
  constructor(message) {
    super(message);
    this.name = new.target.name;
  }
}

export class RefusedError extends ClientError {
  constructor(status, message) {
    super(`status ${status}: ${message}`);
    this.status = status;
    this.serverMessage = message;
  }
}

export class NoAnswerError extends ClientError {
  constructor(reason, attempts, status = 0, retryAfter = null) {
    super(`${reason} (attempts: ${attempts})`);
    Object.assign(this, { reason, attempts, status, retryAfter });
  }
}

export class StreamInterruptedError extends ClientError {
  constructor(reason, attempts, partial) {
    super(
      `the stream broke after ${partial.length} characters: ${reason} (attempts: ${attempts})`,
    );
    Object.assign(this, { reason, attempts, partial });
  }
}
