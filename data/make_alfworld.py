"""Games for ALFWorld without its download: made-up rooms in ALFWorld's own files and folders.

    python data/make_alfworld.py [--seed 0] [--train 2000] [--out data/generated/alfworld-0]

Writes `json_2.1.1/{train,valid_seen,valid_unseen}/<task>/<trial>/game.tw-pddl`: all six task types over kitchens,
living rooms, bedrooms and bathrooms, numbered as in ALFWorld (1-30, 201-230, 301-330, 401-430). A number is a layout:
which receptacles there are, which of them can be opened, which stand at one spot. Training and `valid_seen` share
layouts and differ in what lies where; the layouts of `valid_unseen` occur in no other split. Every game is solved
before it is written. The same seed gives the same bytes. The evaluation splits have a seed of their own, SEED +
EVALUATION: raise EVALUATION once choices have been made in view of their results, and training stays as it is.

Domain and grammar are the same in every game of ALFWorld and half of its size, so a file holds only the lines of the
grammar that differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run by its path, this file finds the modules beside its folder only so
    sys.path.insert(0, str(Path(__file__).parents[1]))

from data.make_webshop import is_made, is_ours, place

GENERATED = Path(__file__).parent / "generated"
LAYOUTS = 30  # of each kind of room
UNSEEN = range(25, 31)  # those that training never sees
EVALUATION = 2000  # those of 1000 had been played by many agents
TRAIN, VALID_SEEN, VALID_UNSEEN = 2000, 140, 134  # of the last two as many as ALFWorld has

TABLES = Path(__file__).with_name("alfworld_rooms.json")
HOUSE = json.loads(TABLES.read_text(encoding="utf-8"))
ROOMS = HOUSE["rooms"]  # kind -> first number - 1, its receptacles with the fewest and the most of each
PLACES = HOUSE["places"]  # kind of room -> object: where it may lie, the likeliest place first
TRAITS = {trait: set(kinds.split()) for trait, kinds in HOUSE["traits"].items()}
OPENABLE = HOUSE["openable"]  # receptacle -> the share that can be opened
FIXED = TRAITS["toggleable"]


class Task(NamedTuple):
    folder: str  # how ALFWorld names the type
    share: int  # its games in ALFWorld's training split
    rooms: str
    sentences: tuple[str, ...]
    trait: str = ""  # what the object must be
    tool: str = ""  # never the target of such a task
    mark: str = ""  # what the goal asks of the object


TASKS = [
    Task("pick_and_place_simple", 790, "kitchen living bedroom bathroom",
         ("put some {o} on {r}.", "put a {o} in {r}.")),
    Task("pick_two_obj_and_place", 813, "kitchen living bedroom bathroom",
         ("put two {o} in {r}.", "find two {o} and put them in {r}.")),
    Task("pick_clean_then_place_in_recep", 650, "kitchen kitchen kitchen bathroom",
         ("put a clean {o} in {r}.", "clean some {o} and put it in {r}."), "cleanable", "SinkBasin", "isClean"),
    Task("pick_heat_then_place_in_recep", 459, "kitchen",
         ("put a hot {o} in {r}.", "heat some {o} and put it in {r}."), "heatable", "Microwave", "isHot"),
    Task("pick_cool_then_place_in_recep", 533, "kitchen",
         ("put a cool {o} in {r}.", "cool some {o} and put it in {r}."), "coolable", "Fridge", "isCool"),
    Task("look_at_obj_in_light", 308, "living bedroom",
         ("look at {o} under the {r}.", "examine the {o} with the {r}."), "", "", "isToggled"),
]  # fmt: skip


class Layout(NamedTuple):
    number: int
    kinds: dict[str, str]  # receptacle's id -> its kind
    spot: dict[str, int]  # receptacle's id -> its location; those of one spot stand side by side
    openable: set[str]


def layout(seed: int, room: str, index: int) -> Layout:
    """The receptacles of one kind of room's layout 1 to 30."""
    first, receptacles = ROOMS[room].values()
    rng = random.Random(f"alfworld-{seed}-{room}-{index}")
    layout = Layout(first + index, {}, {}, set())
    words = receptacles.split()
    for kind, count in zip(words[::2], words[1::2], strict=True):
        few, many = map(int, count.split("-"))
        for i in range(1, rng.randint(few, many) + 1):
            basin = f"_bar_{kind}" if kind.endswith("Basin") else ""
            receptacle = f"{kind.removesuffix('Basin')}_bar_{i:02d}{basin}"
            together = i > 1 and kind in ("Cabinet", "Drawer", "Shelf") and rng.random() < 0.25
            layout.spot[receptacle] = max(layout.spot.values(), default=0) + (not together)
            layout.kinds[receptacle] = kind
            if rng.random() < OPENABLE.get(kind, 0):
                layout.openable.add(receptacle)
    return layout


def trial(rng: random.Random, task: Task, room: str, place: Layout) -> tuple[str, str, str] | None:
    """One game: (folder of the task, task sentence, PDDL problem); None if this room has none of this type."""
    there = set(place.kinds.values())
    places = {o: [kind for kind in kinds.split() if kind in there] for o, kinds in PLACES[room].items()}
    places = {o: kinds for o, kinds in places.items() if kinds}
    lamps = [o for o in places if o in FIXED]
    wanted = [o for o in places if o not in FIXED and (not task.trait or o in TRAITS[task.trait])]
    wanted = [o for o in wanted if len(places[o]) > 1]
    if not wanted or (task.mark == "isToggled" and not lamps):
        return None
    o = rng.choice(wanted)
    target = lamps[0] if task.mark == "isToggled" else rng.choice([kind for kind in places[o] if kind != task.tool])
    counts = {x: rng.choices((0, 1, 2, 3), (7, 7, 4, 2))[0] for x in places}
    counts[o] = rng.choice((2, 3)) if "two" in task.folder else max(1, counts[o])
    counts |= {lamp: int(lamp == target or rng.random() < 0.7) for lamp in lamps}
    lies: list[tuple[str, str]] = []
    for x, count in counts.items():
        kinds = [kind for kind in places[x] if (x, kind) != (o, target)]  # else the task might be done at the start
        for i in range(1, count + 1):
            kind = rng.choices(kinds, [1 / rank for rank in range(1, len(kinds) + 1)])[0]
            lies.append((f"{x}_bar_{i:02d}", rng.choice([r for r in place.kinds if place.kinds[r] == kind])))
    folder = f"{task.folder}-{o}-None-{target}-{place.number}"
    sentence = rng.choice(task.sentences).format(o=o.lower(), r=target.lower())
    return folder, sentence, problem(place, places, lies, goal(task, o, target))


def problem(place: Layout, places: dict[str, list[str]], lies: list[tuple[str, str]], goal: str) -> str:
    """The PDDL problem; `lies` holds (object, receptacle)."""
    kind = {o: o.split("_bar_")[0] for o, _ in lies}
    facts = ["atLocation agent1 loc_bar_00"]
    for r, spot in place.spot.items():
        facts += [f"receptacleType {r} {place.kinds[r]}Type", f"receptacleAtLocation {r} loc_bar_{spot:02d}"]
    facts += [f"openable {r}" for r in sorted(place.openable)]
    for o, r in lies:
        facts += [f"objectType {o} {kind[o]}Type", f"inReceptacle {o} {r}"]
        facts += [f"objectAtLocation {o} loc_bar_{place.spot[r]:02d}"]
        facts += [f"pickupable {o}"] if kind[o] not in FIXED else []
        facts += [f"{trait} {o}" for trait, kinds in TRAITS.items() if kind[o] in kinds]
    facts += [f"canContain {r}Type {o}Type" for o, kinds in places.items() for r in kinds]
    spots = sorted({0, *place.spot.values()})
    objects = ["agent1 - agent", *(f"loc_bar_{spot:02d} - location" for spot in spots)]
    objects += [f"{o} - object" for o, _ in lies] + [f"{r} - receptacle" for r in place.spot]
    objects += [f"{o}Type - otype" for o in places] + [f"{r}Type - rtype" for r in sorted(set(place.kinds.values()))]
    lines = "\n".join(f"({fact})" for fact in facts)
    return (
        "(define (problem made)\n(:domain alfred)\n(:objects\n" + "\n".join(objects) + "\n)\n"
        f"(:init\n{lines}\n)\n(:goal (and {goal}))\n)\n"
    )


def goal(task: Task, o: str, target: str) -> str:
    """The goal in the words that ALFWorld's files use."""
    if task.mark == "isToggled":
        return (
            "(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and "
            f"(objectType ?ot {target}Type) (toggleable ?ot) (isToggled ?ot) "
            "(receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r))) "
            f"(exists (?o - object ?a - agent) (and (objectType ?o {o}Type) (holds ?a ?o)))"
        )
    if "two" in task.folder:
        where = f"(receptacleType ?r {target}Type) (inReceptacle"
        return (
            f"(exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 {o}Type) {where} ?o1 ?r) "
            f"(exists (?o2 - object) (and (not (= ?o1 ?o2)) (objectType ?o2 {o}Type) {where} ?o2 ?r))))))"
        )
    treated = f"({task.trait} ?o) ({task.mark} ?o) " if task.mark else ""
    return (
        f"(exists (?r - receptacle) (exists (?o - object) (and {treated}(objectType ?o {o}Type) "
        f"(receptacleType ?r {target}Type) (inReceptacle ?o ?r))))"
    )


def games(seed: int, train: int) -> Iterator[tuple[str, dict]]:
    """(path below json_2.1.1, content of the file) of every game."""
    from environments.alfworld import games
    from environments.alfworld.plans import plan

    seen = [i for i in range(1, LAYOUTS + 1) if i not in UNSEEN]
    rooms = {(room, i): layout(seed, room, i) for room in ROOMS for i in seen}
    rooms |= {(room, i): layout(seed + EVALUATION, room, i) for room in ROOMS for i in UNSEEN}
    used: set[int] = set()
    for split, count in {"train": train, "valid_seen": VALID_SEEN, "valid_unseen": VALID_UNSEEN}.items():
        source = seed if split == "train" else seed + EVALUATION
        rng = random.Random(f"alfworld-{source}-{split}")
        number = 0
        while number < count:
            [task] = rng.choices(TASKS, [task.share for task in TASKS])
            room = rng.choice(task.rooms.split())
            place = rooms[room, rng.choice(list(UNSEEN) if split == "valid_unseen" else seen)]
            if split == "valid_seen" and place.number not in used:
                continue
            drawn = trial(rng, task, room, place)
            if drawn is None:
                continue
            folder, sentence, pddl = drawn
            grammar = GRAMMAR % sentence
            game = games.parse(pddl, grammar)
            state, walkthrough = game.start, plan(game, game.start) or []
            for command in walkthrough:
                state, _ = game.step(state, command)
            if not walkthrough or not state.won:
                continue
            used.add(place.number)
            content = {"pddl_domain": "", "grammar": grammar, "pddl_problem": pddl, "solvable": True}
            yield f"{split}/{folder}/trial_{source}_{number:05d}/game.tw-pddl", content | {"walkthrough": walkthrough}
            number += 1


# What differs between games in ALFWorld's grammar: the sentence, and the wording's version.
GRAMMAR = '''grammar :: """
    {
        "task": [
            {
                "rhs": "Your task is to: %s"
            }
        ]
    }
""";

action PutObject {
    template :: "move {o} to {r}";
}
'''


def write(folder: Path, seed: int, train: int) -> Path:
    def fill(fresh: Path) -> None:
        for path, content in games(seed, train):
            file = fresh / "json_2.1.1" / path
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(content), encoding="utf-8")

    return place(folder, made_by(seed, train), fill)


def made_by(seed: int, train: int) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes() + TABLES.read_bytes()).hexdigest()
    return f"{digest} --seed {seed} --train {train}\n"


def ensure(seed: int = 0, where: Path | None = None) -> Path:
    """The folder of the default games, made on first use and again when this file or its tables have changed."""
    folder = (where or GENERATED) / f"alfworld-{seed}"
    if not is_made(folder, made_by(seed, TRAIN)):
        print(f"making ALFWorld games in {folder} ...", file=sys.stderr)
        write(folder, seed, TRAIN)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=TRAIN, help=f"training games (default: {TRAIN})")
    parser.add_argument("--out", type=Path, help="default: data/generated/alfworld-SEED, with --train -SEED-TRAIN")
    args = parser.parse_args()
    if args.train < 1:
        parser.error(f"--train {args.train}: the seen games need a training game's layout")
    from qlass import UserError

    out = args.out or GENERATED / f"alfworld-{args.seed}{f'-{args.train}' * (args.train != TRAIN)}"
    if not is_ours(out):
        parser.error(f"--out {out}: holds something else; name a new or empty folder")

    try:
        print(write(out, args.seed, args.train))
    except UserError as error:
        parser.error(str(error))
