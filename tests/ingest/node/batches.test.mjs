import assert from 'node:assert/strict'
import { test } from 'node:test'
import { setTimeout as pause } from 'node:timers/promises'
import { toFile } from 'openai'
import { all, model, sdk } from './client.mjs'

const over = ['completed', 'failed', 'cancelled', 'expired']
const rows = text => text.trim().split('\n').map(line => JSON.parse(line))

/** A file with these bodies, each a line. */
async function upload(bodies, url) {
  const lines = bodies.map((body, number) => JSON.stringify({ custom_id: `row-${number}`, method: 'POST', url, body }))
  return sdk.files.create({ file: await toFile(Buffer.from(lines.join('\n')), 'in.jsonl'), purpose: 'batch' })
}

async function ended(id) {
  for (;;) {
    const batch = await sdk.batches.retrieve(id)
    if (over.includes(batch.status)) return batch
    await pause(100)
  }
}

test('a file comes back as it went, and goes', async () => {
  const content = Buffer.from(Array.from({ length: 70_000 }, (_, number) => number % 256))
  const made = await sdk.files.create({ file: await toFile(content, 'späte worte.jsonl'), purpose: 'batch' })
  assert.deepEqual([made.bytes, made.filename, made.purpose], [content.length, 'späte worte.jsonl', 'batch'])
  assert.deepEqual(await sdk.files.retrieve(made.id), made)
  assert.deepEqual(Buffer.from(await (await sdk.files.content(made.id)).arrayBuffer()), content)
  const listed = await all(sdk.files.list({ limit: 1 }))
  assert.ok(listed.some(file => file.id === made.id))
  assert.equal((await sdk.files.delete(made.id)).deleted, true)
  await assert.rejects(sdk.files.retrieve(made.id), sdk.constructor.NotFoundError)
})

test('a batch answers each line, and one bad line fails alone', async () => {
  const body = { model, temperature: 0, max_tokens: 6, ignore_eos: true }
  const bodies = ['In the beginning', 'And God said', 'The LORD'].map(prompt => ({ ...body, prompt }))
  const file = await upload([...bodies, { ...body, prompt: 'x', n: 0 }], '/v1/completions')
  const made = await sdk.batches.create({
    input_file_id: file.id, endpoint: '/v1/completions', completion_window: '24h', metadata: { for: 'a test' },
  })
  const batch = await ended(made.id)
  assert.equal(batch.status, 'completed')
  assert.deepEqual(batch.metadata, { for: 'a test' })
  assert.deepEqual({ ...batch.request_counts }, { total: 4, completed: 3, failed: 1 })
  const answers = rows(await (await sdk.files.content(batch.output_file_id)).text())
  const texts = new Map(answers.map(row => [row.custom_id, row.response.body.choices[0].text]))
  assert.deepEqual([...texts.keys()].sort(), ['row-0', 'row-1', 'row-2'])
  const alone = await sdk.completions.create(bodies[1])
  assert.equal(texts.get('row-1'), alone.choices[0].text)
  const [bad] = rows(await (await sdk.files.content(batch.error_file_id)).text())
  assert.equal(bad.custom_id, 'row-3')
  assert.ok((await all(sdk.batches.list())).some(one => one.id === batch.id))
})

test('a cancelled batch ends', async () => {
  const body = { model, messages: [{ role: 'user', content: 'Go on' }], max_tokens: 100, ignore_eos: true }
  const file = await upload(Array(200).fill(body), '/v1/chat/completions')
  const made = await sdk.batches.create({
    input_file_id: file.id, endpoint: '/v1/chat/completions', completion_window: '24h',
  })
  assert.ok(['cancelling', 'cancelled'].includes((await sdk.batches.cancel(made.id)).status))
  const batch = await ended(made.id)
  assert.equal(batch.status, 'cancelled')
  await assert.rejects(sdk.batches.cancel(made.id), sdk.constructor.ConflictError)
})
