"""The training loops' common part: order of the data, early stopping, states and what resumes from them, processes."""

import dataclasses
import importlib
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from fakes import FakeEnv, fork, free_port, labelled_tree, refused, settings_of, tiny_lm, word_chat, write
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import sft
from qlass import device, models
from qlass.demonstrations import demonstrate
from qlass.files import meta_of, read_jsonl
from qlass.training import Training, updates_of


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_holds_each_example_once_in_updates_of_at_least_a_batch(sizes, batch, seed, epoch):
    plan = updates_of(sizes, batch, seed, epoch)
    assert sorted(i for update in plan for i in update) == list(range(len(sizes)))
    for update in plan[:-1]:
        total = sum(sizes[i] for i in update)
        assert total >= batch > total - sizes[update[-1]]
    assert updates_of([1] * 20, 4, seed, epoch) != updates_of([1] * 20, 4, seed, epoch + 1)


LOSSES = [9.0, 7.0, 8.0, 7.1, 1.0, 1.0]
CHAT = word_chat()
EXAMPLES = [sft.Example([3, token, 1], [sft.NO_TARGET, token, 1]) for token in range(5, 15)]
PAPER = settings_of(sft, "--preset paper --run none")
SETTINGS = dataclasses.replace(PAPER, batch=3, lr=0.01, epochs=6, save_every=2)


def test_an_update_is_clipped_to_norm_1_and_has_its_learning_rate():
    log, model = Training(Path("model"), SETTINGS, {}, {}), nn.Linear(2, 1)
    log.resume(model, models.adamw([(model, SETTINGS.lr)], "adamw"), sizes=[1] * 30)
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 5.0)
    assert log.sum_gradients(7.0) == 7.0
    log.clip_gradients(7.0)
    log.set_rate()
    assert torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm() == pytest.approx(1, rel=1e-4)
    assert log.optimizer.param_groups[0]["lr"] == SETTINGS.lr / 2  # the first of two updates of warm-up


def test_the_loss_of_an_update_is_the_mean_over_what_the_agent_wrote():
    """Not over examples, whatever their lengths."""
    examples = [*EXAMPLES[:2], sft.Example([3, 5, 6, 7, 1], [sft.NO_TARGET, 5, 6, 7, 1])]
    log, model = Training(Path("model"), SETTINGS, {}, {}), tiny_lm(CHAT)
    expected = sft.sft_loss(model, examples).item() / (2 + 2 + 4)
    sft.train(model, examples, [], dataclasses.replace(SETTINGS, epochs=1), log)
    assert log.lines[0]["loss"] == pytest.approx(expected, rel=1e-4)


class Stopped(Exception):
    pass


def flat(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def fit(stop=None, losses=LOSSES, folder=Path(), **more):
    """Clone ten examples in updates of three; `losses` are the validation's. Raises Stopped before update `stop`.
    Returns the weights at the end, figures, and the weights after each epoch."""
    folder.mkdir(exist_ok=True)
    config = dataclasses.replace(SETTINGS, **more)
    log = Training(folder / "model", config, {}, {})
    model = tiny_lm(CHAT, attention_dropout=0.5)  # the random state counts too
    weights = []

    def loss_of(model, portion):
        if log.step == stop:
            raise Stopped
        return sft.sft_loss(model, portion)

    def validate(model, *_):
        weights.append(flat(model))
        return losses[len(log.curve)]

    with mock.patch("sft.validate", validate):
        sft.train(model, EXAMPLES, [], config, log, loss_of)
        log.load_best()
    return flat(model), {"curve": log.curve, "best_epoch": log.best_epoch, "steps": log.step}, weights


@pytest.mark.parametrize(("losses", "epochs", "best"), [(LOSSES, 4, 2), ([3, 4, 2, 4, 1, 4], 6, 5), ([None] * 6, 6, 6)])
def test_it_stops_when_validation_has_not_improved_and_keeps_the_best_epoch(losses, epochs, best):
    final, figures, weights = fit(losses=losses)
    assert (len(weights), figures["best_epoch"], figures["steps"]) == (epochs, best, 4 * epochs)
    assert final.equal(weights[best - 1])
    assert [entry["validation"] for entry in figures["curve"]] == losses[:epochs]


def test_a_best_state_of_another_epoch_is_refused():
    """Epoch 3 was the best, and its end is after the last state. Those that go on find another loss."""
    stopped(13, [9.0, 7.0, 5.0], save_every=11)
    with refused("its best state is of epoch 3, and the best is 2"):
        fit(losses=[9.0, 7.0, 8.0, 8.0], save_every=11)


STOPS = [  # before which updates, with which validations, and moments in how many bits
    ([0], LOSSES, "adamw"),
    ([4, 5, 7], LOSSES, "adamw"),
    ([2, 2, 9], LOSSES, "adamw"),
    ([15], LOSSES, "adamw"),
    ([9], [None] * 6, "adamw"),  # the last weights count, with moments of all updates
    ([9], [None] * 6, "adamw8bit"),
]


@pytest.mark.parametrize(("stops", "losses", "optim"), STOPS)
def test_a_stopped_run_ends_with_the_weights_and_the_log_of_one_that_was_not(stops, losses, optim):
    if optim != "adamw":
        pytest.importorskip("bitsandbytes")
    expected, figures, _ = fit(None, losses, Path("one"), optim=optim)
    for stop in stops:
        stopped(stop, losses, optim=optim)
    for epochs in (True, False):  # at last as if stopped between the last epoch and the end of the stage
        final, again, weights = fit(None, losses, save_every=3, optim=optim)
        assert final.equal(expected) and again == figures and bool(weights) == epochs
    log = read_jsonl(Path("model.log.jsonl"))
    assert log == read_jsonl(Path("one/model.log.jsonl"))
    assert [line["step"] for line in log if "lr" in line] == list(range(1, figures["steps"] + 1))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return fit(folder=tmp_path_factory.mktemp("one"))


def stopped(stop=9, losses=LOSSES, save_every=3, **more):
    """A training that was stopped before this update; returns its last state."""
    with pytest.raises(Stopped):
        fit(stop, losses, save_every=save_every, **more)
    return Path("model.parts/last.safetensors")


def full_disk(name):
    """A file of this name finds no room; a state leaves a draft."""
    usual = open

    def save_full(state, draft, log):
        draft.write_bytes(b"cut")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    def open_full(file, *args, **options):
        return usual("/dev/full" if Path(file).name in (name, f".{name}.draft0") else file, *args, **options)

    def fill(patch):
        patch.setattr("builtins.open", open_full)
        if name.endswith(".safetensors"):
            patch.setattr("qlass.training.save_file", save_full)

    return fill


def diverging(change):
    usual = sft.sft_loss
    return lambda patch: patch.setattr("sft.sft_loss", lambda *arguments: change(usual(*arguments)))


FAULTS = {
    "no room for a state": (
        full_disk("last.safetensors"),
        r"^model\.parts/last\.safetensors: .*No space left on device",
    ),
    "no room for the log": (full_disk("model.log.jsonl"), r"^model\.log\.jsonl: .*No space left on device"),
    "a gradient": (
        diverging(lambda loss: loss + (loss - loss.detach()).sqrt()),
        r"^model: loss \d.*, gradient (inf|nan): .*lower --lr",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_and_the_next_start_goes_on_as_if_it_had_not_been(fault, monkeypatch, unbroken):
    spoil, says = FAULTS[fault]
    last = stopped()
    with monkeypatch.context() as patch, refused(says):
        spoil(patch)
        fit(save_every=3)
    final, figures, weights = fit(save_every=3)
    assert final.equal(unbroken[0]) and figures == unbroken[1] and len(weights) == 2
    assert {file.name for file in last.parent.iterdir()} == {"last.safetensors", "best.safetensors"}


class Evil:
    """A pickle that makes a folder where it is read."""

    def __reduce__(self):
        return Path.mkdir, (Path("struck"),)


def rewritten(change):
    def spoil(file):
        with safe_open(file, "pt") as state:
            log = state.metadata()
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, log)

    return spoil


LAYER, NORM = "model.layers.1.mlp.up_proj.weight ", "model.norm.weight "
SPOILT_STATES = {  # a weight that a state lacks would keep what it was at the start
    "a pickle": (lambda file: file.write_bytes(pickle.dumps(Evil())), ""),
    "layers renamed by a library": (rewritten(lambda tensors: tensors.pop(LAYER)), f"tensor {LAYER.strip()}"),
    "another weight": (
        rewritten(lambda tensors: tensors.update({"model.old.weight exp_avg": torch.zeros(2)})),
        "'model.old.weight'",
    ),
    "another size": (rewritten(lambda tensors: tensors.update({NORM: torch.zeros(2)})), "size"),
    "no log": (lambda file: save_file(load_file(file), file), "not subscriptable"),
}


@pytest.mark.parametrize("name", SPOILT_STATES)
def test_a_state_of_another_kind_is_refused_in_one_line(name):
    spoil, says = SPOILT_STATES[name]
    spoil(stopped())
    with refused(f"can't be read; delete .*model.parts to begin again: .*{says}"):
        fit()
    assert not Path("struck").exists()


def test_a_complete_checkpoint_is_kept_and_overwriting_begins_anew(capsys):
    out, parts = Path("model"), Path("model.parts")

    def is_complete(**more):
        log = Training(out, dataclasses.replace(SETTINGS, run=Path(), **more), {}, {})
        log.lock.release()
        return log.complete

    stopped(5)
    assert not is_complete(save_every=9, micro_tokens=5)  # what rounds may differ
    is_complete(lr=0.2, overwrite=True)  # stopped before its first state, which alone ends the older ones
    assert not is_complete() and (parts / "last.safetensors").exists()
    log = Path("model.log.jsonl").read_text()
    stopped(1, lr=0.2, overwrite=True)
    assert Path("model.log.jsonl").read_text() == log
    stopped(5, lr=0.2, overwrite=True)
    rates = [line["lr"] for line in read_jsonl(Path("model.log.jsonl")) if "lr" in line]
    assert len(rates) == 5 and max(rates) == 0.2  # from the first update on
    parts.rename("other")
    out.mkdir()
    assert is_complete() and not is_complete(overwrite=True)
    Path("other").rename(parts)
    assert not is_complete(lr=0.2)  # the old one is there, the new one is being made
    assert "is complete; --overwrite trains it again" in capsys.readouterr().out


def test_autocast_keeps_no_copy_of_the_weights_in_bf16():
    """As gradient checkpointing would hold them all at once."""
    with device.autocast(dataclasses.replace(SETTINGS, precision="bf16")):
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()


def test_moments_in_8_bits_are_not_divided(monkeypatch):
    class Divided(nn.Parameter):
        pass

    monkeypatch.setattr("qlass.models.DTensor", Divided)
    model = nn.Linear(2, 1)
    model.bias = Divided(torch.zeros(1))
    with refused("cannot divide its moments"):
        models.adamw([(model, 0.1)], "adamw8bit")
    pytest.importorskip("bitsandbytes")
    model.bias.requires_grad_(False)  # as what LoRA stands beside, which is itself whole
    models.adamw([(model, 0.1)], "adamw8bit")


def test_more_processes_than_gpus_are_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("torch.cuda.set_device", mock.Mock(side_effect=RuntimeError("CUDA error: invalid device")))
    with refused(r"^cuda:1: CUDA error: invalid device .torchrun: one process per GPU.$"):
        device.join(SETTINGS)


def launch(main, argv, code, n=2):
    """As torchrun does: the same command in n processes, its rank in the environment."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(n)}
    started = [fork(main, argv, RANK=str(rank), LOCAL_RANK=str(rank), **address) for rank in range(n)]
    for process in started:
        process.join(3600)
    assert [process.exitcode for process in started] == [code] * n


TRAININGS = [  # a stage, what it learns from and how, and the number of processes that go on
    ("sft", "--n-expert 5", 2),
    ("sft", "--expert mine.jsonl --model {agent} --gradient-checkpointing", 3),  # whose output layer is tied
    ("sft", "--expert mine.jsonl --model {agent} --lora 2", 2),
    ("train_qnet", "--preset paper --sft {agent} --labels labels.jsonl --max-tokens 40 --lr 1e-3", 1),
    ("train_qnet", "--preset paper --sft {agent} --labels labels.jsonl --max-tokens 40 --lora 2", 2),
]


@pytest.mark.parametrize(("stage", "flags", "n"), TRAININGS)
def test_processes_share_the_work_and_train_what_one_does(stage, flags, n, agent, fake_world, monkeypatch):
    """Also where they are stopped and started again."""
    tasks = [f"train{i}" for i in range(5)]
    write("labels.jsonl", [node for task in tasks for node in labelled_tree(task)])
    write("mine.jsonl", [demonstrate(FakeEnv(name="frozenlake"), task) for task in tasks])
    common = "--env frozenlake --run . --epochs 2 --micro-tokens 40 --batch 4 --save-every 1 "
    argv = (common + flags.format(agent=agent)).split()
    one, two = ([*argv, "--out", name] for name in ("by-1", "by-2"))
    main = importlib.import_module(stage).main
    main(one)
    end_update = Training.end_update

    def stopping(self, *update, **figures):
        assert 0 < len(self.portions([*range(4)], lambda i: 9, 9)) < 4
        end_update(self, *update, **figures)
        if self.step == 3:
            raise SystemExit(7)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "end_update", stopping)
        launch(main, two, 7)
    launch(main, two, 0, n)
    alone, both = (meta_of(Path(name)) for name in ("by-1", "by-2"))
    losses, ours = ([epoch["loss"] for epoch in meta["curve"]] for meta in (alone, both))
    assert losses == pytest.approx(ours, rel=1e-4)
    assert alone["tokens"] == both["tokens"] and not Path("by-2.parts").exists()
    for file in Path("by-1").glob("*.safetensors"):
        weights = load_file(Path("by-2", file.name))
        for name, weight in load_file(file).items():  # Adam makes a step of a gradient that is rounding alone
            far = (weights[name] - weight).abs()
            assert far.mean() < 1e-5 and far.max() < 1e-3, name
