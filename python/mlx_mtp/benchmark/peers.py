"""Others that are measured beside us, where they are installed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryFile

from .. import blas
from ..telemetry import Telemetry
from .arms import Arm, Filters, Run


class MTPLX:
    """The package mtplx, in a process of its own: it needs another ``mlx_lm``.

    Between two requests that process sleeps. ``versions`` has those of its packages.

    Args:
        python (str): A Python that has it.
        folder (Path): The model's folder.
        dtype (str): That of the weights, such as ``"float32"``.
        filters (Filters): What may be drawn.
        stop_tokens: Ids that end a stream.

    Raises:
        RuntimeError: It cannot be imported there, or cannot load the model.
    """

    def __init__(
        self,
        python: str,
        folder: Path,
        dtype: str,
        filters: Filters,
        stop_tokens: Collection[int],
    ):
        self._filters = {"top_p": filters.top_p or 1.0, "top_k": filters.top_k}
        self._stop, self._errors = sorted(stop_tokens), TemporaryFile("w+")
        worker = Path(__file__).with_name("mtplx_worker.py")
        command = [python, str(worker), str(folder), dtype]
        command += blas.openblas()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.versions: dict[str, str | None] = self._read()

    def arm(self, depth: int) -> Arm:
        """Decoding with so many drafts a round; 0 is its plain decoding."""

        def arm(prompt, temperature, max_tokens, seed):
            request = {
                "prompt": list(map(int, prompt)),
                "max_tokens": max_tokens,
                "temperature": temperature,
                **self._filters,
                "depth": depth,
                "seed": seed,
                "stop": self._stop,
            }
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return _run(self._read())

        return arm

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["no message"]
            self.close()
            raise RuntimeError(f"mtplx has stopped: {last[0]}")
        return json.loads(line)


def _run(answer: dict) -> Run:
    accepted, rounds, mtp = answer["accepted"], answer["rounds"], None
    if rounds:
        mtp = Telemetry(
            rounds=rounds,
            drafted=sum(answer["drafted"]),
            accepted=sum(accepted),
            round_tokens=rounds + sum(accepted),
            reached_at=[rounds, *accepted[:-1]],
            accepted_at=accepted,
        )
    numbers = (answer[name] for name in ("seconds", "cpu", "first", "peak_bytes"))
    return Run(len(answer["tokens"]), *numbers, mtp)
