# ruff: noqa: SIM905
"""Make the synthetic conversations that the tool model learns from and is scored on.

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
from typing import Any

Json = dict[str, Any]

FIRST = (
    "Ada Alan Amir Anna Ben Bela Carla Chen Clara Dana David Elena Emil Eva Farid Felix Fiona Greta Hana Hugo Ida Ines "
    "Ivan Jana Jonas Julia Kai Karim Lara Leo Lina Lucas Maria Marta Max Mia Mila Nadia Nils Nina Noah Nora Olga Omar "
    "Oscar Otto Paula Pedro Petra Rosa Ruth Sami Sara Sofia Tara Theo Tom Uma Vera Yuki Zoe"
).split()
LAST = (
    "Adler Baker Berg Braun Costa Cruz Dietz Duval Engel Fischer Fox Garcia Gray Haas Hall Ito Jansen Jung Keller Khan "
    "King Klein Lang Lopez Maier Mann Meyer Moreau Nagy Novak Olsen Park Perez Petrov Reed Rossi Sato Silva Singh "
    "Stein Stone Tanaka Vogel Wagner Weber Wolf Wong Young Zeller Ziegler"
).split()
CITIES = (
    "Athens Basel Berlin Bern Bogota Bonn Boston Cairo Chicago Dakar Delhi Denver Dublin Essen Geneva Ghent Graz Hanoi "
    "Helsinki Istanbul Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Malmo Miami Milan Mumbai Munich Nairobi Naples "
    "Nice Oslo Osaka Paris Porto Prague Quito Riga Rome Seoul Sofia Sydney Tallinn Tokyo Toronto Turin Vienna Warsaw "
    "Zagreb Zurich"
).split()
PRODUCTS = (
    "lamp chair table desk sofa shelf mirror clock kettle teapot mug plate spoon knife pan pot oven fridge radio "
    "camera phone tablet laptop printer monitor keyboard mouse cable charger speaker bicycle helmet tent backpack "
    "jacket shirt coat scarf hat glove boot sandal pillow blanket carpet curtain candle vase basket bottle ladder "
    "hammer drill saw"
).split()
FOODS = (
    "apples bananas beans bread butter carrots cheese coffee eggs flour garlic grapes honey lemons lentils milk nuts "
    "oats oil olives onions oranges pasta pears peas pepper plums potatoes rice salt soap sugar tea tomatoes yoghurt"
).split()
JOBS = (
    "baker nurse teacher pilot lawyer farmer painter driver doctor engineer singer waiter tailor plumber clerk".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLOURS = "red blue green yellow black white brown orange purple grey".split()
LANGUAGES = "French German Spanish Italian Polish Dutch Greek Turkish Japanese Korean Arabic Danish".split()
ROOMS = "kitchen bedroom office hall garage garden cellar bathroom".split()
CURRENCIES = "euros dollars pounds yen francs crowns".split()
TITLES = "lunch dinner meeting review workshop training party concert lecture interview picnic rehearsal".split()
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Austria": "Vienna", "Japan": "Tokyo",
    "Portugal": "Lisbon", "Greece": "Athens", "Norway": "Oslo", "Ireland": "Dublin", "Egypt": "Cairo", "Peru": "Lima",
    "Poland": "Warsaw", "Finland": "Helsinki", "Kenya": "Nairobi", "Vietnam": "Hanoi", "Latvia": "Riga",
}  # fmt: skip
SYLLABLES = (
    "ba be bo da de do fa fi ga go ka ke ko la le lo ma me mi mo na ne "
    "no pa pe po ra re ri ro sa se so ta te ti to va ve vi vo za ze zo"
).split()
ENDINGS = ["", "", "n", "r", "l", "s", "x", "k", "t"]

# What can be looked up, by what it is looked up for: (names of the parameter, attributes).
SUBJECTS: dict[str, tuple[list[str], list[str]]] = {
    "city": (
        ["city", "place", "location", "town"],
        ["weather", "population", "temperature", "mayor", "area", "traffic", "rainfall", "timezone", "postcode"],
    ),
    "person": (
        ["name", "person", "employee", "user"],
        ["address", "phone", "email", "birthday", "role", "salary", "manager", "team", "office", "shift"],
    ),
    "product": (
        ["product", "item", "article"],
        ["price", "stock", "weight", "colour", "rating", "supplier", "size", "discount", "warranty"],
    ),
    "order": (["order_id", "order", "number", "id"], ["status", "total", "carrier", "customer", "invoice", "route"]),
    "company": (
        ["company", "firm", "business"],
        ["revenue", "founder", "ticker", "sector", "website", "profit", "chairman"],
    ),
}
NUMERIC = {"population", "temperature", "salary", "price", "stock", "weight", "discount", "total", "revenue", "profit"}
LOOKUP_VERBS = ["get", "find", "fetch", "lookup", "read", "query", "check", "show"]
QUESTIONS = [
    "What is the {n} of {e}?", "Tell me the {n} of {e}.", "I need the {n} of {e}.", "Find the {n} of {e}.",
    "Can you check the {n} of {e}?", "Please look up the {n} of {e}.", "Give me the {n} for {e}.",
    "{e}: what is the {n}?",
]  # fmt: skip
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
        return "".join(self.choose(SYLLABLES) for _ in range(self.choose([2, 2, 3]))) + str(self.choose(ENDINGS))

    def draw_person(self) -> str:
        """Return a first name, mostly with a last name."""
        first = self.draw_open(FIRST)
        return f"{first} {self.draw_open(LAST)}" if self.has_chance(0.6) else first

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


def draw_subject(words: Words, kind: str) -> Any:
    """Return something of that kind that can be asked about."""
    match kind:
        case "city":
            return words.draw_open(CITIES)
        case "person":
            return words.draw_person()
        case "product":
            return words.draw_open(PRODUCTS)
        case "order":
            return words.draw_number()
        case _:
            return f"{words.draw_open(LAST)} {words.choose(['Ltd', 'Inc', 'Group', 'Labs'])}"


def make_lookup(words: Words) -> Task:
    """Return a look-up of one attribute, such as the price of a lamp; some attributes are invented words."""
    kind = words.choose(list(SUBJECTS))
    keys, attributes = SUBJECTS[kind]
    key = words.choose(keys)
    noun = words.draw_open([]) if words.has_chance(0.15) else words.choose(attributes)
    subject = draw_subject(words, kind)
    properties: Json = {key: {"type": "integer" if kind == "order" else "string"}}
    arguments: Json = {key: subject}
    question = words.choose(QUESTIONS).format(n=noun, e=subject if kind != "order" else f"order {subject}")
    if words.has_chance(0.25):
        question = add_option(words, question, properties, arguments)
    description = words.choose(
        [f"Get the {noun} of a {kind}.", f"Look up the {noun} for a {kind}.", f"{noun} of a {kind}"]
    )
    tool = make_tool(words, join_name(words, words.choose(LOOKUP_VERBS), noun), description, properties, [key])
    value = words.draw_number() if noun in NUMERIC else words.draw_open(COLOURS, invented=0.7)
    named = f"order {subject}" if kind == "order" else subject
    result = {noun: value} if words.has_chance(0.7) else {key: subject, noun: value}
    reply, thought = f"The {noun} of {named} is {value}.", f"The {noun} of {named} is asked for."
    return Task(noun, tool, question, arguments, result, reply, thought)


def add_option(words: Words, question: str, properties: Json, arguments: Json) -> str:
    """Give a look-up an optional parameter, which two questions in three fill; returns the question."""
    key, values, preposition = words.choose(
        [("day", DAYS, "on"), ("currency", CURRENCIES, "in"), ("language", LANGUAGES, "in")]
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
    shape = words.choose(["expression", "expression", "operation"])
    if shape == "expression":
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


# What can be done: name, description, ways to ask, slots (names of the parameter, type, how its value is drawn), reply.
Slot = tuple[list[str], str, Callable[[Words], Any]]
ACTIONS: list[tuple[list[str], str, list[str], list[Slot], str]] = [
    (["send_message", "message", "sendMessage"], "Send a message to a person.",
     ["Send {0} the message: {1}.", "Tell {0}: {1}.", "Write to {0}: {1}."],
     [(["to", "recipient", "name"], "string", Words.draw_person),
      (["text", "message", "body"], "string", lambda w: f"{w.draw_open(PRODUCTS)} at {w.draw_time()}")],
     "I sent the message to {0}."),
    (["create_event", "add_event", "schedule"], "Put an event into the calendar.",
     ["Put {0} on {1} at {2} into my calendar.", "Schedule {0} for {1} at {2}.", "Plan {0} on {1}, {2}."],
     [(["title", "event", "name"], "string", lambda w: w.draw_open(TITLES)),
      (["day", "date"], "string", lambda w: w.choose(DAYS)), (["time", "start"], "string", Words.draw_time)],
     "{0} is planned for {1} at {2}."),
    (["set_timer", "start_timer", "timer"], "Start a timer.",
     ["Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Wake me in {0} minutes."],
     [(["minutes", "duration"], "integer", lambda w: w.random.randrange(1, 120))], "The timer runs for {0} minutes."),
    (["book_table", "reserve_table", "bookTable"], "Book a table in a restaurant.",
     ["Book a table for {1} people at {0} on {2}.", "Reserve {1} seats at {0} for {2}."],
     [(["restaurant", "place"], "string", lambda w: w.draw_open(LAST)),
      (["people", "guests", "seats"], "integer", lambda w: w.random.randrange(1, 13)),
      (["day", "date"], "string", lambda w: w.choose(DAYS))],
     "The table at {0} is booked for {2}."),
    (["add_to_list", "add_item", "buy"], "Add something to the shopping list.",
     ["Add {1} {0} to my list.", "I want to buy {1} {0}.", "Put {1} {0} on the list."],
     [(["item", "product", "name"], "string", lambda w: w.draw_open(FOODS)),
      (["quantity", "amount", "count"], "integer", lambda w: w.random.randrange(2, 50))],
     "{1} {0} are on the list."),
    (["turn_on", "switch_on", "turnOn"], "Turn a device on.",
     ["Turn on the {0} in the {1}.", "Switch the {0} in the {1} on."],
     [(["device", "name"], "string", lambda w: w.draw_open(PRODUCTS)),
      (["room", "place"], "string", lambda w: w.choose(ROOMS))],
     "The {0} in the {1} is on."),
    (["translate", "translate_text"], "Translate a text.",
     ["Translate {0} into {1}.", "What is {0} in {1}?", "Say {0} in {1}."],
     [(["text", "phrase", "word"], "string", lambda w: w.draw_open(FOODS)),
      (["language", "target"], "string", lambda w: w.choose(LANGUAGES))],
     "{0} in {1} is translated."),
    (["convert", "convert_currency", "exchange"], "Convert an amount of money.",
     ["Convert {0} {1} to {2}.", "How many {2} are {0} {1}?", "Change {0} {1} into {2}."],
     [(["amount", "value"], "number", Words.draw_number),
      (["from", "source"], "string", lambda w: w.choose(CURRENCIES[:3])),
      (["to", "target"], "string", lambda w: w.choose(CURRENCIES[3:]))],
     "{0} {1} are converted to {2}."),
    (["find_flight", "search_flights", "flights"], "Search flights between two cities.",
     ["Find a flight from {0} to {1} on {2}.",
      "I want to fly from {0} to {1} on {2}.", "Flights to {1} from {0} on {2}?"],
     [(["from", "origin", "departure"], "string", lambda w: w.draw_open(CITIES)),
      (["to", "destination", "arrival"], "string", lambda w: w.draw_open(CITIES)),
      (["day", "date"], "string", lambda w: w.choose(DAYS))],
     "I found flights from {0} to {1}."),
    (["set_light", "set_lamp", "light"], "Set the brightness and colour of a light.",
     ["Make the light in the {0} {1}, {2} percent.", "Set the light in the {0} to {1} at {2} percent."],
     [(["room"], "string", lambda w: w.choose(ROOMS)), (["colour", "color"], "string", lambda w: w.choose(COLOURS)),
      (["percent", "brightness", "level"], "integer", lambda w: w.random.randrange(1, 101))],
     "The light in the {0} is {1}."),
]  # fmt: skip


def make_action(words: Words) -> Task:
    """Return something to be done with one to three arguments, such as a message to be sent."""
    names, description, questions, slots, reply = words.choose(ACTIONS)
    keys = [words.choose(options) for options, _, _ in slots]
    values = [draw(words) for _, _, draw in slots]
    properties = {key: {"type": kind} for key, (_, kind, _) in zip(keys, slots, strict=True)}
    name = words.choose(names)
    tool = make_tool(words, name, description, properties, keys)
    arguments = dict(zip(keys, values, strict=True))
    result = words.choose([{"ok": True}, {"status": "done"}, {"success": True}])
    question = words.choose(questions).format(*values)
    thought = f"{name} is the tool for this."
    text = reply.format(*values)
    return Task(description, tool, question, arguments, result, text[0].upper() + text[1:], thought)


def make_task(words: Words) -> Task:
    """Return a task of any sort."""
    make: Callable[[Words], Task] = words.choose([make_lookup, make_lookup, make_sum, make_action])
    return make(words)


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


def call_tools(tasks: list[Task], first_id: int = 0) -> Json:
    """Return the assistant's message that makes the calls of the tasks."""
    calls = [
        {"id": f"call_{first_id + i}", "type": "function", "function": {"name": task.name, "arguments": task.arguments}}
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
    texts = [
        "You are a helpful assistant.",
        "You are a concise assistant.",
        "You are an agent. Use tools.",
        "Be brief.",
    ]
    return [say("system", words.choose(texts))] if words.has_chance(0.35) else []


def count_others(words: Words) -> int:
    """Return how many tools there are that are not needed."""
    return int(words.choose([0, 0, 1, 1, 1, 2, 2, 3])) if words.has_chance(0.96) else words.random.randrange(4, 9)


def think(message: Json, thought: str, options: Json) -> Json:
    """Return the message, with a thought before it if the conversation is one that thinks."""
    return {**message, "reasoning_content": thought} if options.get("enable_thinking") else message


def choose_thinking(words: Words) -> Json:
    """Return the template's options: one conversation in six thinks."""
    return {"enable_thinking": True} if words.has_chance(1 / 6) else {}


def make_call(words: Words) -> Conversation:
    """One request, one call; in some, `tool_choice` demands it, or other requests and their answers come before."""
    return make_exchanges(words, 1 + words.has_chance(0.12), count_others(words))


def make_long(words: Words) -> Conversation:
    """Many requests with their calls and answers, for the far end of the context."""
    return make_exchanges(words, words.random.randrange(4, 12), words.random.randrange(3))


def make_exchanges(words: Words, count: int, num_others: int) -> Conversation:
    """Return requests of which all but the last have been answered, and the call for the last."""
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
    name = join_name(words, words.choose(LOOKUP_VERBS), noun)
    properties = {key: {"type": "integer" if kind == "order" else "string"}}
    tool = make_tool(words, name, f"Get the {noun} of a {kind}.", properties, [key])
    subjects = list(dict.fromkeys(draw_subject(words, kind) for _ in range(words.choose([2, 2, 3]))))
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
    kind = words.random.randrange(8)
    items = [words.draw_open(FOODS) for _ in range(words.choose([2, 3, 4]))]
    match kind:
        case 0:
            country = words.choose(list(CAPITALS))
            questions = ["What is the capital of {}?", "Which city is the capital of {}?", "Capital of {}?"]
            exchange = words.choose(questions).format(country), f"The capital of {country} is {CAPITALS[country]}."
        case 1:
            name = words.draw_open(FIRST)
            greeting = words.choose(["Hello, I am {}.", "Hi! My name is {}.", "Good morning, {} here."])
            exchange = greeting.format(name), f"Hello {name}, how can I help you?"
        case 2:
            exchange = words.choose(["Thank you!", "Thanks.", "Thanks a lot!"]), "You are welcome."
        case 3:
            exchange = f"{words.choose(['Repeat', 'Say', 'Write'])}: {' '.join(items)}", " ".join(items)
        case 4:
            exchange = f"How many things are these: {', '.join(items)}?", f"These are {len(items)} things."
        case 5:
            which, place = words.choose([("first", 0), ("last", -1)])
            exchange = f"What is the {which} of these: {', '.join(items)}?", f"The {which} is {items[place]}."
        case 6:
            exchange = words.choose(["Who are you?", "What are you?"]), "I am a small model that calls tools."
        case _:
            dashed = "\n".join(f"- {item}" for item in items)
            exchange = f"List these with dashes: {', '.join(items)}", dashed
    return exchange


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


@dataclass(frozen=True)
class Fact:
    """A part of a sentence: the keys it may have, its schema and value, and the phrase that tells it."""

    keys: list[str]
    schema: Json
    value: Any
    phrase: str


def describe_person(words: Words) -> tuple[str, list[Fact]]:
    """Return sentences about a person."""
    name, age, city, job = (
        words.draw_person(),
        words.random.randrange(18, 90),
        words.draw_open(CITIES),
        words.choose(JOBS),
    )
    married, foods = (
        words.has_chance(0.5),
        list(dict.fromkeys(words.draw_open(FOODS) for _ in range(words.choose([2, 3])))),
    )
    return name, [
        Fact(["name", "full_name", "person"], {"type": "string"}, name, ""),
        Fact(["age", "years"], {"type": "integer"}, age, words.choose(["is {} years old", "is {}"]).format(age)),
        Fact(["city", "home", "town"], {"type": "string"}, city, f"{words.choose(['lives in', 'comes from'])} {city}"),
        Fact(["job", "profession"], {"type": "string"}, job, f"works as a {job}"),
        Fact(["married"], {"type": "boolean"}, married, "is married" if married else "is not married"),
        Fact(["likes", "foods"], {"type": "array", "items": {"type": "string"}}, foods, f"likes {join_words(foods)}"),
    ]  # fmt: skip


def describe_order(words: Words) -> tuple[str, list[Fact]]:
    """Return sentences about an order."""
    name, product, quantity = words.draw_person(), words.draw_open(PRODUCTS), words.random.randrange(2, 40)
    price, paid, number = words.draw_number(), words.has_chance(0.5), words.draw_number()
    status, states = words.choose(["open", "sent", "closed"]), ["closed", "open", "sent"]
    return name, [
        Fact(["customer", "name", "buyer"], {"type": "string"}, name, ""),
        Fact(["product", "item"], {"type": "string"}, product, f"ordered the article {product}"),
        Fact(["quantity", "count", "amount"], {"type": "integer"}, quantity, f"wants {quantity} pieces"),
        Fact(["price", "total"], {"type": "number"}, price, f"pays {price} euros"),
        Fact(["paid"], {"type": "boolean"}, paid, "has paid" if paid else "has not paid"),
        Fact(["order", "order_id"], {"type": "integer"}, number, f"has order number {number}"),
        Fact(["status", "state"], {"type": "string", "enum": states}, status, f"has an order that is {status}"),
    ]


def describe_event(words: Words) -> tuple[str, list[Fact]]:
    """Return sentences about an event."""
    title, place, day, time = words.draw_open(TITLES), words.draw_open(CITIES), words.choose(DAYS), words.draw_time()
    guests, host = words.draw_number(), words.draw_person()
    return f"The {title}", [
        Fact(["title", "event", "name"], {"type": "string"}, title, ""),
        Fact(
            ["place", "city", "location"], {"type": "string"}, place,
            f"{words.choose(['is in', 'takes place in'])} {place}",
        ),
        Fact(["day", "date"], {"type": "string"}, day, f"is on {day}"),
        Fact(["time", "start"], {"type": "string"}, time, f"begins at {time}"),
        Fact(["guests", "people"], {"type": "integer"}, guests, f"has {guests} guests"),
        Fact(["host", "organizer"], {"type": "string"}, host, f"is given by {host}"),
    ]  # fmt: skip


def make_extraction(words: Words) -> Conversation:
    """A sentence, and the JSON of some of what it says, under a schema of the prompt."""
    subject, facts = words.choose([describe_person, describe_order, describe_event])(words)
    told = words.random.sample(facts[1:], words.choose([2, 2, 3, 4]))
    text = f"{subject} {join_words([fact.phrase for fact in told])}."
    wanted = words.random.sample([facts[0], *told], min(words.choose([2, 2, 3, 3, 4]), len(told) + 1))
    keys = [words.choose(fact.keys) for fact in wanted]
    schema = make_schema(words, {key: fact.schema for key, fact in zip(keys, wanted, strict=True)}, keys)
    values = {key: fact.value for key, fact in zip(keys, wanted, strict=True)}
    options: Json = choose_thinking(words)
    demand = words.choose(
        ["Answer in JSON by this schema:", "Extract JSON with this schema:", "Return JSON for this schema:"]
    )
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
    (make_call, 38), (make_extraction, 22), (make_parallel, 13), (make_final, 13), (make_plain, 10), (make_refusal, 4),
    (make_long, 3), (make_repetition, 3),
]  # fmt: skip


def make_conversation(seed: str, *, held_out: bool = False, repetitions: float = 0.0) -> Conversation:
    """Return the conversation of that seed; a held-out one has words that no other has.

    `repetitions` is the share of those that only copy, beyond the few that are always among them.
    """
    words = Words(seed, held_out=held_out)
    if words.has_chance(repetitions):
        return make_repetition(words)
    makers, weights = zip(*KINDS, strict=True)
    make: Callable[[Words], Conversation] = words.random.choices(makers, weights)[0]
    return make(words)
