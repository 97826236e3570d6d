"""What a server says of itself that endangers records, in sentences. This module reads."""

from __future__ import annotations


def dangers(info: bytes) -> list[str]:
    """Read the answer of INFO."""
    said = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    found = []
    policy = said.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            f"maxmemory-policy is {policy}: a full server forgets records and their operations "
            "run again; set it to noeviction"
        )
    if said.get("aof_enabled") == "0":
        found.append(
            "appendonly is off: a restart loses what was written since the last snapshot, and its "
            "operations run again; set appendonly yes, or put SQL behind"
        )
    found += [
        f"{name} is {said[name]}: the server cannot write to its disk"
        for name in ("rdb_last_bgsave_status", "aof_last_write_status")
        if said.get(name, "ok") != "ok"
    ]
    return found
