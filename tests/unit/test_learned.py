"""What servers import beyond their standby is noted, and imported where that is harmless."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
from entrypoint.vllm_plugin import forking, learned
notes, modules = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(modules))
"""


def run(room: Path, script: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT + script, str(room / "state" / "notes"), str(room)]
    room.mkdir(exist_ok=True)
    (room / "state").mkdir(exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_what_is_imported_is_noted_once_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text("import inner\n")
    (tmp_path / "inner.py").write_text("")
    for _ in range(2):
        run(tmp_path, "learned.note(notes); import outer")
    assert run(tmp_path, "print(*learned.names(notes))") == ["outer", "inner"]


def test_what_tells_how_far_a_server_is_is_never_learned(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "notes").write_text("uvicorn.lifespan.on\nvllm.v1.engine.async_llm\nx\n")
    assert run(tmp_path, "print(*learned.names(notes))") == ["x"]


def test_names_that_are_none_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "notes").write_bytes(b"a b\n../x\nos.system('x')\n\xff\nfine.name\n")
    assert run(tmp_path, "print(*learned.names(notes))") == ["fine.name"]


def test_a_file_that_has_grown_too_large_is_started_over(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "notes").write_text("x\n" * (1 << 20))
    (tmp_path / "inner.py").write_text("")
    run(tmp_path, "learned.note(notes); import inner")
    assert run(tmp_path, "print(*learned.noted(notes))") == ["inner"]


def test_notes_of_the_models_that_served_last_are_kept(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    for age in range(20):
        path = tmp_path / "state" / f"model-{age}"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    # That of the model that is served now is the oldest one.
    run(tmp_path, "learned.note(notes.with_name('model-19'))")
    kept = {path.name for path in (tmp_path / "state").iterdir()}
    assert kept == {"model-19", *(f"model-{age}" for age in range(15))}


BUSY = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


def test_modules_that_start_threads_or_fail_are_not_harmless(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("")
    (tmp_path / "busy.py").write_text(BUSY)
    (tmp_path / "bad.py").write_text("raise ValueError\n")
    script = """
for name in ("good", "gone", "busy", "bad"):
    print(learned.harmless(lambda: learned.import_all([name]), forking.obstacle()))
print("good" in sys.modules)
"""
    assert run(tmp_path, script) == ["True", "True", "False", "False", "False"]


def test_a_module_that_does_harm_is_left_out_with_what_is_in_it_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "__init__.py").write_text("raise OSError('libcudart.so.12: not found')\n")
    (tmp_path / "bad" / "inner.py").write_text("")
    (tmp_path / "busy.py").write_text(BUSY)
    for name in ("first", "badly", "last"):
        (tmp_path / f"{name}.py").write_text("")
    script = """
found = ["first", "bad", "bad.inner", "badly", "busy", "gone", "last"]
print(*learned.tried(found, forking.obstacle()), "last" in sys.modules, sep="\\n")
"""
    assert "".join(run(tmp_path, script)) == ("['first','badly','gone','last']['bad','busy']False")


def test_where_too_many_do_harm_those_before_are_all(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("")
    for number in range(9):
        (tmp_path / f"bad{number}.py").write_text("raise ValueError\n")
    script = """
bad = [f"bad{number}" for number in range(9)]
found, refused = learned.tried(["good", *bad, "later"], forking.obstacle())
print(*found, refused == bad[:8])
"""
    assert run(tmp_path, script) == ["good", "True"]


def test_what_was_refused_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "notes").write_text("good\nbad\nbad.inner\nbadly\n")
    run(tmp_path, "learned.refuse(notes, ['bad'])")
    assert run(tmp_path, "print(*learned.names(notes))") == ["good", "badly"]
