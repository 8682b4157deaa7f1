"""Section 8 of the page: one WebShop task."""

from __future__ import annotations

from walkthrough.story import Story, boxed, number, table, wrapped

from qlass.chat import State, parse_action
from qlass.tiny import MARK

PARTS_OF_REWARD = {"r_type": "kind of product", "r_att": "attributes", "r_option": "options", "r_price": "price"}


def short(action: str) -> str:
    """A shop's action in two or three words: a product by its brand and price, an option by its name and value."""
    thought, _, executable = action.removeprefix("Thought: ").rpartition("\nAction: ")
    if executable.startswith("search["):
        return "search"
    words = thought.split()
    if len(words) > 2 and words[1].startswith("$"):  # place, price, title
        return f"{words[2]} {words[1]}"
    return thought or executable


class Shop(Story):
    name = "shop"

    def move(self, i: int) -> str:
        return short(self.tree[i]["action"]) if i else ""

    def seen(self, i: int) -> str:
        """The page without the sentence that stands on all of them."""
        return super().seen(i).replace(f"Instruction: [SEP] {self.tree[0]['task']} [SEP] ", "")

    def sentence(self) -> str:
        return self.tree[0]["task"]

    def first_page(self) -> str:
        return boxed(wrapped(self.tree[0]["observation"]))

    def page_as_read(self) -> str:
        """The results page of the first rollout, as the environment sends it and as the tiny model reads it."""
        nodes = [node for node in self.tree if node["branch"] == 1][:1]
        state = State.load(self.tree[0]["messages"], self.tree[0]["task"])
        for node in nodes:
            state = state.then(node["action"], node["observation"])
        read = self.part.chat.tokenizer.decode(self.part.chat.message_tokens(state)[-1]).replace(MARK, f" {MARK}")
        return boxed(f"sent:\n{wrapped(nodes[-1]['observation'])}\n\nread:\n{wrapped(read)}")

    def counts(self) -> str:
        leaves = [node for node in self.tree if node["done"]]
        own = [node["reward"] for node in leaves if node["source"] == "policy"]
        return (
            f"{len(self.tree)} nodes and {len(leaves)} leaves; the agent's own {len(own)} end with rewards from "
            f"{number(min(own), 2)} to {number(max(own), 2)}, {number(sum(own) / len(own), 2)} on average"
        )

    def held_out(self) -> str:
        found = self.run["held_out"]
        return (
            f"it has {found['sibling_accuracy']:.3f} of {found['sibling_pairs']} such pairs in order; a coin has .5, "
            f"the agent's own log-probability {found['policy_sibling_accuracy']:.3f}"
        )

    def chosen(self) -> str:
        if self.gain() > 0:
            return (
                "of the held-out tasks where QLASS gets more than the greedy agent it is the one with the smallest tree"
            )
        return "on no held-out task QLASS gets more than the greedy agent; this one has the smallest tree"

    def tally(self) -> str:
        """All held-out tasks, not only the one that is shown."""
        t = self.run["tally"]
        equal = t["tasks"] - t["better"] - t["worse"]
        return (
            f"Over all {t['tasks']} held-out tasks the greedy agent's mean reward is {t['greedy']:.3f} and QLASS's "
            f"{t['qlass']:.3f}; QLASS is better on {t['better']}, worse on {t['worse']}, equal on {equal}"
        )

    def episode(self, method: str) -> str:
        rows = []
        for t, step in enumerate(self.part.episodes[method]["steps"]):
            cells = []
            for c in step["candidates"]:
                words = short(c["action"]) + ("" if c["q"] is None else f" {c['q']:.3f}")
                cells.append(f"**{words}**" if c["action"] == step["action"] else words)
            rows.append((t, "; ".join(cells), f"`{parse_action(step['action'])}`"))
        return table(["step", "candidates" + " and q" * (method == "qlass"), "taken"], rows)

    def bought(self, method: str) -> str:
        """What an episode came to, by the environment's own reward details."""
        env, result = self.part.env.fork(), self.part.episodes[method]
        _, info = env.reset(options={"task_id": result["task_id"]})
        for step in result["steps"]:
            _, reward, _, _, info = env.step(parse_action(step["action"]))
        details = info.get("reward_details")
        if details is None:
            return f"reward {number(reward, 2)}, nothing bought in {len(result['steps'])} steps"
        parts = [
            f"{words} {number(float(details[k]), 2)}"
            for k, words in PARTS_OF_REWARD.items()
            if details.get(k) is not None
        ]
        return f"reward {number(reward, 2)} ({', '.join(parts)})"

    def shortfall(self) -> str:
        best = max((node for node in self.tree if node["done"]), key=lambda node: node["reward"])
        reward, by = (
            self.part.episodes["qlass"]["reward"],
            "the expert's" if best["source"] == "expert" else "the agent's",
        )
        if reward > best["reward"] - 1e-9:
            return "No purchase in the tree is worth more than QLASS's."
        return f"The best purchase in the tree, {by}, is worth {number(best['reward'], 2)}: QLASS misses it."

    def parting(self) -> str:
        """Where the two episodes part, and what QNet thought of the greedy agent's choice."""
        greedy, qlass = (self.part.episodes[method]["steps"] for method in ("greedy", "qlass"))
        for t, (own, guided) in enumerate(zip(greedy, qlass, strict=False)):
            if parse_action(own["action"]) != parse_action(guided["action"]):
                q = {parse_action(c["action"]): c["q"] for c in guided["candidates"]}
                its, other = q[parse_action(guided["action"])], q.get(parse_action(own["action"]))
                thought = "which is not among the four draws" if other is None else f"to which QNet gives {other:.3f}"
                return (
                    f"The two part at step {t}: the greedy agent takes “{short(own['action'])}”, {thought}; QLASS "
                    f"takes “{short(guided['action'])}” with {its:.3f}."
                )
        return "The two take the same steps."
