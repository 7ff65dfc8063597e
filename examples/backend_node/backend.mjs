// A backend that uses a pipeline through Kafka alone: a producer, a consumer of results, and a table of its own.
//
//     npm install                      (Node 22.13 or newer)
//     KAFKA=localhost:9092 PIPELINE=demo node backend.mjs questions.db
//
// 1  A question is a row of the backend's own table, with an id that never changes.
// 2  Questions without an answer are produced. Each that Kafka acknowledges ends in exactly one result.
// 3  Results are read. The first one of an id becomes the answer of its row; ids of other backends have no row here.
// 4  The consumer's offset is committed.
//
// A crash after 1 or 2: the next start produces the question again, the same id with the same body, and it is answered
// once. After 3: the result is read again, and its row has an answer already.

import { randomUUID } from 'node:crypto'
import { DatabaseSync } from 'node:sqlite'
import { Kafka, logLevel } from 'kafkajs'

const PIPELINE = process.env.PIPELINE ?? 'demo'
const TIMEOUT_S = 120
const RETRYABLE_ERRORS = new Set(['deadline_exceeded', 'store_unreachable']) // the same question may succeed with a new id

const kafka = new Kafka({ brokers: [process.env.KAFKA], clientId: 'questions', logLevel: logLevel.ERROR })

/** Return an interactive request, a batch request, and one that names an unknown model. */
function makeQuestions(tenant = 'shop') {
  const common = { v: 1, tenant, deadline: Date.now() / 1000 + TIMEOUT_S }
  const sampling = { temperature: 0, max_tokens: 16 }
  return [
    { ...common, id: `ask-${randomUUID()}`, class: 'interactive', prompt: 'In the beginning', sampling },
    { ...common, id: `ask-${randomUUID()}`, class: 'batch', prompt: 'And God said', sampling },
    { ...common, id: `ask-${randomUUID()}`, class: 'interactive', prompt: 'The LORD', model: 'no-such-model' },
  ]
}

/** Produce requests and return once all are accepted. After an error, produce the same requests again. */
async function produceRequests(requests) {
  const producer = kafka.producer({ idempotent: true })
  await producer.connect()
  try {
    const topicMessages = requests.map(request => ({
      topic: `penstock.${PIPELINE}.requests.${request.class}`,
      messages: [{
        key: request.id,
        value: JSON.stringify(request),
        headers: { // for tools and filters that do not read the message
          'penstock-version': String(request.v),
          'penstock-tenant': request.tenant,
          'penstock-class': request.class,
          'penstock-deadline': String(request.deadline),
        },
      }],
    }))
    await producer.sendBatch({ acks: -1, topicMessages })
  } finally {
    await producer.disconnect()
  }
}

/** Pass each result after the group's last offset to `take`, until `take` returns true. */
async function readResults(groupId, take) {
  const consumer = kafka.consumer({ groupId, readUncommitted: false }) // messages of aborted transactions are not results
  await consumer.connect()
  try {
    await consumer.subscribe({ topic: `penstock.${PIPELINE}.results`, fromBeginning: true })
    await new Promise((resolve, reject) => {
      const silence = setTimeout(() => reject(new Error(`no result within ${TIMEOUT_S} s`)), TIMEOUT_S * 1000)
      consumer.on(consumer.events.CRASH, event => reject(event.payload.error))
      consumer.run({
        autoCommit: false,
        eachMessage: async ({ topic, partition, message }) => {
          silence.refresh()
          const isLast = take(JSON.parse(message.value.toString()))
          await consumer.commitOffsets([{ topic, partition, offset: String(BigInt(message.offset) + 1n) }])
          if (isLast) {
            clearTimeout(silence)
            resolve()
          }
        },
      }).catch(reject)
    })
  } finally {
    await consumer.disconnect()
  }
}

/** Return a result as one line for people. */
function describeResult(result) {
  if (result.finish_reason !== 'error') {
    return `${result.finish_reason} after ${result.usage.completion_tokens} tokens: ${JSON.stringify(result.text)}`
  }
  const again = RETRYABLE_ERRORS.has(result.error.code) ? 'ask again' : 'asking again does not help'
  return `${result.error.code} (${again}): ${result.error.message}`
}

const table = new DatabaseSync(process.argv[2], { timeout: 5000 })
table.exec('CREATE TABLE IF NOT EXISTS questions (id TEXT PRIMARY KEY, request TEXT, answer TEXT)')
if (table.prepare('SELECT count(*) AS count FROM questions').get().count === 0) {
  const insert = table.prepare('INSERT INTO questions (id, request) VALUES (?, ?)')
  table.exec('BEGIN IMMEDIATE')
  for (const request of makeQuestions()) insert.run(request.id, JSON.stringify(request))
  table.exec('COMMIT')
}
const open = table.prepare('SELECT request FROM questions WHERE answer IS NULL')
const answer = table.prepare('UPDATE questions SET answer = ? WHERE id = ? AND answer IS NULL')

if (open.all().length > 0) {
  await produceRequests(open.all().map(row => JSON.parse(row.request)))
  await readResults('questions', result => {
    if (answer.run(JSON.stringify(result), result.id).changes > 0) {
      console.log(result.class, result.id, describeResult(result))
    }
    return open.all().length === 0
  })
}
