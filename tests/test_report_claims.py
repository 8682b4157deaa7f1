"""The statements on the paper's claims, Fig. 4 and the labels that tell variants apart, from made results."""

from __future__ import annotations

import json
import random

import pytest

import report
from reporting import claims, figures
from reporting.results import read_results, result_files

TASKS = 40


@pytest.fixture
def groups(tmp_path):
    """Results with rewards `mean` + noise that all methods share, and their total tokens."""

    def made(*methods):
        lines = []
        for method, mean, more in methods:
            row = {"env": "webshop", "split": "test", "method": method, "M": 1, "N": 1, "select": None, "seed": 0}
            noise = random.Random(0)
            for task in range(TASKS):
                about = {"task_id": str(task), "reward": mean + noise.uniform(-0.1, 0.1) + 0.01 * (task % 2)}
                lines.append(row | about | {"tokens": {"generated": more.get("tokens", 100)}} | more)
                lines[-1]["tokens"] = {"generated": more.get("tokens", 100)}
        (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_results(result_files([str(tmp_path)]))

    return made


def told(groups, start):
    (sentence,) = [s for s in claims.sentences(groups) if s.startswith(f"webshop: {start}")]
    assert "], for this model" in sentence  # of one seed
    return sentence.replace(", for this model", "")


def test_only_what_the_results_can_tell_is_said(groups):
    assert claims.sentences(groups(("greedy", 0.5, {}))) == []
    sentence = told(groups(("greedy", 0.5, {}), ("qlass", 0.6, {"M": 2})), "QLASS")
    assert sentence == "webshop: QLASS above SFT greedy (Table 2): reproduced (M=2: +0.100 [+0.100, +0.100])."


@pytest.mark.parametrize(
    ("mean", "p", "verdict"),
    [(0.1, 0.049, "reproduced"), (0.1, 0.05, "undecided"), (-0.1, 0.049, "not reproduced"), (-0.1, 1.0, "undecided")],
)
def test_the_verdict_is_of_the_sign_and_its_p(mean, p, verdict):
    assert claims.verdict(mean, p) == verdict


def test_what_holds_alone_may_not_hold_among_many(tmp_path):
    """With M = 2, 27 of 40 tasks go .1 better and 13 as much worse: p is about .02."""

    def said(better):
        lines = []
        for m, n in {0: 0, **better}.items():
            row = {"env": "webshop", "split": "test", "method": "qlass" if m else "greedy", "M": max(m, 1), "N": 1}
            for task in range(TASKS):
                reward = 0.5 if not m else 0.6 if task < n else 0.4
                about = {"task_id": str(task), "reward": reward, "seed": 0, "select": None, "tokens": {"generated": 9}}
                lines.append(json.dumps(row | about) + "\n")
        (tmp_path / "results.jsonl").write_text("".join(lines))
        return told(read_results(result_files([str(tmp_path)])), "QLASS above SFT greedy")

    assert "(Table 2): reproduced (M=2: +0.035 [+0.0" in said({2: 27})
    assert "(Table 2): undecided (M=2: +0.035 [+0.0" in said({2: 27, 3: 20, 4: 20, 5: 20, 6: 20})


def test_each_setting_has_its_own_verdict(groups):
    some = groups(("greedy", 0.5, {}), ("qlass", 0.4, {"M": 2}), ("qlass", 0.6, {"M": 4}), ("qlass", 0.5, {"M": 6}))
    assert told(some, "QLASS above SFT greedy") == (
        "webshop: QLASS above SFT greedy (Table 2): reproduced (M=4: +0.100 [+0.100, +0.100]), "
        "undecided (M=6: +0.000 [+0.000, +0.000]), not reproduced (M=2: -0.100 [-0.100, -0.100])."
    )


def test_best_of_n_is_the_one_of_nearest_cost(groups):
    def best_of(n, select, tokens, mean):
        return "best_of_n", mean, {"N": n, "select": select, "tokens": tokens}

    some = groups(
        ("qlass", 0.6, {"M": 2, "tokens": 900}), best_of(2, "q", 300, 0.1), best_of(4, "q", 1000, 0.5),
        best_of(6, "q", 5000, 0.9), best_of(2, "oracle", 1000, 0.7),
    )  # fmt: skip
    by_qnet, by_reward = "QLASS above best-of-N, picked by QNet", "QLASS above best-of-N, picked by the true reward"
    assert told(some, by_qnet).endswith(
        "reproduced (M=2 (900 tokens) against N=4 (1,000 tokens): +0.100 [+0.100, +0.100])."
    )
    assert "not reproduced (M=2 (900 tokens) against N=2 (1,000 tokens): -0.100" in told(some, by_reward)


def test_a_rival_of_other_cost_is_none_at_equal_tokens(groups):
    for tokens, told_of in ((1160, True), (700, True), (1200, False), (600, False)):
        rivals = [("best_of_n", 0.5, {"N": n, "select": "q", "tokens": n * tokens}) for n in (1, 9)]
        said = claims.sentences(groups(("qlass", 0.6, {"M": 2, "tokens": 900}), *rivals))
        assert any("at equal tokens" in sentence for sentence in said) == told_of


def test_what_two_claims_compare_is_corrected_for_once(groups, monkeypatch):
    """Of equal cost, the log-probability with as many candidates is the rival of two claims."""
    counted = []
    monkeypatch.setattr(claims, "holm", lambda p: counted.append(len(p)) or p)
    said = claims.sentences(groups(("qlass", 0.6, {"M": 4}), ("likeliest", 0.5, {"M": 4})))
    assert len(said) == 2 and counted == [1]


def test_search_by_the_agents_own_log_probability_is_a_rival(groups):
    some = groups(
        ("qlass", 0.6, {"M": 4, "tokens": 900}), ("likeliest", 0.5, {"M": 4, "tokens": 500}),
        ("likeliest", 0.7, {"M": 6, "tokens": 800}),
    )  # fmt: skip
    as_many, as_dear = "own log-probability, with as many candidates", "own log-probability, at equal tokens"
    assert told(some, f"QLASS above search by the agent's {as_many}").endswith(
        "reproduced (M=4: +0.100 [+0.100, +0.100])."
    )
    assert "not reproduced (M=4 (900 tokens) against M=6 (800 tokens)" in told(
        some, f"QLASS above search by the agent's {as_dear}"
    )


def test_process_rewards_are_compared_within_their_role(groups):
    some = groups(
        ("greedy", 0.3, {}), ("greedy", 0.2, {"label": "self-trained, RFT"}),
        ("greedy", 0.5, {"label": "self-trained, target=q"}), ("greedy", 0.6, {"label": "self-trained, target=avg"}),
        ("qlass", 0.8, {"M": 4}), ("qlass", 0.7, {"M": 4, "label": "target=avg"}), ("qlass", 0.9, {"M": 2}),
        ("qlass", 0.1, {"M": 4, "label": "frozen backbone"}),
    )  # fmt: skip
    assert told(some, "Q-values above averaged rewards") == (
        "webshop: Q-values above averaged rewards (Fig. 4): reproduced (search, M=4: +0.100 [+0.100, +0.100]), "
        "not reproduced (self-training: -0.100 [-0.100, -0.100])."
    )
    assert not any("plain final rewards" in s for s in claims.sentences(some))
    search, retrained = figures.targets(some).axes
    assert [t.get_text() for t in search.get_yticklabels()] == ["SFT greedy", "Q-value, M=4", "averaged reward, M=4"]
    assert [t.get_text() for t in retrained.get_yticklabels()] == ["SFT greedy", "RFT", "Q-value", "averaged reward"]
    widths = [[round(bar.get_width(), 1) for bar in axes.patches] for axes in (search, retrained)]
    assert widths == [[0.3, 0.8, 0.7], [0.3, 0.2, 0.5, 0.6]]


def test_process_rewards_are_compared_with_the_same_loss(groups):
    on = ", loss on all tokens"
    some = groups(
        ("greedy", 0.3, {}), ("qlass", 0.7, {"M": 4}), ("qlass", 0.6, {"M": 4, "label": "target=avg"}),
        ("qlass", 0.4, {"M": 4, "label": f"target=q{on}"}), ("qlass", 0.5, {"M": 4, "label": f"target=avg{on}"}),
    )  # fmt: skip
    assert told(some, "Q-values above averaged rewards") == (
        "webshop: Q-values above averaged rewards (Fig. 4): reproduced (search, M=4: +0.100 [+0.100, +0.100]), "
        "not reproduced (search, M=4, loss on all tokens: -0.100 [-0.100, -0.100])."
    )
    (search,) = figures.targets(some).axes
    assert [t.get_text() for t in search.get_yticklabels()] == [
        "SFT greedy", "Q-value, M=4", "averaged reward, M=4", f"Q-value{on}, M=4", f"averaged reward{on}, M=4"
    ]  # fmt: skip


def test_fewer_demonstrations_meet_greedy_and_qlass_with_all(groups):
    label = {"label": "half of the demonstrations"}
    some = groups(
        ("greedy", 0.5, {}), ("qlass", 0.6, {"M": 2}), ("qlass", 0.7, {"M": 4}), ("greedy", 0.2, label),
        ("qlass", 0.49, {"M": 4} | label),
    )  # fmt: skip
    of_greedy = "QLASS with half of the demonstrations level with SFT greedy on all"
    assert told(some, of_greedy).endswith(": reproduced (M=4: -0.010 [-0.010, -0.010]).")
    of_qlass = "QLASS with half of the demonstrations level with QLASS on all"
    assert told(some, of_qlass).endswith(": not reproduced (M=4: -0.210 [-0.210, -0.210]).")


def test_ablations_meet_the_same_method_without_a_label_and_stay_out_of_the_lines(groups):
    some = groups(
        ("greedy", 0.5, {}), ("qlass", 0.6, {"M": 2, "tokens": 200}), ("qlass", 0.7, {"M": 4, "tokens": 300}),
        ("qlass", 0.65, {"M": 4, "tokens": 300, "label": "frozen backbone"}),
    )  # fmt: skip
    _, rows = report.differences_table(some)
    assert ["QLASS [frozen backbone] M=4", "QLASS M=4", "-0.050 [-0.050, -0.050]", "lower"] in [r[1:5] for r in rows]
    assert figures.targets(some) is None
    (legend,) = figures.tokens(some).legends
    assert [text.get_text() for text in legend.get_texts()] == ["SFT greedy", "QLASS, over M"]


def test_the_claims_and_the_alignment_are_in_both_reports(groups, tmp_path):
    groups(("greedy", 0.5, {}), ("qlass", 0.6, {"M": 2, "label": None}))
    figures = {"family": "learned", "rho": {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 9}, "states": 20, "top_1": 0.7,
               "gain": float("nan"), "overall": 0.25}  # fmt: skip
    (tmp_path / "qval").mkdir()
    record = {"title": "a lake", "labels": {"exact": {"qnet": figures}}}
    (tmp_path / "qval" / "alignment.json").write_text(json.dumps(record))
    (tmp_path / "qval" / "forest-exact.png").write_bytes(b"pixels")
    (tmp_path / "qval" / "forest-exact.svg").write_text("<svg><script>alert('a forest')</script></svg>")
    _, rows = report.alignment_table([tmp_path])
    assert rows == [["a lake", "exact", "learned", "qnet", "0.500 [0.400, 0.600]", "20", "0.700", "–", "0.250"]]
    report.main(["--run", str(tmp_path)])
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "QLASS above SFT greedy (Table 2): reproduced (M=2: +0.100" in text and claims.NOTE in text
        assert report.ALIGNMENT_NOTE in text and "a lake" in text
    assert 'id="claims"' in text and "data:image/png;base64,cGl4ZWxz" in text and "a forest" not in text


def test_three_seeds_speak_of_other_trainings_too(groups):
    seeds = [(method, reward, {"M": 2, "seed": seed}) for seed in range(3)
             for method, reward in (("greedy", 0.5), ("qlass", (0.9, 0.6, 0.3)[seed]))]  # fmt: skip
    (sentence,) = claims.sentences(groups(*seeds))
    assert "for this model" not in sentence
    assert "undecided (M=2: +0.100 [-0.645, +0.845])" in sentence  # t = 4.303 of two degrees, .3 / sqrt(3)


@pytest.mark.parametrize(("seeds", "alone"), [((0, 1, 2), False), ((0,), True)])
def test_trainings_that_are_not_paired_speak_of_others_too(groups, seeds, alone):
    rows = [("greedy", 0.5, {"seed": seed}) for seed in seeds]
    (sentence,) = claims.sentences(groups(*rows, *(("qlass", 0.7, {"M": 2, "seed": 10 + seed}) for seed in seeds)))
    assert ("for this model" in sentence) == alone
