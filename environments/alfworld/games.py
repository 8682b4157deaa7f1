"""ALFWorld's game files: one file into an engine.Game, and a folder of them with its splits."""

import functools
import itertools
import json
import logging
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from qlass import UserError
from qlass.environment import pick

from .engine import Game, Goal, World

# What goals of the six types speak of, the marks that a state has, and the traits of a game's objects.
PREDICATES = """receptacletype objecttype inreceptacle cleanable heatable coolable isclean ishot iscool toggleable
istoggled receptacleatlocation atlocation holds"""
GOAL_PREDICATES = set(PREDICATES.split())
MARKS = ("isclean", "ishot", "iscool", "istoggled", "issliced")
TRAITS = ("openable", "opened", "pickupable", "cleanable", "heatable", "coolable", "sliceable", "toggleable")
TRAITS += ("isreceptacleobject",)
FOLDERS = ("train", "valid_train", "valid_seen", "valid_unseen")
SPLITS = {"val": ["train"]} | {folder: [folder] for folder in FOLDERS} | {"test": ["valid_unseen"], "all": FOLDERS}
UNSOLVABLE = "is marked as unsolvable"


class BadGame(ValueError):
    """A game file that can't be played; the message says why."""


def load(path: str | Path) -> Game:
    """Read a `game.tw-pddl`. Raises BadGame for a file that is truncated, not known to be solvable, or of another kind
    of task."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        solvable = data.get("solvable")
        if solvable is None:  # the original skips those too
            raise BadGame("does not say whether it is solvable (alfworld-generate finds out)")
        if not solvable:
            raise BadGame(UNSOLVABLE)
        return parse(data["pddl_problem"], data["grammar"], data.get("walkthrough") or ())
    except BadGame:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadGame(f"is no game, or the file may be truncated ({type(error).__name__}: {error})") from None


def parse(problem: str, grammar: str, walkthrough: Iterable[str] = ()) -> Game:
    """Build a game from the PDDL problem; of the grammar only the task sentence and the wording's version matter."""
    sentence = re.search(r"Your task is to: ([^\"\\]+)", grammar)
    objects, _, rest = problem.lower().partition("(:init")
    init, ended, goal = rest.partition("(:goal")
    if not ended:
        raise BadGame("lacks its (:init or (:goal part")
    if not sentence:
        raise BadGame("lacks its task sentence")
    facts = _facts(init)
    names = _names(objects.split())
    types = facts["objecttype"] + facts["receptacletype"]
    location = dict(sorted(facts["receptacleatlocation"]))
    contents: dict[str, tuple[str, ...]] = {receptacle: () for receptacle in location}
    inside: dict[str, list[str]] = defaultdict(list)
    for o, receptacle in sorted(facts["inreceptacle"]):
        contents[receptacle] += (o,)
    for o, outer in sorted(facts["inreceptacleobject"]):
        inside[outer].append(o)
    game = Game(
        task=sentence[1].strip(),
        old="put {o} in/on {r}" in grammar,
        goal=_goal(goal),
        names=names,
        kinds={i: kind.removesuffix("type") for i, kind in types},
        location=location,
        can_contain={(r.removesuffix("type"), o.removesuffix("type")) for r, o in facts["cancontain"]},
        traits={trait: {arguments[0] for arguments in facts[trait]} for trait in (*MARKS, *TRAITS)},
        inside=inside,
        walkthrough=list(walkthrough),
    )
    things = {*location, *itertools.chain(*contents.values())}
    nameless = (things - names.keys()) | (location.keys() - game.kinds.keys())
    if nameless:
        raise BadGame(f"has no object or type for {min(nameless)}")
    game.start = game.finish(
        World(
            location=facts["atlocation"][0][1],
            hand=None,
            contents=contents,
            spots=frozenset(map(tuple, facts["objectatlocation"])),
            opened=frozenset(game.traits["opened"]),
            marks=frozenset((mark, o) for mark in MARKS for o in game.traits[mark]),
            commands={},
            won=False,
        )
    )
    return game


def _facts(init: str) -> dict[str, list[list[str]]]:
    """Predicate -> the arguments of each of its facts."""
    facts: dict[str, list[list[str]]] = defaultdict(list)
    for fact in init.replace(")", " ").split("("):
        words = fact.split()
        if words:
            facts[words[0]].append(words[1:])
    return facts


def _names(words: Iterable[str]) -> dict[str, str]:
    """id -> "apple 2": the numbers of one base name run *down* along the sorted ids."""
    base = {}
    for word in words:
        name, mark, _ = word.partition("_bar_")
        if mark:
            base[word] = name + ("basin" if "basin" in word else "")
    names, left = {}, Counter(base.values())
    for i in sorted(base):
        names[i] = f"{base[i]} {left[base[i]]}"
        left[base[i]] -= 1
    return names


def _goal(text: str) -> Goal:
    unknown = set(re.findall(r"\((\w+) \?", text)) - GOAL_PREDICATES
    kinds = dict(re.findall(r"objecttype \?(\w+) (\w+)type\b", text))
    receptacle = re.search(r"receptacletype \?\w+ (\w+)type\b", text)
    if unknown or not kinds or not (receptacle or "ot" in kinds):
        raise BadGame(f"asks for a kind of goal that ALFWorld's six tasks lack ({', '.join(unknown) or 'no types'})")
    if "ot" in kinds:
        return Goal("look", kinds["o"], kinds["ot"])
    marks = {"isclean": "clean", "ishot": "heat", "iscool": "cool", "?o2": "two"}
    kind = next((kind for mark, kind in marks.items() if mark in text), "place")
    return Goal(kind, kinds.get("o") or kinds["o1"], receptacle[1])


# -------------------------------------------------------------------------------------------------------------- folders
class Games:
    """The games below a folder of ALFWorld's layout, `json_2.1.1/<split>/<task>/<trial>/game.tw-pddl`.

    A task id is `<split>/<task>/<trial>`. Splits: "valid_train" (real games only), "valid_seen" and "valid_unseen" as
    they are, "test" = valid_unseen; a tenth of the folder `train`, chosen by a hash of the id, is "val" (for choices),
    the rest "train". Games that can't be played are reported once for each split, and left out.
    """

    def __init__(self, folder: str | Path) -> None:
        self.root = Path(folder)
        if (self.root / "json_2.1.1").is_dir():
            self.root = self.root / "json_2.1.1"
        if next(self.root.glob("*/*/*/game.tw-pddl"), None) is None:
            layout = f"{folder}/json_2.1.1/<{'|'.join(FOLDERS)}>/<task>/<trial>/game.tw-pddl"
            raise UserError(
                f"{folder}: no games; {layout} are expected (`alfworld-download` fetches them: docs/models.md)"
            )
        self.load = functools.lru_cache(maxsize=512)(self._load)
        self._listed = functools.cache(self._list)

    def ids(self, split: str) -> list[str]:
        folders = pick(SPLITS, split, "alfworld: unknown split")
        tasks = [task for folder in folders for task in self._listed(folder)]
        if split in ("train", "val"):
            tasks = [task for task in tasks if _is_held_out(task) == (split == "val")]
        if not tasks:
            raise UserError(f"{self.root}: holds no playable games for the split {split!r}")
        return tasks

    def path(self, task_id: str) -> Path:
        return self.root / task_id / "game.tw-pddl"

    def _list(self, folder: str) -> list[str]:
        playable, problems = [], []
        for path in sorted((self.root / folder).glob("*/*/game.tw-pddl")):
            task_id = path.parent.relative_to(self.root).as_posix()
            if "movable" in task_id or "Sliced" in task_id:  # not among the six types; ALFWorld leaves them out too
                continue
            reason = problem(path)
            if reason is None:
                playable.append(task_id)
            else:
                problems.append(f"{path} {reason}")
        if problems:
            count = f"{len(problems)} of {len(problems) + len(playable)} games in {self.root / folder}"
            logging.getLogger("qlass").warning("skipped %s; the first: %s", count, problems[0])
        return playable

    def _load(self, task_id: str) -> Game:
        if not self.path(task_id).is_file():
            raise UserError(f"alfworld: unknown task {task_id!r}: a task is <split>/<task>/<trial> below {self.root}")
        try:
            return load(self.path(task_id))
        except BadGame as error:
            raise UserError(f"alfworld: game {task_id!r} ({self.path(task_id)}) {error}") from None

    @functools.cached_property
    def rates(self) -> dict[tuple[str, str], float]:
        """(type of object, type of receptacle) -> how many such objects lie in one such receptacle, on average over
        those of 400 games that have the object at all: what a player may expect before looking. The games are of the
        folder `train`, a tenth of which is the validation split."""
        tasks = self._listed("train")  # where there are none, nothing is expected: the other splits are for tests
        objects, places = Counter(), Counter()
        for task in tasks[:: max(1, len(tasks) // 400)]:
            try:
                game = load(self.path(task))
            except BadGame:
                continue
            there = set()
            for receptacle, contents in game.start.contents.items():
                for o in contents:
                    there.add(game.kinds.get(o))
                    objects[game.kinds.get(o), game.kinds[receptacle]] += 1
            for receptacle in game.location:
                places.update((kind, game.kinds[receptacle]) for kind in there)
        return {pair: objects[pair] / number for pair, number in places.items()}


def _is_held_out(task_id: str) -> bool:
    return zlib.crc32(task_id.encode()) % 10 == 0


def problem(path: str | Path) -> str | None:
    """The problem that keeps a file from being played, judged by its bytes: loading them all would take seconds."""
    try:
        text = Path(path).read_bytes()
        if not (text.rstrip().endswith(b"}") and b'"solvable": true' in text[-20_000:] and b"(:goal" in text):
            load(path)
    except (BadGame, OSError) as error:
        return str(error)
    return None
