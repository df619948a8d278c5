"""Documents on disk: what is broken is as good as none, with one warning, and no update is lost or torn."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from remat.errors import RematWarning
from remat.store import FORMAT_VERSION, Document, Store, open_store

NAME = "document.json"
GOOD = json.dumps({"format": FORMAT_VERSION, "value": 1})


def put(value: Any) -> Any:
    return lambda _: {"value": value}


def test_a_missing_document_is_none_without_a_word(tmp_path: Path) -> None:
    assert Store(tmp_path / "nowhere").read(NAME) is None
    assert not (tmp_path / "nowhere").exists(), "reading makes no folder"


def test_what_was_put_is_read_back_by_another_store(tmp_path: Path) -> None:
    changed = Store(tmp_path / "a" / "b").update(NAME, put([1, "two"]))
    assert changed == Store(tmp_path / "a" / "b").read(NAME) == {"format": FORMAT_VERSION, "value": [1, "two"]}
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [NAME, NAME + ".lock"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", GOOD[:-4].encode(), b"[1, 2]", b"null", b"\xff\xfe{}", b"{}", b'{"format": 0}', b'{"format": "1"}',
        b"[" * 100_000, b"1" * 5000,
    ],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
def test_a_broken_document_is_none_with_one_warning_and_made_anew_by_an_update(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / NAME
    path.write_bytes(content)
    store = Store(tmp_path)
    with pytest.warns(RematWarning, match="is ignored .*calibrate --refresh") as caught:
        assert store.read(NAME) is None
    assert len(caught) == 1 and str(path) in str(caught[0].message)
    assert store.read(NAME) is None, "the second time without a warning, which would be an error here"

    seen: list[Document | None] = []
    store.update(NAME, lambda before: [seen.append(before), {"value": 2}][1])  # type: ignore[return-value, func-returns-value]
    assert seen == [None]
    assert store.read(NAME) == {"format": FORMAT_VERSION, "value": 2}


def test_a_folder_in_the_place_of_a_document_is_none_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.warns(RematWarning, match="IsADirectoryError"):
        assert Store(tmp_path).read(NAME) is None


@pytest.mark.parametrize("below", ["", "deeper"])
def test_where_nothing_can_be_written_an_update_warns_once_and_gives_what_it_would_keep(
    tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / below)
    with pytest.warns(RematWarning) as caught:
        assert store.update(NAME, put(3)) == {"format": FORMAT_VERSION, "value": 3}
    assert any("keeps nothing in" in str(warning.message) for warning in caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.update(NAME, put(4))["value"] == 4


def test_an_update_that_cannot_replace_leaves_the_old_document_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.update(NAME, put("old"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RematWarning, match="No space left"):
        store.update(NAME, put("new"))
    found = store.read(NAME)
    assert found is not None and found["value"] == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, NAME + ".lock"]


def test_a_change_that_raises_leaves_the_document_and_the_lock_free(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.update(NAME, put("old"))
    with pytest.raises(ZeroDivisionError):
        store.update(NAME, lambda _: {"value": 1 // 0})
    assert store.update(NAME, lambda before: {"value": [before and before["value"]]})["value"] == ["old"]


def _add(folder: Path, name: str, count: int) -> None:
    for number in range(count):
        Store(folder).update(NAME, lambda before, key=f"{name}{number}": {**(before or {}), key: 1})


def test_two_processes_that_update_at_once_lose_nothing(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_add, args=(tmp_path, name, 50)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        Store(tmp_path).read(NAME)  # a torn document would warn, which is an error here
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    found = Store(tmp_path).read(NAME)
    assert found is not None and len(found) == 101


def test_the_folder_is_the_settings_or_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_store(str(tmp_path)).folder == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_store("~/here").folder == tmp_path / "home" / "here"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert open_store(None).folder == tmp_path / "xdg" / "remat"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert open_store(None).folder == tmp_path / "home" / ".cache" / "remat"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert open_store(None).folder.is_absolute(), "a user without a home"
