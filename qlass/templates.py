"""How a model's own chat template becomes the strings around a chat's contents.

A template is a program in Jinja. It is read once, by what it writes around marked contents, and is
refused if it does not write all turns alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jinja2

from qlass import UserError
from qlass.files import warn_once
from qlass.tiny import MARK

PLAIN = (  # for a model without a chat template
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'User: ' + m.content + '\nAssistant: ' }}"
    "{% else %}{{ m.content ~ eos_token ~ '\n' }}{% endif %}{% endfor %}"
)
TODAY = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")  # in a chat template
DATE = "2025-01-01"  # what it prints for it, if the checkpoint has no other
WAY_OUT = ": give its tokenizer another chat_template"
CONTENT = "§Thought: a\nAction: b§"
# What an action may hold: printable ASCII, and letters that a tokenizer may change.
LETTERS = " ".join([*map(chr, range(33, 127)), *"½™éÉßüñ×°’“–中🙂"])


@dataclasses.dataclass(frozen=True)
class Template:
    """The strings around the contents of a chat:

        begin USER ask lead ASSISTANT stop turn USER ask lead ASSISTANT stop ...

    `lead` is a space or nothing. `stop` ends with the token that ends the assistant's turn. A
    system message stands between the two strings of `system`, which replace `begin`; there are
    none if the template refuses one.
    """

    begin: str
    system: Sequence[str]
    ask: str
    lead: str
    stop: str
    turn: str
    stop_id: int


def read_template(tokenizer: Any, rendering: Any) -> Template:
    """The strings that a tokenizer's chat template writes. UserError if strings can't say it."""
    template = template_of(tokenizer, rendering)

    def written(roles: list[str]) -> list[str]:
        return write(tokenizer, template, roles)

    try:
        prompts = [written(["user", *["assistant", "user"] * n]) for n in range(4)]
    except jinja2.TemplateError as error:
        raise UserError(f"its chat template fails: {error}{WAY_OUT}") from error
    problem = "its chat template does not show all turns alike" + WAY_OUT
    if len(prompts[1]) != 4:  # around the contents of three messages
        raise UserError(problem)
    begin, ask, after, last = prompts[1]
    alike = prompts == [[begin, *[ask, after] * n, last] for n in range(4)]
    # A prompt may end before an answer's own space, or go on (<think></think>).
    if not alike or not (ask.startswith(last) or last.startswith(ask)):
        raise UserError(problem)
    system: list[str] = []
    with contextlib.suppress(jinja2.TemplateError):  # it may refuse a system message
        strings = written(["system", *["user", "assistant"] * 3, "user"])
        system = strings[:2] if strings[2:] == prompts[3][1:] else []
    prompt_end = max(ask, last, key=len)
    if prompt_end.rstrip().endswith("<think>"):
        warn_once("its chat template opens <think> in each answer, and has no switch for it")
    ask = prompt_end.rstrip(" ")
    lead = prompt_end.removeprefix(ask)  # a space before a word is a part of the word
    # The turn ends with the first added token after the assistant's words, special or not.
    added = tokenizer.added_tokens_encoder
    ends = any_of(text for text in added if text.strip() and text != MARK)
    after = after if ends.search(after) else (tokenizer.eos_token or "") + after
    if not (end := ends.search(after)):
        raise UserError("its tokenizer has no eos_token, and its template ends no turn")
    stop = after[: end.end()]
    turn = after[end.end() :]
    return Template(begin, system, ask, lead, stop, turn, added[end[0]])


def write(tokenizer: Any, template: str, roles: list[str]) -> list[str]:
    """What a template writes around the contents of a prompt, its own thinking off."""
    chat = [{"role": role, "content": CONTENT} for role in roles]
    options = {"tokenize": False, "add_generation_prompt": True, "chat_template": template}
    effort = "none" if re.search("['\"]none['\"]", template) else "low"
    off = {"enable_thinking": False, "thinking": False, "reasoning_effort": effort}
    return tokenizer.apply_chat_template(chat, **options, **off).split(CONTENT)


def template_of(tokenizer: Any, rendering: Any) -> str:
    """The tokenizer's chat template, or PLAIN. What it prints for today's date is DATE, whatever
    the day, so that a run can be resumed and repeated."""
    if not tokenizer.chat_template:
        begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
        return "{{ bos_token }}" + PLAIN if begins else PLAIN
    template = tokenizer.get_chat_template()
    if "strftime_now(" in template:
        rendering.date = rendering.date or DATE
        day = datetime.date.fromisoformat(rendering.date)
        template = TODAY.sub(lambda call: repr(day.strftime(call[2])), template)
    if "strftime_now(" in template:
        raise UserError("its chat template prints another date each day" + WAY_OUT)
    return template


def control_tokens(tokenizer: Any, template: Template, ends: Collection[int]) -> re.Pattern:
    """A pattern of the tokens that are mere text in a message: special ones, those that end a turn,
    and those that the template writes."""
    written = "".join([template.begin, template.stop, template.turn, *template.system])
    controls = []
    for i, token in tokenizer.added_tokens_decoder.items():
        text = token.content
        if token.special or i in ends or (text.strip() and text in written):
            controls.append(text)
    return any_of(controls)


def check_tokens(chat: Any) -> None:
    """UserError if the tokenizer changes an action, or reads an end of a turn in a message."""
    template = chat.template
    ids = chat.encode(template.ask, template.lead, LETTERS, template.stop)
    letters = chat.tokenizer.decode(ids[:-1], skip_special_tokens=True).strip().split(" ")
    for letter, back in itertools.zip_longest(LETTERS.split(" "), letters):
        if letter != back:
            fault = f"its tokenizer gives an action's {letter!r} back as {back!r}"
            raise UserError(f"{fault}; has it all its files?")
    for end in chat.tokenizer.convert_ids_to_tokens(list(chat.stop_ids)):
        chat.encode("", "", end, "")


def any_of(texts: Iterable[str]) -> re.Pattern:
    """A pattern of any of these texts, the longest first; of none, it matches nothing."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
