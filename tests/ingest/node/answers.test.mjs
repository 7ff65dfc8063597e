import assert from 'node:assert/strict'
import { test } from 'node:test'
import { all, base, greedy, messages, model, sdk } from './client.mjs'

const said = chunks => chunks.map(chunk => chunk.choices[0]?.delta.content ?? '').join('')

test('a chat, streamed and not, says the same', async () => {
  const whole = await sdk.chat.completions.create({ ...greedy, messages })
  const choice = whole.choices[0]
  assert.equal(choice.message.role, 'assistant')
  assert.equal(choice.finish_reason, 'length')
  assert.equal(whole.usage.completion_tokens, 24)
  const options = { stream: true, stream_options: { include_usage: true } }
  const chunks = await all(await sdk.chat.completions.create({ ...greedy, ...options, messages }))
  assert.equal(said(chunks), choice.message.content)
  assert.equal(chunks.at(-2).choices[0].finish_reason, 'length')
  assert.deepEqual(chunks.at(-1).choices, [])
  assert.equal(chunks.at(-1).usage.completion_tokens, 24)
  assert.equal(new Set(chunks.map(chunk => chunk.id)).size, 1)
})

test('errors are of the kinds that the SDK knows', async () => {
  const raised = async (work, kind, expected) => {
    await assert.rejects(work, error => {
      assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`)
      for (const [name, value] of Object.entries(expected)) assert.equal(error[name], value)
      return true
    })
  }
  const { APIError, BadRequestError, ConflictError, InternalServerError, NotFoundError } = sdk.constructor
  const ask = (changes, options) => sdk.chat.completions.create({ ...greedy, messages, ...changes }, options)
  await raised(ask({ model: 'none' }), NotFoundError, { status: 404, code: 'model_not_found', param: 'model' })
  await raised(sdk.models.retrieve('none'), NotFoundError, { code: 'model_not_found' })
  await raised(ask({ temperature: 3 }), BadRequestError, { param: 'temperature', type: 'invalid_request_error' })
  const tools = [{ type: 'function', function: { name: 'f' } }]
  await raised(ask({ tools }), BadRequestError, { param: 'tools', code: 'unsupported_parameter' })
  await raised(ask({ max_tokens: 1e6 }), BadRequestError, { code: 'context_length_exceeded' })
  const late = ask({ max_tokens: 1e6, stream: true }).then(all)
  await raised(late, APIError, { code: 'context_length_exceeded' })
  const headers = { 'x-penstock-deadline-s': '0.001' }
  await raised(ask({}, { headers }), InternalServerError, { status: 504, code: 'deadline_exceeded' })
  const same = { headers: { 'Idempotency-Key': crypto.randomUUID() } }
  const first = await ask({ max_tokens: 4 }, same)
  assert.deepEqual(await ask({ max_tokens: 4 }, same), first)
  await raised(ask({ max_tokens: 5 }, same), ConflictError, { status: 409, code: 'idempotency_conflict' })
})

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
