// What the tests run in JavaScript: the vectors, or one call of `once`. See `programs.py`.

import { appendFileSync, existsSync, readFileSync, writeFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";
import { newOwner, Semel, SemelError } from "../../../clients/javascript/semel.mjs";

const [mode, ...given] = process.argv.slice(2);
if (mode === "vectors") await vectors(...given);
else await once(JSON.parse(given[0]));

// --- the vectors ------------------------------------------------------------------------------

async function vectors(url, file) {
  const client = new Semel(url, { by: undefined });
  for (const { name, steps } of JSON.parse(readFileSync(file, "utf8")).scenarios) {
    const known = { key: `k-${newOwner()}`, other: `o-${newOwner()}` };
    const begun = {};
    let wrong = null;
    for (const [at, step] of steps.entries()) {
      const asked = step.end ? begun[step.end] : ask(client, url, step, known);
      if (step.begin) {
        begun[step.begin] = asked;
        continue;
      }
      const answer = await asked;
      wrong = difference(answer, step.expect);
      if (wrong) {
        wrong = `step ${at + 1}: ${wrong}; the answer: ${JSON.stringify(answer)}`;
        break;
      }
      for (const [field, saved] of Object.entries(step.save ?? {})) known[saved] = answer.body[field];
    }
    console.log(JSON.stringify({ name, wrong }));
  }
}

async function ask(client, url, step, known) {
  if (step.text !== undefined) {
    // A parser would change it: the client cannot send it.
    const body = step.text.replaceAll(/\$(\w+)/g, (whole, name) => known[name] ?? whole);
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch(`${url}/v1/${step.verb}`, { method: "POST", headers, body });
    return { status: answer.status, body: await answer.json(), retryAfter: Number(answer.headers.get("Retry-After")) };
  }
  try {
    return { status: 200, body: await client.call(step.verb, filled(step.send, known)) };
  } catch (error) {
    if (!(error instanceof SemelError)) throw error;
    return { status: error.status, body: error.problem, retryAfter: error.retryAfter };
  }
}

function filled(value, known) {
  if (typeof value === "string" && value.startsWith("$")) return known[value.slice(1)] ?? value;
  if (Array.isArray(value)) return value.map((each) => filled(each, known));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, filled(each, known)]));
}

function difference(answer, expect) {
  if (answer.status !== expect.status) return `the status is ${answer.status}, not ${expect.status}`;
  if (expect.retry_after && !(answer.retryAfter >= 1)) return `Retry-After is ${answer.retryAfter}`;
  for (const [field, value] of Object.entries(expect.body))
    if (!same(answer.body[field], value)) return `${field} is not ${JSON.stringify(value)}`;
  return (expect.absent ?? []).find((field) => field in answer.body) ?? null;
}

function same(found, expected) {
  if (expected === "$number") return typeof found === "number";
  if (expected === "$text") return typeof found === "string" && found !== "";
  if (expected === "$hex24") return /^[0-9a-f]{24}$/.test(found);
  if (Array.isArray(expected) && Array.isArray(found))
    return found.length === expected.length && found.every((each, at) => same(each, expected[at]));
  return isDeepStrictEqual(found, expected);
}

// --- one call ---------------------------------------------------------------------------------

async function once(told) {
  const { url, scope, key, options = {}, work = "return", result, folder, call = {}, gives_up } = told;
  const client = new Semel(url, options);
  let lost = false;
  class CardDeclined extends Error {}
  const fn = async (attempt) => {
    attempt.signal.addEventListener("abort", () => (lost = attempt.signal.reason.code));
    appendFileSync(`${folder}/effects`, `${attempt.number} ${attempt.takeover}\n`);
    if (work === "gate") while (!existsSync(`${folder}/gate`)) await pause();
    if (work === "until lost") while (!attempt.signal.aborted) await pause();
    if (work === "too large") return "x".repeat(4_300_000);
    if (work === "no JSON") return 10n;
    if (work === "raise oddly") throw "a text";
    if (work === "raise") throw new CardDeclined("insufficient funds");
    return result;
  };
  if (gives_up) call.signal = AbortSignal.timeout(gives_up * 1000);
  if (call.outcome) {
    const { outcome } = call;
    call.outcome = () => outcome;
  }
  let said;
  try {
    said = { result: await client.once(scope, key, fn, call) };
  } catch (error) {
    const { code, status, message, problem, result, constructor } = error;
    const kept = typeof result === "bigint" ? null : result;
    said = { error: code ?? constructor.name, status, message, problem, kept };
  }
  console.log(JSON.stringify({ ...said, lost }));
}

function pause() {
  return new Promise((resolve) => setTimeout(resolve, 10));
}
