"""Tokens of a state, by the model's own chat template, for every stage alike."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic

from qlass import UserError
from qlass.files import read_json, warn, write_json
from qlass.messages import State
from qlass.records import as_user_error
from qlass.settings import Number, Run
from qlass.tiny import MARK, Aids, mark

FLAGS = ("temperature", "max_new_tokens")  # of a stage
# A prompt may end with thoughts that it closes (<think></think>; the last form is Gemma 4's), which
# then stand before each answer here. Those it leaves open are refused: earlier turns lack them.
CLOSED = re.compile(r"(\s|<(\w+)>.*?</\2>|</\w+>|<\|channel>thought\s*<channel\|>)*", re.DOTALL)
CACHED = 8192  # messages; of 2,000 letters each they take 200 MB with their tokens
DAY = datetime.datetime(2024, 7, 26)  # today, to a template that asks; Llama 3's own


@pydantic.dataclasses.dataclass(config={"extra": "forbid"})
class Rendering:
    """A checkpoint's way to read and write, its `policy.json`. The defaults are the paper's."""

    temperature: Number = 0.7  # App. A.4
    max_new_tokens: pydantic.PositiveInt = 256
    candidates: Literal["free", "valid"] = "free"  # valid: those that the environment offers
    mark_matches: bool = False  # this, compact and markov: `tiny.Aids`
    compact: bool = False
    markov: bool = False
    # Texts that end an action, as the end of the turn does. ETO's own agents stop at these.
    stop: Sequence[str] = ("\nObservation:", "\nTask:", "\n---")
    q_at_end: bool = True  # QNet reads Q at the token that ends the turn; else at the one before
    # The first messages that it was cloned with, if they are not the environment's own.
    instruction: str | None = None
    agreement: str | None = None

    FILE: ClassVar[str] = "policy.json"

    @classmethod
    def load(cls, folder: Path, config: Run | None = None) -> Rendering:
        """The rendering of a checkpoint, with a stage's flags in the place of its fields."""
        file = folder / cls.FILE
        fields = read_json(file) if file.exists() else {}
        for name in FLAGS:
            if (value := getattr(config, name, None)) is not None:
                fields[name] = value
        with as_user_error(file):
            return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Template:
    r"""The texts that a model's chat template writes around the contents of a chat:

        begin USER ask lead ASSISTANT stop turn USER ask lead ASSISTANT stop ...

    `stop` ends with the token that ends the assistant's turn. `lead` is a space, which is a part of
    the next word, or nothing. In quotes, for two models:

                ChatML                                  Llama 2
        begin   "<|im_start|>user\n"                    "<s>[INST] "
        ask     "<|im_end|>\n<|im_start|>assistant\n"   " [/INST]"
        lead    ""                                      " "
        stop    "<|im_end|>"                            " </s>"
        turn    "\n<|im_start|>user\n"                  "<s>[INST] "
    """

    begin: str
    ask: str
    lead: str
    stop: str
    turn: str
    stop_id: int


def marks_of(tokenizer: Any) -> dict[str, int]:
    """The ids of added tokens by their texts. White space is none: it controls nothing."""
    return {text: i for text, i in tokenizer.added_tokens_encoder.items() if text.strip()}


def read_template(tokenizer: Any) -> Template:
    """Read the texts between the contents of chats of one, three and five messages.

    UserError for a template that does not write all turns alike.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def around(roles: list[str]) -> list[str]:
        contents = [f"§{n} Thought: a\nAction: b§" for n in range(len(roles))]
        chat = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        with as_user_error("its chat template"):
            source = tokenizer.get_chat_template()
            _compile_jinja_template(source).environment.globals["strftime_now"] = DAY.strftime
            text = tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        return any_of(contents).split(text)

    one, three, five = (around(["user", *["assistant", "user"] * n]) for n in range(3))
    begin, ask, after, prompt = three if len(three) == 4 else [""] * 4
    alike = [one, five] == [[begin, prompt], [begin, ask, after, ask, after, prompt]]
    # The prompt for an answer is `ask`, or goes on with thoughts that it closes, or lacks the space
    # before an answer.
    thoughts = prompt.removeprefix(ask) if prompt.startswith(ask) else None
    asks = CLOSED.fullmatch(thoughts) if thoughts is not None else ask.startswith(prompt)
    marks = marks_of(tokenizer)
    end = any_of(marks).search(after)
    if not (alike and asks and end):
        raise UserError(
            "its chat template does not write all turns alike, opens thoughts, or ends no turn by a"
            " token"
        )
    ask = max(ask, prompt, key=len)
    bare = ask.rstrip(" ")
    stop, turn = after[: end.end()], after[end.end() :]
    return Template(begin, bare, ask.removeprefix(bare), stop, turn, marks[end[0]])


def any_of(texts: Iterable[str]) -> re.Pattern:
    """A pattern of any of these texts, the longest first; of none, it matches nothing."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class Chat:
    """Messages -> tokens, one list per message: a state's tokens are a prefix of every later
    state's. Exceptions: Markov renderings, and prompts cut to fit the context.

    The model's chat template is read once, as strings around the contents. Eq. (5) trains what the
    assistant writes, with `stop`, which ends the turn. A control token in a message is mere text.
    """

    def __init__(self, tokenizer: Any, rendering: Rendering, context: int | None = None, ends=()):
        """context: the model's, in tokens; None: no limit. ends: more ids that end a turn."""
        tokenizer.split_special_tokens = tokenizer.clean_up_tokenization_spaces = False
        self.tokenizer, self.rendering, self.aids = tokenizer, rendering, Aids(rendering)
        self.context = context or math.inf
        self.template = template = read_template(tokenizer)
        self.stop_id = template.stop_id
        marks = marks_of(tokenizer)
        self.stop_ids = {self.stop_id, *ends, tokenizer.eos_token_id} & {*marks.values()}
        written = template.begin + template.ask + template.stop + template.turn
        special = [text for text, i in marks.items() if text in written or i in self.stop_ids]
        self.controls = any_of(special + tokenizer.all_special_tokens)
        self.encode = functools.lru_cache(CACHED)(self.tokenize)

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        write_json(folder / Rendering.FILE, vars(self.rendering))

    def tokenize(self, past: str, before: str, content: str, after: str) -> list[int]:
        """Tokens of before + content + after, as they follow `past`: SentencePiece adds a space at
        a text's beginning alone. Control tokens in the content are read as their characters."""
        from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

        text = before + mark_control_tokens(content, self.controls) + after
        past_ids = encode_marked_chat(self.tokenizer, past)
        ids = encode_marked_chat(self.tokenizer, past + text)
        if ids[: len(past_ids)] != past_ids:  # the text's first token takes the space before it
            return encode_marked_chat(self.tokenizer, text)
        return ids[len(past_ids) :]

    def message_tokens(self, state: State) -> list[list[int]]:
        """One list of tokens per message; a user message's ends with the generation prompt. Spaces
        at a message's ends are left out, as most templates do."""
        template = self.template
        past, before = "", template.begin
        messages = [(role, content.strip()) for role, content in state.messages]
        lists = []
        for role, content in self.aids.show(messages, state):
            if role == "assistant":
                lists.append(self.encode(template.ask, template.lead, content, template.stop))
                past, before = template.stop, template.turn
            else:
                lists.append(self.encode(past, before, content, template.ask))
        return lists

    def action_tokens(self, text: str, task: str, prompt_length: int = 0) -> list[int]:
        """Tokens of an action as the assistant writes it, with the token that ends its turn unless
        Q is read before it. UserError if they and the prompt exceed the model's context."""
        template = self.template
        text = text.strip()
        if self.rendering.mark_matches:
            text = mark(text, task)
        ids = self.encode(template.ask, template.lead, text, template.stop)
        if prompt_length + len(ids) > self.context:
            raise UserError(f"an action of {len(ids):,} tokens is beyond the model's context")
        return ids if self.rendering.q_at_end else ids[:-1]

    def text(self, ids: Sequence[int]) -> str:
        """Tokens that a model wrote -> the action, as environment and tree files hold it."""
        written = list(itertools.takewhile(lambda token: token not in self.stop_ids, ids))
        return self.action_in(self.tokenizer.decode(written, skip_special_tokens=True))

    def ended(self, ids: Sequence[int]) -> bool:
        """True if the agent's turn ends with the last of the tokens that it wrote: by one that ends
        a turn, or by one of the stop texts."""
        tail = self.tokenizer.decode(ids[-64:])  # longer than a stop text, as a token may be a byte
        return ids[-1] in self.stop_ids or any(stop in tail for stop in self.rendering.stop)

    def action_in(self, text: str) -> str:
        """Return the action in a model's text, up to the first stop text."""
        action = any_of(self.rendering.stop).split(text)[0]
        if self.rendering.mark_matches:
            action = action.replace(MARK, "")
        return action.strip()

    def prompt_tokens(self, state: State) -> list[list[int]]:
        """`message_tokens` of a prompt that leaves room for an action: the oldest turns are left
        out as far as need be."""
        lists = self.message_tokens(state)
        # As an action, a text that was cut at its limit has one token more: the end of its turn.
        room = self.context - self.rendering.max_new_tokens - 1
        length, front = sum(map(len, lists)), self.fixed_messages(state)
        while length > room and len(lists) > front + 2:
            warn("prompts beyond the model's context leave out their oldest turns")
            length -= len(lists.pop(front)) + len(lists.pop(front))
        if length > room:
            raise UserError(
                f"a prompt has {length:,} tokens even without old turns, of {room:,} at most:"
                " a smaller --max-new-tokens leaves more room"
            )
        return lists

    def prompt(self, state: State) -> list[int]:
        return list(itertools.chain(*self.prompt_tokens(state)))

    def pair(self, state: State, action: str) -> list[int]:
        """Tokens of (s, a), as QNet reads them."""
        prompt = self.prompt(state)
        return prompt + self.action_tokens(action, state.task, len(prompt))

    def fixed_messages(self, state: State) -> int:
        """The number of lists at a prompt's front that stay: instruction, agreement, task."""
        return 1 + (state.opening if self.aids.keep_instruction else 0)

    def is_truncated(self, state: State) -> bool:
        """True if its prompt lacks old turns."""
        return len(self.prompt_tokens(state)) < len(self.message_tokens(state))
