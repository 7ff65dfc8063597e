import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Stream;

/** Posts a body to a URL so many times side by side with the JDK's own client, as it is without any setting, again after each pause, and prints what comes back. */
public class Ask {
    public static void main(String[] words) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        HttpRequest request = HttpRequest.newBuilder(URI.create(words[0]))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(words[1]))
            .build();
        for (int round = 3; round <= words.length; round++) {
            List<CompletableFuture<HttpResponse<String>>> asked = Stream
                .generate(() -> client.sendAsync(request, HttpResponse.BodyHandlers.ofString()))
                .limit(Integer.parseInt(words[2])).toList();
            for (CompletableFuture<HttpResponse<String>> answer : asked) System.out.println(answer.get().body() + "---");
            if (round < words.length) Thread.sleep(1000 * Long.parseLong(words[round]));
        }
    }
}
