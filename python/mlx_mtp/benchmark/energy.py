"""Joules of the processor, where the operating system gives them to a user."""

from __future__ import annotations

import sys
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class Joules:
    """The energy counters of all processor packages, which count every process.

    ``missing`` says why there are none; ``since`` then gives None.

    Args:
        folder (Path): Where Linux shows its power domains.
    """

    def __init__(self, folder: Path = POWERCAP):
        self._counters: list[tuple[Path, float]] = []
        self.missing: str | None = None
        if sys.platform == "darwin":
            self.missing = "macOS gives them to root alone: sudo powermetrics"
            return
        try:
            for domain in sorted(folder.glob("*:*")):
                if (domain / "name").read_text().startswith("package"):
                    wraps = float((domain / "max_energy_range_uj").read_text())
                    self._counters.append((domain / "energy_uj", wraps))
            self.read()
        except OSError as error:
            self._counters, self.missing = [], f"no right to read them: {error}"
        if not self._counters and self.missing is None:
            self.missing = f"this machine has no counter in {folder}"

    def read(self) -> list[float]:
        """What the counters show, in microjoules."""
        return [float(file.read_text()) for file, _ in self._counters]

    def since(self, before: list[float]) -> float | None:
        """Joules since an earlier ``read``, less than one turn of a counter ago."""
        if not self._counters:
            return None
        pairs = zip(self.read(), before, self._counters, strict=True)
        used = (
            now - then if now >= then else now - then + wraps
            for now, then, (_, wraps) in pairs
        )
        return sum(used) / 1e6
