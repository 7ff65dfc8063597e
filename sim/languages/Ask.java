import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Posts a body to a URL with the JDK's own client, as it is without any setting, and prints what comes back. */
public class Ask {
    public static void main(String[] words) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(words[0]))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(words[1]))
            .build();
        System.out.print(HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body());
    }
}
