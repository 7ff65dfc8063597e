// Tools to try: what the model is told of them, and what they return. They are computed in this tab.

const SUM = /^\s*(-?\d+(?:\.\d+)?)\s*([-+*/])\s*(-?\d+(?:\.\d+)?)\s*$/;
const OPERATIONS = { "+": (a, b) => a + b, "-": (a, b) => a - b, "*": (a, b) => a * b, "/": (a, b) => a / b };

const RUN = {
  get_temperature: ({ city }) => ({ temperature: 5 + ([...String(city)].reduce((sum, letter) => sum + letter.codePointAt(0), 0) % 25) }),
  calculate: ({ expression }) => {
    const [, a, sign, b] = SUM.exec(expression) ?? [];
    return sign ? { result: OPERATIONS[sign](Number(a), Number(b)) } : { error: "only two numbers and one of + - * / are understood" };
  },
};

const tool = (name, description, argument) => ({
  type: "function",
  function: { name, description, parameters: { type: "object", properties: { [argument]: { type: "string" } }, required: [argument] } },
});

export const TOOLS = [
  tool("get_temperature", "Get the temperature of a city.", "city"),
  tool("calculate", "Evaluate an arithmetic expression.", "expression"),
];

/** An object as JSON with spaces, as Python writes it: a small model that learned from that reads no other form well. */
const spaced = (result) => `{${Object.entries(result).map((pair) => pair.map((part) => JSON.stringify(part)).join(": ")).join(", ")}}`;

/** What a call returns, as text; a call that cannot be made returns an error, which the model is told. */
export function runTool({ name, arguments: given }) {
  try {
    return spaced(Object.hasOwn(RUN, name) ? RUN[name](JSON.parse(given)) : { error: `there is no tool ${name}` });
  } catch (error) {
    return spaced({ error: error.message });
  }
}
