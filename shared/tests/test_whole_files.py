import threading

import pytest

from septet_shared._whole_files import write_whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "f"
    texts = [f"{i}" * 100_000 for i in range(8)]
    threads = [threading.Thread(target=write_whole, args=(target, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_text() in texts
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "\ud800")  # cannot be encoded: fails after the file was opened
    assert target.read_text() in texts
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write_keeps_what_was_there(tmp_path, monkeypatch):
    path = write_whole(tmp_path / "a.json", "old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_whole(path, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]
