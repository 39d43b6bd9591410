"""Segment boundaries, against slow oracles and tables of texts with their cuts."""

import random
import re
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_parse.judging.prose import UNDECIDED
from sglang_parse.judging.segmenter import RULES, Segmenter, build_token_texts

NAMES = (*RULES, "fixed:3")

# A vocabulary of characters plus the merged tokens that make boundaries awkward.
MERGED = [
    "\n\n",
    ".\n",
    ".\n\n",
    "\n    ",
    ".\n9",
    "\n\n  ",
    " the",
    "Step",
    " 7",
    '."',
]
CHARS = [chr(c) for c in range(32, 127)] + list("\n\té。！“”’你好再见•")
TEXTS = [*MERGED, *CHARS, ""]
IDS = {text: i for i, text in enumerate(TEXTS)}


def tokenize(text: str) -> list[int]:
    """Greedy longest match, so merged tokens are used wherever they fit."""
    tokens = []
    while text:
        piece = next(
            text[:n] for n in range(min(6, len(text)), 0, -1) if text[:n] in IDS
        )
        tokens.append(IDS[piece])
        text = text[len(piece) :]
    return tokens


def cut(tokens, boundaries):
    """Texts of the segments, and of the tail if there is one."""
    edges = [0, *boundaries]
    if edges[-1] != len(tokens):
        edges.append(len(tokens))
    return [
        "".join(TEXTS[t] for t in tokens[a:b])
        for a, b in zip(edges, edges[1:], strict=False)
    ]


def segment(name, marked, *, ended=False, previous_text=""):
    """Boundaries and the ones expected: "|" in `marked` stands for a boundary.

    Parts are tokenized together; each boundary must fall on a token's end.
    """
    parts = marked.split("|")
    tokens = tokenize("".join(parts))
    found = Segmenter(name, TEXTS).boundaries(
        tokens, ended=ended, max_segments=1000, previous_text=previous_text
    )
    pieces = cut(tokens, found)
    tail = [""] if found and found[-1] == len(tokens) else []
    return pieces + tail, parts


def random_draft(rng):
    pool = MERGED * 3 + list("ab1. \n(){}:\"'#-S,?!") + [". ", "\n", "\n- ", "\n2. "]
    return tokenize("".join(rng.choice(pool) for _ in range(rng.randint(0, 40))))


@pytest.mark.parametrize("name", NAMES)
def test_boundaries_increase_within_draft(name):
    rng = random.Random(0)
    segmenter = Segmenter(name, TEXTS)
    for _ in range(300):
        tokens = random_draft(rng)
        ended = rng.random() < 0.5
        limit = rng.choice([1, 2, 3, 1000])
        found = segmenter.boundaries(
            tokens,
            ended=ended,
            max_segments=limit,
            previous_text=rng.choice(["", "\n"]),
        )
        assert list(found) == sorted(set(found))
        assert not found or found[0] >= 1 and found[-1] <= len(tokens)
        assert len(found) <= limit
        assert "".join(cut(tokens, found)) == "".join(TEXTS[t] for t in tokens)
        if ended and tokens:
            assert found[-1] == len(tokens)


def slow_line_boundaries(tokens, ended):
    """One line break at a time, blank lines to the line before."""
    found, seen_text = [], False
    for i, token in enumerate(tokens):
        text = TEXTS[token]
        if text.strip():
            head = text.rpartition("\n")[0]
            is_line = "\n" in text and (seen_text or found or head.strip())
            seen_text = True
            if is_line:
                found.append(i + 1)
                seen_text = False
        elif "\n" in text and seen_text:
            found.append(i + 1)
            seen_text = False
        elif "\n" in text and found:
            found[-1] = i + 1
    if ended and tokens and (not found or found[-1] != len(tokens)):
        if found and not seen_text:
            found.pop()
        found.append(len(tokens))
    return tuple(found)


@pytest.mark.parametrize("ended", [False, True])
def test_line_equals_oracle(ended):
    rng = random.Random(1)
    segmenter = Segmenter("line", TEXTS)
    for _ in range(500):
        tokens = random_draft(rng)
        found = segmenter.boundaries(tokens, ended=ended, max_segments=1000)
        assert found == slow_line_boundaries(tokens, ended), cut(tokens, found)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("n", [0, 1, 3, 5, 6, 7])
def test_fixed_equals_oracle(n, ended):
    expected = [b for b in range(1, n + 1) if b % 3 == 0 or (ended and b == n)]
    segmenter = Segmenter("fixed:3", TEXTS)
    assert segmenter.boundaries([0] * n, ended=ended, max_segments=99) == tuple(
        expected
    )


# By segmenter: texts with "|" where it cuts them.
CUTS = {
    "line": [
        "no line break",
        "one\n|two\n|tail",
        "one\n\n|two.\n\n|",
        "one\n  \n\n|two",  # blank lines go to the segment before
        "def f():\n    |return",  # the break's token takes the indentation along
        "\n\none\n|two",  # leading blank lines go to the segment after
        "one.\n9| 2\n|",  # a token over the break takes letters of the next line
    ],
    "paragraph": [
        "one\ntwo.\n\n|three\n \n|four\n",
        "one\ntwo",
        "one\n\n  |two",
    ],
    "sentence": [
        "It is 3.14.| It is 2.71!| Why?| Yes.|",
        "See e.g. this, i.e. that.| Dr. Who vs. Mr. X met J. Doe.| End.|",
        "1. Take two.| Then one.\n|2. Stop.|",
        "1. **1. Take two**: of these.| Then one.\n|2. **2. Stop**: it.|",
        "3) __12. Stop__: now.|",
        "Step 3. Add them.|",
        "Pens, etc. are here.| Pens, etc.| They left at 5 p.m. today.|",
        "See no. 5 and fig. 2.| The answer is no.| Right.|",
        'He said "go."| She went.| (Really!)| Ok.|',
        'I translate "Where is it?" as follows.| I ask "what now?" or "why?"| Yes.|',
        "Wait... what?| Hm...| Then no.|",
        "Visit example.com now.| v1.2.3 is out?!| Yes.|",
        "No mark\n|- item one\n|- item two",
        "你好。|再见！|x",
        "It is **done.**| Good.|",
        "the total is 3.| Then 4.|",
    ],
    "step": [
        "Step 1: a is 3.\n|Step 2: b is 4. So 7.\n|Answer: 7",
        "Step 1: a\nmore of a\n|Step 2: b",
        "1. a\n|2. b\n   more\n|3) c\n|So the answer is 7",
        "intro\n|- a\n|- b\n|  * c\n|Therefore, d",
        "First, a\nb\n|Then b\nc\n|Finally, c",
        "some\nlines\n\n|more\nlines",
        "a\nb\n|#### 42",
        "a\nb\n|$\\boxed{7}$",
        "a\nb\n|**Step 2:** c\n|## Next part\nd\n|The final answer is 3",
        "Step 1: it is\n3.14 exactly\n|Step 2: b",
        "8. a.\n9|. b\n|• c",  # one token holds the break and the next number
        "one line\n|another line\n|tail",
        "One sentence.| Another one.| And a tail",
        "\n\nOne sentence.| Another one.| And a tail",
        "Step 1: all in one line.| Step 2: indeed.| So",
    ],
    "code": [
        "x = 1\n|y = 2\n|z",
        "f(\n    1,\n    2,\n)\n|y = [\n1,\n]\n|",
        'def f(x):\n"""Doc.\n\nMore.\n"""\n|return x\n|f(2)\n|',
        "x = 1 + \\\n 2\n|y = 3\n|",
        "if x:\n y = 1\n|else:\n y = 2\n|z = 3\n|",
        "@cache\ndef f():\n pass\n|",
        "# About (x\nx = '('  # it's (\n|y = \"[\"\n|",
        "d = {\n'a': 1,\n}\n|return {\n2: 3,\n}\n|",
        "int f(int x) {\n a(x);\n| return x;\n}\n|int y;\n|",
        "void f()\n{\n // odd (\n x = 1;\n}\n|",
        "foo(function() {\n a();\n| b();\n});\n|",
        "if (x) {\n a;\n} else {\n b;\n}\n|",
        "Here is it:\n\n```python\nx = 1\n|```\n|Done\n|",
        "f(a,\n\nx = 1\n|y = 2\n|",  # a blank line closes a stray bracket
    ],
}


@pytest.mark.parametrize(
    ("name", "marked"), [(name, text) for name, texts in CUTS.items() for text in texts]
)
def test_cuts_of_each_segmenter(name, marked):
    """Red if a rule cuts elsewhere than where its lines, sentences or steps end."""
    found, expected = segment(name, marked)
    assert found == expected


def test_ended_draft_has_boundary_at_end():
    assert segment("line", "one\n|two|", ended=True)[0] == ["one\n", "two", ""]
    assert segment("line", "\n|", ended=True)[0] == ["\n", ""]
    # Blank remains of the draft do not become a segment of their own.
    assert segment("line", "one\n |", ended=True)[0] == ["one\n ", ""]


def test_empty_draft_has_no_boundary():
    for name in NAMES:
        for ended in (False, True):
            found = Segmenter(name, TEXTS).boundaries([], ended=ended, max_segments=4)
            assert found == ()


def test_paragraph_sees_line_break_before_draft():
    # The blank line completed by the draft's first token ends no segment of the draft.
    found, _ = segment("paragraph", "\ntwo\n\n|three", previous_text="one\n")
    assert found == ["\ntwo\n\n", "three"]
    found, _ = segment("paragraph", "two\n\n|three", previous_text="one\n\n")
    assert found == ["two\n\n", "three"]


def test_sentence_sees_text_before_draft():
    assert segment("sentence", "g. this.|", previous_text="as e.")[0][0] == "g. this."
    assert segment("sentence", ". Add it.|", previous_text="\n3")[0][0] == ". Add it."
    assert segment("sentence", ".| Add it.|", previous_text="is 3")[0][0] == "."


def test_step_cuts_at_end_of_ended_draft():
    found, expected = segment("step", "Step 1: a\n|Answer: 7|", ended=True)
    assert found == expected


@pytest.mark.parametrize("tail", ["", "S", "Step", "**St", "2", "Step 2"])
def test_step_cuts_finished_step_before_undecided_line(tail):
    found, expected = segment("step", f"Step 1: a\n|Step 2: b\n|{tail}")
    assert found == expected


def test_step_waits_for_line_that_goes_on():
    found, _ = segment("step", "Step 1: a\n|Step 2: b\nand this goes on for")
    assert found == ["Step 1: a\n", "Step 2: b\nand this goes on for"]


def test_step_sees_header_before_draft():
    found, _ = segment("step", " is 7.\n|", previous_text="x\nStep 4: it")
    assert found == [" is 7.\n", ""]
    # The line break alone is blank, so the step after it starts the first segment.
    found, _ = segment("step", "\nStep 5: a\n|Step 6: b", previous_text="Step 4: x")
    assert found == ["\nStep 5: a\n", "Step 6: b"]


PYTHON = "```python\n# Add. One.\ndef f(x):\n    y = 1\n\n    return x\n"


@pytest.mark.parametrize(
    ("name", "previous_text", "marked"),
    [
        # Statements, never comments or lines within brackets.
        ("sentence", "", "Here it is:\n|```python\nx = 1\n|y = 2\n```\n|Done.|"),
        ("sentence", "", '```json\n{\n"a": 1,\n"b": "Yes. No."\n}\n```\n|So.| A'),
        ("sentence", "```python\nx = [\n", "1,\n2]\n|y = 3\n|z"),
        ("sentence", "```\nx = 1\n```\n", "That is it.| Yes"),
        # Whole definitions.
        ("step", "", f"First, run:\n{PYTHON}\n|def g():\n    pass\n```\n|Then go."),
        ("step", "", f"It is:\n|{PYTHON}```\n|".replace("\n\n  ", "\n\n  |")),
        ("step", "", "Step 1: run\n```\nStep 2\n# no heading\n```\n|Step 2: b"),
        ("paragraph", "", f"Run\n\n|{PYTHON}\n|def g():\n    pass\n```\n\n|Go."),
        ("paragraph", "", f"{PYTHON}\n"),  # the definition may go on
        # The block began before the text that is seen.
        ("step", "```\n    y = 1\n", "z\n```\nIt is.\n\n|Then b"),
    ],
)
def test_code_between_fences_is_no_prose(name, previous_text, marked):
    """Red if a block is cut at each line, at a comment or inside a definition."""
    found, expected = segment(name, marked, previous_text=previous_text)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "previous_text", "marked"),
    [
        ("sentence", "it is 12", ". T|hen 3"),
        ("sentence", "it is 12", "."),
        ("sentence", "it is 12", ". "),
        ("sentence", "it is 12", ".5 kg."),
        ("sentence", "", "One.\n|Two. T|hree etc. and e.g. this (or not). S|o"),
        ("sentence", "", "你好。|再见！|x"),
        ("step", "it is 12", ". T|hen 3"),
        ("step", "it is 12", "."),
        ("step", "Step 3: it is 12", ". Then 3"),
        ("step", "", "Step 3: it is 12. Then 3"),
        ("step", "", "Step 3: it is 12. Then\n|3"),
        ("step", "Step 3: it is\n12", ". Then 3"),
        ("step", "Step 3: it is 12.\n \n", "It is. T|hen 3"),
        ("step", "Step 3: it is 12", ". Then\n|Step 4"),
    ],
)
def test_settled_sentences_end_where_the_next_begins(name, previous_text, marked):
    """Red if a mark that may be inside a number ends a sentence, or one ends a step."""
    parts = marked.split("|")
    tokens = tokenize("".join(parts))
    found = Segmenter(name, TEXTS).boundaries(
        tokens, ended=False, max_segments=99, previous_text=previous_text, settled=True
    )
    assert cut(tokens, found) == parts


def test_code_sees_open_bracket_and_string_before_draft():
    found, _ = segment("code", "1,\n2)\n|x = 1\n|", previous_text="y = f(0,\n")
    assert found == ["1,\n2)\n", "x = 1\n", ""]
    found, _ = segment("code", 'a\nb"""\n|x = 1\n|', previous_text='s = """one\n')
    assert found == ['a\nb"""\n', "x = 1\n", ""]
    # The string began out of sight: its end must not look like a beginning.
    found, _ = segment("code", "x = 1\n|y = 2\n|", previous_text='of it.\n    """\n')
    assert found == ["x = 1\n", "y = 2\n", ""]


def test_too_many_boundaries_are_thinned_evenly():
    segmenter = Segmenter("fixed:1", TEXTS)
    tokens = [IDS["a"]] * 10

    def thinned(k):
        return segmenter.boundaries(tokens, ended=False, max_segments=k)

    assert thinned(10) == tuple(range(1, 11))
    assert thinned(5) == (2, 4, 6, 8, 10)
    assert thinned(4) == (2, 5, 7, 10)
    assert thinned(1) == (10,)
    with pytest.raises(ValueError, match="max_segments is 0"):
        thinned(0)


def test_ids_beyond_the_table_count_as_nothing():
    tokens = [IDS["a"], 10**6, IDS["\n"], 10**6]
    segmenter = Segmenter("line", TEXTS)
    assert segmenter.boundaries(tokens, ended=False, max_segments=9) == (3,)
    assert segmenter.boundaries(tokens, ended=True, max_segments=9) == (4,)


def test_segmenter_refuses_unknown_name():
    with pytest.raises(ValueError, match="expected one of line"):
        Segmenter("word", TEXTS)


def wrap(tokenizer):
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def test_token_texts_of_byte_level_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "Ġa", "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = wrap(tokenizer)
    texts = build_token_texts(wrapped)
    assert len(texts) == len(wrapped)
    ids = wrapped.get_vocab()
    assert texts[ids["Ġa"]] == " a"
    assert texts[ids["Ġ"]] == " "
    assert texts[ids["ĊĊ"]] == "\n\n"
    assert texts[ids["Ã"]] == "�"  # half of "é"
    assert texts[ids["<|end|>"]] == ""
    assert texts[ids["<think>"]] == "<think>"
    assert "".join(texts[t] for t in wrapped.encode(" a b\n\n. a")) == " a b\n\n. a"


def test_token_texts_of_sentencepiece_like_tokenizer():
    pieces = ["▁", "a", "b", "▁a", "<0x0A>", "<0xC3>", "."]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    texts = build_token_texts(wrap(tokenizer))
    assert texts == [" ", "a", "b", " a", "\n", "�", ".", "", "<think>"]


def test_a_wide_indent_takes_no_time():
    """Red if a line of blanks holds up every request of a server."""
    started = time.process_time()
    line = " " * 50_000 + "x y z w v"
    assert not UNDECIDED.match(line)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("line", "is_open"),
    [
        *[
            (text, True)
            for text in ("", "  ", "St", "- St", "  **Step", "Step 1", "a b")
        ],
        *[(text, True) for text in ("- ", "-  ab", "Step ", "#", "# ab cd")],
        *[(text, False) for text in ("a b c", "Step 1234", "Step 1:", "- a - b")],
    ],
)
def test_what_a_line_may_still_become(line, is_open):
    """Red if a possessive expression gives up where the greedy one found a way."""
    greedy = UNDECIDED.pattern.replace("*+", "*")
    assert bool(re.match(greedy, line)) == bool(UNDECIDED.match(line)) == is_open


@pytest.mark.parametrize(
    ("rule", "piece"),
    [
        ("step", "."),
        ("sentence", "?!"),
        ("code", '\\"'),
        ("code", "\\'"),
        ("code", "`a"),
    ],
)
def test_long_runs_of_one_mark_are_cut_in_linear_time(rule, piece):
    """Red if each mark of a client's text has the rest of the run looked at: seconds,
    in which the scheduler serves nobody."""
    texts = [piece, "\n"]

    def work(num):
        tokens = [*[0] * num, 1]
        started = time.process_time()
        Segmenter(rule, texts).boundaries(tokens, ended=True, max_segments=9)
        return time.process_time() - started

    short = min(work(8_000) for _ in range(3))
    assert min(work(32_000) for _ in range(3)) < 12 * short  # quadratic: 16
