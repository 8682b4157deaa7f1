"""An episode on the terminal: where the search had a choice, and what the agent without it, greedy, does there.

    python -m reporting.show --run runs/demo -M 4    # the flags are q_search.py's; nothing is written

The command plays what the run has: it makes no agent and no QNet. Of a chat model's run it shows what is in the result
files, and asks for nothing.

Most steps leave nothing to choose, since all samples are the same action. So of the tasks that the command names the
first is shown in whose episode several steps have a choice.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

import q_search
from q_search import Method, methods_of
from qlass import UserError
from qlass.batching import Models, drive
from qlass.chat import Chat
from qlass.files import read_jsonl
from qlass.messages import parse_action, start
from qlass.settings import read_settings, run_stage
from qlass.tiny import sentence

TRIED = 96  # tasks at most, in search of an episode with choices
SEVERAL = 3  # steps with a choice
TOGETHER = 16  # tasks that are tried side by side
WIDTH = 100  # columns
BAR = 24  # columns of a bar from the least score of a step to the most
WORD = 48  # columns of an action, at most


def paint(text: str, code: str) -> str:
    """In colour on a terminal, plain in a pipe."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text


def bar(score: float | None, scores: Sequence[float | None]) -> str:
    """A score as a bar, which tells it from the step's others, and as a number; nothing for a step without scores."""
    numbers = [value for value in scores if value is not None and math.isfinite(value)]
    if score is None or score not in numbers:
        return ""
    least, most = min(numbers), max(numbers)
    share = (score - least) / (most - least) if most > least else 1.0
    return f"{'█' * round(1 + (BAR - 1) * share):{BAR}} {score:.3f}"


# ----------------------------------------------------------------------------------------------- what is shown


def show(config: Any, env: Any, tasks: list[str], plan: Sequence[Method], chat: Chat, models: Models) -> None:
    """Print an episode of each method of the plan. Nothing is written."""
    if not tasks:
        raise UserError("no tasks are left: mind --split, --skip and --limit")
    for method in plan:
        tried: list[dict] = []
        for line in outcomes(config, env, method, tasks[: TRIED if method.M > 1 else 1], chat, models):
            tried.append(line)
            if len(choices(line)) >= SEVERAL:
                break
        best = max(tried, key=lambda line: len(choices(line)))  # the first of those with the most
        if len(tried) > 1:
            print(search_for(tried, best, config.split) + "\n")
        print(*rows_of(env, best), sep="\n")
        print(paint(f"{method}: reward {best['reward']:.3g} after {best['n_steps']} steps", "1;36"))
        if method.M > 1:
            print(count_of_choices(best))
        if method.name != "greedy":
            (rival,) = outcomes(config, env, Method("greedy", temperature=0.0), [best["task_id"]], chat, models)
            print(compared(env, best, rival))
        print()


def show_results(config: Any, env: Any) -> None:
    """Print an episode of each method: of those in the result files the one with the most choices."""
    lines = [line for file in sorted(config.run.glob("results*.jsonl")) for line in read_jsonl(file)]
    for name in config.method:
        played = [line for line in lines if line["method"] == name]
        if not played:
            raise UserError(f"{config.run}: no agent, and no results of {name}, so nothing to show")
        best = max(played, key=lambda line: len(choices(line)))
        print(f"Task {best['task_id']}.", *rows_of(env, best), sep="\n")
        print(paint(f"{name}: reward {best['reward']:.3g} after {best['n_steps']} steps", "1;36"))
        print(count_of_choices(best) + "\n")


def outcomes(
    config: Any, env: Any, method: Method, tasks: Sequence[str], chat: Chat, models: Models
) -> Iterator[dict[str, Any]]:
    """The outcomes of a method in these tasks, in their order, each with its task_id."""
    width = min(config.in_flight or env.side_by_side, TOGETHER)

    async def outcome_of(task_id: str) -> dict:
        fork = env.fork()
        outcome = await method.play(fork, task_id, chat)
        fork.close()
        return {"task_id": task_id} | outcome

    title = f"{method}: looking for choices"
    for first in tqdm(range(0, len(tasks), width), title, leave=False, disable=len(tasks) == 1):
        batch = tasks[first : first + width]
        lines = {line["task_id"]: line for line in drive(map(outcome_of, batch), models, width)}
        yield from (lines[task_id] for task_id in batch)


def choices(line: dict) -> list[int]:
    """The steps, from 1, whose samples were several different actions."""
    return [number for number, step in enumerate(line["steps"], 1) if len(step["candidates"]) > 1]


# ----------------------------------------------------------------------------------------------- in words


def in_short(action: str) -> str:
    return textwrap.shorten(parse_action(action), WORD, placeholder=" ...")


def search_for(tried: Sequence[dict], best: dict, split: str) -> str:
    """Which tasks were played before the one that is shown, and why they are not shown."""
    text = f"Task {best['task_id']}. None of the first {len(tried)} {split} tasks has {SEVERAL} steps in which there "
    text += "was a choice; no task has more of them than this one."
    if len(choices(best)) >= SEVERAL:
        text = f"Task {best['task_id']}. The {len(tried) - 1} {split} tasks before it are not shown: they have fewer "
        text += f"than {SEVERAL} steps in which there was a choice."
    return textwrap.fill(text, WIDTH)


def rows_of(env: Any, line: dict) -> Iterator[str]:
    """The task, and of each step what the agent read, its candidates with their scores, the one taken."""
    page = start(env, line["task_id"]).observation
    again = sentence(line["task"])
    yield paint(line["task"] or "a new episode", "1;36")
    for number, step in enumerate(line["steps"], 1):
        text = again.sub("...", page)  # it stands above
        text = textwrap.shorten(text, 2 * WIDTH, placeholder=" ...")
        yield paint(f"step {number}", "1")
        yield textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
        yield from (f"    {row}" for row in env.picture(page).splitlines())
        yield from candidates_of(step)
        page = step["observation"]


def candidates_of(step: dict) -> Iterator[str]:
    candidates = step["candidates"] or [{"action": step["action"], "q": None}]  # a rule draws none
    scores = [candidate["q"] for candidate in candidates]
    words = [in_short(candidate["action"]) for candidate in candidates]
    column = max(map(len, words))
    for candidate, word in zip(candidates, words, strict=True):
        row = f"{word:{column}}  {bar(candidate['q'], scores)}".rstrip()
        yield "  " + (paint(f"> {row}", "32") if candidate["action"] == step["action"] else f"  {row}")


def count_of_choices(line: dict) -> str:
    """In how many steps there was a choice."""
    steps = choices(line)
    if not steps:
        return "There was no choice: in each step all samples were one action."
    places = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    text = f"There was a choice in {len(steps)} of {line['n_steps']} steps: {places}."
    return text + " In the others all samples were one action." * (len(steps) < line["n_steps"])


def compared(env: Any, line: dict, rival: dict) -> str:
    """Show the reward of the agent alone, and where the two ways part."""
    ours, theirs = ([env.canonical(parse_action(step["action"])) for step in way["steps"]] for way in (line, rival))
    text = f"The agent alone, greedy, earns {rival['reward']:.3g} after {rival['n_steps']} steps. "
    if ours == theirs:
        return text + "It goes the same way."
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
        same += 1
    rest = ", ".join(in_short(step["action"]) for step in rival["steps"][same:])
    return textwrap.fill(text + f"The ways part at step {same + 1}, from where greedy goes on with {rest}.", WIDTH)


def main(argv: list[str] | None = None) -> None:
    config = read_settings(q_search.Config, __doc__, argv)
    env, tasks = q_search.environment(config)
    plan = [method for name in config.method for method in methods_of(name, config)]
    if not (config.sft or (config.run / "sft").exists()):
        return show_results(config, env)
    if not (config.qnet or (config.run / "qnet").exists()) and any(method.needs_q for method in plan):
        raise UserError(f"{config.run / 'qnet'} is missing, and nothing is made here: q_search.py makes it")
    chat, models, _ = q_search.load(config, env, plan)
    show(config, env, tasks, plan, chat, models)


if __name__ == "__main__":
    run_stage(main)
