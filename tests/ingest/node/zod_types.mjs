// The schema methods of Zod 4's page "Defining schemas", and the JSON schema that each gives; null where Zod has none.
// In a folder with the packages of package.json, `node zod_types.mjs` writes ../../grammar/types/zod.json anew, whose
// names are the schemas as expressions, with the names of this module.
import { readFileSync, writeFileSync } from 'node:fs'
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

function makeSchema(name) {
  try {
    return z.toJSONSchema(eval(name))
  } catch {
    return null
  }
}

const file = new URL('../../grammar/types/zod.json', import.meta.url)
const { version } = JSON.parse(readFileSync(new URL('./node_modules/zod/package.json', import.meta.url)))
const names = Object.keys(JSON.parse(readFileSync(file)).schemas)
const lines = names.map(name => ` ${JSON.stringify(name)}: ${JSON.stringify(makeSchema(name))}`)
writeFileSync(file, `{"made_with": "zod ${version}", "schemas": {\n${lines.join(',\n')}\n}}\n`)
