"""Sections 1 to 7 of the page: one start on the 4x4 lake, where the exact Q* is known."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator

import numpy as np
from walkthrough.replay import Part
from walkthrough.story import Story, boxed, listed, number, table, times, written
from walkthrough.tree import Look

import sft
from build_trees import RETRIES
from environments.frozenlake import lake
from qlass.chat import State, parse_action
from qlass.fast.packing import PackedPairs, pack_pairs
from qlass.files import dumps
from train_qnet import HELD_OUT

WON, LOST, OPEN = "#aceebb", "#ffcecb", "#ffffff"
LEGEND = [(WON, "ended at the goal, r = 1"), (LOST, "ended without it, r = 0"), (OPEN, "goes on")]


class Lake(Story):
    name, row = "lake", 40

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.gamma = part.settings["gamma"]
        self.lake = lake.load(self.task())
        self.cells, self.exact = [int(self.lake.s)], [None]  # of each node: where it stands, Q*(s, a) of its action
        env, here = part.env.fork(), {}
        env.reset(options={"task_id": self.task()})
        here[self.tree[0]["node_id"]] = env.snapshot()
        for node in self.tree[1:]:
            env.restore(here[node["parent_id"]])
            move = parse_action(node["action"])
            self.exact.append(env.q_star_of(move, self.gamma))
            env.step(move)
            here[node["node_id"]] = env.snapshot()
            self.cells.append(env.cell)

    def move(self, i: int) -> str:
        if not i:
            return ""
        kind = {"a hole": ", hole", "the goal": ", goal"}.get(lake.kind(self.lake, self.cells[i]), "")
        return f"{parse_action(self.tree[i]['action'])} to {lake.name_of(self.lake, self.cells[i])}{kind}"

    def commands(self) -> str:
        return boxed("\n".join(f"$ {c['command']}\n{c['printed']}" for c in self.run["commands"]), "console")

    def trained(self) -> int:
        """Trees that QNet was trained on."""
        return self.run["trees"] - len(range(self.run["trees"])[::HELD_OUT])

    # ------------------------------------------------------------------------------------------------- demonstration

    def _demonstration(self) -> State:
        record = sft.demonstrate(self.part.env.fork(), self.task())
        return State.load(record["messages"], record["task"])

    def demonstration(self) -> str:
        turns = self._demonstration().messages[2:]
        rows = []
        for t, ((_, read), (_, wrote)) in enumerate(zip(turns[::2], turns[1::2], strict=True)):
            rows.append((t, read.split("\n")[-1], written(wrote)))
        return table(["step", "the last line that it reads", "the expert writes"], rows)

    def tokens(self) -> str:
        """The demonstration's tokens with bars between them, those that carry the loss apart from the rest."""
        decode = self.part.chat.tokenizer.decode
        ids, wrote = sft.tokens_and_mask(self.part.chat, self._demonstration(), 4096)
        stretches = []
        for mask, run in itertools.groupby(zip(ids, wrote, strict=True), key=lambda pair: pair[1]):
            lines = [""]
            for token, _ in run:
                piece = decode([token]).replace("\n", "⏎")
                if len(lines[-1] + piece) > 100:
                    lines.append("")
                lines[-1] += f"|{piece}" if lines[-1] else piece
            stretches.append(f"{'WRITES' if mask else 'reads':9}" + f"\n{'':9}".join(lines))
        return boxed("\n".join(stretches))

    def token_count(self) -> str:
        ids, wrote = sft.tokens_and_mask(self.part.chat, self._demonstration(), 4096)
        return f"{len(ids)} tokens, of which {sum(wrote)} carry the loss"

    # ------------------------------------------------------------------------------------------------------ the tree

    def first_draws(self) -> str:
        return f"{1 + RETRIES} of them: {listed(f'`{parse_action(text)}`' for text in self.part.first_draws)}"

    def expert_end(self) -> str:
        moves, steps = len(self._demonstration().messages[2:]) // 2, self.part.settings["steps"]
        if moves <= steps:
            return "every tree has a way that ends well"
        return f"its {moves} moves are cut off after {steps}, so this one ends without a reward"

    def growth(self, stage: str) -> str:
        """The tree after one of four stages of Algorithm 2; what is new in it is drawn strongly."""
        expert = 1 + [branch.by for branch in self.part.branches].index("expert")
        begin, end, words = {
            "first": (0, 1, "after the first rollout"),
            "pass": (2, expert - 1, "after the first pass"),
            "expert": (expert, expert, "with the expert's branch"),
            "whole": (expert + 1, len(self.part.branches), "after the second pass"),
        }[stage]
        looks = []
        for i, node in enumerate(self.tree):
            fill = (WON if node["reward"] else LOST) if node["done"] else OPEN
            beside = f"r = {number(node['reward'])}" if node["done"] else ""
            look = Look(str(i), self.move(i), beside=beside, fill=fill, strong=node["branch"] >= begin)
            looks.append(look if node["branch"] <= end else None)
        new = sum(look.strong for look in looks[1:] if look)  # the root is no new node
        return self.figure(stage, looks, f"The tree {words}: {times(new, 'new node')}", LEGEND)

    def branches(self) -> str:
        """Each branch of Algorithm 2 as it was watched, and the queue after it."""
        rows = []
        for number_, branch in enumerate(self.part.branches, 1):
            made = [i for i, node in enumerate(self.tree) if i and node["branch"] == number_]
            reward = number(self.tree[made[-1]]["reward"]) if made else ""
            rows.append((number_, branch.by, branch.begin, listed(made) or "none, all known", reward,
                         listed(branch.pushed) or "none", ", ".join(map(str, branch.queue)) or "empty"))  # fmt: skip
        head = ["branch", "by", "from node", "new nodes", "r at its end", "pushed", "the queue then"]
        return table(head, rows)

    # --------------------------------------------------------------------------------------------- backup and labels

    def backup(self) -> str:
        """Eq. (7) by hand, from the leaves to the root, beside bellman.py's values and the exact Q*."""
        rows = []
        for i, node in reversed(list(enumerate(self.tree))):
            hand = f"{number(node['reward'])}, a leaf"
            if self.children[i]:
                below = [number(self.tree[child]["q_raw"], 5) for child in self.children[i]]
                value = node["reward"] + self.gamma * max(map(float, below))
                best = f"max({', '.join(below)})" if len(below) > 1 else below[0]
                hand = f"{number(node['reward'])} + {self.gamma} × {best} = {number(value, 5)}"
            rows.append((i, self.move(i) or "the root", listed(self.children[i]), hand, number(node["q_raw"], 5),
                         number(node["q"], 5), "" if self.exact[i] is None else number(self.exact[i], 5)))  # fmt: skip
        return table(["node", "action", "children", "by hand", "`q_raw`", "`q`", "exact Q\\*"], rows)

    def against_truth(self) -> str:
        """Where the tree's values are below Q*."""
        actions = list(enumerate(zip(self.tree, self.exact, strict=True)))[1:]
        gaps = {i: exact - node["q_raw"] for i, (node, exact) in actions}
        missed = [i for i, gap in gaps.items() if gap > 1e-9]
        text = f"Of the {len(gaps)} actions in this tree {len(gaps) - len(missed)} have exactly their Q\\*."
        if not missed:
            return text
        worst = max(missed, key=gaps.__getitem__)
        return (
            f"{text} Too low {'is' if len(missed) == 1 else 'are'} {listed(missed)}: no branch below found the best "
            f"way on, and a tree knows only what was tried. None is further off than node {worst}, with "
            f"{number(self.tree[worst]['q_raw'])} instead of {number(self.exact[worst])}. Too high can't happen here; "
            "on slippery ice it can, since a tree keeps its luckiest child."
        )

    def min_max(self) -> str:
        raw = [node["q_raw"] for node in self.tree]
        low, high = number(min(raw)), number(max(raw))
        same = " Here that changes nothing." if (low, high) == ("0", "1") else ""
        scale = f"q = (`q_raw` − {low}) / ({high} − {low})"
        return f"The lowest value in this tree is {low}, the highest {high}: {scale}.{same}"

    def label_lines(self) -> str:
        """The first two lines of q_labels.jsonl, long texts cut."""

        def shortened(value: object) -> object:
            if isinstance(value, list):
                return [{name: shortened(text) for name, text in value[0].items()}, "..."]
            return value[:60] + "..." if isinstance(value, str) and len(value) > 70 else value

        lines = [dumps({name: shortened(value) for name, value in node.items()}) for node in self.tree[:2]]
        return boxed("\n".join("\n".join(textwrap.wrap(line, 116)) + "\n" for line in lines), "json")

    # ---------------------------------------------------------------------------------------------------------- QNet

    def _packed(self) -> tuple[PackedPairs, list[list[int]]]:
        """The tree's pairs packed as train_qnet.py packs them, and the path of each through the token tree."""
        (packed,) = pack_pairs(self.part.chat, self.part.pairs, "all", max_tokens=1_000_000)
        return packed, [packed.tree.above(end)[::-1] for end, _ in packed.ends.tolist()]

    def sharing(self) -> str:
        packed, _ = self._packed()
        return (
            f"The {packed.pairs} pairs of this tree are {packed.tokens:,} tokens one by one, and {len(packed.tree):,} "
            f"when each shared beginning is kept once: {packed.tokens / len(packed.tree):.1f} times fewer."
        )

    def shared_tokens(self) -> str:
        """Some tokens of the packed tree: how many pairs run through each, with what weight and what mean target."""
        packed, paths = self._packed()
        family = max(self.families(), key=lambda f: np.ptp([self.tree[i]["q"] for i in f]))
        prompt = self.part.chat.prompt(self.part.pairs[family[0] - 1].state)
        chosen = [(paths[0][0], "the very first")]
        chosen.append((paths[family[0] - 1][len(prompt) - 1], f"the last before {listed(family)} part"))
        chosen += [(paths[i - 1][-1], f"the last of node {i}'s action") for i in family]
        rows = []
        for token, what in chosen:
            piece = self.part.chat.tokenizer.decode([packed.tree.ids[token]]).replace("\n", "⏎")
            weight = packed.weight[token]
            rows.append((f"`{piece}`", what, sum(token in path for path in paths), number(weight),
                         number(packed.weighted_q[token] / weight)))  # fmt: skip
        return table(["token", "which one", "pairs through it", "W", "mean q"], rows)

    def siblings(self) -> str:
        rows = []
        for family in self.families():
            for i in family:
                score = number(self.score(i))
                best = i == max(family, key=self.score)
                cell = lake.name_of(self.lake, self.cells[self.tree[i]["parent_id"]])
                rows.append((cell, i, f"`{parse_action(self.tree[i]['action'])}`", number(self.tree[i]["q"]),
                             f"**{score}**" if best else score, number(self.exact[i])))  # fmt: skip
        return table(["in cell", "node", "action", "q of the tree", "QNet", "exact Q\\*"], rows)

    # ------------------------------------------------------------------------------------------------- guided search

    def episode_task(self) -> str:
        return self.part.episodes["qlass"]["task_id"]

    def _steps(self, method: str) -> Iterator[tuple[dict, str, dict[str, float]]]:
        """Each step of an episode, with the cell that it starts in and Q* of the four moves there."""
        env = self.part.env.fork()
        env.reset(options={"task_id": self.part.episodes[method]["task_id"]})
        for step in self.part.episodes[method]["steps"]:
            exact = {move: env.q_star_of(move, self.gamma) for move in lake.MOVES}
            yield step, lake.name_of(env.lake, env.cell), exact
            env.step(parse_action(step["action"]))

    def guided_step(self) -> str:
        """The step with most candidates: what was drawn, what QNet says of it, what is taken, what Q* says."""
        steps = list(self._steps("qlass"))
        t = max(range(len(steps)), key=lambda t: len(steps[t][0]["candidates"]))
        step, cell, exact = steps[t]
        drawn = [parse_action(text) for text in self.part.drawn["qlass"][t]]
        candidates = {parse_action(c["action"]): c["q"] for c in step["candidates"]}
        taken, best = parse_action(step["action"]), max(exact[move] for move in candidates)
        rows = [
            (f"`{move}`", drawn.count(move), f"{q:.4f}", number(exact[move]), "taken" if move == taken else "")
            for move, q in candidates.items()
        ]
        right = exact[taken] > best - 1e-9
        verdict = "No candidate has a higher Q\\*." if right else f"That is wrong: {number(best)} was on offer."
        spread, true = np.ptp(list(candidates.values())), np.ptp([exact[move] for move in candidates])
        return "\n\n".join([
            f"Step {t}, in cell {cell}. The {len(drawn)} draws are {listed(f'`{move}`' for move in drawn)}:",
            table(["candidate", "drawn", "Q(s, a) by QNet", "exact Q\\*", ""], rows),
            f"The argmax is `{taken}`. {verdict} QNet's values lie {number(spread)} apart, the exact ones "
            f"{number(true)}: only the order matters to the search.",
        ])  # fmt: skip

    def episode(self, method: str) -> str:
        rows = []
        for t, (step, cell, exact) in enumerate(self._steps(method)):
            moves = [(parse_action(c["action"]), c["q"]) for c in step["candidates"]]
            shown = ", ".join(f"`{move}`" + ("" if q is None else f" {q:.3f}") for move, q in moves)
            best = " or ".join(f"`{move}`" for move, q in exact.items() if q > max(exact.values()) - 1e-9)
            answer = step["observation"].removeprefix(self.part.env.prefix)
            rows.append((t, cell, shown, f"**{parse_action(step['action'])}**", best, answer))
        return table(
            ["step", "cell", "candidates", "taken", "best of all moves by Q\\*", "the environment answers"], rows
        )

    def choices(self) -> str:
        """In how many of QLASS's steps with a choice by Q* the best candidate was taken."""
        right = []
        for step, _, exact in self._steps("qlass"):
            offered = [exact[parse_action(c["action"])] for c in step["candidates"]]
            if max(offered) - min(offered) > 1e-9:
                right.append(exact[parse_action(step["action"])] > max(offered) - 1e-9)
        if not right:
            return "No step had candidates of different Q\\*."
        steps = times(len(right), "step")
        return f"Of {steps} with candidates of different Q\\* it took the best candidate in {sum(right)}."

    def chosen(self) -> str:
        if self.gain() > 0:
            return "This start was chosen: of the test starts it is the one where QNet helps most."
        return "On no test start QNet helps; this one was chosen since it offers most candidates."
