"""A demonstration as the model sees it, the actions that are read from it, and what replaying them earns.

    python -m reporting.demonstration --env webshop --expert FILE                  # by the tiny model's tokenizer
    python -m reporting.demonstration --env webshop --expert FILE --model NAME     # of a HuggingFace name or folder

    reads   --expert, or RUN/expert.jsonl; without --model the tokenizer of RUN/sft, if it is there

Cloning reads the tokens behind "reads" and learns to write those behind "writes". A replayed answer that is not the
recorded one tells of another task, another version of the environment, or an action that was not read right.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path

import envs
from qlass import UserError, demonstrations
from qlass.chat import Chat, Rendering
from qlass.demonstrations import Demonstration
from qlass.messages import State, parse_action
from qlass.models import load_chat
from qlass.settings import Run, read, run_stage, runtime
from qlass.tiny import AIDS, sentence, tiny_model
from sft import NO_TARGET, examples_of

WIDTH = 100  # columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Run):
    expert: Path | None = runtime(None)  # demonstrations (RUN/expert.jsonl)
    number: int = runtime(1)  # which of them, from 1
    model: str | None = runtime(None)  # whose tokenizer and chat template (RUN/sft's, or the tiny model's)
    max_tokens: int = runtime(4096)  # where sft.py cuts a trajectory


def chat_of(config: Config, env: envs.TextEnv, expert: list[Demonstration]) -> Chat:
    if config.model:
        return load_chat(config.model, Rendering())
    sft = config.run / "sft"
    if sft.exists():
        return load_chat(sft, Rendering.load(sft))
    _, tokenizer = tiny_model(text for demonstration in expert for _, text in demonstration.state.messages)
    return Chat(tokenizer, Rendering(**AIDS, markov=env.markov))


def as_the_model_sees_it(chat: Chat, demonstration: Demonstration, limit: int) -> Iterator[str]:
    """Lines of text, each marked as read or written; in a Markov environment an example per action."""
    for number, example in enumerate(examples_of(chat, [demonstration], limit)):
        yield from [""] * bool(number)
        tokens = zip(example.ids, example.labels, strict=True)
        for writes, some in itertools.groupby(tokens, key=lambda token: token[1] != NO_TARGET):
            text = chat.tokenizer.decode([token for token, _ in some], skip_special_tokens=False)
            for row in text.strip("\n").split("\n"):
                margin = "writes | " if writes else " reads | "
                yield textwrap.fill(row, WIDTH, initial_indent=margin, subsequent_indent=margin) or margin


def task_of(demonstration: Demonstration, env: envs.TextEnv) -> str | None:
    """The training task of a demonstration, by its id or by its first observation; None: there is none."""
    tasks = env.task_ids("train")
    best = {demonstration.task_id or demonstration.observation: demonstration}
    if demonstration.task_id not in tasks:
        demonstrations.find_tasks(best, env, tasks)
    return next((task for task in tasks if task in best), None)


def replay(demonstration: Demonstration, env: envs.TextEnv, task: str) -> Iterator[str]:
    """Each action, whether the environment knew it, and its answer, then the reward."""
    state = State.first(env, *env.reset(options={"task_id": task}))
    again = sentence(state.task, state.observation)
    if env.max_steps is not None:  # the agent's limit is no demonstration's
        env.max_steps = max(env.step_limit(), len(demonstration.actions))
    recorded = demonstration.texts("user")[demonstration.agreed + 1 :]
    reward, done, differ = 0.0, False, 0
    for number, text in enumerate(demonstration.actions):
        if done:
            yield f"  the episode is over, and {len(demonstration.actions) - number} actions are left"
            break
        state, reward, done = state.act(env, text)
        same = number >= len(recorded) or recorded[number].strip() == state.observation.strip()
        differ += not same
        marks = [] if "Action:" in text else ['no "Action:", so all of the text is the action']
        marks += [] if env.known else ["the environment does not know it"]
        marks += [] if same else ["another answer than recorded"]
        answer = again.sub("...", state.observation) if again else state.observation  # the task would hide the rest
        yield f"  {number + 1:3} {textwrap.shorten(parse_action(text), WIDTH - 6, placeholder=' ...')}"
        yield f"      {textwrap.shorten(answer, WIDTH - 6, placeholder=' ...')}"
        yield from (f"      <- {mark}" for mark in marks)
    record = "nothing is recorded" if demonstration.reward is None else f"{demonstration.reward:g} is recorded"
    end = "" if done else ", and the episode was not over"
    yield f"replaying them earned {reward:g}, {record}{end}; {differ} answers are not the recorded ones"


def main(argv: list[str] | None = None) -> None:
    config = read(Config, __doc__, argv)
    env = envs.from_config(config)
    path = config.expert or config.run / "expert.jsonl"
    if not path.exists():
        raise UserError(f"{path}: no such file: name one by --expert, or let sft.py play the environment's expert")
    expert = demonstrations.read(path, env)
    if config.number > len(expert):
        raise UserError(f"--number {config.number}: {path} has {len(expert)} demonstrations")
    demonstration = expert[config.number - 1]
    print(f"{path}: demonstration {config.number} of {len(expert)}\n\nas the model sees it:")
    print(*as_the_model_sees_it(chat_of(config, env, expert), demonstration, config.max_tokens), sep="\n")
    task = task_of(demonstration, env)
    print(f"\n{len(demonstration.actions)} actions:")
    if task is None:
        print(*(f"  {parse_action(text)}" for text in demonstration.actions), sep="\n")
        print("no training task has this id or begins with these words, so they are not replayed")
    else:
        print(*replay(demonstration, env, task), sep="\n")


if __name__ == "__main__":
    run_stage(main)
