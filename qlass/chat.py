"""How a state becomes tokens, for every stage alike.

A state is a list of chat messages (`State`); an action is "Thought: ...\\nAction: ..." (`react`, `parse_action`).
`Chat` turns messages into tokens by the model's own chat template, one list of tokens a message; a checkpoint's
`Rendering` says which aids it reads with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from qlass import UserError
from qlass.files import read_object
from qlass.tiny import MARK, mark, unmark, with_aids

# ------------------------------------------------------------------------------------------------- states and actions


@dataclasses.dataclass(frozen=True)
class State:
    """s_t: the chat messages up to the last observation, and the task's sentence."""

    messages: tuple[tuple[str, str], ...]  # (role, content), "user" and "assistant" in turns, perhaps after a "system"
    task: str = ""

    def then(self, action: str, observation: str) -> State:
        return State((*self.messages, ("assistant", action), ("user", observation)), self.task)

    @staticmethod
    def first(env: Any, observation: str, info: dict) -> State:
        """ETO's layout: the environment's instruction, "OK", the first observation without its prefix."""
        system = (("system", env.system),) if env.system else ()
        first = ("user", env.instruction), ("assistant", env.agreement), ("user", observation)
        return State((*system, *first), info["task"])

    @staticmethod
    def load(messages: list[dict], task: str) -> State:
        return State(tuple((m["role"], m["content"]) for m in messages), task)

    def dump(self) -> list[dict]:
        return [{"role": role, "content": content} for role, content in self.messages]


def react(thought: str, action: str) -> str:
    return f"Thought: {thought}\nAction: {action}" if thought else f"Action: {action}"


def parse_action(text: str) -> str:
    """The executable part: what follows the first "Action:" or, without one, the text as it is.

    Actions whose executable parts are equal are the same child of a node ("child nodes that differ", Alg. 2). Capitals
    and spaces count, as they do in the engines. To what it can't do the environment answers: data, not an exception.
    """
    return text.split("Action:", 1)[-1].strip()


def uniforms(n: int, *key: Hashable) -> np.ndarray:
    """n numbers in [0, 1) that depend on the key alone: (seed, task, node, candidate), not on what else is running."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(n)


# ---------------------------------------------------------------------------------------------------- text into tokens


# Where an answer goes on with what others say: ETO's own agents stop there.
RUN_ON = ("\nObservation:", "\nTask:", "\n---")
TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")  # in a chat template
WAY_OUT = ": give its tokenizer another chat_template"


@dataclasses.dataclass
class Rendering:
    """How a checkpoint reads and writes; kept in its folder as `policy.json`, so that no later stage can disagree.

    The defaults are the paper's. The aids (candidates, mark_matches, compact, markov) are for
    models too small to have learned such things from pretraining.
    """

    temperature: float = 0.7  # App. A.2
    max_new_tokens: int = 256
    candidates: str = "free"  # "valid": only what the environment would act on, by trie-constrained decoding
    mark_matches: bool = False  # a mark before each word of the task, in observations, thoughts and actions
    compact: bool = False  # no instruction turn; in a page neither the task again nor a page shown before
    markov: bool = False  # the last observation alone, for an environment where it says all
    top_p: float = 1.0  # of free text, as top_k and stop are; 1: all
    top_k: int = 0  # 0: all
    stop: tuple = RUN_ON  # texts that end an action, besides the end of the turn
    think: bool = False  # leave a reasoning model its <think>; else the prompt closes it at once
    truncate: str | None = None  # "oldest": the oldest turns go where a prompt is beyond the model's context
    date: str | None = None  # what a template that prints today's date prints instead
    # The first messages that it was cloned with, where they are not the environment's own.
    system: str | None = None
    instruction: str | None = None
    agreement: str | None = None

    FILE = "policy.json"

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or self.candidates not in ("free", "valid"):
            raise UserError(f"{self.FILE}: stop is a list of texts, candidates free or valid")
        self.stop = tuple(self.stop)

    def save(self, folder: Path) -> None:
        (folder / self.FILE).write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Rendering:
        file = Path(folder) / cls.FILE
        return cls(**read_object(file)) if file.exists() else cls()


class TooLong(UserError):
    """A prompt and an action are more than the model's context."""


class Chat:
    """Messages -> tokens, one list a message, so that a state's tokens are a prefix of every later state's.

    A chat template is read off once as strings around the contents,

        begin USER ask lead ASSISTANT stop turn USER ask lead ASSISTANT stop ...

    where `lead` is a space or nothing, and `stop` ends with the token that ends the assistant's turn; a system message
    stands between the two strings of `system` in place of `begin`. What the assistant writes, `stop` included, is what
    Eq. (5) trains; everything else is the user's. A message that holds the text of a control token stays text.
    """

    PLAIN = (  # for a model without a template of its own
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\nAssistant: ' }}"
        "{% else %}{{ m.content ~ eos_token ~ '\n' }}{% endif %}{% endfor %}"
    )
    NO_THOUGHT = "<think>\n\n</think>\n\n"

    def __init__(
        self, tokenizer: Any, rendering: Rendering, context: int | None = None, ends: Iterable[int] = ()
    ) -> None:
        """context: the model's, in tokens; None: as long as need be. ends: ids that end a turn too, by the model's
        generation config. UserError where the chat template can't be read off."""
        self.tokenizer, self.rendering, self.context = tokenizer, rendering, context
        self._controls = any_of(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
        begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]  # as the tokenizer begins any text
        plain = "{{ bos_token }}" + self.PLAIN if begins else self.PLAIN
        self.template = tokenizer.get_chat_template() if tokenizer.chat_template else plain
        if "strftime_now" in self.template:  # today's date; prompts keep that of the checkpoint
            rendering.date = rendering.date or datetime.date.today().isoformat()
            day = datetime.date.fromisoformat(rendering.date)
            template = self.template.replace("strftime_now is defined", "true")
            self.template = TODAY.sub(lambda call: repr(day.strftime(call[2])), template)
            if "strftime_now" in self.template:
                raise UserError("its chat template prints another date each day" + WAY_OUT)
        self._read_template()
        if "<think>" in self.template and "</think>" not in self.ask and not rendering.think:
            self.ask += self.NO_THOUGHT
        self.lead = self.ask[len(self.ask.rstrip(" ")) :]  # a space before a word is the word's, as in any text
        self.ask = self.ask.rstrip(" ")
        self.stop_id = self._ids("", self.stop, "", "")[-1]
        self.stop_ids = {self.stop_id, *ends, tokenizer.eos_token_id} - {None}  # any of these ends what a model writes
        self._ids = functools.lru_cache(maxsize=100_000)(self._ids)  # type: ignore[method-assign]

    def save(self, folder: Path) -> None:
        """Tokenizer and rendering, beside the weights of a checkpoint."""
        self.tokenizer.save_pretrained(folder)
        self.rendering.save(folder)

    # ------------------------------------------------------------------------------------------- reading the template

    def _read_template(self) -> None:
        """Read the strings off two turns. UserError unless chats of one to four turns, and the prompts within, are
        written alike, with a system message and without."""
        roles = ["user", "assistant"] * 4
        self.begin, self.ask, after = self._around(roles[:4])[:3]
        self.system: list[str] = []
        with contextlib.suppress(jinja2.TemplateError, UserError):  # it knows no such role, or shows it elsewhere
            self.system = self._around(["system", *roles[:4]])[:2]
        # The turn ends with the first token of its own after the assistant's words, be it special or not.
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()} - {MARK}
        end = any_of(filter(str.strip, added)).search(after)
        written = after[: end.end()] if end else ""
        self.stop = written or self.tokenizer.eos_token
        self.turn = after[len(written) :]

        words = f"Thought: a\nAction: b{self.stop}"
        for front, n in itertools.product(filter(None, [[self.begin], self.system]), range(1, 9)):
            prompt = n % 2 == 1
            theirs = self._around(["system"] * (len(front) - 1) + roles[:n], words, prompt)
            ours = [*front, *([self.ask, after] * 4)[: n - 1], self.ask if prompt else written]
            # How a prompt ends may be less than what comes before an answer (a space), or more (<think>).
            ends = theirs[-1].startswith(ours[-1]) or (prompt and ours[-1].startswith(theirs[-1]))
            if theirs[:-1] != ours[:-1] or not ends:
                raise UserError(f"its chat template writes a chat of {n} messages otherwise than one of four{WAY_OUT}")

    def _around(self, roles: Sequence[str], inside: str = "", prompt: bool = False) -> list[str]:
        """What the template writes before, between and after the contents of messages with these roles.

        inside: a text that each content holds. UserError where it shows them otherwise than each once and in turn.
        """
        words = [f"§{i}{inside}§" for i in range(len(roles))]
        turns = State(tuple(zip(roles, words, strict=True))).dump()
        options = {"tokenize": False, "add_generation_prompt": prompt}
        shown = self.tokenizer.apply_chat_template(turns, chat_template=self.template, **options)
        shown = shown.replace(self.NO_THOUGHT, "")  # some write it in the last turn alone
        parts = re.split(f"({any_of(words).pattern})", shown)
        if parts[1::2] != words:
            raise UserError(f"its chat template does not show each message as it is, once and in turn{WAY_OUT}")
        return parts[::2]

    # ----------------------------------------------------------------------------------------------- tokens and actions

    def _ids(self, past: str, before: str, content: str, after: str) -> list[int]:
        """Tokens of the last three texts joined, as they are written after `past`, where SentencePiece adds no space as
        it does at a text's beginning. In the content, control tokens are no more than their characters."""
        from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

        text = before + mark_control_tokens(content, self._controls) + after
        past_ids = encode_marked_chat(self.tokenizer, past)
        ids = encode_marked_chat(self.tokenizer, past + text)
        if ids[: len(past_ids)] != past_ids:  # the text begins with a token that takes the space before it
            return encode_marked_chat(self.tokenizer, text)
        return ids[len(past_ids) :]

    def message_tokens(self, state: State) -> list[list[int]]:
        """One list of tokens for each message of the state; the last user message's ends with the generation prompt.

        A system message stands in one list with the user's first. Spaces at a message's ends are left out, as most
        templates do.
        """
        messages = [(role, content.strip()) for role, content in state.messages]
        past, before = "", self.begin
        lists: list[list[int]] = []
        if messages[0][0] == "system":
            if not self.system:
                raise UserError("its chat template has no system message in front: put it into the instruction")
            before = self.system[0] + messages.pop(0)[1] + self.system[1]
        for role, content in with_aids(messages, state.task, self.rendering):
            if role == "assistant":
                lists.append(self._ids(self.ask, self.lead, content, self.stop))
                past, before = self.stop, self.turn
            else:
                lists.append(self._ids(past, before, content, self.ask))
        return lists

    def action(self, text: str, task: str, prompt: int = 0) -> list[int]:
        """Tokens of an action as the assistant writes it, the token that ends its turn included.

        prompt: length of the prompt before it; TooLong where both are more than the model's context.
        """
        text = mark(text.strip(), task) if self.rendering.mark_matches else text.strip()
        ids = self._ids(self.ask, self.lead, text, self.stop)
        self._check(prompt, len(ids))
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Tokens that a model wrote -> the action's text, as the environment and the tree files hold it."""
        ids = list(itertools.takewhile(lambda token: token not in self.stop_ids, ids))
        return self.action_in(self.tokenizer.decode(ids, skip_special_tokens=not self.rendering.think))

    def action_in(self, text: str) -> str:
        """What a model wrote -> the action in it: without its thinking, and up to the first stop text.

        A thought that was cut before its end is no action, whatever stands in it.
        """
        if self.rendering.think:
            text = "" if "<think>" in text and "</think>" not in text else text
            text = self._controls.sub("", text.rpartition("</think>")[2])
        for stop in self.rendering.stop:
            text = text.split(stop, 1)[0]
        return (unmark(text) if self.rendering.mark_matches else text).strip()

    # -------------------------------------------------------------------------------------- within the model's context

    def prompt_tokens(self, state: State) -> list[list[int]]:
        """`message_tokens` of a prompt that leaves the model room for an action; TooLong where it does not. With
        --truncate, without the oldest turns as far as need be."""
        lists = self.message_tokens(state)
        action = self.rendering.max_new_tokens
        if self.rendering.truncate:
            room = (self.context or math.inf) - action
            front = self.stays(state)
            while sum(map(len, lists)) > room and len(lists) > front + 2:
                del lists[front : front + 2]
        self._check(sum(map(len, lists)), action)
        return lists

    def prompt(self, state: State) -> list[int]:
        return [token for tokens in self.prompt_tokens(state) for token in tokens]

    def _check(self, prompt: int, action: int) -> None:
        if prompt + action > (self.context or math.inf):
            raise TooLong(
                f"a prompt of {prompt:,} tokens and an action of {action:,} are more than the model's context of "
                f"{self.context:,}: --truncate oldest leaves out the oldest turns; --max-new-tokens is an action's"
            )

    def stays(self, state: State) -> int:
        """How many lists at the front of a prompt are never cut: the instruction, and the task where it comes apart."""
        apart = ("assistant", self.rendering.agreement or "OK") in state.messages[1:3]  # a system message may be first
        return 3 if apart and not self.rendering.compact and not self.rendering.markov else 1

    def is_cut(self, state: State) -> bool:
        """Does its prompt lack what --truncate leaves out?"""
        return len(self.prompt(state)) < sum(map(len, self.message_tokens(state)))

    def fits(self, state: State, action: str) -> bool:
        """Can the model read this state, cut as --truncate says, and write any action, this one too?"""
        try:
            self.action(action, state.task, len(self.prompt(state)))
        except TooLong:
            return False
        return True


def any_of(texts: Iterable[str]) -> re.Pattern:
    """Any of these texts, the longest first; of none, nothing."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))) or r"(?!)")
