"""A demonstration as the model sees it, the actions that are read from it, and what replaying them earns.

    python -m reporting.demonstration --env webshop --expert FILE                    # by the tiny model's tokenizer
    python -m reporting.demonstration --env webshop --expert FILE --tokenizer FOLDER # of another model

    reads   --expert, or RUN/expert.jsonl; without --tokenizer that of RUN/sft, if it is there

Cloning reads the tokens behind "reads" and learns to write those behind "writes". A replayed answer that is not the
recorded one tells of another task, another version of the environment, or an action that was not read right. At the end
stand sft.py's checks of the whole file.
"""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pydantic import PositiveInt

import envs
from environments.replay import difference, refuse_openings, replay_demonstrations
from qlass import UserError, demonstrations
from qlass.chat import Chat, Rendering
from qlass.demonstrations import Demonstration
from qlass.messages import parse_action, replay
from qlass.models import load_chat
from qlass.settings import Run, place, read_settings, run_stage, settings_in, workload
from qlass.tiny import AIDS, sentence, tiny_model
from sft import NO_TARGET, check_demonstrations, examples_of

WIDTH = 100  # columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Run):
    expert: Path | None = place(None)  # demonstrations (RUN/expert.jsonl)
    number: PositiveInt = workload(1)  # which of them, from 1
    tokenizer: str | None = place(None)  # a model's, with its chat template (RUN/sft's, or the tiny model's)


def chat_of(config: Config, env: envs.TextEnv, expert: list[Demonstration]) -> Chat:
    sft = config.run / "sft"
    if config.tokenizer or sft.exists():
        return load_chat(Path(config.tokenizer or sft), config)
    texts = (text for demonstration in expert for _, text in demonstration.state.messages)
    return Chat(tiny_model(texts)[1], Rendering(**AIDS, markov=env.markov))


def as_the_model_sees_it(chat: Chat, demonstration: Demonstration, limit: int) -> Iterator[str]:
    """Lines of text, each marked as read or written; in a Markov environment an example per action."""
    for example in examples_of(chat, [demonstration], limit):
        tokens = zip(example.ids, example.labels, strict=True)
        for writes, some in itertools.groupby(tokens, key=lambda token: token[1] != NO_TARGET):
            text = chat.tokenizer.decode([token for token, _ in some], skip_special_tokens=False)
            for row in text.strip("\n").split("\n"):
                margin = "writes | " if writes else " reads | "
                yield textwrap.fill(row, WIDTH, initial_indent=margin, subsequent_indent=margin) or margin


def replayed(demonstration: Demonstration, env: envs.TextEnv) -> Iterator[str]:
    """Each action with the environment's answer, marked if it was not known or not so recorded; then the reward."""
    moves = replay(env, str(demonstration.task_id), demonstration.state.actions)
    reward, done, differ = 0.0, False, 0
    again = sentence(next(moves).state.task)
    recorded = demonstration.state.observations[1:]
    for number, text in enumerate(demonstration.state.actions):
        action = parse_action(text)
        valid = env.knows(action)
        if done:
            yield f"  the episode is over: {len(recorded) + 1 - number} more actions are recorded"
            break
        _, state, reward, done = next(moves)
        answer = again.sub("...", state.observation)  # the task would hide the rest
        yield f"  {number + 1:3} {textwrap.shorten(action, WIDTH - 6, placeholder=' ...')}"
        yield f"      {textwrap.shorten(answer, WIDTH - 6, placeholder=' ...')}"
        if not valid:
            yield "      <- the environment does not know it"
        if number < len(recorded) and recorded[number] != state.observation:
            yield f"      <- another answer than recorded: {difference(state.observation, recorded[number])}"
            differ += 1
    record = "nothing is recorded" if demonstration.reward is None else f"{demonstration.reward:g} is recorded"
    end = "" if done else ", and the episode was not over"
    yield f"replaying them earned {reward:g}, {record}{end}; {differ} answers are not the recorded ones"


def main(argv: list[str] | None = None) -> None:
    config = read_settings(Config, __doc__, argv)
    env = envs.from_config(config)
    path = config.expert or config.run / "expert.jsonl"
    expert = demonstrations.read(path, env)
    if config.number > len(expert):
        raise UserError(f"--number {config.number}: {path} has {len(expert)} demonstrations")
    demonstration, chat = expert[config.number - 1], chat_of(config, env, expert)
    print(f"{path}: demonstration {config.number} of {len(expert)}\n\nas the model sees it:")
    limit = settings_in(config.file, "sft").get("max_tokens", 4096)
    print(*as_the_model_sees_it(chat, demonstration, limit), sep="\n")
    if demonstration.task_id in env.split_ids("train"):
        print(f"\n{len(demonstration.state.actions)} actions:", *replayed(demonstration, env), sep="\n")
    else:
        print("\nno training task has this task_id, so its actions are not replayed")
    refuse_openings(expert, env)
    replay_demonstrations(expert, env, (line.task_id for line in expert))
    check_demonstrations(expert, chat, int(min(limit, chat.context)))
    print(f"\nsft.py takes all {len(expert)} demonstrations")


if __name__ == "__main__":
    run_stage(main)
