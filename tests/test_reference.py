"""What the pages of runs/reference_output say beside rewards: it has a row, or a commit whose page is its source."""

import re

import pandas as pd

from reporting.reference import FOLDER


def page(name: str) -> str:
    """A page's text with single spaces, so that a number may go over the end of a line."""
    return " ".join((FOLDER / name).read_text(encoding="utf-8").split())


def test_numbers_without_a_row_stand_on_their_page():
    numbers = pd.read_csv(FOLDER / "numbers.csv", dtype=str)
    for _, row in numbers.iterrows():
        assert re.search(rf"(?<![\d.]){re.escape(row['number'])}(?![\d]|\.\d)", page(row["page"])), row["what"]
    assert numbers["source"].str.fullmatch(r"[\w/]+ at [0-9a-f]{7}").all()


def test_scores_and_how_they_predict_rewards():
    text, scores = page("searches.md"), pd.read_csv(FOLDER / "alignment.csv").dropna(subset="reward")
    webshop, frozenlake = (
        scores[scores["environment"] == name].set_index("score") for name in ("webshop", "frozenlake")
    )
    shown = re.findall(r"\| ([^|]+) \| (\.\d{3}) \| (-?\.\d{3}) \| (\.\d{3}) \| (-?\.\d{3}) \|", text)
    for score, *values in shown:
        rows = webshop.loc[score], frozenlake.loc[score]
        assert [float(value) for value in values] == [row[name] for row in rows for name in ("reward", "rho")]
    assert len(shown) == 9
    correlations = [rows["reward"].corr(rows["rho"], method="spearman") for rows in (webshop, frozenlake)]
    at_webshop, at_frozenlake = (f"{value:.2f}".lstrip("0") for value in correlations)
    said = (
        f"{at_webshop} over {len(webshop)} scores on WebShop and {at_frozenlake} over {len(frozenlake)} on FrozenLake"
    )
    assert said in text


def test_scores_of_a_judge_are_those_of_their_rows():
    text, scores = page("judges.md"), pd.read_csv(FOLDER / "alignment.csv", dtype=str, keep_default_na=False)
    for _, row in scores[scores["family"] != "look-up"].iterrows():
        shown = f"{row['rho']} [{row['rho_low']}, {row['rho_high']}]" if row["rho_low"] else row["rho"]
        if row["answers"]:
            top = row["top_1"] if row["rho"] else "–"
            shown = f"{shown or '–'} | {top} | {int(row['unread']):,} of {int(row['answers']):,} |"
        assert re.sub(r"\b0\.", ".", shown) in text, row["score"]


def test_shares_of_siblings_are_of_their_pairs():
    siblings = pd.read_csv(FOLDER / "siblings.csv")
    shops = siblings[siblings["split"] == "ten shops"]
    right = (shops["right"] * shops["pairs"]).groupby(shops["score"]).sum() / shops.groupby("score")["pairs"].sum()
    order = ["log-probability", "QNet by Eq. 11", "QNet by the last token", "QNet with rank weight"]
    shares = " | ".join(f"{right[score]:.3f}".lstrip("0") for score in order)
    assert f"| pairs ordered right | {shares} |" in page("README.md")
