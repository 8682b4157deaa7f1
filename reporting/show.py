"""An episode on the terminal: where the search had a choice, and what the agent without it, greedy, does there.

    python -m reporting.show --run runs/demo -M 4    # the flags are q_search.py's; nothing is written

The command plays what the run has: it makes no agent and no QNet. Of a chat model's run it shows what is in the result
files, and asks for nothing.

Most steps leave nothing to choose, since all samples are the same action. So of the first tasks that the command names
(with M = 1 of the first alone) one is shown that earns most, and of these the one in whose episode most steps have a
choice.
"""

import dataclasses
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

import q_search
from q_search import Method, methods_of
from qlass import UserError
from qlass.batching import drive
from qlass.files import read_jsonl
from qlass.messages import parse_action, start
from qlass.settings import read_settings, run_stage
from qlass.tiny import sentence
from reporting.results import choices, worth

TRIED = 64  # tasks at most, in search of an episode with choices
WIDTH = 100  # columns
PICK = "one that earns most, and of these the one with the most choices"
BAR = 24  # columns of a bar for Q = 1
WORD = 48  # columns of an action, at most


def paint(text: str, code: str) -> str:
    """Colour a text on a terminal; in a pipe it stays plain."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text


def played(search: q_search.Search, method: Method, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The outcomes of a method by task. Nothing is written."""

    async def outcome_of(task_id: str) -> dict:
        fork = search.env.fork()
        outcome = await method.play(fork, task_id, search.chat)
        fork.close()
        return {"task_id": task_id} | outcome

    lines = drive(map(outcome_of, tasks), search.backends, search.env.side_by_side)
    return {line["task_id"]: line for line in tqdm(lines, f"{method}", len(tasks), leave=False)}


def show(search: q_search.Search, plan: Sequence[Method]) -> None:
    """Print an episode of each method of the plan, and what greedy does in its task."""
    if not search.tasks:
        raise UserError("no tasks are left: mind --split, --skip and --limit")
    for method in plan:
        tried = search.tasks[: TRIED if method.M > 1 else 1]
        lines = played(search, method, tried)
        best = max((lines[task_id] for task_id in tried), key=worth)
        mean = sum(line["reward"] for line in lines.values()) / len(lines)
        print(f"Task {best['task_id']}: of {len(tried)} {search.config.split} tasks {PICK}.")
        print(f"On average they earn {mean:.3f}.\n")
        print_episode(search.env, best, str(method))
        if method.name != "greedy":
            greedy = played(search, Method("greedy", temperature=0.0), [best["task_id"]])
            print(compared(search.env, best, *greedy.values()))
        print()


def show_results(config: Any, plan: Sequence[Method], env: Any) -> None:
    """Print an episode of each method, of those in the result files."""
    lines = [line for file in sorted(config.run.glob("results*.jsonl")) for line in read_jsonl(file)]
    for method in plan:
        fields = {"split": config.split} | method.settings()
        of_method = [line for line in lines if fields.items() <= line.items()]
        if not of_method:
            raise UserError(f"{config.run}: no agent, and no {config.split} results of {method}, so nothing to show")
        best = max(of_method, key=worth)
        print(f"Task {best['task_id']}: {PICK}.\n")
        print_episode(env, best, str(method))


# ----------------------------------------------------------------------------------------------- in words


def in_short(action: str) -> str:
    return textwrap.shorten(parse_action(action), WORD, placeholder=" ...")


def print_episode(env: Any, line: dict, method: str) -> None:
    """The task, and of each step what the agent read and its candidates with their scores; the reward."""
    page = start(env, line["task_id"]).observation
    again = sentence(line["task"])
    print(paint(line["task"] or "a new episode", "1;36"))
    for number, step in enumerate(line["steps"], 1):
        text = again.sub("...", page)  # it stands above
        text = textwrap.shorten(text, 2 * WIDTH, placeholder=" ...")
        print(paint(f"step {number}", "1"))
        print(textwrap.indent("\n".join([*textwrap.wrap(text, WIDTH - 2), env.picture(page)]), "  ").rstrip())
        print(*candidates_of(step), sep="\n")
        page = step["observation"]
    print(paint(f"{method}: reward {line['reward']:.3g} after {line['n_steps']} steps", "1;36"))
    steps = ", ".join(map(str, choices(line))) or "none"
    print(f"Steps with a choice: {steps}.")


def candidates_of(step: dict) -> Iterator[str]:
    """A line for each candidate, with a bar as long as its Q; the one taken has a mark."""
    candidates = step["candidates"] or [{"action": step["action"], "q": None}]  # a rule draws none
    column = max(len(in_short(candidate["action"])) for candidate in candidates)
    for candidate in candidates:
        row, q = f"{in_short(candidate['action']):{column}}", candidate["q"]
        if q is not None:
            bar = "█" * round(BAR * min(max(q, 0), 1))
            row += f"  {bar:{BAR}} {q:.3f}"
        yield "  " + (paint(f"> {row}", "32") if candidate["action"] == step["action"] else f"  {row}").rstrip()


def compared(env: Any, line: dict, rival: dict) -> str:
    """The reward of the agent alone, and where the two ways part."""
    ways = [[env.canonical(parse_action(step["action"])) for step in way["steps"]] for way in (line, rival)]
    same = 0
    while ways[0][: same + 1] == ways[1][: same + 1] and same < len(ways[1]):
        same += 1
    rest = ", ".join(in_short(step["action"]) for step in rival["steps"][same:])
    text = f"The agent alone, greedy, earns {rival['reward']:.3g} after {rival['n_steps']} steps. "
    text += f"From step {same + 1} on it goes on with {rest}." if rest else "It goes the same way."
    return textwrap.fill(text, WIDTH)


def main(argv: list[str] | None = None) -> None:
    config = read_settings(q_search.Config, __doc__, argv)
    # Nothing is written, so flags may be others than those of the results that are there.
    search = q_search.Search(dataclasses.replace(config, overwrite=True))
    plan = [method for name in config.method for method in methods_of(name, config)]
    if not (config.sft or (config.run / "sft").exists()):
        return show_results(config, plan, search.env)
    if not (config.qnet or (config.run / "qnet").exists()) and any(method.needs_q for method in plan):
        raise UserError(f"{config.run / 'qnet'} is missing, and nothing is made here: q_search.py makes it")
    search.load(plan)
    show(search, plan)


if __name__ == "__main__":
    run_stage(main)
