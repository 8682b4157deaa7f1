"""How a state becomes tokens: by the model's own chat template, for every stage alike."""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from qlass import UserError
from qlass.files import read_object, warn_once
from qlass.messages import State
from qlass.tiny import MARK, Aids

LEAST = {"temperature": 0, "max_new_tokens": 1, "top_p": 0.01, "top_k": 0}
FLAGS = ("temperature", "top_p", "top_k", "stop", "max_new_tokens", "truncate")  # of a stage


@strict  # it refuses values of other types
@dataclasses.dataclass
class Rendering:
    """How a checkpoint reads and writes: its `policy.json`. The defaults are the paper's."""

    temperature: float | int = 0.7  # App. A.2
    max_new_tokens: int = 256
    candidates: Literal["free", "valid"] = "free"  # valid: those that the environment offers
    mark_matches: bool = False  # this, compact and markov: `tiny.Aids`
    compact: bool = False
    markov: bool = False
    top_p: float | int = 1.0  # of free text, like top_k and stop; 1: all
    top_k: int = 0  # 0: all
    # Texts that end an action, as the end of the turn does. ETO's own agents stop at these.
    stop: tuple[str, ...] | list[str] = ("\nObservation:", "\nTask:", "\n---")
    truncate: Literal["oldest", None] = None  # turns to leave out beyond the model's context
    q_at_end: bool = True  # QNet reads Q at the token that ends the turn; else at the one before
    date: str | None = None  # what a template prints for today's date
    # The first messages that it was cloned with, if they are not the environment's own.
    system: str | None = None
    instruction: str | None = None
    agreement: str | None = None

    FILE = "policy.json"

    def __post_init__(self) -> None:
        self.stop = tuple(filter(None, self.stop))
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is less than {least}")

    def save(self, folder: Path) -> None:
        text = json.dumps(vars(self), indent=1)
        (folder / self.FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, args: Any = None, names: Any = FLAGS) -> "Rendering":
        """A checkpoint's, but for what the flags of these names say."""
        file = Path(folder) / cls.FILE
        fields = read_object(file) if file.exists() else {}
        flags = {name: getattr(args, name, None) for name in names}
        fields |= {name: value for name, value in flags.items() if value is not None}
        try:
            return cls(**fields)
        except (TypeError, ValueError, StrictDataclassError) as error:
            raise UserError(f"{file}: {' '.join(str(error).split())}") from None


class TooLong(UserError):
    """A prompt and an action are more than the model's context."""


PLAIN = (  # for a model without a chat template
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\nAssistant: ' }}"
    "{% else %}{{ m.content ~ eos_token ~ '\n' }}{% endif %}{% endfor %}"
)
TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")  # in a chat template
WAY_OUT = ": give its tokenizer another chat_template"
CONTENT = "§Thought: a\nAction: b§"
# What an action may hold: printable ASCII, and letters that a tokenizer may change.
LETTERS = " ".join([*map(chr, range(33, 127)), *"½™éÉßüñ×°’“–中🙂"])


class Chat:
    """Messages -> tokens, one list per message: a state's tokens begin those of every later state.

    A chat template is read once, as strings around the contents:

        begin USER ask lead ASSISTANT stop turn USER ask lead ASSISTANT stop ...

    `lead` is a space or nothing. `stop` ends with the token that ends the assistant's turn. A
    system message stands between the two strings of `system`, which replace `begin`. Eq. (5)
    trains what the assistant writes, with `stop`. A control token in a message is mere text.
    UserError if such strings cannot say what the template writes, or tokens not what is said.
    """

    def __init__(self, tokenizer: Any, rendering: Rendering, context: int | None = None, ends=()):
        """context: the model's, in tokens; None: no limit. ends: more ids that end a turn."""
        tokenizer.split_special_tokens = tokenizer.clean_up_tokenization_spaces = False
        self.tokenizer, self.rendering, self.aids = tokenizer, rendering, Aids(rendering)
        self.context = context or math.inf
        self._read_template()
        added = tokenizer.added_tokens_decoder  # a config may name a mere letter as an end
        self.stop_ids = {self.stop_id, *ends, tokenizer.eos_token_id} & added.keys()
        written = "".join([self.begin, self.stop, self.turn, *self.system])  # by the template
        controls = []
        for i, token in added.items():
            text = token.content
            if token.special or i in self.stop_ids or (text.strip() and text in written):
                controls.append(text)
        self.controls = any_of(controls)
        self._check_tokens()
        self.encode = functools.lru_cache(maxsize=100_000)(self._encode)

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        self.rendering.save(folder)

    def _read_template(self) -> None:
        self.template = template_of(self.tokenizer, self.rendering)
        try:
            prompts = [self._render(["user", *["assistant", "user"] * n]) for n in range(4)]
        except jinja2.TemplateError as error:
            raise UserError(f"its chat template fails: {error}{WAY_OUT}") from error
        problem = "its chat template does not show all turns alike" + WAY_OUT
        if len(prompts[1]) != 4:  # around the contents of three messages
            raise UserError(problem)
        self.begin, ask, after, last = prompts[1]
        alike = prompts == [[self.begin, *[ask, after] * n, last] for n in range(4)]
        # A prompt may end before an answer's own space, or go on (<think></think>).
        if not alike or not (ask.startswith(last) or last.startswith(ask)):
            raise UserError(problem)
        self.system = []
        with contextlib.suppress(jinja2.TemplateError):  # it may refuse a system message
            strings = self._render(["system", *["user", "assistant"] * 3, "user"])
            self.system = strings[:2] if strings[2:] == prompts[3][1:] else []
        ask = max(ask, last, key=len)
        if ask.rstrip().endswith("<think>"):
            warn_once("its chat template opens <think> in each answer, and has no switch for it")
        self.ask = ask.rstrip(" ")
        self.lead = ask.removeprefix(self.ask)  # a space before a word is a part of the word
        # The turn ends with the first added token after the assistant's words, special or not.
        added = self.tokenizer.added_tokens_encoder
        ends = any_of(text for text in added if text.strip() and text != MARK)
        after = after if ends.search(after) else (self.tokenizer.eos_token or "") + after
        if not (end := ends.search(after)):
            raise UserError("its tokenizer has no eos_token, and its template ends no turn")
        self.stop, self.turn = after[: end.end()], after[end.end() :]
        self.stop_id = added[end[0]]

    def _render(self, roles: list[str]) -> list[str]:
        """What the template writes around the contents of a prompt, its own thinking off."""
        chat = [{"role": role, "content": CONTENT} for role in roles]
        options = {"tokenize": False, "add_generation_prompt": True, "chat_template": self.template}
        effort = "none" if re.search("['\"]none['\"]", self.template) else "low"
        off = {"enable_thinking": False, "thinking": False, "reasoning_effort": effort}
        return self.tokenizer.apply_chat_template(chat, **options, **off).split(CONTENT)

    def _check_tokens(self) -> None:
        """UserError if the tokenizer changes an action, or reads an end of a turn in a message."""
        ids = self._encode(self.ask, self.lead, LETTERS, self.stop)
        letters = self.tokenizer.decode(ids[:-1], skip_special_tokens=True).strip().split(" ")
        for letter, back in itertools.zip_longest(LETTERS.split(" "), letters):
            if letter != back:
                fault = f"its tokenizer gives an action's {letter!r} back as {back!r}"
                raise UserError(f"{fault}; has it all its files?")
        for end in self.tokenizer.convert_ids_to_tokens(list(self.stop_ids)):
            self._encode("", "", end, "")

    def _encode(self, past: str, before: str, content: str, after: str) -> list[int]:
        """Tokens of before + content + after behind `past`, as SentencePiece adds a space at a
        text's beginning alone. Control tokens in the content are read as their characters."""
        from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

        text = before + mark_control_tokens(content, self.controls) + after
        past_ids = encode_marked_chat(self.tokenizer, past)
        ids = encode_marked_chat(self.tokenizer, past + text)
        if ids[: len(past_ids)] != past_ids:  # the text's first token takes the space before it
            return encode_marked_chat(self.tokenizer, text)
        return ids[len(past_ids) :]

    def message_tokens(self, state: State) -> list[list[int]]:
        """One list of tokens per message; a user message's ends with the generation prompt.

        A system message shares the list of the user's first. Spaces at a message's ends are left
        out, as most templates do.
        """
        messages = [(role, content.strip()) for role, content in state.messages]
        past, before = "", self.begin
        if messages[0][0] == "system":
            if not self.system:
                raise UserError("its template has no system message: put it into the instruction")
            before = messages.pop(0)[1].join(self.system)
        lists = []
        for role, content in self.aids.show(messages, state.task):
            if role == "assistant":
                lists.append(self.encode(self.ask, self.lead, content, self.stop))
                past, before = self.stop, self.turn
            else:
                lists.append(self.encode(past, before, content, self.ask))
        return lists

    def action(self, text: str, task: str, prompt: int = 0) -> list[int]:
        """Tokens of an action as the assistant writes it, with the token that ends its turn unless
        Q is read before it; TooLong if they and `prompt` tokens exceed the model's context."""
        text = self.aids.mark(text.strip(), task)
        ids = self.encode(self.ask, self.lead, text, self.stop)
        self._check(prompt, len(ids))
        return ids if self.rendering.q_at_end else ids[:-1]

    def text(self, ids: Sequence[int]) -> str:
        """Tokens that a model wrote -> the action, as environment and tree files hold it."""
        ids = list(itertools.takewhile(lambda token: token not in self.stop_ids, ids))
        return self.action_in(self.tokenizer.decode(ids, skip_special_tokens=True))

    def action_in(self, text: str) -> str:
        """What a model wrote -> the action in it, up to the first stop text."""
        return self.aids.unmark(any_of(self.rendering.stop).split(text)[0]).strip()

    def prompt_tokens(self, state: State) -> list[list[int]]:
        """`message_tokens` of a prompt that leaves room for an action, or TooLong. With --truncate
        oldest, the oldest turns are left out as far as need be."""
        lists = self.message_tokens(state)
        length, action = sum(map(len, lists)), self.rendering.max_new_tokens
        front = self.stays(state) if self.rendering.truncate else len(lists)
        while length + action > self.context and len(lists) > front + 2:
            length -= len(lists.pop(front)) + len(lists.pop(front))
        self._check(length, action)
        return lists

    def prompt(self, state: State) -> list[int]:
        return list(itertools.chain(*self.prompt_tokens(state)))

    def _check(self, prompt: int, action: int) -> None:
        if prompt + action > self.context:
            raise TooLong(
                f"a prompt of {prompt:,} tokens and an action of {action:,} are more than the "
                f"model's context of {self.context:,}: --truncate oldest leaves out old turns"
            )

    def stays(self, state: State) -> int:
        """How many lists at the front of a prompt are never cut: instruction, agreement, task."""
        turns = [message for message in state.messages if message[0] != "system"]
        return 1 + self.aids.opening(turns) * self.aids.keep_instruction

    def is_cut(self, state: State) -> bool:
        """Does its prompt lack what --truncate leaves out?"""
        return len(self.prompt_tokens(state)) < len(self.message_tokens(state))

    def fits(self, state: State, action: str) -> bool:
        """Can the model read this state, cut as --truncate says, and write any action, and this?"""
        with contextlib.suppress(TooLong):
            return bool(self.action(action, state.task, len(self.prompt(state))))
        return False


def template_of(tokenizer: Any, rendering: Rendering) -> str:
    """The tokenizer's chat template, or PLAIN. Today's date becomes the checkpoint's date."""
    if not tokenizer.chat_template:
        begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
        return "{{ bos_token }}" + PLAIN if begins else PLAIN
    template = tokenizer.get_chat_template()
    if "strftime_now(" in template:
        rendering.date = rendering.date or str(datetime.date.today())
        day = datetime.date.fromisoformat(rendering.date)
        template = TODAY.sub(lambda call: repr(day.strftime(call[2])), template)
    if "strftime_now(" in template:
        raise UserError("its chat template prints another date each day" + WAY_OUT)
    return template


def any_of(texts: Iterable[str]) -> re.Pattern:
    """A pattern of any of these texts, the longest first; of none, it matches nothing."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
