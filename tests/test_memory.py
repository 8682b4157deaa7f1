"""The memory estimate against measured peaks; what is trained in less memory is trained all the same."""

import argparse
import math

import pytest
import torch
from fakes import tiny_config
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import sft
from qlass import UserError, memory, models
from qlass.fast.token_tree import TokenTree, like_a_tree, tree_inputs
from qlass.models import mixed_precision


def model(vocabulary: int = 500, **more) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(tiny_config(vocabulary, **sizes | more))


def flags(**more) -> argparse.Namespace:
    some = {"optim": "adamw", "weights": "float32", "gradient_checkpointing": False, "lora": None, "micro_tokens": 1024}
    return argparse.Namespace(**some | {"fsdp": False, "load_in": None} | more)


def loss_of(lm: LlamaForCausalLM):
    return lambda ids: sft.sft_loss(*sft.predictions(lm, ids, ids >= 0))


def measured_peak(run) -> int:
    """The most memory that torch held at once during a call, by its profiler's allocations."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def gpt2() -> GPT2LMHeadModel:
    """With dropout, whose masks are kept too."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=500, n_embd=128, n_layer=4, n_head=4, n_positions=256))


@pytest.mark.parametrize(
    "make", [model, lambda: model(vocabulary=4000), lambda: model(num_hidden_layers=8), gpt2],
    ids=["small", "many words", "deep", "dropout"],
)  # fmt: skip
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimate_is_within_a_third_of_the_measured_peak(make, checkpointing):
    lm, args = make(), flags(gradient_checkpointing=checkpointing)
    models.save_memory(lm, args)
    estimate = memory.estimate(lm.train(), lm.base_model, loss_of(lm), args, 256)().total
    assert all(layer.gradient_checkpointing == checkpointing for layer in models.layers_of(lm.base_model))
    optimiser, ids = models.adamw(lm.parameters(), 1e-3), torch.randint(500, (4, 256))

    def update():
        with mixed_precision(lm):
            loss = loss_of(lm)(ids)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    peak = measured_peak(lambda: [update(), update()]) + sum(p.nbytes for p in lm.parameters())
    assert 0.75 < estimate / peak < 1.34


def test_positions_are_not_rounded_with_the_weights():
    """Rotary frequencies in bf16 would turn a prompt of 4,000 tokens by radians."""
    lm = model()
    models.save_memory(lm, flags(weights="bf16"))
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}
    rotary = [buffer for name, buffer in lm.named_buffers() if name.endswith("inv_freq")]
    assert rotary and {buffer.dtype for buffer in rotary} == {torch.float32}


@pytest.mark.parametrize("weights", ["float32", "bf16"])
def test_a_token_tree_keeps_its_mask_and_is_measured_with_it(weights, monkeypatch):
    """With mixed precision each layer has a copy of its own."""
    net = model(num_hidden_layers=12).model.train()
    monkeypatch.setattr(models, "mixed_precision", lambda m: torch.autocast("cpu", torch.bfloat16, weights == "bf16"))
    monkeypatch.setattr(memory, "mixed_precision", models.mixed_precision)
    tree = TokenTree()
    trunk = list(range(100))
    for action in range(100, 400, 50):
        tree.add([*trunk, *range(action, action + 50)])
    ids = torch.arange(len(tree))[None]

    def kept(inputs: dict) -> int:
        return memory.kept_for_backward(lambda: net(**inputs, use_cache=False), net)[0]

    real, measured, without = map(kept, (tree_inputs(net, [tree]), like_a_tree(net, ids), {"input_ids": ids}))
    copies = 4 if weights == "float32" else 2 * 12  # bytes of an entry
    assert measured == real == pytest.approx(without + copies * len(tree) ** 2, rel=0.005)


def test_weights_gradients_and_moments_by_hand():
    lm = model()
    n = sum(p.numel() for p in lm.parameters())
    of = memory.estimate(lm, lm.model, loss_of(lm), flags(), 256)
    assert (of().weights, of().gradients, of().optimiser) == (4 * n, 4 * n, 8 * n)
    half = of(weights="bf16")
    assert (half.weights, half.gradients, half.optimiser) == (2 * n, 2 * n, 8 * n)
    assert of(optim="adamw8bit").optimiser == pytest.approx(2.1 * n)
    assert of(optim="adamw8bit", weights="bf16").total == math.inf  # models.check_training refuses it
    assert of(gradient_checkpointing=True).activations < of().activations / 1.5
    twice = memory.estimate(lm, lm.model, loss_of(lm), flags(micro_tokens=2048), 256)
    assert twice().activations == pytest.approx(2 * of().activations, rel=0.2)
    beside = memory.estimate(lm, lm.model, loss_of(lm), flags(), 256, beside=model())
    assert (beside().weights, beside().gradients, beside(weights="bf16").weights) == (8 * n, 4 * n, 4 * n)
    assert memory.estimate(lm, lm.model, loss_of(lm), flags(), 256, beside=lm)().weights == 4 * n  # shared


def test_what_does_not_fit_is_told_with_the_flags_that_make_it_fit(monkeypatch, capsys):
    def seven_billion(gradient_checkpointing=False, weights="float32", lora=False, parts=1):
        n = 7e9 / parts
        return memory.Memory(
            weights=n * (4 if weights == "float32" else 2),
            gradients=0 if lora else n * 2, optimiser=0 if lora else n * 8,
            activations=1e9 if gradient_checkpointing else 60e9,
        )  # fmt: skip

    def told(room: float) -> str:
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: argparse.Namespace(total_memory=room * 1e9)
        )
        memory.check_memory(seven_billion, torch.device("cuda"))
        return capsys.readouterr().out

    assert "158.00 GB, of 200" in told(200)
    for room, says in (
        (141, "give --gradient-checkpointing ("),
        (141, "; or 2 GPUs divide it: torchrun --nproc-per-node 2 ... --fsdp"),
        (96, "give --gradient-checkpointing --weights bf16 ("),
        (80, "give --gradient-checkpointing --weights bf16 --lora 16 ("),
        (10, "fewer --micro-tokens"),
    ):
        with pytest.raises(UserError) as error:
            told(room)
        assert says in str(error.value)
    memory.check_memory(seven_billion, torch.device("cpu"))
    assert capsys.readouterr().out.endswith("GB\n")


def test_no_way_out_is_named_that_is_refused(monkeypatch):
    """The moments have 8 bits: bf16 weights would round its updates away, and bitsandbytes' can't be divided."""
    lm = model()
    of = memory.estimate(lm, lm.model, loss_of(lm), flags(optim="adamw8bit"), 256)
    room = argparse.Namespace(total_memory=1.001 * of(gradient_checkpointing=True, lora=True).total / memory.ROOM)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: room)
    with pytest.raises(UserError, match=r"give --gradient-checkpointing --lora 16 \([^;]*\)$"):
        memory.check_memory(of, torch.device("cuda"))


def test_only_what_is_float32_is_halved():
    lm = model(tie_word_embeddings=False)  # a frozen backbone as on a GPU, a head that is trained
    lm.model.bfloat16().requires_grad_(False)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return lm.lm_head(lm.model(ids).last_hidden_state.float()).square().mean()

    of = memory.estimate(lm, lm.model, loss, flags(), 256)
    backbone, head = (sum(p.nbytes for p in part.parameters()) for part in (lm.model, lm.lm_head))
    assert head and of(weights="bf16").weights == pytest.approx(backbone + head / 2)


# ------------------------------------------------------------------------------------------------ trained all the same


def test_checkpointing_changes_no_gradient():
    ids, found = torch.randint(500, (2, 30)), []
    for checkpointing in (False, True):
        lm = model(num_hidden_layers=2).train()
        models.save_memory(lm, flags(gradient_checkpointing=checkpointing))
        loss_of(lm)(ids).backward()
        found.append([p.grad for p in lm.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_rounding_by_chance_is_right_in_the_mean():
    low, high = torch.tensor([1.0, -1.0]), torch.tensor([1.0078125, -1.0078125])  # neighbours in bf16
    x = (low + (high - low) * 0.3).repeat(20_000, 1)
    luck = torch.Generator().manual_seed(0)
    found = models.rounded(x, luck).float()
    assert ((found == low) | (found == high)).all()
    assert (found == high).float().mean(0).tolist() == pytest.approx([0.3, 0.3], abs=0.02)
    exact = torch.tensor([0.5, -3.0, 0.0])
    assert torch.equal(models.rounded(exact, luck).float(), exact)


def test_in_float32_it_is_adamw():
    ours, torchs = nn.Linear(5, 3), nn.Linear(5, 3)
    torchs.load_state_dict(ours.state_dict())
    for layer, optimiser in (
        (ours, models.RoundedAdamW(ours.parameters(), 1e-2, (0.9, 0.95))),
        (torchs, models.adamw(torchs.parameters(), 1e-2)),
    ):
        for step in range(5):
            optimiser.zero_grad()
            x = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
            layer(x).square().sum().backward()
            optimiser.step()
    for p, q in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_small_steps_add_up_in_bf16():
    """A thousand steps of 1e-5 from a weight of 0.5, whose neighbours are 0.002 away."""
    torch.manual_seed(0)
    weights = nn.Parameter(torch.full((1000,), 0.5, dtype=torch.bfloat16))
    optimiser = models.adamw([weights], 1e-5)
    for _ in range(1000):
        weights.grad = torch.ones_like(weights)
        optimiser.step()
    assert weights.float().mean().item() == pytest.approx(0.49, abs=0.001)
    again = models.adamw([weights], 1e-5)
    again.load_state_dict(optimiser.state_dict())
    assert again.state[weights]["m"].dtype == torch.float32 and again.state[weights]["step"] == 1000
    assert torch.equal(again.state[weights]["v"], optimiser.state[weights]["v"])


def test_a_model_in_bf16_is_trained(tmp_path):
    from test_sft import CHAT, arguments, others, tiny_lm

    lm, args = tiny_lm(CHAT), arguments(epochs=40, weights="bf16", out=tmp_path / "out")
    models.save_memory(lm, args)
    figures = sft.train(lm, CHAT, others(4), args)
    assert next(lm.parameters()).dtype == torch.bfloat16
    assert figures["curve"][-1]["loss"] < figures["curve"][0]["loss"] / 2


def test_bf16_needs_an_optimiser_that_rounds_by_chance():
    with pytest.raises(UserError, match="--weights bf16"):
        sft.arguments(["--model", "x", "--weights", "bf16", "--optim", "adamw8bit"])
