"""Make the synthetic conversations that the tool model learnt from, for tests, benchmarks and `tools.quality`.

Each conversation is made from a seed: short instructions, extraction of JSON under a schema, calls of calculators and
look-ups, parallel calls, answers to tool results, and requests that need no tool. Names of tools and parameters vary,
and many values are invented words, so that a model must copy them from the prompt. A tenth of all words is kept for
the held-out conversations.
"""

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerFast

from penstock.engine.weights.files import DEMO_MODEL

TOOL_MODEL = DEMO_MODEL.parent / "tool_model"
Json = dict[str, Any]

WORDS: Json = json.loads(Path(__file__).with_name("tool_words.json").read_text("utf-8"))
"""Words by their class, what can be looked up and done, and ways to ask."""
LISTS: dict[str, list[str]] = {name: words.split() for name, words in WORDS.items() if isinstance(words, str)}
CAPITALS, QUESTIONS = WORDS["capitals"], WORDS["questions"]
SUBJECTS: dict[str, tuple[list[str], list[str]]] = {
    kind: (keys.split(), attributes.split()) for kind, (keys, attributes) in WORDS["subjects"].items()
}
"""What can be looked up, by what it is looked up for: (names of the parameter, attributes)."""
ENDINGS = ["", "", "n", "r", "l", "s", "x", "k", "t"]
OPERATIONS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/"}


@dataclass(frozen=True)
class Conversation:
    """Messages of which the last is the answer expected, with what the chat template is given beside them."""

    kind: str
    messages: list[Json]
    tools: list[Json] = field(default_factory=list)
    options: Json = field(default_factory=dict)
    """Keyword arguments of the chat template: `tool_choice`, `enable_thinking`."""
    schema: Json | None = None
    """Schema of the answer's JSON, for extraction."""

    @property
    def prompt(self) -> list[Json]:
        """The messages before the answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> Json:
        """The message that is expected."""
        return self.messages[-1]


@dataclass(frozen=True)
class Task:
    """One thing a user may ask for: the tool for it, the call, its result and what is said about that."""

    topic: str
    """Tools of the same topic could serve the same request, and are never offered together."""
    tool: Json
    question: str
    arguments: Json
    result: Json
    reply: str
    thought: str

    @property
    def name(self) -> str:
        """The tool's name."""
        return str(self.tool["function"]["name"])


class Words:
    """Chooses words by a seed; those of open classes are either the ones trained on or the ones held out."""

    def __init__(self, seed: str, *, held_out: bool) -> None:
        self.random = random.Random(seed)
        self._held_out = held_out

    def choose(self, values: list[Any] | tuple[Any, ...]) -> Any:
        """Return any of the values."""
        return self.random.choice(values)

    def has_chance(self, share: float) -> bool:
        """Return true in that share of all cases."""
        return self.random.random() < share

    def draw_open(self, values: list[str], invented: float = 0.4) -> str:
        """Return a word of the list, or an invented one, of the part that this instance may use."""
        while True:
            word = self._invent_word() if not values or self.has_chance(invented) else str(self.choose(values))
            if values and values[0][0].isupper():
                word = word.capitalize()
            if (zlib.crc32(word.lower().encode()) % 10 == 0) == self._held_out:
                return word

    def _invent_word(self) -> str:
        syllables = [self.choose(LISTS["syllables"]) for _ in range(self.choose([2, 2, 3]))]
        return "".join([*syllables, self.choose(ENDINGS)])

    def draw_person(self) -> str:
        """Return a first name, mostly with a last name."""
        first = self.draw_open(LISTS["first"])
        return f"{first} {self.draw_open(LISTS['last'])}" if self.has_chance(0.6) else first

    def draw_number(self) -> int:
        """Return a number of one to four digits."""
        return self.random.randrange(1, 10 ** self.choose([1, 2, 2, 3, 3, 4]))

    def draw_time(self) -> str:
        """Return a time of day."""
        return f"{self.random.randrange(6, 23)}:{self.choose(['00', '15', '30', '45'])}"


def make_schema(words: Words, properties: Json, required: list[str]) -> Json:
    """Return the schema of an object, with some of the extras that client libraries add."""
    schema: Json = {"type": "object", "properties": properties, "required": required}
    if words.has_chance(0.15):
        schema["additionalProperties"] = False
    return schema


def make_tool(words: Words, name: str, description: str, properties: Json, required: list[str]) -> Json:
    """Return a tool as an OpenAI client sends it; one in ten has no description."""
    function: Json = {"name": name}
    if words.has_chance(0.9):
        function["description"] = description
    function["parameters"] = make_schema(words, properties, required)
    return {"type": "function", "function": function}


def join_name(words: Words, verb: str, noun: str) -> str:
    """Return a name of a tool in one of the usual spellings."""
    return verb + noun.capitalize() if words.has_chance(0.12) else f"{verb}_{noun}"


def make_lookup(words: Words) -> Task:
    """Return a look-up of one attribute, such as the price of a lamp; some attributes are invented words."""
    kind = words.choose(list(SUBJECTS))
    keys, attributes = SUBJECTS[kind]
    key = words.choose(keys)
    noun = words.draw_open([]) if words.has_chance(0.15) else words.choose(attributes)
    subject = draw_value(words, kind)
    properties: Json = {key: {"type": "integer" if kind == "order" else "string"}}
    arguments: Json = {key: subject}
    question = words.choose(QUESTIONS).format(n=noun, e=subject if kind != "order" else f"order {subject}")
    if words.has_chance(0.25):
        question = add_option(words, question, properties, arguments)
    description = words.choose(
        [f"Get the {noun} of a {kind}.", f"Look up the {noun} for a {kind}.", f"{noun} of a {kind}"]
    )
    tool = make_tool(words, join_name(words, words.choose(LISTS["verbs"]), noun), description, properties, [key])
    value = words.draw_number() if noun in LISTS["numeric"] else words.draw_open(LISTS["colours"], invented=0.7)
    named = f"order {subject}" if kind == "order" else subject
    result = {noun: value} if words.has_chance(0.7) else {key: subject, noun: value}
    reply, thought = f"The {noun} of {named} is {value}.", f"The {noun} of {named} is asked for."
    return Task(noun, tool, question, arguments, result, reply, thought)


def add_option(words: Words, question: str, properties: Json, arguments: Json) -> str:
    """Give a look-up an optional parameter, which two questions in three fill; returns the question."""
    key, values, preposition = words.choose(
        [("day", LISTS["days"], "on"), ("currency", LISTS["currencies"], "in"), ("language", LISTS["languages"], "in")]
    )
    properties[key] = {"type": "string"}
    if key == "currency":
        properties[key]["enum"] = sorted(words.random.sample(values, 3))
        values = properties[key]["enum"]
    if not words.has_chance(0.67):
        return question
    arguments[key] = words.choose(values)
    return f"{question[:-1]} {preposition} {arguments[key]}{question[-1]}"


def make_sum(words: Words) -> Task:
    """Return a calculation: as an expression, or as two numbers for a tool of that operation."""
    word = words.choose(list(OPERATIONS))
    sign, a, b = OPERATIONS[word], words.draw_number(), words.draw_number()
    question = words.choose(
        [f"What is {a} {word} {b}?", f"Calculate {a} {word} {b}.", f"How much is {a} {word} {b}?",
         f"Compute {a} {sign} {b}.", f"{a} {sign} {b} = ?"]
    )  # fmt: skip
    number = {"type": words.choose(["number", "integer"])}
    x, y = words.choose([("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")])
    if words.choose([True, True, False]):
        name = words.choose(["calculator", "calculate", "calc", "evaluate", "compute", "math", "eval_math"])
        key = words.choose(["expression", "formula", "expr", "input"])
        tool = make_tool(words, name, "Evaluate an arithmetic expression.", {key: {"type": "string"}}, [key])
        arguments: Json = {key: f"{a} {sign} {b}"}
    else:
        name = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}[sign]
        name = words.choose([name, f"{name}_numbers"])
        tool = make_tool(words, name, f"{name.split('_')[0].capitalize()} two numbers.", {x: number, y: number}, [x, y])
        arguments = {x: a, y: b}
    value = words.draw_number()
    result = {words.choose(["result", "value", "answer"]): value}
    reply, thought = f"{a} {word} {b} is {value}.", f"{a} {sign} {b} must be calculated."
    return Task("sum", tool, question, arguments, result, reply, thought)


DRAWS: dict[str, Callable[[Words], Any]] = {
    "amount": Words.draw_number,
    "person": Words.draw_person,
    "time": Words.draw_time,
    "errand": lambda words: f"{words.draw_open(LISTS['products'])} at {words.draw_time()}",
    "currency": lambda words: words.choose(LISTS["currencies"][:3]),
    "other currency": lambda words: words.choose(LISTS["currencies"][3:]),
    "company": lambda words: f"{words.draw_open(LISTS['last'])} {words.choose(['Ltd', 'Inc', 'Group', 'Labs'])}",
    "order": Words.draw_number,
    "flag": lambda words: words.has_chance(0.5),
    "foods": lambda words: list(dict.fromkeys(words.draw_open(LISTS["foods"]) for _ in range(words.choose([2, 3])))),
    "status": lambda words: words.choose(["open", "sent", "closed"]),
    "last": lambda words: words.draw_open(LISTS["last"]),
    "city": lambda words: words.draw_open(LISTS["cities"]),
}
"""How a subject or a parameter's value is drawn, beside ranges and the classes of words."""


def draw_value(words: Words, what: str) -> Any:
    """Return a subject that can be asked about, or the value of a parameter."""
    if what in DRAWS:
        return DRAWS[what](words)
    name, *limits = what.split()
    if limits:
        return words.random.randrange(*map(int, limits))
    draw = words.choose if name in ("day", "room", "colour", "language", "job") else words.draw_open
    return draw(LISTS[f"{name}s"])


def make_action(words: Words) -> Task:
    """Return something to be done with one to three arguments, such as a message to be sent."""
    action = words.choose(WORDS["actions"])
    keys = [words.choose(options.split()) for options, _, _ in action["slots"]]
    values = [draw_value(words, what) for _, _, what in action["slots"]]
    properties = {key: {"type": kind} for key, (_, kind, _) in zip(keys, action["slots"], strict=True)}
    name = words.choose(action["names"].split())
    tool = make_tool(words, name, action["description"], properties, keys)
    arguments = dict(zip(keys, values, strict=True))
    result = words.choose([{"ok": True}, {"status": "done"}, {"success": True}])
    question = words.choose(action["questions"]).format(*values)
    text, thought = action["reply"].format(*values), f"{name} is the tool for this."
    return Task(action["description"], tool, question, arguments, result, text[0].upper() + text[1:], thought)


def make_task(words: Words) -> Task:
    """Return a task of any sort."""
    return cast(Task, words.choose([make_lookup, make_lookup, make_sum, make_action])(words))


def make_other_task(words: Words, tasks: list[Task]) -> Task:
    """Return a task whose topic and tool's name are those of none of the given tasks."""
    while True:
        other = make_task(words)
        if all(other.topic != task.topic and other.name != task.name for task in tasks):
            return other


def offer_tools(words: Words, tasks: list[Task], num_others: int) -> list[Json]:
    """Return the tools of the tasks and of others, shuffled."""
    offered = list(tasks)
    for _ in range(num_others):
        offered.append(make_other_task(words, offered))
    words.random.shuffle(offered)
    return [task.tool for task in offered]


def say(role: str, content: str | None, **more: Any) -> Json:
    """Return a message."""
    return {"role": role, "content": content, **more}


def call_tools(tasks: list[Task]) -> Json:
    """Return the assistant's message that makes the calls of the tasks."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": task.name, "arguments": task.arguments}}
        for i, task in enumerate(tasks)
    ]
    return say("assistant", None, tool_calls=calls)


def return_results(tasks: list[Task]) -> list[Json]:
    """Return the tools' messages with the results."""
    return [
        say("tool", json.dumps(task.result), tool_call_id=f"call_{i}", name=task.name) for i, task in enumerate(tasks)
    ]


def begin(words: Words) -> list[Json]:
    """Return the beginning of a conversation: often nothing, else a system message."""
    return [say("system", words.choose(WORDS["systems"]))] if words.has_chance(0.35) else []


def count_others(words: Words) -> int:
    """Return how many tools there are that are not needed."""
    return int(words.choose([0, 0, 1, 1, 1, 2, 2, 3])) if words.has_chance(0.96) else words.random.randrange(4, 9)


def think(message: Json, thought: str, options: Json) -> Json:
    """Return the message, with a thought before it if the conversation is one that thinks."""
    return {**message, "reasoning_content": thought} if options.get("enable_thinking") else message


def choose_thinking(words: Words) -> Json:
    """Return the template's options: one conversation in six thinks."""
    return {"enable_thinking": True} if words.has_chance(1 / 6) else {}


def make_exchanges(words: Words, count: int, num_others: int) -> Conversation:
    """Return requests of which all but the last have been answered, and the call for the last.

    In some, `tool_choice` demands the call.
    """
    options, messages = choose_thinking(words), begin(words)
    tasks: list[Task] = []
    for _ in range(count):
        tasks.append(make_other_task(words, tasks))
    for task in tasks[:-1]:
        messages += [say("user", task.question), think(call_tools([task]), task.thought, options)]
        messages += [*return_results([task]), think(say("assistant", task.reply), "The result is there.", options)]
    last = tasks[-1]
    if words.has_chance(0.12):
        named = {"type": "function", "function": {"name": last.name}}
        options["tool_choice"] = words.choose(["required", named])
    messages += [say("user", last.question), think(call_tools([last]), last.thought, options)]
    return Conversation("call" if count < 3 else "long", messages, offer_tools(words, tasks, num_others), options)


def make_parallel(words: Words) -> Conversation:
    """One request that needs two or three calls: of one tool for several subjects, or of two tools."""
    options, messages = choose_thinking(words), begin(words)
    if words.has_chance(0.5):
        tasks, question = make_series(words)
        offered = tasks[:1]
    else:
        first = make_task(words)
        tasks = offered = [first, make_other_task(words, [first])]
        question = words.choose([" And also: ", " Then: ", " "]).join(task.question for task in tasks)
    tools = offer_tools(words, offered, words.choose([0, 1, 1, 2]))
    message = think(call_tools(tasks), f"This needs {len(tasks)} calls.", options)
    return Conversation("parallel", [*messages, say("user", question), message], tools, options)


def make_series(words: Words) -> tuple[list[Task], str]:
    """Return look-ups of one attribute for two or three subjects, and the question for all of them."""
    kind = words.choose(list(SUBJECTS))
    keys, attributes = SUBJECTS[kind]
    key, noun = words.choose(keys), words.draw_open([]) if words.has_chance(0.15) else words.choose(attributes)
    name = join_name(words, words.choose(LISTS["verbs"]), noun)
    properties = {key: {"type": "integer" if kind == "order" else "string"}}
    tool = make_tool(words, name, f"Get the {noun} of a {kind}.", properties, [key])
    subjects = list(dict.fromkeys(draw_value(words, kind) for _ in range(words.choose([2, 2, 3]))))
    tasks = [Task(noun, tool, "", {key: subject}, {noun: words.draw_number()}, "", "") for subject in subjects]
    listed = join_words([f"order {subject}" if kind == "order" else str(subject) for subject in subjects])
    return tasks, words.choose(QUESTIONS[:4]).format(n=noun, e=listed)


def make_final(words: Words) -> Conversation:
    """An answer in words to the result of one call or two."""
    options, messages = choose_thinking(words), begin(words)
    tasks = [make_task(words)]
    if words.has_chance(0.3):
        tasks.append(make_other_task(words, tasks))
    question = " ".join(task.question for task in tasks)
    reply = say("assistant", " ".join(task.reply for task in tasks))
    thought = "The result is there." if len(tasks) == 1 else "The results are there."
    calling = tasks[0].thought if len(tasks) == 1 else f"This needs {len(tasks)} calls."
    messages += [say("user", question), think(call_tools(tasks), calling, options), *return_results(tasks)]
    messages.append(think(reply, thought, options))
    return Conversation("final", messages, offer_tools(words, tasks, words.choose([0, 0, 1, 2])), options)


def join_words(items: list[str]) -> str:
    """Return an enumeration: a, b and c."""
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]


def make_plain_exchange(words: Words) -> tuple[str, str]:
    """Return a short instruction and its answer."""
    number = words.random.randrange(len(WORDS["plain"]))
    items = [words.draw_open(LISTS["foods"]) for _ in range(words.choose([2, 3, 4]))]
    told: Json = {"spaced": " ".join(items), "listed": ", ".join(items), "count": len(items)}
    told["dashed"] = "\n".join(f"- {item}" for item in items)
    questions, answer = WORDS["plain"][number]
    if "{country}" in answer:
        country = words.choose(list(CAPITALS))
        told |= {"country": country, "capital": CAPITALS[country]}
    elif "{name}" in answer:
        told["name"] = words.draw_open(LISTS["first"])
    elif "{which}" in answer:
        which, place = words.choose([("first", 0), ("last", -1)])
        told |= {"which": which, "item": items[place]}
    question = words.choose(questions) if len(questions) > 1 else questions[0]
    return question.format(**told), answer.format(**told)


def make_plain(words: Words) -> Conversation:
    """A short instruction, with or without tools that it does not need."""
    question, answer = make_plain_exchange(words)
    options, messages = choose_thinking(words), begin(words)
    tools = offer_tools(words, [], words.choose([1, 1, 2, 3])) if words.has_chance(0.65) else []
    message = think(say("assistant", answer), "No tool is needed.", options)
    return Conversation("plain", [*messages, say("user", question), message], tools, options)


def make_repetition(words: Words) -> Conversation:
    """Invented words and numbers to be repeated as they are, or as a JSON list: copying, and nothing else."""
    count = words.random.randrange(4, 24)
    items = [words.draw_open([]) if words.has_chance(0.75) else str(words.draw_number()) for _ in range(count)]
    if words.has_chance(0.5):
        question, answer = f"Repeat: {' '.join(items)}", " ".join(items)
    else:
        question, answer = f"Write as a JSON list: {', '.join(items)}", json.dumps(items)
    return Conversation("repetition", [*begin(words), say("user", question), say("assistant", answer)])


def make_refusal(words: Words) -> Conversation:
    """A request for which there is no tool."""
    task, options, messages = make_task(words), choose_thinking(words), begin(words)
    others: list[Task] = []
    for _ in range(words.choose([0, 1, 1, 2])):
        others.append(make_other_task(words, [task, *others]))
    tools = [other.tool for other in others]
    message = think(say("assistant", "I have no tool for that."), "There is no tool for this.", options)
    return Conversation("refusal", [*messages, say("user", task.question), message], tools, options)


def describe_subject(words: Words) -> tuple[str, list[Json]]:
    """Return who or what sentences are about, and what they may tell of it."""
    described = words.choose(WORDS["described"])
    facts: list[Json] = [fact | {"value": draw_value(words, fact["draw"])} for fact in described["facts"]]
    for fact in facts[1:]:
        fact["phrase"] = tell_value(words, fact["value"], fact["phrases"])
    return described["subject"].format(facts[0]["value"]), facts


def tell_value(words: Words, value: Any, phrases: list[str]) -> str:
    """Return the phrase that tells a value; of a flag there are two."""
    if isinstance(value, bool):
        return phrases[not value]
    phrase = words.choose(phrases) if len(phrases) > 1 else phrases[0]
    return str(phrase.format(join_words(value) if isinstance(value, list) else value))


def make_extraction(words: Words) -> Conversation:
    """A sentence, and the JSON of some of what it says, under a schema of the prompt."""
    subject, facts = describe_subject(words)
    told = words.random.sample(facts[1:], words.choose([2, 2, 3, 4]))
    text = f"{subject} {join_words([fact['phrase'] for fact in told])}."
    wanted = words.random.sample([facts[0], *told], min(words.choose([2, 2, 3, 3, 4]), len(told) + 1))
    keys = [words.choose(fact["keys"]) for fact in wanted]
    schema = make_schema(words, {key: fact["schema"] for key, fact in zip(keys, wanted, strict=True)}, keys)
    values = {key: fact["value"] for key, fact in zip(keys, wanted, strict=True)}
    options: Json = choose_thinking(words)
    demand = words.choose(WORDS["demands"])
    if words.has_chance(0.3):
        messages = [say("system", f"{demand} {json.dumps(schema)}"), say("user", text)]
    elif words.has_chance(0.5):
        messages = [*begin(words), say("user", f"{demand} {json.dumps(schema)}\n{text}")]
    else:
        messages = [*begin(words), say("user", f"{text}\n{demand} {json.dumps(schema)}")]
    answer = think(
        say("assistant", json.dumps(values, ensure_ascii=False)), f"The keys are {join_words(keys)}.", options
    )
    return Conversation("extraction", [*messages, answer], [], options, schema)


KINDS: list[tuple[Callable[[Words], Conversation], int]] = [
    (lambda words: make_exchanges(words, 1 + words.has_chance(0.12), count_others(words)), 38),
    (make_extraction, 22), (make_parallel, 13), (make_final, 13), (make_plain, 10), (make_refusal, 4),
    (lambda words: make_exchanges(words, words.random.randrange(4, 12), words.random.randrange(3)), 3),
    (make_repetition, 3),
]  # fmt: skip


def make_conversation(seed: str, *, held_out: bool = False, repetitions: float = 0.0) -> Conversation:
    """Return the conversation of that seed; a held-out one has words that no other has.

    `repetitions` is the share of those that only copy, beyond the few that are always among them.
    """
    words = Words(seed, held_out=held_out)
    if words.has_chance(repetitions):
        return make_repetition(words)
    makers, weights = zip(*KINDS, strict=True)
    return cast(Conversation, words.random.choices(makers, weights)[0](words))


def render_conversation(tokenizer: PreTrainedTokenizerFast, conversation: Conversation, *, whole: bool) -> str:
    """Return the text of a conversation: whole, or up to where the answer begins."""
    turns, options = conversation.messages if whole else conversation.prompt, conversation.options
    tools = conversation.tools or None
    return str(tokenizer.apply_chat_template(turns, tools, add_generation_prompt=not whole, tokenize=False, **options))
