"""Site profiles by name: shipped ones, a user's own, and what extends what."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.site import profile_files
from tests.support.job_scripts import JOBS, SITES


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The directory of a user's own profiles."""
    folder = tmp_path / "hpctrain" / "sites"
    folder.mkdir(parents=True)
    return folder


def _read(own: Path, name: str) -> profile_files.Site:
    return profile_files.read(name, _environ(own))


def _environ(own: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(own.parents[1])}


def test_shipped_profiles_are_the_repositorys() -> None:
    assert sorted(path.stem for path in (JOBS / "sites").glob("*.yaml")) == SITES
    wished = {"slurm", "perlmutter-cpu", "perlmutter-gpu", "frontier", "polaris", "lumi-c", "lumi-g", "hostfile", "local"}
    assert set(SITES) == wished
    for name, path in profile_files.paths({"XDG_CONFIG_HOME": "/nowhere"}).items():
        assert path.samefile(JOBS / "sites" / f"{name}.yaml")
        assert profile_files.read(name, {"XDG_CONFIG_HOME": "/nowhere"}).is_installed


def test_the_configuration_directory_follows_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    usual = Path("/home/somebody/.config/hpctrain/sites")
    assert profile_files.own_directory() == usual
    assert profile_files.own_directory({"XDG_CONFIG_HOME": "relative", "HOME": "/home/somebody"}) == usual
    assert profile_files.own_directory({"XDG_CONFIG_HOME": "/x"}) == Path("/x/hpctrain/sites")


def test_a_profile_of_ones_own_extends_a_shipped_one(own: Path) -> None:
    (own / "ours.yaml").write_text(
        "extends: lumi-c\n"
        "node: {ranks: 32}\n"
        "queue: {value: small}\n"
        "directives: {--mem=0: null, --hint=nomultithread: {why: one thread a core}}\n"
        "scratch: null\n"
        "launch: {options: [--cpu-bind=threads]}\n"
    )
    ours, base = _read(own, "ours").profile, _read(own, "lumi-c").profile
    assert (ours.node.ranks, ours.node.cores) == (32, base.node.cores)
    assert ours.queue is not None
    assert (ours.queue.option, ours.queue.value) == ("--partition", "small")
    assert list(ours.directives) == ["--hint=nomultithread"]
    assert ours.scratch is None
    assert ours.launch.options == ("--cpu-bind=threads",)
    assert ours.environment == base.environment


def test_one_of_the_same_name_hides_the_shipped_one_and_may_extend_it(own: Path) -> None:
    (own / "slurm.yaml").write_text("extends: slurm\ndescription: ours\nnode: {cores: 96}\n")
    (own / "wide.yaml").write_text("extends: slurm\nnode: {ranks: 2}\n")
    site = _read(own, "slurm")
    assert (site.profile.description, site.profile.node.cores, site.is_installed) == ("ours", 96, False)
    assert _read(own, "wide").profile.node.cores == 96  # of ours, not of the shipped one


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("extends: lumi\n", "a.yaml:1: extends is 'lumi', but must be the name of a site; the nearest is \"lumi-"),
        ("extends: 3\n", "a.yaml:1: extends is 3, but must be the name of a site"),
        ("extends: a\n", "a.yaml:1: extends is 'a', but must be the name of a site"),
        ("extends: slurm\nnode: {cores: 8, rank: 3}\n", 'a.yaml:2: Unknown key "node.rank"; the nearest is "ranks"'),
        ("extends: slurm\n\nrestarts: -1\n", "a.yaml:3: restarts is -1, but must be at least 0; the nearest legal value is 0."),
        ("extends: slurm\nnode: {cores: 4}\n", "node must have ranks of at most 4; the nearest legal value is 4."),
        ("scheduler: slurm\n", 'The key "node" is missing'),
        ("- a\n", "A site profile must be a mapping of keys"),
        ("", "A site profile must be a mapping of keys"),
        ("a: [\n", "This is not valid YAML"),
    ],
)
def test_a_fault_has_its_file_and_line(own: Path, text: str, sentence: str) -> None:
    (own / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        _read(own, "a")
    assert sentence in str(error.value)


def test_profiles_that_extend_each_other_are_refused(own: Path) -> None:
    for one, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (own / f"{one}.yaml").write_text(f"extends: {other}\n")
    with pytest.raises(ConfigError, match=r"c.yaml:1: extends is a, which extends this profile itself; take one of the two out."):
        _read(own, "a")


def test_an_unknown_site_is_told_with_the_nearest(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no site 'polari'; the nearest is \"polaris\""):
        _read(own, "polari")


def test_a_file_that_cannot_be_read_is_one_sentence(own: Path) -> None:
    (own / "bytes.yaml").write_bytes(b"name: \xff\n")
    (own / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"bytes.yaml: The byte at 6 is not UTF-8"):
        _read(own, "bytes")
    with pytest.raises(ConfigError, match=r"folder.yaml: The site profile cannot be read: Is a directory."):
        _read(own, "folder")
