"""A process that leases faked devices and writes down when it had which; run by `test_leases`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from conformance.ranks.leases import Leases, Visible


def fake_leases(directory: Path, names: str) -> Leases:
    visible = Visible(variable="FAKE_VISIBLE_DEVICES", names=tuple(names.split(",")))
    return Leases(kind="fake", visible=visible, directory=directory)


def main(directory: str, names: str, counts: str, milliseconds: str) -> None:
    """Lease once per number in `counts`, and hold for so long each time."""
    leases = fake_leases(Path(directory), names)
    lines = []
    for count in map(int, counts.split(",")):
        with leases.hold(count, timeout=120.0) as devices:
            start = time.monotonic()
            Path(directory, f"{os.getpid()}.holds").write_text(str(devices))
            time.sleep(float(milliseconds) / 1000)
            held = " ".join(leases.visible.names[index] for index in devices)
            lines.append(f"{start} {time.monotonic()} {held}")
    Path(directory, f"{os.getpid()}.log").write_text("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
