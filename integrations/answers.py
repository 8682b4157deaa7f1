"""The action in a chat model's answer, in Markdown, quotes or JSON too: the environment says what it knows."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator

from qlass.messages import parse_action, without_thinking

LABEL = re.compile(r"(?im)^(?:[\W\d_]|step\b)*action\b[ \t\d*_`]*(?::[*_]*|$)\s*")  # with a number, a heading's, bold
MENTION = re.compile(r"(?i)\baction\b[\W_]*")  # anywhere, as in JSON
INVENTED = re.compile(r"(?ims)(^[\W\d_]*action\b.*?)\n[\W_]*observation[*_]*:.*")
MARKS = "*_`#>\"'{}, \n\t-"  # around an action, in Markdown, quotes and JSON
FENCE = re.compile(r"(?s)```[^\n`]*\n(.*?)(?:\n\s*```|\Z)")
EMPHASIS = re.compile(r"(?:\*{1,3}|`{1,3})((?:(?!\*\*|`).)+)(?:\*{1,3}|`{1,3})")
NO_ACTION = "\ufffd"  # an environment that knows it takes any text


def read_answer(text: str, knows: Callable[[str], bool]) -> tuple[str, bool, bool]:
    """An answer, in the environment's form if it knows the action in it; whether it does; and whether it is clear which
    action is meant. What stands before `</think>`, and behind an observation that the model has invented, is no part.

    The environment is asked for the whole first, then without marks, and for a part in the end. One that takes any text
    can't tell marks from an action: there what wraps the whole is none of it.
    """
    text = INVENTED.sub(r"\1", without_thinking(text).strip())
    labels = len(LABEL.findall(text))
    for thought, action in dict.fromkeys(readings(text)):
        answer = f"{thought.rstrip(MARKS)}\nAction: {action}".strip()
        is_valid = action and parse_action(answer) == action and knows(action)
        if is_valid and (action == bare(action) or not knows(NO_ACTION)):
            return text if parse_action(text) == action else answer, True, labels < 2
    return text, False, labels == 1


def readings(text: str) -> Iterator[tuple[str, str]]:
    """The thought and the action that an answer may have, the likeliest first."""
    labels, fences, mentions = ([match.span() for match in p.finditer(text)] for p in (LABEL, FENCE, MENTION))
    if not labels:
        yield "", parse_action(text)
    for begin, end in [*labels, *((begin, begin) for begin, _ in fences), (0, 0), *reversed(mentions)]:
        rest = text[end:].strip()
        if text[begin:end].count("**") % 2:  # the label's line is bold
            rest = rest.replace("**", "", 1)
        for part in (rest, rest.partition("\n\n")[0], rest.partition("\n")[0], rest.partition('"')[0]):
            for action in (part, bare(part), part.strip(MARKS + ".")):
                yield text[:begin], action.strip()


def bare(action: str) -> str:
    """An action without what wraps it: emphasis, or a fence and what stands behind it; and JSON alone."""
    if wrapped := FENCE.match(action) or EMPHASIS.fullmatch(action):
        return wrapped[1]
    with contextlib.suppress(ValueError):
        value, end = json.JSONDecoder().raw_decode(action)
        return action[:end] if isinstance(value, dict) else action
    return action
