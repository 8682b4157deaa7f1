"""WebShop's files as a stream, and the store that is made of them once."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
from fakes import SHARED, fork, recorded, refused, write
from hypothesis import given, settings
from hypothesis import strategies as st

import envs
from data import make_webshop
from environments.webshop import catalogue, engine, search, store
from qlass.inputs import fingerprint
from qlass.settings import Sampling


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "crowd"
    folder.mkdir()
    make_webshop.write_crowd(folder, 0, 300)
    return folder


JSON = st.recursive(
    st.none() | st.text(max_size=5) | st.floats(allow_nan=False) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(JSON, max_size=5), st.sampled_from([None, 0, 2]), st.integers(1, 9))
def test_a_stream_reads_what_json_reads(tmp_path_factory, values, indent, size):
    path = tmp_path_factory.getbasetemp() / "list.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(values, file, indent=indent, ensure_ascii=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "CHUNK", size)
        assert [*catalogue.stream(path, True)] == values


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"asin": 1}', "a list of products is expected"),
        ('[{"a": 1},\n\n{"a": 2,}]', "not valid JSON at '{\"a\": 2,}]'"),
        ("[1]\n[2]", "something stands behind the list"),
        ('["\udcff"]', "can't be read"),
    ],
)
def test_a_stream_that_is_no_json_list(monkeypatch, text, reason):
    path = Path("items.json")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(catalogue, "CHUNK", 3)
    with refused(reason):
        [*catalogue.stream(path, True)]


@pytest.mark.parametrize("field", ["name", "full_description", "small_description"])
def test_a_product_without_a_text_is_refused(crowd, field):
    folder = shutil.copytree(crowd, Path("data"))
    items = folder / "items_shuffle.json"
    products = json.loads(items.read_text())
    products[1][field] = None
    write(items, [products])
    with refused("product number 1 is not in WebShop's schema"):
        store.open_store(folder)


@pytest.mark.parametrize(
    ("name", "text", "options", "says"),
    [
        ("items_shuffle", None, {}, "found none of .*items_shuffle.json"),
        ("items_ins_v2", "[1", {}, "items_ins_v2.json: can't be read"),
        (
            "items_human_ins",
            "{}",
            {"human_goals": True},
            "no goals; the catalogue has no instructions of the kind asked for",
        ),
        ("items_human_ins", '{"%s": [1]}', {"human_goals": True}, "an instruction is not in WebShop's schema"),
    ],
)
def test_files_without_what_they_are_to_hold_are_refused(crowd, name, text, options, says):
    folder = shutil.copytree(crowd, Path("data"))
    asin = json.loads((folder / "items_shuffle.json").read_text())[0]["asin"]
    file = folder / f"{name}.json"
    file.unlink() if text is None else file.write_text(text.replace("%s", asin))
    with refused(says):
        envs.make("webshop", data=folder, **options)


def test_a_store_is_made_once_for_its_sources(crowd, monkeypatch):
    folder, builds, build = shutil.copytree(crowd, Path("data")), [], store.build
    monkeypatch.setattr(store, "SMALL", 0)
    monkeypatch.setattr(store, "build", lambda *args: builds.append(1) or build(*args))

    def shop_at(cache=None):
        """The products, and how many builds there were."""
        return [*store.open_store(folder, cache=cache).products], len(builds)

    products, _ = shop_at()
    assert shop_at() == (products, 1) and len(products) == 300
    items = folder / "items_shuffle.json"
    times, text = items.stat(), items.read_text()
    items.write_text(text.replace('"name": "s', '"name": "S', 1))
    os.utime(items, ns=(times.st_atime_ns, times.st_mtime_ns))  # neither its size nor its time has changed
    (first, *others), number = shop_at()
    assert (number, others) == (2, products[1:]) and first != products[0]
    assert len([*folder.glob(".webshop-*/products")]) == 1
    assert shop_at(Path("cache")) == ([first, *others], 3)
    with refused("cache=DIR"):  # where none can be written
        shop_at(items / "cache")


def forked(*calls):
    processes = [fork(lambda _, call=call: call(), []) for call in calls]
    return [process.join() or process.exitcode for process in processes]


def test_a_build_that_was_killed_is_done_anew_and_once_by_several_processes(crowd, monkeypatch):
    log, build = Path("log"), store.build

    def killed():
        search.Indexer.finish = lambda self, rank: os._exit(9)
        store.open_store(crowd, cache=Path())

    def told(*args):
        with open(log, "a") as file:
            file.write("built\n")
        build(*args)

    assert forked(killed) == [9] and len([*Path().glob("..webshop-*/products")]) == 1
    monkeypatch.setattr(store, "build", told)
    codes = forked(*[lambda: os._exit(len(store.open_store(crowd, cache=Path()).products) % 256)] * 3)
    assert codes == [300 % 256] * 3 and log.read_text() == "built\n"
    assert not [*Path().glob("..webshop-*/products")] and len([*Path().glob(".webshop-*/products")]) == 1


def test_an_index_is_no_part_of_the_data(crowd, monkeypatch):
    monkeypatch.setattr(store, "SMALL", 0)
    folder = shutil.copytree(crowd, Path("data"))
    before = fingerprint(folder)
    config = Sampling(env="webshop", env_option=(f"data={folder}",))
    assert envs.from_config(config).settings["env_files"] == {"data": before}
    assert len([*folder.glob(".webshop-*/products")]) == 1


@recorded
def test_a_kept_store_is_the_shop():
    first, *others = (engine.Shop(SHARED, cache=cache) for cache in (None, Path(), Path()))
    for shop in others:
        for name in ("products", "goals", "prices"):
            assert [*getattr(shop, name)] == [*getattr(first, name)]
        assert (shop.owners == first.owners).all() and (shop.shares == first.shares).all()
        assert [shop.position(product.asin) for product in shop.products] == [*range(1000)]
        assert shop.position("B") is None
