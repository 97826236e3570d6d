package semel;

import java.io.IOException;
import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import semel.Semel.Json;

/** What the tests run in Java: the vectors, or one call of once. See programs.py. */
final class Program {
    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("vectors")) {
            vectors(new Semel(arguments[1]), Json.members(Files.readString(Path.of(arguments[2]))));
        } else {
            once(Json.members(arguments[1]));
        }
    }

    private static void say(Map<String, String> fields) {
        byte[] line = (Json.object(fields) + "\n").getBytes(StandardCharsets.UTF_8);
        System.out.write(line, 0, line.length);
        System.out.flush();
    }

    // --- the vectors ----------------------------------------------------------------------------

    private record Answer(int status, int retryAfter, String text) { }

    private static void vectors(Semel client, Map<String, String> vectors) throws Exception {
        for (String scenario : Json.members(vectors.get("scenarios")).values()) {
            Map<String, String> about = Json.members(scenario);
            Map<String, String> known = new HashMap<>(
                    Map.of("key", "k-" + Semel.newOwner(), "other", "o-" + Semel.newOwner()));
            Map<String, CompletableFuture<Answer>> begun = new HashMap<>();
            String wrong = null;
            int at = 0;
            for (String text : Json.members(about.get("steps")).values()) {
                Map<String, String> step = Json.members(text);
                at++;
                CompletableFuture<Answer> asked = begun.get(step.get("end"));
                if (asked == null) {
                    String verb = Json.text(step.get("verb"));
                    boolean plain = step.containsKey("send");
                    String body = plain ? step.get("send") : Json.text(step.get("text"));
                    for (Map.Entry<String, String> each : known.entrySet()) {
                        body = body.replace("\"$" + each.getKey() + "\"", Json.quoted(each.getValue()));
                    }
                    String sent = body;
                    asked = CompletableFuture.supplyAsync(() -> ask(client, verb, sent));
                }
                if (step.containsKey("begin")) {
                    begun.put(step.get("begin"), asked);
                    continue;
                }
                Answer answer = asked.get();
                wrong = difference(answer, Json.members(step.get("expect")));
                if (wrong != null) {
                    wrong = "step " + at + ": " + wrong + "; the answer: " + answer;
                    break;
                }
                for (Map.Entry<String, String> each : Json.members(step.getOrDefault("save", "{}")).entrySet()) {
                    String saved = Json.members(answer.text).get(each.getKey());
                    known.put(Json.text(each.getValue()), Json.text(saved));
                }
            }
            Map<String, String> said = new LinkedHashMap<>();
            said.put("name", about.get("name"));
            said.put("wrong", wrong == null ? "null" : Json.quoted(wrong));
            say(said);
        }
    }

    private static Answer ask(Semel client, String verb, String body) {
        try {
            return new Answer(200, 0, client.call(verb, body));
        } catch (Semel.Problem problem) {
            return new Answer(problem.status, problem.retryAfter, problem.answer);
        } catch (InterruptedException gone) {
            throw new IllegalStateException(gone);
        }
    }

    private static String difference(Answer answer, Map<String, String> expect) {
        if (answer.status != Integer.parseInt(expect.get("status"))) {
            return "the status is not " + expect.get("status");
        }
        if (expect.containsKey("retry_after") && answer.retryAfter < 1) {
            return "Retry-After is " + answer.retryAfter;
        }
        Map<String, String> body = Json.members(answer.text);
        for (Map.Entry<String, String> each : Json.members(expect.get("body")).entrySet()) {
            if (!same(body.get(each.getKey()), each.getValue())) {
                return each.getKey() + " is not " + each.getValue();
            }
        }
        for (String field : Json.members(expect.getOrDefault("absent", "[]")).values()) {
            if (body.containsKey(Json.text(field))) {
                return field + " is there";
            }
        }
        return null;
    }

    private static boolean same(String found, String expected) {
        if (found == null) {
            return false;
        }
        boolean text = found.startsWith("\"");
        boolean number = found.matches("-?\\d.*");
        switch (expected) {
            case "\"$number\"": return number;
            case "\"$text\"": return text && found.length() > 2;
            case "\"$hex24\"": return found.matches("\"[0-9a-f]{24}\"");
            default: break;
        }
        if (expected.startsWith("{") || expected.startsWith("[")) {
            Map<String, String> ours = Json.members(found);
            Map<String, String> theirs = Json.members(expected);
            return found.charAt(0) == expected.charAt(0) && ours.keySet().equals(theirs.keySet())
                    && theirs.entrySet().stream().allMatch(each -> same(ours.get(each.getKey()), each.getValue()));
        }
        if (number && expected.matches("-?\\d.*")) {
            return new BigDecimal(found).compareTo(new BigDecimal(expected)) == 0;
        }
        return text == expected.startsWith("\"") && Json.text(found).equals(Json.text(expected));
    }

    // --- one call -------------------------------------------------------------------------------

    private static final class CardDeclined extends Exception {
        private static final long serialVersionUID = 1;

        CardDeclined() {
            super("insufficient funds");
        }
    }

    private static void once(Map<String, String> told) {
        Map<String, String> settings = Json.members(told.getOrDefault("options", "{}"));
        Map<String, String> call = Json.members(told.getOrDefault("call", "{}"));
        Semel client = new Semel(Json.text(told.get("url")));
        if (settings.containsKey("token")) {
            client.token(Json.text(settings.get("token")));
        }
        if (settings.containsKey("patience")) {
            client.patience(seconds(settings.get("patience")));
        }
        Semel.Options options = new Semel.Options().payload(call.get("payload"));
        if (call.containsKey("wait")) {
            options.waitFor(seconds(call.get("wait")));
        }
        if (call.containsKey("lease")) {
            options.lease(seconds(call.get("lease")));
        }
        if (call.containsKey("outcome")) {
            options.outcome(error -> Json.text(call.get("outcome")));
        }
        if (call.containsKey("response")) {
            options.response();
        }
        if (told.containsKey("gives_up")) {
            Thread caller = Thread.currentThread();
            CompletableFuture.delayedExecutor(seconds(told.get("gives_up")).toMillis(), TimeUnit.MILLISECONDS)
                    .execute(caller::interrupt);
        }
        Map<String, String> said = new LinkedHashMap<>();
        String[] lost = {"false"};
        try {
            said.put("result", client.once(Json.text(told.get("scope")), Json.text(told.get("key")), options,
                    attempt -> work(attempt, told, lost)));
        } catch (Semel.Problem problem) {
            said.put("error", Json.quoted(problem.code));
            said.put("status", "" + problem.status);
            said.put("message", Json.quoted(problem.getMessage()));
            boolean json = problem.answer != null && problem.answer.startsWith("{");
            said.put("problem", json ? problem.answer : "null");
            boolean whole = problem.result != null && !problem.result.equals("{");
            said.put("kept", whole ? problem.result : "null");
        } catch (AssertionError | Exception error) { // of several kinds, the compiler takes what they have in common
            said.put("error", Json.quoted(error.getClass().getSimpleName()));
            said.put("message", Json.quoted("" + error.getMessage()));
        }
        said.put("lost", lost[0]);
        say(said);
    }

    private static String work(Semel.Attempt attempt, Map<String, String> told, String[] lost)
            throws IOException, CardDeclined, InterruptedException {
        attempt.lost().thenAccept(problem -> lost[0] = Json.quoted(problem.code));
        Path folder = Path.of(Json.text(told.get("folder")));
        Files.writeString(folder.resolve("effects"), attempt.number() + " " + attempt.takeover() + "\n",
                StandardOpenOption.CREATE, StandardOpenOption.APPEND);
        switch (Json.text(told.getOrDefault("work", "return"))) {
            case "gate" -> {
                while (!Files.exists(folder.resolve("gate"))) {
                    Thread.sleep(10);
                }
            }
            case "until lost" -> {
                while (lost[0].equals("false")) {
                    Thread.sleep(10);
                }
            }
            case "too large" -> {
                return '"' + "x".repeat(4_300_000) + '"';
            }
            case "no JSON" -> {
                return "{";
            }
            case "raise oddly" -> throw new AssertionError("a text");
            case "raise" -> throw new CardDeclined();
            default -> { }
        }
        return told.get("result");
    }

    private static Duration seconds(String json) {
        return Duration.ofNanos((long) (Double.parseDouble(json) * 1e9));
    }
}
