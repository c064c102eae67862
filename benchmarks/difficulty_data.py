"""Examples for `headrace route train`: what two quantisations of the embedded model answer, and how far they agree.

    python benchmarks/difficulty_data.py --examples 400 examples.jsonl
    headrace route train examples.jsonl -o difficulty.json

Prompts are made up of the lists below by a seed: facts, sums, yes or no, copying, sorting into classes, translations,
lists, explanations, stories, code. Both variants answer greedily; agreement is the F1 of their words, as the router
measures it. It says nothing of other models.
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

COUNTRIES = [
    "France",
    "Japan",
    "Italy",
    "Egypt",
    "Brazil",
    "Canada",
    "Germany",
    "Spain",
    "India",
    "Norway",
    "Greece",
    "Peru",
    "Kenya",
    "Poland",
    "Chile",
]
THINGS = [
    "apple",
    "river",
    "train",
    "clock",
    "bird",
    "window",
    "mountain",
    "computer",
    "bread",
    "ocean",
    "violin",
    "winter",
    "garden",
    "bridge",
    "paper",
]
TOPICS = [
    "photosynthesis",
    "gravity",
    "inflation",
    "vaccines",
    "tides",
    "rainbows",
    "magnetism",
    "sleep",
    "fermentation",
    "earthquakes",
    "democracy",
    "compound interest",
    "recursion",
    "black holes",
    "evolution",
]
VERBS = [
    "to run",
    "to eat",
    "to write",
    "to sleep",
    "to sing",
    "to drive",
    "to think",
    "to build",
    "to open",
    "to close",
]
LANGUAGES = ["French", "German", "Spanish", "Italian"]
SENTENCES = [
    "The film was wonderful and I would watch it again.",
    "The food was cold and the waiter was rude.",
    "My order arrived two days late, but it works.",
    "I love this phone.",
    "The hotel was dirty and loud.",
    "It rained all day, so the match was moved to Sunday.",
    "Anna Smith met Paul Brown in Berlin on 3 May 2021.",
    "Our meeting begins at 10:30 in room 214.",
    "Please send the invoice to billing@example.com by Friday.",
    "The old bridge was closed because its pillars had cracks.",
]
TASKS = [
    "reverses a string",
    "sorts a list of numbers",
    "finds the largest number in a list",
    "counts vowels in a text",
    "checks whether a number is prime",
    "computes a factorial",
    "merges two dictionaries",
    "reads a file line by line",
]


def made_up(rng: random.Random) -> tuple[list[dict[str, str]], int]:
    """A conversation, and the longest answer."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 12)
    country, thing, other = rng.choice(COUNTRIES), rng.choice(THINGS), rng.choice(THINGS)
    topic, sentence, task = rng.choice(TOPICS), rng.choice(SENTENCES), rng.choice(TASKS)
    verb, language = rng.choice(VERBS), rng.choice(LANGUAGES)
    numbers = ", ".join(str(rng.randint(1, 99)) for _ in range(5))
    kinds = [
        f"What is the capital of {country}?",
        f"Which continent is {country} in? Answer with one word.",
        f"What is {a} + {b}?",
        f"{a} * {c} = ?",
        f"Is {a} larger than {b}? Answer yes or no.",
        f"Is a {thing} heavier than a {other}?",
        f"Repeat exactly: {sentence}",
        f"Repeat this word three times: {thing}",
        f"Is this review positive or negative? {sentence}",
        f"Classify the sentence as question or statement: {sentence}",
        f"Translate '{verb}' into {language}.",
        f"Translate into {language}: {sentence}",
        f"List three things that you can do with a {thing}.",
        f"Sort these numbers from small to large: {numbers}",
        f"Summarize in one sentence: {sentence} {rng.choice(SENTENCES)} {rng.choice(SENTENCES)}",
        f"Extract every name and number from this text: {sentence}",
        f"Explain {topic} to a child.",
        f"Why is {topic} important? Give at least two reasons.",
        f"Compare {topic} and {rng.choice(TOPICS)} step by step.",
        f"Write a short story about a {thing} and a {other}.",
        f"Write a poem about {topic}.",
        f"Write an email to a colleague in {country} about {topic}.",
        f"Write a Python function that {task}.",
        f"What does this code do?\n```python\nfor i in range({c}):\n    print(i * {a})\n```",
        f"A shop sells {a} {thing}s a day at {c} dollars each. How much is it in {b % 7 + 2} days? Go step by step.",
        f"Complete the sentence: The {thing} is",
        f"What colour is a {thing}?",
        f"How many letters are in the word {thing}?",
        "Hello!",
        "Hi, how are you today?",
        "Thanks, that was helpful.",
        f"Qu'est-ce que c'est, {topic} ?",
        f"Was ist die Hauptstadt von {country}?",
        f"Design an experiment that shows {topic}. It must be safe, cheap and take exactly {c} minutes.",
    ]
    messages = [{"role": "user", "content": rng.choice(kinds)}]
    if rng.random() < 0.15:
        earlier = [{"role": "user", "content": rng.choice(kinds)}, {"role": "assistant", "content": "Yes, of course."}]
        messages = earlier + messages
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "Answer briefly."})
    return messages, rng.choice([4, 8, 12, 16])


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
    while len(examples) < given.examples:
        messages, max_tokens = made_up(rng)
        examples[json.dumps([messages, max_tokens])] = {"messages": messages, "max_tokens": max_tokens}
    with Mesh() as mesh, ThreadPoolExecutor(given.clients) as clients:
        start(mesh, {"large": given.large, "small": given.small})

        def both(example: dict[str, Any]) -> dict[str, Any]:
            large, small = (ask(mesh.http, model, example) for model in ("large", "small"))
            agreement = round(_gateway.route_compare("words", large, small), 4)
            return example | {"agreement": agreement, "large": large, "small": small}

        with given.output.open("w", encoding="utf-8") as file:
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
