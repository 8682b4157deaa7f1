"""How a state becomes tokens, for every stage alike.

A state is a list of chat messages (`State`); an action is "Thought: ...\\nAction: ..." (`react`, `parse_action`).
`Chat` turns messages into tokens by the model's own chat template, one run of tokens a message; a checkpoint's
`Rendering` says which aids it reads with.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# ------------------------------------------------------------------------------------------------- states and actions


@dataclasses.dataclass(frozen=True)
class State:
    """s_t: the chat messages up to the last observation, and the task's sentence."""

    messages: tuple[tuple[str, str], ...]  # (role, content), role "user" or "assistant" in turns
    task: str = ""

    def then(self, action: str, observation: str) -> State:
        return State((*self.messages, ("assistant", action), ("user", observation)), self.task)

    @staticmethod
    def first(env: Any, observation: str, info: dict) -> State:
        """ETO's layout: the environment's instruction, "OK", the first observation without its prefix."""
        return State((("user", env.instruction), ("assistant", "OK"), ("user", observation)), info["task"])

    @staticmethod
    def load(messages: list[dict], task: str = "") -> State:
        return State(tuple((m["role"], m["content"]) for m in messages), task)

    def dump(self) -> list[dict]:
        return [{"role": role, "content": content} for role, content in self.messages]


def react(thought: str, action: str) -> str:
    return f"Thought: {thought}\nAction: {action}" if thought else f"Action: {action}"


def parse_action(text: str) -> str:
    """The executable part: what follows the first "Action:". Without one the environment gets the text as it is,

    which it answers with its own error message: an action that can't be parsed is data, not an exception."""
    return text.split("Action:", 1)[-1].strip()


def action_key(text: str) -> str:
    """Actions with equal keys are the same child of a node ("child nodes that differ", Alg. 2)."""
    return " ".join(parse_action(text).split()).lower()


def uniforms(n: int, *key: Hashable) -> np.ndarray:
    """n numbers in [0, 1) that depend on the key alone: (seed, task, node, candidate), not on what else is running."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(n)


# ---------------------------------------------------------------------------------------------------- text into tokens


@dataclasses.dataclass
class Rendering:
    """How a checkpoint reads and writes; kept in its folder as `policy.json`, so that no later stage can disagree.

    The defaults are the paper's. The four aids are for models too small to have learned them from pretraining.
    """

    temperature: float = 0.7  # App. A.2
    max_new_tokens: int = 256
    candidates: str = "free"  # "valid": only what the environment would act on, by trie-constrained decoding
    mark_matches: bool = False  # a mark behind each word of the task, in observations, thoughts and actions
    compact: bool = False  # no instruction turn; in a page neither the task again nor a page shown before
    markov: bool = False  # the last observation alone, for an environment where it says all

    FILE = "policy.json"

    def save(self, folder: Path) -> None:
        (folder / self.FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Rendering:
        file = Path(folder) / cls.FILE
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else cls()


MARK = "✓"
_WORD = re.compile(r"\$?[^\W_]+(?:[.'-][^\W_]+)*")
_LIMIT = re.compile(r"price lower than (\d+\.\d+) dollars")
_STOP_WORDS = frozenset("a an and are as at be by for from i in is it me my of on or than that the to with you".split())  # noqa: SIM905


@functools.lru_cache(maxsize=4096)
def task_words(task: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(task)) - _STOP_WORDS


@functools.lru_cache(maxsize=100_000)
def mark(text: str, task: str) -> str:
    """ "red cotton shirt" for the task "a red shirt" -> "red ✓ cotton shirt ✓"; so a price within its limit too."""
    words, limit = task_words(task), _LIMIT.search(task)

    def marked(word: str) -> str:
        within = limit and re.fullmatch(r"\$\d+\.\d+", word) and float(word[1:]) <= float(limit[1])
        return f"{word} {MARK}" if within or word.lower() in words else word

    return _WORD.sub(lambda m: marked(m[0]), text)


def unmark(text: str) -> str:
    return text.replace(f" {MARK}", "").replace(MARK, "")


SAME_PAGE = "(same page)"


class Chat:
    """Messages -> tokens, one run a message, so that a state's tokens are a prefix of every later state's.

    A chat template is read off once as five strings around the contents,

        begin USER ask lead ASSISTANT stop turn USER ask lead ASSISTANT stop ...

    where `lead` is a space or nothing, and `stop` ends with the token that ends the assistant's turn. What the
    assistant writes, `stop` included, is what Eq. (5) trains; everything else is the user's.
    """

    PLAIN = (  # for a model without a template of its own
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\nAssistant: ' }}"
        "{% else %}{{ m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
    )

    def __init__(self, tokenizer: Any, rendering: Rendering) -> None:
        self.tokenizer, self.rendering = tokenizer, rendering
        probe = [{"role": role, "content": f"§{i}§"} for i, role in enumerate(["user", "assistant"] * 2)]
        template = tokenizer.chat_template or self.PLAIN
        text = tokenizer.apply_chat_template(probe, chat_template=template, tokenize=False)
        self.begin, self.ask, after, *_ = re.split(r"§\d§", text)
        # A space before the assistant's words is the first word's, as in any text; SentencePiece adds it by itself.
        without = self.ask.rstrip(" ")
        prefixed = tokenizer.convert_ids_to_tokens(self._ids("a"))[0].startswith("▁")
        self.ask, self.lead = without, "" if prefixed else self.ask[len(without) :]
        # The turn ends with the first special token behind the assistant's words, whether it has a name or not.
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        specials = [(after.find(t), t) for t in special if t in after]
        if specials:
            at, token = min(specials)
            self.stop, self.turn = after[: at + len(token)], after[at + len(token) :]
        else:
            self.stop, self.turn = tokenizer.eos_token, after
        self.stop_id = self._ids(self.stop)[-1]
        self._ids = functools.lru_cache(maxsize=100_000)(self._ids)  # type: ignore[method-assign]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def message_tokens(self, state: State) -> list[list[int]]:
        """One list of tokens for each message of the state; the last user message's ends with the generation prompt."""
        r, runs, seen = self.rendering, [], set()
        messages = state.messages[2:] if r.compact and state.messages[1:2] == (("assistant", "OK"),) else state.messages
        if r.markov:
            messages = messages[-1 - (messages[-1][0] == "assistant") :]
        for i, (role, content) in enumerate(messages):
            if role == "assistant":
                runs.append(self.action(content, state.task))
                continue
            if r.compact and i:
                content = SAME_PAGE if content in seen else content.replace(state.task, "")
                seen.add(messages[i][1])
            content = mark(content, state.task) if r.mark_matches and i else content
            runs.append(self._ids((self.turn if i else self.begin) + content + self.ask))
        return runs

    def prompt(self, state: State) -> list[int]:
        return [token for run in self.message_tokens(state) for token in run]

    def action(self, text: str, task: str) -> list[int]:
        """Tokens of an action as the assistant writes it, the token that ends its turn included."""
        return self._ids(self.lead + (mark(text, task) if self.rendering.mark_matches else text) + self.stop)

    def text(self, ids: Sequence[int]) -> str:
        """Tokens that a model wrote -> the action's text, as the environment and the tree files hold it."""
        ids = list(ids)
        ids = ids[: ids.index(self.stop_id)] if self.stop_id in ids else ids
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return (unmark(text) if self.rendering.mark_matches else text).strip()
