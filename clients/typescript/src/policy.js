/** How often and how long a client tries; names are those of paceline/client/policy.py. */

/** @type {Readonly<import("../types/types.js").Policy>} */
export const DEFAULT_POLICY = Object.freeze({
  attempts: 3,
  connect_timeout: 5,
  first_token_timeout: 120,
  gap_timeout: 30,
  total_timeout: 600,
  backoff_base: 0.5,
  backoff_max: 8,
  max_retry_after: 60,
  restart_allowed: false,
  max_event_bytes: 16 * 2 ** 20,
});

const CAPACITY = 100;

/** A token bucket over all calls of a client. */
export class RetryBudget {
  #level;
  #at = -Infinity;

  /** @param {{ratio?: number, minimum?: number}} [settings] */
  constructor({ ratio = 0.1, minimum = 10 } = {}) {
    this.ratio = ratio;
    this.minimum = minimum;
    this.#level = minimum;
  }

  /** A call begins. */
  deposit() {
    this.#level = Math.min(CAPACITY, this.#level + this.ratio);
  }

  /**
   * Whether one more attempt is paid for.
   * @param {number} now seconds
   */
  take(now) {
    if (now > this.#at) {
      if (this.#level < this.minimum && this.#at > -Infinity) {
        this.#level = Math.min(this.minimum, this.#level + now - this.#at);
      }
      this.#at = now;
    }
    if (this.#level < 1) return false;
    this.#level -= 1;
    return true;
  }
}
