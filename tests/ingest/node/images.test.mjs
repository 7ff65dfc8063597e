import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { test } from 'node:test'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, streamText } from 'ai'
import { toFile } from 'openai'
import { base, sdk } from './client.mjs'

const { MODEL: model, QUESTION: text, SEEN: seen } = process.env
const image = readFileSync('cat.png')
const url = `data:image/png;base64,${image.toString('base64')}`

test('the SDK sends an image in a chat', async () => {
  const content = [{ type: 'image_url', image_url: { url } }, { type: 'text', text }]
  const answer = await sdk.chat.completions.create({ model, messages: [{ role: 'user', content }] })
  assert.equal(answer.choices[0].message.content, seen)
})

test('the SDK uploads an image, and names it in a response', async () => {
  const file = await sdk.files.create({ file: await toFile(image, 'cat.png'), purpose: 'vision' })
  for (const given of [{ image_url: url }, { file_id: file.id }]) {
    const content = [{ type: 'input_image', detail: 'auto', ...given }, { type: 'input_text', text }]
    const answer = await sdk.responses.create({ model, input: [{ role: 'user', content }] })
    assert.equal(answer.output_text, seen)
  }
})

const compatible = createOpenAICompatible({ name: 'penstock', baseURL: `${base}/v1` })
const providers = { compatible, anthropic: createAnthropic({ baseURL: `${base}/v1`, apiKey: 'none' }) }

for (const [name, provider] of Object.entries(providers)) test(`the AI SDK sends an image by ${name}`, async () => {
  const generate = name === 'anthropic' ? streamText : generateText
  const content = [{ type: 'image', image, mediaType: 'image/png' }, { type: 'text', text }]
  const result = await generate({ model: provider(model), messages: [{ role: 'user', content }] })
  assert.equal(await result.text, seen)
})
