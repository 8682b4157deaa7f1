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
import typing
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from qlass import UserError
from qlass.records import Number, read_object, wrong
from qlass.tiny import MARK, mark, unmark, with_aids

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
    and spaces count, as they do in the engines: "Go to desk 1" does nothing where "go to desk 1" goes there.
    The environment answers that with its own error message: an action that can't be parsed is data, not an exception.
    """
    return text.split("Action:", 1)[-1].strip()


def uniforms(n: int, *key: Hashable) -> np.ndarray:
    """n numbers in [0, 1) that depend on the key alone: (seed, task, node, candidate), not on what else is running."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(n)


# ---------------------------------------------------------------------------------------------------- text into tokens


# Where an answer goes on with what others say: ETO's own agents stop there.
RUN_ON = ("\nObservation:", "\nTask:", "\n---")


@dataclasses.dataclass
class Rendering:
    """How a checkpoint reads and writes; kept in its folder as `policy.json`, so that no later stage can disagree.

    The defaults are the paper's. The four aids are for models too small to have learned them from pretraining.
    UserError where a setting is not what it can be.
    """

    temperature: Number = 0.7  # App. A.2
    max_new_tokens: int = 256
    candidates: str = "free"  # "valid": only what the environment would act on, by trie-constrained decoding
    mark_matches: bool = False  # a mark before each word of the task, in observations, thoughts and actions
    compact: bool = False  # no instruction turn; in a page neither the task again nor a page shown before
    markov: bool = False  # the last observation alone, for an environment where it says all
    top_p: Number = 1.0  # of free text, as top_k and stop are; 1: all
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
        self.stop = tuple(self.stop) if isinstance(self.stop, list) else self.stop
        if mistake := wrong(vars(self), (), typing.get_type_hints(Rendering), RANGES):
            raise UserError(mistake)

    def save(self, folder: Path) -> None:
        (folder / self.FILE).write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Rendering:
        file = Path(folder) / cls.FILE
        given = read_object(file) if file.exists() else {}
        try:
            return cls(**given)
        except (TypeError, UserError) as error:  # no such setting, or none of its values
            raise UserError(f"{file}: {error} (qlass/chat.py, Rendering, says what it may hold)") from None


RANGES = {  # of settings for which not every value of their type will do
    "temperature": lambda t: t >= 0,
    "max_new_tokens": lambda n: n >= 1,
    "candidates": ("free", "valid").__contains__,
    "top_p": lambda p: 0 < p <= 1,
    "top_k": lambda k: k >= 0,
    "stop": lambda texts: all(isinstance(text, str) and text for text in texts),
    "truncate": (None, "oldest").__contains__,
    "date": lambda date: date is None or re.fullmatch(r"\d{4}-\d\d-\d\d", date),
}
PROMPTED = ("max_new_tokens", "truncate")  # settings by flag that a prompt depends on, for the agent and QNet alike
RENDERED = ("temperature", "top_p", "top_k", "stop", "think", *PROMPTED)  # all that have a flag


class Chat:
    """Messages -> tokens, one list a message, so that a state's tokens are a prefix of every later state's.

    A chat template is read off once as strings around the contents,

        begin [system SYSTEM between] USER ask lead ASSISTANT stop turn USER ask lead ASSISTANT stop ...

    where `lead` is a space or nothing, and `stop` ends with the token that ends the assistant's turn. What these
    strings make of a conversation is compared with what the template writes. What the assistant writes, `stop`
    included, is what Eq. (5) trains; everything else is the user's. A message that holds the text of a control token
    stays text.
    """

    PLAIN = (  # for a model without a template of its own
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\nAssistant: ' }}"
        "{% else %}{{ m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
    )
    NO_THOUGHT = "<think>\n\n</think>\n\n"

    def __init__(
        self, tokenizer: Any, rendering: Rendering, vocabulary: int | None = None, context: int | None = None,
        ends: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """vocabulary, context: of the model; None: as large as they need be. ends: ids that end a turn too, by the
        model's generation config."""
        self.tokenizer, self.rendering, self.vocabulary, self.context = tokenizer, rendering, vocabulary, context
        tokens = tokenizer.added_tokens_decoder.values()
        self._controls = any_of(token.content for token in tokens if token.special)
        given = tokenizer.chat_template
        if isinstance(given, dict):  # several by name, as Command R's
            given = given.get("default") or next(iter(given.values()))
        if not given and tokenizer.eos_token is None:
            raise UserError("its tokenizer has neither a chat template nor an eos_token: set one of them")
        self.template = self._dated(given or self.PLAIN)
        roles = ["user", "assistant"] * 2
        try:
            self.begin, self.ask, after, *_ = self._around(roles)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            reason = f"can't show a chat of user and assistant ({error})"
            raise UserError(f"its chat template {reason}: give its tokenizer another one") from None
        self.system = self.between = None
        with contextlib.suppress(jinja2.TemplateError, ValueError):  # it knows no such role, or shows it elsewhere
            self.system, self.between, *_ = self._around(["system", *roles])
        # The turn ends with the first token of its own behind the assistant's words, be it special or not.
        added = any_of(token.content for token in tokens if token.content.strip() and token.content != MARK)
        end = added.search(after)
        self.stop, self.turn = (after[: end.end()], after[end.end() :]) if end else (tokenizer.eos_token, after)
        if self.stop is None:
            raise UserError("its chat template and its tokenizer name no token that ends an answer: set its eos_token")
        self.lead = ""
        self._compare("" if end else self.stop)

        if not given and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]:
            self.begin = tokenizer.bos_token + self.begin
        if "<think>" in self.template and "</think>" not in self.ask and not rendering.think:
            self.ask += self.NO_THOUGHT
        # A space before the assistant's words is the first word's, as in any text; SentencePiece adds it by itself.
        without = self.ask.rstrip(" ")
        if not tokenizer.convert_ids_to_tokens(self._ids("", "a", ""))[0].startswith("▁"):
            self.lead = self.ask[len(without) :]
        self.ask = without
        self.stop_id = self._ids(self.stop, "", "")[-1]
        self.stop_ids = {self.stop_id, *ends, tokenizer.eos_token_id} - {None}  # any of these ends what a model writes
        self._ids = functools.lru_cache(maxsize=100_000)(self._ids)  # type: ignore[method-assign]

    def save(self, folder: Path) -> None:
        """Tokenizer and rendering, beside the weights of a checkpoint."""
        self.tokenizer.save_pretrained(folder)
        self.rendering.save(folder)

    # ------------------------------------------------------------------------------------------- reading the template

    def _dated(self, template: str) -> str:
        """A template that prints today's date prints the checkpoint's, so that its prompts stay what they were."""
        if "strftime_now" not in template:
            return template
        self.rendering.date = self.rendering.date or datetime.date.today().isoformat()
        day = datetime.date.fromisoformat(self.rendering.date)
        forms = [f"%{pad}{letter}" for letter in "aAbBdmyYjeFHIMSp" for pad in ("-", "")]
        written = "".join(f".replace({form!r}, {day.strftime(form)!r})" for form in forms)
        return "{% macro strftime_now(form) %}{{ form" + written + " }}{% endmacro %}{{ '' }}" + template

    def _shown(self, messages: Sequence[tuple[str, str]], prompt: bool = False) -> str:
        """What the template writes."""
        turns = [{"role": role, "content": content} for role, content in messages]
        options = {"tokenize": False, "add_generation_prompt": prompt}
        return self.tokenizer.apply_chat_template(turns, chat_template=self.template, **options)

    def _around(self, roles: Sequence[str]) -> list[str]:
        """What the template writes before, between and behind the contents of messages with these roles."""
        parts = re.split(r"§(\d)§", self._shown([(role, f"§{i}§") for i, role in enumerate(roles)]))
        if parts[1::2] != [str(i) for i in range(len(roles))]:
            raise ValueError("not all messages are shown, each once and in turn")
        return parts[::2]

    def _compare(self, unwritten: str) -> None:
        """UserError unless chats of one to four turns, and the prompts within, read as the template writes them.

        unwritten: an end of the assistant's turns that is ours, where the template has none.
        """
        words = {"user": f"go to desk 1\nand look {self.stop.strip()} at it", "assistant": "Thought: a\nAction: b"}
        chat = [(role, words[role]) for role in ["user", "assistant"] * 4]
        for system in ([], [("system", "be brief")]) if self.system is not None else ([],):
            for n in range(1, 9):
                theirs = self._shown(system + chat[:n], prompt=n % 2 == 1)
                ours = "".join(itertools.chain(*self._pieces(system + chat[:n])))
                # A reasoning model may show that it did not think in its last turn alone.
                ours, theirs = (re.sub(any_of([self.NO_THOUGHT, unwritten]), "", text) for text in (ours, theirs))
                # How a prompt ends may be less than what comes before an answer (a space), or more (<think>).
                if not theirs.startswith(ours[: len(theirs)] if n % 2 else ours):
                    end = next(i for i in range(len(ours) + 1) if not theirs.startswith(ours[:i]))
                    there, here = (repr(text[max(0, end - 20) :][:40]) for text in (theirs, ours))
                    raise UserError(
                        f"its chat template can't be read off: of {n} messages it writes {there}, where two turns let "
                        f"expect {here}: give its tokenizer another chat_template"
                    )

    # --------------------------------------------------------------------------------------------------------- tokens

    def _pieces(self, messages: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
        """Of each message what stands before its words, these, and what stands behind; a system's are the user's."""
        before = self.begin
        for role, words in messages:
            if role == "system":
                if self.system is None:
                    raise UserError("its chat template has no system message in front: put it into the instruction")
                before = self.system + words + self.between
            elif role == "assistant":
                yield self.lead, words, self.stop
                before = self.turn
            else:
                yield before, words, self.ask

    def _ids(self, before: str, content: str, after: str) -> list[int]:
        """Tokens of the three texts joined; in the middle one, control tokens are no more than their characters."""
        if self._controls.search(content):
            from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

            ids = encode_marked_chat(self.tokenizer, before + mark_control_tokens(content, self._controls) + after)
        else:
            ids = self.tokenizer(before + content + after, add_special_tokens=False).input_ids
        if self.vocabulary and max(ids, default=0) >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            reason = f"of which the model of {self.vocabulary:,} knows nothing"
            raise UserError(f"the tokenizer writes {token!r}, {reason}: was the checkpoint's folder mixed from two?")
        return ids

    def message_tokens(self, state: State) -> list[list[int]]:
        """One list of tokens for each message of the state; the last user message's ends with the generation prompt.

        A system message stands in one list with the user's first. Spaces at a message's ends are left out, as most
        templates do.
        """
        messages = [(role, content.strip()) for role, content in state.messages]
        at = int(messages[0][0] == "system")
        messages[at:] = with_aids(messages[at:], state.task, self.rendering)
        return [self._ids(*piece) for piece in self._pieces(messages)]

    def prompt_tokens(self, state: State) -> list[list[int]]:
        """`message_tokens` of a prompt that leaves the model room for an action; UserError where it does not."""
        lists = self._cut(state)
        length = sum(map(len, lists))
        if length > self.room:
            ways = [] if self.rendering.truncate else ["--truncate oldest leaves out the oldest turns"]
            ways.append("--max-new-tokens makes room, as does a shorter --instruction")
            raise UserError(
                f"a prompt of {length:,} tokens and an action of up to {self.rendering.max_new_tokens:,} are more than "
                f"the model's context of {self.context:,}: {', '.join(ways)}"
            )
        return lists

    def prompt(self, state: State) -> list[int]:
        return [token for tokens in self.prompt_tokens(state) for token in tokens]

    @property
    def room(self) -> float:
        """Tokens that a prompt may have."""
        return math.inf if self.context is None else self.context - self.rendering.max_new_tokens

    def _cut(self, state: State) -> list[list[int]]:
        """`message_tokens`; with --truncate without the oldest turns, and at the last without the end of the last
        observation, as far as the model's context asks for it."""
        lists = self.message_tokens(state)
        if self.rendering.truncate is None:
            return lists
        oldest = slice(self.stays(state), self.stays(state) + 2)
        while sum(map(len, lists)) > self.room and len(lists) > oldest.stop:
            del lists[oldest]
        beyond = sum(map(len, lists)) - self.room
        ask = self._ids("", "", self.ask)
        if 0 < beyond <= len(lists[-1]) - len(ask):
            lists[-1] = lists[-1][: len(lists[-1]) - len(ask) - int(beyond)] + ask
        return lists

    def fits(self, state: State, action: str = "") -> bool:
        """Can the model read this state, cut as --truncate says, and write an action, this one too?"""
        prompt = sum(map(len, self._cut(state)))
        both = prompt + len(self.action(action, state.task))
        return prompt <= self.room and both <= (self.context or math.inf)

    def is_cut(self, state: State) -> bool:
        """Does its prompt lack what --truncate leaves out?"""
        cut = self.rendering.truncate is not None
        return cut and sum(map(len, self._cut(state))) < sum(map(len, self.message_tokens(state)))

    def stays(self, state: State) -> int:
        """How many lists at the front of a prompt are never cut: the instruction, and the task where it comes apart."""
        turns = [message for message in state.messages if message[0] != "system"]
        agreement = ("assistant", self.rendering.agreement or "OK")
        alone = self.rendering.compact or self.rendering.markov or turns[1:2] != [agreement]
        return 1 if alone else 3

    def action(self, text: str, task: str, prompt: int = 0) -> list[int]:
        """Tokens of an action as the assistant writes it, the token that ends its turn included.

        prompt: length of what it stands behind; UserError where both are more than the model's context.
        """
        text = mark(text.strip(), task) if self.rendering.mark_matches else text.strip()
        ids = self._ids(self.lead, text, self.stop)
        if prompt and prompt + len(ids) > (self.context or math.inf):
            raise UserError(
                f"a prompt of {prompt:,} tokens and an action of {len(ids):,} are more than the model's context of "
                f"{self.context:,}: --truncate oldest with --max-new-tokens {len(ids)} makes room for it"
            )
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """Tokens that a model wrote -> the action's text, as the environment and the tree files hold it."""
        ids = list(itertools.takewhile(lambda token: token not in self.stop_ids, ids))
        return self.said(self.tokenizer.decode(ids, skip_special_tokens=not self.rendering.think))

    def said(self, text: str) -> str:
        """What a model wrote -> the action in it: without its thinking, and up to the first stop text."""
        if self.rendering.think:
            text = self._controls.sub("", text.rpartition("</think>")[2])
        for stop in self.rendering.stop:
            text = text.split(stop, 1)[0]
        return (unmark(text) if self.rendering.mark_matches else text).strip()


def any_of(texts: Iterable[str]) -> re.Pattern:
    """Any of these texts, the longest first; of none, nothing."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))) or r"(?!)")
