"""Versions, checksums and the metadata that follows from them, without a wheel of upstream's."""

import pytest
from overlay import OverlayError, facts, metadata, pins, wheels
from upstream import wheel


def tag(version: str, **wheel_sums: str) -> pins.Tag:
    return pins.Tag(version=version, revision=2, wheels=wheel_sums, files={"sglang/__init__.py": "sha256:00"})


@pytest.mark.parametrize(("upstream", "own"), [("0.5.23", "0.5.23.2"), ("0.5.15.post1", "0.5.15.102"), ("0.6", "0.6.2")])
def test_our_version_is_upstreams_plus_a_revision(upstream, own):
    assert tag(upstream).own_version == own


def test_releases_sort_as_they_came():
    names = ["0.5.9", "0.5.15.post1", "0.5.15", "0.5.16"]
    assert sorted(names, key=pins.split) == ["0.5.9", "0.5.15", "0.5.15.post1", "0.5.16"]
    with pytest.raises(OverlayError) as error:
        pins.split("0.5.24rc1")
    assert str(error.value) == "'0.5.24rc1' is not a release of upstream (expected e.g. 0.5.23 or 0.5.15.post1)"


def test_the_newest_pinned_release_is_the_default(tmp_path):
    found = pins.Pins(default="0.5.9", tags={"0.5.9": tag("0.5.9")}).with_tag(tag("0.5.15.post1"))
    path = tmp_path / "upstream.toml"
    path.write_text(pins.format(found))
    assert pins.load(path) == found
    assert (found.default, list(found.tags)) == ("0.5.15.post1", ["0.5.15.post1", "0.5.9"])


def test_an_unknown_release_is_answered_with_the_pinned_ones(monkeypatch):
    monkeypatch.setenv("LK_UPSTREAM", "0.5.99")
    with pytest.raises(OverlayError) as error:
        pins.load().chosen()
    assert str(error.value).startswith("LK_UPSTREAM=0.5.99: no such pinned release; pinned are 0.5.23, 0.5.22, 0.5.21")


def test_every_pinned_release_has_a_wheel_for_every_python_and_machine():
    for version, found in pins.load().tags.items():
        ends = {(name.split("-")[2], name.rsplit("manylinux_2_34_", 1)[1]) for name in found.wheels}
        assert ends == {(p, f"{m}.whl") for p in wheels.PYTHONS for m in wheels.MACHINES}, version


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path, monkeypatch):
    path = wheel(tmp_path, "0.5.23", {"sglang/__init__.py": ""})
    monkeypatch.setenv("LK_UPSTREAM_WHEELS", str(tmp_path))
    with pytest.raises(OverlayError) as error:
        wheels.get(pins=pins.load(), version="0.5.23", python="cp311", machine="x86_64")
    assert str(error.value).startswith(f"{path}: checksum differs from the pin (pinned sha256:")
    good = pins.Pins(default="0.5.23", tags={"0.5.23": tag("0.5.23", **{path.name: wheels.sha256(path.read_bytes())})})
    assert wheels.get(pins=good, version="0.5.23", python="cp311", machine="x86_64") == path


def test_offline_a_missing_wheel_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LK_UPSTREAM_WHEELS", str(tmp_path))
    with pytest.raises(OverlayError) as error:
        wheels.get(pins=pins.load(), version="0.5.23", python="cp312", machine="aarch64")
    assert str(error.value) == (
        f"LK_UPSTREAM_WHEELS={tmp_path}: no wheel of sglang 0.5.23 for cp312 on aarch64 in it"
        " (put one there, or unset the variable to fetch it)"
    )


def test_a_python_or_machine_without_upstream_wheels_is_said_at_once():
    with pytest.raises(OverlayError) as error:
        wheels.get(pins=pins.load(), version="0.5.23", python="cp310", machine="riscv64")
    assert str(error.value) == (
        "Python cp310 has no upstream wheel (use Python 3.11, 3.12 or 3.13);"
        " machine riscv64 has no upstream wheel (supported are x86_64, aarch64)"
    )


def test_requirements_follow_the_chosen_release_and_extras_name_us(monkeypatch):
    monkeypatch.setenv("LK_UPSTREAM", "0.5.21")
    fields = metadata.dynamic_metadata({}, {})
    assert fields["version"] == "0.5.21.1"
    assert "torch==2.13.0" in fields["dependencies"]
    assert "sglang-lk[diffusion]" in fields["optional-dependencies"]["all"]
    said = [*fields["dependencies"], *(one for extra in fields["optional-dependencies"].values() for one in extra)]
    assert [one for one in said if one.startswith(("sglang[", "sglang ", "sglang="))] == []


def test_markers_of_extras_stay_whole():
    lines = (
        "Requires-Dist: a==1; (x == \"y\") and extra == \"e\"\nProvides-Extra: none\n"
        "Requires-Dist: b; extra == \"e\"\nRequires-Dist: c>=2; m == \"n\"\n"
    )
    assert metadata.requirements(lines) == (["c>=2; m == \"n\""], {"e": ["a==1; (x == \"y\")", "b"], "none": []})


def test_generated_requirements_are_kept_for_every_pinned_release():
    for version in pins.load().tags:
        required, extras = metadata.requirements(facts.requires_path(version).read_text())
        assert len(required) > 50 and "diffusion" in extras
