"""Runs the gateway's unpacked image as a container engine would: as its user, with its environment and command.

No daemon is there, which it has to say, and go on. Run by tests/container.sh, as root.
"""

import argparse
import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

URL = "http://127.0.0.1:8000"
SECONDS = 60
# $1: the root, $2: user:group, $3 ..: environment, then the command.
RUN = """
root=$1 user=$2
shift 2
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
exec chroot --userspec="$user" --groups= "$root" /usr/bin/env -i "$@"
"""


def status(path: str) -> int:
    try:
        with urllib.request.urlopen(URL + path, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True, help="The image's, as JSON.")
    given = parser.parse_args()
    config = json.loads(given.config.read_text())["config"]
    command = ["unshare", "--mount", "bash", "-e", "-c", RUN, "bash", str(given.root)]
    process = subprocess.Popen([*command, config["User"], *config["Env"], *config["Entrypoint"]])
    try:
        deadline = time.monotonic() + SECONDS
        while status("/openapi.json") != 200:
            assert process.poll() is None and time.monotonic() < deadline, "it does not serve"
            time.sleep(0.2)
        assert status("/health") == 503, "there is no daemon"
        [user] = {line.split()[1] for line in _status(process.pid) if line.startswith("Uid:")}
        assert user == config["User"].partition(":")[0]
    finally:
        process.terminate()
    assert process.wait(SECONDS) == 0
    print("the gateway's image serves")


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


if __name__ == "__main__":
    main()
