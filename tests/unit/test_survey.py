from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, outlive_ctime

from entrypoint.checkpoint import header
from entrypoint.errors import OwnershipError
from entrypoint.model import access, contents, files, mount
from entrypoint.model import survey as surveys
from entrypoint.model.access import unreadable
from entrypoint.model.contents import SourceFile
from entrypoint.model.files import NO_TENSORS, SMALL_BYTES, is_copied, is_marker, is_model_file
from entrypoint.model.hub import hub_cache
from entrypoint.model.survey import Survey, survey

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BLOB = "ab" * 32


def fill(directory: Path, *paths: str) -> Path:
    for path in paths:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(path)
    return directory


def look(word: object, revision: str | None = None, **environ: str) -> Survey:
    return survey(str(word), revision, environ, silence=20)


def names(found: Survey) -> tuple[list[str], list[str]]:
    return [f.path for f in found.weights], [f.path for f in found.model_files]


def hub(cache: Path, repository: str = "org/model") -> Path:
    """Make a Hugging Face cache with one snapshot, links to blobs and all; return the snapshot."""
    root = cache / f"models--{repository.replace('/', '--')}"
    fill(root, f"blobs/{BLOB}", "blobs/etag", "refs/main")
    (root / "refs" / "main").write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{BLOB}")
    (snapshot / "config.json").symlink_to("../../blobs/etag")
    return snapshot


def test_a_directory_is_weights_and_model_files(tmp_path: Path) -> None:
    weights = ["a/model-2.safetensors", "model-1.safetensors"]
    files = ["code/modeling.py", "config.json", "merges.txt", "template.jinja", "tokenizer.model"]
    other = ["LICENSE", "README.md", "image.png", "model.onnx", "nohup.out"]
    found = look(fill(tmp_path, *weights, *files, *other))
    assert names(found) == (weights, files)
    assert found.directory == str(tmp_path)
    assert (found.revision, found.is_checkpoint, found.timed_out) == (None, False, False)


def test_what_lies_behind_a_link_to_a_directory_counts_once(tmp_path: Path) -> None:
    model = fill(tmp_path / "model", "config.json", "1_Pool/config.json")
    fill(tmp_path / "elsewhere", "model.safetensors")
    for name in ("2_Dense", "3_Dense"):
        (model / name).symlink_to(tmp_path / "elsewhere")
    (model / "1_Pool" / "round").symlink_to(model)
    found = look(model)
    assert names(found) == (["2_Dense/model.safetensors"], ["1_Pool/config.json", "config.json"])


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".pth", ".gguf"])
def test_weights_of_every_kind_are_weights(tmp_path: Path, suffix: str) -> None:
    found = look(fill(tmp_path, "config.json", f"model{suffix}"))
    assert names(found) == ([f"model{suffix}"], ["config.json"])


def test_safetensors_come_before_all_other_weights(tmp_path: Path) -> None:
    found = look(fill(tmp_path, "model.safetensors", "pytorch_model.bin", "extra.pt"))
    assert names(found)[0] == ["model.safetensors"]


def test_what_is_hidden_or_the_original_form_is_passed_over(tmp_path: Path) -> None:
    passed = [".cache/x.json", ".git/config.json", "original/params.json", ".hidden.json"]
    passed += ["original/model.safetensors", "__pycache__/x.py"]
    found = look(fill(tmp_path, "config.json", "model.safetensors", *passed))
    assert names(found) == (["model.safetensors"], ["config.json"])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        *((name, True) for name in ("config.json", "a/b.py", "x.TXT", "chat_template.jinja")),
        *((name, True) for name in ("tokenizer.model", "vocab.bpe", "a.tiktoken", "p.yaml")),
        *((name, True) for name in ("tokenizer.model.v3", "prompts.jsonl", "bpe.codes", "vocab")),
        *((name, False) for name in ("model.safetensors.index.json", "pytorch.BIN.INDEX.JSON")),
        *((name, False) for name in ("manifest.json", "index.json", "have.json", "README.md")),
        *((name, False) for name in ("model.safetensors", "a.png", "LICENSE", "tf_model.h5")),
    ],
)
def test_a_checkpoint_carries_what_the_model_needs_beside_weights(
    tmp_path: Path, path: str, *, expected: bool
) -> None:
    fill(tmp_path, path)
    assert (is_model_file(str(tmp_path), path) and is_copied(path)) is expected


def test_a_file_of_no_known_kind_counts_only_where_it_is_a_small_one_that_is_there(
    tmp_path: Path,
) -> None:
    fill(tmp_path, "config.json", "model.safetensors", "vocab", "data")
    os.truncate(tmp_path / "data", SMALL_BYTES + 1)
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    assert names(look(tmp_path)) == (["model.safetensors"], ["config.json", "vocab"])


def test_what_stands_for_weights_that_vllm_goes_by_is_a_whole_file_without_tensors(
    tmp_path: Path,
) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(NO_TENSORS)
    assert is_marker("sub/consolidated.00.safetensors")
    assert not is_marker("model.safetensors")
    assert header.read(tmp_path / "consolidated.safetensors") == {}


def test_a_checkpoint_is_known_by_its_manifest(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path)
    found = look(tmp_path / manifest.name)
    assert found.is_checkpoint
    assert names(found) == ([], [])


@pytest.mark.parametrize("text", ['{"name": "a web app"}', "[" * 100_000], ids=["app", "nested"])
def test_a_manifest_of_another_kind_makes_no_checkpoint(tmp_path: Path, text: str) -> None:
    fill(tmp_path, "config.json", "model.safetensors")
    (tmp_path / "manifest.json").write_text(text)
    found = look(tmp_path)
    assert not found.is_checkpoint
    assert names(found) == (["model.safetensors"], ["config.json"])


def test_an_index_of_weights_counts_and_is_not_carried(tmp_path: Path) -> None:
    fill(tmp_path, "model.safetensors", "model.safetensors.index.json")
    assert names(look(tmp_path))[1] == ["model.safetensors.index.json"]
    assert not is_copied("model.safetensors.index.json")


def test_weights_below_do_not_hide_those_at_the_top(tmp_path: Path) -> None:
    fill(tmp_path, "pytorch_model.bin", "2_Dense/model.safetensors")
    assert names(look(tmp_path))[0] == ["2_Dense/model.safetensors", "pytorch_model.bin"]


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"])
def test_a_hub_id_is_the_snapshot_in_the_cache(tmp_path: Path, variable: str) -> None:
    snapshot = hub(tmp_path)
    found = look("org/model", **{variable: str(tmp_path)})
    assert found.directory == str(snapshot)
    assert found.revision == COMMIT
    assert [f.sha256 for f in found.weights] == [BLOB]
    assert [f.sha256 for f in found.model_files] == [None]
    by_commit = look("org/model", COMMIT, **{variable: str(tmp_path)})
    assert by_commit.directory == str(snapshot)


def test_a_snapshot_may_be_named_by_its_path(tmp_path: Path) -> None:
    snapshot = hub(tmp_path)
    found = look(snapshot)
    assert found.revision == COMMIT
    assert [f.sha256 for f in found.weights] == [BLOB]


@pytest.mark.parametrize(
    ("word", "revision", "known"),
    [
        ("org/other", None, None),
        ("org/model", "v1", None),
        ("org/model", "f" * 40, "f" * 40),
        ("/no/such/dir", None, None),
        ("org/model/extra", None, None),
        ("../none/such", None, None),
        ("s3://bucket/model", None, None),
    ],
)
def test_what_is_not_on_this_machine_is_absent(
    tmp_path: Path, word: str, revision: str | None, known: str | None
) -> None:
    hub(tmp_path)
    found = look(word, revision, HF_HUB_CACHE=str(tmp_path))
    assert (found.directory, found.revision, found.timed_out) == (None, known, False)


@pytest.mark.parametrize(("revision", "known"), [(None, None), (COMMIT, COMMIT)])
def test_a_model_of_which_only_the_config_was_fetched_has_the_commit_of_the_words_alone(
    tmp_path: Path, revision: str | None, known: str | None
) -> None:
    """The branch that it was fetched from may have moved since."""
    (hub(tmp_path) / "model.safetensors").unlink()
    found = look("org/model", revision, HF_HUB_CACHE=str(tmp_path))
    assert (found.directory, found.revision) == (None, known)


def test_a_branch_of_a_model_that_is_not_here_names_no_commit(tmp_path: Path) -> None:
    hub(tmp_path)
    (tmp_path / "models--org--model" / "refs" / "main").write_text("f" * 40)
    found = look("org/model", HF_HUB_CACHE=str(tmp_path))
    assert (found.directory, found.revision) == (None, None)


def test_a_reference_may_not_lead_elsewhere(tmp_path: Path) -> None:
    hub(tmp_path)
    (tmp_path / "models--org--model" / "refs" / "main").write_text("../../../etc")
    assert look("org/model", HF_HUB_CACHE=str(tmp_path)).directory is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/c/huggingface/hub"),
        ({"HOME": "/d"}, "/d/.cache/huggingface/hub"),
        ({"HF_HUB_CACHE": "", "HOME": "/d"}, "/d/.cache/huggingface/hub"),
        ({"HF_HOME": "~/b", "HOME": "/d"}, "/d/b/hub"),
        ({"HF_HUB_CACHE": "$ROOM/${NAME}/$NONE", "ROOM": "/a", "NAME": "b"}, "/a/b/$NONE"),
        ({}, "/.cache/huggingface/hub"),
    ],
)
def test_the_hub_cache_is_where_the_hub_client_keeps_it(
    environ: dict[str, str], expected: str
) -> None:
    assert hub_cache(environ) == Path(expected)


def test_a_dangling_link_is_no_hung_mount(tmp_path: Path) -> None:
    fill(tmp_path, "config.json")
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    assert not look(tmp_path).timed_out


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Yield a directory that everybody may enter, as those above tmp_path may not be."""
    with tempfile.TemporaryDirectory(prefix="shardboot-survey-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def as_nobody(check: Callable[[], None]) -> None:
    """Run a check in a child that has become another user."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(2000, 2000, 2000)
            os.setresuid(2000, 2000, 2000)
            check()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@as_root
@pytest.mark.parametrize("closed", ["config.json", "."])
def test_a_source_without_a_config_that_this_user_may_read_is_an_error_of_ownership(
    open_path: Path, closed: str
) -> None:
    model = fill(open_path / "model", "config.json", "model.safetensors", "code/x.py")
    (model / closed).chmod(0o600)

    def check() -> None:
        with pytest.raises(OwnershipError, match="uid 2000") as caught:
            look(model)
        assert caught.value.exit_code == 60
        assert caught.value.hint

    as_nobody(check)


@as_root
@pytest.mark.parametrize("closed", ["notes.txt", "figures/plot.json", "figures"])
def test_what_vllm_may_never_open_is_only_said_where_it_may_not_be_read(
    open_path: Path, closed: str
) -> None:
    paths = ("config.json", "model.safetensors", "notes.txt", "figures/plot.json")
    model = fill(open_path / "model", *paths)
    # A directory that may be listed, and not searched.
    (model / closed).chmod(0o644 if (model / closed).is_dir() else 0o600)

    def check() -> None:
        found = look(model)
        assert str(found.denied).startswith(f"{model}/{closed}")
        assert names(found)[0] == ["model.safetensors"]

    as_nobody(check)


@as_root
def test_weights_are_opened_to_see_whether_they_may_be_read(open_path: Path) -> None:
    model = fill(open_path / "model", "model.safetensors", "extra/old.safetensors")
    (model / "extra" / "old.safetensors").chmod(0o600)
    paths = ["model.safetensors", "extra/old.safetensors", "gone.safetensors"]
    as_nobody(lambda: expect(unreadable(str(model), paths), ["extra/old.safetensors"]))


@pytest.mark.parametrize(("kind", "opened"), [("nfs4", True), ("nfs", True), ("tmpfs", False)])
def test_where_stamps_are_cached_weights_are_opened_before_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, opened: bool
) -> None:
    model = fill(tmp_path, "config.json", "model.safetensors")
    told: list[str] = []
    real_open, real_stat = access.may_open, contents._stat

    def may_open(path: str) -> bool:
        told.append(f"open {Path(path).name}")
        return real_open(path)

    def stat(directory: str, path: str) -> SourceFile:
        told.append(f"stat {path}")
        return real_stat(directory, path)

    monkeypatch.setattr(access, "may_open", may_open)
    monkeypatch.setattr(contents, "_stat", stat)
    monkeypatch.setattr(mount, "kind_of", lambda _: kind)
    monkeypatch.setattr(os, "major", lambda _: 0)
    surveys.look(str(model), None, {})
    weights = ["open model.safetensors"] * opened + ["stat model.safetensors"]
    assert told == [*weights, "open config.json", "stat config.json"]


def test_of_more_files_than_a_model_has_none_is_left_out_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 2)
    found = look(fill(tmp_path, "config.json", "model.safetensors", "below/x.py"))
    assert found.directory is None
    assert "more than 2 files" in str(found.broken)


def expect(found: object, wanted: object) -> None:
    assert found == wanted


@as_root
def test_a_look_opens_no_weights(open_path: Path) -> None:
    model = fill(open_path / "model", "config.json", "model.safetensors")
    (model / "model.safetensors").chmod(0o600)

    def check() -> None:
        assert [file.path for file in look(model).weights] == ["model.safetensors"]

    as_nobody(check)


def test_a_look_that_hangs_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveys, "look", lambda *_: threading.Event().wait())
    started = time.monotonic()
    found = survey(str(tmp_path), None, {}, silence=0.2)
    assert found.timed_out
    assert time.monotonic() - started < 2


def test_a_look_that_dies_tells_nothing_of_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveys, "look", lambda *_: os._exit(9))
    found = survey(str(tmp_path), None, {})
    assert (found.timed_out, found.directory) == (False, None)
    assert "died" in str(found.broken)


def test_everything_that_moves_a_byte_moves_the_stamps(tmp_path: Path) -> None:
    fill(tmp_path, "config.json", "model.safetensors")
    before = look(tmp_path).stamps
    assert look(tmp_path).stamps == before
    for name in ("config.json", "model.safetensors"):
        outlive_ctime(tmp_path / name)
        (tmp_path / name).write_text(name)
        now = look(tmp_path).stamps
        assert now != before
        before = now
    fill(tmp_path, "added.json")
    assert look(tmp_path).stamps != before
