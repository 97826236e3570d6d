// A service that knows nothing of semel: the business of tests/web/handlers.py on Node, and what
// only the tests of the proxy ask for. `node upstream.js FOLDER` prints its port.
"use strict";

const fs = require("node:fs");
const http = require("node:http");
const path = require("node:path");
const zlib = require("node:zlib");
const { randomUUID, createHash } = require("node:crypto");

const folder = process.argv[2];
const [COOKIE, BEARER, CSRF, NONCE] = ["c00kie-of-ann", "bearer-of-ann", "csrf-of-ann", "nonce-of-ann"];
const LONG = 1300;

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const ledger = path.join(folder, "ledger");
const write = (run) => fs.appendFileSync(ledger, `${run}\n`);
const runs = (run) => fs.readFileSync(ledger, "utf8").split("\n").filter((line) => line === run).length;
const passGate = async (name) => {
  while (!fs.existsSync(path.join(folder, `gate-${name}`))) await sleep(10);
};

function json(response, status, value, lines = []) {
  response.writeHead(status, ["Content-Type", "application/json", ...lines]);
  response.end(JSON.stringify(value));
}

const pay = (asked, response, lines = []) =>
  json(response, 201, { number: randomUUID(), said: asked.body.length }, lines);

const HANDLERS = {
  pay: (asked, response) => pay(asked, response),
  login: (asked, response) => pay(asked, response),
  refund: (asked, response) => pay(asked, response),
  private: (asked, response) => pay(asked, response),
  status(asked, response, code) {
    if (code === "204" || code === "304") {
      response.writeHead(Number(code), { "X-Number": randomUUID() });
      response.end();
    } else json(response, Number(code), { number: randomUUID() });
  },
  raise: (asked, response) => json(response, 500, { broken: true }),
  raise_page: (asked, response) => json(response, 500, { broken: true }),
  raise_once: (asked, response) =>
    runs(asked.run) === 1 ? json(response, 500, { broken: true }) : pay(asked, response),
  async wait(asked, response, gate) {
    await passGate(gate);
    pay(asked, response);
  },
  async long(asked, response) {
    await sleep(LONG);
    pay(asked, response);
  },
  large(asked, response, size) {
    response.writeHead(200, { "Content-Type": "text/plain", "Content-Length": size });
    response.end("x".repeat(Number(size)));
  },
  async chunks(asked, response) {
    response.writeHead(200, { "Content-Type": "text/plain", "X-Number": randomUUID() });
    for (let number = 0; number < 5; number += 1) {
      response.write(`chunk ${number} of an answer\n`);
      await sleep(1);
    }
    response.end();
  },
  large_chunks(asked, response, count) {
    response.writeHead(200, { "Content-Type": "text/plain" });
    for (let number = 0; number < Number(count); number += 1) response.write("y".repeat(1024));
    response.end();
  },
  async broken_chunks(asked, response) {
    response.writeHead(200, { "Content-Type": "text/plain" });
    response.write("so far ");
    await sleep(20);
    response.destroy();
  },
  async events(asked, response, gate) {
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    response.on("close", () => write(`closed-${asked.run}`));
    response.write("data: 1\n\n");
    await passGate(gate);
    response.end("data: 2\n\n");
  },
  secret: (asked, response) => {
    response.sendDate = false;
    response.writeHead(201, [
      "Content-Type", "application/json",
      "X-First", "1",
      "Set-Cookie", `session=${COOKIE}; Path=/`,
      "Authorization", `Bearer ${BEARER}`,
      "WWW-Authenticate", `Digest nonce="${NONCE}"`,
      "Proxy-Authentication-Info", `nextnonce="${NONCE}"`,
      "X-Csrf-Token", CSRF,
      "X-CSRFToken", CSRF,
      "Token", BEARER,
      "Refresh_Token", BEARER,
      "Authentication-Info", `nextnonce="${NONCE}"`,
      "Date", "Mon, 16 Nov 2026 03:00:00 GMT",
      "Access-Control-Allow-Origin", "https://shop.example",
      "Access-Control-Allow-Credentials", "true",
      "Idempotent-Replayed", "true",
      "X-Second", "2",
    ]);
    response.end('{"secret": false}');
  },
  hop: (asked, response) =>
    pay(asked, response, ["Connection", "close, X-Hop", "Keep-Alive", "timeout=5", "X-Hop", "1"]),
  repeated(asked, response) {
    response.writeHead(200, [
      "Content-Type", "text/plain",
      "Link", "</a>; rel=next, </b>; rel=prev",
      "X-Between", "yes",
      "Link", "</c>; rel=last",
      "Link", "</c>; rel=last",
    ]);
    response.end("repeated");
  },
  empty(asked, response) {
    response.writeHead(204, { "X-Number": randomUUID() });
    response.end();
  },
  echo(asked, response) {
    response.writeHead(200, { "Content-Type": "application/octet-stream" });
    response.end(asked.body);
  },
  async after(asked, response, gate) {
    pay(asked, response);
    await passGate(gate);
    write(`after-${asked.run}`);
  },
  attempt: (asked, response) => json(response, 200, null),

  // --- what only the tests of the proxy ask for ----------------------------------------------

  seen: (asked, response) =>
    json(response, 200, {
      method: asked.request.method,
      target: asked.request.url,
      headers: asked.request.rawHeaders,
      sum: createHash("sha256").update(asked.body).digest("hex"),
      port: asked.request.socket.remotePort,
    }),
  redirect(asked, response, code) {
    response.writeHead(Number(code), { Location: "/pay" });
    response.end();
  },
  packed(asked, response) {
    const body = zlib.gzipSync("packed ".repeat(100));
    response.writeHead(200, { "Content-Type": "text/plain", "Content-Encoding": "gzip" });
    response.end(body);
  },
  die: (asked) => asked.request.socket.destroy(),
  die_once: (asked, response) =>
    runs(asked.run) === 1 ? asked.request.socket.destroy() : pay(asked, response),
  async die_late(asked, response, size) {
    response.writeHead(200, { "Content-Length": "9999999" });
    response.write("z".repeat(Number(size)));
    await sleep(50);
    asked.request.socket.destroy();
  },
};

// These read the body themselves: the others get it whole.
const STREAMING = {
  async early(request, response) {
    response.writeHead(413, { "Content-Type": "text/plain" });
    response.end("too large");
  },
  async upper(request, response) {
    response.writeHead(200, { "Content-Type": "text/plain" });
    for await (const chunk of request) response.write(chunk.toString().toUpperCase());
    response.end();
  },
};

async function answer(request, response) {
  const [, name, ...rest] = request.url.split("?")[0].split("/");
  const run = request.headers["x-run"] ?? "-";
  if (Object.hasOwn(STREAMING, name)) {
    write(run);
    await STREAMING[name](request, response);
    return;
  }
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  write(run);
  const asked = { request, run, body: Buffer.concat(chunks) };
  if (Object.hasOwn(HANDLERS, name)) await HANDLERS[name](asked, response, ...rest);
  else json(response, 404, { found: false });
}

const server = http.createServer({ keepAliveTimeout: 60_000 }, (request, response) => {
  answer(request, response).catch(() => write(`aborted-${request.headers["x-run"] ?? "-"}`));
});
server.on("clientError", (_, socket) => {
  // With a length: Node's own answer ends by a reset, as one that is cut off does.
  socket.end("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
});
server.on("checkContinue", (request, response) => {
  write("expected");
  response.writeContinue();
  server.emit("request", request, response);
});
process.stdin.on("end", () => process.exit()).resume(); // whoever started it has ended
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
