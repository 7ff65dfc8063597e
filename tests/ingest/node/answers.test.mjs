import assert from 'node:assert/strict'
import { test } from 'node:test'
import { base, sdk } from './client.mjs'

const greedy = { model: 'demo', temperature: 0, max_tokens: 24 }

test('a request that timed out, or was left, is joined by its key', async () => {
  const { APIConnectionTimeoutError, APIUserAbortError } = sdk.constructor
  const headers = { 'Idempotency-Key': crypto.randomUUID() }
  const asked = { ...greedy, max_tokens: 150, ignore_eos: true, prompt: 'And it came to pass' }
  await assert.rejects(sdk.completions.create(asked, { headers, timeout: 20 }), APIConnectionTimeoutError)
  const leaving = new AbortController()
  const left = sdk.completions.create(asked, { headers, signal: leaving.signal })
  leaving.abort()
  await assert.rejects(left, APIUserAbortError)
  const whole = await sdk.completions.create(asked, { headers })
  assert.equal(whole.usage.completion_tokens, 150)
  assert.deepEqual(await sdk.completions.create(asked, { headers }), whole)
})

test('a stream that the reader left goes on in an EventSource, and that stops at the end', async () => {
  const asked = { ...greedy, max_tokens: 60, ignore_eos: true, prompt: 'In the beginning' }
  const whole = await sdk.completions.create(asked)
  const stream = await sdk.completions.create({ ...asked, stream: true })
  let id
  for await (const chunk of stream) {
    id = chunk.id
    break // leaves the connection
  }
  const source = new EventSource(`${base}/v1/streams/${id}`)
  let text = ''
  source.addEventListener('message', ({ data }) => {
    if (data !== '[DONE]') text += JSON.parse(data).choices[0].text
  })
  await new Promise(resolve => {
    source.addEventListener('error', () => {
      if (source.readyState === EventSource.CLOSED) resolve() // after 204; else it comes back by itself
    })
  })
  assert.equal(text, whole.choices[0].text)
})
