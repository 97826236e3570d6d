/**
 * The client of the semel service: run any operation once per key.
 *
 *     import { Semel } from "./semel.mjs";
 *
 *     const semel = new Semel("http://127.0.0.1:8600");
 *     const charge = await semel.once("orders.pay", orderId, async (attempt) => {
 *       return await bank.charge(order, { signal: attempt.signal });
 *     });
 *
 * One file without dependencies, for Node 20 or later, Deno, and Bun. Durations are in seconds.
 * Copy it into your project; it works with any version of the service that has /v1.
 *
 * Its law: every request may be sent again, because it names its owner. Only `fn` decides whether
 * an attempt failed, so an error of `finish` is never sent as `fail`.
 */

import { hostname } from "node:os";
import { env, pid } from "node:process";

/**
 * @typedef {null | boolean | number | string | any[] | { [name: string]: any }} Json
 *
 * @typedef {object} ClientOptions
 * @property {string} [token] sent as `Authorization: Bearer` (default: $SEMEL_TOKEN)
 * @property {string} [by] who calls, for operators (default: host and pid, in Node)
 * @property {number} [timeout] seconds until a request without an answer is sent again (default 10)
 * @property {number} [patience] seconds for which it is sent again (default 30)
 * @property {typeof fetch} [fetch] what sends requests (default: the global one)
 *
 * @typedef {object} OnceOptions
 * @property {Json} [payload] what must be the same on a retry; write amounts as text or integers
 * @property {string} [fingerprint] 32 hex digits that stand for the payload, instead of it
 * @property {number} [wait] seconds to wait for another attempt of the key (default 60)
 * @property {number} [lease] seconds that the key is kept without a renewal (default: the scope's)
 * @property {(error: unknown) => Outcome | undefined} [outcome] what an error of `fn` means
 *   (default: what the scope says)
 * @property {boolean} [response] `fn` returns an HTTP response, a `StoredResponse`
 * @property {AbortSignal} [signal] gives up waiting; what runs is not stopped by it
 *
 * @typedef {"forget" | "retryable" | "final" | "unknown"} Outcome
 *   The next call runs; runs with the same payload only; gets this failure; or nothing runs until
 *   you find out what happened (in scopes with `abandoned = "hold"`).
 *
 * @typedef {object} StoredResponse
 * @property {number} status
 * @property {[string, string][]} [headers]
 * @property {string} [body] text
 * @property {string} [base64] bytes, instead of `body`
 *
 * @typedef {object} Attempt
 * @property {string} scope
 * @property {string} key
 * @property {number} number how many attempts the key has had, this one included
 * @property {number | string} fence grows with each attempt: other systems reject a late one by it
 * @property {boolean} takeover the attempt before ended without an outcome
 * @property {AbortSignal} signal aborts when the lease is lost: another attempt may run
 */

/** Seconds that one request may wait for another attempt. */
const LONGEST_WAIT = 25;

/** The codes of answers that mean: another attempt still runs. */
const BUSY = new Set(["concurrent_request", "wait_timeout"]);

/** The statuses of answers after which the same request is sent again. */
const AGAIN = new Set([429, 502, 503, 504]);

/** An answer that is an error, or none: `code` says which. */
export class SemelError extends Error {
  /**
   * @param {string} message
   * @param {{ code: string, status?: number, retryAfter?: number, problem?: any, cause?: unknown }} about
   */
  constructor(message, { code, status, retryAfter, problem, cause }) {
    super(message, { cause });
    this.name = "SemelError";
    /** Such as "payload_mismatch"; "unreachable" and "bad_answer" are the client's own. */
    this.code = code;
    /** The HTTP status; undefined if no answer came. */
    this.status = status;
    /** Seconds after which a retry may help, where the service says so. */
    this.retryAfter = retryAfter;
    /** The whole answer, with `field`, `superseded`, or `error` where they apply. */
    this.problem = problem;
    /** What `fn` returned, where only storing it failed. */
    this.result = undefined;
  }

  /** The field of the request that is wrong. @returns {string | undefined} */
  get field() {
    return this.problem?.field;
  }
}

/** A client; it keeps no connection of its own, so there is nothing to close. */
export class Semel {
  #url;
  #fetch;
  #headers;
  #by;
  #timeout;
  #patience;

  /**
   * @param {string | URL} url where the service is, such as "http://127.0.0.1:8600"
   * @param {ClientOptions} [options]
   */
  constructor(url, { token, by, timeout = 10, patience = 30, fetch } = {}) {
    const bearer = token ?? env.SEMEL_TOKEN;
    this.#url = String(url).replace(/\/+$/, "");
    this.#fetch = fetch ?? globalThis.fetch;
    this.#headers = {
      "Content-Type": "application/json",
      ...(bearer ? { Authorization: `Bearer ${bearer}` } : {}),
    };
    this.#by = by ?? env.SEMEL_NAME ?? `${hostname()}:${pid}`.slice(-200);
    this.#timeout = timeout;
    this.#patience = patience;
  }

  /**
   * Run `fn` once per scope and key, and return its result; a duplicate gets the same one.
   *
   * `fn` gets an `Attempt`, whose `signal` aborts if the lease is lost. What it returns must be
   * plain JSON data: duplicates get it as such. What it throws reaches the caller, and the outcome
   * is recorded. If its result cannot be stored, the `SemelError` has it as `result`.
   *
   * @template T
   * @param {string} scope the kind of operation
   * @param {string} key names the operation; every retry sends the same one
   * @param {(attempt: Attempt) => Promise<T> | T} fn
   * @param {OnceOptions} [options]
   * @returns {Promise<T>}
   */
  async once(scope, key, fn, options = {}) {
    const { payload, fingerprint, wait = 60, lease, outcome, response, signal } = options;
    const owner = newOwner();
    const asked = { scope, key, payload, fingerprint, lease, owner, by: this.#by };
    const { answer, until } = await this.#begin(asked, wait, signal);
    if (answer.status === "done") return answer.response ?? answer.result;
    const named = { scope, key, owner };
    const { signal: lost, ending, stop } = this.#renewing({ ...named, lease }, answer, until);
    try {
      let result;
      try {
        result = await fn({
          scope,
          key,
          number: answer.attempt,
          fence: answer.fence,
          takeover: answer.takeover,
          signal: lost,
        });
      } catch (error) {
        ending();
        await this.#failed(named, error, outcome);
        throw error;
      }
      ending();
      await this.#finished(named, result, response ? "response" : "result");
      return result;
    } finally {
      stop();
    }
  }

  /**
   * Claim a key, or get its result: `once` without a function. Renew it every `renew_every` seconds.
   *
   * @param {{ scope: string, key: string, payload?: Json, fingerprint?: string, wait?: number,
   *   owner?: string, lease?: number, by?: string }} fields with an `owner` of your own
   *   (`newOwner()`), the same attempt may be started again, in another process too
   * @param {AbortSignal} [signal]
   */
  start(fields, signal) {
    return this.call("start", { owner: newOwner(), by: this.#by, ...fields }, { signal });
  }

  /** Extend a lease. @param {{ scope: string, key: string, owner: string, lease?: number }} fields */
  renew(fields) {
    return this.call("renew", fields);
  }

  /**
   * Store what an attempt came to: a result, or an HTTP response.
   * @param {{ scope: string, key: string, owner: string, result?: Json, response?: StoredResponse }} fields
   */
  finish(fields) {
    return this.call("finish", fields);
  }

  /**
   * Record that an attempt failed; with `ran: false` it counts as never made.
   * @param {{ scope: string, key: string, owner: string, error?: { type?: string, message?: string },
   *   outcome?: Outcome, ran?: boolean }} fields
   */
  fail(fields) {
    return this.call("fail", fields);
  }

  /** Make new keys. @returns {Promise<string[]>} */
  async keys(count = 1, /** @type {string | undefined} */ app = undefined) {
    return (await this.call("keys", { count, app })).keys;
  }

  /**
   * Send one verb, again while there is no answer, and return the answer's body.
   *
   * @param {"start" | "renew" | "finish" | "fail" | "keys"} verb
   * @param {{ [field: string]: any }} fields
   * @param {{ signal?: AbortSignal, patience?: number, onSend?: () => void }} [options]
   * @returns {Promise<any>}
   */
  async call(verb, fields, { signal, patience = this.#patience, onSend } = {}) {
    const body = JSON.stringify(fields);
    const seconds = this.#timeout + (fields.wait ?? 0);
    let end; // From the first failure: a request may wait for longer than that.
    for (let pause = 0.1; ; pause = Math.min(pause * 2, 2)) {
      try {
        onSend?.();
        return await this.#send(verb, body, seconds, signal);
      } catch (error) {
        const again = error instanceof SemelError && (!error.status || AGAIN.has(error.status));
        const delay = error?.retryAfter ?? pause * (0.5 + Math.random());
        end ??= now() + patience;
        if (!again || now() + delay >= end) throw error;
        await sleep(delay, signal);
      }
    }
  }

  async #send(verb, body, seconds, signal) {
    signal?.throwIfAborted();
    // Not AbortSignal.any: Node 20 keeps what it makes as long as the signal of the caller lives.
    const aborting = new AbortController();
    const onAbort = () => aborting.abort(signal.reason);
    signal?.addEventListener("abort", onAbort);
    const timer = setTimeout(() => aborting.abort(), seconds * 1000);
    let answer, text;
    try {
      const fetch = this.#fetch; // Some platforms want it called without an object.
      answer = await fetch(`${this.#url}/v1/${verb}`, {
        method: "POST",
        headers: this.#headers,
        body,
        redirect: "error",
        signal: aborting.signal,
      });
      text = await answer.text();
    } catch (cause) {
      signal?.throwIfAborted();
      const why = aborting.signal.aborted ? `no answer within ${seconds} s` : reasonOf(cause);
      throw new SemelError(`${this.#url}: ${why}`, { code: "unreachable", cause });
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", onAbort);
    }
    return read(answer, text);
  }

  /** Start until there is an answer, and say when its lease ends. */
  async #begin(asked, wait, signal) {
    const end = now() + wait;
    let sent = 0;
    const options = { signal, onSend: () => (sent = now()) };
    for (let late = 0; ; ) {
      const left = Math.max(0, end - now());
      try {
        const fields = { ...asked, wait: Math.min(left, LONGEST_WAIT) };
        const answer = await this.call("start", fields, options);
        if (answer.status === "done") return { answer, until: 0 };
        const until = sent + answer.waited + answer.lease;
        // A late answer leaves no time to work: the same owner gets a new lease.
        if (now() < until - answer.lease * 0.1) return { answer, until };
        if (++late === 3) throw new SemelError("answers take as long as the lease", { code: "unreachable" });
      } catch (error) {
        // Perhaps the key is claimed, and nothing will run.
        if (signal?.aborted || !(error?.status < 500)) this.#leave(asked);
        const answered = now();
        if (!BUSY.has(error?.code) || answered >= end) throw error;
        if (error.code === "wait_timeout" && answered - sent > 1) continue;
        await sleep(Math.min(error.retryAfter || 1, end - answered), signal);
      }
    }
  }

  /** Free a key that may be claimed for this owner, in the background. */
  #leave({ scope, key, owner }) {
    const fields = { scope, key, owner, outcome: "forget", ran: false };
    this.call("fail", fields, { patience: 0 }).catch(() => {}); // At the latest its lease ends.
  }

  /** Renew a lease until `stop`; `signal` aborts when it is lost before `ending`. */
  #renewing(asked, started, until) {
    const lost = new AbortController();
    const stopping = new AbortController();
    let expiry;
    let ended = false;
    const lose = (error) => {
      if (!ended) lost.abort(error);
    };
    const watch = () => {
      clearTimeout(expiry);
      const error = new SemelError("the lease was not renewed in time", { code: "lease_lost" });
      if (!ended) expiry = setTimeout(() => lose(error), (until - now()) * 1000);
    };
    const renew = async () => {
      let every = started.renew_every;
      for (let due = until - started.lease + every; ; ) {
        await sleep(due - now(), stopping.signal);
        const sent = now();
        try {
          const seconds = Math.min(every + 1, this.#timeout);
          const renewed = await this.#send("renew", JSON.stringify(asked), seconds, stopping.signal);
          until = sent + renewed.lease;
          every = renewed.renew_every;
          due = sent + every;
          watch();
        } catch (error) {
          if (error?.code === "lease_lost") return lose(error);
          due = now() + (error?.retryAfter ?? Math.min(every / 4, 1));
        }
      }
    };
    watch();
    renew().catch(() => {}); // `stop` ends it so.
    const ending = () => {
      ended = true;
      clearTimeout(expiry);
    };
    return { signal: lost.signal, ending, stop: () => (ending(), stopping.abort()) };
  }

  async #finished(named, result, form) {
    try {
      await this.call("finish", { ...named, [form]: result === undefined ? null : result });
    } catch (error) {
      // The effect is done: the caller must be able to tell this from an error of its function.
      const failed =
        error instanceof SemelError
          ? error
          : new SemelError(`the result is no JSON: ${reasonOf(error)}`, { code: "bad_result", cause: error });
      failed.result = result;
      throw failed;
    }
  }

  async #failed(named, error, outcome) {
    const name = error?.name === "Error" ? error.constructor.name : error?.name;
    const type = String(name ?? typeof error).slice(0, 200).toWellFormed();
    const message = String(error?.message ?? error).slice(0, 10_000).toWellFormed();
    try {
      await this.call("fail", { ...named, error: { type, message }, outcome: outcome?.(error) });
    } catch {
      // The error of `fn` must reach the caller. The lease ends, and the scope says what follows.
    }
  }
}

/** Return 24 random hex digits, which name one attempt. */
export function newOwner() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Read an answer; throw the error that it is. */
function read(answer, text) {
  const { status } = answer;
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    // A page of a gateway, perhaps: its status says whether to try again.
  }
  if (answer.ok && body !== undefined) return body;
  const seconds = Number(answer.headers.get("Retry-After") ?? NaN);
  throw new SemelError(body?.detail ?? `${status}, and not an answer of semel`, {
    code: body?.code ?? "bad_answer",
    status,
    retryAfter: Number.isFinite(seconds) ? Math.max(0, seconds) : undefined,
    problem: body,
  });
}

function reasonOf(error) {
  return error?.cause?.message || error?.cause?.code || error?.message || String(error);
}

/** Seconds on a clock that only goes forward. */
function now() {
  return performance.now() / 1000;
}

/** Wait; reject with the signal's reason when it aborts. @returns {Promise<void>} */
function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const onAbort = () => (clearTimeout(timer), reject(signal.reason));
    const onTime = () => (signal?.removeEventListener("abort", onAbort), resolve());
    const timer = setTimeout(onTime, seconds * 1000);
    signal?.addEventListener("abort", onAbort);
    if (signal?.aborted) onAbort();
  });
}
