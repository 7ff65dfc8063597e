// The schema methods of Zod 4's page "Defining schemas", and the JSON schema that each gives; null where Zod has none.
// In a folder with the packages of package.json: node zod_types.mjs > ../../grammar/types/zod.json
import { readFileSync } from 'node:fs'
import * as z from 'zod'

const Dog = z.object({ name: z.string(), age: z.number().optional() })
const Recipe = z.object({ title: z.string(), description: z.string().optional(), ingredients: z.array(z.string()) })
const Fish = z.enum(['Salmon', 'Tuna', 'Trout'])
const Category = z.object({ name: z.string(), get subcategories() { return z.array(Category) } })
const User = z.object({ email: z.email(), get posts() { return z.array(Post) } })
const Post = z.object({ title: z.string(), get author() { return User } })
const card = z.object({ type: z.literal('card'), cardNumber: z.string() })
const bank = z.object({ type: z.literal('bank'), accountNumber: z.string() })
const success = z.object({ status: z.literal('success'), data: z.string() })
const failed = z.object({ status: z.literal('failed'), error: z.string() })
class Test { name }

const METHODS = {
  'string()': () => z.string(), 'number()': () => z.number(), 'bigint()': () => z.bigint(), 'boolean()': () => z.boolean(),
  'symbol()': () => z.symbol(), 'undefined()': () => z.undefined(), 'null()': () => z.null(), 'void()': () => z.void(),
  'coerce.string()': () => z.coerce.string(), 'coerce.number()': () => z.coerce.number(),
  'coerce.boolean()': () => z.coerce.boolean(), 'coerce.bigint()': () => z.coerce.bigint(), 'coerce.date()': () => z.coerce.date(),
  'literal("tuna")': () => z.literal('tuna'), 'literal(12)': () => z.literal(12), 'literal(true)': () => z.literal(true),
  'literal(2n)': () => z.literal(2n), 'literal([...])': () => z.literal(['red', 'green', 'blue']),
  'string().max()': () => z.string().max(5), 'string().min()': () => z.string().min(5), 'string().length()': () => z.string().length(5),
  'string().regex()': () => z.string().regex(/^[a-z]+$/), 'string().startsWith()': () => z.string().startsWith('aaa'),
  'string().endsWith()': () => z.string().endsWith('zzz'), 'string().includes()': () => z.string().includes('---'),
  'string().uppercase()': () => z.string().uppercase(), 'string().lowercase()': () => z.string().lowercase(),
  'string().startsWith().endsWith()': () => z.string().startsWith('a').endsWith('z'),
  'string().trim()': () => z.string().trim(), 'string().toLowerCase()': () => z.string().toLowerCase(),
  'string().toUpperCase()': () => z.string().toUpperCase(), 'string().normalize()': () => z.string().normalize(),
  'email()': () => z.email(), 'email({ pattern: html5Email })': () => z.email({ pattern: z.regexes.html5Email }),
  'email({ pattern: rfc5322Email })': () => z.email({ pattern: z.regexes.rfc5322Email }),
  'email({ pattern: unicodeEmail })': () => z.email({ pattern: z.regexes.unicodeEmail }),
  'uuid()': () => z.uuid(), 'uuid({ version: "v4" })': () => z.uuid({ version: 'v4' }), 'uuidv4()': () => z.uuidv4(),
  'uuidv6()': () => z.uuidv6(), 'uuidv7()': () => z.uuidv7(), 'guid()': () => z.guid(),
  'url()': () => z.url(), 'url({ hostname })': () => z.url({ hostname: /^example\.com$/ }),
  'url({ protocol })': () => z.url({ protocol: /^https$/ }), 'httpUrl()': () => z.httpUrl(), 'hostname()': () => z.hostname(),
  'e164()': () => z.e164(), 'emoji()': () => z.emoji(), 'base64()': () => z.base64(), 'base64url()': () => z.base64url(),
  'hex()': () => z.hex(), 'jwt()': () => z.jwt(), 'jwt({ alg })': () => z.jwt({ alg: 'HS256' }), 'nanoid()': () => z.nanoid(),
  'cuid()': () => z.cuid(), 'cuid2()': () => z.cuid2(), 'ulid()': () => z.ulid(), 'ipv4()': () => z.ipv4(), 'ipv6()': () => z.ipv6(),
  'mac()': () => z.mac(), 'mac({ delimiter })': () => z.mac({ delimiter: '-' }), 'cidrv4()': () => z.cidrv4(), 'cidrv6()': () => z.cidrv6(),
  'hash("md5")': () => z.hash('md5'), 'hash("sha1")': () => z.hash('sha1'), 'hash("sha256")': () => z.hash('sha256'),
  'hash("sha384")': () => z.hash('sha384'), 'hash("sha512")': () => z.hash('sha512'),
  'hash("sha256", { enc: "base64" })': () => z.hash('sha256', { enc: 'base64' }),
  'hash("sha256", { enc: "base64url" })': () => z.hash('sha256', { enc: 'base64url' }),
  'iso.date()': () => z.iso.date(), 'iso.time()': () => z.iso.time(), 'iso.time({ precision: -1 })': () => z.iso.time({ precision: -1 }),
  'iso.time({ precision: 3 })': () => z.iso.time({ precision: 3 }), 'iso.datetime()': () => z.iso.datetime(),
  'iso.datetime({ offset })': () => z.iso.datetime({ offset: true }), 'iso.datetime({ local })': () => z.iso.datetime({ local: true }),
  'iso.datetime({ precision: -1 })': () => z.iso.datetime({ precision: -1 }),
  'iso.datetime({ precision: 3 })': () => z.iso.datetime({ precision: 3 }), 'iso.duration()': () => z.iso.duration(),
  'stringFormat() of a function': () => z.stringFormat('cool-id', val => val.startsWith('cool-')),
  'stringFormat() of an expression': () => z.stringFormat('cool-id', /^cool-[a-z0-9]{95}$/),
  'templateLiteral() of a text': () => z.templateLiteral(['hi there']),
  'templateLiteral() with string()': () => z.templateLiteral(['email: ', z.string()]),
  'templateLiteral() with literal()': () => z.templateLiteral(['high', z.literal(5)]),
  'templateLiteral() with nullable()': () => z.templateLiteral([z.nullable(z.literal('grassy'))]),
  'templateLiteral() with enum()': () => z.templateLiteral([z.number(), z.enum(['px', 'em', 'rem'])]),
  'number().gt()': () => z.number().gt(5), 'number().gte()': () => z.number().gte(5), 'number().lt()': () => z.number().lt(5),
  'number().lte()': () => z.number().lte(5), 'number().min().max()': () => z.number().min(1).max(5),
  'number().positive()': () => z.number().positive(), 'number().nonnegative()': () => z.number().nonnegative(),
  'number().negative()': () => z.number().negative(), 'number().nonpositive()': () => z.number().nonpositive(),
  'number().multipleOf()': () => z.number().multipleOf(5), 'number().step()': () => z.number().step(0.25), 'nan()': () => z.nan(),
  'int()': () => z.int(), 'int32()': () => z.int32(), 'bigint().gt()': () => z.bigint().gt(5n), 'date()': () => z.date(),
  'date().min()': () => z.date().min(new Date('1900-01-01')), 'enum([...])': () => Fish, 'enum({ ... })': () => z.enum({ Salmon: 0, Tuna: 1 }),
  'enum().exclude()': () => Fish.exclude(['Salmon', 'Trout']), 'enum().extract()': () => Fish.extract(['Salmon', 'Trout']),
  'stringbool()': () => z.stringbool(), 'stringbool({ truthy, falsy })': () => z.stringbool({ truthy: ['y'], falsy: ['n'] }),
  'optional()': () => z.optional(z.literal('yoda')), 'nullable()': () => z.nullable(z.literal('yoda')),
  'nullish()': () => z.nullish(z.literal('yoda')), 'any()': () => z.any(), 'unknown()': () => z.unknown(), 'never()': () => z.never(),
  'object()': () => Dog, 'strictObject()': () => z.strictObject({ name: z.string() }), 'looseObject()': () => z.looseObject({ name: z.string() }),
  'object().catchall()': () => Dog.catchall(z.string()), 'object().keyof()': () => Dog.keyof(),
  'object().extend()': () => Dog.extend({ breed: z.string() }), 'object().safeExtend()': () => Dog.safeExtend({ name: z.string().min(5) }),
  'object().pick()': () => Recipe.pick({ title: true }), 'object().omit()': () => Recipe.omit({ title: true }),
  'object().partial()': () => Recipe.partial(), 'object().partial({ ... })': () => Recipe.partial({ ingredients: true }),
  'object().required()': () => Recipe.required(), 'object().required({ ... })': () => Recipe.required({ description: true }),
  'recursive object()': () => Category, 'mutually recursive objects': () => User,
  'array()': () => z.array(z.string()), 'array().min()': () => z.array(z.string()).min(5), 'array().max()': () => z.array(z.string()).max(5),
  'array().length()': () => z.array(z.string()).length(5), 'tuple()': () => z.tuple([z.string(), z.number(), z.boolean()]),
  'tuple() with rest': () => z.tuple([z.string()], z.number()), 'union()': () => z.union([z.string(), z.number()]),
  'xor()': () => z.xor([z.string(), z.number()]), 'xor() of objects': () => z.xor([card, bank]),
  'xor() that overlaps': () => z.xor([z.string(), z.any()]),
  'discriminatedUnion()': () => z.discriminatedUnion('status', [success, failed]),
  'discriminatedUnion(), nested': () => z.discriminatedUnion('status', [success, z.discriminatedUnion('code', [
    failed.extend({ code: z.literal(400) }), failed.extend({ code: z.literal(401) })])]),
  'intersection() of unions': () => z.intersection(z.union([z.number(), z.string()]), z.union([z.number(), z.boolean()])),
  'intersection() of objects': () => z.intersection(z.object({ name: z.string() }), z.object({ role: z.string() })),
  'record()': () => z.record(z.string(), z.string()),
  'record() of a union': () => z.record(z.union([z.string(), z.number()]), z.unknown()),
  'record() of enum()': () => z.record(z.enum(['id', 'name', 'email']), z.string()),
  'record() of number()': () => z.record(z.number(), z.string()), 'record() of int()': () => z.record(z.int().step(1).min(0).max(10), z.string()),
  'partialRecord()': () => z.partialRecord(z.enum(['id', 'name', 'email']).or(z.never()), z.string()),
  'looseRecord()': () => z.object({ name: z.string() }).and(z.looseRecord(z.string().regex(/_phone$/), z.e164())),
  'map()': () => z.map(z.string(), z.number()), 'set()': () => z.set(z.number()), 'set().min()': () => z.set(z.string()).min(5),
  'file()': () => z.file(), 'file().min().max()': () => z.file().min(10_000).max(1_000_000), 'file().mime()': () => z.file().mime('image/png'),
  'file().mime([...])': () => z.file().mime(['image/png', 'image/jpeg']), 'promise()': () => z.promise(z.number()),
  'instanceof()': () => z.instanceof(Test), 'property()': () => z.string().check(z.property('length', z.number().min(10))),
  'refine()': () => z.string().refine(val => val.length <= 255), 'superRefine()': () => z.array(z.string()).superRefine(() => {}),
  'check()': () => z.array(z.string()).check(() => {}),
  'codec()': () => z.codec(z.iso.datetime(), z.date(), { decode: text => new Date(text), encode: date => date.toISOString() }),
  'pipe()': () => z.string().pipe(z.string().min(2)), 'pipe() to transform()': () => z.string().pipe(z.transform(val => val.length)),
  'transform()': () => z.transform(val => String(val)), 'string().transform()': () => z.string().transform(val => val.length),
  'preprocess()': () => z.preprocess(val => Number(val), z.int()), 'default()': () => z.string().default('tuna'),
  'prefault()': () => z.string().trim().toUpperCase().prefault('  tuna  '), 'catch()': () => z.number().catch(42),
  'brand()': () => z.object({ name: z.string() }).brand(), 'readonly()': () => z.object({ name: z.string() }).readonly(),
  'array().readonly()': () => z.array(z.string()).readonly(), 'json()': () => z.json(),
  'function()': () => z.function({ input: [z.string()], output: z.number() }), 'custom()': () => z.custom(val => /^\d+px$/.test(val)),
  'apply()': () => z.number().apply(schema => schema.min(0).max(100)).nullable(),
}

function makeSchema(make) {
  try {
    return z.toJSONSchema(make())
  } catch {
    return null
  }
}

const { version } = JSON.parse(readFileSync(new URL('./node_modules/zod/package.json', import.meta.url)))
const lines = Object.entries(METHODS).map(([name, make]) => ` ${JSON.stringify(name)}: ${JSON.stringify(makeSchema(make))}`)
process.stdout.write(`{"made_with": "zod ${version}", "schemas": {\n${lines.join(',\n')}\n}}\n`)
