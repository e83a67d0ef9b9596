"""`python -m tests.golden.compiled_beyond_warm MODEL…`: the kernels that these models compile although all were warmed.

Prints a JSON list of them; a kernel with more than one signature after warming counts, as one of them serves nothing.
"""

import json
import sys

from engine.ops.cpu import compiled
from engine.ops.cpu.warm import warm
from tests.golden.running import greedy, load


def main(models: list[str]) -> None:
    warm()
    warmed = compiled.variants()
    found = {kernel for kernel, signatures in warmed.items() if signatures != 1}
    for model in models:
        for kv_dtype in ("f32", "int8"):
            greedy(load(model, kv_dtype, 4), [[1, 2, 3], [4]], 2)
        found |= {kernel for kernel, signatures in compiled.variants().items() if signatures != warmed.get(kernel)}
    sys.stdout.write(json.dumps(sorted(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
