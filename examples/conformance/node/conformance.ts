// Runs the cases of a folder against a pipeline: the runner for TypeScript. ../README.md says what a runner does.
//
//     npm install                      (Node 22.22 or newer, which runs TypeScript as it is)
//     KAFKA=localhost:9092 PIPELINE=demo GATEWAY=http://localhost:8000 MODEL=demo node conformance.ts ../cases/*.json

import { randomUUID } from 'node:crypto'
import { readFileSync } from 'node:fs'
import { basename } from 'node:path'
import { Consumer, FetchIsolationLevels, Producer } from '@platformatic/kafka'

type Json = { [name: string]: any }
type Case = { name: string, id: string, text?: string, failed?: string, produce?: Json, post?: Json, expect: Json }

const { KAFKA = '', PIPELINE = '', GATEWAY = '', MODEL = '' } = process.env
const TIMEOUT_S = 120
const MISSING = 'nothing came'
const brokers = { clientId: 'conformance', bootstrapBrokers: KAFKA.split(',') }

/** Return a case with its names filled in. */
function loadCase(path: string): Case {
  const id = `ts-${randomUUID()}`
  const text = readFileSync(path, 'utf8').replaceAll('{id}', id).replaceAll('{pipeline}', PIPELINE).replaceAll('{model}', MODEL)
  return { ...JSON.parse(text), name: basename(path, '.json'), id }
}

/** Return the bytes of a case's message. */
function encodeValue(produce: Json): Buffer {
  const text = produce.text ?? JSON.stringify(produce.value)
  return Buffer.concat([Buffer.from(produce.prefix_base64 ?? '', 'base64'), Buffer.from(text)])
}

/** Produce a case's message, as often as it says, and return once Kafka has acknowledged it. */
async function produceMessages(producer: Producer, one: Case): Promise<void> {
  const told = one.produce!
  const headers = new Map<Buffer, Buffer>()
  for (const [name, text] of Object.entries<string>(told.headers ?? {})) headers.set(Buffer.from(name), Buffer.from(text))
  for (const [name, text] of Object.entries<string>(told.headers_base64 ?? {})) headers.set(Buffer.from(name), Buffer.from(text, 'base64'))
  const key = told.key === null ? undefined : Buffer.from(one.id)
  const message = { topic: `penstock.${PIPELINE}.requests.${told.class}`, key, value: encodeValue(told), headers }
  for (let count = 0; count < (told.times ?? 1); count++) await producer.send({ messages: [message], acks: -1 })
}

/** Post a request and follow its stream to the end, over two connections if the case says so. */
async function followStream(one: Case): Promise<void> {
  const told = one.post!
  const seen = new Set<string>()
  let lastId = ''
  one.text = ''
  let answer = await fetch(GATEWAY + told.path, {
    method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(told.body),
  })
  for (const most of [told.leave_after ?? 0, 0]) {
    if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`)
    let count = 0
    for await (const line of readLines(answer)) {
      const [name, value] = [line.slice(0, line.indexOf(': ')), line.slice(line.indexOf(': ') + 2)]
      if (name === 'id') {
        if (seen.has(value)) throw new Error(`the event ${value} came twice`)
        seen.add(value)
        lastId = value
      } else if (name === 'data' && value === '[DONE]') {
        return
      } else if (name === 'data') {
        const event = JSON.parse(value)
        one.id = event.id
        for (const choice of event.choices) one.text += choice.text
      } else if (line === '' && ++count === most) {
        break // which closes the connection
      }
    }
    answer = await fetch(`${GATEWAY}/v1/streams/${one.id}`, { headers: { 'Last-Event-ID': lastId } })
  }
  throw new Error('the stream has no end')
}

/** Yield the lines of an answer as they come. */
async function * readLines(answer: Response): AsyncGenerator<string> {
  let rest = ''
  for await (const piece of answer.body!.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + piece).split('\n')
    rest = lines.pop()!
    yield * lines
  }
}

/** Return whether all that is expected is in what was found. */
function holds(expected: any, found: any): boolean {
  if (expected === null || typeof expected !== 'object') return expected === found
  return found !== null && typeof found === 'object' && Object.keys(expected).every(name => holds(expected[name], found[name]))
}

const results = new Map<string, Json[]>()
const letters: { value: Buffer, headers: Map<string, string> }[] = []

/** Return why a case does not hold, or an empty string. */
function findProblem(one: Case): string {
  if (one.expect.dead_letter !== undefined) {
    const wanted = encodeValue(one.produce!)
    const found = letters.filter(letter => letter.value.equals(wanted))
    if (found.length !== 1) return found.length === 0 ? MISSING : `${found.length} dead letters`
    const isSame = Object.entries<string>(one.expect.dead_letter).every(([name, begins]) => found[0].headers.get(name)?.startsWith(begins))
    return isSame ? '' : `other headers: ${JSON.stringify([...found[0].headers])}`
  }
  const found = results.get(one.id) ?? []
  if (found.length !== 1) return found.length === 0 ? MISSING : `${found.length} results`
  const isSame = one.text === undefined || one.text === found[0].text
  return isSame && holds(one.expect.result, found[0]) ? '' : `another result: ${JSON.stringify(found[0])}`
}

const producer = new Producer({ ...brokers, idempotent: true })
const cases = process.argv.slice(2).map(loadCase)
for (const one of cases) {
  try {
    await (one.produce === undefined ? followStream(one) : produceMessages(producer, one))
  } catch (error) {
    one.failed = String(error)
  }
}
await producer.close()
const consumer = new Consumer({ ...brokers, groupId: `conformance-${randomUUID()}` })
const stream = await consumer.consume({
  topics: [`penstock.${PIPELINE}.results`, `penstock.${PIPELINE}.dead`],
  mode: 'earliest',
  autocommit: false,
  isolationLevel: FetchIsolationLevels.READ_COMMITTED, // messages of aborted transactions are not results
})
const silence = setTimeout(() => stream.destroy(), TIMEOUT_S * 1000)
const isOpen = () => cases.some(one => one.failed === undefined && findProblem(one) === MISSING)
if (isOpen()) {
  for await (const message of stream) {
    if (message.topic.endsWith('.dead')) {
      const headers = [...message.headers].map(([name, value]): [string, string] => [name.toString(), value.toString()])
      letters.push({ value: message.value, headers: new Map(headers) })
    } else {
      const result = JSON.parse(message.value.toString())
      results.set(result.id, [...results.get(result.id) ?? [], result])
    }
    if (!isOpen()) break
  }
}
clearTimeout(silence)
for (const one of cases) {
  const problem = one.failed ?? findProblem(one)
  console.log(JSON.stringify({ case: one.name, ok: !problem, ...(problem && { problem }) }))
  if (problem) process.exitCode = 1
}
await consumer.close(true)
