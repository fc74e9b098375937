"""What an upgrade runs: `fake_host.py HOME PROGRAM WORD…`, and PROGRAM is whose part it plays.

That is systemctl, systemd-run, podman, nginx, or a hook. Instances are real processes that answer
HTTP (`tests/answers.py`). In HOME, `env/NAME.env` is what an instance gets, `units/NAME` what is
known of it, `rules/NAME.json` how it misbehaves, `calls` what was done to any, `where` where the
hook's requests go, `fails` the acts that fail, `kill` the act before or after which our caller is
killed, and `checkpoint` is there once one is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

HOME = Path(sys.argv[1])
ACTIVE = ("inactive", "active", "failed")


def main() -> None:
    program, words = sys.argv[2], sys.argv[3:]
    if program == "systemctl":
        systemctl(words)
    elif program == "systemd-run":
        (file,) = (w.rpartition("=")[2] for w in words if w.startswith("--property=Environment"))
        (unit,) = (w.rpartition("=")[2] for w in words if w.startswith("--unit="))
        if lives(read(unit)):
            sys.exit(f"Unit {unit} was already loaded")
        shardboot(words[words.index("/opt/shardboot") + 1], Path(file).stem, unit)
    elif program == "podman":
        podman(words)
    elif program == "nginx":
        nginx(words)
    elif words[0] == "where":
        print((HOME / "where").read_text())
    else:
        act("move", words[1])
        (HOME / "where").write_text(words[1])
        done("move")


def act(verb: str, about: str) -> None:
    """Note what is about to be done; fail, or end our caller, where that is wanted."""
    with (HOME / "calls").open("a") as calls:
        print(verb, about, file=calls)
    end_caller(f"before {verb}")
    if verb in (HOME / "fails").read_text().split():
        sys.exit(f"it shall not\n{verb} failed")


def done(verb: str) -> None:
    end_caller(f"after {verb}")


def end_caller(moment: str) -> None:
    if (HOME / "kill").read_text() == moment:
        (HOME / "kill").write_text("")
        os.kill(os.getppid(), signal.SIGKILL)
        sys.exit(1)


def systemctl(words: list[str]) -> None:
    verb, *rest = words
    name = re.sub(r"shardboot@(.*)\.service", r"\1", rest[-1])
    unit = read(name)
    if verb == "show":
        state = ACTIVE[1] if lives(unit) else ACTIVE[2] if unit.get("pid") else ACTIVE[0]
        enabled = "enabled" if unit.get("enabled") else "disabled"
        print(f"ActiveState={state}\nResult=exit-code\nNRestarts=0\nUnitFileState={enabled}")
        return
    act(verb, name)
    if verb == "start":
        start(name)
    elif verb == "stop":
        stop(name)
    else:
        write(name, read(name) | {"enabled": verb == "enable"})
    done(verb)


def podman(words: list[str]) -> None:
    if words[0] == "ps":
        (name,) = re.findall(r"\^(.*)\$", " ".join(words))
        unit = read(name)
        state = {"State": "running" if lives(unit) else "exited", "ExitCode": 1}
        print(json.dumps([state] if unit else []))
    elif words[0] == "stop":
        act("stop", words[-1])
        stop(words[-1])
        done("stop")
    else:
        assert "image:2" in words, words
        name = Path(words[words.index("--env-file") + 1]).stem
        if "--detach" in words:
            act("start", name)
            start(name)
            done("start")
        else:
            errand = words[words.index("--name") + 1]
            shardboot(words[words.index("image:2") + 1], name, errand)


def shardboot(verb: str, name: str, errand: str) -> None:
    is_there = (HOME / "checkpoint").exists()
    if verb == "plan":
        if "plan" in (HOME / "fails").read_text().split():
            sys.exit("shardboot: error: this plan failed")
        missing = rules(name).get("plan", "save")
        reason = "local.hit" if is_there else "local.absent"
        text = {"reason": reason, "text": "so it is", "action": "reuse" if is_there else missing}
        print(json.dumps(text))
        return
    act(verb, name)
    if rules(name).get("endless"):
        go_on(errand)
    if rules(name).get("makes", True):
        (HOME / "checkpoint").touch()
    done(verb)


def go_on(errand: str) -> None:
    """Be at it until somebody stops it, which whoever ends us does not."""
    null = subprocess.DEVNULL
    words = [sys.executable, "-SEc", "import signal; signal.pause()"]
    process = subprocess.Popen(words, start_new_session=True, stdin=null, stdout=null, stderr=null)
    write(errand, {"pid": process.pid})
    process.wait()
    sys.exit("it was stopped")


def nginx(words: list[str]) -> None:
    verb = "test" if "-T" in words else "reload"
    act(verb, "nginx")
    status = subprocess.run([HOME / "front" / "bin" / "nginx", *words], check=False).returncode
    done(verb)
    sys.exit(status)


def start(name: str) -> None:
    port = re.findall(r"--port (\d+)", (HOME / "env" / f"{name}.env").read_text())[0]
    server = Path(__file__).with_name("fake_server.py")
    # Nothing of whoever started it is left to it.
    null = subprocess.DEVNULL
    words = [sys.executable, "-SE", server, port, HOME / "rules" / f"{name}.json"]
    process = subprocess.Popen(words, start_new_session=True, stdin=null, stdout=null, stderr=null)
    write(name, read(name) | {"pid": process.pid})


def stop(name: str) -> None:
    unit = read(name)
    if lives(unit):
        os.kill(unit["pid"], signal.SIGKILL)
    write(name, unit | {"pid": 0})


def lives(unit: dict[str, int]) -> bool:
    with contextlib.suppress(OSError):
        path = Path(f"/proc/{unit.get('pid') or 'none'}/stat")
        return path.read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def read(name: str) -> dict[str, int]:
    path = HOME / "units" / name
    found: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(name: str, unit: dict[str, int]) -> None:
    draft = HOME / "units" / f".{name}"
    draft.write_text(json.dumps(unit))
    draft.replace(HOME / "units" / name)


def rules(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((HOME / "rules" / f"{name}.json").read_text())
    return found


if __name__ == "__main__":
    main()
