"""How a state becomes tokens: by the model's own chat template, for every stage alike."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from qlass import UserError, templates
from qlass.files import read_object
from qlass.messages import State
from qlass.tiny import Aids

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


class Chat:
    """Messages -> tokens, one list per message: a state's tokens begin those of every later state,
    but where the environment is Markov, or --truncate leaves out old turns.

    The model's chat template is read once, as strings around the contents:

        begin USER ask lead ASSISTANT stop turn USER ask lead ASSISTANT stop ...

    Eq. (5) trains what the assistant writes, with `stop`, which ends the turn. A control token in a
    message is mere text. UserError for a template or a tokenizer of which this can't be said
    (qlass/templates.py).
    """

    def __init__(self, tokenizer: Any, rendering: Rendering, context: int | None = None, ends=()):
        """context: the model's, in tokens; None: no limit. ends: more ids that end a turn."""
        tokenizer.split_special_tokens = tokenizer.clean_up_tokenization_spaces = False
        self.tokenizer, self.rendering, self.aids = tokenizer, rendering, Aids(rendering)
        self.context = context or math.inf
        self.template = templates.read_template(tokenizer, rendering)
        self.stop_id = self.template.stop_id
        added = tokenizer.added_tokens_decoder  # a config may name a mere letter as an end
        self.stop_ids = {self.stop_id, *ends, tokenizer.eos_token_id} & added.keys()
        self.controls = templates.control_tokens(tokenizer, self.template, self.stop_ids)
        self.encode = functools.lru_cache(maxsize=100_000)(self._encode)
        templates.check_tokens(self)

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        self.rendering.save(folder)

    def _encode(self, past: str, before: str, content: str, after: str) -> list[int]:
        """Tokens of before + content + after behind `past`, as SentencePiece adds a space at a
        text's beginning alone. Control tokens in the content are read as their characters."""
        from transformers.utils.chat_template_utils import encode_marked_chat

        text = before + self._as_text(content) + after
        past_ids = encode_marked_chat(self.tokenizer, past)
        ids = encode_marked_chat(self.tokenizer, past + text)
        if ids[: len(past_ids)] != past_ids:  # the text's first token takes the space before it
            return encode_marked_chat(self.tokenizer, text)
        return ids[len(past_ids) :]

    def _as_text(self, content: str) -> str:
        """A message whose control tokens are marked: they are to be read as their characters."""
        from transformers.utils.chat_template_utils import mark_control_tokens

        return mark_control_tokens(content, self.controls)

    def message_tokens(self, state: State) -> list[list[int]]:
        """One list of tokens per message; a user message's ends with the generation prompt.

        A system message shares the list of the user's first. Spaces at a message's ends are left
        out, as most templates do.
        """
        messages = [(role, content.strip()) for role, content in state.messages]
        template = self.template
        past = ""
        before = template.begin
        if messages[0][0] == "system":
            if not template.system:
                raise UserError("its template has no system message: put it into the instruction")
            _, system = messages.pop(0)
            left, right = template.system
            before = left + self._as_text(system) + right
        lists = []
        for role, content in self.aids.show(messages, state.task):
            if role == "assistant":
                lists.append(self.encode(template.ask, template.lead, content, template.stop))
                past = template.stop
                before = template.turn
            else:
                lists.append(self.encode(past, before, content, template.ask))
        return lists

    def action(self, text: str, task: str, prompt: int = 0) -> list[int]:
        """Tokens of an action as the assistant writes it, with the token that ends its turn unless
        Q is read before it; TooLong if they and `prompt` tokens exceed the model's context."""
        template = self.template
        text = self.aids.mark(text.strip(), task)
        ids = self.encode(template.ask, template.lead, text, template.stop)
        self._check(prompt, len(ids))
        return ids if self.rendering.q_at_end else ids[:-1]

    def text(self, ids: Sequence[int]) -> str:
        """Tokens that a model wrote -> the action, as environment and tree files hold it."""
        ids = list(itertools.takewhile(lambda token: token not in self.stop_ids, ids))
        return self.action_in(self.tokenizer.decode(ids, skip_special_tokens=True))

    def action_in(self, text: str) -> str:
        """What a model wrote -> the action in it, up to the first stop text."""
        return self.aids.unmark(templates.any_of(self.rendering.stop).split(text)[0]).strip()

    def prompt_tokens(self, state: State) -> list[list[int]]:
        """`message_tokens` of a prompt that leaves room for an action, or TooLong. With --truncate
        oldest, the oldest turns are left out as far as need be."""
        lists = self.message_tokens(state)
        length, action = sum(map(len, lists)), self.rendering.max_new_tokens
        front = self.stays(state) if self.rendering.truncate else len(lists)
        # As an action, a text that was cut at its limit has one token more: the end of its turn.
        while length + action + 1 > self.context and len(lists) > front + 2:
            length -= len(lists.pop(front)) + len(lists.pop(front))
        self._check(length, action)
        return lists

    def prompt(self, state: State) -> list[int]:
        return list(itertools.chain(*self.prompt_tokens(state)))

    def _check(self, prompt: int, action: int) -> None:
        if prompt + action > self.context:
            remedy = ": --truncate oldest leaves out old turns"
            if self.rendering.truncate:
                remedy = ", although --truncate has left out all old turns"
            raise TooLong(
                f"a prompt of {prompt:,} tokens and an action of {action:,} are more than the "
                f"model's context of {self.context:,}{remedy}"
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
