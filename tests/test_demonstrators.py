"""Demonstrators who err on WebShop: what each leaves out, who errs where, the best paid, and an agent's episodes."""

import pytest
from fakes import node, over, refused, write

import envs
from environments.webshop.expert import named_options, offers
from experiments import demonstrators
from qlass.demonstrations import read
from qlass.files import meta_of, read_jsonl
from qlass.messages import parse_action, start, step


@pytest.fixture
def demonstrate(tmp_path):
    def run(flags=""):
        usual = "--env webshop --run run --preset tiny --limit 40 --out shown.jsonl --overwrite"
        demonstrators.main(over(usual, flags))
        return list(read_jsonl(tmp_path / "shown.jsonl"))

    return run


def followed(line):
    """True if the demonstration opens the first product alone, if it reads features, and if it chooses all options that
    the task names."""
    env = envs.make("webshop")
    state, opened, named, chosen = start(env, line["task_id"]), [], [], []
    actions = [parse_action(turn["content"]) for turn in line["messages"][3::2]]
    for action in actions:
        first = [offer.action for offer in offers(env)] if "Total results" in env.page() else []
        opened += [first.index(action)] if action in first else []
        named += named_options(env)
        chosen += [action] * (action in named_options(env))
        state, reward, _ = step(env, state, action)
    assert reward == line["reward"] and actions[-1] == "click[buy now]"
    return opened == [0], "click[features]" in actions, set(chosen) == set(named) != set()


def test_half_of_them_find_the_product_and_half_choose_the_options_of_the_first(demonstrate, tmp_path):
    lines = demonstrate()
    ways = [followed(line) for line in lines]
    assert [line["task_id"] for line in lines] == envs.make("webshop").task_ids("train")[:40]
    careless = [first and not reads and options for first, reads, options in ways]
    careful = [not options for _, _, options in ways]
    assert all(a != b for a, b in zip(careless, careful, strict=True)) and 12 < sum(careless) < 28
    assert any(not first and reads for first, reads, _ in ways)
    assert len(read(tmp_path / "shown.jsonl", envs.make("webshop"))) == 40  # sft.py --expert clones them
    assert demonstrate() == lines != demonstrate("--seed 1")


def test_the_careless_of_the_mixed_choose_nothing(demonstrate):
    lines = demonstrate("--kind mixed")
    ways = [followed(line) for line in lines]
    careless = [first and not reads and not options for first, reads, options in ways]
    assert 18 < sum(careless) < 32
    assert {line["reward"] for line, errs in zip(lines, careless, strict=True) if not errs} == {1.0}  # the expert's


def test_the_best_paid_alone(demonstrate, tmp_path):
    lines, best = demonstrate(), demonstrate("--best 10")
    rewards = sorted((line["reward"] for line in lines), reverse=True)
    assert [line["reward"] for line in best] == rewards[:10] and all(line in lines for line in best)
    assert meta_of(tmp_path / "shown.jsonl")["mean_reward"] == pytest.approx(sum(rewards[:10]) / 10)


def test_one_kind_alone_on_other_tasks(demonstrate):
    tasks = envs.make("webshop").task_ids("test")[:40]
    for kind in ("careful", "careless"):
        lines = demonstrate(f"--split test --kind {kind}")
        assert [line["task_id"] for line in lines] == tasks
        ways = [followed(line) for line in lines]
        assert any(ways) and not any(options if kind == "careful" else reads for _, reads, options in ways)


@pytest.mark.parametrize(
    ("played", "shown", "best"),  # reward and length of the agent's branch and of the demonstration; the best's node
    [((0.6, 3), (0.5, 2), 1), ((0.6, 3), (0.6, 2), 2), ((0.6, 2), (0.6, 2), 2)],
)
def test_the_best_branch_of_a_tree_is_the_demonstrators_or_the_agents(demonstrate, played, shown, best):
    tree = [node(0, None, nodes=3, env="webshop", task="", messages=[{"role": "user", "content": "go"}])]
    for reward, depth in (played, shown):
        tree.append(node(len(tree), 0, reward, done=True, depth=depth, expert=len(tree) == 2))
    write("trees.jsonl", tree)
    (line,) = demonstrate("--trees trees.jsonl")
    assert line["messages"][-1]["content"] == f"Action: {best}"


def test_episodes_of_an_agent(demonstrate):
    shown = demonstrate("--kind mixed")[:3]
    played = [{"task_id": line["task_id"], "steps": [{"action": turn["content"]} for turn in line["messages"][3::2]]}
              for line in reversed(shown)]  # fmt: skip
    write("results.jsonl", played)
    assert demonstrate("--kind noisy --episodes results.jsonl") == shown
    with refused("--kind noisy: --episodes names results"):
        demonstrate("--kind noisy")
    for lines in (played * 2, [played[0] | {"task_id": "of test"}]):
        write("results.jsonl", lines)
        with refused("an episode of each of the first"):
            demonstrate("--kind noisy --episodes results.jsonl")
