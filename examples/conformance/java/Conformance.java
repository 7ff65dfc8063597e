import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Runs the cases of a folder against a pipeline with Apache Kafka's own client: the runner for Java. ../README.md says
 * what a runner does.
 *
 *     mvn -q dependency:copy-dependencies -DoutputDirectory=jars          (Java 17 or newer)
 *     KAFKA=localhost:9092 PIPELINE=demo GATEWAY=http://localhost:8000 MODEL=demo java -cp 'jars/*' Conformance.java ../cases/*.json
 */
public class Conformance {
    static final String KAFKA = System.getenv("KAFKA"), PIPELINE = System.getenv("PIPELINE");
    static final String GATEWAY = System.getenv("GATEWAY"), MODEL = System.getenv("MODEL");
    static final Duration TIMEOUT = Duration.ofSeconds(120);
    static final String MISSING = "nothing came";
    static final ObjectMapper JSON = new ObjectMapper();
    static final HttpClient HTTP = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();

    static final Map<String, List<JsonNode>> results = new HashMap<>();
    static final List<ConsumerRecord<byte[], byte[]>> letters = new ArrayList<>();

    /** A case with its names filled in, and what came of it. */
    static class Case {
        final String name;
        final JsonNode told;
        String id = "java-" + UUID.randomUUID(), lastEvent = "", text = "", failed = "";
        final Set<String> seen = new HashSet<>();

        Case(Path path) throws Exception {
            name = path.getFileName().toString().replace(".json", "");
            told = JSON.readTree(Files.readString(path).replace("{id}", id).replace("{pipeline}", PIPELINE).replace("{model}", MODEL));
        }

        byte[] encodeValue() throws Exception {
            JsonNode produce = told.get("produce");
            ByteArrayOutputStream value = new ByteArrayOutputStream();
            if (produce.has("prefix_base64")) value.write(produce.get("prefix_base64").binaryValue());
            value.write(produce.has("text") ? produce.get("text").asText().getBytes(StandardCharsets.UTF_8) : JSON.writeValueAsBytes(produce.get("value")));
            return value.toByteArray();
        }

        /** Produce the message, as often as the case says, and return once Kafka has acknowledged it. */
        void produce(KafkaProducer<byte[], byte[]> producer) throws Exception {
            JsonNode produce = told.get("produce");
            byte[] key = produce.has("key") ? null : id.getBytes(StandardCharsets.UTF_8);
            for (int count = 0; count < produce.path("times").asInt(1); count++) {
                var message = new ProducerRecord<>("penstock." + PIPELINE + ".requests." + produce.get("class").asText(), key, encodeValue());
                for (var header : produce.path("headers").properties()) message.headers().add(header.getKey(), header.getValue().asText().getBytes(StandardCharsets.UTF_8));
                for (var header : produce.path("headers_base64").properties()) message.headers().add(header.getKey(), header.getValue().binaryValue());
                producer.send(message).get();
            }
        }

        /** Post a request and follow its stream to the end, over two connections if the case says so. */
        void followStream() throws Exception {
            JsonNode post = told.get("post");
            HttpRequest asked = HttpRequest.newBuilder(URI.create(GATEWAY + post.get("path").asText()))
                .header("Content-Type", "application/json").POST(HttpRequest.BodyPublishers.ofByteArray(JSON.writeValueAsBytes(post.get("body")))).build();
            for (int most : new int[] {post.path("leave_after").asInt(0), 0}) {
                if (followConnection(asked, most)) return;
                asked = HttpRequest.newBuilder(URI.create(GATEWAY + "/v1/streams/" + id)).header("Last-Event-ID", lastEvent).build();
            }
            throw new IllegalStateException("the stream has no end");
        }

        /** Read events until the end, or until so many were read (0: all). Return whether it was the end. */
        boolean followConnection(HttpRequest asked, int most) throws Exception {
            var answer = HTTP.send(asked, HttpResponse.BodyHandlers.ofInputStream());
            if (answer.statusCode() != 200) throw new IllegalStateException("status " + answer.statusCode());
            int count = 0;
            try (var lines = new BufferedReader(new InputStreamReader(answer.body(), StandardCharsets.UTF_8))) {
                for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                    if (line.startsWith("id: ")) {
                        lastEvent = line.substring(4);
                        if (!seen.add(lastEvent)) throw new IllegalStateException("the event " + lastEvent + " came twice");
                    } else if (line.equals("data: [DONE]")) {
                        return true;
                    } else if (line.startsWith("data: ")) {
                        JsonNode event = JSON.readTree(line.substring(6));
                        id = event.get("id").asText();
                        for (JsonNode choice : event.get("choices")) text += choice.get("text").asText();
                    } else if (line.isEmpty() && ++count == most) {
                        return false;
                    }
                }
            }
            return false;
        }

        /** Return why the case does not hold, or an empty string. */
        String findProblem() throws Exception {
            JsonNode letter = told.get("expect").get("dead_letter");
            if (letter != null) {
                byte[] wanted = encodeValue();
                var found = letters.stream().filter(one -> Arrays.equals(one.value(), wanted)).toList();
                if (found.size() != 1) return found.isEmpty() ? MISSING : found.size() + " dead letters";
                return hasHeaders(found.get(0), letter) ? "" : "other headers: " + found.get(0).headers();
            }
            List<JsonNode> found = results.getOrDefault(id, List.of());
            if (found.size() != 1) return found.isEmpty() ? MISSING : found.size() + " results";
            boolean isSame = !told.has("post") || text.equals(found.get(0).get("text").asText());
            return isSame && holds(told.get("expect").get("result"), found.get(0)) ? "" : "another result: " + found.get(0);
        }
    }

    /** Return whether a record's headers begin as expected. */
    static boolean hasHeaders(ConsumerRecord<byte[], byte[]> found, JsonNode expected) {
        return expected.properties().stream().allMatch(one -> {
            var header = found.headers().lastHeader(one.getKey());
            return header != null && new String(header.value(), StandardCharsets.UTF_8).startsWith(one.getValue().asText());
        });
    }

    /** Return whether all that is expected is in what was found. */
    static boolean holds(JsonNode expected, JsonNode found) {
        if (!expected.isObject()) return expected.equals(found);
        return found != null && expected.properties().stream().allMatch(one -> holds(one.getValue(), found.get(one.getKey())));
    }

    static boolean isOpen(List<Case> cases) throws Exception {
        for (Case one : cases) if (one.failed.isEmpty() && one.findProblem().equals(MISSING)) return true;
        return false;
    }

    public static void main(String[] paths) throws Exception {
        List<Case> cases = new ArrayList<>();
        Map<String, Object> settings = Map.of("bootstrap.servers", KAFKA, "acks", "all", "enable.idempotence", true);
        try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (String path : paths) {
                Case one = new Case(Path.of(path));
                try {
                    if (one.told.has("produce")) one.produce(producer);
                    else one.followStream();
                } catch (Exception error) {
                    one.failed = error.toString();
                }
                cases.add(one);
            }
        }
        Map<String, Object> reading = Map.of("bootstrap.servers", KAFKA, "group.id", "conformance-" + UUID.randomUUID(),
            "isolation.level", "read_committed", "enable.auto.commit", false, "auto.offset.reset", "earliest");
        try (var consumer = new KafkaConsumer<>(reading, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(List.of("penstock." + PIPELINE + ".results", "penstock." + PIPELINE + ".dead"));
            long until = System.nanoTime() + TIMEOUT.toNanos();
            while (isOpen(cases) && System.nanoTime() < until) {
                for (var message : consumer.poll(Duration.ofSeconds(1))) {
                    if (message.topic().endsWith(".dead")) {
                        letters.add(message);
                    } else {
                        JsonNode result = JSON.readTree(message.value());
                        results.computeIfAbsent(result.get("id").asText(), id -> new ArrayList<>()).add(result);
                    }
                }
            }
        }
        boolean allHold = true;
        for (Case one : cases) {
            String problem = one.failed.isEmpty() ? one.findProblem() : one.failed;
            ObjectNode told = JSON.createObjectNode().put("case", one.name).put("ok", problem.isEmpty());
            if (!problem.isEmpty()) told.put("problem", problem);
            System.out.println(told);
            allHold &= problem.isEmpty();
        }
        System.exit(allHold ? 0 : 1);
    }
}
