"""`python -m benchmarks.serving`: a translator over HTTP, for 1 and 64 clients, beside a plain loop of `translate`.

The model has the default size and was trained for a moment: its speed is real, its translations are not.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from regard.data import Pair
from regard.serving import serve
from regard.tasks import translation
from regard.tasks.translation import Translator
from regard.train import Recipe

from .__main__ import COMMIT, RESULTS, machine
from .measure import save

SENTENCES, REPEATS, LENGTH = 64, 5, 12
FIELDS = ["case", "seconds", "sentences_per_second", "ratio", "repeats", "machine", "commit"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = train(Path(folder) / "run")
        began = time.perf_counter()
        with serve(run, port=0) as server:
            started = time.perf_counter() - began
            translator = Translator.load(run)
            lines = [" ".join(f"w{(n * 7 + k * k) % 997}" for k in range(4 + n % 12)) for n in range(SENTENCES)]

            def ask(line: str) -> str:
                connection = http.client.HTTPConnection("127.0.0.1", server.port)
                headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
                body = json.dumps({"text": line, "beam": 1, "max_length": LENGTH})
                connection.request("POST", "/translate", body, headers)
                answer = json.loads(connection.getresponse().read())
                connection.close()
                return answer["answers"][0]["text"]

            def loop() -> list[str]:
                return [translator.translate([line], beam=1, max_length=LENGTH)[0].text for line in lines]

            def clients(count: int) -> list[str]:
                with ThreadPoolExecutor(count) as pool:
                    return list(pool.map(ask, lines))

            cases: dict[str, Callable[[], list[str]]] = {
                "a loop of translate, line by line": loop,
                "serve, 1 client": lambda: clients(1),
                "serve, 64 clients": lambda: clients(64),
            }
            wanted = loop()
            seconds: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(REPEATS):
                for name, call in cases.items():
                    before = time.perf_counter()
                    if call() != wanted:
                        raise SystemExit(f"error: {name} gives other translations than translate")
                    seconds[name].append(time.perf_counter() - before)
    plain = median(seconds["a loop of translate, line by line"])
    rows = [
        {
            "case": name,
            "seconds": f"{median(found):.2f}",
            "sentences_per_second": f"{SENTENCES / median(found):.1f}",
            "ratio": f"{plain / median(found):.2f}",
            "repeats": REPEATS,
            "machine": machine(),
            "commit": COMMIT,
        }
        for name, found in seconds.items()
    ]
    rows.append({**rows[0], "case": "from loading to listening", "seconds": f"{started:.2f}"})
    rows[-1] |= {"sentences_per_second": "", "ratio": "", "repeats": 1}
    for row in rows:
        print(f"{row['case']:<36} {row['seconds']:>7} s  {row['sentences_per_second']:>7}/s  {row['ratio']:>5}")
    save(rows, RESULTS / "serving_cpu.csv", FIELDS)


def train(out: Path) -> Path:
    words = [f"w{n}" for n in range(997)]
    pairs = [Pair(" ".join(words[n : n + 8]), " ".join(words[n : n + 8])) for n in range(0, 980, 4)]
    translation.train(pairs, out=out, recipe=Recipe(steps=3), show=None)
    return out


if __name__ == "__main__":
    main()
