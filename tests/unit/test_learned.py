"""What servers import beyond their standby is noted, and imported where that is harmless."""

from __future__ import annotations

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


def test_modules_that_start_threads_or_fail_are_not_harmless(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("")
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (tmp_path / "bad.py").write_text("raise ValueError\n")
    script = """
for name in ("good", "gone", "busy", "bad"):
    print(learned.harmless(lambda: learned.import_all([name]), forking.obstacle()))
print("good" in sys.modules)
"""
    assert run(tmp_path, script) == ["True", "True", "False", "False", "False"]
