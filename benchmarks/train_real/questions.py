"""Questions that the drafters learn from; none is a question of the tests.

No topic and no wording of `benchmarks.real_model.prompts` is among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from benchmarks.real_model.prompts import Conversation, user


def lines_of(name: str) -> tuple[str, ...]:
    """The parts of a file beside this one, "; " between them; # begins a comment."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return tuple(part.strip() for line in lines for part in line.split(";"))


THINGS = lines_of("things.txt")
ASKS = (
    "What is {}?",
    "Describe {} in two sentences.",
    "Give three tips about {}.",
    "Write a poem about {}.",
    "How would you explain how {} works?",
    "Write a letter to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "What do {} and {} have in common?",
    "Tell me a joke about {}.",
    "Summarize the history of {}.",
    "Plan a lesson about {}.",
    "Tell me a story in which {} is important.",
    "I know nothing about {}. Where do I begin?",
    "What is the most surprising thing about {}?",
    "Write a short speech about {}.",
    "Why is {} important?",
    "Compare {} with {}.",
    "Who would be interested in {}, and why?",
    "Write a dialogue of two people who disagree about {}.",
    "What should a beginner avoid with {}?",
    "Explain {} in simple words.",
    "Write an introduction for an article about {}.",
    "Is {} more useful than {}? Give your reasons.",
    "How has {} changed over the last hundred years?",
    "Can you explain {}?",
    "Tell me about {}.",
    "Tell me an interesting fact about {}.",
    "Describe {} to somebody who has never heard of it.",
    "Write a paragraph about {}.",
    "Write two paragraphs about {}.",
    "Write a tale for children about {}.",
    "Write the first lines of a novel about {}.",
    "Write a story of about one hundred words about {}.",
    "Tell a short tale in which {} meets {}.",
    "What makes {} special?",
    "Why do some people dislike {}?",
    "Why does everybody talk about {}?",
    "What would the world be like without {}?",
    "What do children need to know about {}?",
    "What should I know about {} before I travel?",
    "What is the best way to learn about {}?",
    "How do I find out more about {}?",
    "How can I make {} better?",
    "How did people come up with {}?",
    "Where do we meet {} in daily life?",
    "When did {} become popular?",
    "What are common mistakes about {}?",
    "What is the difference between {} and {}?",
    "Which is older, {} or {}?",
    "What are the main parts of {}?",
    "What role does {} play in our lives?",
    "Answer in one sentence: what is {}?",
    "Explain {} as a teacher would.",
    "Explain {} to my grandmother.",
    "Give a definition of {} and an example.",
    "Give me a short summary of {}.",
    "Give me advice about {}.",
    "Write an e-mail to a colleague about {}.",
    "Write a review of {}.",
    "Write an advertisement for {}.",
    "Write a diary entry about {}.",
    "Write a news report about {}.",
    "Write a song about {}.",
    "Imagine you are {}. What do you see?",
    "Is {} dangerous?",
    "Do you like {}? Why?",
    "How much does {} matter in the future?",
    "What questions should I ask about {}?",
    "Help me to prepare a talk about {}.",
    "I am writing about {}. Suggest a title and an opening.",
)
LISTS = (
    "List {count} things to know about {thing}.",
    "Name {count} words that go with {thing}, each with a short reason.",
    "What are {count} common questions about {thing}?",
    "Give me {count} ideas for a blog about {thing}, in bullet points.",
    "Write {count} steps for teaching somebody about {thing}.",
)
JOBS = (
    "adds two numbers",
    "converts Celsius to Fahrenheit",
    "finds the average of an array",
    "checks whether a year is a leap year",
    "replaces blanks in a text by dashes",
    "returns the n-th Fibonacci number",
    "sorts a list of names",
    "counts how often each letter occurs",
    "finds the second largest number",
    "reads numbers until zero is entered and prints their sum",
    "rounds prices to two digits",
    "capitalizes each word of a sentence",
    "rotates a list by k places",
    "computes the area of a circle",
    "finds the common items of two lists",
    "validates an e-mail address",
    "swaps two variables",
    "prints a multiplication table",
    "computes the greatest common divisor",
    "removes vowels from a text",
    "models a bank account with deposits and withdrawals",
    "searches a sorted array",
    "splits a bill between friends",
    "generates a random password",
    "transposes a matrix",
    "checks whether two words have the same letters",
    "finds the shortest word of a sentence",
    "prints the numbers from 1 to 100",
    "computes the power of a number",
    "finds the missing number of a sequence",
    "counts the lines of a string",
    "converts a number to binary",
    "converts a binary number to decimal",
    "removes the blanks at the ends of a text",
    "joins a list of words with commas",
    "returns the even numbers of a list",
    "squares every item of a list",
    "finds the position of a value in an array",
    "computes the distance of two points",
    "checks whether a list is sorted",
    "shuffles a deck of cards",
    "simulates the roll of two dice",
    "asks the user for a name and says hello",
    "computes the sum of a matrix's diagonal",
    "finds the most common item of a list",
    "parses a date of the form 2024-05-17",
    "prints a triangle of stars",
    "stores contacts in a dictionary",
    "models a stack with push and pop",
    "models a queue of customers",
    "reads a CSV table and prints its columns",
    "writes a list of numbers to a text file",
    "downloads a web page",
    "computes the interest of a loan",
    "encrypts a text by shifting letters",
)
CODES = (
    "Write a {language} function that {job}.",
    "Show me {language} code that {job}, with comments.",
    "How do I write a {language} program that {job}? Add an example.",
)
LANGUAGES = ("Python", "JavaScript", "Java", "C", "Go")
SENTENCES = (
    "The library opens at nine.",
    "My sister likes green apples.",
    "We will meet at the station tomorrow.",
    "It is raining, so take a coat.",
    "How much does this book cost?",
    "The children are playing in the park.",
    "I would like a cup of coffee.",
    "Where is the nearest hospital?",
    "Thank you for your help.",
    "The train was late again.",
    "My brother works in a factory.",
    "This soup is too hot.",
    "Please close the window.",
    "We have been friends for ten years.",
    "The dog sleeps under the table.",
    "I forgot my keys at home.",
    "Tomorrow is a holiday.",
    "She writes a letter to her mother.",
    "Can you help me, please?",
    "The sky is full of stars.",
)
TONGUES = (
    "French",
    "German",
    "Spanish",
    "Italian",
    "Russian",
    "Japanese",
    "Greek",
    "Dutch",
)
FOREIGN = (
    "Translate into {tongue}: {sentence}",
    "How do I say this in {tongue}? {sentence}",
    "Translate '{sentence}' into {tongue} and explain each word.",
)
OBJECTS = (
    "Write a JSON object for {thing} with the fields title, tags and summary.",
    "Return JSON about {thing} with the keys id, description and price. No other text.",
    "Give me an example of JSON data that describes {thing}.",
)
MANNERS = (
    "You are a helpful assistant.",
    "You answer briefly.",
    "You are a friendly librarian.",
    "You explain everything with an example.",
    "You are a poet.",
    "You answer like a scientist.",
    "You give short answers in bullet points.",
    "You are a sports reporter.",
)
FOLLOW_UPS = (
    "Please say more about that.",
    "Can you give me an example?",
    "What is the opposite view?",
    "Explain it again for a ten-year-old.",
    "And what about {}?",
    "Write that as a list.",
)


def ask(rng: random.Random) -> Conversation:
    """A question about one or two things."""
    return user(rng.choice(ASKS).format(*rng.sample(THINGS, 2)))


def a_list(rng: random.Random) -> Conversation:
    """A list of a stated length."""
    values = {"count": rng.randint(3, 8), "thing": rng.choice(THINGS)}
    return user(rng.choice(LISTS).format(**values))


def code(rng: random.Random) -> Conversation:
    """A small program."""
    values = {"language": rng.choice(LANGUAGES), "job": rng.choice(JOBS)}
    return user(rng.choice(CODES).format(**values))


def foreign(rng: random.Random) -> Conversation:
    """A sentence to translate."""
    values = {"tongue": rng.choice(TONGUES), "sentence": rng.choice(SENTENCES)}
    return user(rng.choice(FOREIGN).format(**values))


def json_object(rng: random.Random) -> Conversation:
    """Data as JSON."""
    return user(rng.choice(OBJECTS).format(thing=rng.choice(THINGS)))


def with_role(rng: random.Random) -> Conversation:
    """A question under a system prompt."""
    return [{"role": "system", "content": rng.choice(MANNERS)}, *ask(rng)]


def second_turn(rng: random.Random) -> Conversation:
    """A question, a short answer, and a question about that."""
    thing, other = rng.sample(THINGS, 2)
    reply = f"Of course. There is a lot to say about {thing}; let us begin slowly."
    return [
        *user(rng.choice(ASKS[:2]).format(thing)),
        {"role": "assistant", "content": reply},
        *user(rng.choice(FOLLOW_UPS).format(other)),
    ]


#: How many of twenty questions are of each kind.
SHARES: dict[Callable[[random.Random], Conversation], int] = {
    ask: 8,
    a_list: 3,
    code: 3,
    foreign: 1,
    json_object: 1,
    with_role: 2,
    second_turn: 2,
}


def questions(count: int, seed: int) -> list[Conversation]:
    """`count` different conversations; a longer list begins with the shorter one."""
    rng = random.Random(seed)
    found: dict[str, Conversation] = {}
    while len(found) < count:
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        asked = kind(rng)
        found.setdefault(repr(asked), asked)
    return list(found.values())
