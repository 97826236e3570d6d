package semel;

import java.lang.management.ManagementFactory;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.stream.Collectors;

/**
 * The client of the semel service: it runs any operation once per key.
 *
 * <pre>{@code
 * Semel semel = new Semel("http://127.0.0.1:8600");
 * String charge = semel.once("orders.pay", orderId, attempt -> bank.charge(order).toJson());
 * }</pre>
 *
 * One file that needs Java 17 and nothing else; payloads and results are JSON text, so use the JSON
 * library that you have. Copy it into your project; it works with any version of the service that has
 * /v1. A client may be shared by all threads.
 *
 * <p>Its law: every request may be sent again, because it names its owner. Only your function decides
 * whether an attempt failed, so an error of finish is never sent as fail.
 */
public final class Semel {
    private static final double LONGEST_WAIT = 25; // seconds that one request may wait for another attempt
    private static final Set<Integer> AGAIN = Set.of(0, 429, 502, 503, 504);
    private static final SecureRandom RANDOM = new SecureRandom();
    private static final ScheduledThreadPoolExecutor TIMER = new ScheduledThreadPoolExecutor(1, task -> {
        Thread thread = new Thread(task, "semel-renewals");
        thread.setDaemon(true);
        return thread;
    });

    static {
        TIMER.setRemoveOnCancelPolicy(true); // Else it would keep the timers of attempts that ended.
    }

    private final HttpClient http;
    private final String url;
    private String token = System.getenv("SEMEL_TOKEN");
    private String by = System.getenv().getOrDefault("SEMEL_NAME", ManagementFactory.getRuntimeMXBean().getName());
    private double timeout = 10;
    private double patience = 30;

    /** Makes a client of the service at a URL such as {@code http://127.0.0.1:8600}. */
    public Semel(String url) {
        this(url, HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(5)).build());
    }

    /** Makes a client that sends requests by an HttpClient of your own, with a TLS context for example. */
    public Semel(String url, HttpClient http) {
        this.url = url.replaceAll("/+$", "");
        this.http = http;
    }

    /** Sends a token as {@code Authorization: Bearer} (default: $SEMEL_TOKEN). */
    public Semel token(String token) { this.token = token; return this; }

    /** Says who calls, for operators (default: $SEMEL_NAME, or pid and host). */
    public Semel by(String by) { this.by = by; return this; }

    /** After this time a request without an answer is sent again (default: 10 seconds). */
    public Semel timeout(Duration timeout) { this.timeout = seconds(timeout); return this; }

    /** For this time it is sent again (default: 30 seconds). */
    public Semel patience(Duration patience) { this.patience = seconds(patience); return this; }

    /** What one call says beside scope and key. */
    public static final class Options {
        private String payload;
        private String fingerprint;
        private double wait = 60;
        private Double lease;
        private Function<Exception, String> outcome = error -> null;
        private boolean response;

        /** JSON text that must be the same on a retry; write amounts as text or integers. */
        public Options payload(String json) { payload = json; return this; }

        /** 32 hex digits that stand for the payload, instead of it. */
        public Options fingerprint(String hex) { fingerprint = hex; return this; }

        /** How long to wait for another attempt of the key (default: a minute). */
        public Options waitFor(Duration wait) { this.wait = seconds(wait); return this; }

        /** How long the key is kept without a renewal (default: the scope's). */
        public Options lease(Duration lease) { this.lease = seconds(lease); return this; }

        /**
         * What an exception of the function means: "forget" (the next call runs), "retryable" (so it
         * does, with the same payload), "final" (later calls get this failure), or "unknown". Null is
         * what the scope says.
         */
        public Options outcome(Function<Exception, String> outcome) { this.outcome = outcome; return this; }

        /** The function returns an HTTP response: {"status": 201, "headers": [["name", "value"]], "body": "text"}. */
        public Options response() { response = true; return this; }
    }

    /** What runs once: it returns its result as JSON text. */
    @FunctionalInterface
    public interface Work<E extends Exception> {
        String run(Attempt attempt) throws E;
    }

    /**
     * One run of an operation.
     *
     * @param number how many attempts the key has had, this one included
     * @param fence grows with each attempt: other systems reject a late one by it
     * @param takeover whether the attempt before ended without an outcome
     * @param lost is done when the lease is lost: another attempt may run
     */
    public record Attempt(
            String scope, String key, int number, long fence, boolean takeover, CompletableFuture<Problem> lost) { }

    /** An answer that is an error, or none. */
    public static final class Problem extends RuntimeException {
        private static final long serialVersionUID = 1;
        /** Such as "payload_mismatch"; "unreachable" and "bad_answer" are the client's. */
        public final String code;
        /** Of HTTP; 0 if no answer came. */
        public final int status;
        /** Seconds after which a retry may help, where the service says so; else 0. */
        public final int retryAfter;
        /** The whole answer, JSON text, with "field", "superseded", or "error" where they apply. */
        public final String answer;
        /** What your function returned, where only storing it failed. */
        public final String result;

        Problem(String code, String detail, int status, int retryAfter, String answer, String result, Throwable cause) {
            super(detail, cause);
            this.code = code;
            this.status = status;
            this.retryAfter = retryAfter;
            this.answer = answer;
            this.result = result;
        }

        Problem(String code, String detail, Throwable cause) {
            this(code, detail, 0, 0, null, null, cause);
        }

        Problem(Problem of, String result) {
            this(of.code, of.getMessage(), of.status, of.retryAfter, of.answer, result, of);
        }
    }

    /** Calls {@link #once(String, String, Options, Work)} without options. */
    public <E extends Exception> String once(String scope, String key, Work<E> work)
            throws E, InterruptedException {
        return once(scope, key, new Options(), work);
    }

    /**
     * Runs work once per scope and key, and returns its result; a duplicate gets the same one.
     *
     * @return JSON text; of an HTTP response where one is stored
     * @throws E what work throws; the outcome is recorded
     * @throws Problem if the service refuses the call or cannot be reached; or with
     *     {@code result}, if only storing the result of work failed
     */
    public <E extends Exception> String once(String scope, String key, Options options, Work<E> work)
            throws E, InterruptedException {
        Map<String, String> named = Map.of(
                "scope", Json.quoted(scope), "key", Json.quoted(key), "owner", Json.quoted(newOwner()));
        Renewing renewing = begin(named, options);
        Map<String, String> answer = renewing.answer;
        if (answer.get("status").equals("\"done\"")) {
            return answer.getOrDefault("response", answer.get("result"));
        }
        int number = Integer.parseInt(answer.get("attempt"));
        long fence = Long.parseLong(Json.text(answer.get("fence")));
        boolean takeover = answer.get("takeover").equals("true");
        renewing.begin();
        try {
            String result;
            try {
                result = work.run(new Attempt(scope, key, number, fence, takeover, renewing.lost));
            } catch (Throwable error) {
                failed(named, options, error);
                throw error;
            }
            result = result == null ? "null" : result;
            finished(named, result, options.response ? "response" : "result");
            return result;
        } finally {
            renewing.stop();
        }
    }

    /** Returns 24 random hex digits, which name one attempt. */
    public static String newOwner() {
        byte[] random = new byte[12];
        RANDOM.nextBytes(random);
        return HexFormat.of().formatHex(random);
    }

    /**
     * Sends one verb (start, renew, finish, fail, or keys), again while there is no answer.
     *
     * @param body a JSON object; send an owner with a start, so that a repeated one is the same attempt
     * @return the answer's body, JSON text
     */
    public String call(String verb, String body) throws InterruptedException {
        return call(verb, body, verb.equals("start") ? timeout + LONGEST_WAIT : timeout, patience, () -> { });
    }

    private String call(String verb, String body, double within, double patience, Runnable onSend)
            throws InterruptedException {
        Double end = null; // From the first failure: a request may wait for longer than that.
        for (double pause = 0.1; ; pause = Math.min(pause * 2, 2)) {
            try {
                onSend.run();
                return got(send(verb, body, within));
            } catch (Problem error) {
                end = end == null ? now() + patience : end;
                double delay = error.retryAfter > 0 ? error.retryAfter : pause;
                if (!AGAIN.contains(error.status) || now() + delay > end) {
                    throw error;
                }
                sleep(delay);
            }
        }
    }

    private CompletableFuture<HttpResponse<String>> send(String verb, String body, double within) {
        HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(url + "/v1/" + verb))
                .version(HttpClient.Version.HTTP_1_1) // Over plain HTTP, 2 would begin with an upgrade.
                .timeout(Duration.ofNanos((long) (within * 1e9)))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body));
        if (token != null && !token.isEmpty()) {
            request.header("Authorization", "Bearer " + token);
        }
        return http.sendAsync(request.build(), HttpResponse.BodyHandlers.ofString())
                .orTimeout((long) (within * 1000), TimeUnit.MILLISECONDS); // The other ends with the headers.
    }

    private static String read(HttpResponse<String> answer) {
        // It may be a page of a gateway: then its status says what to do.
        boolean json = answer.body().startsWith("{") && answer.body().endsWith("}");
        if (answer.statusCode() == 200 && json) {
            return answer.body();
        }
        Map<String, String> told = json ? Json.members(answer.body()) : Map.of();
        String detail = answer.statusCode() + ", and not an answer of semel";
        String after = answer.headers().firstValue("Retry-After").orElse("");
        int seconds = after.matches("\\d{1,6}") ? Integer.parseInt(after) : 0;
        throw new Problem(
                told.containsKey("code") ? Json.text(told.get("code")) : "bad_answer",
                told.containsKey("detail") ? Json.text(told.get("detail")) : detail,
                answer.statusCode(), seconds, answer.body(), null, null);
    }

    private String got(CompletableFuture<HttpResponse<String>> answer) throws InterruptedException {
        try {
            return read(answer.get());
        } catch (ExecutionException failed) {
            throw unreachable(failed.getCause());
        } catch (InterruptedException gone) {
            answer.cancel(true);
            throw gone;
        }
    }

    private Problem unreachable(Throwable cause) {
        return new Problem("unreachable", url + ": " + cause, cause);
    }

    /** Starts until there is an answer. */
    private Renewing begin(Map<String, String> named, Options options) throws InterruptedException {
        Map<String, String> fields = new LinkedHashMap<>(named);
        put(fields, "by", by == null ? null : Json.quoted(by));
        put(fields, "payload", options.payload);
        put(fields, "fingerprint", options.fingerprint == null ? null : Json.quoted(options.fingerprint));
        put(fields, "lease", options.lease == null ? null : options.lease.toString());
        double end = now() + options.wait;
        double[] sent = {0};
        for (int late = 1; ; ) {
            double wait = Math.max(0, Math.min(end - now(), LONGEST_WAIT));
            fields.put("wait", "" + wait);
            try {
                String body = Json.object(fields);
                String text = call("start", body, timeout + wait, patience, () -> sent[0] = now());
                Renewing renewing = new Renewing(named, options, Json.members(text), sent[0]);
                // A late answer leaves no time to work: the same owner gets a new lease.
                if (!renewing.late()) {
                    return renewing;
                }
                if (++late > 3) {
                    throw new Problem("unreachable", "answers take as long as the lease", null);
                }
            } catch (InterruptedException gone) {
                leave(named);
                throw gone;
            } catch (Problem error) {
                if (error.status == 0 || error.status >= 500) {
                    leave(named);
                }
                boolean waited = error.code.equals("wait_timeout");
                if (!(waited || error.code.equals("concurrent_request")) || now() >= end) {
                    throw error;
                }
                if (!waited || now() - sent[0] < 1) {
                    sleep(Math.min(Math.max(error.retryAfter, 1), end - now()));
                }
            }
        }
    }

    /** Tries to free a key that may be claimed for this owner: nothing ran. */
    private void leave(Map<String, String> named) {
        Map<String, String> fields = new LinkedHashMap<>(named);
        fields.put("outcome", "\"forget\"");
        fields.put("ran", "false");
        try {
            send("fail", Json.object(fields), 1).join(); // The caller must not wait for it.
        } catch (CompletionException failed) {
            // At the latest its lease ends.
        }
    }

    private void finished(Map<String, String> named, String result, String form) {
        Map<String, String> fields = new LinkedHashMap<>(named);
        fields.put(form, result);
        try {
            whole("finish", fields);
        } catch (Problem error) {
            throw new Problem(error, result);
        }
    }

    private void failed(Map<String, String> named, Options options, Throwable error) {
        Map<String, String> fields = new LinkedHashMap<>(named);
        fields.put("error", Json.object(Map.of(
                "type", Json.quoted(cut(error.getClass().getSimpleName(), 200)),
                "message", Json.quoted(cut("" + error.getMessage(), 10_000)))));
        try {
            String outcome = error instanceof Exception known ? options.outcome.apply(known) : null;
            put(fields, "outcome", outcome == null ? null : Json.quoted(outcome));
            whole("fail", fields);
        } catch (RuntimeException other) {
            error.addSuppressed(other); // The lease ends, and the scope says what follows.
        }
    }

    /** Sends what an attempt came to, even if its thread is interrupted. */
    private void whole(String verb, Map<String, String> fields) {
        boolean interrupted = Thread.interrupted();
        try {
            while (true) {
                try {
                    call(verb, Json.object(fields));
                    return;
                } catch (InterruptedException again) {
                    interrupted = true;
                }
            }
        } finally {
            if (interrupted) {
                Thread.currentThread().interrupt();
            }
        }
    }

    /** Renews the lease of an attempt until it is stopped. */
    private final class Renewing {
        final Map<String, String> answer;
        final CompletableFuture<Problem> lost = new CompletableFuture<>();
        private final String body;
        private double every;
        private double until;
        private ScheduledFuture<?> next;
        private ScheduledFuture<?> expiry;
        private boolean stopped;

        Renewing(Map<String, String> named, Options options, Map<String, String> answer, double sent) {
            Map<String, String> fields = new LinkedHashMap<>(named);
            put(fields, "lease", options.lease == null ? null : options.lease.toString());
            this.body = Json.object(fields);
            this.answer = answer;
            if (answer.containsKey("owner")) {
                renewed(answer, sent + number(answer, "waited"));
            }
        }

        boolean late() {
            return answer.containsKey("owner") && now() > until - 0.1 * number(answer, "lease");
        }

        synchronized void begin() {
            watch();
            next = after(until - number(answer, "lease") + every - now(), this::renew);
        }

        synchronized void stop() {
            stopped = true;
            next.cancel(false);
            expiry.cancel(false);
        }

        private void renewed(Map<String, String> told, double from) {
            until = from + number(told, "lease");
            every = number(told, "renew_every");
        }

        private void watch() {
            Problem late = new Problem("lease_lost", "the lease was not renewed in time", null);
            expiry = after(until - now(), () -> lose(late));
        }

        private synchronized void renew() {
            double sent = now();
            send("renew", body, Math.min(every + 1, timeout))
                    .whenComplete((answer, failed) -> took(sent, answer, failed));
        }

        private synchronized void took(double sent, HttpResponse<String> answer, Throwable failed) {
            if (stopped) {
                return;
            }
            try {
                if (failed != null) {
                    throw unreachable(failed);
                }
                renewed(Json.members(read(answer)), sent);
                expiry.cancel(false);
                watch();
                next = after(sent + every - now(), this::renew);
            } catch (Problem error) {
                if (error.code.equals("lease_lost")) {
                    lose(error);
                } else {
                    next = after(error.retryAfter > 0 ? error.retryAfter : Math.min(every / 4, 1), this::renew);
                }
            }
        }

        private void lose(Problem error) {
            lost.completeAsync(() -> error); // Elsewhere: a listener may take its time.
        }

        private ScheduledFuture<?> after(double seconds, Runnable task) {
            return TIMER.schedule(task, (long) (seconds * 1e9), TimeUnit.NANOSECONDS);
        }
    }

    private static double number(Map<String, String> fields, String name) {
        return Double.parseDouble(fields.get(name));
    }

    private static void put(Map<String, String> fields, String name, String json) {
        if (json != null) {
            fields.put(name, json);
        }
    }

    private static String cut(String text, int length) {
        return text.substring(0, Math.min(length, text.length()));
    }

    private static double now() {
        return System.nanoTime() / 1e9;
    }

    private static double seconds(Duration duration) {
        return duration.toNanos() / 1e9;
    }

    private static void sleep(double seconds) throws InterruptedException {
        TimeUnit.NANOSECONDS.sleep((long) (seconds * 1e9));
    }

    /** As much of JSON as is needed: values stay text. */
    static final class Json {
        /** Returns the members of an object; of an array, by their position. */
        static Map<String, String> members(String json) {
            Map<String, String> members = new LinkedHashMap<>();
            String name = null;
            int depth = 0;
            int from = 0;
            for (int at = 0; at < json.length(); at++) {
                char each = json.charAt(at);
                if (each == '"') {
                    while (json.charAt(++at) != '"') {
                        at += json.charAt(at) == '\\' ? 1 : 0;
                    }
                } else if ((each == '{' || each == '[') && ++depth == 1
                        || each == ':' && depth == 1 && name == null) {
                    name = each == ':' ? text(json.substring(from, at).strip()) : null;
                    from = at + 1;
                } else if (each == ',' || each == '}' || each == ']') {
                    if (depth == 1 && !json.substring(from, at).isBlank()) {
                        members.put(name == null ? "" + members.size() : name, json.substring(from, at).strip());
                        name = null;
                        from = at + 1;
                    }
                    depth -= each == ',' ? 0 : 1;
                }
            }
            return members;
        }

        static String object(Map<String, String> members) {
            return members.entrySet().stream().map(each -> quoted(each.getKey()) + ":" + each.getValue())
                    .collect(Collectors.joining(",", "{", "}"));
        }

        static String quoted(String text) {
            StringBuilder json = new StringBuilder("\"");
            for (char each : text.toCharArray()) {
                boolean plain = each >= ' ' && each < 0x7f && each != '"' && each != '\\';
                json.append(plain ? "" + each : String.format("\\u%04x", (int) each));
            }
            return json.append('"').toString();
        }

        /** Returns what a JSON string says; of any other value, its text. */
        static String text(String json) {
            StringBuilder text = new StringBuilder();
            boolean string = json.startsWith("\"");
            for (int at = string ? 1 : 0; at < json.length() - (string ? 1 : 0); at++) {
                char each = json.charAt(at);
                if (each != '\\') {
                    text.append(each);
                } else if (json.charAt(++at) == 'u') {
                    text.append((char) Integer.parseInt(json.substring(at + 1, at + 5), 16));
                    at += 4;
                } else {
                    int escape = "bfnrt".indexOf(json.charAt(at));
                    text.append(escape < 0 ? json.charAt(at) : "\b\f\n\r\t".charAt(escape));
                }
            }
            return text.toString();
        }
    }
}
