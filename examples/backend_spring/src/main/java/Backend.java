import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaProducerFactory;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.kafka.listener.GenericMessageListenerContainer;
import org.springframework.kafka.listener.KafkaMessageListenerContainer;
import org.springframework.kafka.requestreply.ReplyingKafkaTemplate;

/**
 * A backend that asks through Spring's ReplyingKafkaTemplate and gets its replies in a topic of its own.
 *
 *     KAFKA=localhost:9092 PIPELINE=demo TENANT=shop REPLIES=shop.replies mvn compile exec:java \
 *         -Dexec.mainClass=Backend -Dexec.args="ID …"
 *
 * The template keeps its pending requests in memory alone. A backend that was restarted finds the replies to those of
 * its last life by their key, which is the request's id: the consumer group keeps its name and so its offset, and what
 * the template knows no request of comes to logLateArrival. An id that was asked before is so not lost; "-ID" waits
 * for its reply without asking again.
 */
public final class Backend {
    private static final String KAFKA = System.getenv("KAFKA");
    private static final String PIPELINE = System.getenv().getOrDefault("PIPELINE", "demo");
    private static final String TENANT = System.getenv().getOrDefault("TENANT", "default");
    private static final String REPLIES = System.getenv("REPLIES");
    private static final Duration PATIENCE = Duration.ofMinutes(5);

    /** The template, which hands replies to requests of an earlier process to whoever waits for their ids. */
    static final class Template extends ReplyingKafkaTemplate<String, String, String> {
        private final Map<String, CountDownLatch> awaited = new ConcurrentHashMap<>();
        private final Map<String, String> late = new ConcurrentHashMap<>();

        Template(
                DefaultKafkaProducerFactory<String, String> producers,
                GenericMessageListenerContainer<String, String> replies) {
            super(producers, replies);
        }

        @Override
        protected void logLateArrival(ConsumerRecord<String, String> reply, Object correlationId) {
            late.put(reply.key(), reply.value());
            latch(reply.key()).countDown();
        }

        String findReply(String id) throws InterruptedException {
            if (!latch(id).await(PATIENCE.toSeconds(), TimeUnit.SECONDS)) {
                throw new IllegalStateException("no reply of " + id);
            }
            return late.get(id);
        }

        private CountDownLatch latch(String id) {
            return awaited.computeIfAbsent(id, name -> new CountDownLatch(1));
        }
    }

    public static void main(String[] ids) throws Exception {
        Map<String, Object> producing = new HashMap<>();
        producing.put("bootstrap.servers", KAFKA);
        producing.put("acks", "all");
        producing.put("max.request.size", 16777216);
        Map<String, Object> consuming = new HashMap<>();
        consuming.put("bootstrap.servers", KAFKA);
        consuming.put("isolation.level", "read_committed"); // messages of aborted transactions are no results
        consuming.put("auto.offset.reset", "earliest");
        ContainerProperties container = new ContainerProperties(REPLIES);
        container.setGroupId("backend-" + REPLIES); // one that stays
        Template template = new Template(
                new DefaultKafkaProducerFactory<>(producing, new StringSerializer(), new StringSerializer()),
                new KafkaMessageListenerContainer<>(
                        new DefaultKafkaConsumerFactory<>(
                                consuming, new StringDeserializer(), new StringDeserializer()),
                        container));
        template.setDefaultReplyTimeout(PATIENCE);
        template.setSharedReplyTopic(true); // a reply without a pending request is none of its errors
        template.afterPropertiesSet();
        template.start();
        try {
            if (!template.waitForAssignment(PATIENCE)) {
                throw new IllegalStateException("no partition of " + REPLIES);
            }
            for (String id : ids) {
                String reply = id.startsWith("-") ? template.findReply(id.substring(1)) : ask(template, id);
                System.out.println(reply);
            }
        } finally {
            template.stop(); // its container, whose thread would keep the process
            template.destroy();
        }
    }

    private static String ask(Template template, String id) throws Exception {
        String request = "{\"v\": 1, \"id\": \"" + id + "\", \"tenant\": \"" + TENANT
                + "\", \"prompt\": \"In the beginning\", \"sampling\": {\"temperature\": 0, \"max_tokens\": 16}}";
        String topic = "penstock." + PIPELINE + ".requests.interactive";
        var future = template.sendAndReceive(new ProducerRecord<>(topic, id, request));
        future.getSendFuture().get(PATIENCE.toSeconds(), TimeUnit.SECONDS);
        return future.get(PATIENCE.toSeconds(), TimeUnit.SECONDS).value();
    }
}
