// What the tests share: the SDK as it comes, but for its retries, and the demo model's prompts.

import OpenAI from 'openai'

export const base = process.env.GATEWAY
export const sdk = new OpenAI({ baseURL: `${base}/v1`, apiKey: 'none', maxRetries: 0 })
export const model = 'demo'
export const messages = [{ role: 'user', content: 'In the beginning God created' }]
export const greedy = { model, temperature: 0, max_tokens: 24 }

/** All items of a stream. */
export async function all(stream) {
  const items = []
  for await (const item of stream) items.push(item)
  return items
}
