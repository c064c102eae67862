"""Examples for `headrace route train`: what two quantisations of the embedded model answer, and how far they agree.

    python benchmarks/difficulty_data.py --examples 400 examples.jsonl
    headrace route train examples.jsonl -o difficulty.json

Prompts are made up of `difficulty_words.json` by a seed: facts, sums, yes or no, copying, counting, sorting into
classes, translations, lists, explanations, stories, code. Each says its kind, so that a classifier can be tried on
kinds that it was not trained on. Both variants answer greedily; agreement is the F1 of their words, as the router
measures it. It says nothing of other models. Examples are added to a file that is there already; its prompts are not
asked again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mesh import BenchError, Mesh

from headrace import _gateway

#: What prompts are made of, by kind.
WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("difficulty_words.json").read_text(encoding="utf-8"))


def made_up(rng: random.Random) -> tuple[str, list[dict[str, str]], int]:
    """Its kind, a conversation, and the longest answer."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 12)

    def one(of: str) -> str:
        return rng.choice(WORDS[of])

    country, thing, other, word = one("countries"), one("things"), one("things"), one("words")
    topic, sentence, task, name = one("topics"), one("sentences"), one("tasks"), one("names")
    verb, language, more = one("verbs"), one("languages"), one("sentences")
    numbers = ", ".join(str(rng.randint(1, 99)) for _ in range(5))
    things = ", ".join(rng.sample(WORDS["things"], 4))
    kinds = {
        "capital": f"What is the capital of {country}?",
        "continent": f"Which continent is {country} in? Answer with one word.",
        "language": f"What language do people speak in {country}?",
        "sum": f"What is {a} + {b}?",
        "difference": f"{max(a, b)} - {min(a, b)} = ?",
        "product": f"{a} * {c} = ?",
        "larger": f"Is {a} larger than {b}? Answer yes or no.",
        "even": f"Is {a} an even number? Answer yes or no.",
        "heavier": f"Is a {thing} heavier than a {other}?",
        "alive": f"Is a {thing} alive? Answer yes or no.",
        "repeat": f"Repeat exactly: {sentence}",
        "repeat number": f"Repeat this number: {a}{b}{c}",
        "repeat words": f"Repeat this word three times: {thing}",
        "first word": f"What is the first word of this sentence? {sentence}",
        "count on": f"Continue counting: {a}, {a + 1}, {a + 2},",
        "alphabet": f"Which letter comes after {chr(97 + a % 25)} in the alphabet?",
        "spell": f"Spell the word {thing} letter by letter.",
        "letters": f"How many letters are in the word {thing}?",
        "sentiment": f"Is this review positive or negative? {sentence}",
        "question or statement": f"Classify the sentence as question or statement: {sentence}",
        "odd one out": f"Which of these does not belong: {a}, {b}, {c}, {thing}?",
        "opposite": f"What is the opposite of {word}?",
        "synonym": f"Give one word that means the same as {word}.",
        "plural": f"What is the plural of {thing}?",
        "past": f"What is the past tense of {verb}?",
        "translate word": f"Translate 'to {verb}' into {language}.",
        "translate": f"Translate into {language}: {sentence}",
        "list": f"List three things that you can do with a {thing}.",
        "sort": f"Sort these numbers from small to large: {numbers}",
        "sort words": f"Sort these words by the alphabet: {things}",
        "largest": f"Which of these numbers is the largest: {numbers}?",
        "summary": f"Summarize in one sentence: {sentence} {more} {one('sentences')}",
        "extract": f"Extract every name and number from this text: {sentence}",
        "json": f'Answer as JSON with the keys "name" and "age": {name} is {a} years old.',
        "rewrite": f"Rewrite this politely: {sentence}",
        "upper": f"Write in capital letters: {sentence}",
        "explain": f"Explain {topic} to a child.",
        "define": f"Define {topic} in one sentence.",
        "why": f"Why is {topic} important? Give at least two reasons.",
        "compare": f"Compare {topic} and {one('topics')} step by step.",
        "story": f"Write a short story about a {thing} and a {other}.",
        "poem": f"Write a poem about {topic}.",
        "email": f"Write an email to a colleague in {country} about {topic}.",
        "slogan": f"Write a slogan for a company that makes a new kind of {thing}.",
        "code": f"Write a Python function that {task}.",
        "sql": f"Write a SQL query that counts the rows of the table {thing}s where price > {a}.",
        "read code": f"What does this code do?\n```python\nfor i in range({c}):\n    print(i * {a})\n```",
        "word problem": f"A shop sells {a} {thing}s a day at {c} dollars each. How much is it in {b % 7 + 2} days? "
        "Go step by step.",
        "age": f"{name} is {a} years old. How old was {name} {c} years ago?",
        "complete": f"Complete the sentence: The {thing} is",
        "colour": f"What colour is a {thing}?",
        "year": f"In which century was the year {1000 + a * 10 + c}?",
        "hello": f"Hello! I am {name}.",
        "how are you": rng.choice(["Hi, how are you today?", "Good morning!", "Hello there, what can you do?"]),
        "thanks": rng.choice(["Thanks, that was helpful.", "Thank you very much!", "OK, bye."]),
        "French": f"Qu'est-ce que c'est, {topic} ?",
        "German": f"Was ist die Hauptstadt von {country}?",
        "plan": f"Design an experiment that shows {topic}. It must be safe, cheap and take exactly {c} minutes.",
        "recipe": f"Give me a recipe with {thing} and {other}.",
        "opinion": f"Should children learn about {topic}? Argue for both sides.",
    }
    kind = rng.choice(list(kinds))
    messages = [{"role": "user", "content": kinds[kind]}]
    if rng.random() < 0.15:
        before = [{"role": "user", "content": rng.choice(list(kinds.values()))}]
        messages = [*before, {"role": "assistant", "content": "Yes, of course."}, *messages]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "Answer briefly."})
    return kind, messages, rng.choice([2, 4, 8, 16, 32])


def ask(address: str, model: str, example: dict[str, Any]) -> str:
    """What the model says, greedily, computed anew."""
    connection = http.client.HTTPConnection(address, timeout=300)
    body = {key: example[key] for key in ("messages", "max_tokens")} | {"model": model, "temperature": 0}
    headers = {"Content-Type": "application/json", "x-headrace-cache": "bypass"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    content = json.loads(connection.getresponse().read())
    connection.close()
    if "choices" not in content:
        raise BenchError(f"{model} did not answer: {content}")
    return str(content["choices"][0]["message"]["content"] or "")


def asked(example: dict[str, Any]) -> str:
    """What tells it from others."""
    return json.dumps([example["messages"], example["max_tokens"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--large", default="Q8_0")
    parser.add_argument("--small", default="Q4_0")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng, examples = random.Random(given.seed), {}
    known = (
        {asked(json.loads(line)) for line in given.output.open(encoding="utf-8")} if given.output.exists() else set()
    )
    while len(examples) < given.examples:
        kind, messages, max_tokens = made_up(rng)
        example = {"kind": kind, "messages": messages, "max_tokens": max_tokens}
        if asked(example) not in known:
            examples[asked(example)] = example
    with Mesh() as mesh, ThreadPoolExecutor(given.clients) as clients:
        start(mesh, {"large": given.large, "small": given.small})

        def both(example: dict[str, Any]) -> dict[str, Any]:
            large, small = (ask(mesh.http, model, example) for model in ("large", "small"))
            agreement = round(_gateway.route_compare("words", large, small), 4)
            return example | {"agreement": agreement, "large": large, "small": small}

        with given.output.open("a", encoding="utf-8") as file:
            for number, line in enumerate(clients.map(both, examples.values()), 1):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                if number % 50 == 0:
                    sys.stderr.write(f"{number} of {given.examples}\n")


def start(mesh: Mesh, models: dict[str, str], more: str = "") -> None:
    """The services, and a worker for each quantisation of the embedded model; ``more``: further configuration."""
    table = '[[models]]\nname = "{}"\nsource = "embedded"\nquantization = "{}"\n'
    mesh.config.write_text("".join(table.format(*model) for model in models.items()) + more)
    mesh.core()
    inner = {"scheduler": mesh.scheduler, "cache": mesh.cache, "metrics_address": "127.0.0.1:0"}
    for name in models:
        mesh.service("worker", name=name, model=name, worker_id=name, kv_tokens=8192, slots=8, **inner)


if __name__ == "__main__":
    main()
