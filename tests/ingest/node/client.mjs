// The SDK as it comes, but for its retries.

import OpenAI from 'openai'

export const base = process.env.GATEWAY
export const sdk = new OpenAI({ baseURL: `${base}/v1`, apiKey: 'none', maxRetries: 0 })
