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

test('the helper that gathers a stream has the whole answer', async () => {
  const whole = await sdk.chat.completions.create({ ...greedy, n: 2, seed: 7, messages })
  const gathered = await sdk.chat.completions.stream({ ...greedy, n: 2, seed: 7, messages }).finalChatCompletion()
  const texts = answer => answer.choices.map(choice => choice.message.content)
  assert.deepEqual(texts(gathered), texts(whole))
})

test('log probabilities are as many as tokens', async () => {
  const { choices } = await sdk.chat.completions.create({ ...greedy, messages, logprobs: true, top_logprobs: 2 })
  const entries = choices[0].logprobs.content
  assert.equal(entries.length, 24)
  assert.equal(Buffer.from(entries.flatMap(entry => entry.bytes)).toString(), choices[0].message.content)
  assert.ok(entries.every(entry => entry.top_logprobs[0].token === entry.token))
})

test('completions, streamed and not, say the same, up to a stop', async () => {
  const asked = { ...greedy, prompt: ['In the beginning', 'And God said'] }
  const whole = await sdk.completions.create(asked)
  const texts = ['', '']
  for (const { choices } of await all(await sdk.completions.create({ ...asked, stream: true }))) {
    for (const choice of choices) texts[choice.index] += choice.text
  }
  assert.deepEqual(texts, whole.choices.map(choice => choice.text))
  assert.equal(whole.usage.completion_tokens, 48)
  const stop = texts[0].trim().split(' ')[2]
  const cut = await sdk.completions.create({ ...greedy, prompt: asked.prompt[0], stop })
  assert.equal(cut.choices[0].text, texts[0].slice(0, texts[0].indexOf(stop)))
  assert.equal(cut.choices[0].finish_reason, 'stop')
})

test('responses, streamed and not, say the same', async () => {
  const asked = { model, input: 'In the beginning', temperature: 0, max_output_tokens: 12 }
  const whole = await sdk.responses.create(asked)
  assert.equal(whole.incomplete_details.reason, 'max_output_tokens')
  const events = await all(await sdk.responses.create({ ...asked, stream: true }))
  const deltas = events.filter(event => event.type === 'response.output_text.delta').map(event => event.delta)
  assert.equal(deltas.join(''), whole.output_text)
  assert.ok(whole.output_text.length > 0)
  assert.equal(events.at(-1).response.usage.output_tokens, 12)
})

test('models are listed', async () => {
  const models = await all(sdk.models.list())
  assert.deepEqual(models.map(one => one.id), [model])
  assert.equal((await sdk.models.retrieve(model)).owned_by, 'penstock')
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
