"""ETO: which pairs are made, the DPO loss by hand, packed pairs against trajectories one by one, and that it learns."""

import argparse
import json
import math
import shutil

import pytest
import torch
from fakes import WORLD, FakeEnv, best, dump, tiny_lm, word_chat
from test_training import labelled_tree, launch
from torch.testing import assert_close

import sft
from experiments import eto
from experiments.decisions import Decision
from experiments.eto import dpo_loss, failures, pack_preferences, siblings, trajectory_logprobs
from qlass import UserError
from qlass.chat import Rendering, State, parse_action, react
from qlass.policy import Policy


def trajectory(*actions, reward=0.0, task="train0"):
    """A walk through the fake world as a line of expert.jsonl."""
    state = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "find the purse")
    for i, action in enumerate(actions[:-1]):
        state = state.then(react("hm", action), " ".join(["you stand at start", *actions[: i + 1]]))
    messages = [*state.dump(), {"role": "assistant", "content": react("hm", actions[-1])}]
    return {"task_id": task, "env": "fake", "task": state.task, "messages": messages, "reward": reward}


def decisions(line, candidates="free"):
    state = State.load(line["messages"], line["task"])
    return eto.decisions(FakeEnv(), Rendering(candidates=candidates), line["task_id"], state)


# --------------------------------------------------------------------------------------------------------- preferences


def test_decisions_are_what_the_agent_wrote_each_in_its_state():
    found = decisions(trajectory("left", "right", "left"))
    assert [parse_action(d.action) for d in found] == ["left", "right", "left"]
    assert [d.state.messages[-1][1] for d in found] == [
        "you stand at start", "you stand at start left", "you stand at start left right"]  # fmt: skip
    assert not any(d.valid for d in found)  # "OK" is the layout's
    assert {d.state.task for d in found} == {"find the purse"}  # else its words have no marks


def test_an_agent_that_chooses_among_the_valid_actions_is_trained_to_choose():
    line = trajectory("left", "right", "left")
    found = decisions(line, "valid")
    assert [(d.state, d.action) for d in found] == [(d.state, d.action) for d in decisions(line)]
    offered = {"Action: left", "Action: right"}
    assert [set(d.valid) for d in found] == [offered | {d.action} for d in found]  # "hm" is no thought of FakeEnv's
    (pack, steps), *_ = pack_preferences(word_chat(), [(found, found[:1])], 2048)
    assert len(pack.options) == 9 and not pack.free and [step[:2] for step in steps] == [(0, 0)] * 3 + [(0, 1)]

    nodes = tree((0, "Action: right", 0.9), (1, "Action: left", 0.1), (1, "Action: right", 0.8), task="train0")
    ((win, lose),) = siblings(FakeEnv(), Rendering(candidates="valid"), nodes)
    assert win[0].action == "Action: right" and lose[0].action == "Action: left"
    assert set(win[0].valid) == set(lose[0].valid) == offered and win[0].state == lose[0].state


def test_the_only_valid_action_is_no_choice():
    class Alone(FakeEnv):
        """One way out of the first room."""

        def candidates(self):
            return super().candidates()[bool(not self.path) :]

    state = State.load(trajectory("right", "left")["messages"], "find the purse")
    both = [(role, text.replace("Thought: hm\n", "")) for role, text in state.messages]
    found = eto.decisions(Alone(), Rendering(candidates="valid"), "train0", State(tuple(both), state.task))
    ((pack, steps),) = pack_preferences(word_chat(), [(found, found[:1])], 2048)
    assert pack.owner == [1] and len(pack.options) == 2
    assert trajectory_logprobs(tiny_lm(word_chat()), pack, steps)[1].tolist() == [0]  # log 1


def test_the_better_trajectory_is_preferred_and_equals_are_no_pair():
    expert = {"a": trajectory("right", reward=1.0, task="a"), "b": trajectory("left", reward=0.4, task="b")}
    played = [trajectory("left", reward=r, task=t) for t, r in (("a", 0.2), ("a", 1.0), ("b", 0.5))]
    found = failures(None, Rendering(), played, expert)
    pairs = [tuple(parse_action(side[0].action) for side in pair) for pair in found]
    assert pairs == [("right", "left"), ("left", "left")]
    rounded = trajectory("right", reward=1.0 - 1e-9, task="a")  # as a published file may hold it
    assert not list(failures(None, Rendering(), [rounded], expert))
    (_, (win, lose)) = failures(None, Rendering(), [played[2], played[2]], expert)
    assert win == decisions(played[2]) and lose == decisions(expert["b"])


def tree(*nodes, task="t"):
    root = {"task_id": task, "node_id": 0, "parent_id": None, "action": None, "observation": "you stand", "reward": 0,
            "q": 0.5, "nodes": len(nodes) + 1, "task": "find",
            "messages": trajectory("left")["messages"][:3]}  # fmt: skip
    return [root] + [
        {"task_id": task, "node_id": i, "parent_id": parent, "action": action, "observation": "x", "reward": 0, "q": q}
        for i, (parent, action, q) in enumerate(nodes, 1)
    ]


def test_the_best_sibling_is_preferred_to_each_that_is_worse_by_more_than_the_gap():
    nodes = tree((0, "a", 0.9), (1, "c", 0.3), (1, "d", 1.0), (0, "b", 0.2), (0, "e", 0.88))
    found = list(siblings(None, Rendering(), nodes))
    assert [(win[0].action, lose[0].action) for win, lose in found] == [("a", "b"), ("d", "c")]
    assert all(win[0].state == lose[0].state for win, lose in found)


# ------------------------------------------------------------------------------------------------------------ the loss


def test_dpo_loss_by_hand():
    win, lose, reference_win, reference_lose = torch.tensor([[-1.0, -2.0], [-3.0, -2.0], [-2.0, -2.0], [-2.0, -2.0]])
    # margins: (-1 + 2) - (-3 + 2) = 2 and 0
    loss = dpo_loss(win, lose, reference_win, reference_lose, beta=0.1)
    assert_close(loss, torch.tensor([math.log(1 + math.exp(-0.2)), math.log(2)]))
    assert dpo_loss(win, lose, win, lose, beta=5.0).tolist() == pytest.approx([math.log(2)] * 2)


@pytest.fixture
def pairs():
    walks = [("left", "left"), ("left", "right", "left"), ("right", "right", "right"), ("right", "left")]
    whole = [decisions(trajectory(*walk)) for walk in walks]
    return [(whole[2], whole[0]), (whole[1], whole[0]), (whole[2], whole[3])]


@pytest.mark.parametrize("room", [1, 2048])
def test_packed_pairs_have_the_loss_and_the_gradient_of_trajectories_one_by_one(pairs, room):
    chat = word_chat()
    model, reference = tiny_lm(chat), tiny_lm(chat, 1)

    def log_pi(lm, side):
        total = torch.zeros(())
        for d in side:
            prompt, action = chat.prompt(d.state), chat.action(d.action, d.state.task)
            logits = lm(input_ids=torch.tensor([prompt + action])).logits[0, len(prompt) - 1 : -1]
            total = total + logits.log_softmax(-1).gather(-1, torch.tensor(action)[:, None]).sum()
        return total

    plain = sum(
        dpo_loss(log_pi(model, w), log_pi(model, l), log_pi(reference, w), log_pi(reference, l), 0.1)
        for w, l in pairs  # noqa: E741
    )
    plain.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    packs = list(pack_preferences(chat, pairs, room))
    assert len(packs) == (len(pairs) if room == 1 else 1)
    total = 0.0
    for some, steps in packs:
        anchor = trajectory_logprobs(reference, some, steps).detach()
        loss = dpo_loss(*trajectory_logprobs(model, some, steps), *anchor, 0.1).sum()
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(plain.item(), rel=1e-5)
    for name, p in model.named_parameters():
        assert_close(p.grad, gradients[name], atol=1e-5, rtol=1e-3)


def test_what_a_pair_shares_is_computed_once_and_cancels():
    chat = word_chat()
    (win, lose) = (decisions(trajectory("left", "left", *rest)) for rest in (["left"], ["right"]))
    ((some, steps),) = pack_preferences(chat, [(win, lose)], 2048)
    assert len(steps) == 6 and len(set(some.owner)) == 4  # two shared steps, two of their own
    model = tiny_lm(chat)
    logp = trajectory_logprobs(model, some, steps)
    last = [Policy(model, chat).logprobs([(d.state, d.action)])[0] for d in (win[-1], lose[-1])]
    assert float((logp[0] - logp[1])[0].detach()) == pytest.approx(last[0] - last[1], abs=1e-4)


# ---------------------------------------------------------------------------------------------------------- the script


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_learns_from_its_failures(fake_world, agent, tmp_path):
    env = FakeEnv(tasks=4)
    demonstrated = [sft.demonstrate(env, task) for task in env.task_ids("train")]
    assert {line["reward"] for line in demonstrated} == {best(WORLD)}
    (tmp_path / "expert.jsonl").write_text(dump(demonstrated))
    flags = ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(agent), "--batch-tasks", "4", "--lr", "0.003"]
    eto.main([*flags, "--budget", "200", "--budget-in", "env_steps", "--val", "1"])
    lines = lines_of(tmp_path / "sft-eto.updates.jsonl")
    assert lines[0]["val"] < 1 and max(line["val"] for line in lines) == 1
    assert lines[1]["pairs"] > 2 and lines[-1]["reward"] > lines[1]["reward"]
    assert [line["env_steps"] for line in lines] == sorted({line["env_steps"] for line in lines})
    assert (tmp_path / "sft-eto" / "config.json").exists()


def test_a_batch_plays_no_task_twice_and_tells_what_it_cost(fake_world, agent, tmp_path):
    env = FakeEnv(tasks=4)
    (tmp_path / "expert.jsonl").write_text(dump([sft.demonstrate(env, task) for task in env.task_ids("train")]))
    flags = ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(agent), "--batch-tasks", "100", "--val", "1"]
    eto.main([*flags, "--budget", "1", "--budget-in", "env_steps"])
    _, line = lines_of(tmp_path / "sft-eto.updates.jsonl")
    assert line["pairs"] <= 4 and line["env_steps"] <= 4 * 5  # four tasks of five steps at most
    assert line["played"] > line["env_steps"] > 0


def test_beta_and_the_reference_are_what_is_trained_with(fake_world, agent, tmp_path, monkeypatch):
    """The reference is the agent as it was when an iteration began, and --beta reaches the loss."""
    env, iterations, betas, real = FakeEnv(tasks=4), [], set(), eto.dpo_loss
    (tmp_path / "expert.jsonl").write_text(dump([sft.demonstrate(env, task) for task in env.task_ids("train")]))
    trained = eto.train

    def train(*args):
        iterations.append([])
        return trained(*args)

    def dpo_loss(win, lose, reference_win, reference_lose, beta):
        betas.add(beta)
        iterations[-1].append(((win - reference_win).abs() + (lose - reference_lose).abs()).max().item())
        return real(win, lose, reference_win, reference_lose, beta)

    monkeypatch.setattr(eto, "train", train)
    monkeypatch.setattr(eto, "dpo_loss", dpo_loss)
    flags = ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(agent), "--lr", "0.001", "--beta", "0.3"]
    eto.main([*flags, "--budget", "30", "--budget-in", "env_steps", "--val", "1"])
    assert betas == {0.3} and len(iterations) > 1 and all(iterations)
    for first, *others in iterations:
        assert first == 0 and min(others) > 0  # the agent moves away, its reference stays


@pytest.mark.parametrize("pairs", ["expert", "siblings"])
def test_two_processes_train_what_one_does(fake_world, agent, tmp_path, pairs):
    """Each with the whole model, or with half of the weights, gradients and moments."""
    env = FakeEnv(tasks=4)
    (tmp_path / "expert.jsonl").write_text(dump([sft.demonstrate(env, task) for task in env.task_ids("train")]))
    (tmp_path / "labels.jsonl").write_text(dump([node for i in range(5) for node in labelled_tree(f"train{i}")]))
    flags = ["--env", "frozenlake", "--sft", str(agent), "--pairs", pairs, "--name", "eto", "--lr", "0.003", "--val",
             "2", "--batch-tasks", "4", "--batch", "3", "--budget", "60", "--budget-in", "env_steps", "--every", "1",
             "--expert", str(tmp_path / "expert.jsonl"), "--labels", str(tmp_path / "labels.jsonl")]  # fmt: skip
    eto.main([*flags, "--run", str(tmp_path / "one")])
    launch(eto, [*flags, "--run", str(tmp_path / "two")], 2)
    launch(eto, [*flags, "--run", str(tmp_path / "divided"), "--fsdp", "--gradient-checkpointing"], 2)
    one, *others = (lines_of(tmp_path / name / "sft-eto.updates.jsonl") for name in ("one", "two", "divided"))
    assert len(one) > 2
    for lines in others:
        for a, b in zip(one, lines, strict=True):
            assert a == pytest.approx(b, abs=1e-4)


def test_a_batch_that_holds_the_trees_twice_has_each_pair_once():
    trees = [tree((0, "Action: left", 0.0), (0, "Action: right", 1.0)) for _ in range(3)]
    args = argparse.Namespace(seed=0, batch_tasks=8)
    found, figures = eto.compared(word_chat(), FakeEnv(), trees, {"batch": 0, "env_steps": 0}, args)
    assert len(found) == 3 and figures == {"pairs": 3, "env_steps": 6}


def test_it_learns_from_siblings(fake_world, agent, tmp_path):
    """The labels prefer "right" everywhere: so does the agent then."""
    start = trajectory("left")["messages"][:3]
    state = State.load(start, "find the purse")
    labelled = tree((0, "Action: left", 0.0), (0, "Action: right", 1.0))
    labelled[0] |= {"task": "find the purse"}
    (tmp_path / "labels.jsonl").write_text(dump(labelled))
    flags = ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(agent), "--pairs", "siblings", "--lr", "0.003"]
    eto.main(
        [*flags, "--labels", f"{tmp_path}/labels.jsonl", "--budget", "400", "--every", "100", "--batch-tasks", "1"]
    )
    lines = lines_of(tmp_path / "sft-eto-siblings.updates.jsonl")
    assert lines[-1]["loss"] < lines[1]["loss"] and lines[-1]["right"] == 1
    assert {line["env_steps"] for line in lines[1:]} == {2}  # those of the tree, once
    with pytest.raises(UserError, match="spent already: raise --budget"):  # its best agent may have cost more
        eto.main(
            [*flags, "--labels", f"{tmp_path}/labels.jsonl", "--budget", "100", "--every", "100", "--batch-tasks", "1"]
        )
    more = ["--budget", "9", "--budget-in", "env_steps", "--name", "short", "--batch-tasks", "1"]
    eto.main([*flags, "--labels", f"{tmp_path}/labels.jsonl", *more])
    assert len(lines_of(tmp_path / "sft-short.updates.jsonl")) == 3  # the second batch found no fresh step

    policy, margins = Policy.load(agent), []
    for weights in (
        policy.model.state_dict(),
        torch.load(tmp_path / "sft-eto-siblings.resume.pt", weights_only=True)["model"],
    ):
        policy.model.load_state_dict(weights, strict=False)
        left, right = Policy(policy.model, policy.chat).logprobs([(state, "Action: left"), (state, "Action: right")])
        margins.append(right - left)
    assert margins[1] > margins[0] + 1


TURNS = [("user", "walk"), ("assistant", "OK"), ("user", "you stand at start"), ("assistant", "Action: left")]
SHOWN = [{"role": role, "content": said} for role, said in TURNS]


def test_an_agent_is_not_written_over_what_it_starts_from(fake_world, agent, tmp_path):
    flags = ["--env", "frozenlake", "--run", str(agent.parent), "--sft", str(agent), "--pairs", "siblings"]
    (tmp_path / "labels.jsonl").write_text(dump(labelled_tree("train0")))
    shutil.copytree(agent, agent.with_name("sft-mine"))
    with pytest.raises(UserError, match="what the training starts from"):
        eto.main([*flags, "--sft", str(agent.with_name("sft-mine")), "--name", "mine", "--labels",
                  str(tmp_path / "labels.jsonl")])  # fmt: skip


def test_published_demonstrations_are_known_by_their_own_ids(tmp_path):
    class Theirs(FakeEnv):
        def published_id(self, record):
            return f"train{record['id']}"

    turns = [{"from": {"user": "human", "assistant": "gpt"}[role], "value": said} for role, said in TURNS]
    theirs = [{"id": i, "conversations": turns, "reward": 0.5} for i in (3, 4)]
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    found = eto.demonstrated(tmp_path / "theirs.json", Theirs(), None)
    assert list(found) == ["train3", "train4"]
    assert [decision.action for decision in decisions(found["train3"])] == ["Action: left"]


@pytest.mark.parametrize(
    ("flags", "content", "says"),
    [
        (["--expert"], dump([{"messages": []}]), "no chat of user and assistant"),
        (["--expert"], dump([{"messages": SHOWN, "reward": 1.0}]), "without task_id or reward"),
        (["--expert"], dump([{"messages": SHOWN, "task_id": "train0"}]), "without task_id or reward"),
        (["--expert"], "", "no tasks to learn from"),
        (["--pairs", "siblings", "--labels"], dump(tree((0, "a", 0.5), (0, "b", 0.5))), "no siblings with different q"),
        (
            ["--pairs", "siblings", "--labels"],
            dump([{k: v for k, v in n.items() if k != "q"} for n in tree((0, "a", 1))]),
            "no q; run bellman",
        ),
    ],
)
def test_mistakes(fake_world, agent, tmp_path, flags, content, says):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(UserError, match=says):
        eto.main(
            ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(agent), *flags, str(tmp_path / "x.jsonl")]
        )


def test_a_decision_is_known_by_state_and_action():
    a, b = (Decision(State((("user", "x"),)), "go") for _ in range(2))
    assert a == b and len({a, b}) == 1
