"""One attack, in a process of its own: reads its name and its Target from stdin, writes what became of it."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures" / "python"))

from attacks import Target, run

given = json.load(sys.stdin)
print(json.dumps(run(given.pop("name"), Target(**given))))
