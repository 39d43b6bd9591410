"""Conversations to ask a real model; all of them are written here."""

from __future__ import annotations

from collections.abc import Callable

Conversation = list[dict[str, str]]

TOPICS = (
    "a lighthouse",
    "the water cycle",
    "baking bread",
    "a bicycle",
    "the moon",
    "a public library",
    "growing tomatoes",
    "chess",
    "a small river town",
    "learning the violin",
    "solar panels",
    "an old clock",
    "volcanoes",
)
CHATS = (
    "Explain {} to a child in three sentences.",
    "What should a visitor know about {}?",
    "Write a short story about {}.",
    "Why do people like {}? Answer in one paragraph.",
)
TASKS = (
    "reverses a string",
    "counts the vowels of a text",
    "checks whether a number is prime",
    "sums the digits of an integer",
    "finds the largest item of a list",
    "removes duplicates from a list",
    "merges two sorted lists",
    "turns minutes into hours and minutes",
    "tests whether a word is a palindrome",
    "counts the words of a file",
    "computes the factorial of n",
    "flattens a nested list",
    "sorts dictionaries by a key",
)
LANGUAGES = ("Python", "JavaScript", "Python", "C")
GREETINGS = (
    "Übersetze: Guten Morgen, schöne Welt!",
    "Qu'est-ce qu'un château ? Réponds en français.",
    "Say hello in Japanese: こんにちは. What does it mean?",
    "Write three emoji for a birthday party 🎂🎉 and explain each.",
    "Что такое река? Ответь одним предложением.",
    "¿Qué es el otoño? 🍂",
    "List five fruits, each with its emoji 🍎.",
    "What does naïve mean, and why has it two dots?",
    "Translate to Greek: the sea is blue. θάλασσα",
    "Repeat exactly: 👩‍🚀🧑🏽‍🌾 – “quoted” … ½ ≤ ¾ ✓",
    "你好! Please answer in English: what is tea 茶?",
    "Write a line with arrows → ← ↑ ↓ and say what each means.",
    "Čo je to večera? Prelož do angličtiny.",
)
NAMES = ("double", "scale", "shift", "weigh", "grow")
ROLES = (
    "You answer in exactly one sentence.",
    "You are a pirate and speak like one.",
    "You answer only with a numbered list.",
    "You are a strict teacher who ends with a question.",
    "You write in capital letters.",
)


def chat(i: int) -> Conversation:
    """A question about a topic."""
    return user(CHATS[i % len(CHATS)].format(TOPICS[i % len(TOPICS)]))


def multi_turn(i: int) -> Conversation:
    """A third turn that depends on the two before it."""
    topic = TOPICS[i % len(TOPICS)]
    return [
        *user(f"I want to talk about {topic}."),
        {"role": "assistant", "content": f"Gladly. What about {topic} interests you?"},
        *user("Its history, and one thing that most people get wrong."),
    ]


def code(i: int) -> Conversation:
    """A function to write."""
    language = LANGUAGES[i % len(LANGUAGES)]
    return user(f"Write a {language} function that {TASKS[i % len(TASKS)]}.")


def lists(i: int) -> Conversation:
    """A list with bold heads."""
    topic = TOPICS[i % len(TOPICS)]
    return user(f"Give a numbered list of {3 + i % 4} facts about {topic}.")


def json_object(i: int) -> Conversation:
    """An object with named keys."""
    topic = TOPICS[i % len(TOPICS)]
    return user(
        f"Describe {topic} as a JSON object with the keys name, kind, uses (a list) "
        "and year. Answer with JSON only."
    )


def unicode_text(i: int) -> Conversation:
    """Scripts and emoji whose characters are several tokens."""
    return user(GREETINGS[i % len(GREETINGS)])


def long_context(i: int) -> Conversation:
    """A question about one of 4,000 tokens of notes, which are always the same."""
    lines = [
        f"Note {n}: on day {n} the {TOPICS[n % len(TOPICS)]} group met in room "
        f"{7 * n % 90} and spent {13 * n % 50} hours on it."
        for n in range(1, 132)
    ]
    return user("\n".join(lines) + f"\n\nWhat does note {20 + 5 * (i % 13)} say?")


def system_prompt(i: int) -> Conversation:
    """A role and a question."""
    role = {"role": "system", "content": ROLES[i % len(ROLES)]}
    return [role, *chat(i + 3)]


def copies(i: int) -> Conversation:
    """A text to quote, or a file to change a name in: most of the answer is copied."""
    if i % 2:
        name = NAMES[i % len(NAMES)]
        lines = [
            f"def {name}_{k}({k}):\n    total = {k} * {3 + i + n}\n    return total"
            for n, k in enumerate(("price", "weight", "width", "speed", "count"))
        ]
        text = "\n\n".join(lines)
        return user(
            f"```python\n{text}\n```\n\nRename `total` to `result` in this file. "
            "Answer with the whole file."
        )
    lines = [
        f"{TOPICS[(i + n) % len(TOPICS)].capitalize()} was shown to {9 + 5 * n} guests "
        f"in hall {n + i}, and they stayed for {20 + 3 * n} minutes."
        for n in range(8)
    ]
    return user("Repeat the following text word by word.\n\n" + "\n".join(lines))


def user(text: str) -> Conversation:
    return [{"role": "user", "content": text}]


KINDS: dict[str, Callable[[int], Conversation]] = {
    "chat": chat,
    "multi-turn": multi_turn,
    "code": code,
    "lists": lists,
    "json": json_object,
    "unicode": unicode_text,
    "long": long_context,
    "system": system_prompt,
}
# Answers that copy; apart from the eight kinds above.
COPIES = {"copies": copies}


def conversations(
    count: int, kinds: tuple[str, ...] = tuple(KINDS)
) -> list[Conversation]:
    """`count` conversations, the kinds in turn; up to 13 of each kind differ."""
    known = KINDS | COPIES
    return [known[kinds[n % len(kinds)]](n // len(kinds)) for n in range(count)]
