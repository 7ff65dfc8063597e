// Posts a body to a URL so many times side by side with Node's own client, as it is without any setting, again after each pause, and prints what comes back.
const [url, body, count, ...pauses] = process.argv.slice(2);
const ask = async () => (await fetch(url, { method: "POST", headers: { "Content-Type": "application/json" }, body })).text();
for (const pause of [...pauses, 0]) {
  for (const answer of await Promise.all(Array.from({ length: count }, ask))) console.log(`${answer}---`);
  await new Promise((go_on) => setTimeout(go_on, 1000 * pause));
}
