"""ScienceWorld behind `envs.TextEnv`: its rules are the simulator's that simulator.py drives."""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

from qlass.environment import Player, TextEnv, pick

from . import expert, simulator, tasks


class SciWorldEnv(TextEnv):
    """ScienceWorld on the simulator of the `scienceworld` package (see simulator.py).

    Tasks are `split/name/variation`; "test_seen" is the package's dev split and "test_unseen" its test split, as ETO
    has them. max_steps "eto": ETO's own limit for each task. simulators: how many JVMs (0.5 GB each) may run at once.
    tasks: "all" 30, or "eto" for the 24 that ETO has. No split has more than a few dozen variations of a task.
    split_file: published splits instead (tasks.published_ids).
    Doors stand open and there is teleporting: the simulator's "easy" simplifications, as ETO and the paper have them.
    The reward is the best score of the episode, 0 to 1: it ends when the task is done, spoilt, or out of steps.
    A restore replays the actions of the episode, unless a simulator is there already.
    """

    name = "sciworld"
    tree_depth, tree_steps, side_by_side = 6, 18, 4
    replay_every = 10  # a simulator takes seconds to begin a task
    omniscient = True  # the simulator's own solutions
    instruction = (
        "You are a scientist who does an experiment in a building and its surroundings. Its rooms are: kitchen, "
        "foundry, workshop, bathroom, outside, living room, bedroom, greenhouse, art studio, hallway.\n"
        "Explore, find what you need, and complete the experiment. You can teleport to any room in one step.\n\n"
        "The actions are, with an object for OBJ and a room for LOC:\nlook around\nteleport to LOC\nlook at OBJ\n"
        "open OBJ\nclose OBJ\n"
        "pick up OBJ\nput down OBJ\nmove OBJ to OBJ\npour OBJ into OBJ\nmix OBJ\nactivate OBJ\ndeactivate OBJ\n"
        "use OBJ on OBJ\nconnect OBJ to OBJ\ndisconnect OBJ\nread OBJ\neat OBJ\ninventory\n"
        "focus on OBJ: tell that this is the object that the task asks for\nwait: let 10 steps pass\n"
        "wait1: let one step pass\n\n"
        "Your response should use the following format:\nThought: your thoughts\nAction: your next action"
    )

    def __init__(
        self,
        tasks: str = "all",
        split_file: str | Path | None = None,
        simulators: int = 4,
    ) -> None:
        super().__init__()
        self.tasks, self.split_file = tasks, split_file
        self.side_by_side = simulators
        self.pool = simulator.simulators()
        self.pool.size = simulators

    @property
    def version(self) -> str:
        return metadata.version("scienceworld")

    def split_ids(self, split: str) -> list[str]:
        ids = tasks.published_ids(self.split_file) if self.split_file else tasks.task_ids(self.tasks)
        return list(pick(ids, split, "sciworld: unknown split"))

    def published_id(self, record: dict) -> str | None:
        return tasks.published_id(str(record.get("id")))

    def canonical(self, action: str) -> str:
        """The simulator reads small letters, and words between blanks."""
        return " ".join(action.lower().split())

    def task_type(self, task_id: str) -> str:
        return task_id.split("/")[1]

    def begin(self, task_id: str) -> str:
        problem = tasks.find_task(task_id)
        start = simulator.Turn(self.pool.description(problem), 0.0, False)
        self.load((problem, (), (), (), (), 0.0, start))
        return start.observation

    def act(self, action: str) -> tuple[str, float, bool]:
        self.turn, self.played = self.pool.step(self.problem, self.played, action)
        self.recent = (*self.recent, (action, self.turn.observation))[-3:]
        self.inventory = expert.inventory_after(self.inventory, self.turn.observation)
        arrives = self.turn.observation.startswith(("You teleport to ", "You move to "))
        self.read_here = (*(() if arrives else self.read_here), self.turn.observation)
        self.best = max(self.best, self.turn.score)
        return self.turn.observation, self.best if self.turn.over else 0.0, self.turn.over

    @property
    def task(self) -> str:
        return self.pool.description(self.problem).removeprefix("Task Description:\n")

    def step_limit(self) -> int | None:
        return tasks.eto_steps(self.problem) if self.max_steps == "eto" else self.max_steps

    def knows(self, action: str) -> bool:
        turn, _ = self.pool.step(self.problem, self.played, action)  # remembered for the step
        return not turn.observation.startswith(simulator.UNKNOWN)

    def reward_if_cut(self) -> float:
        return self.best

    def info(self) -> dict[str, Any]:
        score = self.turn.score
        info = {"task_id": self.task_id, "task": self.task, "feedback": self.turn.observation}
        info |= {"score": score, "won": score >= 1}
        return info | dict.fromkeys(("valid_actions", "admissible_commands"), self.valid_actions())

    def valid_actions(self) -> list[str]:
        """Actions on things within reach, but for those that the agent holds and has not read of."""
        return self.pool.valid_actions(self.problem, self.played, expert.words(" ".join(self.inventory)))

    def candidates(self) -> list[tuple[str, str]]:
        """At most 60 actions (see expert.candidates), with things that the agent has read of since it came here, or
        that it holds by what it has read; where the simulator asks which object is meant, the answers."""
        if self.recent and self.recent[-1][1].startswith(simulator.AMBIGUOUS):
            return [(meant, str(i)) for i, meant in enumerate(simulator.choices(self.recent[-1][1]))]
        recent = " ".join(f"{a} {o}" for a, o in self.recent if not re.match("This (room|outside location) is", o))
        knowledge = " ".join(self.inventory), " ".join(self.read_here)
        actions = expert.candidates(self.valid_actions(), self.task, recent, *knowledge)
        return [(expert.thought(action), action) for action in actions]

    def expert(self, task_id: str) -> Player:
        """The simulator's own solution, shortened: omniscient. It goes where things are and focuses on what is right
        without having seen either, so a clone can imitate its ways, not its choices."""
        for action in expert.expert_plan(tasks.find_task(task_id)):
            yield expert.thought(action), action

    def save(self) -> tuple:
        return self.problem, self.played, self.recent, self.inventory, self.read_here, self.best, self.turn

    def load(self, saved: tuple) -> None:
        self.problem, self.played, self.recent, self.inventory, self.read_here, self.best, self.turn = saved
        self.pool.players.add(self)

    def forget(self) -> None:
        self.pool.forget(self.problem)

    def close(self) -> None:
        """Leave the simulator to others; it ends with this process, or by `simulator.simulators().close()`."""
        self.pool.players.discard(self)
