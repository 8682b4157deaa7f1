"""TRL's trainer on an environment of ours: two updates of the real one, with a model that was taught to call `act`."""

import pytest
import torch
from fakes import FakeEnv, chat_tokenizer, tiny_backbone, tiny_lm

import envs
from integrations.trl import games, prompts
from integrations.values import episode_reward, turn_values
from qlass.chat import Chat, Rendering
from qlass.messages import State
from train_qnet import QNet

CALL, CLOSE = '<tool_call>\n{"name": "act", "arguments": {"action": "', '"}}\n</tool_call>'
MOVES = ["left", "down", "right", "up"]


def test_an_episode_through_the_class(monkeypatch):
    monkeypatch.setattr(envs, "make", lambda name, **options: FakeEnv(**options))
    make = games("fake")
    one, other = make(), make()
    assert one.reset(task_id="train1", prompt=[]) == other.reset(task_id="train2") == "you stand at start"
    assert one.act("Thought: hm\nAction: left") == "you stand at start left" and one.get_reward() == 0
    env = FakeEnv()
    assert one.state == State.first(env, *env.reset(options={"task_id": "train1"})).act(env, "Action: left")[0]
    assert [one.act("right"), one.act("left")][-1] == "you stand at start left right left" and one.get_reward() == 0.5
    assert other.act("left") == "you stand at start left"
    with pytest.raises(ValueError, match="the episode is over"):
        one.act("left")
    one.reset(task_id="train1")
    assert one.get_reward() == 0 and not one.over
    first, other = prompts("fake", limit=2)
    assert (first["task_id"], other["task_id"]) == ("train0", "train1")
    assert first["prompt"][0]["content"].startswith("walk")


def caller(chat, tokenizer, samples: int = 300):
    """A tiny model that writes a call of `act` with any move, whatever it reads."""
    call, close, *moves = tokenizer.convert_tokens_to_ids([CALL, CLOSE, *MOVES])
    ask = tokenizer("<|im_start|>assistant\n").input_ids
    model, size = tiny_lm(chat), len(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(samples):
        reading = torch.randint(256, (16, 40))
        turn = torch.tensor([[*ask, call, moves[i % 4], close, tokenizer.eos_token_id] for i in range(16)])
        ids = torch.cat([reading, turn], 1)
        logits = model(ids).logits[:, -5:-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, size), ids[:, -4:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
def test_two_updates_of_the_real_trainer(tmp_path):
    pytest.importorskip("trl", reason="pip install -r requirements-integrations.txt")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = chat_tokenizer("chatml")
    tokenizer.add_tokens([CALL, CLOSE, *MOVES])
    chat = Chat(tokenizer, Rendering())
    model, qnet = caller(chat, tokenizer), QNet(tiny_backbone(chat, 3), chat, hidden=16)
    reward, paid = episode_reward(qnet, mean=False), []

    def last_q(environments, **_):
        q = [turn_values(qnet, game.state.dump(), game.state.task)[0] for game in environments]
        paid.append([values[-1] for values in q if values])  # of episodes with an action
        return reward(environments)

    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.chat_template = qwen3_chat_template
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    options = {"map": "4x4", "max_steps": 4}
    settings = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, num_generations=8, learning_rate=1e-2,
        max_completion_length=1200, max_tool_calling_iterations=6, use_cpu=True, report_to=[], save_strategy="no",
        logging_steps=1, bf16=False,
    )  # fmt: skip
    data, play = Dataset.from_list(prompts("frozenlake", **options)), games("frozenlake", **options)
    how = {"processing_class": tokenizer, "train_dataset": data, "environment_factory": play, "reward_funcs": [last_q]}
    trainer = GRPOTrainer(model, args=settings, **how)
    trainer.train()
    first, second = [line for line in trainer.state.log_history if "reward" in line]
    assert first["tools/call_frequency"] > 1 and {"rewards/TextGame/mean", "rewards/last_q/mean"} <= second.keys()
    for line, q in zip((first, second), paid, strict=True):
        assert line["rewards/last_q/mean"] == pytest.approx(sum(q) / len(q), abs=1e-4) and len(set(q)) > 1
    assert any((weight != before[name]).any() for name, weight in model.named_parameters())
