"""The lines that a stage reads, by their types. docs/files.md shows one of each."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict

from qlass import UserError

L = TypeVar("L")
Reward = Annotated[float, Field(ge=0, le=1 + 1e-9)]  # 1 is success, give or take a sum's last digit


@with_config(ConfigDict(extra="allow"))  # fields of others are kept
class Line(TypedDict):
    """A line of any file."""


class Metadata(Line):
    """The metadata beside an output."""

    recipe: NotRequired[dict[str, Any]]
    inputs: NotRequired[dict[str, str]]
    flags: NotRequired[list[str]]


ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant"}


# Nobody would read a tool call.
class Turn(TypedDict, extra_items=None):  # type: ignore[call-arg]
    role: Annotated[
        Literal["user", "assistant", "human", "gpt"],
        AfterValidator(ROLES.get),
        Field(validation_alias=AliasChoices("role", "from")),
    ]
    # min_length lets pydantic look at the letters: half of a UTF-16 pair is none.
    content: Annotated[str, Field(min_length=0, validation_alias=AliasChoices("content", "value"))]


def in_turns(messages: list[Turn]) -> list[Turn]:
    """ValueError unless user and assistant speak in turns, the user first, no answer empty."""
    for number, turn in enumerate(messages, 1):
        if (turn["role"] == "user") != (number % 2 == 1):
            raise ValueError(f"message {number} is out of turn: user and assistant take turns")
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise ValueError(f"message {number}: content is empty")
    return messages


Messages = Annotated[list[Turn], AfterValidator(in_turns)]


class DemonstrationLine(Line):
    """A line of expert.jsonl: a trajectory up to its last action."""

    messages: Annotated[Messages, Field(validation_alias=AliasChoices("messages", "conversations"))]
    system: NotRequired[None]  # an agent reads the messages alone
    tools: NotRequired[None]
    success: NotRequired[Literal[True] | None]  # an outcome is read from `reward`
    score: NotRequired[None]
    task_id: NotRequired[str | None]  # null, as some libraries write what a line lacks
    env: NotRequired[str | None]
    task: NotRequired[str | None]  # the instruction's sentence
    reward: NotRequired[Reward | None]
    source: NotRequired[str | None]  # "policy": self-training has added a trajectory of the agent's


class Node(Line):
    """A line of trees.jsonl: an action and what it led to. The root has the task's messages."""

    task_id: str
    node_id: int
    parent_id: int | None
    depth: int
    action: str | None
    observation: str
    reward: Reward
    done: bool
    source: str  # who acted first: "policy" or "expert"; of the root nobody
    branch: int
    expert: bool
    cut: NotRequired[Reward]  # what the agent earned at its limit, where the demonstration goes on
    nodes: NotRequired[int]  # of the tree
    rollouts: NotRequired[list[Reward]]  # what each of the agent's trajectories earned
    messages: NotRequired[Messages]
    task: NotRequired[str]
    env: NotRequired[str]


class Label(Node):
    """A line of q_labels.jsonl."""

    q_raw: FiniteFloat
    q: Reward


class WeightIndex(TypedDict):
    """model.safetensors.index.json: the file of each weight."""

    weight_map: dict[str, str]


class ValueHead(TypedDict):
    """qnet.json: the width of the value head."""

    hidden: PositiveInt


def out_of_memory(error: Exception) -> bool:
    """True if numpy, torch or a GPU's driver found no memory."""
    return bool(re.search("out of memory|allocate memory|ALLOC_FAILED|MemoryError", repr(error)))


@contextlib.contextmanager
def as_user_error(place: object, way_out: str = "", errors: Any = Exception) -> Iterator[None]:
    """UserError, in one line that names the place, for these errors of a block.

    Without `errors` the block is the call of a library alone: a fault of ours keeps its traceback.
    """
    try:
        yield
    except errors as error:
        if out_of_memory(error):
            raise
        words = getattr(error, "strerror", None) or str(error) or repr(error)
        if isinstance(error, ValidationError):
            mistakes = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            words = "; ".join(mistakes).removeprefix(": ")
        raise UserError(f"{place}: {' '.join(words.split())[:400]}{way_out}") from error


def read(path: Path, kind: type[L]) -> Iterator[L]:
    """The lines of a file, or of a JSON list as in ETO's files. UserError for another type."""
    check = TypeAdapter(kind).validate_python
    with as_user_error(path):
        text = path.read_text(encoding="utf-8-sig")
        lines: Any = json.loads(text) if text.lstrip().startswith("[") else text.split("\n")
    for number, line in enumerate(lines, 1):
        if line == "":
            continue
        with as_user_error(f"{path}:{number}"):
            record: Any = json.loads(line) if isinstance(line, str) else line
            fields = check(record)
        record.update(fields)  # in the order of the file
        yield record
