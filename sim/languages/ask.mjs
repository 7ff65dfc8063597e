// Posts a body to a URL with Node's own client, as it is without any setting, and prints what comes back.
const [url, body] = process.argv.slice(2);
const answer = await fetch(url, { method: "POST", headers: { "Content-Type": "application/json" }, body });
for await (const chunk of answer.body) process.stdout.write(chunk);
