"""What orchestration costs: Ray's documented pattern, our path and no Ray, seconds per trial by phase.

python sweeps/overhead.py        about 4 minutes on 2 cores
"""

import sys

from tinydit_ray.sweep.cli import overhead, run

if __name__ == "__main__":
    sys.exit(run(overhead, sys.argv[1:]))
