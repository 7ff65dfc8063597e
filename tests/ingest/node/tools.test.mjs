import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateObject, generateText, jsonSchema, Output, stepCountIs, streamObject, streamText, tool } from 'ai'
import { z } from 'zod'
import { base, sdk } from './client.mjs'

const model = 'tool_model'
const question = 'What is the weather of Lisbon and Porto?'
const places = ['Lisbon', 'Porto']
const description = 'Get the weather of a city.'
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
const messages = [{ role: 'user', content: question }]
const asked = { model, messages, temperature: 0, max_tokens: 80 }
const person = z.object({ name: z.string().max(30), age: z.number().int().min(0).max(120) })
const told = 'Maria is 34 years old and lives in Lisbon.'
const extraction = `Answer in JSON by this schema: ${JSON.stringify(z.toJSONSchema(person))}\n${told}`

for (const stream of [false, true]) {
  test(`the SDK runs the tools, ${stream ? 'streamed' : 'whole'}`, async () => {
    const seen = []
    const run = async ({ city }) => {
      seen.push(city)
      return { weather: 'red' }
    }
    const called = { name: 'get_weather', description, parameters, parse: JSON.parse, function: run }
    const runner = sdk.chat.completions.runTools({ ...asked, stream, tools: [{ type: 'function', function: called }] })
    assert.ok(await runner.finalContent())
    assert.deepEqual(seen, places)
  })
}

const compatible = createOpenAICompatible({ name: 'penstock', baseURL: `${base}/v1`, supportsStructuredOutputs: true })
const providers = { compatible, anthropic: createAnthropic({ baseURL: `${base}/v1`, apiKey: 'none' }) }

for (const [name, provider] of Object.entries(providers)) test(`the AI SDK calls tools by ${name}`, async () => {
  for (const generate of [generateText, streamText]) {
    const seen = []
    const execute = async ({ city }) => {
      seen.push(city)
      return { weather: 'red' }
    }
    const tools = { get_weather: tool({ description, inputSchema: jsonSchema(parameters), execute }) }
    const options = { temperature: 0, maxOutputTokens: 80, stopWhen: stepCountIs(3) }
    const result = await generate({ model: provider(model), tools, prompt: question, ...options })
    assert.ok(await result.text)
    assert.deepEqual(seen, places)
  }
})

test('the AI SDK calls tools, and gets an object of a schema at last', async () => {
  const schema = z.object({ color: z.string().max(12), cities: z.number().int().min(0).max(9) })
  const seen = []
  const execute = async ({ city }) => {
    seen.push(city)
    return { weather: 'red' }
  }
  const tools = { get_weather: tool({ description, inputSchema: jsonSchema(parameters), execute }) }
  const options = { temperature: 0, maxOutputTokens: 200, stopWhen: stepCountIs(5) }
  const { output } = await generateText({
    model: providers.compatible(model), tools, prompt: question, output: Output.object({ schema }), ...options,
  })
  assert.deepEqual(schema.parse(output), output)
  assert.deepEqual(seen, places)
})

// By Anthropic's API the AI SDK sends no lengths and no bounds.
const schemas = { compatible: person, anthropic: z.object({ name: z.enum(['Maria', 'Pedro']), city: z.enum(places) }) }

for (const [name, provider] of Object.entries(providers)) test(`the AI SDK gets an object by ${name}`, async () => {
  // It knows by their names which of Anthropic's models keep to a schema.
  const providerOptions = { anthropic: { structuredOutputMode: 'outputFormat' } }
  const asked = { model: provider(model), prompt: extraction, temperature: 0, maxOutputTokens: 200, providerOptions }
  const schema = schemas[name]
  const { output } = await generateText({ ...asked, output: Output.object({ schema }) })
  const { object } = await generateObject({ ...asked, schema })
  assert.deepEqual(schema.parse(output), output)
  assert.deepEqual(object, output)
  const streamed = streamObject({ ...asked, schema })
  for await (const part of streamed.partialObjectStream) assert.ok(part)
  assert.deepEqual(await streamed.object, output)
})
