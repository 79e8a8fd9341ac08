"""The environment is renewed when something it depends on changed, and only then."""

from pathlib import Path

from launch import environment


def tree(folder: Path) -> Path:
    for name in ("pyproject.toml", "CMakeLists.txt", "python/a.py", "sgl-kernel-ext/k.cpp", "docs/x.md"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def test_the_stamp_follows_what_the_build_reads_and_nothing_else(tmp_path):
    root = tree(tmp_path)
    before = environment.stamp(root, {})
    (root / "docs/x.md").write_text("other")
    (root / "python/__pycache__").mkdir()
    (root / "python/__pycache__/a.pyc").write_bytes(b"1")
    assert environment.stamp(root, {"HOME": "/elsewhere"}) == before
    (root / "sgl-kernel-ext/k.cpp").write_text("other")
    assert environment.stamp(root, {}) != before


def test_the_stamp_follows_renamed_files_and_the_chosen_upstream(tmp_path):
    root = tree(tmp_path)
    before = environment.stamp(root, {})
    assert environment.stamp(root, {"LK_UPSTREAM": "0.5.21"}) != before
    (root / "python/a.py").rename(root / "python/b.py")
    assert environment.stamp(root, {}) != before


def test_an_environment_without_a_record_is_not_current(tmp_path):
    assert environment.recorded(tmp_path) == ["none"]
    environment.record(tmp_path, "abc", ["pytest"])
    assert environment.recorded(tmp_path) == ["abc", "pytest"]


def test_every_input_of_the_build_exists():
    assert [name for name in environment.INPUTS if not (environment.ROOT / name).exists()] == []
