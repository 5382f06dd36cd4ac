"""What `epikv bench policies` measured, as the table that the daemon is built with."""

import re
from collections.abc import Mapping
from json import dumps, loads
from pathlib import Path
from typing import Any

ROW = '    {"'


def write_costs(results: Mapping[str, Any], path: Path) -> None:
    """Writes rows of policies/costs.inc; those of other policies stay. `results`:

    {"made_with": "...", "policies": {name: {"cpu_us_per_token": {"512": 1.5, "4096": 9.0},
    "share_of_step": {"512": 0.001, "4096": 0.004}, ...}}}

    A policy's row is of the number of cached tokens at which its share of a step is the largest. Where rows of another
    run stay, what made them stays, too.
    """
    rows, made_with = {}, str(results["made_with"])
    if path.exists():
        rows = {
            line.split('"')[1]: f"{line}\n"
            for line in path.read_text().splitlines()
            if line.startswith(ROW)
        }
        (before,) = re.findall(r"kMadeWith = (\".*\");", path.read_text())
        if rows.keys() - results["policies"].keys() and loads(before) != made_with:
            made_with = f"{loads(before)}; {', '.join(sorted(results['policies']))}: {made_with}"
    for name, cost in sorted(results["policies"].items()):
        shares = cost["share_of_step"]
        worst = max(shares, key=lambda tokens: (shares[tokens], int(tokens)))
        cpu = cost["cpu_us_per_token"][worst]
        rows[name] = f'{ROW}{name}", {int(worst)}, {cpu:.4g}, {shares[worst]:.3g}}},\n'
    path.write_text(
        "// Made by `epikv bench policies`; do not edit.\n"
        f"constexpr absl::string_view kMadeWith = {dumps(made_with)};\n"
        "constexpr std::initializer_list<PolicyCost> kCosts = {\n"
        + "".join(rows[name] for name in sorted(rows))
        + "};\n"
    )
